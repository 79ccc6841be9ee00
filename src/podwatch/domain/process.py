"""Processes: identity, role and exit status."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

TICKS_PER_SECOND = 100
"""USER_HZ, the unit of times in /proc: 100 on x86-64 and arm64 (proc(5), sysconf(3))."""


_IDENTITY = re.compile(r"([0-9A-Za-z-]{1,64}):([1-9]\d{0,17}):(\d{1,9}):(\d{1,18})")


@dataclass(frozen=True, slots=True, order=True)
class ProcessIdentity:
    """The unique identity of a process.

    ``start_ticks`` is field 22 of ``/proc/PID/stat`` (clock ticks since boot): unlike ``psutil.create_time`` it does
    not change with the wall clock. ``boot_id`` and ``pid_namespace`` (inode number) distinguish a record from before a
    reboot or from another container.
    """

    pid: int
    start_ticks: int
    boot_id: str = ""
    pid_namespace: int = 0

    def age(self, boottime: float) -> float:
        """Seconds that it had lived at ``boottime`` (CLOCK_BOOTTIME)."""
        return max(0.0, boottime - self.start_ticks / TICKS_PER_SECOND)

    @property
    def text(self) -> str:
        """``BOOT:NAMESPACE:PID:TICKS``, as documents and environment variables carry it."""
        return f"{self.boot_id}:{self.pid_namespace}:{self.pid}:{self.start_ticks}"

    @classmethod
    def from_text(cls, text: str) -> "ProcessIdentity | None":
        """The inverse of ``text``; None for anything else."""
        match = _IDENTITY.fullmatch(text)
        return cls(int(match[3]), int(match[4]), match[1], int(match[2])) if match else None


class ProcessRole(StrEnum):
    """The role of a process in the trainer's tree, as its title or command shows it."""

    LAUNCHER = "launcher"
    TRAINER = "trainer"
    ORCHESTRATOR = "orchestrator"
    INFERENCE = "inference"
    """The API server of the inference engine."""
    ENGINE = "engine"
    """``VLLM::EngineCore`` and workers: the processes that hold the model."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ProcessNames:
    """How one trainer's processes call themselves. ``titles``: beginnings of a title (setproctitle). ``programs``:
    names of programs and console scripts. ``modules``: modules of ``python -m``."""

    titles: Mapping[str, ProcessRole] = field(default_factory=dict)
    programs: Mapping[str, ProcessRole] = field(default_factory=dict)
    modules: Mapping[str, ProcessRole] = field(default_factory=dict)


NO_PROCESSES = ProcessNames()


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process of the trainer's tree at one moment.

    ``cuda``: whether it holds a CUDA context (``/dev/nvidia-uvm`` open); None if that cannot be read. ``gpus``: the
    minor numbers of ``/dev/nvidiaN`` that it has open. ``state``: the state letter in ``/proc/PID/stat``.
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
    """How a process ended. At most one of ``code`` and ``signal`` is set; both None means unknown."""

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


# -- trees of the pod -------------------------------------------------------------------------------------------------

ATTACHED_ID = "attach-"
"""Prefix of the ids of starts that podwatch did not make."""


def attached_id(launcher: ProcessIdentity) -> str:
    """Return the start id of a trainer that podwatch did not start; the same for every podwatch that sees it."""
    return f"{ATTACHED_ID}{launcher.pid}-{launcher.start_ticks}"


class TreeAnswer(StrEnum):
    """What podwatch does about a tree. An ignored one has no entry: it is never waited for and never signalled."""

    OWN = "own"
    """The run's supervisor started it."""
    ATTACH = "attach"
    WAIT = "wait"
    """It may be about to train: podwatch starts nothing beside it, and asks when that takes long."""
    ASK = "ask"
    """Unclear: an operator decides."""


@dataclass(frozen=True, slots=True)
class PodProcess:
    """Facts about one process. ``users``: real and effective user id, empty where unknown. ``exe``: the program that
    the kernel runs, whatever argv says. ``tty``: 0 without a controlling terminal. ``role``: OTHER where the program
    cannot be what argv says. ``cuda``: None where it cannot be read. ``writes``: files below the run's directories that
    are open for writing. ``names_output``: says as text how a configuration file, or a path through links, names
    output_dir. ``start_id``: the one in its environment. ``age``: seconds since its start. ``podwatch``: podwatch, its
    children and the commands that it runs; ``above_podwatch``: its ancestors."""

    identity: ProcessIdentity
    parent_pid: int
    name: str
    argv: tuple[str, ...]
    exe: str = ""
    cwd: str = ""
    users: tuple[int, ...] = ()
    group: int = 0
    session: int = 0
    tty: int = 0
    role: ProcessRole = ProcessRole.OTHER
    cuda: bool | None = None
    gpus: frozenset[int] = frozenset()
    writes: tuple[str, ...] = ()
    names_output: str = ""
    start_id: str = ""
    age: float = 0.0
    podwatch: bool = False
    above_podwatch: bool = False

    @property
    def pid(self) -> int:
        return self.identity.pid


@dataclass(frozen=True, slots=True)
class FoundTree:
    """``trains``: it has a tie, and a training role or a CUDA context. ``writes``: beside a trainer of the run, it is a
    second writer: it trains, has a checkpoint open, or has a tie and runs the command's script. ``attachable``: an
    operator can declare it the trainer."""

    top: PodProcess
    answer: TreeAnswer
    reason: str
    trains: bool = False
    attachable: bool = True
    writes: bool = False
    members: tuple[PodProcess, ...] = field(default=(), compare=False, repr=False)

    @property
    def launcher(self) -> ProcessIdentity:
        return self.top.identity

    @property
    def start_id(self) -> str:
        """Of the start that it is, once podwatch attaches to it."""
        return attached_id(self.top.identity)

    @property
    def command(self) -> str:
        return " ".join(self.top.argv) or self.top.name

    def has(self, pid: int) -> bool:
        """Whether this process is part of it: ``nvidia-smi`` shows the processes below its top."""
        return any(process.pid == pid for process in (self.top, *self.members))

    @property
    def hidden(self) -> bool:
        """Whether podwatch may not see if it holds a GPU."""
        return all(process.cuda is None for process in (self.top, *self.members))
