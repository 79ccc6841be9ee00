"""GpuSensor over its child process, the real pynvml there, and a libnvidia-ml.so.1 whose world the test controls."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from podwatch.domain.snapshot import GpuSample, GpuState, Reading, SensorState
from podwatch.sensors import gpu as gpu_module
from podwatch.sensors.gpu import GpuSensor, NvmlReader
from podwatch.system.clock import SystemClock
from tests.sensors.waiting import until
from tests.support import nvml
from tests.support.nvml import GIB, NvmlWorld, build_nvml

POLL = 0.02
DEADLINE = 2.5


@asynccontextmanager
async def sensing(deadline: float = DEADLINE) -> AsyncIterator[GpuSensor]:
    sensor = GpuSensor(NvmlReader(wait=0.6 * deadline, deadline=4 * deadline), SystemClock(), POLL, deadline)
    await sensor.start()
    try:
        yield sensor
    finally:
        await sensor.stop()


def values(sensor: GpuSensor) -> tuple[GpuSample, ...]:
    return sensor.latest().value or ()


def shows(sensor: GpuSensor, condition: Callable[[Reading[tuple[GpuSample, ...]]], bool]) -> Callable[[], bool]:
    return lambda: condition(sensor.latest())


@pytest.fixture(autouse=True)
def quick_reopen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "REOPEN_MIN", 0.05)


async def test_pending_until_first_answer(world: NvmlWorld) -> None:
    sensor = GpuSensor(NvmlReader(), SystemClock(), POLL, DEADLINE)
    assert sensor.latest().state is SensorState.PENDING


async def test_reads_every_device_and_follows_changes(world: NvmlWorld) -> None:
    world.set_memory(0, 20 * GIB)
    world.set_load(0, utilization=97, temperature=71)
    async with sensing() as sensor:
        await until(lambda: sensor.latest().ok)
        first, second = values(sensor)
        assert (first.index, first.state, first.memory_used_bytes) == (0, GpuState.OK, 20 * GIB)
        assert (first.memory_total_bytes, first.utilization_percent, first.temperature_celsius) == (
            80 * GIB,
            97.0,
            71.0,
        )
        assert (first.uuid, first.name) == ("GPU-00000000-0000-0000-0000-000000000000", "Stand-in 0")
        assert (second.index, second.memory_used_bytes) == (1, 0)
        world.set_memory(0, 0)
        await until(lambda: [s.memory_used_bytes for s in values(sensor)[:1]] == [0])


async def test_looks_again_at_once_when_asked(world: NvmlWorld) -> None:
    """A restart waits for the GPUs to be free: not for the sensor's next turn."""
    sensor = GpuSensor(NvmlReader(), SystemClock(), 60.0, DEADLINE)
    await sensor.start()
    try:
        await until(lambda: sensor.latest().ok)
        world.set_memory(0, 7 * GIB)
        sensor.wake()
        await until(lambda: [s.memory_used_bytes for s in values(sensor)[:1]] == [7 * GIB])
    finally:
        await sensor.stop()


async def test_reserved_memory_is_not_counted(world: NvmlWorld) -> None:
    world.set_reserved(0, 3 * GIB)
    world.set_memory(0, GIB)
    async with sensing() as sensor:
        await until(lambda: sensor.latest().ok)
        assert values(sensor)[0].memory_used_bytes == GIB


async def test_version_1_where_a_device_has_no_version_2(world: NvmlWorld) -> None:
    world.set_reserved(0, 3 * GIB)
    world.set_memory(0, GIB)
    world.not_supported(0, "memory_v2")
    async with sensing() as sensor:
        await until(lambda: sensor.latest().ok)
        assert [s.memory_used_bytes for s in values(sensor)] == [4 * GIB, 0]  # the other device keeps version 2


async def test_missing_figures_are_none(world: NvmlWorld) -> None:
    world.not_supported(0, "utilization", "temperature", "uuid")
    async with sensing() as sensor:
        await until(lambda: sensor.latest().ok)
        first = values(sensor)[0]
        assert (first.state, first.utilization_percent, first.temperature_celsius) == (GpuState.OK, None, None)
        assert (first.uuid, first.memory_used_bytes) == ("", 0)


@pytest.mark.parametrize(
    ("harm", "state", "words"),
    [
        (lambda w: w.lost(1), GpuState.LOST, "reboot"),
        (lambda w: w.not_supported(1, "memory"), GpuState.NOT_SUPPORTED, "does not report"),
        (lambda w: w.fail(1, nvml.NO_PERMISSION), GpuState.ERROR, "DeviceAllow"),
        (lambda w: w.fail(1, nvml.RESET_REQUIRED), GpuState.ERROR, "reset"),
        (lambda w: w.fail(1, nvml.UNKNOWN), GpuState.ERROR, "Unknown"),
    ],
)
async def test_trouble_of_one_device_is_its_own(
    world: NvmlWorld, harm: Callable[[NvmlWorld], None], state: GpuState, words: str
) -> None:
    world.set_memory(0, 5 * GIB)
    async with sensing() as sensor:
        await until(lambda: sensor.latest().ok)
        harm(world)
        await until(lambda: [s.state for s in values(sensor)[1:]] == [state])
        healthy, ill = values(sensor)
        assert sensor.latest().state is SensorState.OK
        assert (healthy.state, healthy.memory_used_bytes) == (GpuState.OK, 5 * GIB)
        assert ill.memory_used_bytes is None
        assert words in ill.detail
        assert (ill.uuid, ill.name) == ("GPU-00000000-0000-0000-0000-000000000001", "Stand-in 1")


