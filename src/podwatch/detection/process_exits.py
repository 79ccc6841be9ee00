"""The end of the trainer, or of one of its required children: judged from the first second (docs/detection.md).

The end of a process that was seen alive is positive evidence. This module decides whether it is a finish or a failure.
"""

from dataclasses import dataclass, replace

from podwatch.detection import corroborating_signals as also
from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.hang import run_gpus
from podwatch.detection.learned import Learned
from podwatch.detection.operator_ends import ONE_END_SECONDS, Wait, announcement, looks_interrupted, operator_wait
from podwatch.detection.progress import target_reached
from podwatch.detection.signals import ENGINE_ROLES, extra, needs, passing
from podwatch.detection.windows import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import ExitStatus, ProcessRole
from podwatch.domain.snapshot import GpuState, Health, HostSample, RequiredExit, SensorState, Supervision, TrainerSample

REQUIRED_ROLES = ("inference", "engine", "orchestrator", "trainer")
"""prime-rl's launcher ignores each of these when it ends with code 0."""
OOM_NEAR_SECONDS = 60.0
"""An OOM kill counted this close to an end explains it: the host is read every few seconds, an end is reported 5 s
after it (a replacement may start)."""
ALONE_SECONDS = ONE_END_SECONDS + 5.0
"""A trainer that ends alone with unknown exit status may be the first role of a run that is being stopped: each other
role follows within ONE_END_SECONDS and is seen some seconds later. Until then podwatch reports and does not act."""
STARTED_LATER_SECONDS = 1.0
"""Tolerance: start times are exact to 0.01 s, the time of an end only to the interval between two looks."""
GAP_SHARE_OF_HOLD = 0.75
GIB = 1 << 30
SIGKILL, SIGKILL_CODE = 9, 137
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True)
class ExitState:
    ended_at: float | None = None
    """When the end of the launcher was first seen (monotonic)."""
    ooms: int | None = None
    """The OOM-kill counter of the run's cgroup as last read."""
    oom_at: tuple[float, ...] = ()
    """When it was seen to grow (monotonic)."""
    trainer_gpus: frozenset[int] = frozenset()
    """GPUs used by the trainer alone. ``full``: those of them that were seen full during this start."""
    full: frozenset[int] = frozenset()
    empty: Held = NOT_HELD
    """All of ``trainer_gpus`` below the floor."""
    rhythm: Rhythm = NO_RHYTHM


class ExitsDetector:
    name = "exits"
    kinds = (FindingKind.TRAINER_EXITED, FindingKind.REQUIRED_CHILD_EXITED, FindingKind.FINISHED)
    needs = ("trainer",)
    second = ("health", "gpu memory", "engine process", "trainer's gpu memory", "steps")
    survives_restart = False

    def initial(self) -> ExitState:
        return ExitState()

    def armed(self, state: ExitState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: ExitState, look: Look) -> DetectorResult[ExitState]:
        """Judge one turn. Idempotent: the same end always gives the same finding."""
        host = look.snapshot.host
        if host.ok and host.value is not None:
            state = _follow_ooms(state, host.value, host.at)
        trainer = look.trainer
        if trainer is None:
            return DetectorResult(state, look.learned)
        if trainer.alive:
            if state.ended_at is not None:
                state = replace(state, ended_at=None)
            state = _follow_memory(state, look)
            if not trainer.required_exits or not look.wanted:
                return DetectorResult(state, look.learned)
            return DetectorResult(state, look.learned, _children(state, look, trainer))
        if trainer.exit is None:
            return DetectorResult(state, look.learned)
        if state.ended_at is None:
            state = replace(state, ended_at=look.snapshot.trainer.at)
        if not look.wanted:  # the desired state is stopped or finished: this end is expected
            return DetectorResult(state, look.learned)
        finding, learned = _launcher(state, look, trainer, trainer.exit)
        return DetectorResult(state, learned, (finding,) if finding is not None else ())


DETECTOR = ExitsDetector()


