"""How big the next save is, when it comes, and how much room it needs (docs/disk.md). Pure.

The records of checkpoints stay when the checkpoints are deleted. The next save is expected to be as big as the biggest
of the last ones: a milestone with an export, or a model without its optimizer in between, needs no rule of its own.
Only what costs something, to delete a checkpoint that is not in the store or to stop training, is decided by the usual
size: a milestone comes seldom.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_high

from podwatch.checkpoints.records import CheckpointRecord

RECENT_SAVES = 12
"""The expected size is the maximum of this many newest saves; more than ten, so that every tenth save as milestone is
included."""
USUAL_SAVES = 4
"""The usual size is the upper median of this many newest saves: of two kinds in turn it is the bigger, and one
milestone does not change it."""
GAPS = 8
LEAST_GAPS = 3
REGULAR = 2.0
"""The cadence is trusted if the longest recent gap is at most this many times the shortest. Otherwise the next save can
come at any moment."""
LEAD_SECONDS = 300.0
"""A save that is due so soon is near: five minutes are many rescans, and enough to delete what has to go."""


@dataclass(frozen=True, slots=True)
class NextSave:
    """The prediction, without margin. ``usual_bytes`` and ``usual_files``: what it probably has. ``due_in``: seconds
    until it begins, by the cadence; None: it can begin at any moment."""

    bytes: int = 0
    files: int = 0
    usual_bytes: int = 0
    usual_files: int = 0
    due_in: float | None = None

    @property
    def near(self) -> bool:
        return self.due_in is None or self.due_in <= LEAD_SECONDS


def predict(
    saves: Sequence[CheckpointRecord], wall: float, save_seconds: float = 0.0, elsewhere: Collection[str] = ()
) -> NextSave:
    """The next save by the records of those before it, oldest first. ``wall``: now, epoch seconds. ``save_seconds``:
    how long a save takes. ``elsewhere``: parts on other file systems; files are then not counted."""
    recent = saves[-RECENT_SAVES:]
    if not recent:
        return NextSave()
    sizes = [sum(size for part, size in s.parts.items() if part not in elsewhere) for s in recent]
    files = [0 if elsewhere else s.file_count for s in recent]
    return NextSave(
        bytes=max(sizes),
        files=max(files),
        usual_bytes=median_high(sizes[-USUAL_SAVES:]),
        usual_files=median_high(files[-USUAL_SAVES:]),
        due_in=_due_in(saves, wall, save_seconds),
    )


def median_gap(saves: Sequence[CheckpointRecord]) -> float | None:
    """Seconds from one save to the next, by the median of the recent gaps."""
    gaps = _gaps(saves)
    return median(gaps) if gaps else None


def _gaps(saves: Sequence[CheckpointRecord]) -> tuple[float, ...]:
    """Seconds from one save to the next, newest last. A lower step is another lineage and is left out."""
    return tuple(b.wall - a.wall for a, b in pairwise(saves) if b.step > a.step and b.wall > a.wall)[-GAPS:]


def _due_in(saves: Sequence[CheckpointRecord], wall: float, save_seconds: float) -> float | None:
    """By the shortest gap; None if the cadence is unknown, irregular or passed. Gaps lie between the ends of saves, and
    room is needed at the beginning."""
    gaps, passed = _gaps(saves), wall - saves[-1].wall
    if len(gaps) < LEAST_GAPS or max(gaps) > REGULAR * min(gaps) or passed < 0:  # the clock was set back
        return None
    due = min(gaps) - save_seconds - passed
    return due if due > 0 else None
