"""Periodic jobs on apscheduler 3.x, without exact timing.

``misfire_grace_time`` is always set, because its default of one second silently skips a late job. Detection never runs
here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger


class Jobs:
    """Named periodic coroutines; each runs at most once at a time, and missed runs are made up by one."""

    def __init__(self) -> None:
        self._scheduler = AsyncIOScheduler(timezone="UTC")

    def every(self, seconds: float, name: str, job: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            # podwatch exits: no error of the job, but the scheduler would log a traceback.
            with contextlib.suppress(asyncio.CancelledError):
                await job()

        self._scheduler.add_job(
            run,
            IntervalTrigger(seconds=seconds, timezone="UTC"),
            id=name,
            name=name,
            coalesce=True,
            max_instances=1,
            misfire_grace_time=max(1, int(seconds)),
        )

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
