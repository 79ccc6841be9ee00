"""Decides how many connections to use (pure), and limits the rate over all threads.

More connections help where each is bound by the network's latency or a limit per connection; where the cores or the
line are full they only take memory and time from training (docs/performance.md).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 0.5
"""Seconds of one measurement: some round trips even at 200 ms, and 32 connections within two seconds."""
HELPED = 1.15
"""A growth that adds less than this share of speed is undone: it was noise, or the line is full."""
CORES_BUSY = 0.7
"""Share of busy cores, by any process, above which CPU is the limit and more connections only cost switching."""
TRY_AGAIN = 60
"""Windows after which it may try to grow again: lines and neighbours change during a long upload."""


@dataclass(frozen=True, slots=True)
class Pace:
    """``lanes`` is the number of connections wanted now; ``before`` the number before the last growth, while it is not
    known yet whether that helped; ``speed`` bytes per second before it."""

    lanes: int
    most: int
    before: int = 0
    speed: float = 0.0
    rest: int = 0

    def after(self, speed: float, cores: float, available: int) -> "Pace":
        """The next pace after one window: ``speed`` in bytes/s, ``cores`` in use as CPU seconds per second, of
        ``available`` ones."""
        if speed <= 0:
            return self  # nothing arrived: an outage shows nothing about lanes
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
