"""The end of the trainer, or of one of its required children: judged from the first second (docs/detection.md).

The end of a process that was seen alive is positive evidence. This module decides whether it is a finish or a failure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from podwatch.detection import confirming
from podwatch.detection.observe import ROLES, Turn
from podwatch.detection.operator_ends import ONE_END_SECONDS, looks_interrupted, operator_wait
from podwatch.detection.progress import target_reached
from podwatch.detection.start import ENGINE_ROLES, ROLE, Life
from podwatch.detection.verdict import agreeing, judged
from podwatch.detection.window import Signal, Window, failing
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import ExitStatus, ProcessRole
from podwatch.domain.snapshot import SensorState, Supervision, TrainerSample

OOM_NEAR_SECONDS = 60.0
"""An OOM kill counted this close to an end explains it: the host is read every few seconds."""
ALONE_SECONDS = ONE_END_SECONDS + 5.0
"""A trainer that ends alone with unknown exit status may be the first role of a run that is being stopped: each other
role follows within ONE_END_SECONDS and is seen some seconds later. Until then podwatch reports and does not act."""
SIGKILL, SIGKILL_CODE = 9, 137
OUT_OF_MEMORY = "out of memory"
KILLED = ", killed by the kernel because memory ran out"


def out_of_memory(turn: Turn, status: ExitStatus, ended_at: float) -> Evidence | None:
    """Evidence that the kernel's OOM killer ended the process: an OOM counter grew around the end, and the exit status
    is SIGKILL or unknown (only the parent process learns it). None otherwise: signal 9 alone can be anybody's."""
    if status.known and status.signal != SIGKILL and status.code != SIGKILL_CODE:
        return None
    near = [abs(at - ended_at) for at in turn.start.oom_at if abs(at - ended_at) <= OOM_NEAR_SECONDS]
    if not near:
        return None
    said = f"OOM kill counted within {min(near):.0f} s of the end"
    return Evidence(OUT_OF_MEMORY, said, Agreement.AGREES, min(near))


# -- the launcher ------------------------------------------------------------------------------------------------------


def launcher_ended(turn: Turn) -> Iterator[Finding]:
    """The launcher ended: finished, or failed. Idempotent: the same end always gives the same finding."""
    trainer, start = turn.trainer, turn.start
    if trainer is None:
        return
    if trainer.alive:
        start.ended_at = None
        return
    if trainer.exit is None:
        return
    if start.ended_at is None:
        start.ended_at = turn.snapshot.trainer.at
    if turn.wanted:  # else it is expected
        yield from _judge_exit(turn, trainer, trainer.exit, start.ended_at)


def _judge_exit(turn: Turn, trainer: TrainerSample, status: ExitStatus, since: float) -> Iterator[Finding]:
    step = turn.start.progress.step
    shown = f"step {step}" if step is not None else "no step"
    at = f"at {shown}" if step is not None else "before its first step"
    evidence = [
        Evidence("launcher", status.describe(), Agreement.AGREES, max(0.0, turn.at - since)),
        Evidence("progress", shown, Agreement.AGREES),
    ]
    if trainer.finish_line:
        evidence.append(Evidence("finish line", "seen", Agreement.AGREES))
        yield _finished("the trainer printed its finish line and ended", since, evidence)
    elif not status.known and target_reached(turn.start.progress, turn.policies) and _target_saved(turn):
        what = f"the trainer ended at its target ({shown}), whose checkpoint is complete; its exit status is not known"
        yield _finished(what, since, evidence)
    elif not status.clean:
        killed = out_of_memory(turn, status, since)
        what = f"the trainer ended with {status.describe()} {at}{KILLED if killed else ''}"
        evidence += [killed] if killed is not None else []
        yield _failed(turn, trainer, what, since, evidence, _still_training(turn, trainer, since))
    elif turn.policies.clean_exit_finishes:
        yield _finished(f"the trainer ended with code 0 {at}", since, evidence)
    elif turn.policies.max_steps is not None:
        yield from _against_target(turn, trainer, turn.policies.max_steps, since, evidence, at)
    elif turn.snapshot.progress.state is not SensorState.PENDING:
        yield _without_target(turn, trainer, since, evidence, at)


