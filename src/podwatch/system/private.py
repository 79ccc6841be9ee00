"""podwatch's directories that no other user can write to, or even enter. All functions block."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from podwatch.domain.errors import HostError, PermissionDenied


def own_directory(path: Path, mode: int, *, fix: str = "") -> None:
    """Create ``path`` with this mode, or remove all other permissions from an existing one.

    Raises PermissionDenied where it belongs to a user other than root and us, who could put anything there, and
    HostError where it cannot be made. A file system that shows one owner for everything (CIFS, some FUSE) is accepted.
    """
    try:
        if not path.is_dir():
            _make(path, mode)
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if found.st_uid not in (0, os.geteuid()) and not _shows_this_owner(descriptor, found.st_uid):
                raise PermissionDenied(
                    f"the directory belongs to uid {found.st_uid}, who could replace podwatch's files there",
                    where=str(path),
                    fix=f"run podwatch as that user, or: chown -R {os.geteuid()} {path}",
                )
            if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & ~mode & 0o077:
                with contextlib.suppress(OSError):  # a file system without modes
                    os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & (mode | ~0o077))
        finally:
            os.close(descriptor)
    except PermissionError as error:
        raise PermissionDenied("cannot create the directory", where=str(path), fix=fix) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise HostError(f"cannot create the directory, {reason}", where=str(path), fix=fix) from error


def _make(path: Path, mode: int) -> None:
    """Whatever the umask is: 0077 under systemd, where status needs no privilege; 0 in some containers."""
    if not path.parent.exists():
        _make(path.parent, 0o755)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode)
        path.chmod(mode)


def _shows_this_owner(directory: int, owner: int) -> bool:
    """Whether a file that we create in it belongs to ``owner`` too."""
    name = f".owner-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_uid == owner
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
