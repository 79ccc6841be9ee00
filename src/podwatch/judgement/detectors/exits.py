"""How the trainer ended, or one of its required children: judged from the first second (DESIGN section 3, "Exit").

The end of a process that was seen alive is positive evidence in itself. What is judged here is what it means.
"""

from dataclasses import dataclass, replace

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.policy import DetectionPolicy
from podwatch.domain.process import ProcessRole
from podwatch.domain.reading import SensorState
from podwatch.domain.snapshot import GpuState, Health, Snapshot, Supervision, TrainerSample
from podwatch.judgement.detectors.silent_death import no_step_limit
from podwatch.judgement.learned import Learned
from podwatch.judgement.progress import Progress

ATTACH_EXIT_WAIT_SECONDS = 120.0
"""A trainer that podwatch did not start may have been stopped by its person: wait before acting (DESIGN section 2)."""


@dataclass(frozen=True, slots=True)
class ExitState:
    ended_at: float | None = None
    """When the end of the launcher was first seen."""


def target_reached(progress: Progress, policy: DetectionPolicy) -> bool:
    """Has the last step been made? Trainers that count from 0 show ``max_steps - 1`` last (facts/prime-rl.md, version
    table).
    """
    return policy.max_steps is not None and progress.step is not None and progress.step >= policy.max_steps - 1


def advance(
    state: ExitState, snapshot: Snapshot, progress: Progress, learned: Learned, policy: DetectionPolicy
) -> tuple[ExitState, Learned, tuple[Finding, ...]]:
    """One turn. The answer for one end stays the same however often it is asked."""
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    if trainer is None:
        return state, learned, ()
    if trainer.alive:
        return replace(state, ended_at=None), learned, _children(snapshot, trainer, progress, learned, policy)
    if trainer.exit is None:
        return state, learned, ()
    if state.ended_at is None:
        state = ExitState(snapshot.trainer.at)
    finding, learned = _launcher(state, snapshot, trainer, progress, learned, policy)
    return state, learned, (finding,) if finding is not None else ()


def _launcher(
    state: ExitState,
    snapshot: Snapshot,
    trainer: TrainerSample,
    progress: Progress,
    learned: Learned,
    policy: DetectionPolicy,
) -> tuple[Finding | None, Learned]:
    assert trainer.exit is not None
    since = state.ended_at if state.ended_at is not None else snapshot.at
    how = trainer.exit.describe()
    step = f"step {progress.step}" if progress.step is not None else "no step"
    evidence = [Evidence("launcher", how, Agreement.AGREES), Evidence("progress", step, Agreement.AGREES)]
    if trainer.finish_line:
        evidence.append(Evidence("finish line", "seen", Agreement.AGREES))
        return _finished("the trainer printed its finish line and ended", since, evidence), learned
    if not trainer.exit.clean:
        what = f"the trainer ended with {how} at {step}"
        second = _still_training(snapshot, trainer, progress, learned, policy)
        return _failed(what, state, snapshot, trainer, evidence, second), learned
    if policy.max_steps is not None:
        if target_reached(progress, policy):
            return _finished(f"the trainer ended with code 0 at its target ({step})", since, evidence), learned
        if snapshot.progress.state is SensorState.PENDING:
            return None, learned  # the step is not known yet: a moment later it is
        what = f"the trainer ended with code 0 at {step}, below its target of {policy.max_steps}"
        return _failed(what, state, snapshot, trainer, evidence), learned
    if snapshot.progress.state is SensorState.PENDING:
        return None, learned
    again = learned.clean_exit_start_id not in ("", trainer.start_id)
    new_step = progress.step is not None and (
        learned.clean_exit_step is None or progress.step > learned.clean_exit_step
    )
    # Over is what ends where it ended before; one short of it is a line that was lost. Far short of it is a crash.
    short = progress.step is not None and progress.step < (learned.clean_exit_step or 0) - 1
    if again and not new_step and not short:
        what = "the trainer ended with code 0 again without a new step: nothing is left to do"
        return _finished(what, since, evidence), learned
    if learned.clean_exit_start_id != trainer.start_id:
        highest = max((s for s in (progress.step, learned.clean_exit_step) if s is not None), default=None)
        learned = replace(learned, clean_exit_start_id=trainer.start_id, clean_exit_step=highest)
    what = f"the trainer ended with code 0 at {step}; whether it was done is not known, so it is started once more"
    if again and short:
        what = f"the trainer ended with code 0 at {step}, after it had come to step {learned.clean_exit_step} before"
    return _failed(what, state, snapshot, trainer, evidence), learned


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


def _still_training(
    snapshot: Snapshot, trainer: TrainerSample, progress: Progress, learned: Learned, policy: DetectionPolicy
) -> Evidence | None:
    """A trainer that podwatch did not start, or whose keeper was killed: its topmost process may have been a script
    that ended, and training goes on below it. Then steps tell; without them nobody knows."""
    if trainer.supervision is not Supervision.ATTACH:
        return None
    engine = (ProcessRole.ENGINE, ProcessRole.INFERENCE)
    living = [p for p in trainer.descendants if p.role is ProcessRole.TRAINER or (p.cuda and p.role not in engine)]
    return _steps(snapshot, progress, learned, policy) if living else None


