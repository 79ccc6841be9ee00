"""The time that a start gets is that of the file system on which its checkpoints appear."""

import contextlib
from pathlib import Path

import pytest

from podwatch.system.clock import SystemClock
from podwatch.system.files_clock import NAME, FilesClock
from podwatch.system.own_directories import Workspace
from tests.support.mounts import small_mount


class WrongClock(SystemClock):
    """Of a machine whose time is off by a year."""

    def wall(self) -> float:
        return super().wall() - 365 * 86_400.0


def clock_of(output: Path, checkpoints: Path | None = None) -> FilesClock:
    beside = () if checkpoints is None else (checkpoints,)
    return FilesClock(Workspace(output, beside=beside).probe(), checkpoints or output, WrongClock())


def test_its_time_is_between_two_saves_whatever_the_machine_says(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    clock = clock_of(output)
    for number in range(20):
        before, after = output / f"a{number}", output / f"b{number}"
        before.write_bytes(b"x")
        now = clock.now()
        after.write_bytes(b"x")
        assert before.stat().st_mtime_ns / 1e9 <= now <= after.stat().st_mtime_ns / 1e9
    assert [p.name for p in tmp_path.rglob(NAME)] == [NAME], "one file, which is written again"
    assert not list(output.rglob(NAME)), "nothing of it in the trainer's directory"


def test_before_the_directory_of_the_checkpoints_exists(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    now = FilesClock(Workspace(output).probe(), output / "checkpoints", WrongClock()).now()
    assert abs(now - SystemClock().wall()) < 60


def test_it_lies_on_the_file_system_of_the_checkpoints(tmp_path: Path) -> None:
    output, volume = tmp_path / "out", tmp_path / "volume"
    output.mkdir()
    with small_mount(volume, 1 << 20) as mounted:
        if not mounted:
            pytest.skip("needs a mount")
        clock_of(output, volume).now()
        devices = {p.stat().st_dev for p in tmp_path.rglob(NAME)}
        assert volume.stat().st_dev in devices


def test_on_a_full_disk_it_is_read_all_the_same(tmp_path: Path) -> None:
    with small_mount(tmp_path / "volume", 256 << 10) as mounted:
        if not mounted:
            pytest.skip("needs a mount")
        output = tmp_path / "volume" / "out"
        output.mkdir()
        clock = clock_of(output)
        first = clock.now()
        with contextlib.suppress(OSError):
            (output / "big").write_bytes(b"x" * (1 << 20))
        with pytest.raises(OSError, match="space"):
            (output / "more").write_bytes(b"x" * 65_536)
        assert clock.now() > first


def test_where_nothing_can_be_written_it_is_the_machines(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    workspace = Workspace(output)
    (tmp_path / ".podwatch").write_bytes(b"no directory")
    (output / ".podwatch").write_bytes(b"no directory")
    assert FilesClock(workspace, output, WrongClock()).now() < SystemClock().wall() - 300 * 86_400
