"""The supervisor's program on a disk that is full, was full, or lost what was written: always whole, and it always
runs."""

import os
import py_compile
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.errors import HostError
from podwatch.trainer import supervisor_files
from podwatch.trainer.supervisor_files import PROGRAM, is_whole, place, sealed
from tests.support.mounts import small_mount
from tests.support.pod import Pod

pytestmark = pytest.mark.slow

PROGRAM_BYTES = PROGRAM.read_bytes()
WHOLE = sealed(PROGRAM_BYTES)
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


def test_no_prefix_of_the_program_counts_as_whole() -> None:
    assert is_whole(WHOLE, PROGRAM_BYTES)
    assert not any(is_whole(WHOLE[:length], PROGRAM_BYTES) for length in range(len(WHOLE)))
    assert not is_whole(WHOLE, PROGRAM_BYTES + b"#"), "another version's"
    assert not is_whole(WHOLE + b"\0", PROGRAM_BYTES)


@given(at=st.integers(0, len(WHOLE) - 1), bit=st.integers(0, 7), length=st.integers(1, PAGE))
def test_no_lost_bit_and_no_lost_page_counts_as_whole(at: int, bit: int, length: int) -> None:
    flipped = WHOLE[:at] + bytes([WHOLE[at] ^ 1 << bit]) + WHOLE[at + 1 :]
    assert not is_whole(flipped, PROGRAM_BYTES)
    lost = WHOLE[:at] + bytes(len(WHOLE[at : at + length])) + WHOLE[at + length :]
    assert lost == WHOLE or not is_whole(lost, PROGRAM_BYTES)


@given(pyc=st.integers(-1, len(WHOLE)), py=st.integers(-1, len(PROGRAM_BYTES)), compiled=st.booleans())
def test_whatever_was_left_there_a_whole_program_takes_its_place(
    tmp_path_factory: pytest.TempPathFactory, pyc: int, py: int, compiled: bool
) -> None:
    """-1: not there at all."""
    directory = tmp_path_factory.mktemp("left")
    for name, content, length in (("supervise.pyc", WHOLE, pyc), ("supervise.py", PROGRAM_BYTES, py)):
        if length >= 0:
            (directory / name).write_bytes(content[:length])
    program, note = place(directory, compiled=compiled)
    assert (program, note) == (directory / ("supervise.pyc" if compiled else "supervise.py"), "")
    data = program.read_bytes()
    assert is_whole(data, PROGRAM_BYTES) if compiled else data == PROGRAM_BYTES
    again, _ = place(directory, compiled=compiled)
    assert again.read_bytes() == data
    assert {p.name for p in directory.iterdir()} <= {"supervise.py", "supervise.pyc"}


