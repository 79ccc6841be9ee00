"""Periodic jobs for the store: heartbeats, sweeps, and the pointer's lineage."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from podwatch.config.settings import Settings
from podwatch.daemon import viewing
from podwatch.daemon.compose import Parts
from podwatch.daemon.descent import Descent
from podwatch.daemon.jobs import Jobs
from podwatch.daemon.wandb_ids import LOOK_SECONDS
from podwatch.domain.claims import HolderState
from podwatch.domain.snapshot import Desired, Snapshot
from podwatch.telling.view import DaemonView

STORE_SWEEP_SECONDS = 3600.0
"""Interval of checking whether the daily sweep of the store is due; the check costs nothing."""
FOLLOW_SECONDS = 5.0
"""Interval of checking whether the store's pointer must follow a step back; the check costs nothing."""
TRANSITION_SECONDS = 5.0
"""Least time between two heartbeats at transitions: a restart passes through several phases within a second."""


class Backing:
    """Does nothing without a store."""

    def __init__(self, parts: Parts, view: Callable[[], DaemonView]) -> None:
        self._parts, self._view = parts, view
        self._syncer = parts.syncer
        self._said: tuple[object, ...] = ()
        self._changed = asyncio.Event()

    def ask(self) -> None:
        """Check now whether this pod holds the run: a start of training waits for the answer."""
        if self._syncer is not None:
            self._syncer.ask()

    async def begin(
        self, jobs: Jobs, settings: Settings, spawn: Callable[[Coroutine[Any, Any, Any], str], None]
    ) -> None:
        syncer = self._syncer
        if syncer is None:
            return
        await syncer.start()
        spawn(self._first_beats(), "first heartbeat")
        spawn(self._transition_beats(), "heartbeats at transitions")
        jobs.every(settings.sync.sweep, "sync sweep", self._sweep)
        jobs.every(settings.sync.heartbeat, "heartbeat", self.beat)
        jobs.every(LOOK_SECONDS, "wandb ids", self._parts.wandb_ids.look)
        jobs.every(STORE_SWEEP_SECONDS, "store sweep", syncer.sweep_store)
        jobs.every(FOLLOW_SECONDS, "descent", Descent(syncer, self._parts.record, self._parts.journal).follow)

    async def _first_beats(self) -> None:
        """Beat at once each time this pod becomes the holder of the run: other pods read the heartbeat."""
        assert self._syncer is not None
        while True:
            await self._syncer.until_speaking(True)
            await self.beat()
            await self._syncer.until_speaking(False)

    def turn(self, snapshot: Snapshot) -> None:
        """Request a heartbeat at once if phase, desired state or progress changed since the last turn."""
        recovery = self._parts.recovery
        now = (recovery.state.phase, recovery.desired, snapshot.newest_step is not None)
        if now != self._said:
            self._said = now
            self._changed.set()

    async def _transition_beats(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.beat()
            await self._parts.clock.sleep(TRANSITION_SECONDS)

    async def beat(self) -> None:
        await self.say(self._state())

    async def say(self, state: HolderState) -> None:
        if self._syncer is not None:
            await self._syncer.beat(viewing.heartbeat_fields(self._view()), state)

    async def say_leaving(self) -> None:
        """The last heartbeat: released where nothing trains, so that no other pod waits for this one."""
        idle = self._parts.recovery.handle is None
        await self.say(HolderState.RELEASED if idle else HolderState.RESTARTING)

    def _state(self) -> HolderState:
        recovery = self._parts.recovery
        idle = recovery.handle is None and recovery.desired is not Desired.RUNNING
        return HolderState.RELEASED if idle else HolderState.RUNNING

    async def _sweep(self) -> None:
        if self._syncer is not None:
            self._syncer.sweep()