def _follow_ooms(state: ExitState, host: HostSample, at: float) -> ExitState:
    now = host.oom_kills
    if now is None or now == state.ooms:
        return state
    grown = state.ooms is not None and now > state.ooms
    return replace(state, ooms=now, oom_at=(*state.oom_at, at)[-8:] if grown else state.oom_at)


def _follow_memory(state: ExitState, look: Look) -> ExitState:
    """Track the memory of the GPUs that the trainer uses alone. A failed reading restarts the window."""
    reading, policy = look.snapshot.gpus, look.policies
    if not reading.ok or reading.value is None:
        return state if state.rhythm is NO_RHYTHM else replace(state, empty=NOT_HELD, rhythm=NO_RHYTHM)
    if state.rhythm.last_at is not None and reading.at <= state.rhythm.last_at:
        return state
    own = state.trainer_gpus
    if look.signals.tree.trainer_gpus or not own:  # GPU holders are visible only while the trainer lives
        own = (frozenset(policy.gpu.trainer) or run_gpus(look)) - frozenset(policy.gpu.inference)
    used = {
        g.index: g.memory_used_bytes
        for g in reading.value
        if g.index in own and g.state is GpuState.OK and not g.mig and g.memory_used_bytes is not None
    }
    full = state.full | {index for index, memory in used.items() if memory >= policy.gpu.loaded}
    rhythm = state.rhythm.update(reading.at)
    empty = bool(own) and len(used) == len(own) and all(m < policy.gpu.floor for m in used.values())
    if not empty and state.empty is NOT_HELD and (own, full) == (state.trainer_gpus, state.full):
        return replace(state, rhythm=Rhythm(reading.at, state.rhythm.gaps))
    gap = rhythm.max_gap(GAP_SHARE_OF_HOLD * policy.gpu.hold)
    return replace(state, trainer_gpus=own, full=full, empty=state.empty.update(empty, reading.at, gap), rhythm=rhythm)


def _for_memory(state: ExitState, status: ExitStatus, ended_at: float) -> Evidence | None:
    """Evidence that the kernel's OOM killer ended the process: an OOM counter grew around the end, and the exit status
    is SIGKILL or unknown (only the parent process learns it). None otherwise."""
    if status.known and status.signal != SIGKILL and status.code != SIGKILL_CODE:
        return None
    near = [at for at in state.oom_at if abs(at - ended_at) <= OOM_NEAR_SECONDS]
    if not near:
        return None
    apart = min(abs(at - ended_at) for at in near)
    return Evidence(OUT_OF_MEMORY, f"OOM kill counted within {apart:.0f} s of the end", Agreement.AGREES, apart)


KILLED = ", killed by the kernel because memory ran out"


