"""Ends that are wanted: a stop a person asked for (now, or after the next save), and a run that is done."""

from dataclasses import replace
from typing import Final

from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.judgement.claims import Act
from podwatch.recovery.core import Core
from podwatch.recovery.state import Phase, newest_step
from podwatch.trainer.base import TrainerHandle

SAVE_POLL: Final = 1.0
NO_SET: Final = -1
"""Below every step: any complete set is a newer one."""


class Stopping(Core):
    """A stop is durable before it begins: ``desired`` in the run record, and with it whether the next save is waited
    for, so that the next podwatch goes on with exactly that."""

    def newest(self) -> int:
        """The newest complete step here, as last seen; NO_SET where there is none."""
        newest = newest_step(self.tools.catalogue.sets)
        return NO_SET if newest is None else newest

    @property
    def judged(self) -> Desired:
        """As what the trainer is judged. One that is to make one more save is still meant to run: its death must be
        seen, or the stop waits for a save that never comes. One that podwatch stops may end, also where it is started
        again afterwards."""
        if self._phase is Phase.ENDING:
            return Desired.RUNNING
        if self.desired is Desired.RUNNING and self._phase is Phase.STOPPING:
            return Desired.STOPPED
        return self.desired

    async def stop_act(self, why: str, *, above: int | None = None) -> None:
        """Stop on purpose; not a failure. ``above``: only once a complete set above this step is here."""
        if self.held():
            return
        self.cause = None
        handle = self.handle
        if handle is not None:
            if above is not None:
                why = await self._until_saved(handle, above, why)
            await self.procedure.stop_tree(handle, why)
        self.forget()
        await self.gave_way()
        await self.set_desired(Desired.STOPPED)
        self.clear(FindingKind.GAVE_UP, FindingKind.BLOCKED, FindingKind.RESUMED_WRONG, FindingKind.UNGUARDED)
        await self.close_open_incident("training was stopped on purpose")
        self._show(Phase.STOPPED, why)

    async def stop_sick_act(self, finding: Finding) -> None:
        """The training itself is sick and its owner asked for a stop then: durable like any stop, after the next save.
        What is wanted changes first, so that it is never asked for twice. Before a full disk the next save is what must
        not come: then it stops at once, and only a save in flight is waited for."""
        above = None if finding.kind is FindingKind.DISK_NO_ROOM else self.newest()
        await self.set_desired(Desired.STOPPED, above=above, of=self.watched)
        await self.stop_act(finding.summary, above=above)

    # -- giving way to another pod (yielding.py has the act) ----------------------------------------------------------

    def must_yield(self) -> bool:
        """Whether the trainer that is watched has to end. One that a person starts on this pod after that is theirs."""
        if self.held() or not self.tools.standing().stop:
            return False
        return not (self.memory.yielded and self.handle is not None and self.handle.supervision is Supervision.ATTACH)

    async def gave_way(self) -> None:
        """Nothing of this pod's own trains any more. Durable: the next podwatch must not end what a person starts."""
        if self.tools.standing().act is Act.SUPERSEDED and not self.memory.yielded:
            self.memory.yielded = True
            await self.procedure.remember()

    def holds_again(self) -> None:
        """From the sensing loop: the run is this pod's again, and it may lose it once more."""
        standing = self.tools.standing()
        if self.memory.yielded and standing.act is Act.HOLD and not standing.stop:
            self.memory.yielded = False
            self.remember_soon()

    # -- the next save ------------------------------------------------------------------------------------------------

    async def _until_saved(self, handle: TrainerHandle, above: int, why: str) -> str:
        """Wait for a complete set above ``above``. It has an end: the trainer's, or the verdict that it is dead, hangs
        or is done, for then no save comes any more. Returns why it stops now."""
        tools = self.tools
        have = "there is none yet" if above == NO_SET else f"the newest is step {above}"
        self.no_save_comes = ""
        self._show(Phase.ENDING, f"{why}; training stops after its next save ({have})")
        while await handle.exit_status() is None:
            if self.must_yield():  # the run is another pod's by now: what would be saved here is not its next step
                return f"{why}; {tools.standing().why_not}"
            newest = newest_step(await tools.blocking(tools.catalogue.rescan))
            if newest is not None and newest > above:
                return f"{why}; step {newest} is saved"
            if self.no_save_comes:
                text = f"no further save will come, so training stops now: {self.no_save_comes}; {have}"
                tools.say(EventName.TRAINER_STOPPING, text, Severity.WARNING, start_id=handle.start_id)
                return f"{why}; {self.no_save_comes}"
            await tools.clock.sleep(SAVE_POLL)
        tools.say(
            EventName.TRAINER_STOPPING,
            f"training ended by itself before its next save ({have})",
            Severity.WARNING,
            start_id=handle.start_id,
        )
        return why

    def hear_of_death(self, findings: tuple[Finding, ...]) -> None:
        """From the sensing loop while the next save is waited for."""
        if self._phase is not Phase.ENDING:
            return
        for finding in findings:
            if finding.confirmed and finding.verdict in (Verdict.RESTART, Verdict.FINISH):
                self.no_save_comes = finding.summary

    async def finish_act(self, finding: Finding) -> None:
        """The run is done: record that first, then end what lingers (it still costs GPUs)."""
        if self.held():
            return
        self.cause = None
        handle = self.handle
        await self.set_desired(Desired.FINISHED, of=self.watched)
        if handle is not None:
            await self.procedure.stop_tree(handle, finding.summary)
        self.forget()
        await self.set_desired(Desired.FINISHED)
        self.clear(FindingKind.GAVE_UP, FindingKind.BLOCKED, FindingKind.RESUMED_WRONG, FindingKind.UNGUARDED)
        await self.close_open_incident("training finished")
        self._show(Phase.FINISHED, finding.summary)
        self.tools.say(EventName.TRAINER_FINISHED, finding.summary)

    async def set_desired(self, desired: Desired, *, above: int | None = None, of: str = "") -> None:
        """Durable when it returns. ``above`` and ``of`` (a start) say what is still to be stopped: see RunRecord."""
        if self.tools.record.current is None:
            await self.recall()
        record = self.tools.record.current
        if record is None or (record.desired, record.stop_above, record.stop_of) == (desired, above, of):
            return
        changed = record.desired is not desired
        wall = self.tools.clock.wall() if changed else record.desired_wall
        await self.procedure.save_record(
            replace(record, desired=desired, stop_above=above, stop_of=of, desired_wall=wall)
        )
        if changed:
            self.tools.say(EventName.DESIRED_CHANGED, f"wanted: {desired}", desired=str(desired))

    @property
    def watched(self) -> str:
        """The start that is watched now; empty where none is."""
        return self.handle.start_id if self.handle is not None else ""
