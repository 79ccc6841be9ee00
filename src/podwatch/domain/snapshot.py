"""One frozen snapshot of the pod, made of the sensors' readings: the complete input of detection at one moment."""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Generic, TypeVar

from podwatch.domain.process import ATTACHED_ID, ExitStatus, ProcessIdentity, ProcessRole, ProcessSample

# -- readings --------------------------------------------------------------------------------------------------------
# A detector that gets a state other than ``OK`` has no evidence, and a missing reading never confirms a verdict.

T = TypeVar("T", covariant=True)
V = TypeVar("V")


class SensorState(StrEnum):
    """Whether a reading was observed, or why not."""

    OK = "ok"
    """Observed within the sensor's deadline."""
    ABSENT = "absent"
    """Nothing to observe: not configured, or the library or device is not on this machine."""
    DENIED = "denied"
    """The operating system denied access; the fix is in ``detail``."""
    BLIND = "blind"
    """The sensor no longer answers within its deadline, or its answers are invalid."""
    PENDING = "pending"
    """Not observed yet since podwatch started."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """One sensor's newest answer.

    ``value`` is None unless ``state`` is OK. ``at``: the monotonic second at which the value (or, if it is not OK, the
    state) was observed. ``detail``: the reason and, if there is one, the fix.
    """

    state: SensorState
    at: float
    value: T | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.state is SensorState.OK and self.value is not None


def observed(value: V, at: float) -> Reading[V]:
    """A reading with a value."""
    return Reading(SensorState.OK, at, value)


def unobserved(state: SensorState, at: float, detail: str) -> "Reading[V]":
    """A reading without a value; ``detail`` is the reason."""
    return Reading(state, at, None, detail)


# -- samples and the snapshot ----------------------------------------------------------------------------------------


class GpuState(StrEnum):
    OK = "ok"
    LOST = "lost"
    """Fell off the bus (NVML_ERROR_GPU_IS_LOST); only a reboot or another machine helps."""
    NOT_SUPPORTED = "not-supported"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One device by NVML index. ``utilization_percent`` and ``temperature_celsius`` are None if not supported.

    ``memory_used_bytes`` counts all processes of the host, without what the driver reserves (memory info v2).
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
    mig: bool = False
    """Partitioned (Multi-Instance GPU): memory and use of the device do not show a single instance."""
    ecc_uncorrected: int | None = None
    """Uncorrected ECC errors since the driver was loaded (volatile counter)."""
    throttled: tuple[str, ...] = ()
    """Why the clocks are throttled now, if that is a fault: ``hw-thermal``, ``hw-power-brake``, ``sw-thermal``."""
    minor: int | None = None
    """N of its ``/dev/nvidiaN``, by which /proc names it: not always the NVML index. None if unknown."""


@dataclass(frozen=True, slots=True)
class XidEvent:
    """A GPU fault that the driver reported (NVML event ``nvmlEventTypeXidCriticalError``). ``at`` is monotonic."""

    gpu: int | None
    code: int
    at: float


@dataclass(frozen=True, slots=True)
class FileUse:
    """Open files of one process of the trainer's tree against its soft limit (RLIMIT_NOFILE)."""

    pid: int
    name: str
    open_files: int
    limit: int


@dataclass(frozen=True, slots=True)
class HostSample:
    """The machine, and the container's share of it. Sizes in bytes; None if this machine does not report it.

    ``cgroup_*``: the memory cgroup that the trainer runs in; ``oom_kills`` is its ``oom_kill`` counter
    (``memory.events``), which only grows.
    """

    memory_total_bytes: int
    memory_available_bytes: int
    swap_total_bytes: int = 0
    swap_used_bytes: int = 0
    shm_total_bytes: int | None = None
    shm_used_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    oom_kills: int | None = None
    files: tuple[FileUse, ...] = ()
    """The processes closest to their limit, closest first."""
    files_unreadable: int = 0
    """Processes of the tree whose open files podwatch has no permission to count."""
    xids: tuple[XidEvent, ...] = ()
    """Newest last, bounded."""
    xids_watched: bool = False
    """XIDs are being watched; otherwise their absence proves nothing."""


@dataclass(frozen=True, slots=True)
class LogMatch:
    """The matches of one log rule since the start of training. ``line``: the newest match, scrubbed and shortened.
    ``count``: matches within the rule's window. ``first_at`` and ``last_at`` are monotonic."""

    rule: str
    role: str
    count: int
    first_at: float
    last_at: float
    line: str = ""


@dataclass(frozen=True, slots=True)
class TrainingMetrics:
    """The figures of one step, under podwatch's names (``reward``, ``entropy``, ``kl``, ``grad_norm``, ``loss``)."""

    step: int
    at: float
    values: tuple[tuple[str, float], ...]
    source: str = ""
    """``metrics.jsonl``, ``endpoint`` or ``step-line``."""


