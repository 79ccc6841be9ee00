"""What the daemon does for the store on the side: signs of life, sweeps, and the pointer's line of descent."""

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
"""How often it is asked whether the store is due for its daily sweep; asking costs nothing."""
FOLLOW_SECONDS = 5.0
"""How soon the store's pointer follows a step back; the check itself costs nothing."""
TRANSITION_SECONDS = 5.0
"""Between two heartbeats at transitions: a restart passes through several phases within a second."""


class Backing:
    """Does nothing without a store."""

    def __init__(self, parts: Parts, view: Callable[[], DaemonView]) -> None:
        self._parts, self._view = parts, view
        self._syncer = parts.syncer
        self._said: tuple[object, ...] = ()
        self._changed = asyncio.Event()

    def ask(self) -> None:
        """As soon as possible: a start waits for the answer to whose the run is."""
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
        """At once, each time this pod comes to hold the run: whoever else trains it looks there."""
        assert self._syncer is not None
        while True:
            await self._syncer.until_speaking(True)
            await self.beat()
            await self._syncer.until_speaking(False)

    def turn(self, snapshot: Snapshot) -> None:
        """Compare this turn with the one before: a transition is worth a heartbeat at once."""
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
        """podwatch goes; where nothing trains, nobody need wait for this pod."""
        idle = self._parts.recovery.handle is None
        await self.say(HolderState.RELEASED if idle else HolderState.RESTARTING)

    def _state(self) -> HolderState:
        recovery = self._parts.recovery
        idle = recovery.handle is None and recovery.desired is not Desired.RUNNING
        return HolderState.RELEASED if idle else HolderState.RUNNING

    async def _sweep(self) -> None:
        if self._syncer is not None:
            self._syncer.sweep()
