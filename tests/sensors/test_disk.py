import os
import shutil
import threading
from pathlib import Path

import pytest

from podwatch.domain.snapshot import SensorState
from podwatch.sensors import disk
from podwatch.sensors.disk import DiskSensor
from podwatch.system.clock import SystemClock
from tests.sensors.waiting import until


async def reading_of(sensor: DiskSensor):  # type: ignore[no-untyped-def]
    await sensor.start()
    try:
        await until(lambda: sensor.latest().state is not SensorState.PENDING)
        return sensor.latest()
    finally:
        await sensor.stop()


async def test_agrees_with_the_system(tmp_path: Path) -> None:
    reading = await reading_of(DiskSensor(tmp_path, SystemClock()))
    sample = reading.value
    assert sample is not None
    total, _, free = shutil.disk_usage(tmp_path)
    assert sample.capacity_bytes == total
    assert abs(sample.free_bytes - free) < 1 << 30  # others write meanwhile
    assert sample.used_bytes + sample.free_bytes == sample.capacity_bytes
    assert sample.path == str(tmp_path)
    assert sample.inodes_total == os.statvfs(tmp_path).f_files
    assert reading.detail == ""


async def test_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    target = tmp_path / "outputs" / "run" / "checkpoints"
    reading = await reading_of(DiskSensor(target, SystemClock()))
    assert reading.value is not None
    assert reading.value.path == str(tmp_path)
    assert f"{target} does not exist yet" in reading.detail


async def test_a_file_in_the_way_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reading = await reading_of(DiskSensor(tmp_path / "file" / "below", SystemClock()))
    assert reading.ok


async def test_configured_capacity_never_overstates_use(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    small = free // 4
    sample = (await reading_of(DiskSensor(tmp_path, SystemClock(), capacity_bytes=small))).value
    assert (sample.capacity_bytes, sample.used_bytes, sample.free_bytes) == (small, 0, small)
    known = small // 10 * 9
    sample = (await reading_of(DiskSensor(tmp_path, SystemClock(), small, known_bytes=lambda: known))).value
    assert (sample.used_bytes, sample.free_bytes) == (known, small - known)
    large = 4 * free
    sample = (await reading_of(DiskSensor(tmp_path, SystemClock(), capacity_bytes=large))).value
    assert sample.free_bytes <= free * 1.1  # never more room than the filesystem has
    sample = (await reading_of(DiskSensor(tmp_path, SystemClock(), small, known_bytes=lambda: 2 * small))).value
    assert (sample.used_bytes, sample.free_bytes, sample.used_ratio) == (small, 0, 1.0)


async def test_a_file_system_without_a_size_is_absent() -> None:
    reading = await reading_of(DiskSensor(Path("/proc"), SystemClock()))
    assert reading.state is SensorState.ABSENT
    assert "disk.capacity" in reading.detail


async def test_a_hung_mount_is_blind_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = os.statvfs

    def hung(path: Path) -> os.statvfs_result:  # a hung NFS mount cannot be made here without a kernel client
        gate.wait(30)
        return real(path)

    monkeypatch.setattr(disk.os, "statvfs", hung)
    sensor = DiskSensor(tmp_path, SystemClock(), poll=0.01, deadline=0.1)
    await sensor.start()
    await until(lambda: sensor.latest().state is SensorState.BLIND)
    gate.set()
    await until(lambda: sensor.latest().ok)
    await sensor.stop()


async def test_refusals_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> os.statvfs_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk.os, "statvfs", refused)
    reading = await reading_of(DiskSensor(tmp_path, SystemClock()))
    assert reading.state is SensorState.DENIED
    assert str(tmp_path) in reading.detail
