"""Whether this run trains already, so that podwatch never starts a second trainer.

``StartChecks`` asks before each start whether the run trains here (manual_starts.py) or on another pod
(docs/two-pods.md).
"""

import time
from dataclasses import replace
from typing import Final

from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.lease import Decision, LeaseAction
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.manual_starts import ManualStarts
from podwatch.recovery.operation_runner import adopt
from podwatch.recovery.state import Phase
from podwatch.recovery.stop import Stops
from podwatch.trainer.base import Look

POLL: Final = 0.5
LOOK_POLL: Final = 15.0
"""Seconds between two checks for an operator's own start; each reads all of /proc."""
ANSWER_SECONDS: Final = 5.0
"""A store that takes longer to report who holds the run becomes a finding."""
FIX_STORE: Final = (
    "correct the store or its key (finding `store-unavailable`); or, if no other pod trains this run, run `podwatch"
    " start`"
)
FIX: Final = (
    "stop podwatch here, then run `podwatch run --take-over`; or change control.json in the store (docs/two-pods.md)"
)


class StartChecks:
    """Checks that an operation makes before it starts anything."""

    def __init__(self, context: RecoveryContext, stops: Stops, manual: ManualStarts) -> None:
        self.context, self.stops, self.manual = context, stops, manual
        self._decided = False
        """An operator decided to start while the store did not answer; holds for restarts, too, until it answers."""
        self._awaits_store = False

    def not_here(self) -> str:
        """Return why this pod must not start training; empty if it can. While the store does not answer, an operator's
        start request decides."""
        standing = self.context.tools.standing
        if standing.act is not LeaseAction.ASK:
            self._decided = False
            return standing.why_not
        self._decided = self._decided or self.context.by_request
        return "" if self._decided else standing.why_not

    @property
    def waits_for_store(self) -> bool:
        """Whether a start waits only for the store to report who holds the run."""
        return self._awaits_store and not self.context.held()

    def _who_acts(self, standing: Decision) -> str:
        """Return the operator's instruction while another pod may train this run."""
        if standing.trains_in is None:
            return f"stop training on the other pod, or {FIX}"
        at = time.strftime("%H:%M:%S", time.gmtime(self.context.tools.clock.wall() + standing.trains_in))
        return f"nothing: podwatch takes the run over at {at} UTC, unless the other pod turns out to be alive"

    async def elsewhere(self) -> bool:
        """Wait while another pod may train this run. Return True if the start must not happen: a trainer was found
        here, or another pod owns the run."""
        try:
            return await self._elsewhere()
        finally:
            self._awaits_store = False

    async def _elsewhere(self) -> bool:
        tools = self.context.tools
        began = looked = tools.clock.monotonic()
        while why := self.not_here():
            standing, now = tools.standing, tools.clock.monotonic()
            self._awaits_store = standing.act is LeaseAction.ASK
            if standing.act is LeaseAction.SUPERSEDED:
                self.context.show(Phase.STOPPED, why)
                await self.stops.handed_over()
                return True
            self.context.show(Phase.BLOCKED, why)
            if standing.stop:
                # The finding `superseded` reports it, with its own instruction.
                self.context.notes.clear(FindingKind.BLOCKED)
            elif standing.act is not LeaseAction.ASK:
                self.context.notes.add(FindingKind.BLOCKED, Severity.WARNING, why, self._who_acts(standing))
            elif now - began > ANSWER_SECONDS:
                self.context.notes.add(FindingKind.BLOCKED, Severity.CRITICAL, why, FIX_STORE)
            await tools.clock.sleep(POLL)
            if now - looked > LOOK_POLL:
                looked = now
                if await self.someone_there(await tools.launcher.look()):
                    return True
        self.context.notes.clear(FindingKind.BLOCKED)
        return False

    async def someone_there(self, look: Look) -> bool:
        """Return True if a trainer runs already (podwatch then watches it) or the operator has to decide first."""
        if look.handle is not None:
            if await look.handle.exit_status() is None:
                await adopt(self.context, look.handle)
                return True
            if self.context.held():
                await adopt(self.context, look.handle)  # its end is judged once podwatch can act again
                return True
            await self.stops.stop_tree(look.handle, "cleaning up after a trainer that has ended")
        return await self.manual.take_over(replace(look, handle=None))