def _launcher(
    state: ExitState, look: Look, trainer: TrainerSample, status: ExitStatus
) -> tuple[Finding | None, Learned]:
    snapshot, progress, learned, policy = look.snapshot, look.progress, look.learned, look.policies
    since = state.ended_at if state.ended_at is not None else snapshot.at
    window = max(0.0, snapshot.at - since)
    how = status.describe()
    step = f"step {progress.step}" if progress.step is not None else "no step"
    at = f"at {step}" if progress.step is not None else "before its first step"
    evidence = [Evidence("launcher", how, Agreement.AGREES, window), Evidence("progress", step, Agreement.AGREES)]
    if trainer.finish_line:
        evidence.append(Evidence("finish line", "seen", Agreement.AGREES))
        return _finished("the trainer printed its finish line and ended", since, evidence), learned
    if not status.known and target_reached(progress, policy) and _target_saved(look):
        what = f"the trainer ended at its target ({step}), whose checkpoint is complete; its exit status is not known"
        return _finished(what, since, evidence), learned
    if not status.clean:
        memory = _for_memory(state, status, since)
        what = f"the trainer ended with {how} {at}{KILLED if memory else ''}"
        evidence += [memory] if memory is not None else []
        return _failed(what, since, look, trainer, evidence, _still_training(look, trainer, since)), learned
    if policy.clean_exit_finishes:
        return _finished(f"the trainer ended with code 0 {at}", since, evidence), learned
    if policy.max_steps is not None:
        if target_reached(progress, policy):
            return _finished(f"the trainer ended with code 0 at its target ({step})", since, evidence), learned
        if progress.step is None and _target_saved(look):
            what = f"the trainer ended with code 0: the checkpoint of its target (step {policy.max_steps}) was there"
            return _finished(what, since, evidence), learned
        if snapshot.progress.state is SensorState.PENDING:
            return None, learned  # the step is not known yet; judge at a later turn
        what = f"the trainer ended with code 0 {at}, below its target of {policy.max_steps}"
        return _failed(what, since, look, trainer, evidence), learned
    if snapshot.progress.state is SensorState.PENDING:
        return None, learned
    again = learned.clean_exit_start_id not in ("", trainer.start_id)
    new_step = progress.step is not None and (
        learned.clean_exit_step is None or progress.step > learned.clean_exit_step
    )
    # Finished: it ends at the same step again (one lower: a log line was lost). Far below that step: a crash.
    short = progress.step is not None and progress.step < (learned.clean_exit_step or 0) - 1
    if again and not new_step and not short:
        what = "the trainer ended with code 0 again without a new step: training is finished"
        return _finished(what, since, evidence), learned
    if learned.clean_exit_start_id != trainer.start_id:
        highest = max((s for s in (progress.step, learned.clean_exit_step) if s is not None), default=None)
        learned = replace(learned, clean_exit_start_id=trainer.start_id, clean_exit_step=highest)
    unknown = "no target step is configured, so podwatch cannot tell whether it is finished and starts it once more"
    what = f"the trainer ended with code 0 {at}; {unknown}"
    if again and short:
        what = f"the trainer ended with code 0 at {step}, although it reached step {learned.clean_exit_step} before"
    return _failed(what, since, look, trainer, evidence), learned


def _target_saved(look: Look) -> bool:
    """Whether a complete checkpoint of the last step exists: a start from it has nothing to do."""
    target, newest = look.policies.max_steps, look.snapshot.checkpoint.newest_step
    return target is not None and newest is not None and newest >= target


def _finished(what: str, since: float, evidence: list[Evidence]) -> Finding:
    return Finding(
        FindingKind.FINISHED,
        Severity.INFO,
        what,
        since,
        verdict=Verdict.FINISH,
        confirmed=True,
        evidence=tuple(evidence),
    )


def _still_training(look: Look, trainer: TrainerSample, since: float) -> Evidence | None:
    """Evidence from the steps, where the topmost process of an attached trainer (or one whose supervisor was killed)
    may have been a script that ended while training continues below it. None if nothing of it lives."""
    if trainer.supervision is not Supervision.ATTACH:
        return None
    living = [
        p for p in trainer.descendants if p.role is ProcessRole.TRAINER or (p.cuda and p.role not in ENGINE_ROLES)
    ]
    return also.steps(look, since, needed=True) if living else None


def _failed(
    what: str,
    since: float,
    look: Look,
    trainer: TrainerSample,
    evidence: list[Evidence],
    second: Evidence | None = None,
) -> Finding:
    """If ``second`` is given, it has to agree before podwatch acts."""
    by_kernel = any(item.signal == OUT_OF_MEMORY for item in evidence)  # not stopped by an operator
    wait = None if by_kernel else operator_wait(look.signals.endings, look.snapshot, trainer, since, trainer.exit)
    confirmed, suggestion = wait is None, announcement(wait) if wait is not None else ""
    if second is not None and second.agreement is not Agreement.AGREES:
        confirmed, suggestion = False, "some of its processes still train; podwatch acts when they make no more steps"
    return Finding(
        FindingKind.TRAINER_EXITED,
        Severity.CRITICAL,
        what,
        since,
        suggestion=suggestion,
        verdict=Verdict.RESTART,
        confirmed=confirmed,
        evidence=(*evidence, second) if second is not None else tuple(evidence),
    )