def _against_target(
    turn: Turn, trainer: TrainerSample, target: int, since: float, evidence: list[Evidence], at: str
) -> Iterator[Finding]:
    """Exit 0 with a known target."""
    step = turn.start.progress.step
    if target_reached(turn.start.progress, turn.policies):
        yield _finished(f"the trainer ended with code 0 at its target (step {step})", since, evidence)
    elif step is None and _target_saved(turn):
        what = f"the trainer ended with code 0: the checkpoint of its target (step {target}) was there"
        yield _finished(what, since, evidence)
    elif turn.snapshot.progress.state is not SensorState.PENDING:  # else judged when the step is known
        what = f"the trainer ended with code 0 {at}, below its target of {target}"
        yield _failed(turn, trainer, what, since, evidence)


def _without_target(turn: Turn, trainer: TrainerSample, since: float, evidence: list[Evidence], at: str) -> Finding:
    """Exit 0 with no known target: restarted once. Finished if it ends at the same step again (one lower: a log line
    was lost); far below that step it is a crash."""
    step, learned = turn.start.progress.step, turn.learned
    before = learned.clean_exit_step
    again = learned.clean_exit_start_id not in ("", trainer.start_id)
    new_step = step is not None and (before is None or step > before)
    short = step is not None and step < (before or 0) - 1
    if again and not new_step and not short:
        what = "the trainer ended with code 0 again without a new step: training is finished"
        return _finished(what, since, evidence)
    if learned.clean_exit_start_id != trainer.start_id:
        highest = max((s for s in (step, before) if s is not None), default=None)
        turn.learned = replace(learned, clean_exit_start_id=trainer.start_id, clean_exit_step=highest)
    what = (
        f"the trainer ended with code 0 {at}; no target step is configured, so podwatch cannot tell whether it is"
        " finished and starts it once more"
    )
    if again and short:
        what = f"the trainer ended with code 0 {at}, although it reached step {before} before"
    return _failed(turn, trainer, what, since, evidence)


def _target_saved(turn: Turn) -> bool:
    """Whether a complete checkpoint of the last step exists: a start from it has nothing to do."""
    target, newest = turn.policies.max_steps, turn.snapshot.checkpoint.newest_step
    return target is not None and newest is not None and newest >= target


def _finished(what: str, since: float, evidence: Sequence[Evidence]) -> Finding:
    return Finding(
        FindingKind.FINISHED, Severity.INFO, what, since, verdict=Verdict.FINISH, confirmed=True,
        evidence=tuple(evidence),
    )  # fmt: skip


def _still_training(turn: Turn, trainer: TrainerSample, since: float) -> Signal | None:
    """Evidence from the steps, where the topmost process of an attached trainer (or one whose supervisor was killed)
    may have been a script that ended while training continues below it. None if nothing of it lives."""
    if trainer.supervision is not Supervision.ATTACH:
        return None
    living = any(
        p.role is ProcessRole.TRAINER or (p.cuda and p.role not in ENGINE_ROLES) for p in trainer.descendants
    )  # fmt: skip
    return confirming.steps(turn, since, needed=True) if living else None


def _failed(
    turn: Turn, trainer: TrainerSample, what: str, since: float, evidence: list[Evidence], second: Signal | None = None
) -> Finding:
    """Its exit is the proof; if ``second`` is given, it has to agree before podwatch acts."""
    by_kernel = any(item.signal == OUT_OF_MEMORY for item in evidence)  # not stopped by an operator
    wait = None if by_kernel else operator_wait(turn, trainer, since, trainer.exit)
    confirmed, suggestion = wait is None, wait.announcement if wait is not None else ""
    if second is not None and not agreeing((second,)):
        confirmed, suggestion = False, "some of its processes still train; podwatch acts when they make no more steps"
    return Finding(
        FindingKind.TRAINER_EXITED,
        Severity.CRITICAL,
        what,
        since,
        suggestion=suggestion,
        verdict=Verdict.RESTART,
        confirmed=confirmed,
        evidence=(*evidence, second.evidence) if second is not None else tuple(evidence),
    )


