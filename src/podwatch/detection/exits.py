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
from podwatch.detection.window import Signal, Window, agreeing, judged, signal
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import ExitStatus, ProcessRole
from podwatch.domain.snapshot import SensorState, Supervision

OOM_NEAR_SECONDS = 60.0
"""An OOM kill counted this close to an end explains it: the host is read every few seconds."""
ALONE_SECONDS = ONE_END_SECONDS + 5.0
"""A trainer that ends alone with unknown exit status may be the first role of a run that is being stopped: each other
role follows within ONE_END_SECONDS and is seen some seconds later. Until then podwatch reports and does not act."""
KILLED = ", killed by the kernel because memory ran out"


def out_of_memory(turn: Turn, status: ExitStatus, ended_at: float) -> tuple[Evidence, ...]:
    """Evidence that the kernel's OOM killer ended the process: an OOM counter grew around the end, and the exit status
    is SIGKILL or unknown (only the parent process learns it). Signal 9 alone can be anybody's."""
    if status.known and status.signal != 9 and status.code != 137:
        return ()
    first, kills = turn.start.host_read_at, turn.machine.oom_kills
    near = min(
        (abs(at - ended_at) for at, _ in kills if first is not None and at > first), default=OOM_NEAR_SECONDS + 1.0
    )
    said = f"OOM kill counted within {near:.0f} s of the end"
    return (Evidence("out of memory", said, Agreement.AGREES, near),) if near <= OOM_NEAR_SECONDS else ()


# -- the launcher ------------------------------------------------------------------------------------------------------


def launcher_ended(turn: Turn) -> Iterator[Finding]:
    """The launcher ended: finished, or failed. Idempotent: the same end always gives the same finding."""
    trainer = turn.trainer
    if trainer.alive or trainer.exit is not None:
        window = turn.start.watch("launcher", trainer.alive, turn.snapshot.trainer.at)
        if trainer.exit is not None and window.since is not None and turn.wanted:  # else it is expected
            yield from _judge_exit(turn, trainer.exit, window.since)


def _judge_exit(turn: Turn, status: ExitStatus, since: float) -> Iterator[Finding]:
    step, target, policies = turn.start.progress.step, turn.policies.max_steps, turn.policies
    reached, saved = target_reached(turn.start.progress, policies), turn.snapshot.checkpoint.newest_step
    is_saved = target is not None and saved is not None and saved >= target  # a start from it has nothing to do
    shown, at = ("no step", "before its first step") if step is None else (f"step {step}", f"at step {step}")
    evidence: tuple[Evidence, ...] = (
        Evidence("launcher", status.describe(), Agreement.AGREES, max(0.0, turn.at - since)),
        Evidence("progress", shown, Agreement.AGREES),
    )
    done = ""
    if turn.trainer.finish_line:
        done = "the trainer printed its finish line and ended"
        evidence += (Evidence("finish line", "seen", Agreement.AGREES),)
    elif not status.known and reached and is_saved:
        done = f"the trainer ended at its target ({shown}), whose checkpoint is complete; its exit status is not known"
    elif not status.clean:
        killed = out_of_memory(turn, status, since)
        what = f"the trainer ended with {status.describe()} {at}{KILLED if killed else ''}"
        yield _failed(turn, what, since, (*evidence, *killed), by_kernel=bool(killed))
    elif policies.clean_exit_finishes:
        done = f"the trainer ended with code 0 {at}"
    elif target is not None and reached:
        done = f"the trainer ended with code 0 at its target (step {step})"
    elif step is None and is_saved:
        done = f"the trainer ended with code 0: the checkpoint of its target (step {target}) was there"
    elif turn.snapshot.progress.state is SensorState.PENDING:
        return  # judged when the step is known
    elif target is not None:
        what = f"the trainer ended with code 0 {at}, below its target of {target}"
        yield _failed(turn, what, since, evidence)
    else:
        done, what = _without_target(turn, at)
        if what:
            yield _failed(turn, what, since, evidence)
    if done:
        yield Finding(
            FindingKind.FINISHED, Severity.INFO, done, since, verdict=Verdict.FINISH, confirmed=True, evidence=evidence
        )


def _without_target(turn: Turn, at: str) -> tuple[str, str]:
    """Exit 0 with no known target: restarted once. Finished if it ends at the same step again (one lower: a log line
    was lost); far below that step it is a crash. What a finish is called, or a failure."""
    step, learned = turn.start.progress.step, turn.learned
    before, again = learned.clean_exit_step, learned.clean_exit_start_id not in ("", turn.trainer.start_id)
    short = step is not None and step < (before or 0) - 1
    if again and not short and (step is None or (before is not None and step <= before)):
        return "the trainer ended with code 0 again without a new step: training is finished", ""
    if learned.clean_exit_start_id != turn.trainer.start_id:
        highest = max((s for s in (step, before) if s is not None), default=None)
        turn.learned = replace(learned, clean_exit_start_id=turn.trainer.start_id, clean_exit_step=highest)
    if again and short:
        return "", f"the trainer ended with code 0 {at}, although it reached step {before} before"
    return "", (
        f"the trainer ended with code 0 {at}; no target step is configured, so podwatch cannot tell whether it is"
        " finished and starts it once more"
    )


