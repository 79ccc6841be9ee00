"""The GPU sensor on a real card, through the real driver. Skipped with one line where there is none.

Memory is taken by a child process through libcuda alone (no torch), and given back by killing it: what a silent death
looks like to NVML.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from podwatch.domain.finding import Verdict
from podwatch.domain.snapshot import GpuSample, GpuState, SensorState
from podwatch.sensors.gpu import GpuSensor, NvmlReader
from podwatch.system.clock import SystemClock
from tests.support.detecting import watch_a_death

MIB = 1 << 20
TAKEN = 1024 * MIB


HOLDER = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def check(result, what):
    if result: sys.exit(f"{what} failed with CUDA error {result}")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
check(cuda.cuInit(0), "cuInit")
bus = sys.argv[2].encode()
check(cuda.cuDeviceGetByPCIBusId(ctypes.byref(device), bus), "cuDeviceGetByPCIBusId")
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device), "cuCtxCreate")
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(int(sys.argv[1]))), "cuMemAlloc")
print("held", flush=True)
time.sleep(600)
"""


def bus_id(index: int) -> str:
    import pynvml

    pynvml.nvmlInit()
    try:
        found = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).busIdLegacy
        return found.decode() if isinstance(found, bytes) else str(found)
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def holding(index: int, size: int) -> Iterator[subprocess.Popen[str]]:
    """A process that holds ``size`` bytes on the device, until it is killed."""
    argv = [sys.executable, "-c", HOLDER, str(size), bus_id(index)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline().strip() != "held":
            pytest.skip(f"CUDA cannot take memory on this card: {process.stderr.read().strip()}")
        yield process
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def sensing(poll: float = 0.2) -> AsyncIterator[GpuSensor]:
    sensor = GpuSensor(NvmlReader(), SystemClock(), poll, 5.0)
    await sensor.start()
    try:
        began = time.monotonic()
        while sensor.latest().state is SensorState.PENDING:
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.01)
        yield sensor
    finally:
        await sensor.stop()


def used(sensor: GpuSensor, index: int) -> int:
    reading = sensor.latest()
    assert reading.value is not None, reading.detail
    return reading.value[index].memory_used_bytes or 0


async def test_every_device_shows_plausible_figures() -> None:
    async with sensing() as sensor:
        reading = sensor.latest()
        assert reading.ok, reading.detail
        assert reading.value
        for number, sample in enumerate(reading.value):
            assert isinstance(sample, GpuSample)
            assert sample.index == number
            assert sample.state is GpuState.OK, sample.detail
            assert sample.uuid.startswith("GPU-")
            assert sample.name
            assert sample.memory_total_bytes is not None
            assert sample.memory_total_bytes > 1024 * MIB
            assert sample.memory_used_bytes is not None
            assert 0 <= sample.memory_used_bytes <= sample.memory_total_bytes
            assert sample.utilization_percent is None or 0 <= sample.utilization_percent <= 100
            assert sample.temperature_celsius is None or 0 < sample.temperature_celsius < 120


async def test_a_killed_process_shows_as_memory_gone_within_the_hold() -> None:
    """Default hold is 8 s: the fall itself must show well within it."""
    async with sensing() as sensor:
        before = used(sensor, 0)
        with holding(0, TAKEN) as process:
            began = time.monotonic()
            while used(sensor, 0) < before + TAKEN:
                assert time.monotonic() - began < 10, "memory taken does not show"
                await asyncio.sleep(0.05)
            process.kill()
            killed = time.monotonic()
            while used(sensor, 0) > before + TAKEN // 4:
                assert time.monotonic() - killed < 8, "memory given back does not show"
                await asyncio.sleep(0.05)
            print(f"memory gone {time.monotonic() - killed:.2f} s after the kill")


async def test_the_detector_finds_a_silent_death_on_this_card() -> None:
    """The same detector, and the same code around it, as tests/sensors/test_silent_death.py runs on the stand-in."""
    async with sensing() as sensor:
        with holding(0, TAKEN) as process:
            await asyncio.sleep(1.0)
            finding, seconds = await watch_a_death(
                sensor, 0, lambda: process.poll() is None, process.kill, held_bytes=TAKEN
            )
    assert finding.verdict is Verdict.RESTART
    print(f"verdict {seconds:.1f} s after the kill")


async def test_a_look_is_quick_enough_for_the_default_rhythm() -> None:
    reader = NvmlReader()
    reader.read()
    try:
        times = []
        for _ in range(20):
            began = time.perf_counter()
            reader.read()
            times.append(time.perf_counter() - began)
    finally:
        reader.close()
    times.sort()
    print(f"one look at all devices: median {times[10] * 1e3:.1f} ms, worst {times[-1] * 1e3:.1f} ms")
    assert times[10] < 0.5  # a quarter of the default poll of 2 s
