"""A queue of work, the connections that process it, the rate at which they may send, and the lines that tell of it."""

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

REPORT_EVERY = 0.25
"""Seconds between progress lines."""
TICK = 0.05
"""Seconds between checks of the connections: how soon a failure ends all."""


class RateLimit:
    """At most ``rate`` bytes per second over all threads (0: no limit). ``take`` sleeps; a quarter of a second of
    unused allowance is kept, so that short pauses do not cost speed."""

    def __init__(self, rate: float, now: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], object] = time.sleep) -> None:  # fmt: skip
        self._rate, self._now, self._sleep = rate, now, sleep
        self._lock, self._free_at = threading.Lock(), now()

    def take(self, count: int) -> None:
        if self._rate <= 0:
            return
        with self._lock:
            now = self._now()
            self._free_at = max(self._free_at, now - 0.25) + count / self._rate
            wait = self._free_at - now
        if wait > 0:
            self._sleep(wait)


def work_off(work: Iterable[Callable[[], object]], connections: int) -> None:
    """Do all work, in so many threads. The first failure stops the others at their next piece, and is raised at once:
    they may still be busy with their last one."""
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

    threads = [threading.Thread(target=lane, daemon=True) for _ in range(min(connections, len(queue)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failures:
            thread.join(TICK)
    if failures:
        raise failures[0]


class Report:
    """JSON lines on standard output, from several threads. A closed pipe means that the parent is gone: the process
    then ends. ``calls``: the store's count of billed calls, which every line carries."""

    def __init__(self, calls: Callable[[], dict[str, int]]) -> None:
        self._lock, self._calls = threading.Lock(), calls
        self._reported, self._bytes = 0.0, 0

    def say(self, type_: str, /, **details: Any) -> None:
        line = json.dumps({"type": type_, **details, "calls": self._calls()}).encode() + b"\n"
        with self._lock:
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except OSError:
                os._exit(1)

    def count(self, count: int) -> None:
        """So many more bytes were moved (fewer, where a piece is read again)."""
        now = time.monotonic()
        with self._lock:
            self._bytes += count
            due = now - self._reported >= REPORT_EVERY
            self._reported = now if due else self._reported
        if due:
            self.say("progress", bytes=self._bytes)
