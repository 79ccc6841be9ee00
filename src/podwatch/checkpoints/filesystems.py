"""The filesystem of a path, and whether changes become visible late there."""

import os
from collections.abc import Iterable
from pathlib import Path

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
