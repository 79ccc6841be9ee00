"""Windows of observation: how long has something been seen without a gap?"""

from dataclasses import dataclass

GAPS_KEPT = 9


@dataclass(frozen=True, slots=True)
class Held:
    """A condition seen true at every one of ``samples`` observations from ``since`` to ``last_at`` (monotonic
    seconds).
    """

    since: float | None = None
    samples: int = 0
    last_at: float | None = None

    def update(self, condition: bool | None, at: float, max_gap: float) -> "Held":
        """Take one observation in. None means "could not observe": never evidence, so the window begins anew.

        The same observation given twice (``at`` not newer) changes nothing. A hole longer than ``max_gap`` seconds
        begins the window anew: nobody saw what happened in it.
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
    """How often a sensor answers, learned from its own readings."""

    last_at: float | None = None
    gaps: tuple[float, ...] = ()

    def update(self, at: float) -> "Rhythm":
        if self.last_at is None:
            return Rhythm(at)
        if at <= self.last_at:
            return self
        return Rhythm(at, (*self.gaps, at - self.last_at)[-GAPS_KEPT:])

    def max_gap(self, least: float) -> float:
        """Three times the usual interval, but never below ``least`` seconds."""
        if not self.gaps:
            return least
        return max(least, 3.0 * sorted(self.gaps)[len(self.gaps) // 2])


NO_RHYTHM = Rhythm()
