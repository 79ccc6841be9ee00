"""Time, injected everywhere. Monotonic seconds for logic, wall seconds for display and records."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never jump; the only time decisions are made with."""
        ...

    def boottime(self) -> float:
        """CLOCK_BOOTTIME seconds: like monotonic, but goes on during suspend."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for display and records."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Until it is set, at most so long."""
        await either(self.sleep(seconds), event.wait())


class SystemClock(Clock):
    """The real one."""

    def monotonic(self) -> float:
        return time.monotonic()

    def boottime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """The same without tasks of its own: the sensors wait so many times that it shows in an idle daemon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()


def until_beat(now: float, period: float, lag: float = 0.0) -> float:
    """Seconds until the next whole multiple of ``period``, plus ``lag``: what polls at the same rhythm polls together,
    so that an idle machine wakes up less often, and whoever looks at the results a little later sees fresh ones.

    At least a twentieth of the period, so that a timer that fires early does not ring twice.
    """
    rest = period - (now - lag) % period
    return rest if rest >= period / 20 else rest + period


async def either(sleep: Coroutine[Any, Any, Any], event: Coroutine[Any, Any, Any]) -> None:
    """Until the time is over or the event comes, whichever is first; the other is cancelled."""
    tasks = (asyncio.ensure_future(sleep), asyncio.ensure_future(event))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
