"""Two nodes of one attempt, each with its own recovery in its own world (tests/recovery/test_nodes.py,
test_own_disks.py)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.recovery_world import Podwatch, World


@dataclass
class Attempt:
    """What the nodes of one attempt know of each other."""

    prepare: list[tuple[int, str]] = field(default_factory=list)
    """The saves that rank 0 has ordered, in order."""
    done: int = 0
    """Orders that the other node has carried out."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    step: int | None = None
    files: str = ""
    refusals: list[str] = field(default_factory=list)


@dataclass
class Side:
    """One node's side of the attempt: what recovery needs of a gang."""

    attempt: Attempt
    leads: bool
    own_disks: bool = False

    async def gather(self) -> None: ...

    async def prepare(self, step: int, save_id: str) -> None:
        self.attempt.prepare.append((step, save_id))

    async def prepared(self) -> None:
        while self.attempt.done < len(self.attempt.prepare):
            await asyncio.sleep(0.001)

    async def announce(self, step: int | None, files: str) -> None:
        assert self.attempt.done == len(self.attempt.prepare), "a node has not fetched its part"
        self.attempt.step, self.attempt.files = step, files
        self.attempt.ready.set()

    async def awaited(self, fetch: Callable[[int, str], Awaitable[None]]) -> tuple[int | None, str]:
        while not self.attempt.ready.is_set():
            if self.attempt.done < len(self.attempt.prepare):
                await fetch(*self.attempt.prepare[self.attempt.done])
                self.attempt.done += 1
            await asyncio.sleep(0.001)
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
