"""The size and time of the next save, predicted from the saves so far (docs/disk.md).

Checkpoints are deleted from the disk while their sizes and times are still useful: their records stay. The next save is
expected to be as big as the biggest of the last ones: a milestone with an export, or a model without its optimizer in
between, needs no rule of its own. Only what costs something, to delete a checkpoint that is not in the store or to stop
training, is decided by the usual size: a milestone comes seldom.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, median_high
from typing import Protocol

RECENT_SAVES = 12
"""The expected size is the maximum of this many newest saves; more than ten, so that every tenth save as milestone is
included."""
USUAL_SAVES = 4
"""The usual size is the upper median of this many newest saves: of two kinds in turn it is the bigger, and one
milestone does not change it."""
GAPS = 8
SAVES_COMPARED = 32
MOST_SAVES = 3
"""podwatch keeps room for at most this many saves: a disk that must hold more is reported as too small."""
REGULAR = 2.0
"""The cadence is trusted if the longest recent gap is at most this many times the shortest. Otherwise the next save can
come at any moment."""
LEAST_GAPS = 3


class Save(Protocol):
    """What this module needs of the record of a save. ``bytes``: its largest size seen, including what podwatch deleted
    of it since; ``parts``: of each part."""

    @property
    def step(self) -> int: ...
    @property
    def wall(self) -> float: ...
    @property
    def bytes(self) -> int: ...
    @property
    def file_count(self) -> int: ...
    @property
    def parts(self) -> Mapping[str, int]: ...


class Records(Protocol):
    """The records of a run's saves."""

    @property
    def all(self) -> Sequence[Save]:
        """Oldest first; another object when anything changed."""
        ...


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


def sizes(saves: Sequence[Save], react: float, bytes_per_second: float) -> NextSave:
    """The part of the prediction that does not depend on the time. ``react``: seconds from the end of a save to room
    for another. ``bytes_per_second``: measured deletion speed, 0 if unknown. Pure."""
    recent = saves[-RECENT_SAVES:]
    if not recent:
        return NextSave()
    gaps = save_gaps(saves)
    size = max(s.bytes for s in recent)
    react += _removal(size, bytes_per_second)
    return NextSave(
        bytes=size,
        files=max(s.file_count for s in recent),
        saves=_at_once(median(gaps) if gaps else None, react),
        parts=_parts(recent),
        usual_bytes=median_high(s.bytes for s in recent[-USUAL_SAVES:]),
        usual_files=median_high(s.file_count for s in recent[-USUAL_SAVES:]),
    )


def due(
    save: NextSave, saves: Sequence[Save], wall: float, lead: float, bytes_per_second: float, save_seconds: float
) -> NextSave:
    """``save`` with the time at which it is due. ``save_seconds``: duration of a save (the cadence is measured between
    ends of saves, and room is needed at the beginning). Pure."""
    seconds = _due_in(saves, save_gaps(saves), wall, save_seconds)
    soon = seconds is None or seconds <= lead + 2 * _removal(save.bytes, bytes_per_second)
    return replace(save, due_in=seconds, soon=soon)


def _removal(size: int, bytes_per_second: float) -> float:
    return size / bytes_per_second if bytes_per_second > 0 else 0.0


def save_gaps(saves: Sequence[Save]) -> tuple[float, ...]:
    """Seconds from one save to the next, newest last. A lower step is another lineage and is left out."""
    known = pairwise(saves[-SAVES_COMPARED:])
    return tuple(b.wall - a.wall for a, b in known if b.step > a.step and b.wall > a.wall)[-GAPS:]


def save_gap(saves: Sequence[Save]) -> float | None:
    """Seconds from one save to the next, by the median of the recent gaps."""
    gaps = save_gaps(saves)
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
    known = [save.parts for save in saves]
    found = []
    for name in sorted({name for parts in known for name in parts}):
        each = [parts.get(name, 0) for parts in known]
        found.append((name, max(each), median_high(each[-USUAL_SAVES:])))
    return tuple(found)


SPEED = "disk.removal-speed"
"""Journal key: bytes per second."""
LEAST_REMOVED_BYTES = 1 << 30
"""Removals of fewer bytes are too short to measure the speed."""
ANSWER_SECONDS = 5.0
"""Lifetime of a cached prediction; saves are minutes apart."""


class Forecast:
    """``speed`` is the last value given to ``keep``. For the event loop; nothing blocks."""

    def __init__(
        self, records: Records, speed: object = None, *, keep: Callable[[float], None] = lambda _: None
    ) -> None:
        self._records, self._keep = records, keep
        self.bytes_per_second = float(speed) if isinstance(speed, int | float) and speed > 0 else 0.0
        self._told: tuple[float, tuple[Sequence[Save], float, float, float, float], NextSave] | None = None

    @property
    def saves(self) -> Sequence[Save]:
        return self._records.all

    def removed(self, freed_bytes: int, seconds: float) -> None:
        """Record a removal. The speed is the slowest measured one; each faster removal raises it by a tenth."""
        if freed_bytes < LEAST_REMOVED_BYTES or seconds <= 0:
            return
        speed = freed_bytes / seconds
        self.bytes_per_second = min(speed, 1.1 * self.bytes_per_second) if self.bytes_per_second else speed
        self._keep(self.bytes_per_second)

    def next_save(self, wall: float, lead: float, react: float, save_seconds: float = 0.0) -> NextSave:
        """The predicted next save, at most ``ANSWER_SECONDS`` old: it is called at every turn."""
        about = (self.saves, react, self.bytes_per_second, lead, save_seconds)
        told = self._told
        same = told is not None and told[1][0] is about[0]
        if told is not None and same and told[1][1:] == about[1:] and 0 <= wall - told[0] < ANSWER_SECONDS:
            return told[2]
        saves, _, speed, _, _ = about
        known = told[2] if told is not None and same and told[1][1:3] == about[1:3] else sizes(saves, react, speed)
        found = due(known, saves, wall, lead, speed, save_seconds)
        self._told = (wall, about, found)
        return found
