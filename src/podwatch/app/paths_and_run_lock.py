"""Where one run's state and runtime files are, its directories beside the trainer's, and podwatch's lock.

One podwatch per run and per output directory: a lock in the run's state directory, and one beside output_dir, where
podwatches with different state directories meet. On a full or read-only disk the first cannot be created, but an
existing one can still be locked.
"""

import os
import pwd
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from podwatch.config.settings import Settings
from podwatch.domain.errors import Busy, HostError
from podwatch.system.files import FileLock, hold
from podwatch.system.own_directories import Workspace, own_directory

RECORDING = "recording"
"""Directory of the recording below a run's state."""
HISTORY = "history.jsonl"
"""What the page's plots show, beside it."""
GUARD_LOCK = "guard.lock"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """``state`` is durable (database, supervisor, incidents), ``runtime`` lasts as long as the machine is up."""

    state: Path
    runtime: Path

    @property
    def journal(self) -> Path:
        return self.state / "journal.sqlite"

    @property
    def lock(self) -> Path:
        return self.state / GUARD_LOCK

    @property
    def records(self) -> Path:
        """Of the checkpoints that were found complete."""
        return self.state / "records"

    @property
    def incidents(self) -> Path:
        return self.state / "incidents"

    @property
    def recording(self) -> Path:
        return self.state / RECORDING

    @property
    def history(self) -> Path:
        return self.state / HISTORY

    @property
    def control_socket(self) -> Path:
        return self.runtime / "control" / "control.sock"


def workspace_of(settings: Settings) -> Workspace:
    """The run's directories, pinned at their first use: one Workspace for each process. Not probed yet."""
    trainer = settings.trainer
    try:
        owner = pwd.getpwnam(trainer.user).pw_uid if trainer.user else None
    except KeyError:
        owner = None  # the start of training reports it
    beside = tuple(p for p in (trainer.checkpoint_dir,) if p is not None)
    return Workspace(trainer.output_dir, beside=beside, owner=owner, node=settings.nodes.rank or 0)


def run_paths(state_dir: Path, run_id: str, environ: Mapping[str, str]) -> RunPaths:
    """Create the directories: state is private, runtime is readable by all users. Both are writable by us only.

    Raises PermissionDenied or HostError with the fix."""
    state = state_dir / run_id
    own_directory(state, 0o700, fix="set state_dir to a directory on local disk that podwatch may write")
    reasons = []
    for root in runtime_roots(state_dir, environ):
        runtime = root / run_id
        try:
            own_directory(runtime, 0o755)
            if os.access(runtime, os.W_OK):
                return RunPaths(state, runtime)
            reasons.append(f"{runtime}: not writable")
        except HostError as error:
            reasons.append(f"{runtime}: {error.what}")
    raise HostError("cannot write any runtime directory", where="; ".join(reasons), fix="set state_dir")


def guard_paths(state_dir: Path, run_id: str, environ: Mapping[str, str]) -> RunPaths:
    """The same for the daemon, which guards without a directory, too: never raises. Blocks."""
    try:
        return run_paths(state_dir, run_id, environ)
    except HostError:
        return unmade_paths(state_dir, run_id, environ, usable=_writable)


def unmade_paths(
    state_dir: Path, run_id: str, environ: Mapping[str, str], usable: Callable[[Path], bool] = lambda path: True
) -> RunPaths:
    """The paths without creating them, with the first runtime directory that is ``usable``."""
    runtimes = [root / run_id for root in runtime_roots(state_dir, environ)]
    return RunPaths(state_dir / run_id, next((path for path in runtimes if usable(path)), runtimes[0]))


def _writable(path: Path) -> bool:
    try:
        own_directory(path, 0o755)
        return os.access(path, os.W_OK)
    except (HostError, OSError):
        return False


def runtime_roots(state_dir: Path, environ: Mapping[str, str]) -> list[Path]:
    explicit = environ.get("PODWATCH_RUNTIME_DIR")
    if explicit:
        return [Path(explicit)]
    by_systemd = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return [Path(p) for p in (by_systemd, "/run/podwatch") if p] + [state_dir / "run"]


class RunLock:
    """podwatch's two locks, held for its life. Methods block. ``what`` names the lock in errors."""

    def __init__(self, state: Path, what: str = "the guard of this run") -> None:
        self._path, self._what = state, what
        self._state = FileLock(state)
        self._existing: int | None = None
        self._output: int | None = None
        self.problem = ""
        """Why the lock beside output_dir is not held; empty if it is, or was not tried yet."""

    @property
    def complete(self) -> bool:
        """Whether the lock of the state directory is held."""
        return self._state.held or self._existing is not None

    def take_state_lock(self) -> None:
        """Take the lock in the state directory if possible. Raises Busy with the holder; after other errors podwatch
        guards without deleting, publishing or starting anything (state_check.py)."""
        if self._state.held:
            return
        try:
            self._state.acquire(what=self._what)
        except Busy:
            if self._existing is None:
                raise
        except (HostError, OSError):
            self._take_existing()

    def take_output_lock(self, workspace: Workspace) -> None:
        """Take the lock beside output_dir if possible. Raises Busy."""
        if self._output is not None:
            return
        path = workspace.outside / GUARD_LOCK
        try:
            self._output = hold(workspace.tree.open_own(path), path, what=self._what)
        except Busy:
            raise
        except (HostError, OSError) as error:
            self.problem = f"{path}: {error.strerror if isinstance(error, OSError) else error}"
        else:
            self.problem = ""

    def release(self) -> None:
        self._state.release()
        for fd in (self._existing, self._output):
            if fd is not None:
                os.close(fd)
        self._existing = self._output = None

    def _take_existing(self) -> None:
        if self._existing is not None:
            return
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return
        try:
            self._existing = hold(descriptor, self._path, what=self._what)
        except OSError:  # on NFS an exclusive lock needs a file that is open for writing
            return
