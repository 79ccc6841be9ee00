"""Hang: everything is there and nothing moves (DESIGN section 3, "Hang"); and a finished run that does not go away.

Long evaluations, saves and steps five times slower than the median are not hangs: the limit is max(floor, k x
median), a save in flight moves the clock on, and silence of the step source alone never kills.
"""

from dataclasses import dataclass

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.policy import DetectionPolicy
from podwatch.domain.snapshot import GpuState, Health, Snapshot
from podwatch.judgement.detectors.window import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.judgement.learned import Learned
from podwatch.judgement.progress import Progress

HEALTH_WINDOW_SHARE = 0.5
"""Failing health has to hold for this share of the agreement window. An engine that is busy with a long weight update
can miss several pings; five minutes of them is not that."""
WINDOW_GAP_SECONDS = 30.0
"""Observations further apart than this (or three intervals of the sensor) do not make one window."""
PROGRESS_FRESH_SECONDS = 120.0
"""The step source must have been read this recently, or its silence is ours."""


@dataclass(frozen=True, slots=True)
class HangState:
    idle: Held = NOT_HELD
    flat: Held = NOT_HELD
    sick: Held = NOT_HELD
    gpu_rhythm: Rhythm = NO_RHYTHM
    inference_rhythm: Rhythm = NO_RHYTHM
    tokens: float | None = None


def advance(
    state: HangState, snapshot: Snapshot, progress: Progress, learned: Learned, policy: DetectionPolicy
) -> tuple[HangState, tuple[Finding, ...]]:
    state = _observe(state, snapshot, learned, policy)
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    if trainer is None or not trainer.alive or snapshot.saving:
        return state, ()
    if trainer.finish_line or _beyond_target(progress, policy):
        lingering = _lingering(snapshot, progress, trainer.finish_line, policy)
        return state, (lingering,) if lingering is not None else ()
    if not snapshot.progress.ok or snapshot.at - snapshot.progress.at > PROGRESS_FRESH_SECONDS:
        return state, ()
    if progress.active_at is None:
        finding = _startup(state, snapshot, progress, learned, policy)
    else:
        finding = _stalled(state, snapshot, progress, learned, policy)
    return state, (finding,) if finding is not None else ()


def limit_seconds(learned: Learned, policy: DetectionPolicy) -> float:
    """Seconds without progress that make a hang possible."""
    return max(policy.hang_floor_seconds, policy.hang_k * (learned.median_gap_seconds or 0.0))


def _observe(state: HangState, snapshot: Snapshot, learned: Learned, policy: DetectionPolicy) -> HangState:
    gpu_rhythm, idle = state.gpu_rhythm, state.idle
    if snapshot.gpus.ok:
        gpu_rhythm = gpu_rhythm.update(snapshot.gpus.at)
        usable = [g for g in snapshot.gpus.value or () if g.state is GpuState.OK]
        known = [g.utilization_percent for g in usable if g.utilization_percent is not None]
        all_known = bool(known) and len(known) == len(snapshot.gpus.value or ())
        quiet = max(known) < policy.idle_utilization_percent if all_known else None
        idle = idle.update(quiet, snapshot.gpus.at, gpu_rhythm.max_gap(WINDOW_GAP_SECONDS))
    else:
        idle = NOT_HELD
    flat, sick, tokens, rhythm = state.flat, state.sick, state.tokens, state.inference_rhythm
    reading = snapshot.inference
    if reading.ok and reading.value:
        rhythm = rhythm.update(reading.at)
        gap = rhythm.max_gap(WINDOW_GAP_SECONDS)
        counted = [s for s in reading.value if s.generation_tokens_total is not None and s.requests_running is not None]
        if len(counted) == len(reading.value):
            total = sum(s.generation_tokens_total or 0.0 for s in counted)
            running = any((s.requests_running or 0.0) > 0 for s in counted)
            flat = flat.update(running and tokens is not None and total == tokens, reading.at, gap)
            tokens = total
        else:
            flat, tokens = NOT_HELD, None
        failing = "health" in learned.seen and any(s.health is not Health.OK for s in reading.value)
        sick = sick.update(failing, reading.at, gap)
    else:
        flat, sick = NOT_HELD, NOT_HELD
    return HangState(idle, flat, sick, gpu_rhythm, rhythm, tokens)