def _last_seen(trainer: TrainerSample, role: ProcessRole, ended_at: float) -> float:
    """When an ended process of this role was last seen alive; ``ended_at`` if unknown. A successor started after this
    time, but possibly before the look that noticed the end: the tree cannot always be read."""
    seen = [e.last_seen_at for e in trainer.required_exits if e.role is role and e.last_seen_at is not None]
    return max(seen, default=ended_at)


def _children(state: ExitState, look: Look, trainer: TrainerSample) -> tuple[Finding, ...]:
    if trainer.finish_line or target_reached(look.progress, look.policies):
        return ()  # the launcher is taking its children down
    policy = look.policies
    findings = []
    living = {p.role for p in trainer.descendants}
    last_gone = dict(look.signals.endings.gone)
    for gone in trainer.required_exits:
        # If a process of this role lived again since, count from its later end.
        ended_at = max(gone.seen_gone_at, last_gone.get(gone.role, gone.seen_gone_at))
        missing = look.snapshot.trainer.at - ended_at
        if gone.role not in REQUIRED_ROLES or missing <= policy.gpu.hold:
            continue
        if not needs(gone.role, look.learned):
            continue  # possibly part of an evaluation: training made steps before this role existed
        if passing(gone, living, policy.gpu):
            continue  # a fork that has not called exec yet
        second = _second(state, look, trainer, gone)
        agrees = bool(also.agreeing(second))
        if (
            gone.role in ENGINE_ROLES
            and STEPS not in also.agreeing(second)
            and also.replaced(look, _last_seen(trainer, gone.role, ended_at))
        ):
            continue  # a new server is loading; its engine process appears later
        if gone.role in living and not agrees:
            continue  # replaced, or one of several, and no signal shows a failure
        dead = agrees and gone.role not in living
        memory = _for_memory(state, gone.status, gone.seen_gone_at)
        how = f"{gone.status.describe()}{KILLED if memory else ''}"
        first = Evidence(gone.name, f"ended with {how}", Agreement.AGREES, missing)
        wait = None
        if dead and memory is None:
            wait = operator_wait(look.signals.endings, look.snapshot, trainer, ended_at, about=gone.role)
        alone = _alone(gone, second, missing) if dead and memory is None and wait is None else None
        suggestion = announcement(wait) if wait is not None else ""
        if alone is not None:
            suggestion = f"podwatch restarts training in {alone.seconds:.0f} s. {alone.why}"
        findings.append(
            Finding(
                FindingKind.REQUIRED_CHILD_EXITED,
                Severity.CRITICAL if dead else Severity.WARNING,
                f"{_named(gone)} ended with {how} while the launcher still runs",
                gone.seen_gone_at,
                suggestion=suggestion
                if dead
                else "no corroborating signal, so podwatch does not restart training; check its log",
                verdict=Verdict.RESTART if dead else Verdict.NONE,
                confirmed=dead and wait is None and alone is None,
                evidence=(
                    first,
                    *second,
                    *((memory,) if memory is not None else ()),
                    *also.logs(look, "required-child-exited"),
                ),
                subject=f"{gone.role}-{gone.identity.pid}",
            )
        )
    return tuple(findings)


def _named(gone: RequiredExit) -> str:
    return "the trainer process" if gone.role is ProcessRole.TRAINER else f"{gone.name} ({gone.role})"


def _alone(gone: RequiredExit, second: tuple[Evidence, ...], missing: float) -> Wait | None:
    """The remaining wait for a trainer that ended alone, while other roles may still follow it. None (act now) if its
    exit status shows a crash, or if steps stopped long ago."""
    crashed = gone.status.known and not gone.status.clean and not looks_interrupted(gone.status)
    if gone.role is not ProcessRole.TRAINER or crashed or STEPS in also.agreeing(second) or missing > ALONE_SECONDS:
        return None
    return Wait(ALONE_SECONDS - missing, "To stop training instead: `podwatch stop-training`")