async def test_a_device_lost_before_the_start_shows(world: NvmlWorld) -> None:
    world.lost(0)
    async with sensing() as sensor:
        await until(lambda: sensor.latest().ok)
        assert [s.state for s in values(sensor)] == [GpuState.LOST, GpuState.OK]


async def test_a_hang_blinds_within_the_deadline_and_heals(world: NvmlWorld) -> None:
    async with sensing(3.0) as sensor:  # a moment in which nothing runs is no hang
        await until(lambda: sensor.latest().ok)
        world.hang(1)
        ticks = 0
        began = time.monotonic()
        while sensor.latest().state is not SensorState.BLIND:
            await asyncio.sleep(0.01)
            ticks += 1
            assert time.monotonic() - began < 60
        assert ticks > 1  # the loop kept turning while the call hung
        assert sensor.latest().value is None
        assert "no answer" in sensor.latest().detail
        world.hang(1, False)
        await until(lambda: sensor.latest().ok)


async def test_stop_is_prompt_while_a_call_hangs(world: NvmlWorld) -> None:
    sensor = GpuSensor(NvmlReader(), SystemClock(), POLL, 30.0)
    await sensor.start()
    await until(lambda: sensor.latest().ok)
    world.hang_all()
    await asyncio.sleep(5 * POLL)
    began = time.monotonic()
    await sensor.stop()
    assert time.monotonic() - began < 15  # the deadline of the call is 30
    world.hang_all(False)


async def test_an_init_that_hangs_is_blind(world: NvmlWorld) -> None:
    world.hang_init()
    async with sensing() as sensor:
        await until(lambda: sensor.latest().state is SensorState.BLIND)
        world.hang_init(False)
        await until(lambda: sensor.latest().ok)


@pytest.mark.parametrize(
    ("code", "state", "words"),
    [
        (nvml.DRIVER_NOT_LOADED, SensorState.ABSENT, "nvidia-smi must work"),
        (nvml.NO_PERMISSION, SensorState.DENIED, "/dev/nvidiactl"),
        (nvml.LIB_RM_VERSION_MISMATCH, SensorState.BLIND, "reboot"),
        (nvml.UNKNOWN, SensorState.BLIND, "nvidia-smi"),
    ],
)
async def test_a_library_that_cannot_start_says_why_and_is_tried_again(
    world: NvmlWorld, code: int, state: SensorState, words: str
) -> None:
    world.fail_library(code)
    async with sensing() as sensor:
        # A first look that takes longer than the deadline is blind for another reason.
        await until(lambda: sensor.latest().state is state and words in sensor.latest().detail)
        world.fail_library(0)
        await until(lambda: sensor.latest().ok)


async def test_a_driver_that_goes_away_is_reported_and_found_again(world: NvmlWorld) -> None:
    async with sensing() as sensor:
        await until(lambda: sensor.latest().ok)
        world.fail_library(nvml.DRIVER_NOT_LOADED)
        await until(lambda: sensor.latest().state is SensorState.ABSENT)
        world.fail_library(0)
        await until(lambda: sensor.latest().ok)


async def test_no_device_is_absent(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = NvmlWorld(tmp_path / "none", devices=0)
    for name, value in world.environment(nvml_library).items():
        monkeypatch.setenv(name, value)
    async with sensing() as sensor:
        await until(lambda: sensor.latest().state is SensorState.ABSENT)
        assert "shows no GPU" in sensor.latest().detail


ONE_READING = """
import asyncio, sys
from podwatch.domain.snapshot import SensorState
from podwatch.sensors.gpu import GpuSensor, NvmlReader
from podwatch.system.clock import SystemClock

async def main():
    sensor = GpuSensor(NvmlReader(), SystemClock(), 0.02, 5.0)
    await sensor.start()
    while sensor.latest().state is SensorState.PENDING:
        await asyncio.sleep(0.005)
    await sensor.stop()
    return sensor.latest()

reading = asyncio.run(main())
assert "pynvml" not in sys.modules
assert "libnvidia-ml" not in open("/proc/self/maps").read(), "podwatch itself never loads the library"
print(reading.state, [(s.memory_used_bytes, s.temperature_celsius) for s in reading.value or ()], reading.detail)
"""


def one_reading(environment: dict[str, str]) -> str:
    """A whole process: start, one reading, exit. Returns what it printed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "NVML_STANDIN")}
    done = subprocess.run(
        [sys.executable, "-c", ONE_READING], env=clean | environment, capture_output=True, text=True, timeout=30,
        check=True,
    )  # fmt: skip
    return done.stdout


def test_an_absent_library_is_absent_with_the_fix() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver: its library cannot be absent")
    said = one_reading({})
    assert said.startswith("absent [] libnvidia-ml.so.1 was not found")
    assert "--gpus all" in said


def test_an_old_driver_is_read_by_the_old_calls(tmp_path: Path, nvml_library: Path) -> None:
    world = NvmlWorld(tmp_path / "world")
    world.set_memory(0, GIB)
    world.set_reserved(0, GIB)
    said = one_reading(world.environment(build_nvml(tmp_path / "old", old_driver=True)))
    assert said.startswith(f"ok [({2 * GIB}, 40.0)]")
