"""The table of decisions: from what is there now to at most one action. Pure.

``decide`` asks the rows of ``ROWS`` in their order, and the first one that answers wins. Nothing is remembered between
two turns but run.json, so that a podwatch that was killed anywhere decides as the one before. A phase is never set: it
is part of the answer, as is the sentence that status shows: what happened, why, what podwatch does, and what the
operator does.

An ``Edit`` changes only run.json; the same turn then decides again. An ``Action`` changes the pod; no second one
begins before it has ended. A wait is an answer without either.

A podwatch that leaves asks no more (``Recovery.leave``): what is recorded is finished by the next one.

"Ours" is the tree of the last start, supervised or attached. Readings that are older than the end of our last trainer
show that trainer, so they count as absent (``Now.search``, ``Now.held``).

One file, although long: the order of the rows is what it says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeAlias

from podwatch.domain.checkpoint import newest_whole
from podwatch.domain.facts import Facts, PodSearch, Trainer
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.lease import Decision as Lease
from podwatch.domain.lease import LeaseAction
from podwatch.domain.process import FoundTree, TreeAnswer
from podwatch.domain.run_state import RunState
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import Desired, SensorState
from podwatch.domain.starts import StartedBy, TrainerStart
from podwatch.recovery.actions import (
    Attach,
    Clean,
    Count,
    Decision,
    DropStart,
    Evaluate,
    Fetch,
    Finish,
    Phase,
    RecordEnd,
    Start,
    Stop,
    WantStop,
)
from podwatch.recovery.choose import Ask, Choice, Pending, choose_start
from podwatch.trainer.rules import TrainerChoice, begun_since, choose_trainer

if TYPE_CHECKING:
    from podwatch.config.settings import Settings

JUDGE_SECONDS: Final = 120.0
"""For detection to judge an end of training. It takes one turn, and after a restart of podwatch the time to read the
logs again. A blind sensor never judges it."""
NO_CHECKPOINT: Final = -1
"""``stop_above`` where there was no checkpoint: any is newer."""
START_FIX: Final = "`podwatch start` starts training"
TAKE_OVER_FIX: Final = (
    "stop podwatch here, then run `podwatch run --take-over`; or change control.json in the store (docs/two-pods.md)"
)
STORE_FIX: Final = (
    "correct the store or its key (finding `store-unavailable`); or, if no other pod trains this run, run `podwatch"
    " start`"
)


# -- what the rows ask -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Now:
    """The facts of one turn, as the rows ask for them. ``findings``: of detection, about the trainer in ``facts``."""

    facts: Facts
    findings: Sequence[Finding]
    settings: "Settings"

    @property
    def run(self) -> RunState:
        return self.facts.run

    @property
    def wall(self) -> float:
        return self.facts.pod.wall

    @property
    def ours(self) -> Trainer | None:
        """The trainer, while anything of it lives."""
        return self.facts.trainer if self.facts.trainer is not None and self.facts.trainer.lives else None

    @property
    def ended(self) -> Trainer | None:
        """The trainer of which nothing lives, and whose end is not recorded."""
        return self.facts.trainer if self.facts.trainer is not None and not self.facts.trainer.lives else None

    @property
    def start(self) -> TrainerStart | None:
        """The last start, as recorded."""
        return None if self.facts.trainer is None else self.run.start(self.facts.trainer.start_id)

    @property
    def search(self) -> PodSearch | None:
        """None: the pod was not searched since our last trainer ended."""
        reading = self.facts.search
        return reading.value if reading.ok and reading.at >= self.facts.free_since else None

    @property
    def held(self) -> tuple[str, ...] | None:
        """What holds GPU memory or ports; None: not measured since our last trainer ended."""
        reading = self.facts.held
        return reading.value if reading.ok and reading.at >= self.facts.free_since else None

    @property
    def lease(self) -> Lease:
        """Without a store every pod may train."""
        store = self.facts.store
        return Lease(LeaseAction.HOLD, publish=True) if store is None or store.lease is None else store.lease

    @property
    def wants_training(self) -> bool:
        return self.run.desired is Desired.RUNNING

    @property
    def stop_is_recorded(self) -> bool:
        """Whether podwatch has begun to stop the trainer."""
        stopping, trainer = self.run.stopping, self.facts.trainer
        return stopping is not None and trainer is not None and stopping.start_id == trainer.start_id

    @property
    def verdict(self) -> Finding | None:
        """The first finding that asks for something and is confirmed."""
        cancelled = self.facts.trainer is not None and self.run.stop_cancelled_for == self.facts.trainer.start_id
        asks = [f for f in self.findings if f.verdict is not Verdict.NONE and f.confirmed]
        return next((f for f in asks if f.verdict is not Verdict.STOP or not cancelled), None)

    @property
    def end_judged(self) -> Finding | None:
        """The finding that says how training ended or that it is dead, while it is to stop anyway: an exit then needs
        no confirmation."""
        asks = [f for f in self.findings if f.verdict in (Verdict.RESTART, Verdict.FINISH)]
        sure = [f for f in asks if f.confirmed or f.kind is FindingKind.TRAINER_EXITED]
        return next((f for f in sure if f.verdict is Verdict.FINISH and f.confirmed), next(iter(sure), None))

    @property
    def unjudged_seconds(self) -> float:
        """Since the end of the trainer was seen."""
        trainer = self.facts.trainer
        return 0.0 if trainer is None or trainer.ended_at is None else self.facts.pod.at - trainer.ended_at

    @property
    def ended_wall(self) -> float | None:
        """When our last trainer ended (epoch seconds); None: none has, or it lives."""
        return self.ended.ended_wall if self.ended is not None else self.run.ended_wall

    @property
    def trees(self) -> TrainerChoice:
        """What else may train this run, and what podwatch does about it."""
        ended, search = self.ended_wall, self.search
        ago = None if ended is None else self.wall - ended
        trees = () if search is None else search.trees
        return choose_trainer(trees, ended_ago=ago, ignored=self.run.ignored)

    @property
    def newest(self) -> int | None:
        """The newest complete step here of the line that is trained."""
        found = newest_whole(self.facts.checkpoints)
        return None if found is None else found.step

    @property
    def attaches(self) -> bool:
        return self.settings.trainer.supervise != "start"


# -- the rows ----------------------------------------------------------------------------------------------------------


def another_supervisor_holds_the_run(now: Now) -> Decision | None:
    if now.ours is not None or now.search is None or not now.search.lock_holder:
        return None
    fix = "stop that training, or give this run an output_dir of its own"
    return Decision(Phase.BLOCKED, now.search.lock_holder, fix, kind=FindingKind.BLOCKED)


def a_stop_is_unfinished(now: Now) -> Decision | None:
    if now.facts.trainer is None or now.run.stopping is None or not now.stop_is_recorded:
        return None
    why = now.run.stopping.why
    action = Stop(now.facts.trainer.start_id, why, now.run.evaluation)
    return Decision(Phase.STOPPING, why, action=action)


def podwatch_only_watches(now: Now) -> Decision | None:
    """Paused, in mode observe, or its state cannot be written. Attaching changes nothing on the pod."""
    if not (held := _held_back(now)):
        return None
    would = _first(ROWS[ROWS.index(podwatch_only_watches) + 1 :], now)
    if isinstance(would.action, Attach) and not now.facts.unwritable:
        return would
    quiet = now.ours is not None or not now.wants_training
    if would.rests and quiet and would.phase is not Phase.ENDING:
        return would
    phase = Phase.OBSERVING
    if now.facts.unwritable:
        phase = Phase.BLOCKED
    elif now.run.pause is not None:
        phase = Phase.PAUSED
    return Decision(phase, f"{held}: {_would(would)}", "`podwatch unpause`" if phase is Phase.PAUSED else "")


def the_run_belongs_elsewhere(now: Now) -> Decision | None:
    if now.ours is None:
        return None
    left_to_operator = now.run.yielded and now.ours.attached
    why = now.lease.why_not if now.lease.stop and not left_to_operator else ""
    return Decision(Phase.STOPPING, why, action=Stop(now.ours.start_id, why)) if why else None


def training_is_not_wanted(now: Now) -> Decision | None:
    if now.ours is None or now.wants_training:
        return None
    judged = now.end_judged
    if now.run.desired is Desired.FINISHED or (judged is not None and judged.verdict is Verdict.FINISH):
        why = "training has finished" if judged is None else judged.summary
        return Decision(Phase.STOPPING, why, action=Finish(judged))
    if judged is None and now.ours.ended_wall is not None and now.unjudged_seconds < JUDGE_SECONDS:
        return Decision(Phase.ENDING, "stop requested; training has ended: podwatch checks whether it is finished")
    above = now.run.stop_above
    if above is None or judged is not None or now.ours.ended_wall is not None:
        why = _why_it_stops_now(now, judged)
        return Decision(Phase.STOPPING, why, action=Stop(now.ours.start_id, why))
    return _after_the_next_save(now, now.ours, above)


def an_evaluation_needs_the_gpus(now: Now) -> Decision | None:
    pending = now.facts.evaluation
    if pending is None or not pending.due or now.ours is None or now.facts.nodes is not None:
        return None
    if now.ours.attached or now.ours.ended_wall is not None:
        return None
    confirmed = now.start is not None and now.start.confirmed
    blind = not now.facts.pod.gpus.ok and now.facts.pod.gpus.state is not SensorState.ABSENT
    newest, last = now.newest, now.facts.last_step
    ends_soon = last is not None and newest is not None and newest >= last
    if not confirmed or blind or ends_soon or now.lease.why_not or not now.settings.trainer.command:
        return None
    why = f"to evaluate {pending.title}"
    return Decision(Phase.STOPPING, why, action=Stop(now.ours.start_id, why, pending.title))


def a_finding_asks(now: Now) -> Decision | None:
    finding = now.verdict
    if now.ours is None or finding is None:
        return None
    if finding.verdict is Verdict.FINISH:
        return Decision(Phase.STOPPING, finding.summary, action=Finish(finding))
    if finding.verdict is Verdict.STOP:
        newest = now.newest
        above = None if finding.kind is FindingKind.DISK_NO_ROOM else NO_CHECKPOINT if newest is None else newest
        return Decision(Phase.ENDING, finding.summary, edit=WantStop(finding, above))
    if not now.settings.trainer.command:
        text = f"{finding.summary}; podwatch cannot restart training: [trainer] command is not configured"
        return Decision(_watching(now), text, "set [trainer] command", kind=FindingKind.UNGUARDED)
    return Decision(Phase.STOPPING, finding.summary, edit=Count(now.ours.start_id, finding))


def our_trainer_lives(now: Now) -> Decision | None:
    if now.ours is None:
        return None
    phase = _watching(now)
    if phase is Phase.ATTACHED:
        return Decision(phase, f"watching pid {now.ours.pid}, which podwatch did not start")
    step = None if now.start is None else now.start.from_step
    source = "started from the beginning" if step is None else f"resumed from step {step}"
    if now.ours.unconfirmed:
        return Decision(phase, f"{source}; no step number is seen: nothing is deleted here before the next save")
    return Decision(phase, source if phase is Phase.RUNNING else f"{source}; waiting for the first step")


def our_trainer_has_ended(now: Now) -> Decision | None:
    """What follows, once it is known how; an end that nothing explains yet is left to the later rows."""
    if (trainer := now.ended) is None:
        return _unseen_start(now)
    judged = now.verdict if now.wants_training else now.end_judged
    late = now.unjudged_seconds >= JUDGE_SECONDS and not _announced(now)
    if judged is None and late:
        summary = "training has ended, and podwatch cannot see how"
        since = trainer.ended_at or 0.0
        judged = Finding(FindingKind.TRAINER_EXITED, Severity.CRITICAL, summary, since, verdict=Verdict.RESTART)
    if judged is not None and judged.verdict is Verdict.FINISH:
        return Decision(Phase.STOPPING, judged.summary, action=Finish(judged))
    if judged is not None and judged.verdict is Verdict.RESTART:
        if now.wants_training:
            return Decision(Phase.STOPPING, judged.summary, edit=Count(trainer.start_id, judged))
        why = _why_it_stops_now(now, judged)
        return Decision(Phase.STOPPING, why, action=Stop(trainer.start_id, why))
    if trainer.attached and [t for t in _newer(now) if t.answer is TreeAnswer.WAIT]:
        text = f"an operator starts the ended trainer (pid {trainer.pid}) again: that is no failure"
        return Decision(Phase.LOOKING, text, edit=RecordEnd(trainer.start_id, trainer.ended_wall))
    return None


def an_operator_started_a_trainer(now: Now) -> Decision | None:
    if now.search is None or not now.attaches:
        return None
    named = next((t for t in now.search.trees if t.start_id == now.run.attach and t.attachable), None)
    tree = named or now.trees.attach
    if named is None and not now.wants_training:
        # Only a trainer of this very run that was started since shows that its operator wants training again.
        since = [t for t in _trainers(_newer(now)) if now.wall - t.top.age > now.run.desired_wall]
        tree = since[0] if len(since) == 1 else None
    if tree is None:
        return None
    return Decision(Phase.LOOKING, f"attaching to pid {tree.launcher.pid}: {tree.reason}", action=Attach(tree))


def something_may_train_already(now: Now) -> Decision | None:
    if not now.wants_training:
        return None
    if now.search is None:
        if now.ended is not None and not now.run.clean:
            return None  # its end is judged meanwhile
        return Decision(Phase.LOOKING, "podwatch looks whether a trainer of this run is running")
    trees = now.trees.trees
    return (_ask_which(now, trees) or _wait_beside(now, trees)) if trees else None


def its_operator_may_start_it_again(now: Now) -> Decision | None:
    if now.ended is None:
        return None
    phase = Phase.ATTACHED if now.ended.attached else Phase.RUNNING
    if found := _announced(now):
        return Decision(phase, found.summary, found.suggestion)
    return Decision(phase, "training has ended: podwatch checks how")


def an_evaluation_runs(now: Now) -> Decision | None:
    pending = now.facts.evaluation
    if pending is None or (now.wants_training and now.lease.why_not):
        return None
    if not (now.run.evaluation if now.wants_training else pending.idle):
        return None
    action = Evaluate(pending.title)
    if now.wants_training:
        return Decision(Phase.EVALUATING, f"training is stopped to evaluate {pending.title}", action=action)
    phase, why = _at_rest(now)
    return Decision(phase, f"{why}; evaluating {pending.title}", action=action)


def no_training_is_wanted(now: Now) -> Decision | None:
    if now.run.clean and now.search is not None and not now.trees.trees:
        return Decision(Phase.LOOKING, "moving what an old run left to quarantine", action=Clean())
    if now.wants_training:
        return None
    phase, why = _at_rest(now)
    if trees := now.trees.trees:
        text = f"podwatch does not guard these processes, because {why}: {listed(trees)}"
        fix = "if one of them is this run's training: `podwatch start --attach PID`"
        if len(_trainers(trees)) > 1:
            return Decision(phase, text, fix, kind=FindingKind.AMBIGUOUS_TRAINERS)
        return Decision(phase, text, fix, kind=FindingKind.UNGUARDED, severity=Severity.INFO)
    return Decision(phase, why, START_FIX)


def the_run_is_held_elsewhere(now: Now) -> Decision | None:
    lease = now.lease
    if not lease.why_not or (lease.act is LeaseAction.ASK and now.run.despite_store):
        return None
    if lease.stop:  # the finding ``superseded`` reports it
        phase = Phase.STOPPED if lease.act is LeaseAction.SUPERSEDED else Phase.BLOCKED
        return Decision(phase, lease.why_not, TAKE_OVER_FIX)
    if lease.act is LeaseAction.ASK:
        failed = now.facts.store is not None and bool(now.facts.store.error)
        return Decision(Phase.BLOCKED, lease.why_not, STORE_FIX, kind=FindingKind.BLOCKED if failed else None)
    due = None if lease.trains_in is None else now.wall + lease.trains_in
    fix = f"stop training on the other pod, or {TAKE_OVER_FIX}"
    if due is not None:
        at = f"{datetime.fromtimestamp(due, UTC):%H:%M:%S} UTC"
        fix = f"nothing: podwatch takes the run over at {at}, unless the other pod turns out to be alive"
    return Decision(
        Phase.BLOCKED, lease.why_not, fix, kind=FindingKind.BLOCKED, severity=Severity.WARNING, due_wall=due
    )


def the_next_try_is_not_due(now: Now) -> Decision | None:
    recovery, run = now.settings.recovery, now.run
    due = run.next_try_wall
    left = 0.0 if due is None else due - now.wall
    # A clock that was set back must not make a wait longer than any can be.
    waits = 0.0 < left <= max(recovery.backoff_max, recovery.retry_after_give_up)
    if run.history.gave_up and (due is None or recovery.on_give_up == "exit" or waits):
        asks = None if due is None else _asks(now)
        return asks or Decision(
            Phase.GAVE_UP,
            "podwatch gave up restarting",
            "fix the cause, then run `podwatch start`; podwatch still guards the checkpoints",
            kind=FindingKind.GAVE_UP,
            due_wall=due if waits else None,
            waits=waits and recovery.on_give_up != "exit",
        )
    if not waits:
        return None
    return _asks(now) or Decision(
        Phase.BACKOFF, f"podwatch tries to start training again in {left:.0f} s", due_wall=due
    )


def podwatch_starts_none(now: Now) -> Decision | None:
    trainer = now.settings.trainer
    if trainer.supervise == "attach" and not any(start.counted for start in now.run.starts) and not now.run.requested:
        return Decision(Phase.IDLE, "supervise = attach: podwatch waits until you start a trainer")
    if not trainer.command:
        text = "podwatch cannot start training: [trainer] command is not configured"
        return Decision(Phase.BLOCKED, text, "set [trainer] command", kind=FindingKind.BLOCKED, waits=False)
    return None


def the_gpus_are_held(now: Now) -> Decision | None:
    gpu, held = now.settings.gpu, now.held
    waited = now.facts.pod.at - now.facts.free_since
    over = waited >= gpu.release_wait
    if held == () or (held is None and over):
        return None
    what = "; ".join(held or ()) or "GPU memory has not been observed yet"
    if not over:
        return Decision(Phase.STARTING, f"waiting: {what}")
    if not (gpu.inference or gpu.trainer) and not any(name.startswith("port ") for name in held or ()):
        return None  # it may be anything else's
    fix = "end the process that holds it"
    return Decision(Phase.BLOCKED, f"podwatch cannot start training yet: {what}", fix, kind=FindingKind.BLOCKED)


def no_step_is_known_to_start_from(now: Now) -> Decision | None:
    chosen = choose_start(now.facts)
    if isinstance(chosen, Pending):
        kind = FindingKind.BLOCKED if chosen.fix else None
        return Decision(Phase.BLOCKED if chosen.fix else Phase.LOOKING, chosen.why, chosen.fix, kind=kind, chosen=True)
    return _asks(now)


def the_newest_is_in_the_store_only(now: Now) -> Decision | None:
    chosen = choose_start(now.facts)
    if not isinstance(chosen, Choice) or chosen.source != "store":
        return None
    return Decision(Phase.STARTING, f"fetching step {chosen.step} from the store", action=Fetch(chosen), chosen=True)


def training_starts(now: Now) -> Decision:
    chosen = choose_start(now.facts)
    assert isinstance(chosen, Choice)
    text = "a fresh start" if chosen.step is None else f"a start from step {chosen.step}"
    return Decision(Phase.STARTING, text, action=Start(chosen), chosen=True)


Row: TypeAlias = Callable[[Now], Decision | None]

ROWS: Final[tuple[Row, ...]] = (
    another_supervisor_holds_the_run,
    a_stop_is_unfinished,
    podwatch_only_watches,
    the_run_belongs_elsewhere,
    training_is_not_wanted,
    an_evaluation_needs_the_gpus,
    a_finding_asks,
    our_trainer_lives,
    our_trainer_has_ended,
    an_operator_started_a_trainer,
    something_may_train_already,
    its_operator_may_start_it_again,
    an_evaluation_runs,
    no_training_is_wanted,
    the_run_is_held_elsewhere,
    the_next_try_is_not_due,
    podwatch_starts_none,
    the_gpus_are_held,
    no_step_is_known_to_start_from,
    the_newest_is_in_the_store_only,
    training_starts,
)


def decide(facts: Facts, findings: Sequence[Finding], settings: "Settings") -> Decision:
    """What podwatch does about training now. Total: every state of the pod has an answer."""
    return _first(ROWS, Now(facts, findings, settings))


def nothing_else_trains(facts: Facts, settings: "Settings") -> bool:
    """Whether nothing else on the pod trains this run, or may: what a start asks once more before it changes
    anything."""
    now = Now(facts, (), settings)
    if now.ours is not None or now.search is None:
        return False
    others = (another_supervisor_holds_the_run, an_operator_started_a_trainer, something_may_train_already)
    return all(row(now) is None for row in others)


def _first(rows: Sequence[Row], now: Now) -> Decision:
    return next(decision for row in rows if (decision := row(now)) is not None)


# -- parts of rows -----------------------------------------------------------------------------------------------------


def _watching(now: Now) -> Phase:
    """The phase of the trainer; without one that lives, of a podwatch that does nothing."""
    if now.ours is None:
        rests = {Desired.STOPPED: Phase.STOPPED, Desired.FINISHED: Phase.FINISHED}
        return rests.get(now.run.desired, Phase.IDLE)
    if now.ours.attached:
        return Phase.ATTACHED
    known = now.start is not None and now.start.by is StartedBy.PODWATCH and now.start.proved
    confirmed = not known or now.ours.unconfirmed or (now.start is not None and now.start.confirmed)
    return Phase.RUNNING if confirmed else Phase.CONFIRMING


def _at_rest(now: Now) -> tuple[Phase, str]:
    stopped = now.run.desired is Desired.STOPPED
    why = "training is stopped" if stopped else "training has finished"
    return Phase.STOPPED if stopped else Phase.FINISHED, why + (f"; {now.lease.why_not}" if now.lease.stop else "")


def _held_back(now: Now) -> str:
    """Why podwatch neither stops nor starts training now, empty if it may."""
    run = now.run
    if now.facts.unwritable:
        return now.facts.unwritable
    if run.requested:
        return ""
    if run.pause is not None:
        return "paused"
    return "mode observe" if now.settings.mode == "observe" else ""


def _would(would: Decision) -> str:
    """What is pending, as the end of a sentence."""
    match would.action:
        case Stop() | Finish():
            return f"would stop training ({would.why})"
        case Start() | Fetch():
            return f"would start training ({would.why})"
        case None if would.edit is not None:
            return f"would act on this: {would.why}"
    return would.why


def _why_it_stops_now(now: Now, judged: Finding | None) -> str:
    if now.facts.trainer is not None and now.facts.trainer.ended_wall is not None:
        how = "podwatch cannot see how" if judged is None else judged.summary
        return f"stop requested; training ended on its own before podwatch stopped it: {how}"
    if judged is None:
        return "stop requested"
    have = "there is no checkpoint" if now.newest is None else f"the newest checkpoint is step {now.newest}"
    return f"stop requested; no further save will come, so training stops now: {judged.summary}; {have}"


def _after_the_next_save(now: Now, ours: Trainer, above: int) -> Decision:
    """Training that is about to end, after the save of its last step or its finish line, is not stopped by that save.
    One more save shows that it does not end there."""
    saves = [s.step for s in now.facts.checkpoints if s.complete and s.of_line and s.step > above]
    if not saves:
        newest = now.newest
        have = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is step {newest}"
        fix = "`podwatch start` cancels the stop; `podwatch stop-training` stops at once"
        return Decision(Phase.ENDING, f"stop requested; training stops after its next save ({have})", fix)
    last = now.facts.last_step
    if ours.finish_line or (last is not None and above < last and len([step for step in saves if step >= last]) == 1):
        why = f"stop requested; step {max(saves)} is the last one, so training ends on its own"
        return Decision(Phase.ENDING, why)
    why = f"stop requested; step {max(saves)} is saved"
    return Decision(Phase.STOPPING, why, action=Stop(ours.start_id, why))


def _unseen_start(now: Now) -> Decision | None:
    """A start that podwatch recorded and that nothing on the pod shows: its supervisor was never executed, or its
    record is lost."""
    last = now.run.starts[-1] if now.run.starts else None
    if last is None or not last.trains or last.ended is not None or now.search is None or now.facts.acting == "start":
        return None
    if last.seen:
        return Decision(Phase.LOOKING, "training has ended; its record is lost", edit=RecordEnd(last.id))
    return Decision(Phase.LOOKING, "the last start did not happen", edit=DropStart(last.id))


def _announced(now: Now) -> Finding | None:
    """The finding that names how long podwatch waits for the operator."""
    return next((f for f in now.findings if f.verdict is Verdict.RESTART and not f.confirmed and f.suggestion), None)


def _newer(now: Now) -> list[FoundTree]:
    """What began after our last trainer ended."""
    ended = now.ended_wall
    return begun_since(now.trees.trees, None if ended is None else now.wall - ended)


def _trainers(trees: Sequence[FoundTree]) -> list[FoundTree]:
    return [tree for tree in trees if tree.answer is TreeAnswer.ATTACH]


def _ask_which(now: Now, trees: Sequence[FoundTree]) -> Decision | None:
    if not (trainers := _trainers(trees)):
        return None
    text = "a trainer that podwatch did not start runs"
    if len(trainers) > 1:
        text = "several running trainers could be this run's"
    elif now.trees.attach is None:
        text = "a process that ran beside the ended trainer works in its output_dir"
    fix = (
        "run `podwatch start --attach PID` to guard one; stop the others, or run `podwatch start --ignore PID` for each"
        " that is not this run's training"
    )
    text = f"{text}, so podwatch starts no second one: {listed(trainers)}"
    return Decision(Phase.BLOCKED, text, fix, kind=FindingKind.AMBIGUOUS_TRAINERS)


def _wait_beside(now: Now, trees: Sequence[FoundTree]) -> Decision:
    """Beside trees that may train, or are unclear: a warning during the start-up patience, then a question."""
    patience = now.settings.trainer.startup_patience
    youngest = min(tree.top.age for tree in trees)
    late = youngest >= patience
    if late:
        awaited = " or ".join(dict.fromkeys(_awaited_of(tree) for tree in trees))
        text = (
            f"Training is not running: {listed(trees)}. After {youngest / 60:.0f} min podwatch still has not seen"
            f" {awaited}, and starts no trainer beside it"
        )
    else:
        signs = " or ".join(dict.fromkeys(_awaited_of(t) for t in trees if t.answer is TreeAnswer.WAIT))
        attaches = f"attaches when it sees {signs}, and " if signs else ""
        text = (
            f"podwatch waits before it starts training: {listed(trees)}. It {attaches}starts training when that process"
            f" ends; in {(patience - youngest) / 60:.0f} min it asks you"
        )
    pid = next((tree.launcher.pid for tree in trees if tree.attachable), trees[0].launcher.pid)
    fix = (
        f"if this is the run's training: `podwatch start --attach {pid}`; if not: stop it, or run `podwatch start"
        f" --ignore {pid}` to start training beside it; to start nothing: `podwatch stop-training`"
    )
    severity = Severity.CRITICAL if late else Severity.WARNING
    return Decision(Phase.BLOCKED, text, fix, kind=FindingKind.AMBIGUOUS_TRAINERS, severity=severity)


def _awaited_of(tree: FoundTree) -> str:
    """What decides about a tree beside which podwatch starts nothing."""
    if tree.answer is not TreeAnswer.WAIT:
        return "its end"
    sign = "a CUDA context or a training process"
    return (
        f"{sign} (neither can be seen here: give podwatch CAP_SYS_PTRACE, or run it as root)" if tree.hidden else sign
    )


def listed(trees: Sequence[FoundTree]) -> str:
    """The trees as one line for the operator to choose from, without secrets."""
    return "; ".join(f"pid {t.launcher.pid}: {scrub(t.command)[:80]} ({scrub(t.reason)})" for t in trees)


def _asks(now: Now) -> Decision | None:
    """What only an operator can decide about the step of the next start; None if there is nothing."""
    chosen = choose_start(now.facts)
    if not isinstance(chosen, Ask):
        return None
    kind = FindingKind.FOREIGN_CHECKPOINTS if chosen.unowned else FindingKind.BLOCKED
    kind = FindingKind.RESUMED_WRONG if chosen.wrong else kind
    return Decision(Phase.BLOCKED, chosen.why, chosen.fix, kind=kind, waits=False, chosen=True)
