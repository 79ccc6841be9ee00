"""File operations and locks that survive a crash, a hostile symlink and a full disk.

Everything that walks or removes uses directory descriptors with ``O_NOFOLLOW``, so that a symlink swapped in by the
trainer's own code (policies run there) can never lead outside (promise 9). All functions block: never call them on the
event loop.

``opened`` and ``read_file`` read files in places that other users can change: checkpoints, logs, metrics, files named
by a command (promise 9). podwatch often runs as root and shows what it reads: a step, a log line, a digest, an artifact
in the store. So it must not read a file that a user of the pod merely points at. One rule for all of these files:

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
import ctypes
import errno
import fcntl
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

from podwatch.domain.errors import Busy, PermissionDenied
from podwatch.domain.secrets import scrub_argv
from podwatch.system.follow import follow

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
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


def write_at(directory: int, name: str, data: bytes, mode: int) -> None:
    """``atomic_write`` in a directory that is open."""
    tmp = f".{name}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(tmp, flags, mode, dir_fd=directory)
    try:
        try:
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


def replace_in_reserved_space(
    path: Path, data: bytes, reserved: int, mode: int = 0o600, permit: Callable[[], None] = lambda: None
) -> None:
    """``atomic_write`` that needs no free space after the first time, for data of at most ``reserved`` bytes.

    The new version is written into a spare file, whose blocks are allocated, and exchanges names with the old one,
    which becomes the next spare: no block is freed that another process could take. Both files are padded with spaces
    to ``reserved`` bytes. A file system that cannot exchange names gets a rename, and a new spare where it has the
    space. ``permit`` is called when only the exchange is left; if it raises, the old version stays. Raises OSError.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    spare = f"{path.name}.spare"
    try:
        overwrite_at(directory, spare, data.ljust(reserved), mode)
        permit()
        if exchange_at(directory, spare, path.name):
            try:
                sync_descriptor(directory)
            except OSError:
                exchange_at(directory, spare, path.name)  # what is not durable must not be read as if it was
                raise
            return
        os.rename(spare, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        sync_descriptor(directory)
        with contextlib.suppress(OSError):
            overwrite_at(directory, spare, b" " * reserved, mode)
    finally:
        os.close(directory)


def unwritable(path: Path, error: OSError) -> str:
    """Why ``path`` cannot be written; the reason first, because a phone shows only the begin."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left to write {path.name} ({path})"
    if error.errno == errno.EROFS:
        return f"the file system of {path.name} is read-only ({path})"
    return f"{path.name} cannot be written: {error.strerror or error} ({path})"


class ReservedSpace:
    """A file of real blocks, deleted when a full disk must take what matters more. Methods block."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size

    def drop(self) -> bool:
        """Free the space. False if there was nothing to free."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True

    def restore(self) -> str:
        """Allocate it again; returns why that is not possible now, else empty."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            return unwritable(self.path, error)
        try:
            if os.fstat(descriptor).st_blocks * 512 < self.size:
                os.posix_fallocate(descriptor, 0, self.size)
        except OSError as error:
            self.drop()
            return unwritable(self.path, error)
        finally:
            os.close(descriptor)
        return ""


def overwrite_at(directory: int, name: str, data: bytes, mode: int) -> None:
    """Write a file in place, into the blocks that it has. Durable; not atomic."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, mode, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        os.fchmod(fd, mode)
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], done)
        os.ftruncate(fd, len(data))
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange_at(directory: int, one: str, other: str) -> bool:
    """Exchange the names of two files, atomically. False where one does not exist or the file system cannot."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(directory, os.fsencode(one), directory, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), one, None, other)


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


_DEEP = 50
"""A directory this deep is first moved up to the top: a tree can be thousands deep, and each level needs a descriptor
and a call."""


def remove_entry(parent_fd: int, name: str, shown: str, device: int, done: Removed, tick: Tick) -> None:
    """Remove a file or a tree, an entry of a directory that is open; ``shown`` is its name in a problem.

    Never follows a symlink (links are removed, not their targets), never crosses into another mount (``device``, and
    the id of the mount: a bind mount can be of the same device).
    Continues after an entry that cannot be removed and reports it. An entry that is already gone is no problem.
    """
    removal = _Removal(parent_fd, device, done, tick)
    removal.remove(parent_fd, name, shown, 0)
    while removal.moved:
        moved, shown = removal.moved.pop()
        removal.remove(parent_fd, moved, shown, 0)


class _Removal:
    def __init__(self, top: int, device: int, done: Removed, tick: Tick) -> None:
        self._top, self._device, self._done, self._tick = top, device, done, tick
        self.moved: list[tuple[str, str]] = []
        """(name in the top directory, name in a problem) of directories that were too deep."""

    def remove(self, parent_fd: int, name: str, shown: str, depth: int) -> None:
        done = self._done
        try:
            status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=parent_fd)
                done.files += 1
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    done.bytes += status.st_blocks * 512  # what the disk really regains
            elif status.st_dev != self._device:
                done.problems.append(f"{shown}: another filesystem is mounted here")
                return
            elif depth >= _DEEP:
                moved = f".deep-{secrets.token_hex(8)}"
                rename_at(parent_fd, name, self._top, moved)
                self.moved.append((moved, shown))
                return
            else:
                self._empty(parent_fd, name, shown, depth)
                os.rmdir(name, dir_fd=parent_fd)
                done.directories += 1
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not done.problems:  # the cause is reported already
                done.problems.append(f"{shown}: {os.strerror(error.errno or 0)}")
            return
        self._tick(done)

    def _empty(self, parent_fd: int, name: str, shown: str, depth: int) -> None:
        fd = os.open(name, DIRECTORY_FLAGS, dir_fd=parent_fd)
        try:
            if mount_of(fd) != mount_of(parent_fd):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            with os.scandir(fd) as entries:
                names = [entry.name for entry in entries]
            for entry_name in names:
                self.remove(fd, entry_name, f"{shown}/{entry_name}", depth + 1)
        finally:
            os.close(fd)


