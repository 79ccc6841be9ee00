"""Messages of the upload and fetch processes to the daemon: one JSON document per line of standard output."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

TELL_EVERY: Final = 0.25
"""Seconds between progress lines."""


class JsonLinesOut:
    """Shared by the connections. A closed pipe means that the daemon is gone: the process then ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = 0.0

    def say(self, type_: str, **details: Any) -> None:
        line = json.dumps({"type": type_, **details}).encode() + b"\n"
        with self._lock:
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except OSError:
                os._exit(1)

    def progress(self, details: Callable[[], Mapping[str, Any]]) -> None:
        """``details`` is called only when a line is due."""
        now = time.monotonic()
        with self._lock:
            if now - self._told < TELL_EVERY:
                return
            self._told = now
        self.say("progress", **details())


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse one line on the daemon's side; empty if it is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def job_line() -> bytes:
    """The one line that the daemon writes to standard input; empty if the daemon ended first. From then on this process
    ends when standard input closes."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return b""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    return line


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def leave(code: int) -> NoReturn:
    """Exit at once, without waiting for threads that still wait for the network."""
    sys.stdout.flush()
    os._exit(code)
