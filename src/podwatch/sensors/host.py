"""The machine's own limits: memory, swap, /dev/shm, the trainer's memory cgroup, open files, and XIDs."""

import contextlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from podwatch.domain.process import ProcessIdentity, ProcessSample
from podwatch.domain.snapshot import FileUse, HostSample, Reading, SensorState, TrainerSample, observed, unobserved
from podwatch.sensors.base import PolledSensor, Read, Sensor
from podwatch.sensors.xid import XidInbox
from podwatch.system.clock import Clock

# -- sensor ----------------------------------------------------------------------------------------------------------

POLL = 10.0
"""Seconds. Memory that runs out within ten seconds is found afterwards by the OOM counter."""
DEADLINE = 10.0
_NOFILE = re.compile(rb"^Max open files +(\d+|unlimited)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _HostRead:
    sample: HostSample | None
    limits: dict[ProcessIdentity, int]
    problem: str = ""


class HostSensor(PolledSensor[_HostRead, HostSample]):
    """Reads the host, and the files and memory group of the trainer's processes.

    Open files are counted from the size of ``/proc/PID/fd``, which Linux 6.2 and later show to every user, else by
    listing it, which needs permission to trace the process. A process without that permission is counted in
    ``files_unreadable``, never as one with few files.
    """

    name = "host"

    def __init__(
        self,
        clock: Clock,
        *,
        trainer: Sensor[TrainerSample],
        xids: XidInbox,
        poll: float = POLL,
        deadline: float = DEADLINE,
        proc: Path = Path("/proc"),
        shm: Path = Path("/dev/shm"),
    ) -> None:
        super().__init__(clock, poll=poll, deadline=deadline, max_stuck=1)
        self._trainer, self._xids, self._proc, self._shm = trainer, xids, proc, shm
        self._limits: dict[ProcessIdentity, int] = {}
        self._looks = 0

    def latest(self) -> Reading[HostSample]:
        """The newest reading. XIDs are as new as the inbox, the rest as new as the last poll."""
        reading = super().latest()
        xids = self._xids.newest()
        if reading.value is None or reading.value.xids == xids:
            return reading
        return replace(reading, value=replace(reading.value, xids=xids))

    def prepare(self) -> Read[_HostRead]:
        trainer = self._trainer.latest().value
        tree = trainer.descendants if trainer is not None else ()
        self._looks += 1
        # Limits are read again every five minutes: vLLM raises its own once, at the start
        limits = dict(self._limits) if self._looks % 30 else {}
        return lambda: self._look(tree, limits)

    def absorb(self, seen: _HostRead) -> Reading[HostSample]:
        now = self._clock.monotonic()
        self._limits = seen.limits
        if seen.sample is None:
            return unobserved(SensorState.BLIND, now, seen.problem)
        reading = observed(seen.sample, now)
        return Reading(reading.state, now, seen.sample, seen.problem) if seen.problem else reading

    def _look(self, tree: tuple[ProcessSample, ...], limits: dict[ProcessIdentity, int]) -> _HostRead:
        try:
            memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        except (OSError, KeyError, ValueError, psutil.Error) as error:
            return _HostRead(None, limits, f"cannot read the machine's memory: {error}")
        group = read(tree[0].identity.pid, self._proc) if tree else None
        files, unreadable, known = self._open_files(tree, limits)
        shm = self._shm_room()
        sample = HostSample(
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            swap_total_bytes=swap.total,
            swap_used_bytes=swap.used,
            shm_total_bytes=shm[0] if shm else None,
            shm_used_bytes=shm[1] if shm else None,
            cgroup_limit_bytes=group.limit_bytes if group else None,
            cgroup_used_bytes=group.used_bytes if group else None,
            oom_kills=group.oom_kills if group else None,
            files=files,
            files_unreadable=unreadable,
            xids=self._xids.newest(),
            xids_watched=self._xids.watched,
        )
        who = f"{unreadable} of {len(tree)} processes"
        problem = f"no permission to count the open files of {who}" if unreadable else ""
        return _HostRead(sample, known, problem)

    def _open_files(
        self, tree: tuple[ProcessSample, ...], limits: dict[ProcessIdentity, int]
    ) -> tuple[tuple[FileUse, ...], int, dict[ProcessIdentity, int]]:
        found: list[FileUse] = []
        known: dict[ProcessIdentity, int] = {}
        unreadable = 0
        for process in tree:
            pid = process.identity.pid
            try:
                used = self._count(pid)
                limit = limits.get(process.identity) or self._limit(pid)
            except PermissionError:
                unreadable += 1
                continue
            except (OSError, ValueError):
                continue  # it is gone
            known[process.identity] = limit
            found.append(FileUse(pid, process.name, used, limit))
        found.sort(key=lambda use: (-use.open_files / use.limit, use.pid))
        return tuple(found[:5]), unreadable, known

    def _count(self, pid: int) -> int:
        path = f"{self._proc}/{pid}/fd"
        size = os.stat(path).st_size  # noqa: PTH116 - one call per process and poll
        return size if size > 0 else len(os.listdir(path))  # noqa: PTH208

    def _limit(self, pid: int) -> int:
        match = _NOFILE.search((self._proc / str(pid) / "limits").read_bytes())
        if match is None:
            raise ValueError("no limit found")
        return 1 << 40 if match[1] == b"unlimited" else max(1, int(match[1]))

    def _shm_room(self) -> tuple[int, int] | None:
        try:
            room = os.statvfs(self._shm)
        except OSError:
            return None
        total = room.f_blocks * room.f_frsize
        return (total, total - room.f_bfree * room.f_frsize) if total else None


# -- memory cgroup of a process --------------------------------------------------------------------------------------
# Limit, use and OOM kills, under cgroup v2 and v1. Reads /proc and /sys; may block. Use excludes the page cache: a
# trainer that writes checkpoints fills any limit with cache, which the kernel reclaims before it kills a process.
# In-memory files (/dev/shm) are not on the cache lists, so they count as use.


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
    for _ in range(32):  # a pod has four to eight
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
    # v1 has no "max": an unlimited group shows a number near 2^63
    return value if value is not None and 0 < value < (1 << 60) else None


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
