"""Recovery with the real supervisor and a real trainer script: a death, a SIGKILLed podwatch, a stop."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.domain.event import EventName
from podwatch.recovery import Phase
from podwatch.system.clock import Clock
from podwatch.trainer.start_and_adopt import SupervisorLauncher, SupervisorOptions
from tests.support.known_trainers import ROLES
from tests.support.recovery_world import Podwatch, World, death

TRAINER = """
import sys, time
from pathlib import Path
out = Path(sys.argv[1])
start = int(sys.argv[sys.argv.index("--resume") + 1]) + 1 if "--resume" in sys.argv else 0
with (out / "starts").open("a") as f:
    f.write(f"{start}\\n")
time.sleep(600)
"""


class RealTime(Clock):
    def monotonic(self) -> float:
        return time.monotonic()

    def boottime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def life(world: World, root: Path) -> Podwatch:
    launcher = SupervisorLauncher(
        "r1",
        world.output,
        root / "state",
        RealTime(),
        use_systemd=False,
        roles=ROLES,
        options=SupervisorOptions(beside=root, grace=1.0, linger=60.0),
    )
    podwatch = Podwatch(world)
    object.__setattr__(podwatch.recovery.context.tools, "launcher", launcher)
    podwatch.environment.variables = dict(os.environ)
    return podwatch


def running_trainers(script: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if len(command) > 1 and command[1] == os.fsencode(script):
                found.append(int(entry.name))
    return found


async def one_trainer(script: Path, pid: int) -> None:
    """Wait until ``pid`` shows the script as its command, which it does not in the middle of its exec."""
    deadline = time.monotonic() + 60
    while (running := running_trainers(script)) != [pid]:
        assert len(running) <= 1, "two at once"
        assert time.monotonic() < deadline, running
        await asyncio.sleep(0.01)


async def starts(world: World, *expected: str) -> None:
    """Wait until the trainer has said with which steps it was started so far."""
    path, deadline = world.output / "starts", time.monotonic() + 20
    while time.monotonic() < deadline:
        seen = path.read_text().split() if path.exists() else []
        if len(seen) >= len(expected):
            assert seen == list(expected)
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the trainer did not come up")


@pytest.fixture
def script(world: World) -> Iterator[Path]:
    path = world.root / "trainer.py"
    path.write_text(TRAINER)
    yield path
    for pid in running_trainers(path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def test_a_lock_that_cannot_be_used_is_reported_and_training_starts(world: World, script: Path) -> None:
    world.settings_extra = {"trainer": {"command": [sys.executable, str(script), str(world.output)], "stop_grace": 1}}
    (world.root / "lock").mkdir()
    podwatch = life(world, world.root)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING, seconds=30)
    told = [event.message for event in world.events if event.name is EventName.START_WARNING]
    assert any(f"cannot lock {world.root}" in text for text in told), told
    await podwatch.die()


async def test_death_crash_and_stop(world: World, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as long as the supervisor's linger, and longer than this test waits for anything
    monkeypatch.setattr("podwatch.trainer.trainer_handle._EXIT_RECORD_WAIT", 60.0)
    root = world.root
    world.settings_extra = {"trainer": {"command": [sys.executable, str(script), str(world.output)], "stop_grace": 1}}
    first = life(world, root)
    await first.recovery.begin()
    await first.until(Phase.CONFIRMING, seconds=30)
    world.save(5)
    await starts(world, "0")
    first.see(6)
    await first.file.edit(lambda run: run)  # that it is confirmed is recorded without waiting
    handle = first.recovery.handle
    assert handle is not None
    await first.die()

    second = life(world, root)
    await second.recovery.begin()
    assert second.recovery.state.phase is Phase.RUNNING
    again = second.recovery.handle
    assert again is not None
    assert again.launcher == handle.launcher
    os.kill(again.launcher.pid, signal.SIGKILL)
    while await again.exit_status() is None:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    second.see(6, finding=death())
    await second.until(Phase.CONFIRMING, seconds=30)
    assert time.monotonic() - began < 30.0, "it waited for what was recorded already"
    await one_trainer(script, second.recovery.handle.launcher.pid)  # type: ignore[union-attr]
    await starts(world, "0", "6")
    await second.recovery.requests.stop()
    await second.until(Phase.STOPPED, seconds=30)
    assert running_trainers(script) == []
    await second.leave()
