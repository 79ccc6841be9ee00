"""The silent-death detector over a running GPU sensor: the same code for a real card and for the stand-in."""

import asyncio
import time
from collections.abc import Callable

from tests.drivers.detection import (
    Finding,
    FindingKind,
    GpuSensor,
    ProcessIdentity,
    ProcessRole,
    ProcessSample,
    ProgressSample,
    ProgressSource,
    Snapshot,
    Supervision,
    TrainerSample,
    advance,
    initial,
    judging,
    lasting_seconds,
    observed,
)

TURN = 0.2
LAUNCHER = ProcessSample(ProcessIdentity(1_000_001, 1), 1, "rl", "uv run rl", ProcessRole.LAUNCHER)
ENGINE = ProcessSample(ProcessIdentity(1_000_002, 2), 1_000_001, "VLLM::EngineCor", "", ProcessRole.ENGINE)


async def watch_a_death(
    sensor: GpuSensor, index: int, engine_alive: Callable[[], bool], kill: Callable[[], None], *, held_bytes: int
) -> tuple[Finding, float]:
    """Watch until the detector is armed, ``kill()``, and watch on: the first finding and the seconds it took.

    ``held_bytes`` is what the engine holds on device ``index``. Memory comes from the sensor; the process tree is made
    up around ``engine_alive``. Fails if anything is found before the kill, or nothing within 15 s after it.
    """
    # A GPU of its own is empty below the floor; a test holds less than a model does, so the mark comes down.
    base = _used(sensor, index) - held_bytes
    policy = judging(gpu__inference=(index,), gpu__floor=base + (held_bytes - base) // 4, gpu__hold=2.0)
    lived = lasting_seconds(policy.gpu) + 1.0  # else it is a fork that was about to become something else
    state, killed, step = initial(policy), None, 0
    began = time.monotonic()
    while True:
        now = time.monotonic()
        step += 1
        tree = (LAUNCHER, ENGINE) if engine_alive() else (LAUNCHER,)
        trainer = TrainerSample("start", Supervision.SUPERVISED, True, began, LAUNCHER.identity, None, tree)
        progress = (ProgressSample(ProgressSource.STEP_LINE, "trainer", now, step),)
        snapshot = Snapshot(
            at=now,
            wall=time.time(),
            gpus=sensor.latest(),
            trainer=observed(trainer, now),
            progress=observed(progress, now),
        )
        state, findings = advance(state, snapshot, policy)
        deaths = [f for f in findings if f.kind is FindingKind.SILENT_DEATH]
        if killed is None:
            assert not deaths, "a verdict on an engine that lives"
            assert now - began < 30, f"never armed: {state.armed}"
            if f"silent-death:gpu{index}" in state.armed and now - began > lived:
                kill()
                killed = time.monotonic()
        elif any(f.confirmed for f in deaths):
            return next(f for f in deaths if f.confirmed), now - killed
        else:
            assert now - killed < 15, f"no verdict; GPU shows {_used(sensor, index)} bytes"
        await asyncio.sleep(TURN)


def _used(sensor: GpuSensor, index: int) -> int:
    reading = sensor.latest()
    assert reading.value is not None, reading.detail
    return reading.value[index].memory_used_bytes or 0
