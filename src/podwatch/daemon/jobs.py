"""Cadence jobs on apscheduler 3.x: what must happen every so often, but never to the second.

``misfire_grace_time`` is set everywhere, because its default of one second silently skips a late job
(facts/peers.md, section e). Detection never runs here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger


class Jobs:
    """A named set of periodic coroutines; each runs at most once at a time, and a missed one is made up for once."""

    def __init__(self) -> None:
        self._scheduler = AsyncIOScheduler(timezone="UTC")

    def every(self, seconds: float, name: str, job: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            # Cut off because podwatch leaves: no error of the job, and the scheduler would log a traceback.
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
