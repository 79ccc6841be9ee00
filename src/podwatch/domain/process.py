"""Processes: who they are, what they do, how they ended."""

from dataclasses import dataclass
from enum import StrEnum

TICKS_PER_SECOND = 100
"""USER_HZ, in which the kernel tells times to programs: 100 on x86-64 and arm64 (proc(5), sysconf(3))."""


@dataclass(frozen=True, slots=True, order=True)
class ProcessIdentity:
    """A process that cannot be mistaken for another.

    ``start_ticks`` is field 22 of ``/proc/PID/stat`` (clock ticks since boot): unlike ``psutil.create_time`` it does
    not move with the wall clock (facts/systemd.md, "The keeper"). ``boot_id`` and ``pid_namespace`` (inode number)
    make a record from before a reboot, or from another container, harmless.
    """

    pid: int
    start_ticks: int
    boot_id: str = ""
    pid_namespace: int = 0

    def age(self, boottime: float) -> float:
        """Seconds it had lived at this moment of CLOCK_BOOTTIME."""
        return max(0.0, boottime - self.start_ticks / TICKS_PER_SECOND)


class ProcessRole(StrEnum):
    """What a process of the trainer's tree is for, as far as its title or command tells."""

    LAUNCHER = "launcher"
    TRAINER = "trainer"
    ORCHESTRATOR = "orchestrator"
    INFERENCE = "inference"
    """The API server of the inference engine."""
    ENGINE = "engine"
    """``VLLM::EngineCore`` and workers: the processes that hold the model."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process of the trainer's tree at one moment.

    ``cuda`` says whether it holds a CUDA context (``/dev/nvidia-uvm`` open); None where that cannot be read.
    ``gpus`` are the minor numbers of ``/dev/nvidiaN`` it holds open. ``state`` is the letter of ``/proc/PID/stat``.
    """

    identity: ProcessIdentity
    parent_pid: int
    name: str
    command: str
    role: ProcessRole
    state: str = "S"
    cuda: bool | None = None
    gpus: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended. Exactly one of ``code`` and ``signal`` is set; both None means nobody could tell."""

    code: int | None = None
    signal: int | None = None
    at_wall: float = 0.0

    @property
    def known(self) -> bool:
        return self.code is not None or self.signal is not None

    @property
    def clean(self) -> bool:
        return self.code == 0

    def describe(self) -> str:
        if self.code is not None:
            return f"exit code {self.code}"
        if self.signal is not None:
            return f"signal {self.signal}"
        return "unknown exit status"
