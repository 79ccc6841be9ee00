"""Periodic jobs, and those for the store: heartbeats, the daily sweep."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from podwatch.app.keep_run_cost import Accountant
from podwatch.app.shutdown import BackgroundTasks
from podwatch.app.status_view import StatusSource, heartbeat
from podwatch.domain.lease import HolderState
from podwatch.domain.snapshot import Desired, Snapshot
from podwatch.domain.times import rfc3339

if TYPE_CHECKING:
    from podwatch.app.build import Components

# -- scheduler -------------------------------------------------------------------------------------------------------
# On apscheduler 3.x, without exact timing. ``misfire_grace_time`` is always set, because its default of one second
# silently skips a late job. Detection never runs here.


Job = Callable[[], Awaitable[None]]


class Jobs:
    """Named periodic coroutines; each runs at most once at a time, and missed runs are made up by one."""

    def __init__(self) -> None:
        self._scheduler = AsyncIOScheduler(timezone="UTC")

    def every(self, seconds: float, name: str, job: Job) -> None:
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


# -- jobs of the store -----------------------------------------------------------------------------------------------

STORE_SWEEP_SECONDS = 3600.0
"""Interval of checking whether the daily sweep of the store is due; the check costs nothing."""
TRANSITION_SECONDS = 5.0
"""Least time between two heartbeats at transitions: a restart passes through several phases within a second."""
WANDB_SECONDS = 60.0
"""Interval; reads two links. The first checkpoint comes minutes after the trainer has its W&B run."""


class StoreJobs:
    """Does nothing without a store."""

    def __init__(self, parts: "Components", status: StatusSource, accountant: Accountant) -> None:
        self._parts, self._status, self._accountant = parts, status, accountant
        self._backup = parts.backup
        self._said: tuple[object, ...] = ()
        self._changed = asyncio.Event()
        self._accounted = ""
        """The heartbeat whose account was taken over."""
        self._digest_wall: float | None = None

    def ask(self) -> None:
        """Check now whether this pod holds the run: a start of training waits for the answer."""
        if self._backup is not None:
            self._backup.lease.start()

    async def begin(self, jobs: Jobs, tasks: BackgroundTasks) -> None:
        backup = self._backup
        if backup is None:
            return
        await backup.start()
        tasks.spawn(self._first_beats(), "first heartbeat")
        tasks.spawn(self._transition_beats(), "heartbeats at transitions")
        jobs.every(self._parts.settings.sync.sweep, "search for unstored checkpoints", self._sweep)
        jobs.every(self._parts.settings.sync.heartbeat, "heartbeat", self.beat)
        jobs.every(WANDB_SECONDS, "wandb ids", self._parts.store.wandb.look)
        jobs.every(STORE_SWEEP_SECONDS, "store sweep", backup.sweep_store)

    async def _first_beats(self) -> None:
        """Beat at once each time this pod becomes the holder of the run: other pods read the heartbeat."""
        assert self._backup is not None
        while True:
            await self._backup.lease.until_speaking(True)
            await self.beat()
            await self._backup.lease.until_speaking(False)

    def turn(self, snapshot: Snapshot) -> None:
        """Request a heartbeat at once if phase, desired state or progress changed since the last turn; pins are then
        written to the store, too."""
        recovery = self._parts.recovery
        pins = tuple(self._parts.run.file.current.pins)
        now = (recovery.state.phase, recovery.desired, snapshot.newest_step is not None, pins)
        if now != self._said:
            self._said = now
            self._changed.set()
            if self._backup is not None:
                self._backup.notify()

    async def _transition_beats(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.beat()
            await self._parts.run.clock.sleep(TRANSITION_SECONDS)

    async def beat(self) -> None:
        await self.say(self._state())

    async def say(self, state: HolderState) -> None:
        if self._backup is None:
            return
        self._take_over()
        own = [found for found in self._parts.checkpoints.catalogue.sets if found.ours]
        said = heartbeat(self._status.view(), own, state)
        if self._digest_wall is not None:
            said = replace(said, last_digest_at=rfc3339(self._digest_wall) or "")
        await self._backup.beat(said, state)

    def _take_over(self) -> None:
        """What the pod before knew of the run: what it cost, and when its last digest was sent."""
        beat = None if self._backup is None else self._backup.lease.earlier_beat
        if self._backup is None or beat is None:
            return
        if beat.mark != self._accounted:
            self._accounted = beat.mark
            self._accountant.take_over(beat.said.account, self._backup.lease.claimed)
        wall = beat.said.digest_wall
        if (
            wall is not None and wall <= self._parts.run.clock.wall()
        ):  # one of the future would delay the next by as much
            self._digest_wall = max(wall, self._digest_wall or wall)

    async def say_leaving(self) -> None:
        """The last heartbeat: released where nothing trains, so that no other pod waits for this one."""
        idle = self._parts.recovery.handle is None
        await self.say(HolderState.RELEASED if idle else HolderState.RESTARTING)

    # -- the run's digests (app/notifications.py)

    def sends_digests(self, *, known: bool) -> bool:
        """Whether this pod is the one that sends them: it speaks for the run, or the store does not answer and the time
        of the last one is ``known`` here. Of several nodes, node 0 sends them."""
        if self._parts.store.elsewhere:
            return False
        backup = self._backup
        return backup is None or backup.lease.may_upload or (known and backup.lease.error is not None)

    @property
    def digest_wall(self) -> float | None:
        """When the run's last digest was sent by any pod; epoch seconds."""
        self._take_over()
        return self._digest_wall

    async def keep_digest(self, wall: float) -> None:
        """Leave the time of a digest in the heartbeat, for the pod that replaces this one."""
        self._digest_wall = max(wall, self._digest_wall or wall)
        if self._backup is not None:
            await self.beat()

    def _state(self) -> HolderState:
        recovery = self._parts.recovery
        idle = recovery.handle is None and recovery.desired is not Desired.RUNNING
        return HolderState.RELEASED if idle else HolderState.RUNNING

    async def _sweep(self) -> None:
        if self._backup is not None:
            self._backup.notify()
