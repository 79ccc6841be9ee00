"""The memory cgroup of a process: limit, use and OOM kills, under cgroup v2 and v1. Reads /proc and /sys; may block.

Use excludes the page cache: a trainer that writes checkpoints fills any limit with cache, which the kernel reclaims
before it kills a process. In-memory files (/dev/shm) are not on the cache lists, so they count as use.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
"""v1 has no "max": an unlimited group shows a number near 2^63."""
DEPTH = 32
"""Ancestors that are read. A pod has four to eight."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``limit_bytes`` is None where there is no limit; then ``used_bytes`` is the group's own use. ``oom_kills`` is the
    ``oom_kill`` counter, which only grows while the group exists; None where the kernel does not count."""

    limit_bytes: int | None
    used_bytes: int | None
    oom_kills: int | None


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a hierarchy is mounted. ``root`` is the group that the mount point shows: a container sees only its own."""

    point: Path
    root: str
    version: int


def find_mount(mountinfo: str) -> Mount | None:
    """The memory hierarchy in ``/proc/self/mountinfo``; v1 before v2, because on a hybrid system v1 holds memory."""
    found: Mount | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        point, root = Path(_unescape(fields[4])), _unescape(fields[3])
        if kind[0] == "cgroup" and "memory" in kind[2].split(","):
            return Mount(point, root, 1)
        if kind[0] == "cgroup2" and found is None:
            found = Mount(point, root, 2)
    return found


def group_of(text: str, version: int) -> str | None:
    """The group's path in the text of ``/proc/PID/cgroup``."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if version == 2 and number == "0" and not controllers:
            return path
        if version == 1 and "memory" in controllers.split(","):
            return path
    return None


def directory_of(mount: Mount, group: str) -> Path:
    """The group's directory below the mount. For a group that the mount does not show (another namespace's) it is the
    mount point itself: the same limit applies."""
    if group.startswith("/.."):
        return mount.point
    root = mount.root.rstrip("/")
    inside = group[len(root) :] if group == root or group.startswith(f"{root}/") else None
    candidate = mount.point / (inside if inside is not None else group).lstrip("/")
    return candidate if candidate.is_dir() else mount.point


def read(pid: int, proc: Path = Path("/proc")) -> Memory | None:
    """The memory group of ``pid``: of all groups above it the one nearest to its limit, with the OOM kills of the
    process's own group. None where no memory group is visible."""
    try:
        mount = find_mount((proc / "self/mountinfo").read_text(errors="replace"))
        group = group_of((proc / str(pid) / "cgroup").read_text(errors="replace"), mount.version) if mount else None
    except OSError:
        return None
    if mount is None or group is None:
        return None
    own = directory_of(mount, group)
    tightest: tuple[float, int, int] | None = None
    directory = own
    for _ in range(DEPTH):
        limit, used = _limit(directory, mount.version), _used(directory, mount.version)
        if limit and used is not None and (tightest is None or used / limit > tightest[0]):
            tightest = (used / limit, limit, used)
        if directory == mount.point or mount.point not in directory.parents:
            break
        directory = directory.parent
    kills = _oom_kills(own, mount.version)
    if tightest is not None:
        return Memory(tightest[1], tightest[2], kills)
    used = _used(own, mount.version)
    return None if used is None and kills is None else Memory(None, used, kills)


def _limit(directory: Path, version: int) -> int | None:
    value = _number(directory / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
    return value if value is not None and 0 < value < UNLIMITED else None


def _used(directory: Path, version: int) -> int | None:
    value = _number(directory / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
    if value is None:
        return None
    prefix = "" if version == 2 else "total_"
    figures = _figures(directory / "memory.stat")
    cache = figures.get(f"{prefix}inactive_file", 0) + figures.get(f"{prefix}active_file", 0)
    return max(0, value - cache)


def _oom_kills(directory: Path, version: int) -> int | None:
    return _figures(directory / ("memory.events" if version == 2 else "memory.oom_control")).get("oom_kill")


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None  # "max" too


def _figures(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            found[name] = int(value)
    return found


def _unescape(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
