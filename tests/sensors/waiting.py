"""Wait for a condition, tightly and with a generous limit."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], limit: float = 60.0) -> float:
    """Return the seconds it took. Fails the test after ``limit`` seconds."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit:
            raise AssertionError(f"did not happen within {limit} s")
        await asyncio.sleep(0.005)
    return time.monotonic() - began
