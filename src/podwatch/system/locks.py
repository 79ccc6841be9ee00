"""A lock that names its holder, and that no crash can leave behind (flock dies with its holder)."""

import contextlib
import fcntl
import json
import os
import stat
import sys
from pathlib import Path

from podwatch.domain.errors import Busy, PermissionDenied
from podwatch.domain.secrets import scrub_argv


class FileLock:
    """An exclusive flock on ``path``, a file of mode 0600 made by root, podwatch or the owner of its directory. Not
    inherited by children that exec. The file is never removed: otherwise two holders could lock two different files of
    one name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        return self._fd is not None

    def acquire(self, *, what: str = "podwatch") -> None:
        """Take it now. Raises Busy naming the holder, PermissionDenied when the file cannot be opened or trusted."""
        if self._fd is not None:
            return
        fd = self._open(what)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe(os.pread(fd, 4096, 0))
            os.close(fd)
            raise Busy(f"{what} is already held by {holder}", where=str(self.path), fix="stop it first") from None
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        # The holder's name is optional: on a full disk the lock works anyway.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            info = {"pid": os.getpid(), "command": " ".join(scrub_argv([Path(sys.argv[0]).name, *sys.argv[1:]]))[:500]}
            os.pwrite(fd, json.dumps(info).encode(), 0)

    def _open(self, what: str) -> int:
        """A lock that another user can read, that user can hold; and another user's content cannot be trusted."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            owners = (0, os.geteuid(), self.path.parent.stat().st_uid)
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise PermissionDenied(
                f"cannot open the lock of {what}: {error.strerror}",
                where=str(self.path),
                fix="run podwatch as the user that owns it, or remove it",
            ) from error
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners:
            os.close(fd)
            raise PermissionDenied(
                f"the lock of {what} is not a file of this user (uid {found.st_uid})",
                where=str(self.path),
                fix="remove it, and check which users can write to its directory",
            )
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o600)
        return fd

    def release(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "FileLock":
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def _describe(raw: bytes) -> str:
    try:
        info = json.loads(raw)
        return f"process {int(info['pid'])} ({info['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
