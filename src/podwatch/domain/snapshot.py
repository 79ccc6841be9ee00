"""One frozen look at the pod: everything the judgement rooms may know about a moment."""

from dataclasses import dataclass, field
from enum import StrEnum

from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.reading import Reading, SensorState, unobserved


class GpuState(StrEnum):
    OK = "ok"
    LOST = "lost"
    """Fell off the bus (NVML_ERROR_GPU_IS_LOST); only a reboot or another machine helps."""
    NOT_SUPPORTED = "not-supported"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One device by NVML index. ``utilization_percent`` and ``temperature_celsius`` are None where not supported.

    ``memory_used_bytes`` counts all processes of the host; NVML's own reserved memory is left out (memory info v2).
    """

    index: int
    uuid: str
    name: str
    state: GpuState = GpuState.OK
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: float | None = None
    temperature_celsius: float | None = None
    detail: str = ""


class Supervision(StrEnum):
    """How podwatch came to the trainer it watches."""

    NONE = "none"
    KEEPER = "keeper"
    """Started by us (or a podwatch before us) under the keeper: exit status known."""
    ATTACH = "attach"
    """Started by someone else and taken over: exit status unknown."""


@dataclass(frozen=True, slots=True)
class RequiredExit:
    """A required child (inference, orchestrator) that was seen in the tree and is gone while the launcher lives."""

    identity: ProcessIdentity
    role: ProcessRole
    name: str
    status: ExitStatus
    seen_gone_at: float


@dataclass(frozen=True, slots=True)
class TrainerSample:
    """The trainer's process tree.

    ``start_id`` changes with every start, which is how detectors know a restart boundary. ``alive`` is true while the
    launcher lives. ``started_at`` is monotonic. ``exit`` is set once the launcher has ended.
    ``descendants`` are all living processes of ours, launcher included.
    """

    start_id: str = ""
    supervision: Supervision = Supervision.NONE
    alive: bool = False
    started_at: float | None = None
    launcher: ProcessIdentity | None = None
    exit: ExitStatus | None = None
    descendants: tuple[ProcessSample, ...] = ()
    required_exits: tuple[RequiredExit, ...] = ()
    finish_line: bool = False
    """The trainer printed its own finish line ("RL trainer finished!") after this start."""


@dataclass(frozen=True, slots=True)
class DiskSample:
    """One filesystem. ``capacity_bytes`` is the configured capacity where set, else what statvfs says."""

    path: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    inodes_total: int = 0
    inodes_free: int = 0

    @property
    def used_ratio(self) -> float:
        """Used share of the capacity, 0 to 1."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


class Health(StrEnum):
    """Answer of an inference server's ``/health``."""

    OK = "ok"
    UNHEALTHY = "unhealthy"
    """HTTP 5xx: vLLM knows that its engine is dead."""
    REFUSED = "refused"
    """Nothing listens: the API server is gone."""
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class InferenceSample:
    """One inference server. Counters come from vLLM's ``/metrics``; None where not readable.

    Health 200 does not prove an engine that works (vllm#39863): that is why the counters are here.
    """

    url: str
    health: Health
    http_status: int | None = None
    requests_running: float | None = None
    generation_tokens_total: float | None = None


class ProgressSource(StrEnum):
    STEP_LINE = "step-line"
    MARKER = "marker"
    """``broadcasts/step_N/STABLE`` and the like."""
    CHECKPOINT = "checkpoint"
    HEARTBEAT = "heartbeat"
    """A ping without a number; it can never outvote a numbered source."""


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """The newest sign of progress from one source. ``at`` is monotonic; ``step`` is None for an unnumbered ping."""

    source: ProgressSource
    role: str
    at: float
    step: int | None = None

    @property
    def trained(self) -> bool:
        """A numbered step of the trainer itself. The orchestrator numbers its batches up to two steps ahead, and goes
        on numbering them while a trainer fails to load (facts/prime-rl.md section 1): they prove nothing."""
        return self.step is not None and self.role not in ("orchestrator", "inference")


class Desired(StrEnum):
    """What the owner wants of this run; durable (DESIGN section 2)."""

    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"


def _pending() -> "Reading[tuple[GpuSample, ...]]":
    return unobserved(SensorState.PENDING, 0.0, "not observed yet")


def _pending_disk() -> "Reading[DiskSample]":
    return unobserved(SensorState.PENDING, 0.0, "not observed yet")


def _pending_inference() -> "Reading[tuple[InferenceSample, ...]]":
    return unobserved(SensorState.ABSENT, 0.0, "no inference URL configured")


def _pending_progress() -> "Reading[tuple[ProgressSample, ...]]":
    return unobserved(SensorState.PENDING, 0.0, "not observed yet")


def _pending_trainer() -> "Reading[TrainerSample]":
    return unobserved(SensorState.PENDING, 0.0, "not observed yet")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything known at one turn of the sensing loop.

    ``at`` is the monotonic second of the turn, ``wall`` the epoch second for display. A reading keeps the time it was
    really observed, so a stale one shows. ``saving`` is true while a checkpoint is being written.
    """

    at: float
    wall: float
    gpus: Reading[tuple[GpuSample, ...]] = field(default_factory=_pending)
    trainer: Reading[TrainerSample] = field(default_factory=_pending_trainer)
    disk: Reading[DiskSample] = field(default_factory=_pending_disk)
    inference: Reading[tuple[InferenceSample, ...]] = field(default_factory=_pending_inference)
    progress: Reading[tuple[ProgressSample, ...]] = field(default_factory=_pending_progress)
    saving: bool = False
    desired: Desired = Desired.RUNNING
