"""The interfaces through which the rest of podwatch starts, adopts, watches and stops a trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.domain.process import ExitStatus, FoundTree, ProcessIdentity, ProcessSample
from podwatch.domain.snapshot import Reading, Supervision


class CannotExecute(HostError):  # noqa: N818
    """The command cannot run as it is written (no such program, directory or user): a retry changes
    nothing."""


class MayNotExecute(PermissionDenied, CannotExecute):
    """The command cannot run because a permission is missing."""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """One start, decided in full before anything happens. ``env`` may hold secrets: never logged, never in argv.
    ``before`` are commands that run first, one after another; processes that they leave running belong to this
    start."""

    start_id: str
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(repr=False)
    user: str = ""
    nofile: int = 65_536
    step: int | None = None
    before: tuple[tuple[str, ...], ...] = ()


Saving: TypeAlias = Callable[[], bool]
"""Whether the trainer writes a checkpoint now."""


@dataclass(frozen=True, slots=True)
class StopReport:
    """The result of a stop. ``survivors`` are processes that even SIGKILL did not end (D state), as text."""

    seconds: float
    killed: int
    survivors: tuple[str, ...] = ()
    exit: ExitStatus | None = None


class TrainerHandle(Protocol):
    """One trainer, running or just ended, supervised or attached."""

    start_id: str
    supervision: Supervision
    launcher: ProcessIdentity
    started_wall: float

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems of the start that did not prevent it."""
        ...

    @property
    def age(self) -> float:
        """Seconds since the launcher's start, by the boot's clock, which nobody sets."""
        ...

    @property
    def ended(self) -> Mapping[tuple[int, int], ExitStatus]:
        """How processes of the tree ended, by (pid, start ticks): those that the supervisor reaped, because their own
        parent had ended before."""
        ...

    @property
    def terminal_used(self) -> float | None:
        """Epoch second of the last key typed in the terminal of an attached trainer; None without one. Never blocks."""
        ...

    async def exit_status(self) -> ExitStatus | None:
        """Return how the launcher ended; None while it lives."""
        ...

    async def tree(self, *, sweep: bool = False) -> Reading[tuple[ProcessSample, ...]]:
        """Return every living descendant ever seen, the launcher first, re-parented orphans included. ``sweep``: search
        all processes for others of this start now, not only every few seconds."""
        ...

    async def stop(self, *, grace: float, save_grace: float, saving: Saving, max_kill_wait: float = 30.0) -> StopReport:
        """SIGTERM the whole tree, wait ``grace`` seconds (``save_grace`` while ``saving()``), SIGKILL what is left.

        Idempotent. Returns when nothing of the tree is left, or the rest is stuck in the kernel.
        """
        ...

    async def release(self) -> None:
        """Wait until the supervisor has recorded the end and has ended, so that the run lock is free."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """What runs on this pod now. ``handle`` is the supervised trainer of this run, living or ended. ``trees`` may train
    this run, and podwatch did not start them. ``holders`` are all processes with a CUDA context on the run's GPUs, as
    text. An interrupted stop of one of ``stoppable`` can be finished even if it no longer looks like training.
    ``kept``: who holds the run lock while no trainer is seen (in another container, or of another run in this
    output_dir); empty if nobody does."""

    handle: TrainerHandle | None = None
    trees: tuple[FoundTree, ...] = ()
    holders: tuple[str, ...] = ()
    stoppable: frozenset[ProcessIdentity] = frozenset()
    kept: str = ""


class Launcher(Protocol):
    """Starts and finds trainers of one run."""

    async def look(self) -> Look:
        """Return the supervised trainer of this run if there is one, else what else may train it. Never starts
        anything."""
        ...

    async def attach(self, launcher: ProcessIdentity) -> TrainerHandle:
        """Take over a trainer that podwatch did not start; its exit status stays unknown. Raises Busy when it has ended
        in the meantime."""
        ...

    async def start(self, plan: StartPlan) -> TrainerHandle:
        """Start under a new supervisor. Raises Busy when another one holds the run lock, CannotExecute when the command
        does not exist or its directory is missing, HostError for any other obstacle. Returns once the launcher
        has been executed."""
        ...

    def log_path(self) -> str:
        """Return the file that the trainer's stdout and stderr go to (survives restarts; rotated)."""
        ...

    async def close(self) -> None:
        """Close sockets and threads. Never touches training."""
        ...
