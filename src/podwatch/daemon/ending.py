"""Ending tasks for certain, and within a time."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from podwatch.domain.errors import PodwatchError

AGAIN_SECONDS = 0.05


async def end_tasks(tasks: Iterable["asyncio.Task[Any]"], *, within: float) -> None:
    """Cancel the tasks until they have ended, for at most ``within`` seconds. Their errors are nobody's any more.

    Once is not enough: ``wait_for`` of Python 3.11, which libraries use too, swallows a cancellation that meets its
    result, and the task goes on.
    """
    left = {task for task in tasks if not task.done()}
    end = asyncio.get_running_loop().time() + within
    while left and asyncio.get_running_loop().time() < end:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen


async def briefly(step: Awaitable[Any], seconds: float = 8.0) -> None:
    """One step of leaving: it may fail or take too long, and the next one comes all the same."""
    try:
        async with asyncio.timeout(seconds):
            await step
    except (TimeoutError, PodwatchError, OSError):
        pass