def mount_of(descriptor: int) -> bytes:
    """The id of the mount that this open file was reached through; empty where it cannot be read."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as info:  # noqa: PTH123
            return next((line.split()[1] for line in info if line.startswith(b"mnt_id:")), b"")
    except OSError:
        return b""


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
        self._fd = hold(self._open(what), self.path, what=what)

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


def hold(fd: int, path: Path, *, what: str) -> int:
    """Lock the file that is open as ``fd``, which is closed if that fails; returns ``fd``. Raises Busy naming the
    holder, OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _describe(os.pread(fd, 4096, 0))
        os.close(fd)
        raise Busy(f"{what} is already held by {holder}", where=str(path), fix="stop it first") from None
    except BaseException:
        os.close(fd)
        raise
    # The holder's name is optional: on a full disk the lock works anyway.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        info = {"pid": os.getpid(), "command": " ".join(scrub_argv([Path(sys.argv[0]).name, *sys.argv[1:]]))[:500]}
        os.pwrite(fd, json.dumps(info).encode(), 0)
    return fd


def _describe(raw: bytes) -> str:
    try:
        info = json.loads(raw)
        return f"process {int(info['pid'])} ({info['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_ANYBODY = -1
"""Represents the owner of a link that any user could have put there: no file belongs to it."""


def open_file(path: str | os.PathLike[str], *, shown: bool = False) -> int:
    """A descriptor for reading. Raises OSError: EINVAL for a file that is not regular, EACCES for a forbidden target of
    a link, with the reason as its text; FileNotFoundError also if it was replaced meanwhile."""
    name = os.fspath(path)
    if not name.startswith("/"):  # an absolute path can be read also where the current directory was deleted
        name = f"{os.getcwd()}/{name}"  # noqa: PTH109
    ours = frozenset((0, os.geteuid()))
    users: set[int] = set()
    """Users who could have chosen where the links lead."""
    with contextlib.closing(follow(name)) as steps:
        for step in steps:
            around = os.fstat(step.directory)
            if step.is_link:
                users |= _choosers(step.status, around, step.directory, ours)
            elif step.last:
                _judge(step.status, around, ours, users, name, shown=shown)
                return _open_same(step.directory, step.name, step.status, name)
    raise _refused(errno.EINVAL, "not a regular file", name)


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
