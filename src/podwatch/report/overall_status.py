"""What the status says of the run: the state of training, its reasons, and ``overall``. Pure.

Status, metrics, heartbeat and ``/healthz`` show this one judgement; report/ only formats it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from podwatch.detection.confirming import STEP_LATE_K
from podwatch.domain.finding import DEATHS, NOTHING, Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import Desired, SensorState, Snapshot
from podwatch.domain.status_document import Overall, TrainingState
from podwatch.report.daemon_view import DaemonView

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


def judge(view: DaemonView) -> Judgement:
    """What this state means: training state, reasons, overall."""
    state, reasons = training_state(view), _reasons(view)
    patient = state is TrainingState.BLOCKED and _waits_patiently(view.findings)
    if state is TrainingState.BLOCKED and not patient:
        reasons = _blocked_is_critical(reasons)
    if not patient and not any(r.finding.severity is Severity.CRITICAL for r in reasons):
        reasons = _state_reason(view, state) + reasons
    severities = {r.finding.severity for r in reasons}
    return Judgement(_overall(severities, state, patient=patient), state, tuple(reasons))


def training_state(view: DaemonView) -> TrainingState:
    trainer = view.facts.pod.trainer.value if view.facts.pod.trainer.ok else None
    recovery = view.recovery
    if trainer is None or not trainer.alive:
        if recovery.gave_up:
            return TrainingState.GAVE_UP
        if recovery.blocked:
            return TrainingState.BLOCKED
    if recovery.evaluating and view.facts.run.desired is Desired.RUNNING:
        stops = recovery.phase in ("stopping", "evaluating")  # planned: no part of it is an outage
        return TrainingState.EVALUATING if stops else TrainingState.STARTING
    if trainer is None:
        return TrainingState.RECOVERING if recovery.active else TrainingState.UNKNOWN
    wanted = view.facts.run.desired is Desired.RUNNING  # a run that is being stopped is not recovering
    if not trainer.alive:
        if any(f.verdict is Verdict.FINISH and f.confirmed for f in view.findings):
            return TrainingState.FINISHED
        if wanted and (recovery.active or recovery.waiting):
            return TrainingState.RECOVERING
        if view.facts.run.desired is Desired.FINISHED:
            return TrainingState.FINISHED
        return TrainingState.STOPPED if view.facts.run.desired is Desired.STOPPED else TrainingState.DOWN
    if any(f.kind in DOWN_KINDS and f.severity is Severity.CRITICAL for f in view.findings):
        return TrainingState.RECOVERING if recovery.active else TrainingState.DOWN
    # Model loading takes minutes: a start without a failure before it is no recovery until its first step.
    awaited = view.healed and recovery.phase in ("starting", "confirming")
    if wanted and recovery.active and not awaited:
        return TrainingState.RECOVERING
    return TrainingState.RUNNING if view.facts.pod.newest_step is not None else TrainingState.STARTING


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


def _reasons(view: DaemonView) -> list[Reason]:
    """All findings, the worst first, each with a suggestion."""
    reasons = []
    for finding in sorted(view.findings, key=lambda f: (_RANK[f.severity], f.since)):
        given = finding if finding.suggestion else replace(finding, suggestion=_suggestion(view, finding))
        reasons.append(Reason(given, min(finding.since, view.now)))
    have = {f.kind for f in view.findings}
    if not view.sync.store_url and FindingKind.NOT_BACKED_UP not in have:
        reasons.append(_own(FindingKind.NOT_BACKED_UP, Severity.WARNING, "checkpoints exist on this pod only"))
    if view.recovery.gave_up and FindingKind.GAVE_UP not in have:
        summary = view.recovery.detail or "podwatch has stopped restarting this run"
        reasons.insert(0, _own(FindingKind.GAVE_UP, Severity.CRITICAL, summary))
    if not view.watchdog_ok:
        summary = "the sensing loop missed its deadline: podwatch watches nothing"
        reasons.insert(0, _own(FindingKind.SENSOR_BLIND, Severity.CRITICAL, summary))
    if FindingKind.SENSOR_BLIND in have:
        return reasons
    for name, sensor in sorted(view.sensors.items()):
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


def _suggestion(view: DaemonView, finding: Finding) -> str:
    """The suggestion for a finding without its own."""
    if finding.verdict is not Verdict.NONE:
        restarts = finding.verdict is Verdict.RESTART
        if view.paused:
            return "podwatch is paused: `podwatch unpause` lets it act"
        if not view.acts:
            way = "`podwatch restart` restarts training" if restarts else "`podwatch stop-training` ends it"
            return f"mode is observe, so podwatch does not act; {way}"
        waits = view.recovery.blocked or view.recovery.gave_up  # for the operator
        if restarts and finding.confirmed and view.recovery.active and not waits:
            return NOTHING
    return _SUGGESTIONS.get(finding.kind, "`podwatch events` shows the events before it")


def _state_reason(view: DaemonView, state: TrainingState) -> list[Reason]:
    """A reason for a training state without an open finding: training is down while recovery already acts, or a trainer
    process ended and its detector still waits for its hold time."""
    trainer = view.facts.pod.trainer.value
    if state is TrainingState.EVALUATING:
        return []
    if view.trainer_ended_at is not None and not any(f.kind in DEATHS for f in view.findings):
        ago = max(0.0, view.now - view.trainer_ended_at)
        summary = f"the trainer process ended {ago:.0f} s ago, its launcher still runs: training makes no progress"
        fix = "nothing: podwatch confirms that training has ended, then restarts it"
        fix = fix if view.acts and not view.paused else ""
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
            detail = view.recovery.detail or "something still holds the GPUs or ports"
            return [_own(FindingKind.BLOCKED, Severity.CRITICAL, detail)]
        case TrainingState.UNKNOWN if "trainer" not in view.sensors or not view.sensors["trainer"].detail:
            detail = view.facts.pod.trainer.detail or "the trainer has not been observed yet"
            return [_own(FindingKind.SENSOR_BLIND, Severity.WARNING, detail, subject="trainer")]
    return []


def _own(kind: FindingKind, severity: Severity, summary: str, *, subject: str = "", fix: str | None = None) -> Reason:
    """A reason that is no open finding. ``fix`` None: the usual suggestion for its kind."""
    suggestion = _SUGGESTIONS.get(kind, "") if fix is None else fix
    return Reason(Finding(kind, severity, summary, 0.0, suggestion, subject=subject), None)
