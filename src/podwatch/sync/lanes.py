"""A queue of work and the connections that process it, as many as help (pace.py)."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from podwatch.sync.pace import WINDOW, Pace
from podwatch.system.load import busy_seconds

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


class Lanes:
    """``run`` returns when all work is done. The first failure stops the others at their next piece, and is raised."""

    def __init__(self, connections: int, most: int) -> None:
        self._pace = Pace(connections, max(connections, most))
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
