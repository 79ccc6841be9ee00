"""Outcome of the upload of each checkpoint, and whether the uplink is slower than the saves. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

KEPT = 40
"""Two hours at a save every three minutes."""
RECENT, SKIPPED_RECENTLY = 10, 2
"""A single skipped checkpoint is normal after a restart of podwatch or an outage."""
LEAST_SECONDS = 60.0
"""Shorter uploads never count as behind: at most a minute of training is not in the store."""
CAUGHT_UP = 5
"""The uplink has caught up after this many consecutive checkpoints without a skipped one."""


class Outcome(StrEnum):
    STORED = "stored"
    SKIPPED = "skipped"
    """A newer one was uploaded instead."""
    ABANDONED = "abandoned"
    """Its upload was given up: its files changed or were deleted, or the disk needed the space."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The last checkpoints, oldest first. ``upload_seconds``: how long the last upload took; ``save_seconds``: from one
    save to the next, as known then; ``starved``: that upload waited for a CPU rather than for the uplink."""

    outcomes: tuple[Outcome, ...] = ()
    upload_seconds: float | None = None
    save_seconds: float | None = None
    starved: bool = False

    def adding(self, *outcomes: Outcome) -> "Tally":
        return replace(self, outcomes=(*self.outcomes, *outcomes)[-KEPT:])

    def count(self, outcome: Outcome) -> int:
        return Counter(self.outcomes)[outcome]

    def to_list(self) -> list[object]:
        return [[str(o) for o in self.outcomes], self.upload_seconds, self.save_seconds, self.starved]

    @classmethod
    def from_list(cls, data: object) -> "Tally":
        """The inverse of ``to_list``; unreadable data gives an empty tally."""
        known: Any = data
        try:
            outcomes, upload, save, starved = known
            return cls(
                tuple(Outcome(o) for o in outcomes)[-KEPT:],
                None if upload is None else float(upload),
                None if save is None else float(save),
                bool(starved),
            )
        except (TypeError, ValueError):
            return cls()


def uplink_behind(tally: Tally) -> bool:
    """Whether checkpoints are skipped because the uplink is slower than the saves. False if the upload waited for a
    CPU, or if uploads are faster than saves: then an outage, a restart or ``sync.upload_gap`` is the cause."""
    if tally.starved or tally.upload_seconds is None or tally.save_seconds is None:
        return False
    recent = tally.outcomes[-RECENT:]
    skips = recent.count(Outcome.SKIPPED) >= SKIPPED_RECENTLY and Outcome.SKIPPED in recent[-CAUGHT_UP:]
    return skips and tally.upload_seconds > max(tally.save_seconds, LEAST_SECONDS)


def in_words(outcomes: Sequence[Outcome]) -> str:
    """``26 of the last 40 checkpoints are stored, 14 were skipped``."""
    counts = Counter(outcomes)
    text = f"{counts[Outcome.STORED]} of the last {len(outcomes)} checkpoints are stored, {counts[Outcome.SKIPPED]} "
    text += "was skipped" if counts[Outcome.SKIPPED] == 1 else "were skipped"
    gone = counts[Outcome.ABANDONED]
    return text + (f", {gone} {'was' if gone == 1 else 'were'} abandoned" if gone else "")


def every(outcomes: Sequence[Outcome]) -> str:
    """``every third``: how many checkpoints there are for each stored one; empty if none or nearly all are stored."""
    stored = Counter(outcomes)[Outcome.STORED]
    if not stored:
        return ""
    times = round(len(outcomes) / stored)
    return {2: "every second", 3: "every third", 4: "every fourth"}.get(times, f"one in {times}" if times > 4 else "")
