"""Time, injected everywhere. Monotonic seconds for logic, wall seconds for display and records."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never jump; the only time that decisions use."""
        ...

    def boottime(self) -> float:
        """CLOCK_BOOTTIME seconds: like monotonic, but continues during suspend."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for display and records."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Wait until the event is set, at most ``seconds``."""
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
        """The same without extra tasks: the sensors wait so often that tasks show in an idle daemon's CPU use."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()


def until_beat(now: float, period: float, lag: float = 0.0) -> float:
    """Seconds until the next whole multiple of ``period``, plus ``lag``: pollers with the same period poll together, so
    that an idle machine wakes up less often, and a reader that polls a little later sees fresh results.

    At least a twentieth of the period, so that a timer that fires early does not fire twice.
    """
    rest = period - (now - lag) % period
    return rest if rest >= period / 20 else rest + period


async def either(sleep: Coroutine[Any, Any, Any], event: Coroutine[Any, Any, Any]) -> None:
    """Return when the time is over or the event is set, whichever is first; the other is cancelled."""
    tasks = (asyncio.ensure_future(sleep), asyncio.ensure_future(event))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