def _failed(
    what: str,
    state: ExitState,
    snapshot: Snapshot,
    trainer: TrainerSample,
    evidence: list[Evidence],
    second: Evidence | None = None,
) -> Finding:
    """``second`` has to agree where it is given."""
    since = state.ended_at if state.ended_at is not None else snapshot.at
    waited = snapshot.at - since
    confirmed = trainer.supervision is not Supervision.ATTACH or waited >= ATTACH_EXIT_WAIT_SECONDS
    suggestion = ""
    if second is not None and second.agreement is not Agreement.AGREES:
        confirmed, suggestion = False, "processes of it still train; podwatch acts when no more steps are made"
    elif not confirmed:
        left = ATTACH_EXIT_WAIT_SECONDS - waited
        suggestion = f"podwatch did not start it; it acts in {left:.0f} s unless a person starts it again or pauses"
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


def _children(
    snapshot: Snapshot, trainer: TrainerSample, progress: Progress, learned: Learned, policy: DetectionPolicy
) -> tuple[Finding, ...]:
    if trainer.finish_line or target_reached(progress, policy):
        return ()  # the launcher is taking its children down
    findings = []
    living = {p.role for p in trainer.descendants}
    for gone in trainer.required_exits:
        if gone.role not in policy.required_roles:
            continue
        missing = snapshot.trainer.at - gone.seen_gone_at
        if missing <= policy.hold_seconds:
            continue
        second = (
            _health(snapshot),
            _memory(snapshot, policy),
            _engine(trainer, gone.role, learned),
            _steps(snapshot, progress, learned, policy),
        )
        agrees = any(e.agreement is Agreement.AGREES for e in second)
        if gone.role in living and not agrees:
            continue  # replaced, or one of several, and everything works
        confirmed = agrees and gone.role not in living
        first = Evidence(gone.name, f"ended with {gone.status.describe()}", Agreement.AGREES, missing)
        findings.append(
            Finding(
                FindingKind.REQUIRED_CHILD_EXITED,
                Severity.CRITICAL if confirmed else Severity.WARNING,
                f"{gone.name} ({gone.role}) ended with {gone.status.describe()} while the launcher lives",
                gone.seen_gone_at,
                suggestion="" if confirmed else "no second signal agrees: not restarting; look at its log",
                verdict=Verdict.RESTART if confirmed else Verdict.NONE,
                confirmed=confirmed,
                evidence=(first, *second),
                subject=f"{gone.role}-{gone.identity.pid}",
            )
        )
    return tuple(findings)


def _health(snapshot: Snapshot) -> Evidence:
    if not snapshot.inference.ok or not snapshot.inference.value:
        return Evidence("health", snapshot.inference.detail or "not observed", Agreement.UNAVAILABLE)
    # Not "was healthy before": the process that would answer is known to have ended.
    worst = [s for s in snapshot.inference.value if s.health in (Health.REFUSED, Health.UNHEALTHY)]
    if worst:
        return Evidence("health", f"{worst[0].health} at {worst[0].url}", Agreement.AGREES)
    if all(s.health is Health.OK for s in snapshot.inference.value):
        return Evidence("health", "ok", Agreement.DISAGREES)
    return Evidence("health", "timeout", Agreement.UNAVAILABLE)


def _memory(snapshot: Snapshot, policy: DetectionPolicy) -> Evidence:
    own = [i for i in policy.inference_gpus if i not in policy.shared_gpus]
    samples = {g.index: g for g in snapshot.gpus.value or ()} if snapshot.gpus.ok else {}
    used = [samples[i].memory_used_bytes for i in own if i in samples and samples[i].state is GpuState.OK]
    values = [u for u in used if u is not None]
    if not own or len(values) < len(own):
        return Evidence("gpu memory", "not observed", Agreement.UNAVAILABLE)
    low = min(values)
    if low < policy.memory_floor_bytes:
        return Evidence("gpu memory", f"{low / (1 << 30):.2f} GiB", Agreement.AGREES)
    return Evidence("gpu memory", f"{low / (1 << 30):.2f} GiB held", Agreement.DISAGREES)


def _engine(trainer: TrainerSample, role: ProcessRole, learned: Learned) -> Evidence:
    if role is ProcessRole.ENGINE or "engine" not in learned.seen:
        return Evidence("engine process", "says nothing more here", Agreement.UNAVAILABLE)
    if any(p.role is ProcessRole.ENGINE for p in trainer.descendants):
        return Evidence("engine process", "alive", Agreement.DISAGREES)
    return Evidence("engine process", "gone", Agreement.AGREES)


def _steps(snapshot: Snapshot, progress: Progress, learned: Learned, policy: DetectionPolicy) -> Evidence:
    if not snapshot.progress.ok or progress.active_at is None:
        return Evidence("steps", "not observed", Agreement.UNAVAILABLE)
    quiet = snapshot.at - progress.active_at
    if quiet > no_step_limit(learned, policy):
        return Evidence("steps", f"none for {quiet:.0f} s", Agreement.AGREES, quiet)
    return Evidence("steps", f"last one {quiet:.0f} s ago", Agreement.UNAVAILABLE, quiet)