def _second(state: ExitState, look: Look, trainer: TrainerSample, gone: RequiredExit) -> tuple[Evidence, ...]:
    """The corroborating signals for the end of this role. Engine: server, memory, engine process, steps. Trainer:
    memory of its own GPUs, steps. Orchestrator: steps only, and late, because steps in flight still complete."""
    steps = also.steps(look, gone.seen_gone_at)
    if gone.role is ProcessRole.TRAINER:
        return (_trainer_memory(state, look, trainer, gone), steps)
    if gone.role not in ENGINE_ROLES:
        return (steps,)
    return (_health(look), also.memory(look), _engine(look, trainer, gone.role), steps)


STEPS = "steps"


def _trainer_memory(state: ExitState, look: Look, trainer: TrainerSample, gone: RequiredExit) -> Evidence:
    """Agrees if the trainer's own GPUs are empty and no process was started since its end: a script that trains in
    phases starts the next phase, a launcher that only waits starts nothing."""
    name, policy = "trainer's gpu memory", look.policies
    own, held = state.trainer_gpus, state.empty
    if not own:
        return Evidence(name, "the trainer has no GPU of its own, or podwatch does not know it", Agreement.UNAVAILABLE)
    if not look.snapshot.gpus.ok:
        return Evidence(name, look.snapshot.gpus.detail or "not observed", Agreement.UNAVAILABLE)
    if not state.full:
        return Evidence(name, "never full during this start", Agreement.UNAVAILABLE)
    if held.since is None:
        return Evidence(name, "held", Agreement.DISAGREES)
    which = ", ".join(f"GPU {index}" for index in sorted(own))
    if held.samples < MIN_SAMPLES_EMPTY or held.seconds < policy.gpu.hold:
        return Evidence(name, f"{which} empty, not long enough", Agreement.UNAVAILABLE, held.seconds)
    if (later := _started_since(look, trainer, gone)) is None:
        return Evidence(name, f"{which} empty; process start times are unknown", Agreement.UNAVAILABLE)
    if later:
        return Evidence(name, f"{which} empty, but {later} was started since", Agreement.UNAVAILABLE, held.seconds)
    return Evidence(name, f"{which} empty", Agreement.AGREES, held.seconds)


MIN_SAMPLES_EMPTY = 3


def _started_since(look: Look, trainer: TrainerSample, gone: RequiredExit) -> str | None:
    """The name of a process that the launcher, or a script below it, started after this end; empty if there is none,
    None if unknown. Workers started by the other roles do not count."""
    snapshot = look.snapshot
    if snapshot.boot_at is None:
        return None
    boottime = snapshot.boot_at - (snapshot.at - snapshot.trainer.at)
    missing = snapshot.trainer.at - gone.seen_gone_at
    others = {p.identity.pid for p in trainer.descendants if p.role not in (ProcessRole.LAUNCHER, ProcessRole.OTHER)}
    for process in trainer.descendants:
        if process.parent_pid not in others and process.identity.age(boottime) < missing - STARTED_LATER_SECONDS:
            return process.name
    return ""


def _health(look: Look) -> Evidence:
    reading = look.snapshot.inference
    if not reading.ok or not reading.value:
        return Evidence("health", reading.detail or "not observed", Agreement.UNAVAILABLE)
    # "Healthy before" is not required: the process that answers was seen alive and has ended, perhaps while it loaded.
    for sample in reading.value:
        if sample.health in (Health.REFUSED, Health.UNHEALTHY) and not extra(sample, look.learned.seen):
            return Evidence("health", f"{sample.health} at {sample.url}", Agreement.AGREES)
    return also.health(look)


def _engine(look: Look, trainer: TrainerSample, role: ProcessRole) -> Evidence:
    if role is ProcessRole.ENGINE or "engine" not in look.learned.seen:
        return Evidence("engine process", "adds no evidence here", Agreement.UNAVAILABLE)
    if any(p.role is ProcessRole.ENGINE for p in trainer.descendants):
        return Evidence("engine process", "alive", Agreement.DISAGREES)
    return Evidence("engine process", "gone", Agreement.AGREES)
