"""How many connections, and how fast. The judgement is pure; the limit holds threads back.

More connections help where each is bound by the network's latency or a limit per connection; where the cores or the
line are full they only take memory and time from training (facts/b2.md section 4).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 0.5
"""Seconds of one measurement: some round trips even at 200 ms, and 32 connections within two seconds."""
HELPED = 1.15
"""A growth that brings less than this much more speed is taken back: it was noise, or the line is full."""
CORES_BUSY = 0.7
"""Share of the cores in use, by whomever, at which they are the limit, and more connections are only more switching."""
TRY_AGAIN = 60
"""Windows after which it may try to grow again: lines and neighbours change during a long upload."""


@dataclass(frozen=True, slots=True)
class Pace:
    """``lanes`` is how many connections there should be now; ``before`` what the last growth came from, if it is not
    settled yet whether that helped; ``speed`` bytes per second before it."""

    lanes: int
    most: int
    before: int = 0
    speed: float = 0.0
    rest: int = 0

    def after(self, speed: float, cores: float, available: int) -> "Pace":
        """The next pace, from one window: ``speed`` in bytes/s, ``cores`` in CPU seconds per second in use,
        of ``available`` ones."""
        if speed <= 0:
            return self  # nothing arrived: an outage says nothing about lanes
        if self.before:
            if speed < self.speed * HELPED:
                return Pace(self.before, self.most, rest=TRY_AGAIN)
            return Pace(self.lanes, self.most).after(speed, cores, available)
        if self.rest:
            return Pace(self.lanes, self.most, rest=self.rest - 1)
        if self.lanes >= self.most or cores > CORES_BUSY * available:
            return self
        return Pace(min(self.most, self.lanes * 2), self.most, before=self.lanes, speed=speed)


class RateLimit:
    """At most ``rate`` bytes per second over all threads (0: no limit). ``take`` sleeps; a quarter of a second of
    unused allowance is kept, so that short pauses do not cost speed."""

    def __init__(self, rate: float, monotonic: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._rate, self._monotonic, self._sleep = rate, monotonic, sleep
        self._lock = threading.Lock()
        self._free_at = monotonic()

    def take(self, count: int) -> None:
        if self._rate <= 0:
            return
        with self._lock:
            now = self._monotonic()
            begin = max(self._free_at, now - 0.25)
            self._free_at = begin + count / self._rate
            wait = self._free_at - now
        if wait > 0:
            self._sleep(wait)
