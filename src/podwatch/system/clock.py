"""Time, injected everywhere. Monotonic seconds for logic, wall seconds for display and records."""

import asyncio
import time
from typing import Protocol


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


class SystemClock:
    """The real one."""

    def monotonic(self) -> float:
        return time.monotonic()

    def boottime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
