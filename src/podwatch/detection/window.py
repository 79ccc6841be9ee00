"""One signal over time: was it healthy in this start of the trainer, and since when has it failed without a gap?"""

from dataclasses import dataclass, replace
from statistics import median

from podwatch.domain.finding import Agreement, Evidence

GAP_SECONDS = 30.0
"""Readings further apart than this (or than three intervals of the sensor) do not form one window. Windows of more than
a minute bridge a gap of this length and do not count it."""
FOR_GOOD = float("inf")
"""``bridges`` of a fact, such as the end of a process: not being able to observe does not undo it."""
PACE_SAMPLES = 9


@dataclass(frozen=True, slots=True)
class Window:
    """``armed``: the signal was healthy in this start. ``since``: it has failed at every reading from then until
    ``last``, ``samples`` of them. ``bridges``: how long a gap may be, in seconds, that does not end the window."""

    armed: bool = False
    since: float | None = None
    last: float | None = None
    samples: int = 0
    bridges: float = 0.0

    def observe(self, good: bool | None, at: float, gap: float = GAP_SECONDS, *, arms: bool = True) -> "Window":
        """Add a reading. ``good`` None: it could not be made, which is no evidence. ``gap``: the usual time between two
        readings is shorter. ``arms``: being good now makes a later failure count. The same reading twice changes
        nothing."""
        if self.last is not None and at <= self.last:
            return self
        if good is None:
            return self if self.last is not None and at - self.last <= self.bridges else self.reset()
        if good:
            return replace(self, armed=self.armed or arms, since=None, last=at, samples=0)
        if self.since is None or self.last is None or at - self.last > max(gap, self.bridges):
            return replace(self, since=at, last=at, samples=1)
        uncounted = at - self.last if at - self.last > gap and self.bridges < FOR_GOOD else 0.0
        return replace(self, since=self.since + uncounted, last=at, samples=self.samples + 1)

    def reset(self) -> "Window":
        """The window after nothing could be observed: what failed before counts no more."""
        return self if self.since is None or self.bridges == FOR_GOOD else replace(self, since=None, samples=0)

    @property
    def seconds(self) -> float:
        return 0.0 if self.since is None or self.last is None else max(0.0, self.last - self.since)

    def lasts(self, seconds: float) -> bool:
        """Whether it has failed for so long."""
        return self.since is not None and self.seconds >= seconds

    def counts(self, seconds: float = 0.0, samples: int = 1) -> bool:
        """Whether it can be half of a verdict: healthy before, and failing for so long and so often."""
        return self.armed and self.lasts(seconds) and self.samples >= samples


@dataclass(frozen=True, slots=True)
class Pace:
    """The interval between a sensor's readings, learned from the readings."""

    last: float | None = None
    gaps: tuple[float, ...] = ()

    def observe(self, at: float) -> "Pace":
        if self.last is None or at <= self.last:
            return Pace(at, self.gaps) if self.last is None else self
        return Pace(at, (*self.gaps, at - self.last)[-PACE_SAMPLES:])

    def gap(self, least: float = GAP_SECONDS) -> float:
        """Three times the median interval, at least ``least`` seconds."""
        return max(least, 3.0 * median(self.gaps)) if self.gaps else least


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal as a rule judges it now. ``window``: behind a signal that agrees; only that one can be half of a
    verdict."""

    name: str
    value: str
    agreement: Agreement
    seconds: float = 0.0
    window: Window | None = None

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.name, self.value, self.agreement, self.seconds)


def failing(
    name: str, value: str, window: Window, seconds: float = 0.0, samples: int = 1, *, early: str = ""
) -> Signal:
    """A signal that agrees if its window counts; otherwise it is unavailable. ``early``: its value until then."""
    if window.counts(seconds, samples):
        return Signal(name, value, Agreement.AGREES, window.seconds, window)
    return Signal(name, early or f"{value}, not long enough", Agreement.UNAVAILABLE, window.seconds)


def signal(
    name: str, window: Window, value: str, *, unseen: str = "", sound: str = "ok",
    never: str = "never healthy during this start", seconds: float = 0.0, samples: int = 1, early: str = "",
) -> Signal:  # fmt: skip
    """What a window says. It agrees only if it was healthy in this start and has failed for ``seconds`` at so many
    ``samples``. ``unseen``: why it cannot be observed now, and then it agrees with nothing; ``never``: the value before
    it was healthy, ``sound``: while it is, ``value``: while it fails, and ``early`` until it has failed for long."""
    if unseen or not window.armed:
        return unavailable(name, unseen or never, window.seconds)
    return healthy(name, sound) if window.since is None else failing(name, value, window, seconds, samples, early=early)


def healthy(name: str, value: str, seconds: float = 0.0) -> Signal:
    return Signal(name, value, Agreement.DISAGREES, seconds)


def unavailable(name: str, value: str, seconds: float = 0.0) -> Signal:
    """A signal that cannot be observed agrees with nothing."""
    return Signal(name, value, Agreement.UNAVAILABLE, seconds)
