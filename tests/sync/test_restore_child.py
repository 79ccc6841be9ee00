"""The process of a restore: it may be killed at any moment, nothing is lost or counted twice, none is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from podwatch.sync.restore.pieces_on_disk import StagedFile
from podwatch.sync.restore.start_child import FetchProcess

from podwatch.domain.errors import HostError, IntegrityError
from podwatch.system import procfs
from podwatch.system.environment_without_secrets import scrubbed_environment
from tests.sync.conftest import World
from tests.sync.test_fetch import PIECE, fetch, job, same, stored
from tests.sync.test_restore import damage

pytestmark = pytest.mark.slow


def gone(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is None or stat.state == "Z"


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def shot(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@pytest.mark.parametrize("how", ["the child is killed", "podwatch is killed", "nobody listens any more"])
def test_no_process_is_left(b2: World, tmp_path: Path, how: str) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    b2.server.pace(rate=3e5)
    line = job(b2, manifest, tmp_path / "s").to_line(b2.credentials())
    # What FetchProcess does, in a process between us and the child that can be killed.
    program = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-P', '-m', 'podwatch.sync.restore.child_main', str(os.getpid())],\n"
        "                         stdin=subprocess.PIPE, cwd='/')\n"
        "child.stdin.write(sys.stdin.buffer.readline()); child.stdin.flush()\n"
        "sys.stdin.buffer.read(1); child.stdin.close(); child.wait(); sys.stdin.buffer.read()\n"
    )
    podwatch = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=scrubbed_environment(os.environ),
    )
    assert podwatch.stdin is not None
    try:
        podwatch.stdin.write(line)
        podwatch.stdin.flush()
        before = b2.server.sent()
        wait_for(lambda: b2.server is not None and b2.server.sent() > before + 500_000, "nothing is fetched")
        (child,) = procfs.children(podwatch.pid)
        if how == "the child is killed":
            shot(child)
        elif how == "podwatch is killed":
            shot(podwatch.pid)
        else:
            podwatch.stdin.write(b"x")
            podwatch.stdin.flush()
        wait_for(lambda: gone(child), f"{child} is left")
    finally:
        podwatch.kill()
        podwatch.stdin.close()
        podwatch.wait()
    b2.server.pace()
    FetchProcess(b2.credentials).fetch(job(b2, manifest, tmp_path / "s"), lambda _here, _came: None)
    assert same(b2, tmp_path / "s")


def test_when_a_stopped_restore_returns_nothing_writes_any_more(b2: World, tmp_path: Path) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    b2.server.pace(rate=3e5)
    process = FetchProcess(b2.credentials)
    pids: list[int] = []

    def stop(_here: int, _came: int) -> None:
        assert process.pid is not None
        pids.append(process.pid)
        process.kill()

    with pytest.raises(HostError, match="was stopped"):
        process.fetch(job(b2, manifest, tmp_path / "s"), stop)
    assert pids
    assert gone(pids[0]), "at once: the next restore may write there now"


def test_a_part_that_is_damaged_in_the_store_keeps_its_error(b2: World, tmp_path: Path) -> None:
    manifest = stored(b2)
    damage(b2, 10, "model.bin", at=2 * PIECE + 3)
    told: list[tuple[int, int]] = []
    with pytest.raises(IntegrityError, match="does not match its recorded hash") as caught:
        FetchProcess(b2.credentials).fetch(job(b2, manifest, tmp_path / "s"), lambda *seen: told.append(seen))
    assert caught.value.where == "checkpoint/model.bin part 3"
    assert max((here for here, _ in told), default=0) <= manifest.total_bytes, "no piece counts twice"


def test_a_fresh_piece_is_not_read_as_if_it_had_been_there(
    b2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces share blocks of the disk with their neighbours: whether one was there is seen before any is written."""
    manifest = stored(b2)

    def never(_self: StagedFile, number: int) -> bool:
        raise AssertionError(f"piece {number} is read")

    monkeypatch.setattr(StagedFile, "good", never)
    fetch(b2, job(b2, manifest, tmp_path / "s"))
    assert same(b2, tmp_path / "s")
