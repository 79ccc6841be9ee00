"""Trainers that an operator starts: podwatch takes one over, waits beside it, or asks
(docs/attaching.md).
"""

from collections.abc import Sequence
from typing import Final, Protocol

from podwatch.domain.errors import Busy, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.snapshot import Desired, Snapshot, Supervision
from podwatch.incidents import scrub
from podwatch.policy.other_trainers import Sifted, sift
from podwatch.recovery.context import BLOCKED_POLL, Attempt, RecoveryContext
from podwatch.recovery.operation_runner import OperationRunner, adopt
from podwatch.recovery.resume_point import Lineages
from podwatch.recovery.state import Phase
from podwatch.recovery.stop import Stops
from podwatch.trainer.base import Candidate, Look, TrainerHandle

PERSON_POLL: Final = 15.0
"""Seconds between two checks for an operator's own start while podwatch runs no trainer; each reads all of /proc."""


class ManualStarts:
    """Finds, judges and takes over an operator's trainer."""

    def __init__(self, context: RecoveryContext, stops: Stops) -> None:
        self.context, self.stops = context, stops

    @property
    def lineages(self) -> Lineages:
        return self.stops.lineages

    async def take_over(self, look: Look) -> bool:
        """Attach to the one trainer that an operator started. Wait while it is unclear which one it is, or whether a
        process is about to train. Return False if there is none: only then is a start safe (never two trainers)."""
        tools = self.context.tools
        while True:
            if look.handle is not None:
                await adopt(self.context, look.handle)
                return True
            there = self.sift(look)
            if len(there.successors) == 1 and tools.settings.trainer.supervise != "start":
                if await self.guard(there.successors[0]):
                    return True
                look = await tools.launcher.look()
                continue
            if not self._must_wait(there) and not self._kept(look):
                self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS)
                return False
            await tools.clock.sleep(BLOCKED_POLL)
            look = await tools.launcher.look()

    def _kept(self, look: Look) -> bool:
        """Return whether another supervisor holds the run lock: nothing is moved or started while its training may run.
        Report it once."""
        known = self.context.notes.has("kept")
        if not look.kept:
            self.context.notes.drop("kept")
            return False
        self.context.show(Phase.BLOCKED, look.kept)
        fix = "stop that training, or give this run an output_dir of its own"
        self.context.notes.add(FindingKind.BLOCKED, Severity.CRITICAL, look.kept, fix, subject="kept")
        if not known:
            self.context.tools.say(EventName.RECOVERY_BLOCKED, look.kept, Severity.CRITICAL)
        return True

    def sift(self, look: Look, *, ignored: tuple[str, ...] | None = None) -> Sifted[Candidate]:
        """Return which of the processes seen can be our next trainer; the tree of the watched trainer cannot.
        ``ignored``: the starts that are not this run's training (None: as recorded)."""
        run, wall = self.context.run, self.context.tools.clock.wall()
        left_out = run.ignored if ignored is None else ignored
        return sift(look.candidates, look.pending, ended=run.ended_wall, wall=wall, ignored=left_out)

    def _must_wait(self, there: Sifted[Candidate]) -> bool:
        """Return whether podwatch must not start a trainer beside these; if so, the finding shows what the operator can
        do."""
        if there.successors or there.rivals:
            several = len(there.successors) > 1
            text = (
                "several running trainers could be this run's"
                if several
                else "a trainer that podwatch did not start runs"
            )
            if not there.successors:
                text = "a process that ran beside the ended trainer works in its output_dir"
            text = f"{text}, so podwatch starts no second one: {listed((*there.successors, *there.rivals))}"
            fix = (
                "run `podwatch start --attach PID` to guard one; stop the others, or run `podwatch start --beside PID`"
                " for each that is not this run's training"
            )
            self.context.show(Phase.BLOCKED, text)
            self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS)
            self.context.notes.add(FindingKind.AMBIGUOUS_TRAINERS, Severity.CRITICAL, text, fix)
            return True
        if not there.pending or self.context.tools.settings.mode == "observe":
            return False
        self._await(there.pending)
        return True

    def _await(self, pending: Sequence[Candidate]) -> None:
        """Report the pending processes: a warning during the start-up patience, then critical, with a question to
        answer."""
        patience = self.context.tools.settings.trainer.startup_patience
        names = listed(pending)
        late = all(c.age >= patience for c in pending)
        if late:
            awaited = " or ".join(dict.fromkeys(c.awaits for c in pending))
            text = (
                f"Training is not running: {names}. After {min(c.age for c in pending) / 60:.0f} min podwatch still has"
                f" not seen {awaited}, and starts no trainer beside it"
            )
        else:
            left = max(0.0, patience - min(c.age for c in pending)) / 60
            signs = " or ".join(dict.fromkeys(c.awaits for c in pending if c.attachable and not c.holds_gpu))
            attaches = f"attaches when it sees {signs}, and " if signs else ""
            text = (
                f"podwatch waits before it starts training: {names}. It {attaches}starts training when that process"
                f" ends; in {left:.0f} min it asks you"
            )
        pids = [str(c.launcher.pid) for c in pending if c.attachable] or [str(pending[0].launcher.pid)]
        fix = (
            f"if this is the run's training: `podwatch start --attach {pids[0]}`; if not: stop it, or run `podwatch"
            f" start --beside {pids[0]}` to start training beside it; to start nothing: `podwatch stop-training`"
        )
        self.context.show(Phase.BLOCKED, text)
        self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS)
        self.context.notes.add(
            FindingKind.AMBIGUOUS_TRAINERS, Severity.CRITICAL if late else Severity.WARNING, text, fix
        )

    async def guard(self, candidate: Candidate) -> bool:
        """Attach to ``candidate``; return False if it has ended meanwhile."""
        tools = self.context.tools
        self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS, FindingKind.BLOCKED)
        try:
            handle = await tools.launcher.attach(candidate)
        except Busy:
            return False
        now = tools.clock.monotonic()
        self.context.watch(handle, Attempt(handle.start_id, now, known=False))
        tools.begin_start(now, handle.start_id)
        await self.lineages.descend(handle)
        self.context.show(Phase.ATTACHED, f"watching pid {handle.launcher.pid}, which podwatch did not start")
        tools.say(
            EventName.TRAINER_ATTACHED,
            f"attached to pid {handle.launcher.pid}: {candidate.reason}",
            start_id=handle.start_id,
            pid=handle.launcher.pid,
        )
        if not tools.settings.trainer.command:
            self.context.notes.add(
                FindingKind.UNGUARDED,
                Severity.WARNING,
                "podwatch cannot restart this trainer: [trainer] command is not configured",
                "run `podwatch config init` to copy it from the running trainer",
            )
        return True

    async def notice(self, look: Look) -> bool:
        """Handle the trainers here while training is not wanted (stopped, finished). Only a trainer of this very run,
        seen at work in output_dir and started since, shows that its operator wants training again: podwatch guards it.
        It only reports anything else on the GPUs (a notebook, an evaluation, leftovers of the old run): a guarded
        process would be "restarted" as training one day. Return True if podwatch now watches a trainer whose recorded
        stop is still to be carried out."""
        run, clock = self.context.run, self.context.tools.clock
        there = self.sift(look)
        candidates = (*there.successors, *there.rivals)
        mine = [c for c in there.successors if c.of_run and clock.wall() - c.age > run.desired_wall]
        self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS)
        self.context.notes.drop("beside")
        pending = [c for c in look.candidates if c.start_id == run.stop_of]
        if pending:  # podwatch ended while it waited for the save, or before it started to stop it
            return await self.guard(pending[0])
        if len(mine) == 1 and self.context.tools.settings.trainer.supervise != "start":
            before = self.context.desired
            if await self.guard(mine[0]):
                self.context.tools.say(
                    EventName.DESIRED_CHANGED,
                    f"an operator started {before} training again (pid {mine[0].launcher.pid}); podwatch guards it",
                    desired=str(Desired.RUNNING),
                )
                await self.stops.set_desired(Desired.RUNNING)
        elif len(mine) > 1:
            self.ask(mine)
        elif candidates:
            self.context.notes.add(
                FindingKind.UNGUARDED,
                Severity.WARNING if mine else Severity.INFO,
                f"podwatch does not guard these processes, because training is {self.context.desired}:"
                f" {listed(candidates)}",
                "if one of them is this run's training: `podwatch start --attach PID`",
                subject="beside",
            )
        return False

    def ask(self, candidates: Sequence[Candidate]) -> None:
        self.context.notes.add(
            FindingKind.AMBIGUOUS_TRAINERS,
            Severity.CRITICAL,
            f"several running trainers could be this run's: {listed(candidates)}",
            "run `podwatch start --attach PID` to guard one, and stop the others",
        )