def _second(state: HangState, snapshot: Snapshot, window: float) -> tuple[Evidence, ...]:
    if not snapshot.gpus.ok or state.idle.last_at is None:
        idle = Evidence("gpu utilisation", snapshot.gpus.detail or "not observed", Agreement.UNAVAILABLE)
    elif any(g.utilization_percent is None for g in snapshot.gpus.value or ()):
        idle = Evidence("gpu utilisation", "not reported by every GPU", Agreement.UNAVAILABLE)
    else:
        idle = _evidence("gpu utilisation", "all idle", "busy", state.idle, window)
    if not snapshot.inference.ok:
        return (idle, Evidence("inference", snapshot.inference.detail or "not observed", Agreement.UNAVAILABLE))
    tokens = Evidence("generation tokens", "not reported", Agreement.UNAVAILABLE)
    if state.tokens is not None:
        tokens = _evidence("generation tokens", "flat while requests run", "moving or idle", state.flat, window)
    health = _evidence("health", "failing", "ok", state.sick, window * HEALTH_WINDOW_SHARE)
    return (idle, tokens, health)


def _evidence(signal: str, yes: str, no: str, held: Held, window: float) -> Evidence:
    if held.since is None:
        return Evidence(signal, no, Agreement.DISAGREES)
    if held.seconds >= window:
        return Evidence(signal, yes, Agreement.AGREES, held.seconds)
    return Evidence(signal, f"{yes}, not long enough", Agreement.UNAVAILABLE, held.seconds)


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _stalled(
    state: HangState, snapshot: Snapshot, progress: Progress, learned: Learned, policy: DetectionPolicy
) -> Finding | None:
    assert progress.active_at is not None
    quiet = snapshot.at - progress.active_at
    limit = limit_seconds(learned, policy)
    if quiet <= limit:
        return None
    first = Evidence("progress", f"none for {quiet:.0f} s (limit {limit:.0f} s)", Agreement.AGREES, quiet)
    what = f"no progress for {_span(quiet)} (limit {_span(limit)})"
    if progress.step is not None:
        what += f" since step {progress.step}"
    return _finding(what, progress.active_at, first, _second(state, snapshot, policy.hang_agree_seconds), "")


def _startup(
    state: HangState, snapshot: Snapshot, progress: Progress, learned: Learned, policy: DetectionPolicy
) -> Finding | None:
    if progress.started_at is None:
        return None
    waited = snapshot.at - progress.started_at
    if waited <= policy.startup_patience_seconds:
        return None
    first = Evidence("first step", f"none {waited:.0f} s after the start", Agreement.AGREES, waited)
    what = (
        f"no first step {waited / 60:.0f} min after the start (patience {policy.startup_patience_seconds / 60:.0f} min)"
    )
    second = _second(state, snapshot, policy.hang_agree_seconds)
    if not learned.gap_seconds:
        # No step was ever seen on this run: perhaps podwatch cannot see them. Never a reason to kill.
        second = tuple(
            Evidence(e.signal, e.value, Agreement.UNAVAILABLE, e.window_seconds)
            if e.agreement is Agreement.AGREES
            else e
            for e in second
        )
    return _finding(what, progress.started_at, first, second, "start-up")


def _finding(what: str, since: float, first: Evidence, second: tuple[Evidence, ...], subject: str) -> Finding:
    agreeing = [e.signal for e in second if e.agreement is Agreement.AGREES]
    confirmed = bool(agreeing)
    return Finding(
        FindingKind.HANG,
        Severity.CRITICAL if confirmed else Severity.WARNING,
        f"{what}; {', '.join(agreeing)} agrees" if confirmed else f"{what}; no second signal agrees",
        since,
        suggestion="" if confirmed else "not restarting; look at the trainer's log, or `podwatch restart`",
        verdict=Verdict.RESTART if confirmed else Verdict.NONE,
        confirmed=confirmed,
        evidence=(first, *second),
        subject=subject,
    )


def _beyond_target(progress: Progress, policy: DetectionPolicy) -> bool:
    """Strictly the target: one step below it, a trainer that counts from 1 still has its last step to make."""
    return policy.max_steps is not None and progress.step is not None and progress.step >= policy.max_steps


def _lingering(snapshot: Snapshot, progress: Progress, finish_line: bool, policy: DetectionPolicy) -> Finding | None:
    """A run that is done and whose processes live on is billed by the hour (facts/peers.md section 1, prime-rl
    #2229).
    """
    quiet_since = progress.active_at if progress.active_at is not None else progress.started_at
    if quiet_since is None or snapshot.at - quiet_since < policy.finish_linger_seconds:
        return None
    if not finish_line and not snapshot.progress.ok:
        return None
    quiet = snapshot.at - quiet_since
    done = "the finish line was printed" if finish_line else f"the target step {policy.max_steps} was reached"
    return Finding(
        FindingKind.FINISHED,
        Severity.WARNING,
        f"training is done ({done}) but its processes have lived on for {quiet / 60:.0f} min",
        quiet_since,
        verdict=Verdict.FINISH,
        confirmed=True,
        evidence=(
            Evidence("completion", done, Agreement.AGREES),
            Evidence("progress", f"none for {quiet:.0f} s", Agreement.AGREES, quiet),
        ),
        subject="lingering",
    )
