"""The service manager's notify protocol (sd_notify(3)), without a library.

systemd and podwatch's own init (trainer/supervise.py) use the same protocol. Sending never blocks and never raises: a
service manager that went away must not stop the guard.
"""

import os
import socket
import time
from collections.abc import Mapping
from typing import Protocol


class Notifier(Protocol):
    """Messages from the daemon to its service manager."""

    watchdog_seconds: float | None
    """The service manager kills podwatch when ``watchdog()`` is not called for this long; None: it does not watch."""

    def ready(self, status: str = "") -> None: ...
    def status(self, text: str) -> None: ...
    def reloading(self) -> None: ...
    def stopping(self, status: str = "") -> None: ...
    def watchdog(self) -> None: ...
    def extend_timeout(self, seconds: float) -> None: ...
    def job_ended(self, code: int) -> None:
        """To podwatch's init in job mode: ``code`` is the job's exit code, even if this process is killed now."""
        ...

    def close(self) -> None: ...


class NullNotifier:
    """For a daemon without a service manager."""

    watchdog_seconds: float | None = None

    def ready(self, status: str = "") -> None: ...
    def status(self, text: str) -> None: ...
    def reloading(self) -> None: ...
    def stopping(self, status: str = "") -> None: ...
    def watchdog(self) -> None: ...
    def extend_timeout(self, seconds: float) -> None: ...
    def job_ended(self, code: int) -> None: ...
    def close(self) -> None: ...


class SocketNotifier:
    """Sends datagrams to ``address`` (a path, or ``@name`` for an abstract socket)."""

    def __init__(self, address: str, *, watchdog_seconds: float | None = None) -> None:
        self.watchdog_seconds = watchdog_seconds
        self.failures = 0
        """Datagrams that could not be delivered, for diagnosis."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def ready(self, status: str = "") -> None:
        self._send("READY=1", status)

    def status(self, text: str) -> None:
        self._send("", text)

    def reloading(self) -> None:
        # Type=notify-reload needs the time at which the reload began, in CLOCK_MONOTONIC microseconds
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> None:
        self._send("STOPPING=1", status)

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> None:
        self._send(f"EXTEND_TIMEOUT_USEC={max(0, int(seconds * 1_000_000))}")

    def job_ended(self, code: int) -> None:
        self._send(f"PODWATCH_END={code}")

    def close(self) -> None:
        self._socket.close()

    def _send(self, state: str, status: str = "") -> None:
        lines = [state] if state else []
        if status:
            lines.append("STATUS=" + " ".join(status.split()))
        if not lines:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:  # gone, full, or closed by us: nothing can be done here
            self.failures += 1


def watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """From WATCHDOG_USEC, if WATCHDOG_PID is absent or ours; None when there is no watchdog for this process."""
    try:
        usec = int(environ.get("WATCHDOG_USEC", "0"))
        pid = int(environ.get("WATCHDOG_PID", "0") or "0")
    except ValueError:
        return None
    return usec / 1_000_000 if usec > 0 and pid in (0, os.getpid()) else None


def make_notifier(environ: Mapping[str, str] = os.environ) -> Notifier:
    """A notifier for NOTIFY_SOCKET, or one that does nothing."""
    address = environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@") or len(address) < 2:
        return NullNotifier()
    return SocketNotifier(address, watchdog_seconds=watchdog_seconds(environ))
