"""A queue of work and the connections that process it: how many help, and at which rate."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# -- load of the machine ---------------------------------------------------------------------------------------------

_STAT = Path("/proc/stat")


def busy_seconds() -> tuple[float, float]:
    """(CPU seconds in which the machine's cores were not idle, and in all) since boot; (0, 0) where the kernel does not
    report them. Waiting for a disk is idle; time that a hypervisor gave to others is not (proc_stat(5))."""
    try:
        name, *words = _STAT.read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[:8]]  # guest time, which comes after, is part of user time
        idle = ticks[3] + ticks[4]
        if name != "cpu":
            return 0.0, 0.0
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0
    hertz = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / hertz, sum(ticks) / hertz


# -- number of connections, and the rate -----------------------------------------------------------------------------
# More connections help where each is bound by the network's latency or a limit per connection; where the cores or the
# uplink are full they only take memory and time from training (benchmarks/transfers.md).

WINDOW = 0.5
"""Seconds of one measurement: some round trips even at 200 ms, and 32 connections within two seconds."""
HELPED = 1.15
"""A growth that adds less than this share of speed is undone: it was noise, or the line is full."""
CORES_BUSY = 0.7
"""Share of busy cores, by any process, above which CPU is the limit and more connections only cost switching."""
TRY_AGAIN = 60
"""Windows after which it may try to grow again: lines and neighbours change during a long upload."""


@dataclass(frozen=True, slots=True)
class ConcurrencyController:
    """``lanes`` is the number of connections wanted now; ``before`` the number before the last growth, while it is not
    known yet whether that helped; ``speed`` bytes per second before it."""

    lanes: int
    most: int
    before: int = 0
    speed: float = 0.0
    rest: int = 0

    def after(self, speed: float, cores: float, available: int) -> "ConcurrencyController":
        """The next pace after one window: ``speed`` in bytes/s, ``cores`` in use as CPU seconds per second, of
        ``available`` ones."""
        if speed <= 0:
            return self  # nothing arrived: an outage shows nothing about lanes
        if self.before:
            if speed < self.speed * HELPED:
                return ConcurrencyController(self.before, self.most, rest=TRY_AGAIN)
            return ConcurrencyController(self.lanes, self.most).after(speed, cores, available)
        if self.rest:
            return ConcurrencyController(self.lanes, self.most, rest=self.rest - 1)
        if self.lanes >= self.most or cores > CORES_BUSY * available:
            return self
        return ConcurrencyController(min(self.most, self.lanes * 2), self.most, before=self.lanes, speed=speed)


class Ticks(Protocol):
    """The module ``time``, or a test's own."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class RateLimit:
    """At most ``rate`` bytes per second over all threads (0: no limit). ``take`` sleeps; a quarter of a second of
    unused allowance is kept, so that short pauses do not cost speed."""

    def __init__(self, rate: float, clock: Ticks = time) -> None:
        self._rate, self._clock = rate, clock
        self._lock = threading.Lock()
        self._free_at = clock.monotonic()

    def take(self, count: int) -> None:
        if self._rate <= 0:
            return
        with self._lock:
            now = self._clock.monotonic()
            begin = max(self._free_at, now - 0.25)
            self._free_at = begin + count / self._rate
            wait = self._free_at - now
        if wait > 0:
            self._clock.sleep(wait)


# -- worker pool -----------------------------------------------------------------------------------------------------

TICK = 0.05
"""Seconds between checks of the connections: how soon a failure ends all."""

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Used:
    """CPU seconds so far: our own, and those of the whole machine."""

    ours: float
    busy: float
    total: float

    @classmethod
    def now(cls) -> "_Used":
        return cls(time.process_time(), *busy_seconds())

    def cores(self, before: "_Used", window: float, available: int) -> float:
        """How many of the cores that we may use were busy since ``before``. Other processes' load counts: where
        training or our own network traffic uses the rest, more connections only take CPU from them."""
        total = self.total - before.total
        share = (self.busy - before.busy) / total if total > 0 else 0.0
        return max((self.ours - before.ours) / window, share * available)


class WorkerPool:
    """``run`` returns when all work is done. The first failure stops the others at their next piece, and is raised."""

    def __init__(self, connections: int, most: int) -> None:
        self._pace = ConcurrencyController(connections, max(connections, most))
        self._work: deque[Work] = deque()
        self._failures: list[BaseException] = []
        self._threads: dict[int, threading.Thread] = {}
        self._wanted = 0
        self._lock = threading.Lock()
        self._moved = 0

    def moved(self, count: int) -> None:
        """``count`` bytes came over the line; the number of connections is judged by this."""
        with self._lock:
            self._moved += count

    def run(self, work: list[Work]) -> None:
        self._work = deque(work)
        cores = len(os.sched_getaffinity(0))
        began, moved, used = time.monotonic(), self._moved, _Used.now()
        while (self._adjust(self._pace.lanes) or self._work) and not self._failures:
            for thread in list(self._threads.values()):
                thread.join(TICK)
                if not thread.is_alive() or self._failures:
                    break
            window = time.monotonic() - began
            if window >= WINDOW:
                now = _Used.now()
                self._pace = self._pace.after((self._moved - moved) / window, now.cores(used, window, cores), cores)
                began, moved, used = time.monotonic(), self._moved, now
        if self._failures:
            raise self._failures[0]

    def _adjust(self, wanted: int) -> int:
        """Start missing connections; a surplus one ends after its piece. Returns how many are running."""
        self._wanted = wanted
        self._threads = {n: t for n, t in self._threads.items() if t.is_alive()}
        for number in range(min(wanted, len(self._work) + len(self._threads))):
            if number not in self._threads:
                thread = threading.Thread(target=self._lane, args=(number,), daemon=True)
                self._threads[number] = thread
                thread.start()
        return len(self._threads)

    def _lane(self, number: int) -> None:
        while not self._failures and number < self._wanted:
            try:
                piece = self._work.popleft()
            except IndexError:
                return
            try:
                piece()
            except BaseException as error:
                self._failures.append(error)
