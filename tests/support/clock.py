"""Clocks that a test moves."""

import asyncio
import heapq
import itertools

from podwatch.system.clock import Clock


class ManualClock(Clock):
    """Stands still until ``advance``. Sleepers wake in the order of their deadlines."""

    def __init__(self, monotonic: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self.now = monotonic
        self.offset = wall - monotonic
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def boottime(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self.offset

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._numbers), future))
        await future

    def advance(self, seconds: float) -> None:
        """Move time; whoever is due wakes at the next turn of the loop."""
        self.now += seconds
        while self._sleepers and self._sleepers[0][0] <= self.now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)


class AutoClock(ManualClock):
    """Every sleep moves time by its length at once and really takes a millisecond: for code that polls."""

    def __init__(self, monotonic: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        super().__init__(monotonic, wall)
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(max(0.0, seconds))
        await asyncio.sleep(0.001)
