"""The seven actions. Each can be repeated after a kill at any point, and be cancelled between its steps.

An action does one thing and returns; whether anything follows is the next decision. What it finds meanwhile that only
an operator can decide becomes ``Observer.question``. One file, although long: what the actions may assume of each other
stands side by side.
"""

import asyncio
import json
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, assert_never

from podwatch.detection.merge import reported
from podwatch.domain.errors import Busy, HostError, IntegrityError, PodwatchError, SaveGone
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity, counted
from podwatch.domain.lease import LeaseAction
from podwatch.domain.run import FROM_STORE
from podwatch.domain.run_state import RestartHistory, RunState, Stopping
from podwatch.domain.secrets import scrub, scrub_argv
from podwatch.domain.snapshot import Desired
from podwatch.domain.starts import StartedBy, with_start
from podwatch.journal import Journal
from podwatch.journal.bundle import plain
from podwatch.recovery import quarantine, start_plan
from podwatch.recovery.actions import (
    Action,
    Attach,
    Clean,
    Count,
    DropStart,
    Edit,
    Evaluate,
    Fetch,
    Finish,
    RecordEnd,
    Start,
    Stop,
    WantStop,
)
from podwatch.recovery.choose import Choice, choose_start
from podwatch.recovery.context import Attempt, RecoveryContext
from podwatch.recovery.decide import nothing_else_trains
from podwatch.recovery.failure import Failures
from podwatch.recovery.lineages import Lineages
from podwatch.recovery.observe import Observer
from podwatch.recovery.start import Starter, StartFailed, Superseded
from podwatch.recovery.start_entries import enter_running, first_start
from podwatch.recovery.state import GangStart, Phase, Tools
from podwatch.store.restore.inspect_staged import NotInspected
from podwatch.system.child import run_child
from podwatch.system.procfs import send_signal
from podwatch.trainer.environment import for_training
from podwatch.trainer.errors_in_output import LOG_LINES_KEPT
from podwatch.trainer.trainer_handle import TrainerHandle

if TYPE_CHECKING:
    from podwatch.store.restore.restore import Restored

SEARCHED_SECONDS: Final = 2.0
"""A search of the pod is young enough for a start for so long."""
STUCK_RETRY: Final = 15.0
STOP_ALSO_DEADLINE: Final = 60.0
"""Seconds for one command of ``trainer.stop_also``; `ray stop` takes up to sixteen."""
WATCH_SECONDS: Final = 0.5
"""Time between two looks whether the evaluation must end early."""
END_SECONDS: Final = 20.0
"""For the end of an evaluation that is cancelled. Training then starts anyway: its start waits for free GPUs."""
FREE_POLL: Final = 0.5
SETTLED: Final = (FindingKind.GAVE_UP, FindingKind.BLOCKED, FindingKind.RESUMED_WRONG, FindingKind.UNGUARDED)
"""Findings about training that is stopped or finished now."""
CLEANED: Final = "everything, for a fresh start"


class Work(Protocol):
    """Evaluations that need training's GPUs."""

    @property
    def title(self) -> str:
        """What is evaluated: ``step 40``."""
        ...

    @property
    def most_seconds(self) -> float:
        """After this time it has failed to end itself, and is cancelled."""
        ...

    async def run(self) -> None:
        """Run them. Cancelling ends them and all that they started."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """``why_not``: why the work did not run, or did not run to its end; empty if it did. ``stopped``: training was
    stopped for it."""

    why_not: str = ""
    stopped: bool = False


@dataclass
class Evaluating:
    """The evaluations that the daemon has asked for."""

    work: Work
    over: "asyncio.Future[Outcome]"
    stopped: bool = False

    def tell(self, why_not: str = "") -> None:
        if not self.over.done():
            self.over.set_result(Outcome(why_not, self.stopped))


@dataclass(frozen=True, slots=True)
class Cleaned:
    """``number`` is the quarantine's, for ``podwatch quarantine return``; None if there was nothing to move."""

    number: int | None
    paths: tuple[Path, ...]
    starts: bool
    """Training is wanted, so a fresh start follows automatically."""


