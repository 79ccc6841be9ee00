"""All detectors, one turn at a time: state and snapshot in, state and findings out.

A recording can be replayed through ``advance``: it reads no clock and keeps all state in ``DetectionState``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from podwatch.config.settings import Policies
from podwatch.detection import (
    blind_sensors,
    checkpoint_overdue,
    gaps,
    gpu_faults,
    hang,
    host_resources,
    inference_health,
    log_rules,
    process_exits,
    silent_death,
    training_metrics,
)
from podwatch.detection import progress as progress_of
from podwatch.detection import signals as signals_of
from podwatch.detection.base import Detector, Look
from podwatch.detection.learned import Learned
from podwatch.detection.progress import WATCHED_SECONDS, Progress, target_reached
from podwatch.detection.signals import Signals
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import Desired, Snapshot

S = TypeVar("S")

DETECTORS: tuple[Detector[Any], ...] = (
    silent_death.DETECTOR,
    inference_health.DETECTOR,
    process_exits.DETECTOR,
    hang.DETECTOR,
    blind_sensors.DETECTOR,
    host_resources.DETECTOR,
    gpu_faults.DETECTOR,
    checkpoint_overdue.DETECTOR,
    log_rules.DETECTOR,
    training_metrics.DETECTOR,
    gaps.DETECTOR,
)
"""The registry. The order matters: a later detector uses what an earlier one learned in the same turn."""

_ORDER = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}


def _fresh() -> Mapping[str, Any]:
    return {detector.name: detector.initial() for detector in DETECTORS}


@dataclass(frozen=True, slots=True)
class DetectionState:
    """All state. Only ``learned`` survives a restart of podwatch. Of ``states`` (by detector name), those with
    ``survives_restart`` survive a restart of the trainer."""

    learned: Learned = field(default_factory=Learned)
    start_id: str | None = None
    progress: Progress = field(default_factory=Progress)
    signals: Signals = field(default_factory=Signals)
    states: Mapping[str, Any] = field(default_factory=_fresh)

    def of(self, detector: Detector[S]) -> S:
        """The state of this detector."""
        return cast("S", self.states[detector.name])

    @property
    def armed(self) -> tuple[str, ...]:
        """The signals that were healthy during this start, so that their failure counts: ``silent-death:gpu0``,
        ``hang``."""
        return tuple(name for d in DETECTORS for name in d.armed(self.states[d.name], self.learned))


def initial(policies: Policies, learned: Learned | None = None) -> DetectionState:
    """The state before the first turn. Baselines of GPUs that are no longer configured are dropped."""
    if learned is None:
        return DetectionState()
    gpus = policies.gpu.inference
    return DetectionState(
        learned=replace(
            learned,
            gpu_baseline_bytes=tuple(p for p in learned.gpu_baseline_bytes if p[0] in gpus),
            gpu_windows=tuple(p for p in learned.gpu_windows if p[0] in gpus),
        )
    )


def second_signals(state: DetectionState) -> tuple[str, ...]:
    """The corroborating signals that were healthy during this start, so that their failure can confirm a death."""
    seen = state.learned.seen
    found = ["engine-process"] if "engine" in seen else []
    found += ["cuda-context"] if any(name.startswith("cuda") for name in seen) else []
    found += ["inference-health"] if "health" in seen else []
    found += ["liveness"] if any(name.startswith("liveness:") for name in seen) else []
    found += ["generation-tokens"] if any(name.startswith("tokens:") for name in seen) else []
    return (*found, *(("step-progress",) if "progress" in seen else ()))


def advance(
    state: DetectionState, snapshot: Snapshot, policies: Policies
) -> tuple[DetectionState, tuple[Finding, ...]]:
    """Judge one turn of the sensing loop. Findings are worst first; a condition keeps its ``key`` and ``since``."""
    state = _after_hole(_at_boundary(state, snapshot), snapshot, policies)
    progress, learned = progress_of.follow(
        state.progress, snapshot.progress, at=snapshot.at, saving=snapshot.saving, learned=state.learned
    )
    signals, learned = signals_of.follow(state.signals, snapshot, progress, learned, policies.gpu)
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    wanted = snapshot.desired is Desired.RUNNING
    ending = not wanted or (trainer is not None and (trainer.finish_line or target_reached(progress, policies)))
    look = Look(snapshot, progress, learned, policies, signals, trainer, wanted, ending)
    states: dict[str, Any] = {}
    findings: list[Finding] = []
    for detector in DETECTORS:
        name = detector.name
        before = state.states[name]
        try:
            turn = detector.advance(before, look)
        except Exception as error:  # a failing detector must not stop the others, and the guard
            states[name] = before
            findings.append(_failed(name, error, snapshot.at))
            continue
        states[name] = turn.state
        if turn.findings:
            findings.extend(turn.findings)
        if turn.learned is not look.learned:
            learned = turn.learned
            look = Look(snapshot, progress, learned, policies, signals, trainer, wanted, ending)
    if len(findings) > 1:
        findings.sort(key=lambda f: (_ORDER[f.severity], f.kind, f.subject))
    return DetectionState(learned, state.start_id, progress, signals, states), tuple(findings)


def confirming(state: DetectionState, snapshot: Snapshot, policies: Policies) -> bool:
    """Whether the evidence of a death is incomplete after this turn and a look before the next poll may complete it.
    Pure; false on every healthy turn."""
    if not state.signals.missed and not state.of(silent_death.DETECTOR).fallen:
        return False
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    wanted = snapshot.desired is Desired.RUNNING
    ending = not wanted or (trainer is not None and (trainer.finish_line or target_reached(state.progress, policies)))
    look = Look(snapshot, state.progress, state.learned, policies, state.signals, trainer, wanted, ending)
    return silent_death.confirming(state.of(silent_death.DETECTOR), look)


def _after_hole(state: DetectionState, snapshot: Snapshot, policies: Policies) -> DetectionState:
    """After a gap in the observation or a suspend, restart every window: missing progress there is no evidence."""
    gap = gaps.find_gap(state.of(gaps.DETECTOR), snapshot, policies.gpu)
    if gap is None:
        return state
    return replace(
        state,
        progress=replace(state.progress, lost_seconds=state.progress.lost_seconds + gap.stalled),
        signals=replace(gaps.begin_anew(state.signals), missed=()),
        states={name: gaps.begin_anew(value) for name, value in state.states.items()},
    )


def _failed(name: str, error: Exception, at: float) -> Finding:
    """A finding for a bug of podwatch: one detector is blind, and the status must show that."""
    what = f"{type(error).__name__}: {error}"
    return Finding(
        FindingKind.SENSOR_BLIND,
        Severity.CRITICAL,
        f"the {name} detector failed: {what}",
        at,
        suggestion="this is a bug in podwatch: please report it; the other detectors still work",
        evidence=(Evidence(f"{name} detector", what, Agreement.UNAVAILABLE),),
        subject=f"detector-{name}",
    )


def _at_boundary(state: DetectionState, snapshot: Snapshot) -> DetectionState:
    """Reset the detectors' state at a new start of training; learned values are kept."""
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    if trainer is None or trainer.start_id == state.start_id:
        return state
    if not trainer.start_id and state.start_id is not None and not trainer.alive:
        return state  # between two starts: the old state still describes the end
    learned = state.learned
    if learned.start_id != trainer.start_id:
        learned = replace(learned, start_id=trainer.start_id, seen=())
    started = trainer.started_at if trainer.started_at is not None else snapshot.at
    return DetectionState(
        learned=learned,
        start_id=trainer.start_id,
        progress=Progress(started_at=started, watched=snapshot.at - started <= WATCHED_SECONDS),
        states={d.name: state.states[d.name] if d.survives_restart else d.initial() for d in DETECTORS},
    )
