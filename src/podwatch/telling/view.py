"""Everything that telling is built from: one frozen picture of the daemon, filled in daemon/.

Plain data with defaults. The rooms beside this one (control) and the ones whose state is shown here (recovery, sync)
are not imported: what they know arrives as the small dataclasses below. Monotonic seconds are ``now``-based floats,
wall seconds are epoch floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import Incident
from podwatch.domain.finding import Finding
from podwatch.domain.pause import Pause
from podwatch.domain.reading import SensorState
from podwatch.domain.snapshot import Desired, Snapshot


@dataclass(frozen=True, slots=True)
class SensorView:
    """One sensor: can it see, and how old is what it saw (seconds; None before the first answer)."""

    state: SensorState = SensorState.PENDING
    detail: str = ""
    age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RecoveryView:
    """What recovery is doing.

    ``phase`` is recovery's own stable word (``watching`` while nothing is under way); ``active`` says that podwatch is
    stopping, preparing, starting or confirming right now; ``waiting`` that the next try is due at ``next_try_wall``.
    ``confirmed`` is None while a resume waits for its first step, False where none could be read in time.
    """

    phase: str = "watching"
    active: bool = False
    waiting: bool = False
    blocked: bool = False
    gave_up: bool = False
    detail: str = ""
    resumed_step: int | None = None
    confirmed: bool | None = None
    attempts: int = 0
    next_try_wall: float | None = None


@dataclass(frozen=True, slots=True)
class SyncView:
    """What the store holds and what is on its way. ``stored`` has (step, save_id) of every published set."""

    store_url: str = ""
    ok: bool | None = None
    error: str = ""
    refused: bool = False
    """Waiting does not help: the key, the cap, the bucket or the configuration is at fault."""
    next_attempt_wall: float | None = None
    clock_skew: float | None = None
    """Seconds that this machine's clock is ahead of the store's; None where that is not known."""
    last_step: int | None = None
    last_published_wall: float | None = None
    uploading_step: int | None = None
    uploaded_bytes: int = 0
    total_bytes: int = 0
    upload_rate: float | None = None
    """Bytes per second over the line, of the upload in flight."""
    upload_priority: str = "lowest"
    upload_priority_reason: str = ""
    superseded: bool = False
    standing: str = "alone"
    """Whether this pod holds the run in the store: ``alone`` without one, else judgement.claims.Act."""
    generation: int = 0
    holder: str = ""
    """The other pod, where it is one."""
    saves: int | None = None
    """Checkpoints in the store; None: neither the journal nor the store told yet."""
    stored: frozenset[tuple[int, str]] = frozenset()
    calls: Mapping[str, int] = field(default_factory=dict)
    """To the store since podwatch started, by class (A free, B, C)."""

    @property
    def upload_left_seconds(self) -> float | None:
        """At the present rate; None while nothing is sent, or while nothing moves."""
        if self.uploading_step is None or not self.upload_rate:
            return None
        return max(0, self.total_bytes - self.uploaded_bytes) / self.upload_rate


@dataclass(frozen=True, slots=True)
class LearnedView:
    """What judgement has learned of this run. ``gpu_baseline_bytes`` and ``inference_share_bytes`` by NVML index;
    ``observations`` says how many each rests on (``step``, ``startup``, ``save``, ``save interval``, ``gpu0``,
    ``gpu0 share``)."""

    gpu_baseline_bytes: Mapping[int, int] = field(default_factory=dict)
    median_step_seconds: float | None = None
    startup_seconds: float | None = None
    save_seconds: float | None = None
    save_interval_seconds: float | None = None
    longest_idle_seconds: float | None = None
    inference_share_bytes: Mapping[int, int] = field(default_factory=dict)
    observations: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the run is guarded on this pod (kept in the journal), except ``turns``: since this daemon started."""

    turns: int = 0
    restarts: int = 0
    published: int = 0
    uploaded_bytes: int = 0
    skipped: int = 0
    abandoned: int = 0
    """Uploads that were given up."""
    pruned: int = 0
    incidents: Mapping[str, int] = field(default_factory=dict)
    """By kind."""
    events: Mapping[str, int] = field(default_factory=dict)
    """By event name."""


@dataclass(frozen=True, slots=True)
class DaemonView:
    """One moment of the daemon.

    ``now`` is monotonic, ``now_wall`` epoch seconds of the same moment. ``opening`` is the line the daemon said first.
    ``second_signals`` are those that can confirm a death on this pod. ``watchdog_ok`` is the daemon's own proof of
    life: the sensing loop turned within its deadline.
    """

    version: str
    run_id: str
    snapshot: Snapshot
    now: float
    now_wall: float
    started_wall: float = 0.0
    pid: int = 0
    mode: str = "act"
    pause: Pause | None = None
    desired: Desired = Desired.RUNNING
    opening: str = ""
    watchdog_ok: bool = True
    sensors: Mapping[str, SensorView] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    recovery: RecoveryView = field(default_factory=RecoveryView)
    sync: SyncView = field(default_factory=SyncView)
    learned: LearnedView = field(default_factory=LearnedView)
    counters: Counters = field(default_factory=Counters)
    checkpoints: tuple[CheckpointSet, ...] = ()
    pins: Mapping[int, str] = field(default_factory=dict)
    incident: Incident | None = None
    next_save_bytes: int | None = None
    prune_above: float = 0.85
    steps_at_risk: int | None = None
    target_step: int | None = None
    trainer_ended_at: float | None = None
    """Monotonic second at which the trainer process was first missed while its launcher lives and training is to run;
    None otherwise."""
    trainer_changed_at: float = float("-inf")
    """Monotonic second at which the trainer that is watched was started, or the last one was let go of: older readings
    of the GPUs and servers may be of the one before."""
    armed: tuple[str, ...] = ()
    second_signals: tuple[str, ...] = ()
    inference_gpus: tuple[int, ...] = ()
    trainer_gpus: tuple[int, ...] = ()
    http_url: str = ""
    control_path: str = ""
    config_path: str = ""
    output_dir: str = ""
    state_dir: str = ""
    log_path: str = ""
    layout: str = ""
    layout_because: str = ""
    capabilities: Mapping[str, object] = field(default_factory=dict)
    """What this pod's filesystem and kernel can tell about files being written; empty: not tried."""

    def wall_of(self, monotonic: float) -> float:
        """The epoch second of a monotonic moment, as today's clocks see it; for display only."""
        return self.now_wall - (self.now - monotonic)
