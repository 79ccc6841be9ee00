"""One signal over time: was it healthy in this start of the trainer, and since when has it failed without a gap? What a
rule says of it (``Signal``), and the verdict that only two of them can give.

Nothing else in this package can ask for the restart of a living trainer; the end of the launcher (``exits.py``) leaves
nothing to kill.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict

GAP_SECONDS = 30.0
"""Readings further apart than this (or than three intervals of the sensor) do not form one window. Windows of more than
a minute bridge a gap of this length and do not count it."""
FOR_GOOD = float("inf")
"""``bridges`` of a fact, such as the end of a process: not being able to observe does not undo it."""


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


def fact(since: float, at: float, *, armed: bool = True) -> Window:
    """The window of what was seen to begin at ``since`` and holds at ``at``."""
    return Window(armed, since, at, 1)


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal as a rule judges it now. ``window``: behind a signal that agrees; only that one can be half of a
    verdict. One that cannot be observed agrees with nothing."""

    name: str
    value: str
    agreement: Agreement = Agreement.UNAVAILABLE
    seconds: float = 0.0
    window: Window | None = None

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.name, self.value, self.agreement, self.seconds)


def signal(
    name: str, window: Window, value: str, *, unseen: str = "", sound: str = "ok",
    never: str = "never healthy during this start", seconds: float = 0.0, samples: int = 1, early: str = "",
) -> Signal:  # fmt: skip
    """What a window says. It agrees only if it was healthy in this start and has failed for ``seconds`` at so many
    ``samples``. ``unseen``: why it cannot be observed now; ``never``: the value before it was healthy, ``sound``: while
    it is, ``value``: while it fails, and ``early`` until it has failed for long."""
    if unseen or not window.armed:
        return Signal(name, unseen or never, seconds=window.seconds)
    if window.since is None:
        return healthy(name, sound)
    if window.counts(seconds, samples):
        return Signal(name, value, Agreement.AGREES, window.seconds, window)
    return Signal(name, early or f"{value}, not long enough", seconds=window.seconds)


def healthy(name: str, value: str, seconds: float = 0.0) -> Signal:
    return Signal(name, value, Agreement.DISAGREES, seconds)


def agreeing(signals: Iterable[Signal]) -> list[Signal]:
    """The signals whose window was armed and has failed for its whole time."""
    return [s for s in signals if s.window is not None and s.window.counts()]


def names(signals: Iterable[Signal]) -> str:
    return ", ".join(s.name for s in agreeing(signals))


def judged(
    kind: FindingKind, summary: str, since: float, first: Signal, second: Sequence[Signal], *, subject: str,
    waits: str = "", alone: str = "", more: Sequence[Evidence] = (), worse: bool = False,
) -> Finding:  # fmt: skip
    """A verdict if ``first`` and one of ``second`` are armed, failing windows; otherwise a warning.

    ``waits``: why podwatch does not act yet, as the suggestion; empty: it acts now. ``alone``: the suggestion without a
    second signal. ``worse``: critical even then."""
    dead = bool(agreeing((first,)) and agreeing(second))
    return Finding(
        kind,
        Severity.CRITICAL if dead or worse else Severity.WARNING,
        summary,
        since,
        suggestion=waits if dead else alone,
        verdict=Verdict.RESTART if dead else Verdict.NONE,
        confirmed=dead and not waits,
        evidence=(first.evidence, *(s.evidence for s in second), *more),
        subject=subject,
    )
