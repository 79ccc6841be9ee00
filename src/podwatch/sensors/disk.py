"""Free space and inodes of the filesystem that holds the checkpoints, and of the others that a run writes to."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.domain.snapshot import DiskSample, Reading, SensorState, observed, unobserved
from podwatch.sensors.base import PolledSensor, Read
from podwatch.system.clock import Clock

POLL = 10.0
"""Seconds. A 47 GB save takes minutes, so ten seconds are enough."""
DEADLINE = 10.0
"""Seconds. statvfs on a hung NFS or FUSE mount never returns; a slow network volume may take seconds."""


@dataclass(frozen=True, slots=True)
class _SpaceRead:
    """The result of statvfs for ``path``, or the error."""

    path: Path
    total: int = 0
    free: int = 0
    inodes: int = 0
    inodes_free: int = 0
    device: int = 0
    error: OSError | None = None


def look(path: Path) -> _SpaceRead:
    """statvfs of ``path``, or of its nearest parent that exists. Blocks; never raises OSError."""
    while True:
        try:
            figures = os.statvfs(path)
            device = path.stat().st_dev
        except (FileNotFoundError, NotADirectoryError):
            if path == path.parent:
                return _SpaceRead(path, error=FileNotFoundError(2, "no such directory", str(path)))
            path = path.parent
        except OSError as error:
            return _SpaceRead(path, error=error)
        else:
            size = figures.f_frsize
            return _SpaceRead(
                path, figures.f_blocks * size, figures.f_bavail * size, figures.f_files, figures.f_favail, device
            )


class DiskSensor(PolledSensor[_SpaceRead, DiskSample]):
    """statvfs in a daemon thread with a deadline.

    ``free`` is ``f_bavail``, the space that an unprivileged writer can still use: a trainer that runs as a user cannot
    use the blocks reserved for root, and ``df`` counts the same way. Without ``capacity_bytes``, used = total - free,
    so that used and free always add up to the capacity that ratios refer to.

    With ``capacity_bytes`` (an overlay shows the host's disk, or a quota is invisible) the totals of statvfs are
    meaningless, but ``f_bavail`` is still an upper bound of the free space. So free = min(f_bavail, capacity - known),
    and used_bytes = capacity - free, where ``known`` is the size of the known checkpoints (the catalogue's sum; 0
    without ``known_bytes``). The directory is not walked here: a walk over a network volume takes minutes, and the
    catalogue has the sizes anyway. ``known`` can only understate use, never overstate it: podwatch deletes nothing
    because a neighbour filled the host's disk beyond this pod's share.
    """

    name = "disk"

    def __init__(
        self,
        path: Path,
        clock: Clock,
        capacity_bytes: int | None = None,
        poll: float = POLL,
        *,
        deadline: float = DEADLINE,
        known_bytes: Callable[[], int] | None = None,
        role: str = "",
    ) -> None:
        """``known_bytes`` runs on the event loop and must not block. ``role``: what is on it (``DiskSample``)."""
        super().__init__(clock, poll=poll, deadline=deadline)
        self.name = f"disk {role}" if role else self.name
        self.path, self._role = path, role
        """The path can change during training."""
        self._capacity = capacity_bytes
        self._known = known_bytes
        self._asked_at = float("-inf")
        """A reading is as old as its question: what was removed before that is free in it."""

    def prepare(self) -> Read[_SpaceRead]:
        self._asked_at = self._clock.monotonic()
        return lambda: look(self.path)

    def absorb(self, seen: _SpaceRead) -> Reading[DiskSample]:
        now = self._asked_at
        if seen.error is not None:
            state = SensorState.DENIED if isinstance(seen.error, PermissionError) else SensorState.BLIND
            text = f"cannot read the free space of {seen.path}: {seen.error.strerror or seen.error}"
            return unobserved(state, now, text)
        if self._capacity is None:
            total, free = seen.total, seen.free
        else:
            known = self._known() if self._known is not None else 0
            total, free = self._capacity, max(0, min(seen.free, self._capacity - known))
        if total <= 0:
            return unobserved(
                SensorState.ABSENT, now, f"{seen.path} reports no size (a virtual file system): set disk.capacity"
            )
        used = total - free
        sample = DiskSample(
            str(seen.path), total, used, free, seen.inodes, seen.inodes_free, self._role, seen.device
        )  # fmt: skip
        reading = observed(sample, now)
        if seen.path != self.path:
            return replace(reading, detail=f"{self.path} does not exist yet; these are the values of {seen.path}")
        return reading


class DisksSensor:
    """Every other file system that the run or podwatch writes to, each in a thread of its own: one that hangs must not
    blind the others. ``places`` gives role -> path; it runs on the event loop and must not block. A file system that
    does not answer is left out and named in the detail."""

    name = "disks"

    # Read rarely: they fill more slowly than the one with the saves, and podwatch removes nothing there.
    def __init__(self, places: Callable[[], Mapping[str, Path]], clock: Clock, poll: float = 30.0) -> None:
        self._wanted, self._clock, self._poll = places, clock, poll
        self._places: dict[str, DiskSensor] = {}
        self._started = False
        self._followed_at = float("-inf")
        self._taken: Mapping[str, Reading[DiskSample]] = {}
        self._latest: Reading[tuple[DiskSample, ...]] | None = None

    async def start(self) -> None:
        self._started = True
        self._follow()

    async def stop(self) -> None:
        self._started = False
        for place in self._places.values():
            await place.stop()

    def refresh(self) -> None:
        """Read all again now."""
        for place in self._places.values():
            place.wake()

    def _follow(self) -> None:
        """Follow new paths: parts become known with the first save, so this runs rarely. A role that is gone is still
        read: it costs nothing."""
        now = self._clock.monotonic()
        if now - self._followed_at < self._poll:
            return
        self._followed_at = now
        for role, path in self._wanted().items():
            place = self._places.get(role)
            if place is None:
                place = self._places[role] = DiskSensor(path, self._clock, poll=self._poll, role=role)
                place.begin()
            place.path = path

    def latest(self) -> Reading[tuple[DiskSample, ...]]:
        if not self._started:
            return unobserved(SensorState.PENDING, self._clock.monotonic(), "not observed yet")
        self._follow()
        readings = {role: place.latest() for role, place in self._places.items()}
        if self._latest is not None and readings == self._taken:
            return self._latest
        self._taken = readings
        self._latest = self._together(readings)
        return self._latest

    def _together(self, readings: Mapping[str, Reading[DiskSample]]) -> Reading[tuple[DiskSample, ...]]:
        seen = tuple(r.value for r in readings.values() if r.ok and r.value is not None)
        silent = [
            f"{role}: {r.detail}" for role, r in readings.items() if r.state in (SensorState.BLIND, SensorState.DENIED)
        ]
        if not seen:
            state = SensorState.BLIND if silent else SensorState.PENDING
            return unobserved(state, self._clock.monotonic(), "; ".join(silent) or "not observed yet")
        return replace(observed(seen, min(r.at for r in readings.values() if r.ok)), detail="; ".join(silent))