class Continues(Protocol):
    async def carry_on(self) -> None: ...

    async def as_recorded(self) -> None: ...


class Lookout:
    """Looks for an operator's trainer while no operation and no trainer of podwatch runs."""

    def __init__(
        self, context: RecoveryContext, manual: ManualStarts, runner: OperationRunner, operations: Continues
    ) -> None:
        self.context, self.manual, self.runner, self.operations = context, manual, runner, operations
        self.looking = False
        """The current operation only checks whether an operator started a trainer."""

    def look_out(self, snapshot: Snapshot) -> None:
        """Start a lookout if one is due. Called at each tick of the sensing loop; never blocks."""
        if not self.runner.ready or snapshot.at - self.context.looked_out_at < PERSON_POLL:
            return
        handle, sample = self.context.handle, snapshot.trainer.value
        if handle is not None:
            # An attached trainer that ended: its operator has time to start it again, which is no failure. The end of
            # any other trainer is handled at once, by ``consider``.
            ended = sample is not None and sample.start_id == handle.start_id and not sample.alive
            if not (ended and handle.supervision is Supervision.ATTACH):
                return
        self.context.looked_out_at = snapshot.at
        self.runner.spawn(self._look_out)

    async def _look_out(self) -> None:
        self.looking = True
        try:
            try:
                look = await self.context.tools.launcher.look()
            except (OSError, PodwatchError) as error:  # a timeout is an OSError; the next look is in seconds
                text = f"podwatch cannot see whether an operator starts a trainer: {error}"
                return self.context.notes.add(FindingKind.SENSOR_BLIND, Severity.WARNING, text, subject="lookout")
            self.context.notes.drop("lookout")
            old = self.context.handle
            if look.handle is not None and (old is None or look.handle.start_id != old.start_id):
                return await self.operations.carry_on()
            if old is not None:
                return await self._again_by_hand(old, look)
            if self.context.desired is not Desired.RUNNING:
                if await self.manual.notice(look):
                    await self.operations.as_recorded()
                return None
            self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS)
            there = self.manual.sift(look)
            if len(there.successors) == 1 and self.context.tools.settings.trainer.supervise != "start":
                if await self.manual.take_over(look):
                    self.context.note(next_try_wall=None)
                    self.context.notes.clear(FindingKind.GAVE_UP, FindingKind.FOREIGN_CHECKPOINTS)
            elif there.successors:
                self.manual.ask(there.successors)
        finally:
            self.looking = False
        return None

    async def _again_by_hand(self, old: TrainerHandle, look: Look) -> None:
        """Take over the trainer that an operator started after the attached one ended. Leftovers of the old tree, and
        processes that ran beside it all the time, do not count."""
        status, wall = await old.exit_status(), self.context.tools.clock.wall()
        ended = status.at_wall if status is not None else wall
        left = {process.identity for process in (await old.tree()).value or ()} | {old.launcher}
        there = sift(look.candidates, look.pending, ended=ended, wall=wall, ignored=self.context.run.ignored)
        ours = there.successors or tuple(c for c in there.pending if c.of_run)
        fresh = [c for c in ours if c.launcher not in left]
        if len(fresh) != 1 or self.context.tools.settings.trainer.supervise == "start":
            return
        self.context.tools.say(
            EventName.TRAINER_STOPPED,
            f"an operator started the ended trainer (pid {old.launcher.pid}) again: not a failure",
            start_id=old.start_id,
        )
        self.context.note(ended_wall=ended)
        await self.manual.lineages.descend(old)
        self.context.forget()
        if fresh[0].awaits or not await self.manual.guard(fresh[0]):
            await self.operations.carry_on()  # carry_on waits for one that is still loading


def listed(candidates: Sequence[Candidate]) -> str:
    """Return the candidates as one line for the operator to choose from, without secrets."""
    return "; ".join(f"pid {c.launcher.pid}: {scrub(c.command)[:80]} ({scrub(c.reason)})" for c in candidates)