class Supervision(StrEnum):
    """How podwatch supervises the trainer."""

    NONE = "none"
    SUPERVISED = "supervised"
    """Started by this or an earlier podwatch under the supervisor: exit status known."""
    ATTACH = "attach"
    """Started by an operator or another program; podwatch attached to it: exit status unknown."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """A process of the tree that ended, with the exit status that its supervisor or the kernel reported. ``seen_at``:
    when podwatch learned of it (monotonic)."""

    identity: ProcessIdentity
    role: ProcessRole
    status: ExitStatus
    seen_at: float


@dataclass(frozen=True, slots=True)
class TrainerSample:
    """The trainer's process tree.

    ``start_id`` changes with every start, so that detectors recognize a restart. ``alive``: the launcher lives.
    ``started_at`` is monotonic. ``exit`` is set once the launcher has ended. ``descendants``: all living processes of
    the tree, including the launcher.
    """

    start_id: str = ""
    supervision: Supervision = Supervision.NONE
    alive: bool = False
    started_at: float | None = None
    launcher: ProcessIdentity | None = None
    exit: ExitStatus | None = None
    descendants: tuple[ProcessSample, ...] = ()
    finish_line: bool = False
    """The trainer printed its own finish line ("RL trainer finished!") after this start."""
    finished: frozenset[ProcessRole] = frozenset()
    """Roles that printed theirs: prime-rl's orchestrator ends minutes before its trainer, and that is no failure."""
    terminal_used_wall: float | None = None
    """When an operator last typed in the terminal that an attached trainer was started in (epoch seconds)."""
    ends: tuple[ProcessEnd, ...] = ()
    """The newest ends with known exit status, oldest first. Most exit statuses are visible only to the parent process,
    so the absence of an end proves nothing."""

    @property
    def by_hand(self) -> bool:
        """Whether podwatch did not start it. False for one whose supervisor was killed: podwatch started it, and only
        its exit status is lost."""
        return self.supervision is Supervision.ATTACH and self.start_id.startswith(ATTACHED_ID)

    @property
    def supervisor_lost(self) -> bool:
        """Whether podwatch started it and it still lives after its supervisor ended."""
        return self.alive and self.supervision is Supervision.ATTACH and not self.by_hand


@dataclass(frozen=True, slots=True)
class DiskSample:
    """One file system. ``capacity_bytes``: the configured capacity, or else that of statvfs."""

    path: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    inodes_total: int = 0
    inodes_free: int = 0
    role: str = ""
    """Its contents: ``checkpoints`` (or empty), ``output``, ``temp``, ``state``, or the name of a part."""
    device: int = 0
    """st_dev: roles with the same value share a file system; 0 = unknown. It does not show whether a rename works."""

    @property
    def used_ratio(self) -> float:
        """Used share of the capacity, 0 to 1."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    @property
    def inodes_low(self) -> bool:
        """Less than 5 % of the inodes are free; never where the file system makes them on demand."""
        return self.inodes_total > 0 and self.inodes_free < 0.05 * self.inodes_total


class Health(StrEnum):
    """Answer of an inference server's ``/health``."""

    OK = "ok"
    UNHEALTHY = "unhealthy"
    """HTTP 5xx: vLLM reports that its engine is dead."""
    REFUSED = "refused"
    """Connection refused: the API server is gone."""
    TIMEOUT = "timeout"


class Liveness(StrEnum):
    """Answer of prime-rl's ``/liveness``: a no-op call through the engine."""

    OK = "ok"
    UNRESPONSIVE = "unresponsive"
    """503: the engine did not answer within the server's own 30 s."""
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class InferenceSample:
    """One inference server. Counters come from vLLM's ``/metrics``; None if not readable.

    Health 200 does not prove that the engine works (vllm#39863), hence the counters. A router (prime-rl's
    ``vllm-router``) has none: it answers for the engines behind it.
    """

    url: str
    health: Health
    http_status: int | None = None
    requests_running: float | None = None
    generation_tokens_total: float | None = None
    requests_waiting: float | None = None
    liveness: Liveness | None = None
    """None if the server has no such route, or was not asked."""
    asleep: bool | None = None
    """vLLM's sleep mode (``/is_sleeping``), which frees its memory on purpose. None if it does not report it."""
    discovered: bool = False
    """Found in the process tree, not configured."""


class ProgressSource(StrEnum):
    STEP_LINE = "step-line"
    MARKER = "marker"
    """``broadcasts/step_N/STABLE`` and the like."""
    CHECKPOINT = "checkpoint"
    HEARTBEAT = "heartbeat"
    """A ping without a step number; a source with step numbers always takes precedence."""


