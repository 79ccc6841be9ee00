"""A queue of work and the connections that process it, and the rate at which they may send."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol


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


TICK = 0.05
"""Seconds between checks of the connections: how soon a failure ends all."""

Work = Callable[[], None]


def work_off(work: list[Work], connections: int) -> None:
    """Do all work, in so many threads. The first failure stops the others at their next piece, and is raised at
    once: they may still be busy with their last one."""
    queue, failures = deque(work), list[BaseException]()

    def lane() -> None:
        while not failures:
            try:
                piece = queue.popleft()
            except IndexError:
                return
            try:
                piece()
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=lane, daemon=True) for _ in range(min(connections, len(work)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failures:
            thread.join(TICK)
    if failures:
        raise failures[0]
