"""Settle times: how long a checkpoint must be unchanged before it counts as complete, by its end mark and by the
filesystem; doubled where changes become visible late.
"""

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.table import SaveEnd
from podwatch.domain.status_document import Capabilities

# -- settle times ----------------------------------------------------------------------------------------------------

SLOW_FACTOR = 2
"""Network and FUSE clients cache sizes and mtimes for seconds."""


@dataclass(frozen=True, slots=True)
class SettleTimes:
    """Settle times in seconds: with a commit marker, with a file written last or a tracker, and without any."""

    settle: float
    tracker: float
    weak: float

    def need(self, ends: SaveEnd, *, slow: bool) -> float:
        base = {SaveEnd.COMMIT: self.settle, SaveEnd.LAST: self.tracker, SaveEnd.NONE: self.weak}[ends]
        return base * (SLOW_FACTOR if slow else 1)

    def longest(self, *, slow: bool) -> float:
        return max(self.settle, self.tracker, self.weak) * (SLOW_FACTOR if slow else 1)


# -- filesystem of a path --------------------------------------------------------------------------------------------

_SLOW = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "beegfs", "glusterfs", "gpfs", "afs", "virtiofs")
_known: dict[int, str] = {}


def slow_to_show(paths: Iterable[Path], *, mountinfo: Path = Path("/proc/self/mountinfo")) -> bool:
    """True if any of ``paths`` (or its nearest existing parent) is on a network or FUSE filesystem.

    Their clients cache sizes and mtimes for seconds. The answer is cached per device.
    """
    return any(is_slow(kind_of(p, mountinfo=mountinfo)) for p in paths)


def is_slow(kind: str) -> bool:
    return kind in _SLOW or kind == "fuse" or kind.startswith("fuse.")


def kind_of(path: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """``ext4``, ``overlay``, ``nfs4``... of ``path`` or its nearest existing parent; empty if unknown."""
    for candidate in (path, *path.parents):
        try:
            device = candidate.stat().st_dev
        except OSError:
            continue
        if device not in _known:
            _known[device] = _look_up(device, mountinfo)
        return _known[device]
    return ""


def _look_up(device: int, mountinfo: Path) -> str:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split(" ", 1)[0]
        if len(fields) > 2 and fields[2] == wanted:
            return kind
    return ""


def capabilities_of(directory: Path) -> Capabilities:
    """What this pod's filesystem and kernel report about files being written in ``directory``. Blocks."""
    kind = kind_of(directory)
    return Capabilities(kind, is_slow(kind), _inotify())


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
