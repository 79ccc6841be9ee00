"""The checkpoint loop: rescans, reports changes, wakes uploads and starts pruning."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from podwatch.app.held_back_findings import TwoWriters
from podwatch.app.replaced_directories import RootWatch
from podwatch.checkpoints.file_events import Watcher
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.scan import linked_steps
from podwatch.disk.prune import Pruner
from podwatch.domain.checkpoint import CheckpointSet, Completeness, newest_complete
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Severity, counted
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock

if TYPE_CHECKING:
    from podwatch.app.backup.backup import Backup

RESCAN_DEADLINE = 120.0
"""Seconds. A rescan of 1,000 unchanged checkpoints takes 0.05 s; the deadline is for a hung network volume."""


ANNOUNCED = "checkpoints.announced"
"""Journal key: {step: save_id} of the checkpoints whose completion was reported; "" where damage was reported.
``floor`` stands for those that are not listed: {"step": n, "wall": epoch seconds}."""
KEPT = 1000
"""Entries kept, of the highest steps: 1,000 are 40 kB in the journal, written with each new checkpoint."""
FLOOR = "floor"
DAMAGE = ""


class Announced:
    """The checkpoints that this or an earlier podwatch reported. ``kept`` is the journal's value; ``keep`` writes it
    and must not block.

    The journal lists the highest steps. Of those at or below the floor, everything was reported that had not changed
    since the floor's time: a step that training saves again, after it went back, is new."""

    def __init__(self, kept: object = None, keep: Callable[[dict[str, object]], None] = lambda _known: None) -> None:
        known: dict[Any, Any] = kept if isinstance(kept, dict) else {}
        self._known = {int(k): str(v) for k, v in known.items() if str(k).isdecimal()}
        self._keep, self._dirty = keep, False
        self._floor = _floor_of(known.get(FLOOR))
        if FLOOR not in known and len(self._known) >= KEPT:  # of a version that left out the lower steps
            self._floor = (min(self._known), math.inf)
        self._gone: set[int] = set()

    def before(self, found: CheckpointSet) -> bool:
        """Whether this step was reported, complete or damaged."""
        return found.step in self._known or self._below_floor(found)

    def learn(self, found: CheckpointSet) -> bool:
        """Record ``found``, complete or damaged; returns whether it is new."""
        what = found.save_id if found.complete else DAMAGE
        if found.step not in self._known and what != DAMAGE and self._below_floor(found):
            self._known[found.step] = what
            return False
        new = self._known.get(found.step) != what
        if new:
            self._known[found.step], self._dirty = what, True
        return new

    def complete(self, step: int) -> bool:
        """Whether the checkpoint of this step was reported complete, and not damaged since."""
        return self._known.get(step, DAMAGE) != DAMAGE

    def forget(self, step: int) -> None:
        """The checkpoint is gone: the same one is new if it returns."""
        self._gone.add(step)
        if self._known.pop(step, None) is not None:
            self._dirty = True

    def save(self, wall: float) -> None:
        """Write the changes to the journal. ``wall``: now, epoch seconds."""
        if not self._dirty:
            return
        self._dirty = False
        # Damage first: what the floor stands for was complete.
        ordered = sorted(self._known, key=lambda step: (self._known[step] == DAMAGE, step))
        dropped, listed = ordered[:-KEPT], ordered[-KEPT:]
        if dropped:
            self._floor = (max(self._floor[0], *dropped), wall)
        kept: dict[str, object] = {str(step): self._known[step] for step in listed}
        if self._floor[0] >= 0:
            kept[FLOOR] = {"step": self._floor[0], "wall": min(self._floor[1], wall)}
        self._keep(kept)

    def _below_floor(self, found: CheckpointSet) -> bool:
        step, wall = self._floor
        return found.step <= step and found.changed_wall <= wall and found.step not in self._gone


def _floor_of(kept: object) -> tuple[int, float]:
    """Step and time of the floor; below every step where there is none, or where it cannot be read."""
    match kept:
        case {"step": int(step), "wall": int() | float() as wall}:
            return step, float(wall)
        case _:
            return -1, 0.0


