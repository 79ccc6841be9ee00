"""Two nodes of one attempt, each with its own recovery in its own world (tests/recovery/test_nodes.py)."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.recovery_world import Podwatch, World


@dataclass
class Attempt:
    """What the nodes of one attempt know of each other."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    step: int | None = None
    files: str = ""
    refusals: list[str] = field(default_factory=list)


@dataclass
class Side:
    """One node's side of the attempt: what recovery needs of a gang."""

    attempt: Attempt
    leads: bool

    async def gather(self) -> None: ...

    async def announce(self, step: int | None, files: str) -> None:
        self.attempt.step, self.attempt.files = step, files
        self.attempt.ready.set()

    async def awaited(self) -> tuple[int | None, str]:
        await self.attempt.ready.wait()
        return self.attempt.step, self.attempt.files

    def cannot_start(self, why: str) -> None:
        self.attempt.refusals.append(why)


def two_worlds(root: Path) -> tuple[World, World]:
    worlds = World(root / "n0"), World(root / "n1")
    for world in worlds:
        world.output.mkdir(parents=True)
        (world.root / "state").mkdir()
    return worlds


async def leave_all(*podwatches: Podwatch) -> None:
    for podwatch in podwatches:
        await podwatch.leave()
    for podwatch in podwatches:
        podwatch.world.close()
