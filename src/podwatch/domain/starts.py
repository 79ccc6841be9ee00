"""Starts of the trainer: which of them wrote a checkpoint, and which checkpoints are on the current line. Pure.

Each start resumed a checkpoint that some start wrote. The current line is found from the newest start backwards: all
that it saved, then what its parent saved up to the step at which it was left, and so on. A return to an earlier branch
therefore brings back what that branch saved, and leaves what was saved since.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNKNOWN: Final = ""
"""The start of a checkpoint that no known start wrote: it was adopted, or is older than the first start."""


@dataclass(frozen=True, slots=True)
class TrainerStart:
    """``from_step``: the step that it resumed, None for a fresh start. ``parent``: the start that wrote that
    checkpoint, ``UNKNOWN`` if none that is known did. The times are those of files that podwatch wrote at that moment
    on the checkpoints' file system, so that two clocks are never compared; ``ended_ns`` is None while it lives, and 0
    stands for a time that is not known."""

    start_id: str
    from_step: int | None = None
    parent: str = UNKNOWN
    began_ns: int = 0
    ended_ns: int | None = None


def current_line(starts: Sequence[TrainerStart]) -> Mapping[str, int | None]:
    """Start id -> its last step on the current line (None: all its steps). ``starts``: in their order, those of other
    pods included. Without a start every checkpoint is on the line whose start is not known."""
    if not starts:
        return {UNKNOWN: None}
    known = {start.start_id: start for start in starts}
    line: dict[str, int | None] = {}
    at, last = starts[-1].start_id, None
    while at not in line:  # a manifest of another pod can name parents in a circle
        line[at] = last
        start = known.get(at)
        if start is None or start.from_step is None:
            break
        last = start.from_step if last is None else min(last, start.from_step)
        at = start.parent
    return line


def is_on(line: Mapping[str, int | None], step: int, start_id: str) -> bool:
    """Whether the checkpoint of ``step`` that ``start_id`` wrote is on ``line`` (see ``current_line``)."""
    if start_id not in line:
        return False
    last = line[start_id]
    return last is None or step <= last


def start_that_wrote(times_ns: Iterable[int], starts: Sequence[TrainerStart]) -> TrainerStart | None:
    """The start during which all files of a save appeared; None: no known start wrote it. ``times_ns``: of the parts
    that make the save. ``starts``: in their order."""
    times = sorted(times_ns)
    for start in reversed(starts) if times else ():
        if 0 < start.began_ns <= times[0] and (start.ended_ns is None or times[-1] <= start.ended_ns):
            return start
    return None
