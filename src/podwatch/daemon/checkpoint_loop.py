"""The checkpoint loop: rescans, reports changes, wakes uploads and starts pruning."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from podwatch.checkpoints.catalogue import Catalogue
from podwatch.domain.checkpoint import CheckpointSet, Completeness, newest_complete
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity, counted
from podwatch.system.clock import Clock
from podwatch.system.workers import Worker

RESCAN_DEADLINE = 120.0
"""Seconds. A rescan of 1,000 unchanged checkpoints takes 0.05 s; the deadline is for a hung network volume."""


ANNOUNCED = "checkpoints.announced"
"""Journal key: {step: save_id} of the checkpoints whose completion was reported; "" where damage was reported."""
KEPT = 1000
"""Entries kept, of the highest steps: 1,000 are 40 kB in the journal, written with each new checkpoint."""
DAMAGE = ""


class Announced:
    """The checkpoints that this or an earlier podwatch reported. ``kept`` is the journal's value; ``keep`` writes it
    and must not block."""

    def __init__(self, kept: object = None, keep: Callable[[dict[str, str]], None] = lambda _known: None) -> None:
        known: dict[Any, Any] = kept if isinstance(kept, dict) else {}
        self._known = {int(k): str(v) for k, v in known.items() if str(k).isdecimal()}
        self._keep, self._dirty = keep, False

    def __contains__(self, step: int) -> bool:
        return step in self._known

    def learn(self, step: int, what: str) -> bool:
        """Record ``what`` (the save_id of a complete checkpoint, or ``DAMAGE``); returns whether it is new."""
        new = self._known.get(step) != what
        if new:
            self._known[step], self._dirty = what, True
        return new

    def forget(self, step: int) -> None:
        if self._known.pop(step, None) is not None:
            self._dirty = True

    def save(self) -> None:
        """Write the changes to the journal."""
        if self._dirty:
            self._dirty = False
            self._known = {step: self._known[step] for step in sorted(self._known)[-KEPT:]}
            self._keep({str(step): what for step, what in self._known.items()})


class Uploads(Protocol):
    def notify(self) -> None: ...


class CheckpointLoop:
    """Rescans every ``rescan`` seconds, sooner when a file event wakes it. Only the rescan counts; events are hints.

    ``blind`` is the reason while the filesystem does not respond: nothing is pruned or chosen then. ``look_first``,
    ``refresh_watches`` and ``named`` run in the worker and can block. ``look_first`` runs before the rescan: it checks
    that the directories are still those of the start, and looks for a second trainer.
    """

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        worker: Worker,
        clock: Clock,
        rescan: float,
        emit: Callable[[Event], None],
        uploads: Uploads | None,
        make_room: Callable[[], None],
        refresh_watches: Callable[[], None],
        named: Callable[[], Mapping[int, str]] = dict,
        look_first: Callable[[], None] = lambda: None,
        announced: Announced | None = None,
    ) -> None:
        self._catalogue, self._worker, self._clock, self._rescan = catalogue, worker, clock, rescan
        self._emit, self._uploads = emit, uploads
        self._make_room, self._refresh_watches = make_room, refresh_watches
        self._named, self._look_first = named, look_first
        self.named: Mapping[int, str] = {}
        """Steps that a file of the trainer refers to (a tracker, the best model), with that file: never removed."""
        self._wake = asyncio.Event()
        self._known: dict[int, CheckpointSet] | None = None
        self._announced = announced or Announced()
        self.blind = "the checkpoint directories have not been read yet"

    def wake(self) -> None:
        """Rescan soon. Call it on the loop."""
        self._wake.set()

    async def look(self) -> tuple[CheckpointSet, ...]:
        """Rescan now and return the checkpoints; the last known ones if the filesystem does not respond."""
        try:
            sets, self.named = await self._worker.call(self._read, timeout=RESCAN_DEADLINE)
        except (TimeoutError, OSError) as error:
            self.blind = f"cannot read the checkpoint directories: {error}"
            return self._catalogue.sets
        self.blind = ""
        self._tell(sets)
        return sets

    def _read(self) -> tuple[tuple[CheckpointSet, ...], Mapping[int, str]]:
        """Blocks."""
        self._look_first()
        sets = self._catalogue.rescan()
        self._refresh_watches()
        return sets, self._named()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            await self.look()
            if self._uploads is not None:
                self._uploads.notify()
            self._make_room()
            pause = self._rescan
            if any(s.completeness is Completeness.WRITING for s in self._catalogue.sets):
                pause = min(pause, max(0.5, self._rescan / 4))
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await self._clock.sleep(min(0.5, self._rescan / 4))  # collect the events that follow the first one

    def _tell(self, sets: tuple[CheckpointSet, ...]) -> None:
        """Report each checkpoint once, also over restarts. Of those that the first rescan finds, only the newest is
        reported: the others were saved while no podwatch ran."""
        now = {s.step: s for s in sets}
        before, self._known = self._known, now
        wall, announced = self._clock.wall(), self._announced
        first, newest = before is None, newest_complete(sets)
        for step, found in now.items():
            if found.complete:
                if announced.learn(step, found.save_id) and (not first or found is newest):
                    self._emit(_complete(found, wall, "found" if first else "is complete"))
            elif found.completeness is Completeness.DAMAGED:
                seen_before = step in announced
                if announced.learn(step, DAMAGE) and (not first or seen_before):
                    text = f"the checkpoint of step {step} is damaged: {found.reason}"
                    self._emit(Event(EventName.CHECKPOINT_DAMAGED, wall, text, Severity.WARNING, {"step": step}))
        for step, gone in (before or {}).items():
            if step not in now:
                announced.forget(step)
                if gone.complete:
                    text = f"the checkpoint of step {step} is gone from this pod"
                    self._emit(Event(EventName.CHECKPOINT_GONE, wall, text, fields={"step": step}))
        announced.save()


def _complete(found: CheckpointSet, wall: float, word: str) -> Event:
    return Event(
        EventName.CHECKPOINT_COMPLETE,
        wall,
        f"checkpoint of step {found.step} {word}: {counted(found.file_count, 'file')}",
        fields={"step": found.step, "save_id": found.save_id, "size_bytes": found.size_bytes},
    )