def _failed(turn: Turn, what: str, since: float, evidence: Sequence[Evidence], *, by_kernel: bool = False) -> Finding:
    """Its exit is the proof. Where the topmost process of an attached trainer (or one whose supervisor was killed) may
    have been a script that ended while training continues below it, the steps have to agree before podwatch acts."""
    trainer = turn.trainer
    wait = None if by_kernel else operator_wait(turn, since, trainer.exit)  # what the kernel kills, no operator did
    confirmed, suggestion = wait is None, wait.announcement if wait is not None else ""
    trains = any(p.role is ProcessRole.TRAINER or (p.cuda and p.role not in ENGINE_ROLES) for p in trainer.descendants)
    if trainer.supervision is Supervision.ATTACH and trains:
        steps = confirming.steps(turn, since, needed=True)
        evidence = (*evidence, steps.evidence)
        if not agreeing((steps,)):
            confirmed = False
            suggestion = "some of its processes still train; podwatch acts when they make no more steps"
    return Finding(
        FindingKind.TRAINER_EXITED, Severity.CRITICAL, what, since, suggestion, Verdict.RESTART, confirmed,
        tuple(evidence),
    )  # fmt: skip


# -- its children ------------------------------------------------------------------------------------------------------


def child_ended(turn: Turn) -> Iterator[Finding]:
    """No process of a required role is left, while the launcher lives: prime-rl's ignores each that ends with 0."""
    for role in sorted(ROLES - turn.trainer.finished):
        window = turn.start.of(f"{ROLE}{role}")
        ended = [life for life in turn.start.lives.values() if life.role is role and life.ended_at is not None]
        missing = window.seconds > max(turn.policies.gpu.hold, confirming.REPLACED_SECONDS)
        if ended and missing and window.counts() and turn.needs(role):
            yield from _judge_child(turn, max(ended, key=lambda life: (life.ended_at or 0.0, life.last)), window)


def _judge_child(turn: Turn, life: Life, window: Window) -> Iterator[Finding]:
    role, since = life.role, window.since or 0.0
    second = _second(turn, role, since)
    if role in ENGINE_ROLES and not confirming.steps_agree(second) and confirming.replacement(turn, life.last):
        return  # a new server is loading; its engine process appears later
    status = next((end.status for end in turn.trainer.ends if end.identity == life.identity), ExitStatus())
    killed = out_of_memory(turn, status, since)
    how = f"ended with {status.describe()}{KILLED if killed else ''}"
    who = "the trainer process" if role is ProcessRole.TRAINER else f"{life.name} ({role})"
    yield judged(
        FindingKind.REQUIRED_CHILD_EXITED, f"{who} {how} while the launcher still runs", since,
        signal(life.name, window, how), second, subject=f"{role}-{life.identity.pid}",
        waits="" if killed or not agreeing(second) else _waits(turn, role, status, second, window),
        alone="no corroborating signal, so podwatch does not restart training; check its log",
        more=(*killed, *confirming.logs(turn, "required-child-exited")),
    )  # fmt: skip


def _second(turn: Turn, role: ProcessRole, since: float) -> tuple[Signal, ...]:
    """The corroborating signals for the end of this role. Engine: server, memory, the other's process, steps. Trainer:
    memory of its own GPUs, steps. Orchestrator: steps only, and late, because steps in flight still complete."""
    steps = confirming.steps(turn, since)
    if role not in ENGINE_ROLES:
        return (confirming.trainers_memory(turn, since), steps) if role is ProcessRole.TRAINER else (steps,)
    other = ProcessRole.INFERENCE if role is ProcessRole.ENGINE else ProcessRole.ENGINE
    early = "alive" if other in turn.start.present else "ended just now, or never seen"
    window = turn.start.of(f"{ROLE}{other}")
    ended = signal(
        f"{other} process",
        window,
        "ended",
        sound="alive",
        never=early,
        seconds=confirming.REPLACED_SECONDS,
        early=early,
    )
    return (confirming.health(turn), confirming.memory(turn), ended, steps)


def _waits(turn: Turn, role: ProcessRole, status: ExitStatus, second: Sequence[Signal], window: Window) -> str:
    """Why podwatch does not act yet; empty if it does. A trainer that ended alone may be the first role of a run that
    is being stopped, unless its exit status shows a crash or steps stopped long ago."""
    wait = operator_wait(turn, window.since or 0.0, about=role)
    if wait is not None:
        return wait.announcement
    crashed = status.known and not status.clean and not looks_interrupted(status)
    left = ALONE_SECONDS - window.seconds
    if role is not ProcessRole.TRAINER or crashed or confirming.steps_agree(second) or left < 0.0:
        return ""
    return f"podwatch restarts training in {left:.0f} s. To stop training instead: `podwatch stop-training`"
