"""Intended ends: a stop that the operator requested (now, or after the next save), and a finished run."""

from dataclasses import replace
from typing import Final

from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.policy.lease import LeaseAction
from podwatch.recovery.context import Core
from podwatch.recovery.state import Phase, newest_step
from podwatch.trainer.base import TrainerHandle

SAVE_POLL: Final = 1.0
NO_SET: Final = -1
"""Below every step, so that any complete checkpoint is newer."""


class Stopping(Core):
    """Every stop is durable before it starts: the run record holds ``desired`` and whether to wait for the next save,
    so that the next podwatch continues it unchanged."""

    def newest(self) -> int:
        """Return the newest complete step here, as last seen; NO_SET if there is none."""
        newest = newest_step(self.tools.catalogue.sets)
        return NO_SET if newest is None else newest

    @property
    def judged(self) -> Desired:
        """The desired state that the detectors judge the trainer by. While a stop waits for one more save, training is
        still meant to run: its death must be noticed, or the stop waits forever. While podwatch stops the trainer, its
        end is expected, even if a restart follows."""
        if self._phase is Phase.ENDING:
            return Desired.RUNNING
        if self.desired is Desired.RUNNING and self._phase is Phase.STOPPING:
            return Desired.STOPPED
        return self.desired

    async def stop_act(self, why: str, *, above: int | None = None) -> None:
        """Stop on request; not a failure. ``above``: only once a complete checkpoint above this step exists."""
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
        await self.close_open_incident(f"podwatch stopped training: {why}")
        self._show(Phase.STOPPED, why)

    async def stop_sick_act(self, finding: Finding) -> None:
        """Stop unhealthy training, as the configuration requests: durable like any stop, after the next save. The
        desired state changes first, so that the stop is requested only once. If the next save does not fit on the disk,
        stop at once and wait only for a save in progress."""
        above = None if finding.kind is FindingKind.DISK_NO_ROOM else self.newest()
        await self.set_desired(Desired.STOPPED, above=above, of=self.watched)
        await self.stop_act(finding.summary, above=above)

    # -- handing over to another pod (the act is in handover.py) ------------------------------------------------------

    def must_yield(self) -> bool:
        """Return whether the watched trainer has to end because another pod owns the run. A trainer that an operator
        starts here after that is left alone."""
        if self.held() or not self.tools.standing.stop:
            return False
        return not (self.memory.yielded and self.handle is not None and self.handle.supervision is Supervision.ATTACH)

    async def gave_way(self) -> None:
        """Record that this pod's own training has ended. Durable, so that the next podwatch does not stop a trainer
        that an operator starts."""
        if self.tools.standing.act is LeaseAction.SUPERSEDED and not self.memory.yielded:
            self.memory.yielded = True
            await self.procedure.remember()

    def holds_again(self) -> None:
        """Clear that record once this pod owns the run again. Called by the sensing loop."""
        standing = self.tools.standing
        if self.memory.yielded and standing.act is LeaseAction.HOLD and not standing.stop:
            self.memory.yielded = False
            self.remember_soon()

    # -- the next save ------------------------------------------------------------------------------------------------

    async def _until_saved(self, handle: TrainerHandle, above: int, why: str) -> str:
        """Wait for a complete checkpoint above ``above``; return why to stop now. The wait also ends when the trainer
        ends, or when a verdict says that it is dead, hangs or is finished: then no save comes any more."""
        tools = self.tools
        have = "there is no checkpoint yet" if above == NO_SET else f"the newest checkpoint is step {above}"
        self.no_save_comes = ""
        self._show(Phase.ENDING, f"{why}; training stops after its next save ({have})")
        while await handle.exit_status() is None:
            if self.must_yield():  # another pod owns the run now: a save here would not continue it
                return f"{why}; {tools.standing.why_not}"
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
            f"training ended on its own before its next save ({have})",
            Severity.WARNING,
            start_id=handle.start_id,
        )
        return why

    def hear_of_death(self, findings: tuple[Finding, ...]) -> None:
        """Note a failure while a stop waits for the next save. Called by the sensing loop."""
        if self._phase is not Phase.ENDING:
            return
        for finding in findings:
            if finding.confirmed and finding.verdict in (Verdict.RESTART, Verdict.FINISH):
                self.no_save_comes = finding.summary

    async def finish_act(self, finding: Finding) -> None:
        """Record that the run is finished, then stop the processes that remain (they still hold GPUs)."""
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
        """Record the desired state; durable on return. ``above`` and ``of`` (a start id) describe a stop that is still
        to be carried out: see RunRecord."""
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
            self.tools.say(EventName.DESIRED_CHANGED, f"desired state: {desired}", desired=str(desired))

    @property
    def watched(self) -> str:
        """Id of the start that podwatch watches; empty if none."""
        return self.handle.start_id if self.handle is not None else ""
