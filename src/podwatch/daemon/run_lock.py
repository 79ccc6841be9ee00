"""The run lock: one podwatch per run, also if the state directory cannot be written.

The lock is a file in the run's state directory. On a full or read-only disk that file cannot be created, but an
existing one can still be locked; if neither works, the lock beside the endpoint file is used. That second lock is
always taken, so that a later podwatch, which can use the state directory again, still finds the first one.
"""

import fcntl
import os
from pathlib import Path

from podwatch.domain.errors import Busy, HostError
from podwatch.system.files import FileLock

GUARD_LOCK = "guard.lock"


class RunLock:
    """Methods block. ``what`` names the lock in errors."""

    def __init__(self, state: Path, runtime: Path, what: str = "the guard of this run") -> None:
        self._path, self._what = state, what
        self._state, self._runtime = FileLock(state), FileLock(runtime / GUARD_LOCK)
        self._existing: int | None = None

    @property
    def complete(self) -> bool:
        """Whether the lock of the state directory is held."""
        return self._state.held or self._existing is not None

    def acquire(self) -> None:
        """Take the available locks. Raises Busy with the holder; after other errors podwatch guards without deleting,
        publishing or starting anything (startup_checks.py)."""
        self.take_state_lock()
        try:
            self._runtime.acquire(what=self._what)
        except Busy:
            raise
        except (HostError, OSError):
            return

    def take_state_lock(self) -> None:
        """Take the lock in the state directory if possible. Raises Busy."""
        if self._state.held:
            return
        try:
            self._state.acquire(what=self._what)
        except Busy:
            if self._existing is None:
                raise
        except (HostError, OSError):
            self._take_existing()

    def release(self) -> None:
        self._state.release()
        self._runtime.release()
        if self._existing is not None:
            os.close(self._existing)
            self._existing = None

    def _take_existing(self) -> None:
        if self._existing is not None:
            return
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise Busy(
                f"{self._what} is already held by another process", where=str(self._path), fix="stop it first"
            ) from None
        except OSError:  # on NFS an exclusive lock needs a file that is open for writing
            os.close(descriptor)
            return
        self._existing = descriptor
