"""The host sensor on this machine, with real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from podwatch.domain.process import ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import HostSample, Reading, SensorState, TrainerSample, observed
from podwatch.sensors.host import HostSensor
from podwatch.sensors.xid import XidInbox
from podwatch.system import procfs
from podwatch.system.clock import SystemClock
from tests.sensors.waiting import until

HOG = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
files = [open("/dev/null") for _ in range(70)]
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hog() -> Iterator[ProcessSample]:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", HOG], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield sample(process.pid, "hog")
        process.kill()


def sample(pid: int, name: str) -> ProcessSample:
    stat = procfs.read_stat(pid)
    ticks = stat.start_ticks if stat is not None else 0
    return ProcessSample(ProcessIdentity(pid, ticks), 1, name, name, ProcessRole.OTHER)


class Tree:
    def __init__(self, *processes: ProcessSample) -> None:
        self.processes = processes

    def latest(self) -> Reading[TrainerSample]:
        return observed(TrainerSample(descendants=self.processes), 0.0)


async def look(sensor: HostSensor) -> HostSample:
    await sensor.start()
    try:
        await until(lambda: sensor.latest().state is not SensorState.PENDING)
        value = sensor.latest().value
        assert value is not None, sensor.latest().detail
        return value
    finally:
        await sensor.stop()


async def test_this_machine(hog: ProcessSample) -> None:
    clock = SystemClock()
    tree = (sample(os.getpid(), "python"), hog, sample(2**22 + 1, "gone"))
    seen = await look(HostSensor(clock, trainer=Tree(*tree), xids=XidInbox(clock)))
    assert 0 < seen.memory_available_bytes < seen.memory_total_bytes
    assert seen.shm_total_bytes is None or 0 <= (seen.shm_used_bytes or 0) <= seen.shm_total_bytes
    assert [use.name for use in seen.files] == ["hog", "python"]
    assert (seen.files[0].limit, seen.files_unreadable) == (100, 0)
    assert 73 <= seen.files[0].open_files <= 76  # 70, three standard streams, and perhaps one or two of Python's own


async def test_xids_do_not_wait_for_the_next_look() -> None:
    clock = SystemClock()
    inbox = XidInbox(clock)
    sensor = HostSensor(clock, trainer=Tree(), xids=inbox, poll=60.0)
    await sensor.start()
    await until(lambda: sensor.latest().ok)
    inbox.add(0, 79)
    value = sensor.latest().value
    assert value is not None
    assert [event.code for event in value.xids] == [79]
    await sensor.stop()


@pytest.mark.root
async def test_another_users_files_are_counted_or_said_to_be_unreadable(hog: ProcessSample) -> None:
    """As a hardened daemon sees them. From Linux 6.2 on the number is told to everybody, before that to nobody else."""
    program = f"""
import asyncio, os
from podwatch.sensors.host import HostSensor
from podwatch.sensors.xid import XidInbox
from podwatch.system.clock import SystemClock
from tests.sensors.test_host import Tree, look, sample
clock = SystemClock()
tree = (sample({hog.identity.pid}, "hog"),)
sensor = HostSensor(clock, trainer=Tree(*tree), xids=XidInbox(clock))
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)  # with everything imported: that user need not reach this Python
seen = asyncio.run(look(sensor))
print([use.open_files for use in seen.files], seen.files_unreadable, sensor.latest().detail)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=30)
    counted = {f"[{n}] 0" for n in range(73, 77)}
    refused = "[] 1 no permission to count the open files of 1 of 1 processes"
    assert done.stdout.strip() in counted | {refused}, done.stderr


async def test_without_meminfo_the_sensor_is_blind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    sensor = HostSensor(clock, trainer=Tree(), xids=XidInbox(clock))
    await sensor.start()
    await until(lambda: sensor.latest().state is SensorState.BLIND)
    assert "cannot read" in sensor.latest().detail
    await sensor.stop()
