"""Who trains already, here or elsewhere: looked at before a start; and a pod that lost its run gives way (DESIGN
section 4, "Two pods, one run")."""

import time
from dataclasses import replace
from typing import Final

from podwatch.domain.finding import FindingKind, Severity
from podwatch.judgement.claims import Act, Decision
from podwatch.recovery.persons import Persons
from podwatch.recovery.state import Phase
from podwatch.trainer.base import Look

POLL: Final = 0.5
LOOK_POLL: Final = 15.0
"""Seconds between two looks for a person's own start; one look reads all of /proc."""
ANSWER_SECONDS: Final = 5.0
"""A store that takes longer to say who holds the run is told of."""
FIX_STORE: Final = "make the store reachable, or run `podwatch start --fresh`"
FIX: Final = (
    "end podwatch here, then `podwatch run --take-over`, or change control.json in the store (docs/two-pods.md)"
)


class Yielding(Persons):
    """What an act asks before it starts anything, and the stop itself."""

    async def yield_act(self) -> None:
        """Stop, journaled as every stop. What is wanted stays: it may go on here once the other pod has gone."""
        standing = self.tools.standing()
        if self.held() or not standing.stop:
            return
        if self.handle is not None:
            await self.procedure.stop_tree(self.handle, standing.why_not)
        self.forget()
        await self.gave_way()
        await self.close_open_incident(standing.why_not)
        self._show(Phase.STOPPED, standing.why_not)
        if standing.act is not Act.SUPERSEDED:
            await self.carry_on()  # which waits until training is wanted here again

    _decided = False
    """A person's word while the store did not answer: it holds for restarts, too, until the store says something."""

    _awaits_store = False

    def not_here(self) -> str:
        """Why nothing may be started on this pod; empty where it may. A person who asks for a start while the store
        does not answer decides it."""
        standing = self.tools.standing()
        if standing.act is not Act.ASK:
            self._decided = False
            return standing.why_not
        self._decided = self._decided or self._asked_for
        return "" if self._decided else standing.why_not

    @property
    def waits_for_store(self) -> bool:
        """A start waits only for the store to say who holds the run: nothing runs here, and no operator decided."""
        return self._awaits_store and not self.held()

    def _who_acts(self, standing: Decision) -> str:
        """The one instruction where another pod may train this run."""
        if standing.trains_in is None:
            return f"stop training on the other pod, or {FIX}"
        at = time.strftime("%H:%M:%S", time.gmtime(self.tools.clock.wall() + standing.trains_in))
        return f"nothing: podwatch takes the run over at {at} UTC, unless the other pod turns out to be alive"

    async def elsewhere(self) -> bool:
        """Wait while another pod may train this run. True where the start is not to be made: a trainer was found here,
        or the run is another pod's for good."""
        try:
            return await self._elsewhere()
        finally:
            self._awaits_store = False

    async def _elsewhere(self) -> bool:
        tools = self.tools
        began = looked = tools.clock.monotonic()
        while why := self.not_here():
            standing, now = tools.standing(), tools.clock.monotonic()
            self._awaits_store = standing.act is Act.ASK
            if standing.act is Act.SUPERSEDED:
                self._show(Phase.STOPPED, why)
                await self.gave_way()
                return True
            self._show(Phase.BLOCKED, why)
            if standing.stop:
                self.clear(FindingKind.BLOCKED)  # `superseded` says so, with its own instruction
            elif standing.act is not Act.ASK:
                self.note(FindingKind.BLOCKED, Severity.WARNING, why, self._who_acts(standing))
            elif now - began > ANSWER_SECONDS:
                self.note(FindingKind.BLOCKED, Severity.CRITICAL, why, FIX_STORE)
            await tools.clock.sleep(POLL)
            if now - looked > LOOK_POLL:
                looked = now
                if await self.someone_there(await tools.launcher.look()):
                    return True
        self.clear(FindingKind.BLOCKED)
        return False

    async def someone_there(self, look: Look) -> bool:
        """True if a trainer lives already (it is watched then) or a person has to decide first."""
        if look.handle is not None:
            if await look.handle.exit_status() is None:
                await self.adopt(look.handle)
                return True
            if self.held():
                await self.adopt(look.handle)  # its end is judged once podwatch may act again
                return True
            await self.procedure.stop_tree(look.handle, "an ended trainer was left over")
        return await self.take_over(replace(look, handle=None))
