"""On which filesystems do changes show late?"""

import os
from collections.abc import Iterable
from pathlib import Path

_SLOW = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "beegfs", "glusterfs", "gpfs", "afs", "virtiofs")
_known: dict[int, bool] = {}


def slow_to_show(paths: Iterable[Path], *, mountinfo: Path = Path("/proc/self/mountinfo")) -> bool:
    """True if any of ``paths`` (or its nearest existing parent) lies on a network or FUSE filesystem.

    Their clients cache sizes and mtimes for seconds (facts/checkpoints.md section 5). Remembered per device.
    """
    return any(_is_slow(p, mountinfo) for p in paths)


def _is_slow(path: Path, mountinfo: Path) -> bool:
    for candidate in (path, *path.parents):
        try:
            device = candidate.stat().st_dev
        except OSError:
            continue
        if device not in _known:
            _known[device] = _look_up(device, mountinfo)
        return _known[device]
    return False


def _look_up(device: int, mountinfo: Path) -> bool:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split(" ", 1)[0]
        if len(fields) > 2 and fields[2] == wanted:
            return kind in _SLOW or kind == "fuse" or kind.startswith("fuse.")
    return False