def is_training(role: str) -> bool:
    """Whether steps of this role are the trainer's own."""
    return role not in ("orchestrator", "inference")


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """The newest progress from one source. ``at`` is monotonic; ``step`` is None for a ping without a number."""

    source: ProgressSource
    role: str
    at: float
    step: int | None = None
    own: bool = False
    """Read from the log that podwatch's supervisor writes for this start: no other process can have made it."""

    @property
    def trained(self) -> bool:
        """Whether it is a step of the trainer itself. The orchestrator numbers its batches up to two steps ahead, and
        continues while a trainer fails to load, so its numbers prove nothing."""
        return self.step is not None and is_training(self.role)


class Desired(StrEnum):
    """The desired state of the run; durable."""

    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"


_PRECEDENCE = {ProgressSource.STEP_LINE: 0, ProgressSource.MARKER: 1, ProgressSource.CHECKPOINT: 2}
"""Which source shows a step first."""


_NOT_OBSERVED: Reading[Any] = unobserved(SensorState.PENDING, 0.0, "not observed yet")
_NO_SERVER: Reading[Any] = unobserved(SensorState.ABSENT, 0.0, "no inference URL configured")
_NO_LOGS: Reading[Any] = unobserved(SensorState.ABSENT, 0.0, "no log is followed")
_NO_TRAINING: Reading[Any] = unobserved(SensorState.ABSENT, 0.0, "no source of training figures")
_NO_DISKS: Reading[Any] = unobserved(SensorState.ABSENT, 0.0, "no other file system is looked at")


@dataclass(frozen=True, slots=True)
class CheckpointMark:
    """The newest complete checkpoint at this turn, for detectors. ``newest_wall``: when its files were last written
    (epoch seconds)."""

    newest_step: int | None = None
    newest_wall: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the pod at one turn of the sensing loop.

    ``at``: the monotonic second of the turn; ``wall``: the epoch second, for display. A reading keeps the time at which
    it was observed, so that a stale one is visible. ``saving``: a checkpoint is being written.
    """

    at: float
    wall: float
    gpus: Reading[tuple[GpuSample, ...]] = _NOT_OBSERVED
    trainer: Reading[TrainerSample] = _NOT_OBSERVED
    disk: Reading[DiskSample] = _NOT_OBSERVED
    inference: Reading[tuple[InferenceSample, ...]] = _NO_SERVER
    progress: Reading[tuple[ProgressSample, ...]] = _NOT_OBSERVED
    saving: bool = False
    desired: Desired = Desired.RUNNING
    host: Reading[HostSample] = _NOT_OBSERVED
    logs: Reading[tuple[LogMatch, ...]] = _NO_LOGS
    training: Reading[tuple[TrainingMetrics, ...]] = _NO_TRAINING
    """Newest last, at most a few steps: detectors keep their own history."""
    checkpoint: CheckpointMark = CheckpointMark()
    disks: Reading[tuple[DiskSample, ...]] = _NO_DISKS
    """File systems other than ``disk``, one entry per role."""
    boot_at: float | None = None
    """The same moment on CLOCK_BOOTTIME, which also runs during suspend: with ``at`` it shows one."""

    @property
    def readings(self) -> dict[str, Reading[object]]:
        """By sensor name."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: value for name, value in values if isinstance(value, Reading)}

    @property
    def progress_of_start(self) -> tuple[ProgressSample, ...]:
        """The progress samples since the trainer was started; all of them if its start is unknown."""
        trainer = self.trainer.value
        begin = trainer.started_at if trainer is not None and trainer.started_at is not None else float("-inf")
        return tuple(s for s in self.progress.value or () if s.at >= begin)

    @property
    def newest_step(self) -> ProgressSample | None:
        """The training step of now; None before the first: the highest one (of equal ones the latest sample) that is
        not older than the newest of the best source. A trainer that began again below shows the lower step.

        Status, metrics, heartbeat and W&B all use this step. A trainer that ended keeps its last step until the next
        start.
        """
        trained = [s for s in self.progress_of_start if s.trained]
        best = min(trained, key=lambda s: (_PRECEDENCE.get(s.source, 9), s.role != "trainer", -s.at), default=None)
        since = float("-inf") if best is None else best.at
        return max((s for s in trained if s.at >= since), key=lambda s: (s.step or 0, s.at), default=None)

    @property
    def steps_between_saves(self) -> bool:
        """Whether a source other than checkpoints has shown a step since the start. If not, the number of steps since
        the newest checkpoint is unknown."""
        return any(s.trained and s.source is not ProgressSource.CHECKPOINT for s in self.progress_of_start)
