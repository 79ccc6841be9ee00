"""Room and inodes of the filesystem that holds the checkpoints."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.domain.reading import Reading, SensorState, observed, unobserved
from podwatch.domain.snapshot import DiskSample
from podwatch.sensors.polling import Poller
from podwatch.system.clock import Clock

POLL = 10.0
"""Seconds. A 47 GB save takes minutes: ten seconds miss nothing."""
DEADLINE = 10.0
"""Seconds. statvfs on a hung NFS or FUSE mount never returns; a slow network volume may take seconds."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What statvfs said of ``path``, or the error."""

    path: Path
    total: int = 0
    free: int = 0
    inodes: int = 0
    inodes_free: int = 0
    error: OSError | None = None


def look(path: Path) -> _Seen:
    """statvfs of ``path``, or of its nearest parent that exists. Blocks; never raises OSError."""
    while True:
        try:
            figures = os.statvfs(path)
        except (FileNotFoundError, NotADirectoryError):
            if path == path.parent:
                return _Seen(path, error=FileNotFoundError(2, "no such directory", str(path)))
            path = path.parent
        except OSError as error:
            return _Seen(path, error=error)
        else:
            size = figures.f_frsize
            return _Seen(path, figures.f_blocks * size, figures.f_bavail * size, figures.f_files, figures.f_favail)


class DiskSensor:
    """statvfs in a daemon thread with a deadline.

    ``free`` is ``f_bavail``, what an unprivileged writer can still use: the blocks reserved for root are no room for a
    trainer that runs as a user, and ``df`` counts the same way. Without ``capacity_bytes``, used = total - free, so
    that used and free always add up to the capacity that ratios are taken of.

    With ``capacity_bytes`` (an overlay shows the host's disk, or a quota is invisible) the totals of statvfs mean
    nothing, but its ``f_bavail`` is still an upper bound of the room there is. So free = min(f_bavail, capacity -
    known), and used_bytes = capacity - free, where ``known`` is what the caller knows to lie there (the catalogue's
    sum; 0 without ``known_bytes``). The directory is not walked here: a walk over a network volume takes minutes, and
    the catalogue has the sizes anyway. Both terms can only understate use, never overstate it: nothing of ours is
    deleted because a neighbour filled the host's disk beyond our own share.
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
    ) -> None:
        """``known_bytes`` runs on the event loop and must not block."""
        self._path = path
        self._clock = clock
        self._capacity = capacity_bytes
        self._known = known_bytes
        self._poller: Poller[_Seen, DiskSample] = Poller(
            self.name, clock, poll=poll, deadline=deadline, prepare=lambda: self._look, absorb=self._absorb
        )

    async def start(self) -> None:
        self._poller.start()

    async def stop(self) -> None:
        await self._poller.stop()

    def refresh(self) -> None:
        """Look again now, for instance after something was removed."""
        self._poller.wake()

    def latest(self) -> Reading[DiskSample]:
        return self._poller.latest()

    def _look(self) -> _Seen:
        return look(self._path)

    def _absorb(self, seen: _Seen) -> Reading[DiskSample]:
        now = self._clock.monotonic()
        if seen.error is not None:
            state = SensorState.DENIED if isinstance(seen.error, PermissionError) else SensorState.BLIND
            text = f"cannot see the room in {seen.path}: {seen.error.strerror or seen.error}"
            return unobserved(state, now, text)
        if self._capacity is None:
            total, free = seen.total, seen.free
        else:
            known = self._known() if self._known is not None else 0
            total, free = self._capacity, max(0, min(seen.free, self._capacity - known))
        if total <= 0:
            return unobserved(
                SensorState.ABSENT, now, f"{seen.path} tells no size (a virtual file system): set disk.capacity"
            )
        used = total - free
        reading = observed(DiskSample(str(seen.path), total, used, free, seen.inodes, seen.inodes_free), now)
        if seen.path != self._path:
            return replace(reading, detail=f"{self._path} does not exist yet; these are the figures of {seen.path}")
        return reading
