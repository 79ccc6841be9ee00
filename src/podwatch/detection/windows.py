"""Conditions over time, for detectors: for how long has one been observed without a gap, and when is it raised and
cleared?
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

# -- conditions with hysteresis --------------------------------------------------------------------------------------
# Raised after a time above one threshold, cleared after a time below another.


@dataclass(frozen=True, slots=True)
class Latch:
    """``since``: when the condition began (monotonic), also before it is raised. ``below_since``: when a raised
    condition was first seen below its clearing threshold."""

    since: float | None = None
    raised: bool = False
    below_since: float | None = None

    def update(
        self, over: bool | None, at: float, *, hold: float = 0.0, gone: bool | None = None, release: float = 0.0
    ) -> "Latch":
        """One observation. ``over``: the condition holds now. ``gone``: it is below the clearing threshold (None: same
        as not ``over``). An unknown observation (``over`` is None) leaves a raised latch as it is and resets any
        other. ``hold`` and ``release`` are seconds."""
        if over is None:
            return self if self.raised else QUIET
        if self.raised:
            if over or not (gone if gone is not None else not over):
                return self if self.below_since is None else replace(self, below_since=None)
            since = self.below_since if self.below_since is not None else at
            return QUIET if at - since >= release else replace(self, below_since=since)
        if not over:
            return QUIET
        since = self.since if self.since is not None else at
        return Latch(since, at - since >= hold)


QUIET = Latch()
Latches = tuple[tuple[str, Latch], ...]


def kept(latches: Mapping[str, Latch]) -> Latches:
    """The latches that are not ``QUIET``, sorted, as part of a state."""
    return tuple(sorted((name, latch) for name, latch in latches.items() if latch != QUIET))


# -- observation windows ---------------------------------------------------------------------------------------------

GAPS_KEPT = 9


@dataclass(frozen=True, slots=True)
class Held:
    """A condition that was true at each of ``samples`` observations from ``since`` to ``last_at`` (monotonic)."""

    since: float | None = None
    samples: int = 0
    last_at: float | None = None

    def update(self, condition: bool | None, at: float, max_gap: float) -> "Held":
        """Add one observation. None means "could not observe", which is no evidence and resets the window.

        The same observation given twice (``at`` not newer) changes nothing. A gap longer than ``max_gap`` seconds
        restarts the window at this observation.
        """
        if not condition:
            return NOT_HELD
        last = self.last_at
        if last is None or self.since is None:
            return Held(at, 1, at)
        if at <= last:
            return self
        if at - last > max_gap:
            return Held(at, 1, at)
        return Held(self.since, self.samples + 1, at)

    @property
    def seconds(self) -> float:
        if self.since is None or self.last_at is None:
            return 0.0
        return self.last_at - self.since


NOT_HELD = Held()


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The interval between a sensor's readings, learned from the readings."""

    last_at: float | None = None
    gaps: tuple[float, ...] = ()

    def update(self, at: float) -> "Rhythm":
        if self.last_at is None:
            return Rhythm(at)
        if at <= self.last_at:
            return self
        return Rhythm(at, (*self.gaps, at - self.last_at)[-GAPS_KEPT:])

    def max_gap(self, least: float) -> float:
        """Three times the median interval, at least ``least`` seconds."""
        if not self.gaps:
            return least
        return max(least, 3.0 * sorted(self.gaps)[len(self.gaps) // 2])


NO_RHYTHM = Rhythm()
