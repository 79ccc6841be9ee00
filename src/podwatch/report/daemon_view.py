"""DaemonView: one frozen view of the daemon, the input of status, HTTP and metrics. Filled in daemon/.

Plain data with defaults. Times are monotonic seconds like ``now``, or epoch seconds where the name has ``wall``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from podwatch.config.settings import DiskSettings
from podwatch.detection.learned import Learned
from podwatch.domain.event import Incident
from podwatch.domain.facts import Facts, StoreFacts
from podwatch.domain.finding import Finding
from podwatch.domain.nodes import NodeView
from podwatch.domain.snapshot import Reading
from podwatch.domain.status_document import Capabilities, RecoveryView
from podwatch.job.exit_code import Verdict
from podwatch.report.run_cost import Account


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters since podwatch first guarded the run on this pod (kept in the journal); ``turns``: since this start."""

    turns: int = 0
    restarts: int = 0
    published: int = 0
    uploaded_bytes: int = 0
    skipped: int = 0
    abandoned: int = 0
    """Abandoned uploads."""
    pruned: int = 0
    incidents: Mapping[str, int] = field(default_factory=dict)
    """By kind."""
    events: Mapping[str, int] = field(default_factory=dict)
    """By event name."""


@dataclass(frozen=True, slots=True)
class DaemonView:
    """The state of the daemon at one time.

    ``now`` is monotonic, ``now_wall`` the same time in epoch seconds. ``opening`` is the first line of the daemon.
    ``facts``: with the readings of the last turn, corrected by what recovery has done since.
    ``second_signals`` are the corroborating signals that can confirm a death on this pod. ``watchdog_ok``: the sensing
    loop ran within its deadline.
    """

    version: str
    run_id: str
    facts: Facts
    now: float
    now_wall: float
    started_wall: float = 0.0
    pid: int = 0
    mode: str = "act"
    opening: str = ""
    watchdog_ok: bool = True
    sensors: Mapping[str, Reading[object]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    recovery: RecoveryView = field(default_factory=RecoveryView)
    sync: StoreFacts = field(default_factory=StoreFacts)
    learned: Learned = field(default_factory=Learned)
    counters: Counters = field(default_factory=Counters)
    incident: Incident | None = None
    incidents: tuple[Incident, ...] = ()
    """The last ones, newest first."""
    next_save_bytes: int | None = None
    prune_above: float = DiskSettings().prune_above
    steps_at_risk: int | None = None
    target_step: int | None = None
    trainer_ended_at: float | None = None
    """Monotonic second at which the trainer process was first missing while its launcher runs and training is desired;
    None otherwise."""
    trainer_changed_at: float = float("-inf")
    """Monotonic second of the last start or end of a trainer: older readings of GPUs and servers can be of the previous
    one."""
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
    last_log_line: str = ""
    """Of the trainer's log; secrets are not removed."""
    layout: str = ""
    layout_because: str = ""
    capabilities: Capabilities | None = None
    """What this pod's filesystem and kernel can report about files being written; None: not tested."""
    end: Verdict | None = None
    """How the run ended here; None while it has not."""
    nodes: tuple[NodeView, ...] = ()
    """The nodes of a run over several nodes that have reported, by rank; empty for a run on one node."""
    node_count: int = 1
    """How many nodes the run has."""
    account: Account | None = None
    """The run's time and money; None before podwatch observes the run."""
    best_result: str = ""
    """The best evaluation, as text; empty if none is known."""

    def wall_of(self, monotonic: float) -> float:
        """The epoch seconds of a monotonic time, by the current clocks; for display only."""
        return self.now_wall - (self.now - monotonic)

    @property
    def acts(self) -> bool:
        """Whether podwatch acts on its own when it is not paused (mode ``act``)."""
        return self.mode == "act"

    @property
    def paused(self) -> bool:
        return self.facts.run.pause is not None

    @property
    def healed(self) -> bool:
        """Whether no incident is open."""
        return self.incident is None or bool(self.incident.resolution)


ViewSource = Callable[[], DaemonView]
"""Returns the view as of now."""
