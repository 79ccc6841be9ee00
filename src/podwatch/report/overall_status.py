"""What the status says of the run: the state of training, its reasons, and ``overall``. Pure.

Status, metrics, heartbeat and ``/healthz`` show this one judgement; report/ only formats it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podwatch.detection.confirming import STEP_LATE_K
from podwatch.domain.finding import DEATHS, NOTHING, Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import Desired, Reading, SensorState, Snapshot
from podwatch.domain.status_document import Overall, RecoveryView, TrainingState

DOWN_KINDS = frozenset({FindingKind.SILENT_DEATH, FindingKind.HANG, FindingKind.REQUIRED_CHILD_EXITED})
"""Findings that mean that training is down although the launcher runs."""
HOLDS_UP = frozenset({FindingKind.BLOCKED, FindingKind.SUPERSEDED, FindingKind.AMBIGUOUS_TRAINERS})
"""Findings of recovery for which a start of training waits."""
STEP_LATE_SECONDS = 10.0
"""And at least this long: steps of a fraction of a second come in bursts."""

_RANK = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
_SUGGESTIONS = {
    FindingKind.NOT_BACKED_UP: "set [sync] store to b2://bucket or file:///path on another disk",
    FindingKind.GAVE_UP: "fix the cause (`podwatch incidents`, `podwatch logs`), then run `podwatch start`",
    FindingKind.SENSOR_BLIND: "run `podwatch check`",
    FindingKind.TRAINER_EXITED: "`podwatch logs` and `podwatch incidents` show the cause",
    FindingKind.BLOCKED: "podwatch continues automatically as soon as this ends",
}


@dataclass(frozen=True, slots=True)
class Situation:
    """What the judgement rests on. ``now`` and ``trainer_ended_at`` are monotonic. ``acts``: podwatch acts by itself
    (mode ``act``); ``paused`` is maintenance. ``watchdog_ok``: the sensing loop ran within its deadline. ``healed``: no
    incident is open. ``stores``: a store is configured."""

    snapshot: Snapshot
    now: float
    findings: Sequence[Finding] = ()
    sensors: Mapping[str, Reading[object]] = field(default_factory=dict)
    recovery: RecoveryView = field(default_factory=RecoveryView)
    desired: Desired = Desired.RUNNING
    acts: bool = True
    paused: bool = False
    watchdog_ok: bool = True
    stores: bool = True
    healed: bool = True
    trainer_ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """``since`` (monotonic) is None for a reason that is no open finding: nothing is known about its beginning."""

    finding: Finding
    since: float | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """``reasons``: the worst first, each with a suggestion."""

    overall: Overall
    state: TrainingState
    reasons: tuple[Reason, ...]


def judge(now: Situation) -> Judgement:
    state, reasons = training_state(now), _reasons(now)
    patient = state is TrainingState.BLOCKED and _waits_patiently(now.findings)
    if state is TrainingState.BLOCKED and not patient:
        reasons = _blocked_is_critical(reasons)
    if not patient and not any(r.finding.severity is Severity.CRITICAL for r in reasons):
        reasons = _state_reason(now, state) + reasons
    severities = {r.finding.severity for r in reasons}
    return Judgement(_overall(severities, state, patient=patient), state, tuple(reasons))


def training_state(now: Situation) -> TrainingState:
    trainer = now.snapshot.trainer.value if now.snapshot.trainer.ok else None
    recovery = now.recovery
    if trainer is None or not trainer.alive:
        if recovery.gave_up:
            return TrainingState.GAVE_UP
        if recovery.blocked:
            return TrainingState.BLOCKED
    if recovery.evaluating and now.desired is Desired.RUNNING:
        stops = recovery.phase in ("stopping", "evaluating")  # planned: no part of it is an outage
        return TrainingState.EVALUATING if stops else TrainingState.STARTING
    if trainer is None:
        return TrainingState.RECOVERING if recovery.active else TrainingState.UNKNOWN
    wanted = now.desired is Desired.RUNNING  # a run that is being stopped is not recovering
    if not trainer.alive:
        if any(f.verdict is Verdict.FINISH and f.confirmed for f in now.findings):
            return TrainingState.FINISHED
        if wanted and (recovery.active or recovery.waiting):
            return TrainingState.RECOVERING
        if now.desired is Desired.FINISHED:
            return TrainingState.FINISHED
        return TrainingState.STOPPED if now.desired is Desired.STOPPED else TrainingState.DOWN
    if any(f.kind in DOWN_KINDS and f.severity is Severity.CRITICAL for f in now.findings):
        return TrainingState.RECOVERING if recovery.active else TrainingState.DOWN
    # Model loading takes minutes: a start without a failure before it is no recovery until its first step.
    awaited = now.healed and recovery.phase in ("starting", "confirming")
    if wanted and recovery.active and not awaited:
        return TrainingState.RECOVERING
    return TrainingState.RUNNING if now.snapshot.newest_step is not None else TrainingState.STARTING


def step_late(snapshot: Snapshot, now: float, median_seconds: float | None, target: int | None = None) -> bool:
    """Whether no step was seen for clearly longer than this run's median. False while the median is unknown, and after
    the last step (``target`` - 1 where steps count from 0)."""
    newest = snapshot.newest_step
    if newest is None or median_seconds is None:
        return False
    if target is not None and newest.step is not None and newest.step >= target - 1:
        return False
    return now - newest.at > max(STEP_LATE_SECONDS, STEP_LATE_K * median_seconds)


def _overall(severities: Iterable[Severity], state: TrainingState, *, patient: bool) -> Overall:
    """An unobserved trainer is never ok. ``patient``: the start waits for a process that can become this run's
    trainer."""
    found = set(severities)
    down = state in (TrainingState.DOWN, TrainingState.RECOVERING, TrainingState.GAVE_UP)
    if Severity.CRITICAL in found or down or (state is TrainingState.BLOCKED and not patient):
        return Overall.CRITICAL
    if state is TrainingState.UNKNOWN:
        return Overall.UNKNOWN
    return Overall.WARNING if Severity.WARNING in found else Overall.OK


def _reasons(now: Situation) -> list[Reason]:
    """All findings, the worst first, each with a suggestion."""
    reasons = []
    for finding in sorted(now.findings, key=lambda f: (_RANK[f.severity], f.since)):
        given = finding if finding.suggestion else replace(finding, suggestion=_suggestion(now, finding))
        reasons.append(Reason(given, min(finding.since, now.now)))
    have = {f.kind for f in now.findings}
    if not now.stores and FindingKind.NOT_BACKED_UP not in have:
        reasons.append(_own(FindingKind.NOT_BACKED_UP, Severity.WARNING, "checkpoints exist on this pod only"))
    if now.recovery.gave_up and FindingKind.GAVE_UP not in have:
        summary = now.recovery.detail or "podwatch has stopped restarting this run"
        reasons.insert(0, _own(FindingKind.GAVE_UP, Severity.CRITICAL, summary))
    if not now.watchdog_ok:
        summary = "the sensing loop missed its deadline: podwatch watches nothing"
        reasons.insert(0, _own(FindingKind.SENSOR_BLIND, Severity.CRITICAL, summary))
    if FindingKind.SENSOR_BLIND in have:
        return reasons
    for name, sensor in sorted(now.sensors.items()):
        if sensor.state in (SensorState.BLIND, SensorState.DENIED):
            summary = f"the {name} sensor cannot read its source: {sensor.detail or sensor.state}"
            reasons.append(_own(FindingKind.SENSOR_BLIND, Severity.WARNING, summary, subject=name))
    return reasons


def _waits_patiently(findings: Iterable[Finding]) -> bool:
    """Whether a start waits only for a process that can become this run's trainer, within the start-up patience:
    recovery then raises a warning, and a critical finding once the operator must decide."""
    holding = [f for f in findings if f.kind in HOLDS_UP]
    return bool(holding) and all(
        f.kind is FindingKind.AMBIGUOUS_TRAINERS and f.severity is Severity.WARNING for f in holding
    )


def _blocked_is_critical(reasons: list[Reason]) -> list[Reason]:
    """Raise the finding that blocks the start to critical and put it first, because training is down."""
    for reason in reasons:
        if reason.finding.kind in HOLDS_UP:
            raised = replace(reason, finding=replace(reason.finding, severity=Severity.CRITICAL))
            return [raised, *(r for r in reasons if r is not reason)]
    return reasons


def _suggestion(now: Situation, finding: Finding) -> str:
    """The suggestion for a finding without its own."""
    if finding.verdict is not Verdict.NONE:
        restarts = finding.verdict is Verdict.RESTART
        if now.paused:
            return "podwatch is paused: `podwatch unpause` lets it act"
        if not now.acts:
            way = "`podwatch restart` restarts training" if restarts else "`podwatch stop-training` ends it"
            return f"mode is observe, so podwatch does not act; {way}"
        waits = now.recovery.blocked or now.recovery.gave_up  # for the operator
        if restarts and finding.confirmed and now.recovery.active and not waits:
            return NOTHING
    return _SUGGESTIONS.get(finding.kind, "`podwatch events` shows the events before it")


def _state_reason(now: Situation, state: TrainingState) -> list[Reason]:
    """A reason for a training state without an open finding: training is down while recovery already acts, or a trainer
    process ended and its detector still waits for its hold time."""
    trainer = now.snapshot.trainer.value
    if state is TrainingState.EVALUATING:
        return []
    if now.trainer_ended_at is not None and not any(f.kind in DEATHS for f in now.findings):
        ago = max(0.0, now.now - now.trainer_ended_at)
        summary = f"the trainer process ended {ago:.0f} s ago, its launcher still runs: training makes no progress"
        fix = "nothing: podwatch confirms that training has ended, then restarts it"
        fix = fix if now.acts and not now.paused else ""
        return [_own(FindingKind.REQUIRED_CHILD_EXITED, Severity.WARNING, summary, fix=fix)]
    match state:
        case TrainingState.RECOVERING | TrainingState.DOWN:
            if trainer is not None and trainer.alive:
                summary = "podwatch restarted the trainer, which has not reported a step yet"
            else:
                ended = trainer.exit.describe() if trainer is not None and trainer.exit is not None else ""
                summary = f"the trainer is not running{f' ({ended})' if ended else ''}"
            usual = None if state is TrainingState.DOWN else NOTHING
            return [_own(FindingKind.TRAINER_EXITED, Severity.CRITICAL, summary, fix=usual)]
        case TrainingState.BLOCKED:
            detail = now.recovery.detail or "something still holds the GPUs or ports"
            return [_own(FindingKind.BLOCKED, Severity.CRITICAL, detail)]
        case TrainingState.UNKNOWN if "trainer" not in now.sensors or not now.sensors["trainer"].detail:
            detail = now.snapshot.trainer.detail or "the trainer has not been observed yet"
            return [_own(FindingKind.SENSOR_BLIND, Severity.WARNING, detail, subject="trainer")]
    return []


def _own(kind: FindingKind, severity: Severity, summary: str, *, subject: str = "", fix: str | None = None) -> Reason:
    """A reason that is no open finding. ``fix`` None: the usual suggestion for its kind."""
    suggestion = _SUGGESTIONS.get(kind, "") if fix is None else fix
    return Reason(Finding(kind, severity, summary, 0.0, suggestion, subject=subject), None)
