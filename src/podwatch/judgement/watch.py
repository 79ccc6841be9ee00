"""All detectors, one turn at a time: state and snapshot in, state and findings out.

A recorded night can be replayed through ``advance``: it reads no clock and remembers only what is in ``WatchState``.
"""

from dataclasses import dataclass, field, replace

from podwatch.domain.finding import Finding, Severity
from podwatch.domain.policy import DetectionPolicy, DiskPolicy
from podwatch.domain.snapshot import Desired, Snapshot
from podwatch.judgement.detectors import exits, hang, resources, sensors, silent_death
from podwatch.judgement.detectors.exits import ExitState
from podwatch.judgement.detectors.hang import HangState
from podwatch.judgement.detectors.sensors import SensorsState
from podwatch.judgement.detectors.silent_death import SilentDeathState
from podwatch.judgement.learned import Learned
from podwatch.judgement.progress import Progress, follow

_DEFAULT_DISK = DiskPolicy()
_ORDER = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}


@dataclass(frozen=True, slots=True)
class WatchState:
    """Everything the detectors remember. Only ``learned`` outlives a restart of the trainer or of podwatch."""

    learned: Learned = field(default_factory=Learned)
    start_id: str | None = None
    progress: Progress = field(default_factory=Progress)
    silent_death: SilentDeathState = field(default_factory=SilentDeathState)
    exits: ExitState = field(default_factory=ExitState)
    hang: HangState = field(default_factory=HangState)
    sensors: SensorsState = field(default_factory=SensorsState)

    @property
    def armed(self) -> tuple[str, ...]:
        """Detectors that have seen their signal healthy during this start: ``silent-death:gpu0``, ``hang``."""
        gpus = [f"silent-death:{name}" for name in self.learned.seen if name.startswith("gpu")]
        return tuple(gpus) + (("hang",) if self.progress.active_at is not None else ())


def initial(policy: DetectionPolicy, learned: Learned | None = None) -> WatchState:
    """The state of a podwatch that has seen nothing yet. Baselines of GPUs no longer configured are dropped."""
    if learned is None:
        return WatchState()
    kept = tuple(p for p in learned.gpu_baseline_bytes if p[0] in policy.inference_gpus)
    return WatchState(learned=replace(learned, gpu_baseline_bytes=kept))


def advance(
    state: WatchState, snapshot: Snapshot, policy: DetectionPolicy, disk: DiskPolicy = _DEFAULT_DISK
) -> tuple[WatchState, tuple[Finding, ...]]:
    """One turn of the sensing loop. Findings come worst first; the same condition keeps its ``key`` and ``since``."""
    state = _at_boundary(state, snapshot)
    progress, learned = follow(
        state.progress, snapshot.progress, at=snapshot.at, saving=snapshot.saving, learned=state.learned
    )
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    wanted = snapshot.desired is Desired.RUNNING
    ending = not wanted or (trainer is not None and (trainer.finish_line or exits.target_reached(progress, policy)))
    death_state, learned, deaths = silent_death.advance(
        state.silent_death, snapshot, progress, learned, policy, ending=ending
    )
    exit_state, exit_learned, ends = exits.advance(state.exits, snapshot, progress, learned, policy)
    hang_state, hangs = hang.advance(state.hang, snapshot, progress, learned, policy)
    sensor_state, blind = sensors.advance(state.sensors, snapshot, learned, policy)
    findings = [*deaths, *blind, *resources.advance(snapshot, disk)]
    if wanted:
        # A run that is to be stopped, or is finished, may end and may stand still.
        learned = exit_learned
        findings += [*ends, *hangs]
    new = WatchState(learned, state.start_id, progress, death_state, exit_state, hang_state, sensor_state)
    return new, tuple(sorted(findings, key=lambda f: (_ORDER[f.severity], f.kind, f.subject)))


def _at_boundary(state: WatchState, snapshot: Snapshot) -> WatchState:
    """Wipe detector state when another start is seen; what was learned stays (facts/peers.md, bottom line 5)."""
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    if trainer is None or trainer.start_id == state.start_id:
        return state
    if not trainer.start_id and state.start_id is not None and not trainer.alive:
        return state  # between two starts nothing is watched; the old state says what ended
    learned = state.learned
    if learned.start_id != trainer.start_id:
        learned = replace(learned, start_id=trainer.start_id, seen=())
    started = trainer.started_at if trainer.started_at is not None else snapshot.at
    return WatchState(
        learned=learned,
        start_id=trainer.start_id,
        progress=Progress(started_at=started),
        sensors=state.sensors,
    )
