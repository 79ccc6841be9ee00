"""Rescans of the checkpoint directories, and the events about what they find."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from podwatch.checkpoints.file_events import Watcher
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.scan import linked_steps
from podwatch.domain.checkpoint import CheckpointSet, Completeness, newest_complete
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Severity, counted
from podwatch.journal import AsyncJournal, Journal
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock

if TYPE_CHECKING:
    from podwatch.app.held_back_findings import TwoWriters
    from podwatch.app.replaced_directories import RootWatch

RESCAN_DEADLINE = 120.0
"""Seconds. A rescan of 1,000 unchanged checkpoints takes 0.05 s; the deadline is for a hung network volume."""
ANNOUNCED = "checkpoints.announced"
"""Journal key: {step: save_id} of the checkpoints whose completion was reported; "" where damage was reported."""
KEPT = 1000
"""Entries kept, of the highest steps. Of the others a new podwatch reports only what changes."""
DAMAGE = ""


class Announced:
    """The checkpoints that this or an earlier podwatch reported."""

    def __init__(self, journal: AsyncJournal | None = None) -> None:
        """Blocks on the journal."""
        kept = {} if journal is None else journal.sync.learned(ANNOUNCED)
        known = kept.items() if isinstance(kept, dict) else ()
        self._known = {int(step): str(save_id) for step, save_id in known if str(step).isdecimal()}
        self._journal, self._dirty = journal, False

    def __contains__(self, step: int) -> bool:
        """Whether this step was reported, complete or damaged."""
        return step in self._known

    def learn(self, found: CheckpointSet) -> bool:
        """Record ``found``, complete or damaged; returns whether it is new."""
        what = found.save_id if found.complete else DAMAGE
        new = self._known.get(found.step) != what
        if new:
            self._known[found.step], self._dirty = what, True
        return new

    def complete(self, step: int) -> bool:
        """Whether the checkpoint of this step was reported complete, and not damaged since."""
        return self._known.get(step, DAMAGE) != DAMAGE

    def forget(self, step: int) -> None:
        """The checkpoint was removed: the same one is new if it returns."""
        if self._known.pop(step, None) is not None:
            self._dirty = True

    def save(self) -> None:
        """Write the changes to the journal, without waiting."""
        if self._dirty and self._journal is not None:
            kept = {str(step): self._known[step] for step in sorted(self._known)[-KEPT:]}
            self._journal.post(Journal.learn, ANNOUNCED, kept)
        self._dirty = False


class Rescans:
    """Finds the checkpoints of this pod again, at an interval and when woken; file events are only hints.

    ``blind`` is the reason while the filesystem does not respond: nothing is pruned or chosen then. ``named`` are the
    steps that are never removed, because a file of the trainer (a tracker, the best model) names them, with that file.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        worker: Worker,
        clock: Clock,
        emit: Emit,
        announced: Announced,
        *,
        seconds: float,
        checks: "Sequence[RootWatch | TwoWriters]" = (),
        warn: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """``checks`` are made before each rescan, in its worker; ``warn`` gets what the file events have to report."""
        self._catalogue, self._worker, self._clock, self._seconds = catalogue, worker, clock, seconds
        self._emit, self._announced, self._checks = emit, announced, checks
        self.watcher = Watcher(catalogue.watch_dirs, self._wake_from_thread, warn=warn)
        self.blind = "the checkpoint directories have not been read yet"
        self.named: Mapping[int, str] = {}
        self._wanted = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._known: dict[int, CheckpointSet] | None = None
        self._unjudged: set[int] = set()
        """Steps that the first rescan found and that are not judged yet: a later one does that, after the settle
        time."""
        self._began = 0.0

    def wake(self) -> None:
        """Rescan soon. On the event loop."""
        self._wanted.set()

    def _wake_from_thread(self) -> None:
        """The same from any thread; does nothing before the first rescan, or once the loop is closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wanted.set)

    async def rescan(self, *, writers_ended: bool = False) -> tuple[CheckpointSet, ...]:
        """Rescan now and return the checkpoints; the last known ones if the filesystem does not respond.
        ``writers_ended``: as for ``Catalogue.rescan``."""
        self._loop = asyncio.get_running_loop()
        try:
            read = partial(self._read, writers_ended=writers_ended)
            sets, self.named = await self._worker.call(read, timeout=RESCAN_DEADLINE)
        except (TimeoutError, OSError) as error:
            self.blind = f"cannot read the checkpoint directories: {error}"
            return self._catalogue.sets
        self.blind = ""
        self._report(sets)
        return sets

    async def until_due(self) -> None:
        """Returns when the next rescan is due: soon after a file event, and sooner while something is written."""
        pause = self._seconds
        if any(s.completeness is Completeness.WRITING for s in self._catalogue.sets):
            pause = min(pause, max(0.5, pause / 4))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._wanted.wait()
        if self._wanted.is_set():
            await self._clock.sleep(min(0.5, self._seconds / 4))  # collect the events that follow the first one
        self._wanted.clear()

    def _read(self, *, writers_ended: bool) -> tuple[tuple[CheckpointSet, ...], Mapping[int, str]]:
        """Blocks."""
        for check in self._checks:
            check.check()
        sets = self._catalogue.rescan(writers_ended=writers_ended)
        self.watcher.refresh()
        layout = self._catalogue.layout
        return sets, {**linked_steps(layout), **layout.pinned()}

    def _report(self, sets: tuple[CheckpointSet, ...]) -> None:
        """Report each checkpoint once, also over restarts. Of those that the first rescan finds, only the newest and
        what changes from then on is reported: the others were saved while no podwatch ran."""
        now = {s.step: s for s in sets}
        before, self._known = self._known, now
        wall, announced = self._clock.wall(), self._announced
        first, newest = before is None, newest_complete(sets)
        if first:
            self._unjudged, self._began = set(now), wall
        for step, found in now.items():
            if found.complete:
                old = step in self._unjudged and found.changed_wall < self._began
                if announced.learn(found) and (not old or found is newest):
                    self._emit(_complete(found, wall, "found" if old else "is complete"))
                self._unjudged.discard(step)
            elif found.completeness is Completeness.DAMAGED:
                seen_before = step in announced
                if announced.learn(found) and (not first or seen_before):
                    text = f"the checkpoint of step {step} is damaged: {found.reason}"
                    self._emit(Event(EventName.CHECKPOINT_DAMAGED, wall, text, Severity.WARNING, {"step": step}))
                self._unjudged.discard(step)
        removed = {step: found.complete for step, found in (before or {}).items() if step not in now}
        removed |= {step: announced.complete(step) for step, found in now.items() if found.remainder}
        for step, was_complete in removed.items():
            announced.forget(step)
            self._unjudged.discard(step)
            if was_complete:
                text = f"the checkpoint of step {step} is gone from this pod"
                self._emit(Event(EventName.CHECKPOINT_GONE, wall, text, fields={"step": step}))
        announced.save()


def _complete(found: CheckpointSet, wall: float, word: str) -> Event:
    text = f"checkpoint of step {found.step} {word}: {counted(found.file_count, 'file')}"
    return Event(
        EventName.CHECKPOINT_COMPLETE,
        wall,
        text,
        fields={"step": found.step, "save_id": found.save_id, "size_bytes": found.size_bytes},
    )
