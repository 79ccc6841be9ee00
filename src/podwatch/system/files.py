"""File operations and locks that survive a crash, a hostile symlink and a full disk.

Everything that walks or removes uses directory descriptors with ``O_NOFOLLOW``, so that a symlink swapped in by the
trainer's own code (policies run there) can never lead outside (promise 9).
All functions block: never call them on the event loop.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from podwatch.domain.errors import Busy, PermissionDenied
from podwatch.domain.secrets import scrub_argv

_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


def fsync_dir(path: Path) -> None:
    """Make renames and creations in ``path`` durable. Filesystems that cannot sync a directory are tolerated."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_descriptor(fd)
    finally:
        os.close(fd)


def sync_descriptor(directory: int) -> None:
    """``fsync_dir`` for a directory that is open."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_filesystem(descriptor: int) -> None:
    """Sync everything written to the filesystem of this open file; a write error raises OSError (Linux 5.8 and later).
    One call for thousands of small files, each of which would otherwise wait for the disk."""
    if _libc.syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Start writing this range to the disk, without waiting. A hint only: fsync is still needed."""
    call = getattr(_libc, "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def atomic_write(path: Path, data: bytes | str, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``: readers see the old file or the new one, and a power cut keeps one of the two.

    The temporary file is beside it, has ``mode`` from its first byte on, and is removed when anything fails.
    Raises OSError.
    """
    raw = data.encode() if isinstance(data, str) else data
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write_at(directory, path.name, raw, mode)
    finally:
        os.close(directory)


def write_at(directory: int, name: str, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    """``atomic_write`` in a directory that is open. ``owner`` is (uid, gid), None for our own."""
    tmp = f".{name}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(tmp, flags, mode, dir_fd=directory)
    try:
        try:
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)  # the umask may have removed bits
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(tmp, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(tmp, dir_fd=directory)
        raise
    sync_descriptor(directory)


def read_small(path: Path, limit: int = 1 << 20) -> bytes:
    """The whole file. Raises OSError; ``EFBIG`` when it has more than ``limit`` bytes, ``EINVAL`` when it is not a
    regular file (a FIFO would block forever)."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return read_descriptor(fd, limit, str(path))
    finally:
        os.close(fd)


def read_descriptor(fd: int, limit: int, shown: str) -> bytes:
    """``read_small`` for a file that is open. ``shown`` is its name in an error."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", shown)
    chunks: list[bytes] = []
    left = limit + 1
    while left > 0 and (chunk := os.read(fd, left)):
        chunks.append(chunk)
        left -= len(chunk)
    if left <= 0:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", shown)
    return b"".join(chunks)


def rename_at(source_dir: int, source: str, target_dir: int, target: str) -> None:
    """Rename between directories that are open, but never over something that exists (FileExistsError). Atomic where
    the filesystem knows ``RENAME_NOREPLACE``; elsewhere (NFS, some FUSE) checked first, which leaves a gap of
    microseconds."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is not None:
        if renameat2(source_dir, os.fsencode(source), target_dir, os.fsencode(target), _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), source, None, target)
    try:
        os.stat(target, dir_fd=target_dir, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir)
        return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target)


def split_relative(relative: str) -> tuple[str, ...]:
    """The segments of a path that must stay below a root. Raises ValueError for absolute, empty, ``.``, ``..``,
    doubled or trailing slashes and NUL: names from a store are never trusted as paths (promise 9)."""
    parts = tuple(relative.split("/"))
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"not a plain relative path: {relative!r}")
    return parts


def open_dir_below(root_fd: int, relative: str, *, create: bool = False, mode: int = 0o755) -> int:
    """Open the directory ``relative`` below ``root_fd`` without following a symlink in any segment.

    With ``create`` the missing segments are made with ``mode``. Raises OSError (ELOOP or ENOTDIR for a symlink).
    """
    fd = os.dup(root_fd)
    try:
        for part in split_relative(relative) if relative else ():
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, mode, dir_fd=fd)
            below = os.open(part, DIRECTORY_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = below
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_below(root_fd: int, relative: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open the file ``relative`` below ``root_fd`` without following a symlink in any segment. Raises OSError."""
    parent, _, name = relative.rpartition("/")
    split_relative(relative)
    parent_fd = open_dir_below(root_fd, parent)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent_fd)
    finally:
        os.close(parent_fd)


@dataclass(slots=True)
class Removed:
    """What ``remove_entry`` did. ``problems`` are texts with path and reason; empty means all of it is gone."""

    files: int = 0
    directories: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


Tick: TypeAlias = Callable[[Removed], None]
"""Called after every removed entry: sleeps to yield, or raises to stop."""


def remove_entry(parent_fd: int, name: str, shown: str, device: int, done: Removed, tick: Tick) -> None:
    """Remove a file or a tree, an entry of a directory that is open; ``shown`` is its name in a problem.

    Never follows a symlink (links are removed, not their targets), never crosses into another mount (``device``).
    Continues after an entry that cannot be removed and reports it. An entry that is already gone is no problem.
    """
    try:
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            if status.st_dev != device:
                done.problems.append(f"{shown}: another filesystem is mounted here")
                return
            _empty_directory(parent_fd, name, shown, device, done, tick)
            os.rmdir(name, dir_fd=parent_fd)
            done.directories += 1
        else:
            os.unlink(name, dir_fd=parent_fd)
            done.files += 1
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                done.bytes += status.st_blocks * 512  # what the disk really regains
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or not done.problems:  # the cause is reported already
            done.problems.append(f"{shown}: {os.strerror(error.errno or 0)}")
        return
    tick(done)


def _empty_directory(parent_fd: int, name: str, shown: str, device: int, done: Removed, tick: Tick) -> None:
    fd = os.open(name, DIRECTORY_FLAGS, dir_fd=parent_fd)
    try:
        with os.scandir(fd) as entries:
            names = [entry.name for entry in entries]
        for entry_name in names:
            remove_entry(fd, entry_name, f"{shown}/{entry_name}", device, done, tick)
    finally:
        os.close(fd)


# -- locks -----------------------------------------------------------------------------------------------------------
# A lock that names its holder, and that no crash can leave behind (flock dies with its holder).


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
