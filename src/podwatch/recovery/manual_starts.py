"""Trainers that an operator starts: podwatch takes one over, waits beside it, or asks
(docs/attaching.md).
"""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from podwatch.domain.errors import Busy, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.process import FoundTree, TreeAnswer
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import Desired, Snapshot, Supervision
from podwatch.recovery.context import BLOCKED_POLL, Attempt, RecoveryContext
from podwatch.recovery.operation_runner import OperationRunner, adopt
from podwatch.recovery.resume_point import Lineages
from podwatch.recovery.start_entries import enter_running
from podwatch.recovery.state import Phase
from podwatch.recovery.stop import Stops
from podwatch.trainer.base import Look, TrainerHandle
from podwatch.trainer.rules import TrainerChoice, begun_since, choose_trainer

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
            choice = self.choose(look)
            if choice.attach is not None and self.attaches:
                if await self.guard(choice.attach):
                    return True
                look = await tools.launcher.look()
                continue
            if not self._must_wait(choice) and not self._kept(look):
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

    @property
    def attaches(self) -> bool:
        """Whether the configuration allows it to attach to a trainer that an operator started."""
        return self.context.tools.settings.trainer.supervise != "start"

    def choose(self, look: Look, *, ignored: tuple[str, ...] | None = None) -> TrainerChoice:
        """Return which of the trees seen is our next trainer, or beside which none is started; the tree of the watched
        trainer is neither. ``ignored``: the starts that are not this run's training (None: as recorded)."""
        run = self.context.run
        left_out = run.ignored if ignored is None else ignored
        return choose_trainer(look.trees, ended_ago=self._seconds_since(run.ended_wall), ignored=left_out)

    def _seconds_since(self, wall: float | None) -> float | None:
        return None if wall is None else self.context.tools.clock.wall() - wall

    def _must_wait(self, choice: TrainerChoice) -> bool:
        """Return whether podwatch must not start a trainer beside these; if so, the finding shows what the operator can
        do."""
        if trainers := _trainers(choice.trees):
            text = "a trainer that podwatch did not start runs"
            if len(trainers) > 1:
                text = "several running trainers could be this run's"
            elif choice.attach is None:
                text = "a process that ran beside the ended trainer works in its output_dir"
            text = f"{text}, so podwatch starts no second one: {listed(trainers)}"
            fix = (
                "run `podwatch start --attach PID` to guard one; stop the others, or run `podwatch start --ignore PID`"
                " for each that is not this run's training"
            )
            self.context.show(Phase.BLOCKED, text)
            self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS)
            self.context.notes.add(FindingKind.AMBIGUOUS_TRAINERS, Severity.CRITICAL, text, fix)
            return True
        if not choice.waits_for or self.context.tools.settings.mode == "observe":
            return False
        self._await(choice.waits_for)
        return True

    def _await(self, pending: Sequence[FoundTree]) -> None:
        """Report trees that may train, or are unclear: a warning during the start-up patience, then critical, with a
        question to answer."""
        patience = self.context.tools.settings.trainer.startup_patience
        names = listed(pending)
        youngest = min(tree.top.age for tree in pending)
        late = youngest >= patience
        if late:
            awaited = " or ".join(dict.fromkeys(awaited_of(tree) for tree in pending))
            text = (
                f"Training is not running: {names}. After {youngest / 60:.0f} min podwatch still has"
                f" not seen {awaited}, and starts no trainer beside it"
            )
        else:
            left = max(0.0, patience - youngest) / 60
            signs = " or ".join(dict.fromkeys(awaited_of(t) for t in pending if t.answer is TreeAnswer.WAIT))
            attaches = f"attaches when it sees {signs}, and " if signs else ""
            text = (
                f"podwatch waits before it starts training: {names}. It {attaches}starts training when that process"
                f" ends; in {left:.0f} min it asks you"
            )
        pids = [str(c.launcher.pid) for c in pending if c.attachable] or [str(pending[0].launcher.pid)]
        fix = (
            f"if this is the run's training: `podwatch start --attach {pids[0]}`; if not: stop it, or run `podwatch"
            f" start --ignore {pids[0]}` to start training beside it; to start nothing: `podwatch stop-training`"
        )
        self.context.show(Phase.BLOCKED, text)
        self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS)
        self.context.notes.add(
            FindingKind.AMBIGUOUS_TRAINERS, Severity.CRITICAL if late else Severity.WARNING, text, fix
        )

    async def guard(self, tree: FoundTree) -> bool:
        """Attach to ``tree``; return False if it has ended meanwhile."""
        tools = self.context.tools
        self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS, FindingKind.BLOCKED)
        try:
            handle = await tools.launcher.attach(tree.launcher)
        except Busy:
            return False
        now = tools.clock.monotonic()
        self.context.watch(handle, Attempt(handle.start_id, now, known=False))
        tools.begin_start(now, handle.start_id)
        await enter_running(tools, handle)
        if all(s.ours for s in tools.catalogue.sets if s.complete):
            self.context.notes.clear(FindingKind.FOREIGN_CHECKPOINTS)
        await self.lineages.descend(handle)
        self.context.show(Phase.ATTACHED, f"watching pid {handle.launcher.pid}, which podwatch did not start")
        tools.say(
            EventName.TRAINER_ATTACHED,
            f"attached to pid {handle.launcher.pid}: {tree.reason}",
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
        It only reports anything else (what may train, an evaluation, leftovers of the old run): a guarded
        process would be "restarted" as training one day. Return True if podwatch now watches a trainer whose recorded
        stop is still to be carried out."""
        run, clock = self.context.run, self.context.tools.clock
        trees = self.choose(look).trees
        trainers = _trainers(trees)
        newer = begun_since(trainers, self._seconds_since(run.ended_wall))
        mine = [tree for tree in newer if clock.wall() - tree.top.age > run.desired_wall]
        self.context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS)
        self.context.notes.drop("beside")
        to_stop = [tree for tree in look.trees if tree.start_id == run.stop_of and tree.answer is TreeAnswer.ATTACH]
        if to_stop:  # podwatch ended while it waited for the save, or before it started to stop it
            return await self.guard(to_stop[0])
        if len(mine) == 1 and self.attaches:
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
        elif trees:
            self.context.notes.add(
                FindingKind.UNGUARDED,
                Severity.WARNING if mine else Severity.INFO,
                f"podwatch does not guard these processes, because training is {self.context.desired}: {listed(trees)}",
                "if one of them is this run's training: `podwatch start --attach PID`",
                subject="beside",
            )
        return False

    def ask(self, trees: Sequence[FoundTree]) -> None:
        self.context.notes.add(
            FindingKind.AMBIGUOUS_TRAINERS,
            Severity.CRITICAL,
            f"several running trainers could be this run's: {listed(trees)}",
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
            choice = self.manual.choose(look)
            if choice.attach is not None and self.manual.attaches:
                if await self.manual.take_over(look):
                    self.context.note(next_try_wall=None)
                    self.context.notes.clear(FindingKind.GAVE_UP, FindingKind.FOREIGN_CHECKPOINTS)
            elif trainers := _trainers(choice.trees):
                self.manual.ask(trainers)
        finally:
            self.looking = False
        return None

    async def _again_by_hand(self, old: TrainerHandle, look: Look) -> None:
        """Take over the trainer that an operator started after the attached one ended. Leftovers of the old tree, and
        processes that ran beside it all the time, do not count."""
        status, wall = await old.exit_status(), self.context.tools.clock.wall()
        ended = status.at_wall if status is not None else wall
        left = {process.identity for process in (await old.tree()).value or ()} | {old.launcher}
        trees = [tree for tree in look.trees if tree.launcher not in left]
        choice = choose_trainer(trees, ended_ago=wall - ended, ignored=self.context.run.ignored)
        newer = begun_since(choice.trees, wall - ended)
        fresh = _trainers(newer) or [tree for tree in newer if tree.answer is TreeAnswer.WAIT]
        if len(fresh) != 1 or not self.manual.attaches:
            return
        self.context.tools.say(
            EventName.TRAINER_STOPPED,
            f"an operator started the ended trainer (pid {old.launcher.pid}) again: not a failure",
            start_id=old.start_id,
        )
        self.context.note_end(old.start_id, ended)
        await self.manual.lineages.descend(old)
        self.context.forget()
        if fresh[0].answer is TreeAnswer.WAIT or not await self.manual.guard(fresh[0]):
            await self.operations.carry_on()  # carry_on waits for one that is still loading


def _trainers(trees: Iterable[FoundTree]) -> list[FoundTree]:
    return [tree for tree in trees if tree.answer is TreeAnswer.ATTACH]


def awaited_of(tree: FoundTree) -> str:
    """Return what decides about a tree beside which podwatch starts nothing."""
    if tree.answer is not TreeAnswer.WAIT:
        return "its end"
    sign = "a CUDA context or a training process"
    return (
        f"{sign} (neither can be seen here: give podwatch CAP_SYS_PTRACE, or run it as root)" if tree.hidden else sign
    )


def listed(trees: Sequence[FoundTree]) -> str:
    """Return the trees as one line for the operator to choose from, without secrets."""
    return "; ".join(f"pid {t.launcher.pid}: {scrub(t.command)[:80]} ({scrub(t.reason)})" for t in trees)
