"""Notices the end of the run's own processes at once: a descriptor of each (pidfd) becomes readable, which costs an
idle daemon nothing. Also reports the exit status where the kernel provides it (Linux 6.15) or the keeper reaped the
process."""

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import ProcessEnd
from podwatch.system.clock import Clock
from podwatch.system.procfs import exit_of, open_pidfd

FOLLOWED = 64
"""Maximum number of descriptors: engine workers, servers, orchestrator and trainer ranks of one machine."""
KEPT = 16
STATUS_SECONDS = 10.0
"""Seconds after an end during which the exit status is requested: the parent can take a moment to reap the process."""
_DEAD = frozenset("ZXx")


@dataclass(slots=True)
class _Followed:
    role: ProcessRole
    fd: int | None
    gone_at: float | None = None


class Told(Protocol):
    def on_end(self, role: ProcessRole) -> None:
        """A followed process of this role has ended. Must not block."""
        ...


class Ends:
    """Belongs to the event loop; never blocks. ``told`` hears of the end of a followed process at once, where the
    kernel reports it (Linux 5.3)."""

    def __init__(self, clock: Clock, told: Told) -> None:
        self._clock, self._told = clock, told
        self._followed: dict[ProcessIdentity, _Followed] = {}
        self._known: deque[ProcessEnd] = deque(maxlen=KEPT)

    @property
    def known(self) -> tuple[ProcessEnd, ...]:
        """The newest ends whose exit status is known, oldest first."""
        return tuple(self._known)

    def look(self, tree: Iterable[ProcessSample], ended: Mapping[tuple[int, int], ExitStatus]) -> None:
        """Process one reading of the tree. ``ended`` has the exit status of processes that the keeper reaped, by (pid,
        ticks)."""
        now = self._clock.monotonic()
        living = set()
        for sample in tree:
            if sample.role is ProcessRole.OTHER or sample.state in _DEAD:
                continue
            living.add(sample.identity)
            if sample.identity not in self._followed and len(self._followed) < FOLLOWED:
                self._follow(sample)
        for identity, found in list(self._followed.items()):
            if identity in living:
                continue
            if found.gone_at is None:
                found.gone_at = now
            status = self._status(identity, found, ended)
            if status is not None:
                self._known.append(ProcessEnd(identity, found.role, status, found.gone_at))
            if status is not None or now - found.gone_at > STATUS_SECONDS:
                self._leave(identity)

    def clear(self) -> None:
        """Forget everything, at another start or when there is none."""
        for identity in list(self._followed):
            self._leave(identity)
        self._known.clear()

    def _follow(self, sample: ProcessSample) -> None:
        fd = open_pidfd(sample.identity)
        self._followed[sample.identity] = _Followed(sample.role, fd)
        if fd is not None:
            asyncio.get_running_loop().add_reader(fd, self._ended, sample.identity)

    def _ended(self, identity: ProcessIdentity) -> None:
        found = self._followed.get(identity)
        if found is None or found.fd is None or found.gone_at is not None:
            return
        asyncio.get_running_loop().remove_reader(found.fd)  # it stays readable forever
        found.gone_at = self._clock.monotonic()
        self._told.on_end(found.role)

    def _status(
        self, identity: ProcessIdentity, found: _Followed, ended: Mapping[tuple[int, int], ExitStatus]
    ) -> ExitStatus | None:
        if (reaped := ended.get((identity.pid, identity.start_ticks))) is not None:
            return reaped
        how = exit_of(found.fd) if found.fd is not None else None
        return ExitStatus(how[0], how[1], self._clock.wall()) if how is not None else None

    def _leave(self, identity: ProcessIdentity) -> None:
        found = self._followed.pop(identity)
        if found.fd is not None:
            asyncio.get_running_loop().remove_reader(found.fd)
            os.close(found.fd)
