"""Progress pings, such as prime-rl's ``--trainer.heartbeat.url``: a GET after every step, without a number."""

import re
import threading

from podwatch.system.clock import Clock

MAX_ROLES = 16
"""Maximum number of roles kept: pings come from the network and must not fill the memory."""
_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


class PingInbox:
    """The newest ping of each role. Thread-safe. The HTTP server checks the token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: dict[str, float] = {}

    def ping(self, role: str) -> bool:
        """Record a ping now. False if the role is refused (invalid characters, or too many roles)."""
        if _ROLE.fullmatch(role) is None:
            return False
        with self._lock:
            if role not in self._newest and len(self._newest) >= MAX_ROLES:
                return False
            self._newest[role] = self._clock.monotonic()
            return True

    def newest(self) -> tuple[tuple[str, float], ...]:
        """(role, monotonic second of its newest ping), by role."""
        with self._lock:
            return tuple(sorted(self._newest.items()))
