"""XIDs of the NVIDIA driver, as NVML reports them by events."""

import threading
from collections import deque

from podwatch.domain.snapshot import XidEvent
from podwatch.system.clock import Clock

KEPT = 64
"""Maximum number of events kept. A GPU that dies reports dozens within a second, and the last add nothing to the
first."""


class XidInbox:
    """Collects XIDs. Thread-safe. ``watched`` is true while NVML reports the XIDs of every GPU."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[XidEvent] = deque(maxlen=KEPT)
        self.watched = False

    def add(self, gpu: int | None, code: int) -> None:
        now = self._clock.monotonic()
        with self._lock:
            for event in reversed(self._events):
                if now - event.at > 10.0:  # the same fault, reported repeatedly
                    break
                if (event.gpu, event.code) == (gpu, code):
                    return
            self._events.append(XidEvent(gpu, code, now))

    def newest(self) -> tuple[XidEvent, ...]:
        """All kept events, newest last."""
        with self._lock:
            return tuple(self._events)