class Rescans:
    """How often the checkpoint loop rescans, requests to do it sooner, and what the last rescan found. Construct it on
    the event loop.

    ``blind`` is the reason while the filesystem does not respond: nothing is pruned or chosen then. ``named`` are the
    steps that are never removed, because a file of the trainer (a tracker, the best model) names them, with that file.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.blind = "the checkpoint directories have not been read yet"
        self.named: Mapping[int, str] = {}
        self._loop = asyncio.get_running_loop()
        self._wanted = asyncio.Event()

    def wake(self) -> None:
        """Rescan soon. On the event loop."""
        self._wanted.set()

    def wake_from_thread(self) -> None:
        """The same from any thread; does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wanted.set)

    def clear(self) -> None:
        self._wanted.clear()

    async def wait(self, seconds: float) -> bool:
        """Whether a request came within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        except TimeoutError:
            return False
        return True


class CheckpointLoop:
    """Rescans at the interval of ``rescans``, sooner when woken. Only the rescan counts; file events are hints."""

    def __init__(
        self,
        catalogue: Catalogue,
        worker: Worker,
        clock: Clock,
        rescans: Rescans,
        emit: Emit,
        announced: Announced,
        *,
        watcher: Watcher,
        checks: Sequence[RootWatch | TwoWriters] = (),
        uploads: "Backup | None" = None,
        pruner: Pruner,
    ) -> None:
        """``checks`` are made before each rescan, in its worker; ``watcher`` watches new directories after it."""
        self._catalogue, self._worker, self._clock, self._rescans = catalogue, worker, clock, rescans
        self._emit, self._announced, self._watcher, self._checks = emit, announced, watcher, checks
        self._uploads, self._pruner = uploads, pruner
        self._known: dict[int, CheckpointSet] | None = None
        self._there: set[int] = set()
        """Steps that the first rescan found and that are not judged yet: a later one does that, after the settle
        time."""
        self._began = 0.0

    async def look(self, *, writers_ended: bool = False) -> tuple[CheckpointSet, ...]:
        """Rescan now and return the checkpoints; the last known ones if the filesystem does not respond.
        ``writers_ended``: as for ``Catalogue.rescan``."""
        try:
            read = partial(self._read, writers_ended=writers_ended)
            sets, self._rescans.named = await self._worker.call(read, timeout=RESCAN_DEADLINE)
        except (TimeoutError, OSError) as error:
            self._rescans.blind = f"cannot read the checkpoint directories: {error}"
            return self._catalogue.sets
        self._rescans.blind = ""
        self._tell(sets)
        return sets

    def _read(self, *, writers_ended: bool) -> tuple[tuple[CheckpointSet, ...], Mapping[int, str]]:
        """Blocks."""
        for check in self._checks:
            check.look()
        sets = self._catalogue.rescan(writers_ended=writers_ended)
        self._watcher.refresh()
        layout = self._catalogue.layout
        return sets, {**linked_steps(layout), **layout.pinned()}

    async def run(self) -> None:
        """Until cancelled."""
        interval = self._rescans.seconds
        while True:
            self._rescans.clear()
            await self.look()
            if self._uploads is not None:
                self._uploads.notify()
            self._pruner.start_if_due()
            pause = interval
            if any(s.completeness is Completeness.WRITING for s in self._catalogue.sets):
                pause = min(pause, max(0.5, interval / 4))
            if await self._rescans.wait(pause):
                await self._clock.sleep(min(0.5, interval / 4))  # collect the events that follow the first one

    def _tell(self, sets: tuple[CheckpointSet, ...]) -> None:
        """Report each checkpoint once, also over restarts. Of those that the first rescan finds, only the newest and
        what changes from then on is reported: the others were saved while no podwatch ran."""
        now = {s.step: s for s in sets}
        before, self._known = self._known, now
        wall, announced = self._clock.wall(), self._announced
        first, newest = before is None, newest_complete(sets)
        if first:
            self._there, self._began = set(now), wall
        for step, found in now.items():
            if found.complete:
                old = step in self._there and found.changed_wall < self._began
                if announced.learn(found) and (not old or found is newest):
                    self._emit(_complete(found, wall, "found" if old else "is complete"))
                self._there.discard(step)
            elif found.completeness is Completeness.DAMAGED:
                seen_before = announced.before(found)
                if announced.learn(found) and (not first or seen_before):
                    text = f"the checkpoint of step {step} is damaged: {found.reason}"
                    self._emit(Event(EventName.CHECKPOINT_DAMAGED, wall, text, Severity.WARNING, {"step": step}))
                self._there.discard(step)
        gone = {step: found.complete for step, found in (before or {}).items() if step not in now}
        gone |= {step: announced.complete(step) for step, found in now.items() if found.remainder}
        for step, was_complete in gone.items():
            announced.forget(step)
            self._there.discard(step)
            if was_complete:
                text = f"the checkpoint of step {step} is gone from this pod"
                self._emit(Event(EventName.CHECKPOINT_GONE, wall, text, fields={"step": step}))
        announced.save(wall)


def _complete(found: CheckpointSet, wall: float, word: str) -> Event:
    return Event(
        EventName.CHECKPOINT_COMPLETE,
        wall,
        f"checkpoint of step {found.step} {word}: {counted(found.file_count, 'file')}",
        fields={
            "step": found.step,
            "save_id": found.save_id,
            "size_bytes": found.size_bytes,
        },
    )