class Performer:
    """Carries out edits and actions; the loop's hand calls it, one at a time."""

    def __init__(
        self,
        context: RecoveryContext,
        observer: Observer,
        starter: Starter,
        lineages: Lineages,
        failures: Failures,
        gang: GangStart | None,
    ) -> None:
        self.context, self.observer, self.starter = context, observer, starter
        self.lineages, self.failures, self._gang = lineages, failures, gang
        self.stuck: tuple[str, ...] = ()
        """Processes that SIGKILL did not end, as text. podwatch starts nothing beside them."""
        self.evaluating: Evaluating | None = None
        self.cleaned: asyncio.Future[Cleaned] | None = None
        self._evidence: tuple[int, Finding, Mapping[str, Sequence[str]]] | None = None
        """Of the failure that was counted, until the stop after it has captured it."""
        self._died: tuple[int | None, int | None] = (None, None)
        """The incident that the next start ends, and the last step seen before it."""

    async def perform(self, action: Action) -> None:
        match action:
            case Stop():
                await self._stop(action)
            case Start():
                await self._start(action.choice)
            case Attach():
                await self._attach(action)
            case Fetch():
                await self._fetch(action.choice)
            case Evaluate():
                await self._evaluate()
            case Finish():
                await self._finish(action.finding)
            case Clean():
                await self._clean()
            case _:
                assert_never(action)

    # -- edits

    async def apply(self, edit: Edit) -> None:
        match edit:
            case RecordEnd(start_id, wall):
                ended = self.context.tools.clock.wall() if wall is None else wall
                if self.context.watched == start_id:
                    await self._let_go(ended)
                await self.context.tools.run_file.edit(
                    lambda run: replace(run, stopping=None).with_start(start_id, ended=ended)
                )
            case Count(start_id, finding):
                await self._count(start_id, finding)
            case WantStop(finding, above):
                await self.want(Desired.STOPPED, stop_above=above)
            case DropStart(start_id):

                def dropped(run: RunState) -> RunState:
                    stopping = None if run.stopping is None or run.stopping.start_id == start_id else run.stopping
                    return replace(run, starts=tuple(s for s in run.starts if s.id != start_id), stopping=stopping)

                await self.context.tools.run_file.edit(dropped)
            case _:
                assert_never(edit)

    async def want(self, desired: Desired, **more: Any) -> None:
        """Record the desired state, and fields that change with it; durable on return."""
        wall, before = self.context.tools.clock.wall(), self.context.desired

        def wanted(run: RunState) -> RunState:
            since = run.desired_wall if run.desired is desired else wall
            return replace(run, **{"stop_above": None, **more, "desired": desired, "desired_wall": since})

        if wanted(self.context.run) != self.context.run:
            await self.context.tools.run_file.edit(wanted)
        if before is not desired:
            self.context.tools.say(EventName.DESIRED_CHANGED, f"desired state: {desired}", desired=str(desired))

    async def _let_go(self, ended: float) -> None:
        """The attached trainer has ended, and its operator starts it again."""
        old = self.context.handle
        assert old is not None
        self.context.tools.say(
            EventName.TRAINER_STOPPED,
            f"an operator started the ended trainer (pid {old.launcher.pid}) again: not a failure",
            start_id=old.start_id,
        )
        self.context.note_end(old.start_id, ended)
        await self.lineages.descend(old)
        self.context.forget()

    async def _count(self, start_id: str, finding: Finding) -> None:
        """Count and report the failure, and record the stop that follows; the stop captures the evidence."""
        context, attempt, handle = self.context, self.context.attempt, self.context.handle
        if handle is None:
            return
        if finding.kind is FindingKind.RESUMED_WRONG:
            await self._refuse(finding)
        await context.close_open_incident("training failed again after this restart")
        failure = context.failed(finding, attempt)
        lines = tuple(context.tools.sensors.logs.last_lines(LOG_LINES_KEPT))
        tails = await self.failures.log_tails(lines)
        line = self.failures.find_log_line(failure, tails)
        own = self.failures.lines_of_this_start(lines)
        stop, decision = stopping(handle, finding.summary), None
        if not context.is_counted(start_id):
            decision = await self.failures.count(start_id, attempt, finding.kind, own, explained_by=line, stopping=stop)
        else:
            await context.edit(stopping=stop)
        healing = context.healing()
        lost_steps = None if healing is None else healing.lost_steps
        incident = await context.tools.journal.run(
            Journal.open_incident,
            str(finding.kind),
            finding.summary + (f" ({failure.log})" if failure.log else ""),
            json.dumps(plain(finding.evidence)),
            failure.wall,
            lost_steps,
        )
        context.last_incident = incident.id
        told = (finding if healing is None else reported(healing)).summary
        gave_up = context.run.history.gave_up
        context.tools.say(
            EventName.INCIDENT_OPENED,
            f"{told}. podwatch gave up restarting" if gave_up else told,
            Severity.CRITICAL,
            incident=incident.id,
            kind=str(finding.kind),
            began=round(failure.wall, 3),
            gave_up=gave_up,
            lost_steps=lost_steps,
            lost_seconds=None if healing is None or healing.lost_seconds is None else round(healing.lost_seconds, 1),
        )
        if decision is not None:
            self.failures.report(decision, told, lines, attempt)
        self._evidence = (incident.id, finding, tails)
        self._died = (incident.id, None if attempt is None else attempt.counted_step)

    async def _refuse(self, finding: Finding) -> None:
        """Keep the step that training did not continue from, and those above, and choose none of them."""
        context = self.context
        step = context.attempt.resumed_from if context.attempt is not None else None
        if step is not None:
            known = {s.step for s in context.tools.catalogue.sets if s.step >= step} | {step}
            await context.edit(refused={**context.run.refused, **dict.fromkeys(known, finding.summary)})
        context.notes.add(
            FindingKind.RESUMED_WRONG,
            Severity.CRITICAL,
            finding.summary,
            "check that the training script uses its resume argument ([trainer] resume_args), then `podwatch start`",
        )

    # -- stop and finish

    async def _stop(self, action: Stop) -> None:
        """End the tree and release it: also one that has ended already."""
        context, handle = self.context, self.context.handle
        if handle is None or handle.start_id != action.start_id:
            await context.edit(stopping=None)
            return
        recorded = context.run.stopping
        if recorded is None or recorded.start_id != handle.start_id:
            await context.edit(
                stopping=stopping(handle, action.why), evaluation=action.evaluation or context.run.evaluation
            )
        if action.evaluation and self.evaluating is not None:
            self.evaluating.stopped = True
        await self._end_tree(handle, action.why, evaluation=bool(action.evaluation))
        await self._after_the_end(action.why)

    async def _after_the_end(self, why: str) -> None:
        context, standing = self.context, self.context.tools.standing
        context.forget()
        self.observer.question = None  # about an earlier start
        self.observer.forget_inventory()
        if standing.act is LeaseAction.SUPERSEDED and not context.run.yielded:
            # Durable, so that the next podwatch does not stop a trainer that an operator starts.
            await context.edit(yielded=True)
        if standing.stop and context.desired is Desired.RUNNING:
            await context.close_open_incident(standing.why_not)
        if context.desired is Desired.FINISHED:  # an earlier podwatch was killed while it ended training
            await self._say_finished(why)
        if context.desired is Desired.STOPPED:
            context.failure, self._died = None, (None, None)
            await self.want(Desired.STOPPED, requested=False)
            context.notes.clear(*SETTLED)
            await context.close_open_incident(f"podwatch stopped training: {why}")

    async def _finish(self, finding: Finding | None) -> None:
        context, handle = self.context, self.context.handle
        said = "training has finished" if finding is None else finding.summary
        context.failure = None
        await self.want(Desired.FINISHED, requested=False)
        if handle is not None:
            await context.edit(stopping=stopping(handle, said))
            await self._end_tree(handle, said)
        context.forget()
        await self._say_finished(said)

    async def _say_finished(self, why: str) -> None:
        self.context.notes.clear(*SETTLED)
        await self.context.close_open_incident("training finished")
        self.context.tools.say(EventName.TRAINER_FINISHED, why)

    async def _end_tree(self, handle: TrainerHandle, why: str, *, evaluation: bool = False) -> None:
        context, tools, trainer = self.context, self.context.tools, self.context.tools.settings.trainer
        context.show(Phase.STOPPING, why)
        if self._evidence is not None:
            incident, finding, tails = self._evidence
            await self.failures.capture(incident, finding, handle, tails)
            self._evidence = None
        tools.say(
            EventName.TRAINER_STOPPING,
            f"stopping training: {why}",
            start_id=handle.start_id,
            step=context.last_step(),
            evaluation=evaluation,
        )
        while True:
            report = await handle.stop(
                grace=trainer.stop_grace, save_grace=trainer.save_grace, saving=lambda: tools.catalogue.saving
            )
            self.stuck = report.survivors
            if not report.survivors:
                break
            # Never start a second trainer beside a process that still exists, even if it is stuck in the kernel.
            context.show(Phase.BLOCKED, "podwatch cannot end these processes: " + "; ".join(report.survivors))
            tools.say(
                EventName.RECOVERY_BLOCKED,
                "podwatch cannot end the old trainer and starts no new one; these processes are stuck in the kernel: "
                + "; ".join(report.survivors),
                Severity.CRITICAL,
            )
            await tools.clock.sleep(STUCK_RETRY)
        ended = report.exit.at_wall if report.exit is not None else 0.0
        context.note_end(handle.start_id, ended or tools.clock.wall())
        await self._stop_also()
        await handle.release()
        context.writers_ended = True
        await self.lineages.descend(handle)
        await context.edit(stopping=None)
        tools.track(None)
        tools.say(
            EventName.TRAINER_STOPPED,
            f"training stopped in {report.seconds:.1f} s",
            start_id=handle.start_id,
            killed=report.killed,
            seconds=round(report.seconds, 3),
        )

    async def _stop_also(self) -> None:
        """Run the commands of ``trainer.stop_also``, which end training's processes outside its tree. A command that
        fails is reported and does not delay the restart: the check for free GPUs and ports follows anyway."""
        tools, trainer = self.context.tools, self.context.tools.settings.trainer
        for command in trainer.stop_also:
            try:
                done = await run_child(
                    command,
                    timeout=STOP_ALSO_DEADLINE,
                    env=for_training(tools.environment.build(trainer)),
                    cwd=start_plan.working_directory(tools.settings),
                    user=trainer.user,
                )
            except HostError as error:
                said = f"failed: {error}"
            else:
                if done.ok:
                    continue
                last = (done.output.strip().splitlines() or [""])[-1][:200]
                how = f"did not end in {STOP_ALSO_DEADLINE:.0f} s" if done.timed_out else f"ended with code {done.code}"
                said = f"{how}: {scrub(last)}"
            text = f"trainer.stop_also: {shlex.join(scrub_argv(command))[:200]} {said}"
            tools.say(EventName.TRAINER_STOPPING, text, Severity.WARNING)

    # -- start

    async def _start(self, choice: Choice) -> None:
        context, tools = self.context, self.context.tools
        if self._gang is not None:
            choice = await self._join(choice)
        if not await self._pod_is_free():
            return
        context.chosen = choice.step
        try:
            if not tools.follows and not await self._still_holds(choice):
                return
            await self._start_from(choice)
        finally:
            context.chosen = None

    async def _pod_is_free(self) -> bool:
        """Whether nothing else here trains this run, or may: a download, or the wait for other nodes, may have taken an
        hour since the pod was searched."""
        if self.context.tools.clock.monotonic() - self.observer.search.at > SEARCHED_SECONDS:
            await self.observer.search_pod()
        return nothing_else_trains(await self.observer.facts(), self.context.tools.settings)

    async def _still_holds(self, choice: Choice) -> bool:
        """Inspect the chosen checkpoint, then list them all once more: one that has appeared since would be moved to
        quarantine."""
        if choice.source == "local" and await self.observer.is_damaged(choice):
            return False
        await self.observer.list_again()
        again = choose_start(await self.observer.facts())
        return isinstance(again, Choice) and (again.step, again.source) == (choice.step, choice.source)

    async def _join(self, choice: Choice) -> Choice:
        """Of several nodes, rank 0 starts once all of them are here, and the others follow it."""
        gang = self._gang
        assert gang is not None
        if self.context.tools.follows:
            try:
                step, files = await gang.awaited()
                await self.starter.until_visible(step, files)
            except PodwatchError as error:
                gang.cannot_start(str(error))
                raise
            return Choice(step, "fresh" if step is None else "local", "", "rank 0 has chosen this step")
        await gang.gather()
        return choice

    async def _start_from(self, choice: Choice) -> None:
        context, tools = self.context, self.context.tools
        lost_seconds = context.lost_seconds(choice.step)
        incident_id, step_at_death = self._died
        asked = request_of(context.run)
        await self.starter.clear_litter()
        try:
            handle, attempt = await self.starter.start(choice, lambda run: request_of(run) == asked)
        except Superseded:
            return
        except StartFailed as error:
            if context.run.stopping is not None:  # a restart was requested meanwhile: the next start is that one
                tools.say(EventName.START_WARNING, str(error), Severity.WARNING)
                return
            lost = context.lost_steps(step_at_death, choice.step)
            incident = await self.failures.could_not_start(error, choice.step, lost)
            self._died = (incident, None)  # its steps are in the incident that ends here
            return
        if incident_id is None:  # an earlier podwatch may have opened one and ended before the restart
            current = await tools.journal.run(Journal.current_incident)
            incident_id = current.id if current is not None else None
        self._died = (None, None)
        attempt.incident_id, attempt.step_at_death = incident_id, step_at_death
        attempt.lost_seconds = lost_seconds
        context.notes.clear(FindingKind.BLOCKED, FindingKind.FOREIGN_CHECKPOINTS, FindingKind.RESUME_UNCONFIRMED)
        context.unconfirmed = False
        self._say_stepped_back(choice)
        context.watch(handle, attempt)
        self.withdraw_clean(Busy("training was started meanwhile", where="clean", fix="`podwatch stop-training` first"))

    def _say_stepped_back(self, choice: Choice) -> None:
        """Report the skipped checkpoint and its quarantine, while training runs from the older one."""
        below, number = self.context.run.below, self.starter.quarantine_number
        self.context.notes.clear(FindingKind.STEPPED_BACK)
        self._say_damaged_in_store(choice)
        if below is None or choice.step is None or number is None:
            return
        self.context.notes.add(
            FindingKind.STEPPED_BACK,
            Severity.WARNING,
            f"resuming from step {below} failed, so training continues from step {choice.step}. Step {below} is kept"
            f" in quarantine {number}",
            f"nothing to do; to return to it: `podwatch stop-training`, `podwatch quarantine return {number}`,"
            f" `podwatch start --step {below}`",
        )

    def _say_damaged_in_store(self, choice: Choice) -> None:
        """Report a newer checkpoint that the store has and that is damaged, as long as training runs from an older
        one."""
        than = -1 if choice.step is None else choice.step
        newer = [(step, why) for (step, _), why in self.observer.damaged_in_store.items() if step > than]
        if not newer or self.context.run.wanted is not None:
            return
        step, why = max(newer)
        self.context.notes.add(
            FindingKind.STEPPED_BACK,
            Severity.WARNING,
            f"step {step} is damaged in the store ({why}), so training continues from step {choice.step}",
            f"nothing to do; to try it all the same: `podwatch stop-training`, `podwatch start --step {step}`",
            subject="damaged in the store",
        )

    # -- attach

    async def _attach(self, action: Attach) -> None:
        """Watch a trainer that an operator started. That says what its operator wants, and ends what was before."""
        context, tools, tree = self.context, self.context.tools, action.tree
        old, before, asked = context.handle, context.desired, request_of(context.run)
        if old is not None:
            status = await old.exit_status()
            ended = status.at_wall if status is not None else 0.0
            await self._let_go(ended or tools.clock.wall())
        context.notes.clear(FindingKind.AMBIGUOUS_TRAINERS, FindingKind.BLOCKED, FindingKind.GAVE_UP)
        self.observer.search = replace(self.observer.search, at=float("-inf"))
        try:
            handle = await tools.launcher.attach(tree.launcher)
        except Busy:
            return  # it has ended meanwhile
        now, wall = tools.clock.monotonic(), tools.clock.wall()

        def attached(run: RunState) -> RunState:
            if request_of(run) != asked:
                raise Superseded("the operator has requested something else meanwhile")
            return replace(
                run,
                desired=Desired.RUNNING,
                desired_wall=run.desired_wall if before is Desired.RUNNING else wall,
                history=RestartHistory(ever_worked=run.history.ever_worked),
                ignored=tuple(name for name in run.ignored if name != tree.start_id),
                stop_above=None, requested=False, attach="", refused={}, wanted=None, fresh=False, below=None,
                next_try_wall=None, evaluation="", clean=False,
            )  # fmt: skip

        try:  # first of all: a trainer that is watched while none is wanted is stopped
            await tools.run_file.edit(attached)
        except Superseded:
            return
        context.watch(handle, Attempt(handle.start_id, now, known=False))
        tools.begin_start(now, handle.start_id)
        await enter_running(tools, handle)
        self.observer.question = None
        if before is not Desired.RUNNING:
            tools.say(
                EventName.DESIRED_CHANGED,
                f"an operator started {before} training again (pid {handle.launcher.pid}); podwatch guards it",
                desired=str(Desired.RUNNING),
            )
        self.withdraw_clean(Busy("training was started meanwhile", where="clean", fix="`podwatch stop-training` first"))
        if all(s.ours for s in tools.catalogue.sets if s.complete):
            context.notes.clear(FindingKind.FOREIGN_CHECKPOINTS)
        await self.lineages.descend(handle)
        tools.say(
            EventName.TRAINER_ATTACHED,
            f"attached to pid {handle.launcher.pid}: {tree.reason}",
            start_id=handle.start_id,
            pid=handle.launcher.pid,
        )
        if not tools.settings.trainer.command:
            context.notes.add(
                FindingKind.UNGUARDED,
                Severity.WARNING,
                "podwatch cannot restart this trainer: [trainer] command is not configured",
                "run `podwatch config init` to copy it from the running trainer",
            )

    # -- fetch

    async def _fetch(self, choice: Choice) -> None:
        """Fetch the chosen checkpoint, inspected before it is put in its place; what is there goes to quarantine."""
        context, observer, tools = self.context, self.observer, self.context.tools
        restore, step, named = tools.store.restore, choice.step, context.run.wanted is not None
        if restore is None or step is None:
            raise HostError("no store is configured to fetch from", fix="set [sync] store")
        if self._gang is not None:  # before that, nothing in the directories of all nodes is changed
            await self._gang.gather()
        branch = next(
            (s.lineage for s in (observer.inventory.saves if observer.inventory else ()) if s.step == step), ""
        )

        def progress(done: int, total: int) -> None:
            if context.restoring == step:
                text = f"fetching step {step} from the store: {done / 1e9:.1f} of {total / 1e9:.1f} GB"
                context.show(Phase.STARTING, text)

        context.restoring = step
        try:
            restored = await restore.fetch_save((step, choice.save_id), progress, doubts=named)
        except NotInspected as error:
            observer.ask(f"step {step} may be complete, but no inspection gave an answer: {error.what}", error.fix)
            return
        except SaveGone as error:
            if not observer.note_missing(choice):
                observer.refuse_fetched(choice, error.what)
            return
        except IntegrityError as error:
            if named:
                raise
            observer.refuse_fetched(choice, error.what)
            return
        except (PodwatchError, OSError):
            observer.failed_fetches += 1
            observer.forget_inventory()
            raise
        finally:
            context.restoring = None
        observer.failed_fetches = 0
        observer.forget_damage(step)
        context.followed = {step: branch}
        await tools.journal.run(Journal.learn, FROM_STORE, restored.wandb)
        self._say_fetched(step, restored)
        observer.listed_at = float("-inf")

    def _say_fetched(self, step: int, restored: "Restored") -> None:
        tools = self.context.tools
        tools.say(EventName.RESTORED, f"fetched step {step} from the store", step=step)
        if restored.moved:
            count = counted(len(restored.moved), "entry", "entries")
            text = (
                f"moved {count} to quarantine: step {step} was not complete here. `podwatch quarantine list` shows it"
            )
            tools.say(EventName.QUARANTINED, text, step=step, entries=len(restored.moved))

    # -- evaluate

    async def _evaluate(self) -> None:
        """Run what the daemon asked for on training's GPUs. Whatever happens to it, training is started again: the run
        stays wanted, and nothing of this is recorded once it is over."""
        pending, context = self.evaluating, self.context
        try:
            if pending is not None:
                patience = context.tools.settings.gpu.release_wait if pending.stopped else 0.0
                why = await self._until_free(patience) or await self._work(pending.work)
                pending.tell(why)
        finally:
            if pending is not None:
                paused = "podwatch is paused" if context.paused else ""
                pending.tell(paused or context.tools.standing.why_not or "podwatch interrupted it")
            self._end_evaluation()
            context.free_since = context.tools.clock.monotonic()  # older readings show what the evaluation held

    def _end_evaluation(self) -> None:
        self.evaluating, self.observer.evaluation, self.context.evaluation = None, None, ""
        if self.context.run.evaluation:
            self.context.edit_soon(evaluation="")

    def drop_evaluation(self, why: str) -> None:
        """What was decided leads to no evaluation any more: answer who waits for it."""
        if self.evaluating is not None:
            self.evaluating.tell(self.context.tools.standing.why_not or f"something else came first: {why}")
            self._end_evaluation()

    async def _until_free(self, patience: float) -> str:
        """Wait until the GPUs and ports of training are free; return what holds them after ``patience`` seconds, empty
        if nothing does. A start of training waits longer: an evaluation is not worth it."""
        tools = self.context.tools
        end = tools.clock.monotonic() + patience
        while True:
            held = (await self.observer.facts()).held
            if held.ok and not held.value:
                return ""
            if tools.clock.monotonic() >= end:
                return f"the GPUs are not free: {'; '.join(held.value or ()) or 'GPU memory has not been observed'}"
            await tools.clock.sleep(FREE_POLL)

    async def _work(self, work: Work) -> str:
        """Run it; return why it did not come to its end, empty if it did. No error of it leaves this."""
        tools = self.context.tools
        task = asyncio.ensure_future(work.run())
        end = tools.clock.monotonic() + work.most_seconds
        why = ""
        try:
            while not task.done():
                if tools.clock.monotonic() > end:
                    why = f"it did not end within {work.most_seconds:.0f} s"
                    break
                await asyncio.wait([task], timeout=WATCH_SECONDS)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=END_SECONDS)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            why = f"internal error: {error!r}"[:200]
        return why

    # -- clean

    async def _clean(self) -> None:
        try:
            await self.clean()
        except (PodwatchError, OSError) as error:
            if self.cleaned is None or self.cleaned.done():
                raise
            # The operator who waits gets the reason, and decides; files that it has moved stay in quarantine.
            await self.context.edit(clean=False, requested=False)
            self.withdraw_clean(error)

    def withdraw_clean(self, error: Exception) -> None:
        """Answer who waits for the request to clean: it is not carried out."""
        if self.cleaned is not None and not self.cleaned.done():
            self.cleaned.set_exception(error)

    async def clean(self) -> Cleaned:
        """Move everything that an old run left to quarantine, so that the next start is fresh. Nothing is deleted, and
        ``podwatch quarantine return`` undoes it. A new lineage starts, so that podwatch does not fetch the old run's
        checkpoints from the store again."""
        context, tools = self.context, self.context.tools
        if context.handle is not None:  # it has ended and is not released yet
            await self._end_tree(context.handle, "cleaning up after a trainer that has ended")
            context.forget()
        for _ in range(2):  # two scans make a checkpoint complete, which protects it in quarantine
            await tools.blocking(tools.catalogue.rescan)
        paths = await tools.blocking(tools.layout.ahead_of, None)
        number = await tools.blocking(quarantine.free_number, tools.workspace) if paths else None
        # Files first: if podwatch is killed in between, the next one finishes the move, and at worst fetches the
        # checkpoint that the store still names.
        await self.starter.set_aside(None, paths, CLEANED)
        start = replace(await first_start(tools), by=StartedBy.CLEAN, proved=True)

        def cleaned(run: RunState) -> RunState:
            run = replace(run, starts=with_start(run.starts, start)) if paths or run.last_start is not None else run
            history = RestartHistory(ever_worked=run.history.ever_worked)
            return replace(
                run, refused={}, wanted=None, below=None, next_try_wall=None, history=history, adopted="", clean=False,
                requested=False,
            )  # fmt: skip

        await tools.run_file.edit(cleaned)
        self.observer.forget_inventory()
        self.observer.question = None
        context.notes.clear(
            FindingKind.GAVE_UP, FindingKind.RESUMED_WRONG, FindingKind.BLOCKED, FindingKind.FOREIGN_CHECKPOINTS
        )
        done = Cleaned(number, paths, context.desired is Desired.RUNNING)
        if self.cleaned is not None and not self.cleaned.done():
            self.cleaned.set_result(done)
        return done


