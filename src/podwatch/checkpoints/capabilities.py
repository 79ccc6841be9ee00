"""What this pod's kernel and filesystem can report about files that are being written.

Tried once on a scratch file of podwatch's own: sandboxes and FUSE lack some of it.
"""

import contextlib
import ctypes
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.settle_time import Held, held_open, is_slow, kind_of
from podwatch.domain.errors import HostError
from podwatch.system.pinned import PinnedTree

_HOLE = 1 << 20
"""Bytes; larger than any filesystem's block."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``None`` means that it could not be tried. ``filesystem`` is empty where unknown."""

    filesystem: str = ""
    slow: bool = False
    """Sizes and times become visible late: every settle time is doubled and leases are not used."""
    holes: bool | None = None
    """The filesystem reports ranges that were never written (SEEK_HOLE)."""
    leases: bool | None = None
    """The kernel reports whether a file is open for writing."""
    inotify: bool | None = None
    """File events work. Without them podwatch finds checkpoints by rescans alone."""

    def to_dict(self) -> dict[str, object]:
        return {
            "filesystem": self.filesystem,
            "slow": self.slow,
            "holes": self.holes,
            "leases": self.leases,
            "inotify": self.inotify,
        }


def probe(directory: Path, tree: PinnedTree | None = None) -> Capabilities:
    """Probe in ``directory`` (podwatch's own, on the checkpoints' filesystem). Blocks; never raises OSError; leaves no
    files. Pass ``tree`` where another user could replace the directory meanwhile."""
    kind = kind_of(directory)
    slow, inotify = is_slow(kind), _inotify()
    try:
        with contextlib.nullcontext(None) if tree is None else tree.directory(directory) as at:
            name = f".probe-{os.getpid()}-{secrets.token_hex(4)}"
            there: str | Path = directory / name if at is None else name
            fd = os.open(there, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
            try:
                holes = _holes(fd)
                leases = _leases(fd, directory / name) if not slow else None
            finally:
                with contextlib.suppress(OSError):
                    os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(there, dir_fd=at)
    except (OSError, HostError):
        return Capabilities(kind, slow, inotify=inotify)
    return Capabilities(kind, slow, holes, leases, inotify)


def _holes(fd: int) -> bool | None:
    """Whether a file that is one hole is reported as such, and a fully written one is not."""
    try:
        os.ftruncate(fd, _HOLE)
        if os.lseek(fd, 0, os.SEEK_HOLE) >= _HOLE:
            return False
        os.pwrite(fd, b"x" * 4096, 0)
        os.ftruncate(fd, 4096)
        return os.lseek(fd, 0, os.SEEK_HOLE) == 4096
    except OSError:
        return None


def _leases(fd: int, path: Path) -> bool | None:
    """Whether the kernel reports that podwatch's own descriptor is open for writing, and that it is closed."""
    while_open, _ = held_open([path])
    if while_open is not Held.YES:
        return False if while_open is Held.NO else None
    reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.dup2(reader, fd, inheritable=False)  # the write descriptor is gone; the caller still closes its number
    finally:
        os.close(reader)
    after, _ = held_open([path])
    return after is Held.NO


def _inotify() -> bool | None:
    """Whether an inotify instance is available (they are counted per user, and a container cannot raise the limit)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_CLOEXEC)
    except (OSError, AttributeError):
        return None
    if fd < 0:
        return False
    os.close(fd)
    return True
