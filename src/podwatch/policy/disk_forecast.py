"""The size and time of the next save, predicted from the saves so far (docs/disk.md).

Checkpoints are deleted from the disk while their sizes and times are still useful, so every complete save is recorded
separately. The next save is expected to be as big as the biggest of the last ones: a milestone with an export, or a
model without its optimizer in between, needs no rule of its own. Only what costs something, to delete a checkpoint that
is not in the store or to stop training, is decided by the usual size: a milestone comes seldom.

``Forecast`` keeps the saves so far over restarts and deletions, and answers for the event loop.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, median_high
from typing import Any

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.document import Document, Many, Real, Text, Whole

SAVES_KEPT = 32
"""Enough for three milestones at every tenth save."""
RECENT_SAVES = 12
"""The expected size is the maximum of this many newest saves; more than ten, so that every tenth save as milestone is
included."""
USUAL_SAVES = 4
"""The usual size is the upper median of this many newest saves: of two kinds in turn it is the bigger, and one
milestone does not change it."""
GAPS = 8
MOST_SAVES = 3
"""podwatch keeps room for at most this many saves: a disk that must hold more is reported as too small."""
REGULAR = 2.0
"""The cadence is trusted if the longest recent gap is at most this many times the shortest. Otherwise the next save can
come at any moment."""
LEAST_GAPS = 3


@dataclass(frozen=True, slots=True)
class Save:
    """One save that was complete. ``bytes``: its largest size seen, including what podwatch deleted of it since.
    ``parts``: (name, bytes) of each part that was not empty."""

    step: Whole
    save_id: Text
    wall: Real
    bytes: Whole
    files: Whole
    parts: tuple[tuple[Text, Whole], ...] = ()


@dataclass(frozen=True, slots=True)
class Saves(Document):
    """The last saves, oldest first by time of writing. What cannot be read is learned again from the checkpoints on
    disk."""

    known: Many[Save] = ()

    def seeing(self, sets: Iterable[CheckpointSet]) -> "Saves":
        """A copy that includes the checkpoints complete now; the same object if nothing is new."""
        known = {(s.step, s.save_id): s for s in self.known}
        whole = sorted((s for s in sets if s.complete and s.size_bytes > 0), key=lambda s: s.changed_wall)
        for found in whole[-SAVES_KEPT:]:
            key = (found.step, found.save_id)
            before = known.get(key)
            known[key] = _save(found) if before is None else _more(before, found)
        now = tuple(sorted(known.values(), key=lambda s: (s.wall, s.step)))[-SAVES_KEPT:]
        return self if now == self.known else Saves(now)


@dataclass(frozen=True, slots=True)
class NextSave:
    """The prediction, without margin. ``bytes`` and ``files``: of one save. ``usual_bytes`` and ``usual_files``: what
    it probably has. ``saves``: how many saves can come before podwatch can delete anything in between.

    ``due_in``: seconds until the next save begins, by its cadence; None: it can begin at any moment. ``soon``: podwatch
    must make the room now.
    """

    bytes: int = 0
    files: int = 0
    saves: int = 1
    due_in: float | None = None
    soon: bool = True
    parts: tuple[tuple[str, int, int], ...] = ()
    """The largest recent and the usual size of each part: parts can be on separate file systems."""
    usual_bytes: int = 0
    usual_files: int = 0

    @property
    def room(self) -> int:
        return self.bytes * self.saves

    @property
    def inodes(self) -> int:
        return self.files * self.saves

    @property
    def usual_room(self) -> int:
        return self.usual_bytes * self.saves

    @property
    def usual_inodes(self) -> int:
        return self.usual_files * self.saves


def sizes(saves: Saves, react: float, bytes_per_second: float) -> NextSave:
    """The part of the prediction that does not depend on the time. ``react``: seconds from the end of a save to room
    for another. ``bytes_per_second``: measured deletion speed, 0 if unknown. Pure."""
    known = saves.known
    if not known:
        return NextSave()
    recent = known[-RECENT_SAVES:]
    gaps = save_gaps(known)
    size = max(s.bytes for s in recent)
    react += _removal(size, bytes_per_second)
    return NextSave(
        bytes=size,
        files=max(s.files for s in recent),
        saves=_at_once(median(gaps) if gaps else None, react),
        parts=_parts(recent),
        usual_bytes=median_high(s.bytes for s in recent[-USUAL_SAVES:]),
        usual_files=median_high(s.files for s in recent[-USUAL_SAVES:]),
    )


def due(
    save: NextSave, saves: Saves, wall: float, lead: float, bytes_per_second: float, save_seconds: float
) -> NextSave:
    """``save`` with the time at which it is due. ``save_seconds``: duration of a save (the cadence is measured between
    ends of saves, and room is needed at the beginning). Pure."""
    seconds = _due_in(saves.known, save_gaps(saves.known), wall, save_seconds)
    soon = seconds is None or seconds <= lead + 2 * _removal(save.bytes, bytes_per_second)
    return replace(save, due_in=seconds, soon=soon)


def _removal(size: int, bytes_per_second: float) -> float:
    return size / bytes_per_second if bytes_per_second > 0 else 0.0


def save_gaps(saves: Sequence[Save]) -> tuple[float, ...]:
    """Seconds from one save to the next, newest last. A lower step is another lineage and is left out."""
    return tuple(b.wall - a.wall for a, b in pairwise(saves) if b.step > a.step and b.wall > a.wall)[-GAPS:]


def save_gap(saves: Saves) -> float | None:
    """Seconds from one save to the next, by the median of the recent gaps."""
    gaps = save_gaps(saves.known)
    return median(gaps) if gaps else None


def _due_in(known: Sequence[Save], gaps: Sequence[float], wall: float, save_seconds: float) -> float | None:
    """Seconds until the next save begins, by the shortest gap; None if the cadence is unknown, irregular or passed."""
    if len(gaps) < LEAST_GAPS or max(gaps) > REGULAR * min(gaps):
        return None
    passed = wall - known[-1].wall
    if passed < 0:  # the wall clock was set back
        return None
    due = min(gaps) - save_seconds - passed
    return due if due > 0 else None


def _at_once(gap: float | None, react: float) -> int:
    """How many saves can come before podwatch has seen the first one and deleted something."""
    if gap is None:
        return 1
    return min(MOST_SAVES, 1 + int(react / gap))


def _parts(saves: Sequence[Save]) -> tuple[tuple[str, int, int], ...]:
    known = [dict(save.parts) for save in saves]
    found = []
    for name in sorted({name for parts in known for name in parts}):
        each = [parts.get(name, 0) for parts in known]
        found.append((name, max(each), median_high(each[-USUAL_SAVES:])))
    return tuple(found)


def _save(found: CheckpointSet) -> Save:
    parts = tuple(sorted((p.name, p.size_bytes) for p in found.parts if p.size_bytes > 0))
    return Save(found.step, found.save_id, found.changed_wall, found.size_bytes, found.file_count, parts)


def _more(before: Save, found: CheckpointSet) -> Save:
    """``before`` with later parts added. Parts deleted since are kept, because the save had to write them."""
    now: Mapping[str, int] = {p.name: p.size_bytes for p in found.parts if p.size_bytes > 0}
    merged = dict(before.parts)
    for name, size in now.items():
        merged[name] = max(merged.get(name, 0), size)
    total = max(before.bytes, found.size_bytes, sum(merged.values()))
    return replace(before, bytes=total, files=max(before.files, found.file_count), parts=tuple(sorted(merged.items())))


SAVES = "disk.saves"
"""Journal key."""
LEAST_REMOVED_BYTES = 1 << 30
"""Removals of fewer bytes are too short to measure the speed."""
ANSWER_SECONDS = 5.0
"""Lifetime of a cached prediction; saves are minutes apart."""

Keep = Callable[[dict[str, Any]], None]
"""Writes what is known to the journal, under ``SAVES``."""


class Forecast:
    """``kept`` is the last value given to ``keep``. For the event loop; nothing blocks."""

    def __init__(self, kept: object = None, *, keep: Keep = lambda _: None) -> None:
        known = kept if isinstance(kept, dict) else {}
        speed = known.get("bytes_per_second")
        self.saves = Saves.kept(known.get("saves")) or Saves()
        self.bytes_per_second = float(speed) if isinstance(speed, int | float) and speed > 0 else 0.0
        self._keep = keep
        self._seen: object = None
        self._told: tuple[float, tuple[Saves, float, float, float, float], NextSave] | None = None

    def see(self, sets: Iterable[CheckpointSet]) -> None:
        """Record the checkpoints of a rescan. Free while the catalogue returns the same object."""
        if sets is self._seen:
            return
        self._seen = sets
        saves = self.saves.seeing(sets)
        if saves is not self.saves:
            self.saves = saves
            self._remember()

    def removed(self, freed_bytes: int, seconds: float) -> None:
        """Record a removal. The speed is the slowest measured one; each faster removal raises it by a tenth."""
        if freed_bytes < LEAST_REMOVED_BYTES or seconds <= 0:
            return
        speed = freed_bytes / seconds
        self.bytes_per_second = min(speed, 1.1 * self.bytes_per_second) if self.bytes_per_second else speed
        self._remember()

    def next_save(self, wall: float, lead: float, react: float, save_seconds: float = 0.0) -> NextSave:
        """The predicted next save, at most ``ANSWER_SECONDS`` old: it is called at every turn."""
        about = (self.saves, react, self.bytes_per_second, lead, save_seconds)
        told = self._told
        if told is not None and told[1] == about and 0 <= wall - told[0] < ANSWER_SECONDS:
            return told[2]
        saves, _, speed, _, _ = about
        known = told[2] if told is not None and told[1][:3] == about[:3] else sizes(saves, react, speed)
        found = due(known, saves, wall, lead, speed, save_seconds)
        self._told = (wall, about, found)
        return found

    def _remember(self) -> None:
        self._keep({"saves": self.saves.to_json(), "bytes_per_second": self.bytes_per_second})
