"""Recovery with the real supervisor and real trees that misbehave, one after the other; never two trainers."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from podwatch.domain.finding import FindingKind
from podwatch.recovery import Phase
from podwatch.system.own_directories import Workspace
from podwatch.trainer.start_and_adopt import SupervisorLauncher, SupervisorOptions
from tests.recovery.test_with_supervisor import RealTime, running_trainers
from tests.support.known_trainers import ROLES
from tests.support.recovery_world import GIB, Podwatch, World, death

pytestmark = pytest.mark.slow

TRAINER = """
import fcntl, os, signal, subprocess, sys, time
from pathlib import Path
out = Path(sys.argv[1])
step = int(sys.argv[sys.argv.index("--resume") + 1]) if "--resume" in sys.argv else 0
lock = open(out.parent / "lock", "a"); os.set_inheritable(lock.fileno(), True)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (out.parent / "double").write_text("two at once")
with (out.parent / "starts").open("a") as f:
    f.write(f"{step}\\n")
mode = (out.parent / "mode").read_text()
if mode == "crash":
    sys.exit(3)
if mode == "poison" and step == 15:
    print("RuntimeError: cannot load checkpoints/step_15: file is truncated", flush=True)
    sys.exit(1)
if mode == "stubborn":  # a child that ignores SIGTERM, and a daemon that left its session; both hold the lock
    subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"], close_fds=False)
    subprocess.Popen(["setsid", "sh", "-c", "(sleep 300 &) ; exec sleep 300"], close_fds=False)
(out.parent / f"up{len((out.parent / 'starts').read_text().split())}").write_text("")
time.sleep(600)
"""


class Pod:
    """A world whose trainers are kept by the real supervisor."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.script = world.root / "trainer.py"
        self.script.write_text(TRAINER)
        self.mode("steady")
        command = [sys.executable, "-S", str(self.script), str(world.output)]
        world.settings_extra["trainer"] = {"command": command, "stop_grace": 0.3, "save_grace": 0.3}
        self.launcher = SupervisorLauncher(
            "r1", world.output, world.root / "state", RealTime(), use_systemd=False, roles=ROLES,
            options=SupervisorOptions(beside=Workspace(world.output).outside, grace=1.0, linger=5.0),
        )  # fmt: skip
        self.podwatch = Podwatch(world)
        object.__setattr__(self.podwatch.recovery.context.tools, "launcher", self.launcher)
        self.podwatch.environment.variables = {"PATH": "/usr/bin:/bin"}

    def mode(self, what: str) -> None:
        (self.world.root / "mode").write_text(what)

    @property
    def starts(self) -> list[int]:
        path = self.world.root / "starts"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    async def up(self, count: int) -> None:
        await self.until((self.world.root / f"up{count}").exists)

    async def comes_up(self, count: int) -> bool:
        """Wait for the trainer that runs, the ``count``-th, to be up; False when it ends instead."""
        handle = self.podwatch.recovery.handle
        assert handle is not None
        end = time.monotonic() + 60
        while not (self.world.root / f"up{count}").exists():
            if await handle.exit_status() is not None:
                return False
            assert time.monotonic() < end, "neither up nor ended"
            await asyncio.sleep(0.005)
        return True

    async def until(self, check: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not check():
            assert time.monotonic() < end, "did not happen in time"
            await asyncio.sleep(0.005)

    async def dies(self, *phases: Phase) -> None:
        """Wait for the end of the trainer that runs, judge it, and wait for what follows."""
        handle = self.podwatch.recovery.handle
        assert handle is not None
        while await handle.exit_status() is None:
            await asyncio.sleep(0.005)
        self.podwatch.see(finding=death())
        await self.podwatch.until(*phases, seconds=60)

    async def end(self) -> None:
        await self.podwatch.recovery.requests.stop()
        await self.podwatch.until(Phase.STOPPED, seconds=60)
        assert running_trainers(self.script) == []
        assert not (self.world.root / "double").exists()
        await self.podwatch.leave()
        await self.launcher.close()


@pytest.fixture
def steady(world: World) -> Iterator[World]:
    yield world
    for pid in running_trainers(world.root / "trainer.py"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def begun(world: World) -> Pod:
    pod = Pod(world)
    await pod.podwatch.recovery.begin()
    await pod.podwatch.until(Phase.CONFIRMING, seconds=60)
    await pod.up(1)
    for step in (10, 15):
        world.save(step)
    pod.podwatch.see(17)
    return pod


async def test_ten_crashes_in_a_row_and_then_it_works(steady: World) -> None:
    """A run that worked is given up only when count and time are both exhausted; each crash costs one start."""
    steady.settings_extra["recovery"] = {"budget_restarts": 100, "backoff_min": 0.1, "backoff_max": 0.2}
    pod = await begun(steady)
    pod.mode("crash")
    pod.podwatch.see(18, finding=death(FindingKind.HANG))
    await pod.podwatch.until(Phase.CONFIRMING, seconds=60)
    for number in range(2, 11):
        await pod.until(lambda number=number: len(pod.starts) >= number)  # type: ignore[misc]
        await pod.dies(Phase.CONFIRMING)
    pod.mode("steady")
    for number in (11, 12):  # the eleventh may have read the old word still
        await pod.until(lambda number=number: len(pod.starts) >= number)  # type: ignore[misc]
        if await pod.comes_up(number):
            break
        await pod.dies(Phase.CONFIRMING)
    await pod.up(len(pod.starts))
    assert set(pod.starts[1:]) == {15}, "a start that never loaded is no reason to step back"
    assert 11 <= len(pod.starts) <= 12
    await pod.end()


async def test_a_poison_checkpoint_is_left_after_two_proven_failures(steady: World) -> None:
    pod = await begun(steady)
    pod.mode("poison")
    steady.gpu_used = 20 * GIB  # it was read into the GPU
    pod.podwatch.recovery.context.note(gpu_base={0: 0})
    steady.lines = ["RuntimeError: cannot load checkpoints/step_15: file is truncated"]
    pod.podwatch.see(18, finding=death(FindingKind.HANG))
    steady.gpu_used = 0
    await pod.podwatch.until(Phase.CONFIRMING, seconds=60)
    for _ in range(2):
        steady.gpu_used = 20 * GIB
        pod.podwatch.see()
        steady.gpu_used = 0
        await pod.dies(Phase.CONFIRMING)
    await pod.up(4)
    assert pod.starts == [0, 15, 15, 10]
    await pod.end()


async def test_a_stubborn_tree_is_gone_before_the_next_one_starts(steady: World) -> None:
    """A child that ignores SIGTERM, a daemon that left the session; and GPU memory that falls late."""
    pod = await begun(steady)
    pod.mode("stubborn")
    await pod.podwatch.recovery.requests.restart()
    await pod.podwatch.until(Phase.CONFIRMING, seconds=60)
    await pod.up(2)
    steady.gpu_used = 60 * GIB
    pod.podwatch.recovery.context.note(gpu_base={0: 0})
    pod.podwatch.see(18, finding=death(FindingKind.SILENT_DEATH))
    await pod.podwatch.until_phase(Phase.BLOCKED, seconds=60)
    assert len(pod.starts) == 2, "not beside memory that is still held"
    assert running_trainers(pod.script) == []
    pod.mode("steady")
    steady.gpu_used = 0
    await pod.podwatch.until(Phase.CONFIRMING, seconds=60)
    await pod.up(3)
    assert pod.starts == [0, 15, 15]
    await pod.end()
