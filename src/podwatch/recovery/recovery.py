"""Recovery: keep one trainer in the state that its operator wants."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from podwatch.checkpoints.second_writer import ALONE, Beside
from podwatch.config.settings import Policies, Settings
from podwatch.detection.merge import cost
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import FoundTree, TreeAnswer
from podwatch.domain.snapshot import Desired, Snapshot, Supervision
from podwatch.policy.confirm_resume import ConfirmationState
from podwatch.policy.restart import MACHINE_FAULTS, MACHINE_RULES, succeeded
from podwatch.recovery import quarantine
from podwatch.recovery.command_changed import CommandWatch
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.failure import Failures
from podwatch.recovery.manual_starts import Lookout, ManualStarts
from podwatch.recovery.operation_runner import OperationRunner, adopt, recall, reconcile
from podwatch.recovery.requests import Requests
from podwatch.recovery.restart import Operations
from podwatch.recovery.resume_point import Lineages, ResumeChooser
from podwatch.recovery.start import Starter
from podwatch.recovery.start_checks import StartChecks
from podwatch.recovery.state import GangStart, Phase, RecoveryState, newest_step
from podwatch.recovery.stop import Stops
from podwatch.recovery.stop_for_evaluation import Evaluating
from podwatch.trainer.base import TrainerHandle

REMEMBER_EVERY = 60.0
"""Seconds between two records that a step was made; losing a minute only delays the end of a failure streak."""
BY_HAND: Final = "run"
"""Kind of request: `podwatch run` typed on a terminal."""


_WAITING: Final = frozenset({Phase.IDLE, Phase.BLOCKED, Phase.BACKOFF, Phase.GAVE_UP, Phase.PAUSED, Phase.ENDING})
"""Phases in which an operation only waits. Pruning continues meanwhile: it may be waiting for disk space."""


_BEFORE_START: Final = frozenset(
    {Phase.STOPPING, Phase.EVALUATING, Phase.LOOKING, Phase.STARTING, Phase.BACKOFF, Phase.BLOCKED}
)
"""Phases in which status shows the step of the next start."""


class Confirmation:
    """Follows the current attempt to train: steps made, and whether the start is confirmed."""

    def __init__(self, context: RecoveryContext, runner: OperationRunner, operations: Operations) -> None:
        self.context, self.runner, self.operations = context, runner, operations
        self._remembered_at = 0.0

    def watch(self, snapshot: Snapshot, beside: Beside) -> None:
        """Update the current attempt; never blocks."""
        attempt, settings = self.context.attempt, self.context.tools.settings
        if attempt is None:
            return
        sample = snapshot.trainer.value
        if sample is not None and sample.start_id not in ("", attempt.start_id):
            return
        gpus = (*settings.gpu.inference, *settings.gpu.trainer)
        run = self.context.run
        made = attempt.see(snapshot, run.gpu_base, gpus, beside)
        # A step that is read only after its start was counted as failed was made before that: it proves nothing.
        if made and (not attempt.start_id or not self.context.is_counted(attempt.start_id)):
            self._step_made()
        if self.context.phase is Phase.CONFIRMING and self.runner.ready:
            self._confirm(snapshot)
        if self.context.unconfirmed and (newest_step(self.context.tools.catalogue.sets) or -1) > (
            self.context.unconfirmed_above or -1
        ):
            self.context.unconfirmed = False
            self.context.notes.clear(FindingKind.RESUME_UNCONFIRMED)

    def _step_made(self) -> None:
        run, now = self.context.run, self.context.tools.clock.monotonic()
        changed = not run.history.ever_worked or run.below is not None or run.history.gave_up
        history = replace(succeeded(run.history, now, self.context.tools.settings.recovery), gave_up_at=None)
        self.context.notes.clear(FindingKind.GAVE_UP)
        if changed or now - self._remembered_at >= REMEMBER_EVERY:
            self._remembered_at = now
            self.context.edit_soon(history=history, below=None)
        else:
            self.context.note(history=history)

    def _confirm(self, snapshot: Snapshot) -> None:
        attempt = self.context.attempt
        if attempt is None:
            return
        answer = attempt.confirmation(snapshot.at, self.context.tools.settings.trainer.startup_patience)
        if answer.state is ConfirmationState.CONFIRMED:
            self._confirmed(answer.step)
        elif answer.state is ConfirmationState.UNCONFIRMED:
            self.context.failure = None
            self.context.unconfirmed = True
            self.context.unconfirmed_above = newest_step(self.context.tools.catalogue.sets)
            self.context.show(Phase.RUNNING, "podwatch found no step number: it deletes nothing before the next save")
            start = (
                "the fresh start" if attempt.resumed_from is None else f"the resume from step {attempt.resumed_from}"
            )
            self.context.notes.add(
                FindingKind.RESUME_UNCONFIRMED,
                Severity.WARNING,
                f"podwatch could not confirm {start}: it found no step number in the trainer's output. It deletes no"
                " checkpoint on this pod before the next save",
                "check `podwatch logs` for the step; set [trainer] logs if the trainer writes its steps elsewhere",
            )
        elif answer.state is ConfirmationState.RESUMED_WRONG:
            text = (
                f"training should continue from step {attempt.resumed_from}, but reported step {answer.step}"
                f" ({', '.join(answer.sources)})"
            )
            if self.context.held():
                self.context.notes.add(
                    FindingKind.RESUMED_WRONG,
                    Severity.CRITICAL,
                    f"{text}; podwatch does not stop it ({self.context.held()})",
                )
                return
            self.runner.spawn(lambda: self.operations.resumed_wrong(text))

    def _confirmed(self, step: int | None) -> None:
        attempt, tools = self.context.attempt, self.context.tools
        if attempt is None:
            return
        where = "the beginning" if attempt.resumed_from is None else f"step {attempt.resumed_from}"
        source = f"started from {where}" if attempt.resumed_from is None else f"resumed from {where}"
        self.context.show(Phase.RUNNING, f"the start is confirmed at step {step} ({source})")
        cause_wall = self.context.failure.wall if self.context.failure is not None else None
        self.context.failure = None
        self.context.notes.clear(FindingKind.RESUMED_WRONG, FindingKind.BLOCKED)
        self.context.tools.run_file.note(lambda run: run.with_start(attempt.start_id, confirmed=True))
        self.context.tools.run_file.record_soon()
        lost = self.context.lost_steps(attempt.step_at_death, attempt.resumed_from)
        text = f"Training continues at step {step} ({source})"
        if attempt.resumed_from == step:  # a trainer that first reports the step it loaded
            text = f"Training continues from step {step}"
        if attempt.incident_id is not None:
            down = None if cause_wall is None else max(0.0, tools.clock.wall() - cause_wall)
            text += cost(lost, attempt.lost_seconds, down)
        tools.say(EventName.TRAINER_CONFIRMED, text, step=step)
        if attempt.incident_id is not None:
            self.context.close_incident(
                attempt.incident_id,
                f"restarted from {where}",
                resumed=attempt.resumed_from,
                lost=lost,
                message=text,
            )


class Recovery:
    """One per run: call ``begin`` once, ``consider`` at every tick of the sensing loop, ``close`` at the end."""

    def __init__(self, context: RecoveryContext, failures: Failures, gang: GangStart | None = None) -> None:
        """``gang``: None for a run on one node."""
        self.context, self.failures = context, failures
        self.lineages, self.command = Lineages(context), CommandWatch(context)
        self.chooser = ResumeChooser(context)
        self.starter = Starter(context, self.chooser, gang)
        self.stops = Stops(context, self.lineages)
        self.manual = ManualStarts(context, self.stops)
        self.checks = StartChecks(context, self.stops, self.manual)
        self.operations = Operations(
            context,
            stops=self.stops,
            manual=self.manual,
            checks=self.checks,
            chooser=self.chooser,
            starter=self.starter,
            failures=failures,
            gang=gang,
        )
        self.runner = OperationRunner(context, self.operations)
        self.lookout = Lookout(context, self.manual, self.runner, self.operations)
        self.requests = Requests(context, self.runner, self.operations, self.command)
        self.confirmation = Confirmation(context, self.runner, self.operations)
        self.evaluating = Evaluating(context, self.runner, self.operations)
        self.opening = ""
        """The first line that podwatch prints about this run; set by ``begin``."""
        self._reported: set[str] = set()

    @property
    def handle(self) -> TrainerHandle | None:
        """The watched trainer."""
        return self.context.handle

    @property
    def desired(self) -> Desired:
        return self.context.desired

    # -- life ---------------------------------------------------------------------------------------------------------

    async def begin(self, *, adopt_existing: str = "", by_hand: str = "", not_before_wall: float | None = None) -> None:
        """Continue what an earlier podwatch left, then adopt, attach or start as wanted. Returns soon: longer work
        continues as an operation. ``adopt_existing``: id of the operator's `--adopt-existing`. ``by_hand``: id of the
        `podwatch run` that an operator typed; the first begin with it does not wait out a backoff. ``not_before_wall``:
        epoch second before which nothing is started, because earlier attempts of the job failed. Raises
        ConfigurationError when output_dir belongs to another run."""
        tools = self.context.tools
        with contextlib.suppress(HostError):  # ``carry_on`` reads it later, before any start
            self.context.adopt = adopt_existing
            await recall(self.context)
            if by_hand and by_hand != self.context.run.executed.get(BY_HAND):
                await self._forget_giving_up(executed={**self.context.run.executed, BY_HAND: by_hand})
        run = self.context.run
        if tools.settings.recovery.on_give_up == "exit" and run.history.gave_up:
            # Whoever starts podwatch again on this machine wants another try now, not in an hour.
            self.context.note(history=replace(run.history, gave_up_at=None), next_try_wall=None)
        if not_before_wall is not None:
            self.context.note(next_try_wall=max(self.context.run.next_try_wall or 0.0, not_before_wall))
        await tools.blocking(quarantine.make_spare, tools.workspace)
        _, foreign = await self.chooser.ours()
        if tools.run_file.known and not tools.follows and any(s.complete for s in foreign):
            steps = ", ".join(str(s.step) for s in foreign if s.complete)
            self.context.notes.add(
                FindingKind.FOREIGN_CHECKPOINTS,
                Severity.WARNING,
                f"podwatch does not use checkpoints from before its first start here: step {steps}",
                "run `podwatch run --adopt-existing` to use them, or `podwatch clean` to move them to quarantine",
            )
        self.context.show(Phase.LOOKING)
        look = await tools.launcher.look()
        stop = self.context.run.stopping
        if look.handle is not None and (stop is None or look.handle.start_id != stop.start_id):
            # The common case, an upgrade: watch again before anything else happens.
            await reconcile(self.context, look)
            await adopt(self.context, look.handle)
            status = await look.handle.exit_status()
            self.opening = (
                f"took over the running trainer (pid {look.handle.launcher.pid})"
                if status is None
                else f"training ended while podwatch was not running ({status.describe()})"
            )
            if self.context.desired is not Desired.RUNNING:
                self.runner.spawn(self.operations.as_recorded)
            return
        self.opening = self._opening(bool(look.handle), look.trees)
        self.runner.spawn(self.operations.carry_on)

    async def _forget_giving_up(self, **more: Any) -> None:
        history = replace(self.context.run.history, gave_up_at=None)
        await self.context.edit(history=history, next_try_wall=None, **more)

    def _opening(self, half_stopped: bool, trees: Sequence[FoundTree]) -> str:
        candidates = sum(tree.answer is TreeAnswer.ATTACH for tree in trees)
        if half_stopped:
            return "finishing an interrupted stop or start"
        beside = f" (trainers that podwatch did not start: {candidates}; see `podwatch status`)" if candidates else ""
        if self.context.desired is Desired.STOPPED:
            return f"training is stopped and stays stopped until `podwatch start`{beside}"
        if self.context.desired is Desired.FINISHED:
            return f"training has finished; `podwatch start` continues it{beside}"
        if candidates == 1:
            return "watching a trainer that podwatch did not start"
        if candidates:
            return f"{candidates} running trainers could be this run's: see `podwatch status`"
        if trees and not self.context.held():
            return f"not starting training yet beside pid {trees[0].launcher.pid}: {trees[0].reason}"
        if self.context.held():
            return f"no training is running, and podwatch starts none ({self.context.held()})"
        if self.context.run.history.gave_up:
            return "podwatch gave up restarting training; it still guards the checkpoints"
        return "no training is running: starting it"

    @property
    def state(self) -> RecoveryState:
        context = self.context
        run, handle, failure = context.run, context.handle, context.failure
        last = run.started_from
        step = context.attempt.resumed_from if context.attempt is not None else last
        failed = failure is not None and (handle is None or handle.start_id == failure.start_id)
        if failed or (context.phase in _BEFORE_START and context.desired is Desired.RUNNING):
            step = context.expected_step()
        return RecoveryState(
            phase=context.phase,
            since=context.since,
            step=step,
            attempts=run.history.streak_count,
            next_try_wall=run.next_try_wall if context.phase in (Phase.BACKOFF, Phase.GAVE_UP) else None,
            detail=context.detail,
            handle=handle,
            start_id=handle.start_id if handle is not None else "",
            supervision=handle.supervision if handle is not None else Supervision.NONE,
            protect_reasons=self._protected(last),
            unconfirmed=context.unconfirmed,
            hold_deletions=context.unconfirmed,
            acting=self.runner.acting and not self.lookout.looking and not self._waits,
            incident_id=context.last_incident,
            evaluation=context.evaluation,
            adopted=context.adopted,
            changed_at=context.changed_at,
        )

    @property
    def _waits(self) -> bool:
        """Whether the operation in progress only waits, for an event or for an evaluation."""
        context = self.context
        if context.evaluation and context.phase in (Phase.EVALUATING, Phase.STOPPED, Phase.FINISHED):
            return True
        return context.phase in _WAITING

    def _protected(self, last: int | None) -> tuple[tuple[int, str], ...]:
        context = self.context
        kept = dict(context.run.refused)
        if context.chosen is not None:
            kept[context.chosen] = "being resumed from"
        if context.restoring is not None:
            kept[context.restoring] = "being fetched"
        attempt = context.attempt
        if attempt is not None and attempt.resumed_from is not None and not attempt.made_step:
            kept[attempt.resumed_from] = "being resumed from"
        elif last is not None and context.phase in (Phase.STARTING, Phase.CONFIRMING, Phase.BLOCKED, Phase.BACKOFF):
            kept[last] = "last resumed from"
        return tuple(sorted(kept.items()))

    def read_again(self) -> bool:
        """Do what ``begin`` could not do without run.json, now that it may be readable. Return whether there was
        something to do."""
        if self.context.recalled or not self.runner.ready:
            return False
        self.runner.spawn(self.operations.carry_on)
        return True

    async def close(self) -> None:
        """Stop watching; training continues. The next podwatch finishes interrupted work."""
        self.runner.closed = True
        await self.command.close()
        await self.lineages.close()
        task, self.runner.task = self.runner.task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
        with contextlib.suppress(PodwatchError):
            await self.context.edit()
        self.context.tools.files.close()
        self.context.tools.evidence.close()

    def reconfigure(self, settings: Settings, policies: Policies) -> None:
        """Use new settings from the next operation on; the current one keeps the old ones."""
        observed = self.context.tools.settings.mode == "observe"
        self.context.tools = replace(self.context.tools, settings=settings, policies=policies)
        self.context.command_looked_at = float("-inf")
        if observed and settings.mode == "act" and self.context.handle is None and self.runner.ready:
            self.runner.spawn(self.operations.carry_on)  # mode observe only reported it

    # -- the sensing loop ---------------------------------------------------------------------------------------------

    @property
    def asks_whose(self) -> bool:
        """Whether a start waits to be confirmed by a save or a file that another process may have written."""
        return (
            self.context.phase is Phase.CONFIRMING
            and self.context.attempt is not None
            and bool(self.context.attempt.unproven)
        )

    def findings(self) -> tuple[Finding, ...]:
        """Return recovery's own findings."""
        stuck = self.stops.stuck if self.runner.acting else ()
        if not stuck:
            return self.context.notes.all
        text = "podwatch cannot end the old trainer; these processes are stuck: " + "; ".join(stuck)
        fix = "wait: training starts when they are gone; if they stay, reboot or use another machine"
        return (
            *self.context.notes.all,
            Finding(FindingKind.BLOCKED, Severity.CRITICAL, text, self.context.since, fix, subject="stuck"),
        )

    def consider(self, snapshot: Snapshot, findings: Sequence[Finding], beside: Beside = ALONE) -> None:
        """Run one tick: update the current attempt, and act on a confirmed verdict. ``beside``: other processes that
        may write into output_dir. Never blocks."""
        self.failures.snapshots.append(snapshot)
        self.confirmation.watch(snapshot, beside)
        if not self.runner.closed:
            self.command.compare_soon(snapshot.at)
            if not self.runner.acting:
                self.lineages.check_soon()
        self.stops.holds_again()
        sample = snapshot.trainer.value
        if self.context.handle is not None and sample is not None and sample.start_id == self.context.handle.start_id:
            self.stops.hear_of_death(tuple(findings), finish_line=sample.finish_line)
            self._see_machine(findings)
        if not self.context.tools.run_file.problem and self.read_again():
            return None
        if not self.runner.ready or self.context.handle is None:
            return self.lookout.look_out(snapshot)
        if self.stops.must_hand_over():
            return self.runner.spawn(self.operations.hand_over)
        if sample is None or sample.start_id != self.context.handle.start_id:
            return None  # a snapshot of another start: its findings do not apply to this one
        for finding in findings:
            if finding.verdict is Verdict.NONE or not finding.confirmed:
                continue
            if self.context.held():
                self._only_report(finding)
            elif finding.verdict is Verdict.FINISH:
                return self.runner.spawn(lambda f=finding: self.stops.finish(f))  # type: ignore[misc]
            elif finding.verdict is Verdict.STOP:
                kept = self.context.run.stop_cancelled_for == self.context.handle.start_id
                if self.context.desired is Desired.RUNNING and not kept:
                    return self.runner.spawn(lambda f=finding: self.stops.stop_sick(f))  # type: ignore[misc]
            elif self.context.desired is not Desired.RUNNING:
                return self.runner.spawn(
                    lambda: self.stops.stop("the trainer ended, and training is not wanted any more")
                )
            elif self.context.tools.settings.trainer.command:
                return self.runner.spawn(lambda f=finding: self.operations.recover(f))  # type: ignore[misc]
            else:
                self.context.notes.add(
                    FindingKind.UNGUARDED,
                    Severity.CRITICAL,
                    f"{finding.summary}; podwatch cannot restart training: [trainer] command is not configured",
                    "set [trainer] command",
                )
        return self.lookout.look_out(snapshot)

    def _see_machine(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            rule = finding.subject if finding.kind is FindingKind.LOG_RULE else ""
            if finding.kind in MACHINE_FAULTS or rule in MACHINE_RULES:
                self.context.machine_fault = finding.summary
                lasts = finding.kind in (FindingKind.GPU_FAULT, FindingKind.GPU_LOST)
                self.context.machine_broken |= lasts and finding.severity is Severity.CRITICAL

    def _only_report(self, finding: Finding) -> None:
        mark = f"{self.context.handle.start_id if self.context.handle else ''}:{finding.key}"
        if mark not in self._reported:
            self._reported.add(mark)
            self.context.tools.say(
                EventName.FINDING_RAISED,
                f"{self.context.held()}: would {finding.verdict} because {finding.summary}",
                Severity.WARNING,
                kind=str(finding.kind),
            )