# -- its children ------------------------------------------------------------------------------------------------------


def child_ended(turn: Turn) -> Iterator[Finding]:
    """No process of a required role is left, while the launcher lives: prime-rl's ignores each that ends with 0."""
    trainer, start = turn.trainer, turn.start
    if trainer is None or not trainer.alive or not turn.wanted or turn.ending:
        return
    for role in sorted(ROLES - trainer.finished):
        window = start.of(f"{ROLE}{role}")
        ended = [life for life in start.lives.values() if life.role is role and life.ended_at is not None]
        missing = window.seconds > max(turn.policies.gpu.hold, confirming.REPLACED_SECONDS)
        if ended and missing and window.counts() and turn.needs(role):
            last = max(ended, key=lambda life: (life.ended_at or 0.0, life.last))
            yield from _judge_child(turn, trainer, last, window)


def _judge_child(turn: Turn, trainer: TrainerSample, life: Life, window: Window) -> Iterator[Finding]:
    assert window.since is not None
    role, since = life.role, window.since
    second = _second(turn, trainer, role, since)
    if role in ENGINE_ROLES and not confirming.steps_agree(second) and confirming.replacement(turn, life.last):
        return  # a new server is loading; its engine process appears later
    status = _status(trainer, life)
    killed = out_of_memory(turn, status, since)
    how = f"{status.describe()}{KILLED if killed else ''}"
    who = "the trainer process" if role is ProcessRole.TRAINER else f"{life.name} ({role})"
    waits = "" if killed is not None or not agreeing(second) else _waits(turn, trainer, role, status, second, window)
    yield judged(
        FindingKind.REQUIRED_CHILD_EXITED, f"{who} ended with {how} while the launcher still runs", since,
        failing(life.name, f"ended with {how}", window), second, subject=f"{role}-{life.identity.pid}", waits=waits,
        alone="no corroborating signal, so podwatch does not restart training; check its log",
        more=(*((killed,) if killed is not None else ()), *confirming.logs(turn, "required-child-exited")),
    )  # fmt: skip


def _status(trainer: TrainerSample, life: Life) -> ExitStatus:
    return next((end.status for end in trainer.ends if end.identity == life.identity), ExitStatus())


def _second(turn: Turn, trainer: TrainerSample, role: ProcessRole, since: float) -> tuple[Signal, ...]:
    """The corroborating signals for the end of this role. Engine: server, memory, the other's process, steps. Trainer:
    memory of its own GPUs, steps. Orchestrator: steps only, and late, because steps in flight still complete."""
    steps = confirming.steps(turn, since)
    if role is ProcessRole.TRAINER:
        return (confirming.trainers_memory(turn, trainer, since), steps)
    if role not in ENGINE_ROLES:
        return (steps,)
    other = ProcessRole.INFERENCE if role is ProcessRole.ENGINE else ProcessRole.ENGINE
    window = turn.start.of(f"{ROLE}{other}")
    early = "alive" if other in turn.start.present else "ended just now, or never seen"
    ended = failing(f"{other} process", "ended", window, confirming.REPLACED_SECONDS, early=early)
    return (confirming.health(turn), confirming.memory(turn), ended, steps)


def _waits(
    turn: Turn, trainer: TrainerSample, role: ProcessRole, status: ExitStatus, second: Sequence[Signal], window: Window
) -> str:
    """Why podwatch does not act yet; empty if it does. A trainer that ended alone may be the first role of a run that
    is being stopped, unless its exit status shows a crash or steps stopped long ago."""
    assert window.since is not None
    wait = operator_wait(turn, trainer, window.since, about=role)
    if wait is not None:
        return wait.announcement
    crashed = status.known and not status.clean and not looks_interrupted(status)
    if role is not ProcessRole.TRAINER or crashed or confirming.steps_agree(second) or window.seconds > ALONE_SECONDS:
        return ""
    left = ALONE_SECONDS - window.seconds
    return f"podwatch restarts training in {left:.0f} s. To stop training instead: `podwatch stop-training`"
