"""Conditions with hysteresis: raised after a time above one threshold, cleared after a time below another."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


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
