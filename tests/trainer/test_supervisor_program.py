"""The supervisor's program on a disk that is full, was full, or lost what was written: always whole, and it always
runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.trainer import supervisor_files
from podwatch.trainer.supervisor_files import PROGRAM, place
from tests.support.mounts import small_mount
from tests.support.pod import Pod

pytestmark = pytest.mark.slow

PROGRAM_BYTES = PROGRAM.read_bytes()
PAGE = 4096


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_mount(tmp_path / "small", 1 << 20) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not allowed here")
        yield tmp_path / "small"


def fill(directory: Path, leave: int) -> Path:
    """A file that takes all but ``leave`` bytes."""
    filler = directory / "filler"
    filler.unlink(missing_ok=True)
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, PAGE):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                pass
    os.truncate(filler, filler.stat().st_size - leave)
    return filler


def runs(program: Path, directory: Path) -> bool:
    """The real interpreter executes it as a supervisor: one that was not asked to start anything says so."""
    directory.mkdir(exist_ok=True)
    done = subprocess.run(
        [getattr(sys, "_base_executable", sys.executable), "-I", "-S", "-E", program, "keep", directory, "none"],
        capture_output=True,
    )
    return (directory / "result-none.json").exists() and done.stderr == b""


@given(length=st.integers(-1, len(PROGRAM_BYTES)), lost=st.integers(0, len(PROGRAM_BYTES)))
def test_whatever_was_left_there_a_whole_program_takes_its_place(
    tmp_path_factory: pytest.TempPathFactory, length: int, lost: int
) -> None:
    """Cut at ``length`` (-1: not there at all), with a page of zeros from ``lost`` on."""
    directory = tmp_path_factory.mktemp("left")
    data = bytearray(PROGRAM_BYTES)
    data[lost : lost + PAGE] = bytes(len(data[lost : lost + PAGE]))
    if length >= 0:
        (directory / "supervise.py").write_bytes(data[:length])
    assert place(directory) == (directory / "supervise.py", "")
    assert (directory / "supervise.py").read_bytes() == PROGRAM_BYTES
    assert [p.name for p in directory.iterdir()] == ["supervise.py"]


def test_at_every_fill_of_the_disk_the_program_is_whole(small: Path) -> None:
    seen: set[Path] = set()
    for leave in range(0, len(PROGRAM_BYTES) + 2 * PAGE, PAGE):
        (small / "supervise.py").unlink(missing_ok=True)
        fill(small, leave)
        program, note = place(small)
        seen.add(program)
        assert program.read_bytes() == PROGRAM_BYTES
        assert bool(note) is (program == PROGRAM)
        assert not list(small.glob(".*")), "nothing unfinished is left: it would take the room"
    assert seen == {PROGRAM, small / "supervise.py"}


def test_a_whole_program_needs_no_room(small: Path) -> None:
    usual, _ = place(small)
    inode = usual.stat().st_ino
    fill(small, 0)
    assert place(small) == (usual, "")
    assert usual.stat().st_ino == inode


def test_in_the_middle_of_an_upgrade_the_copy_of_an_earlier_start_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, _ = place(tmp_path)
    monkeypatch.setattr(supervisor_files, "PROGRAM", tmp_path / "gone" / "supervise.py")
    program, note = place(tmp_path)
    assert program == usual
    assert "gone/supervise.py" in note
    assert runs(program, tmp_path / "after")
    usual.unlink()
    with pytest.raises(OSError, match=r"supervise\.py"):
        place(tmp_path)


def test_what_a_killed_start_left_unfinished_is_removed(tmp_path: Path) -> None:
    ours = [
        ".supervise.py.0badcafe.tmp",
        ".wanted.0badcafe.tmp",
        ".start-s1.json.0badcafe.tmp",
    ]
    others = ["supervise.py", "record.json", ".exit-s1.tmp", ".executed-s1.tmp", ".record.json.12.tmp"]
    for name in ours + others:
        (tmp_path / name).touch()
    supervisor_files.remove_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(others)


async def test_training_starts_where_no_copy_fits_and_from_a_copy_once_one_does(pod: Pod, small: Path) -> None:
    """The disk has room for the start's own small files, and for nothing of the size of the supervisor."""
    launcher = pod.launcher(state=small)
    (small / pod.run_id / "supervisor").mkdir(parents=True)
    (small / pod.run_id / "supervisor" / "supervise.py").write_bytes(PROGRAM_BYTES[:PAGE])
    fill(small, 13 * PAGE)
    handle = await launcher.start(pod.script("exec sleep 300"))
    (supervisor,) = pod.supervisors()
    assert str(PROGRAM) in Path(f"/proc/{supervisor}/cmdline").read_text().split("\0")
    log = (small / pod.run_id / "supervisor" / "supervisor.log").read_text()
    assert "supervise.py: No space left on device" in log
    adopted = (await pod.launcher(state=small).look()).handle
    assert adopted is not None
    assert adopted.launcher == handle.launcher
    await handle.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
    exit_ = await handle.exit_status()
    assert exit_ is not None
    assert exit_.signal == signal.SIGTERM
    await handle.release()
    (small / "filler").unlink()
    again = await launcher.start(pod.script("exec sleep 300", start_id="s2"))
    assert not any(str(PROGRAM) in Path(f"/proc/{pid}/cmdline").read_text() for pid in pod.supervisors())
    await again.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
    await again.release()


def test_a_reservation_that_does_not_fit_refuses_the_start(small: Path) -> None:
    """A write that takes only part is no success: the exit status of training must have its room."""
    out = small / "part"
    fill(small, PAGE)
    text = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("supervise", {str(PROGRAM)!r})
supervise = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supervise)
fd = os.open({str(out)!r}, os.O_WRONLY | os.O_CREAT)
try:
    supervise.write_all(fd, b" " * 3 * {PAGE})
except OSError as error:
    sys.exit(error.errno)
"""
    assert subprocess.run([sys.executable, "-c", text]).returncode == 28