def request_of(run: RunState) -> tuple[object, ...]:
    """What an operator has requested, to see whether that has changed meanwhile."""
    return (run.desired, run.wanted, run.fresh, run.attach, run.stop_above, run.clean)


def stopping(handle: TrainerHandle, why: str) -> Stopping:
    launcher = handle.launcher
    return Stopping(
        start_id=handle.start_id, why=why, pid=launcher.pid, ticks=launcher.start_ticks, boot=launcher.boot_id
    )


async def tell_to_end(tools: Tools, handle: TrainerHandle | None, why: str) -> bool:
    """The machine is being taken away: ask training to end, once, and do not wait for it (docs/pods.md).

    Records the stop, then sends SIGTERM to the trainer. Returns False if none runs.

    The stop stays recorded: the next podwatch here finishes it, and this end does not count as a failure. The
    desired state does not change. If a supervisor runs the trainer, only the supervisor gets the signal: it passes the
    signal on, outlives podwatch, and sends SIGKILL to processes that do not end.
    """
    if handle is None:  # podwatch may have been starting it
        handle = (await tools.launcher.look()).handle
    if handle is None or await handle.exit_status() is not None:
        return False
    stop = stopping(handle, why)
    try:
        await tools.run_file.edit(lambda run: replace(run, stopping=stop))
    except HostError as error:  # the machine is gone in seconds: the last save matters more than this record
        tools.say(EventName.TRAINER_STOPPING, f"cannot record this stop: {error}", Severity.WARNING)
    tools.say(EventName.TRAINER_STOPPING, f"podwatch requests training to end: {why}", start_id=handle.start_id)
    await _sigterm(handle)
    return True


async def _sigterm(handle: TrainerHandle) -> None:
    if handle.ask_to_end():
        return
    refused: PodwatchError | None = None
    for process in (await handle.tree()).value or ():
        try:
            send_signal(process.identity, signal.SIGTERM)
        except PodwatchError as error:
            refused = error
    if refused is not None:
        raise refused
