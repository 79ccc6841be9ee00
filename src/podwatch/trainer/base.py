"""The doors of this room: how the rest of podwatch starts, adopts, watches and stops a trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessSample
from podwatch.domain.reading import Reading
from podwatch.domain.snapshot import ATTACHED_ID, Supervision


class CannotExecute(HostError):  # noqa: N818
    """The command cannot run as it is written (no such program, directory or user): trying again changes nothing."""


class MayNotExecute(PermissionDenied, CannotExecute):
    """The same for want of permission."""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """One start, decided in full before anything happens. ``env`` may hold secrets: never logged, never in argv.
    ``before`` are commands that run first, one after another; what they leave running belongs to this start."""

    start_id: str
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(repr=False)
    user: str = ""
    nofile: int = 65_536
    step: int | None = None
    before: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process tree that looks like this run's training, and why. ``holds_gpu``: a CUDA context was seen in it.
    ``of_run``: it was also seen at work in output_dir; else it may be anything that uses the GPUs. ``awaits``: it is
    pending, no trainer yet, and this decides. ``attachable``: an operator may say that it is the trainer."""

    launcher: ProcessIdentity
    command: str
    reason: str
    holds_gpu: bool = False
    of_run: bool = False
    age: float = 0.0
    """Seconds since its launcher was started."""
    awaits: str = ""
    attachable: bool = True

    @property
    def start_id(self) -> str:
        return attached_id(self.launcher)


def attached_id(launcher: ProcessIdentity) -> str:
    """What the start of a trainer that was attached to is called; the same for every podwatch that sees it."""
    return f"{ATTACHED_ID}{launcher.pid}-{launcher.start_ticks}"


@dataclass(frozen=True, slots=True)
class StopReport:
    """What stopping took. ``survivors`` are processes that even SIGKILL did not end (D state), as text."""

    seconds: float
    killed: int
    survivors: tuple[str, ...] = ()
    exit: ExitStatus | None = None


class TrainerHandle(Protocol):
    """One running (or just ended) trainer that is ours."""

    start_id: str
    supervision: Supervision
    launcher: ProcessIdentity
    started_wall: float
    warnings: tuple[str, ...]
    """What could not be done as wanted when it was started."""

    async def exit_status(self) -> ExitStatus | None:
        """None while the launcher lives."""
        ...

    async def tree(self) -> Reading[tuple[ProcessSample, ...]]:
        """Every living descendant ever seen, the launcher first, re-parented orphans included."""
        ...

    async def stop(
        self, *, grace: float, save_grace: float, saving: Callable[[], bool], max_kill_wait: float = 30.0
    ) -> StopReport:
        """SIGTERM the whole tree, wait ``grace`` seconds (``save_grace`` while ``saving()``), SIGKILL what is left.

        Idempotent. Returns when nothing of the tree is left, or the rest is stuck in the kernel.
        """
        ...

    async def release(self) -> None:
        """The tree is gone and its end is noted: let the keeper go, so that the run lock is free."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """What is on this pod right now. ``handle`` is a living (or ended, not yet released) keeper of this run.
    ``holders`` are all processes with a CUDA context on the run's GPUs, in words. ``pending`` are no trainers, and no
    trainer is started beside them: see ``Candidate.awaits``. A stop of one of ``eligible`` that was begun may be
    finished, though it shows no sign of training any more."""

    handle: TrainerHandle | None = None
    candidates: tuple[Candidate, ...] = ()
    holders: tuple[str, ...] = ()
    pending: tuple[Candidate, ...] = ()
    eligible: frozenset[ProcessIdentity] = frozenset()


class Launcher(Protocol):
    """Starts and finds trainers of one run."""

    async def look(self) -> Look:
        """A keeper of ours first, else candidates. Never starts anything."""
        ...

    async def attach(self, candidate: Candidate) -> TrainerHandle:
        """Take over a trainer someone else started; its exit status will be unknown."""
        ...

    async def start(self, plan: StartPlan) -> TrainerHandle:
        """Start under a new keeper. Raises Busy when another keeper holds the run lock, CannotExecute when the command
        does not exist or its directory is missing, HostError when something else stood in the way. Returns once the
        launcher has really been executed."""
        ...

    def log_path(self) -> str:
        """The file the trainer's stdout and stderr go to (survives restarts; rotated)."""
        ...

    async def close(self) -> None:
        """Let go of sockets and threads. Never touches training."""
        ...
