"""Ends tasks and shutdown steps within a deadline."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from podwatch.domain.errors import PodwatchError

AGAIN_SECONDS = 0.05


async def end_tasks(tasks: Iterable["asyncio.Task[Any]"], *, within: float) -> None:
    """Cancel the tasks until they have ended, for at most ``within`` seconds. Their errors are dropped.

    One cancel is not enough: ``wait_for`` of Python 3.11, which libraries use too, swallows a cancellation that arrives
    together with its result, and the task continues.
    """
    left = {task for task in tasks if not task.done()}
    end = asyncio.get_running_loop().time() + within
    while left and asyncio.get_running_loop().time() < end:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio logs nothing


async def briefly(step: Awaitable[Any], seconds: float = 8.0) -> None:
    """Run one shutdown step for at most ``seconds``; a failure or a timeout is ignored, so that the next step runs."""
    try:
        async with asyncio.timeout(seconds):
            await step
    except (TimeoutError, PodwatchError, OSError):
        pass
