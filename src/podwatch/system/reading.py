"""Reads files in places that other users can change: checkpoints, logs, metrics, files named by a command (promise 9).

podwatch often runs as root and shows what it reads: a step, a log line, a digest, an artifact in the store. So it must
not read a file that a user of the pod merely points at. One rule for all of these files:

- Only regular files are read, without blocking. A FIFO or a device with the name of a log is refused.
- A symbolic link is followed where only root or podwatch can have put it. Any other link may lead only to a file of its
  own user: of the owner of the link, or of the directory that contains it.
- A file that is shown or leaves the pod (``shown``) must be its maker's: a file with several names (hard links) is read
  where only root or podwatch can have named it, or where it belongs to the owner of its directory. A checkpoint is
  judged with such files: it can be resumed from, and is not sent (``sync.upload.ownership``).

Each path is walked segment by segment by descriptors, so nothing changes between the check and the read. Everything
here blocks.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from podwatch.system.files import read_descriptor

_PASS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MOST_LINKS = 16
_ANYBODY = -1
"""Represents the owner of a link that any user could have put there: no file belongs to it."""


def open_file(path: str | os.PathLike[str], *, shown: bool = False) -> int:
    """A descriptor for reading. Raises OSError: EINVAL for a file that is not regular, EACCES for a forbidden target of
    a link, with the reason as its text; FileNotFoundError also if it was replaced meanwhile."""
    return _walk(os.path.join(os.getcwd(), os.fspath(path)), shown)  # noqa: PTH109, PTH118 - resolves nothing


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], *, shown: bool = False) -> Iterator[BinaryIO]:
    """``open_file`` as a file object."""
    with os.fdopen(open_file(path, shown=shown), "rb") as file:
        yield file


def read_file(path: str | os.PathLike[str], limit: int = 1 << 20, *, shown: bool = False) -> bytes:
    """The whole file. Raises OSError as ``open_file``, and EFBIG where it holds more than ``limit`` bytes."""
    fd = open_file(path, shown=shown)
    try:
        return read_descriptor(fd, limit, os.fspath(path))
    finally:
        os.close(fd)


def _walk(path: str, shown: bool) -> int:
    ours = frozenset((0, os.geteuid()))
    users: set[int] = set()
    """Users who could have chosen where the links lead."""
    links = 0
    pending = [name for name in reversed(path.split("/")) if name not in ("", ".")]
    directory = os.open("/", _PASS)
    try:
        while pending:
            name = pending.pop()
            below = os.open(name, _LOOK, dir_fd=directory)
            try:
                found = os.fstat(below)
                if stat.S_ISLNK(found.st_mode):
                    links += 1
                    if links > _MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    users |= _choosers(found, os.fstat(directory), directory, ours)
                    target = os.readlink("", dir_fd=below)
                    pending += [name for name in reversed(target.split("/")) if name not in ("", ".")]
                    if target.startswith("/"):
                        below, directory = directory, below
                        os.close(directory)
                        directory = os.open("/", _PASS)
                elif pending:
                    if not stat.S_ISDIR(found.st_mode):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
                    below, directory = directory, below
                else:
                    _judge(found, os.fstat(directory), ours, users, path, shown=shown)
                    return _open_same(directory, name, found, path)
            finally:
                os.close(below)
        raise _refused(errno.EINVAL, "not a regular file", path)
    finally:
        os.close(directory)


def _choosers(link: os.stat_result, around: os.stat_result, directory: int, ours: frozenset[int]) -> set[int]:
    """Users whose choice this link can be, root and podwatch left out."""
    found = {link.st_uid, around.st_uid} - ours
    open_to_all = around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX
    if not found and open_to_all and not os.fstatvfs(directory).f_flag & os.ST_RDONLY:  # read-only: a volume's link
        found.add(_ANYBODY)
    return found


def _judge(
    found: os.stat_result, around: os.stat_result, ours: frozenset[int], users: set[int], path: str, *, shown: bool
) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _refused(errno.EINVAL, "not a regular file", path)
    if users - {found.st_uid}:
        raise _refused(errno.EACCES, f"podwatch does not follow a symbolic link to a file of user {found.st_uid}", path)
    if shown and found.st_nlink > 1 and not _owner_made(found, around, ours):
        raise _refused(errno.EACCES, f"podwatch does not read a hard link to a file of user {found.st_uid}", path)


def _owner_made(found: os.stat_result, around: os.stat_result, ours: frozenset[int]) -> bool:
    """Can only the file's owner, podwatch or root have given it this name?"""
    if around.st_uid not in ours:
        return found.st_uid == around.st_uid
    shared = around.st_mode & stat.S_IWOTH or (around.st_mode & stat.S_IWGRP and around.st_gid not in (0, os.getegid()))
    return not shared or found.st_uid not in ours


def _open_same(directory: int, name: str, judged: os.stat_result, path: str) -> int:
    """Opened only now: opening a device, or the reading end of a FIFO, can have an effect of its own."""
    fd = os.open(name, _READ, dir_fd=directory)
    now = os.fstat(fd)
    if (now.st_dev, now.st_ino) != (judged.st_dev, judged.st_ino):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "replaced while podwatch opened it", path)
    return fd


def _refused(code: int, why: str, path: str) -> OSError:
    return OSError(code, why, path)
