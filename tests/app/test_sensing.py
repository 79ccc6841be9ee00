"""The rhythm of the sensing loop: a poll at idle, at once when an engine ends, shorter while a death is confirmed."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from podwatch.app.sensing import CONFIRM_POLL, Detection, Sensors
from podwatch.domain.snapshot import CheckpointMark, Health, Reading, Snapshot
from tests.detection.looks import URL, World, world
from tests.support.clock import ManualClock

POLL = 2.0


class FromWorld:
    """A sensor that shows one reading of the made-up world, and counts how often it was woken."""

    def __init__(self, name: str, shown: "Shown") -> None:
        self.name, self._shown, self.woken = name, shown, 0
        self.engine_ended = asyncio.Event()

    async def start(self) -> None:
        """Nothing of its own runs."""

    async def stop(self) -> None:
        """Nothing of its own runs."""

    def latest(self) -> Reading[object]:
        found: Reading[object] = getattr(self._shown.now(), self.name)
        return found

    def wake(self) -> None:
        self.woken += 1


class Shown:
    def __init__(self, found: World, clock: ManualClock) -> None:
        self._world, self._clock = found, clock

    def now(self) -> Snapshot:
        self._world.now = self._clock.monotonic()
        return self._world.snapshot()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_loop_turns_sooner_only_when_an_engine_ends() -> None:
    clock = ManualClock(monotonic=1000.0)
    found = world(gpu__hold=600.0)
    found.booted = 5000.0
    shown = Shown(found, clock)
    names = ("gpus", "trainer", "disk", "inference", "progress", "host", "logs", "training", "disks")
    sensors = {name: FromWorld(name, shown) for name in names}
    turns: list[float] = []
    senses = Sensors(**sensors)  # type: ignore[arg-type]

    run = SimpleNamespace(clock=clock, config=SimpleNamespace(policies=found.policies), emit=lambda _: None)
    loop = Detection(cast(Any, run), senses, poll=POLL)

    async def turn() -> None:
        mark = CheckpointMark()
        while True:
            loop.judge(senses.snapshot(clock, saving=False, desired=found.desired, checkpoint=mark))
            turns.append(loop.snapshot.at)
            await loop.until_next_turn()

    task = asyncio.create_task(turn())
    try:
        for _ in range(1200):  # two minutes
            await settle()
            clock.advance(0.1)
        idle = len(turns)
        assert 58 <= idle <= 62
        assert not sensors["gpus"].woken

        found.memory[0], found.engines, found.servers = 0, [], []
        found.inference[URL] = replace(found.inference[URL], health=Health.REFUSED)
        sensors["trainer"].engine_ended.set()
        for _ in range(3):
            await settle()
            clock.advance(0.1)
        await settle()
        assert len(turns) == idle + 1, "not at the next poll"
        for name in ("gpus", "trainer", "inference", "progress"):
            assert sensors[name].woken == 1, name
        for _ in range(60):
            clock.advance(0.1)
            await settle()
            if loop.findings and loop.findings[0].confirmed:
                break
        finding = loop.findings[0]
        assert finding.confirmed, "long before hold"
        gaps = [b - a for a, b in zip(turns[idle:], turns[idle + 1 :], strict=False)]
        assert gaps
        assert all(gap <= CONFIRM_POLL + 0.11 for gap in gaps), gaps
        before = len(turns)
        for _ in range(400):
            clock.advance(0.1)
            await settle()
        assert len(turns) - before <= 40, "after ten seconds the usual rhythm is back"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
