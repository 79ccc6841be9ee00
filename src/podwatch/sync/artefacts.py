"""Keeps configuration, ends of logs and incident bundles in the store, for when the pod itself is gone.

A round runs on a cadence, soon after an incident, and at the end, never on the event loop. Store trouble is only
remarked here (the upload of checkpoints reports it), and the next round tries again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from podwatch.domain.errors import PodwatchError, RemoteError
from podwatch.domain.remote import Keys
from podwatch.judgement.archive import stale_artefacts
from podwatch.sensors.logs import Sources
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.sync import artefacts_read as reading
from podwatch.sync.artefacts_read import Artefact
from podwatch.system.threads import Worker

KEEP = {"config": 50, "logs": 24, "incidents": 60}
"""How many of the newest objects of each kind stay: three pods' logs, two pods' bundles. At most 24 logs and 60 bundles
of a few hundred kB cost cents a month."""
KEEP_SECONDS = 90 * 86400.0
SWEEP_SECONDS = 86400.0
ROUND_SECONDS = 300.0
"""A round that takes longer is abandoned: its thread hangs on a disk or a network."""
LAST_SECONDS = 3.0
"""How long podwatch waits for the last round when it stops."""
SETTLE_SECONDS = 20.0
"""Delay after an incident: by then the bundle is written and the stopped trainer has written its last lines."""


@dataclass(frozen=True, slots=True)
class ArtefactSources:
    """``configs``: paths of the files that the last start's command named. ``secrets``: values that must not appear;
    raises where they cannot be known, and then nothing is sent."""

    logs: Callable[[], Sources]
    configs: Callable[[], tuple[str, ...]]
    incidents: Path
    secrets: Callable[[], frozenset[str]]
    host: str
    log_bytes: int


@dataclass(slots=True)
class _Store:
    """An open store with its contents: object name -> object, and the digests of what was sent."""

    store: ObjectStore
    there: dict[str, StoredObject] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Removed by a sweep: not sent again, although this pod still has it."""
    swept: float | None = None
    keeps: bool = False
    """The key cannot delete: a replaced object stays in the store, and is paid for."""


class Artefacts:
    """Loop-side object. ``may_write`` is false where another pod owns the run; ``may_delete`` where deletions are only
    reported. ``tell`` is called once when trouble begins."""

    def __init__(
        self,
        open_store: Callable[[], ObjectStore],
        keys: Keys,
        sources: ArtefactSources,
        wall: Callable[[], float],
        *,
        may_write: Callable[[], bool] = lambda: True,
        may_delete: Callable[[], bool] = lambda: True,
        tell: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self._open, self._keys, self._sources, self._wall = open_store, keys, sources, wall
        self._may_write, self._may_delete, self._tell = may_write, may_delete, tell
        self._worker = Worker("artefacts")
        self._logs = reading.LogEnds(sources.log_bytes)
        self._opened: _Store | None = None
        self._soon: asyncio.Task[None] | None = None
        self.problem = ""
        """Why the last round did not send everything; empty if it did."""
        self.rounds = 0

    async def store(self, *, urgent: bool = False, within: float = ROUND_SECONDS) -> None:
        """One round. Raises only CancelledError. ``urgent``: also send what would otherwise wait."""
        if not self._may_write():
            return
        before, self.problem = self.problem, ""
        try:
            await self._worker.call(self._round, urgent, timeout=within)
        except PodwatchError as error:
            self.problem = str(error)
        except Exception as error:  # sending evidence must never stop the guard
            self.problem = f"{type(error).__name__}: {error}"[:500]
        if self.problem:
            self._forget()
        if self.problem and not before:
            self._tell(self.problem)
        self.rounds += 1

    def soon(self, after: float = SETTLE_SECONDS) -> None:
        """Schedule a round shortly after an event. Several calls make one round."""
        if self._soon is None or self._soon.done():
            self._soon = asyncio.create_task(self._shortly(after), name="artefacts soon")

    async def _shortly(self, after: float) -> None:
        await asyncio.sleep(after)
        await self.store(urgent=True)

    async def stop(self, *, last: bool) -> None:
        """``last``: run a last round first, for at most a few seconds."""
        if self._soon is not None:
            self._soon.cancel()
        if last:
            await self.store(urgent=True, within=LAST_SECONDS)
        self._worker.close()
        self._forget()

    def _forget(self) -> None:
        """The next round opens the store again and reads the credentials again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.store.close()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _round(self, urgent: bool) -> None:
        sources = self._sources
        secrets = sources.secrets()
        clean = reading.scrubber(secrets)
        opened = self._opened or self._look()
        found = reading.configs(sources.configs(), clean)
        incidents, since = self._keys.artefacts("incidents"), self._wall() - KEEP_SECONDS
        found += reading.bundles(sources.incidents, lambda name: f"{incidents}{name}" in opened.there, since, clean)
        if urgent or not opened.keeps:
            found += self._logs.read(sources.logs(), sources.host, secrets)
        for artefact in found:
            self._put(opened, artefact)
        if opened.swept is None or self._wall() - opened.swept >= SWEEP_SECONDS:
            self._sweep(opened)

    def _look(self) -> _Store:
        opened = _Store(self._open())
        try:
            for kind in KEEP:
                opened.there |= {o.key: o for o in opened.store.list(self._keys.artefacts(kind)) if o.ours}
        except BaseException:
            opened.store.close()
            raise
        self._opened = opened
        return opened

    def _put(self, opened: _Store, artefact: Artefact) -> None:
        key = f"{self._keys.artefacts(artefact.kind)}{artefact.name}"
        before = opened.there.get(key)
        if (artefact.fixed and before is not None) or opened.sent.get(key) == artefact.digest or key in opened.gone:
            return
        opened.there[key] = opened.store.put_bytes(key, artefact.data)
        opened.sent[key] = artefact.digest
        if before is not None and opened.store.versioned:
            self._delete(opened, before)

    def _delete(self, opened: _Store, old: StoredObject) -> bool:
        """Whether the object is gone."""
        if opened.keeps or not self._may_delete():
            return False
        try:
            opened.store.delete(old)
        except RemoteError as error:
            if error.transient:
                raise
            opened.keeps = True
        return not opened.keeps

    def _sweep(self, opened: _Store) -> None:
        kinds: dict[str, list[tuple[str, float]]] = {}
        for kind in KEEP:
            found = {o.key: o for o in opened.store.list(self._keys.artefacts(kind)) if o.ours}
            opened.there |= found
            kinds[kind] = [(o.key, o.uploaded_wall) for o in found.values()]
        for key in stale_artefacts(kinds, self._wall(), most=KEEP, seconds=KEEP_SECONDS):
            if self._delete(opened, opened.there[key]):
                del opened.there[key]
                opened.gone.add(key)
        opened.swept = self._wall()