@pytest.mark.parametrize("length", [0, 8, 16, 17, len(WHOLE) // 2, len(WHOLE) - 100])
def test_a_truncated_program_is_replaced_by_one_that_runs(tmp_path: Path, length: int) -> None:
    (tmp_path / "supervise.pyc").write_bytes(WHOLE[:length])
    assert not runs(tmp_path / "supervise.pyc", tmp_path / "before"), "else this proves nothing"
    program, _ = place(tmp_path, compiled=True)
    assert runs(program, tmp_path / "after")


def test_a_compiled_one_without_a_checksum_is_replaced_only_by_a_whole_one(small: Path) -> None:
    """Nothing tells whether it is whole."""
    old = small / "supervise.pyc"
    py_compile.compile(
        str(PROGRAM), str(old), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    before = old.read_bytes()
    fill(small, 0)
    assert place(small, compiled=True)[0] == PROGRAM
    assert old.read_bytes() == before
    (small / "filler").unlink()
    assert place(small, compiled=True) == (old, "")
    assert is_whole(old.read_bytes(), PROGRAM_BYTES)


def test_at_every_fill_of_the_disk_the_program_is_whole(small: Path) -> None:
    seen: set[Path] = set()
    for leave in range(0, len(WHOLE) + len(PROGRAM_BYTES), PAGE):
        for path in small.glob("supervisor.*"):
            path.unlink()
        fill(small, leave)
        program, note = place(small, compiled=True)
        seen.add(program)
        assert is_whole(program.read_bytes(), PROGRAM_BYTES) or program.read_bytes() == PROGRAM_BYTES
        assert bool(note) is (program.name != "supervise.pyc")
        assert not list(small.glob(".*")), "nothing unfinished is left: it would take the room"
    assert seen >= {PROGRAM, small / "supervise.pyc"}


def test_a_whole_program_needs_no_room(small: Path) -> None:
    usual, _ = place(small, compiled=True)
    inode = usual.stat().st_ino
    fill(small, 0)
    assert place(small, compiled=True) == (usual, "")
    assert usual.stat().st_ino == inode


def test_in_the_middle_of_an_upgrade_the_copy_of_an_earlier_start_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, _ = place(tmp_path, compiled=True)
    monkeypatch.setattr(supervisor_files, "PROGRAM", tmp_path / "gone" / "supervise.py")
    program, note = place(tmp_path, compiled=True)
    assert program == usual
    assert "gone/supervise.py" in note
    assert runs(program, tmp_path / "after")
    usual.write_bytes(WHOLE[:-1])
    with pytest.raises(OSError, match=r"gone/supervise\.py"):
        place(tmp_path, compiled=True)
    usual.unlink()
    with pytest.raises(OSError, match=r"supervise\.py"):
        place(tmp_path, compiled=True)


def test_what_a_killed_start_left_unfinished_is_removed(tmp_path: Path) -> None:
    ours = [
        ".supervise.pyc.0badcafe.tmp",
        ".supervise.py.0badcafe.tmp",
        ".wanted.0badcafe.tmp",
        ".start-s1.json.0badcafe.tmp",
    ]
    others = ["supervise.pyc", "record.json", ".exit-s1.tmp", ".executed-s1.tmp", ".record.json.12.tmp"]
    for name in ours + others:
        (tmp_path / name).touch()
    supervisor_files.remove_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(others)


async def test_training_starts_where_no_copy_fits_and_from_a_copy_once_one_does(pod: Pod, small: Path) -> None:
    """The disk has room for the start's own small files, and for nothing of the size of the supervisor."""
    launcher = pod.launcher(state=small)
    (small / pod.run_id / "supervisor").mkdir(parents=True)
    (small / pod.run_id / "supervisor" / "supervise.pyc").write_bytes(WHOLE[:PAGE])
    fill(small, 13 * PAGE)
    handle = await launcher.start(pod.script("exec sleep 300"))
    (supervisor,) = pod.supervisors()
    assert str(PROGRAM) in Path(f"/proc/{supervisor}/cmdline").read_text().split("\0")
    log = (small / pod.run_id / "supervisor" / "supervisor.log").read_text()
    assert "supervise.pyc: No space left on device" in log
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
    assert any("supervise.pyc" in Path(f"/proc/{pid}/cmdline").read_text() for pid in pod.supervisors())
    await again.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
    await again.release()


async def test_a_compiled_supervisor_that_does_not_run_is_not_tried_twice(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the interpreter behind our environment was upgraded beneath us: it refuses what we compile."""
    launcher = pod.launcher()
    monkeypatch.setattr(supervisor_files.importlib.util, "MAGIC_NUMBER", b"\0\0\r\n")
    with pytest.raises(HostError, match=r"ended without an answer: .*magic"):
        await launcher.start(pod.script("exec sleep 300"))
    handle = await launcher.start(pod.script("exec sleep 300", start_id="s2"))
    assert any("supervise.py\0" in Path(f"/proc/{pid}/cmdline").read_text() for pid in pod.supervisors())
    await handle.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
    await handle.release()


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
