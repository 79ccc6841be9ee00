"""What this pod's kernel and filesystem can tell about files being written.

Found out by trying, once, on a scratch file of our own (facts/checkpoints.md sections 5 and 7: sandboxes and FUSE lack
one or the other).
"""

import contextlib
import ctypes
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.filesystems import is_slow, kind_of
from podwatch.checkpoints.quiet import Held, held_open
from podwatch.domain.errors import HostError
from podwatch.system.pinned import PinnedTree

_HOLE = 1 << 20
"""Bytes; larger than any filesystem's block."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``None`` means that it could not be tried. ``filesystem`` is empty where nobody says."""

    filesystem: str = ""
    slow: bool = False
    """Sizes and times show late there: every quiet time is doubled and leases are not used."""
    holes: bool | None = None
    """Ranges that were never written can be seen (SEEK_HOLE)."""
    leases: bool | None = None
    """The kernel says whether a file is open for writing."""
    inotify: bool | None = None
    """Events can be had. Without them checkpoints are found by rescans alone."""

    def to_dict(self) -> dict[str, object]:
        return {
            "filesystem": self.filesystem,
            "slow": self.slow,
            "holes": self.holes,
            "leases": self.leases,
            "inotify": self.inotify,
        }


def probe(directory: Path, tree: PinnedTree | None = None) -> Capabilities:
    """Try in ``directory`` (ours, on the checkpoints' filesystem). Blocks; never raises OSError; leaves nothing.
    ``tree`` reaches it where another user could exchange it meanwhile."""
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
    """A file that is nothing but a hole must be seen as one, and one that is written to its end must not."""
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
    """Our own descriptor is open for writing: that must be seen, and its end too."""
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
    """An instance can be had (they are counted per user, and a container cannot raise the limit)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_CLOEXEC)
    except (OSError, AttributeError):
        return None
    if fd < 0:
        return False
    os.close(fd)
    return True
