"""SIGKILL at any moment of a restore: nothing half done is ever visible, and only what was on its way comes again."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from podwatch.sync.restore import stage_and_put_in_place
from podwatch.sync.restore.child_job import Fetched, FetchJob
from podwatch.sync.restore.restore import Patience
from podwatch.sync.restore.stage_and_put_in_place import StagingArea
from podwatch.sync.restore.start_child import FetchProcess

from podwatch.domain.errors import Busy, HostError, RemoteError
from podwatch.system.own_directories import Workspace
from tests.sync.conftest import World
from tests.sync.test_fetch import job, stored
from tests.sync.test_restore import fresh, tree

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("PODWATCH_CRASH_ROUNDS", "40"))
SEED = int(os.environ.get("PODWATCH_CRASH_SEED", "7"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["b2", "file"])
def test_crash_rounds(kind: str, tmp_path: Path) -> None:
    rounds = max(1, ROUNDS * 4 // 5 if kind == "b2" else ROUNDS // 5)
    command = [sys.executable, "-m", "tests.support.restore_rounds", str(tmp_path), kind, str(rounds), str(SEED)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=3600
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stderr[-3000:]}"
    told = json.loads(done.stdout)
    print(told)
    assert told["kills"] >= rounds


def test_killed_and_taken_up(b2: World, tmp_path: Path) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    b2.server.pace(rate=5e5)
    pod = fresh(b2)
    restorer = pod.restorer()
    ended: list[BaseException] = []
    source = next(p for p in (b2.output / "checkpoints" / "step_10").rglob("*") if p.stat().st_size > 1 << 20)
    last_piece = source.read_bytes()[source.stat().st_size // manifest.part_size * manifest.part_size :]

    def run() -> None:
        try:
            restorer.fetch()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    staged = Workspace(pod.output).staging
    while not any(p.read_bytes().endswith(last_piece) for p in staged.rglob(source.name)):
        assert not ended, ended
        time.sleep(0.05)
    with pytest.raises(Busy):  # the same place cannot be filled by two
        _quick_lock(pod)
    restorer.kill()
    thread.join(60)
    assert isinstance(ended[0], HostError)
    assert "stopped" in str(ended[0])
    assert not (pod.output / "checkpoints" / "step_10").exists()
    b2.server.pace()
    before = b2.server.sent()
    report = pod.restorer().fetch()
    assert tree(pod.output / "checkpoints" / "step_10") == tree(b2.output / "checkpoints" / "step_10")
    assert report.downloaded_bytes <= b2.server.sent() - before
    assert report.downloaded_bytes <= report.total_bytes - len(last_piece), "what was there was fetched again"
    pod.journal.close()


def _quick_lock(pod: World) -> None:
    seconds, stage_and_put_in_place.LOCK_SECONDS = stage_and_put_in_place.LOCK_SECONDS, 0.1
    try:
        with StagingArea(Workspace(pod.output), None).alone():
            pass
    finally:
        stage_and_put_in_place.LOCK_SECONDS = seconds


def test_a_child_that_dies_is_told_from_one_that_fails(b2: World, tmp_path: Path) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    b2.server.pace(rate=2e5)
    process = FetchProcess(b2.credentials)

    def shoot(here: int, came: int) -> None:
        assert process.pid is not None
        os.kill(process.pid, 9)

    with pytest.raises(HostError, match="ended early"):
        process.fetch(job(b2, manifest, tmp_path / "s"), shoot)
    b2.server.pace()
    b2.key = "wrong"
    with pytest.raises(RemoteError, match="refuses the key") as caught:
        process.fetch(job(b2, manifest, tmp_path / "s"), lambda _here, _came: None)
    assert not caught.value.transient
    assert "wrong" not in str(caught.value)


def test_an_outage_is_waited_out(b2: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert b2.server is not None
    stored(b2)
    pod = fresh(b2)
    restorer, server, heard = pod.restorer(), b2.server, []
    restorer._patience = Patience(60.0, lambda error, seconds: heard.append((error.what, seconds)))
    failures = [RemoteError("store cannot be reached"), RemoteError("store cannot be reached")]
    real = restorer._fetcher.fetch

    def flaky(wanted: FetchJob, told: object, keep_open: object = ()) -> Fetched:
        if failures:
            raise failures.pop()
        return real(wanted, told, keep_open)  # type: ignore[arg-type]

    monkeypatch.setattr(restorer._fetcher, "fetch", flaky)
    monkeypatch.setattr(restorer._killed, "wait", lambda _seconds: False)
    assert restorer.fetch().step == 10
    assert heard == [("store cannot be reached", 5.0), ("store cannot be reached", 5.0)]
    assert server.violations() == []
    pod.journal.close()
