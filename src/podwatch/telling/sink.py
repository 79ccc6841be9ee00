"""Writes log lines to a stream or the systemd journal, in a separate thread.

A terminal stopped with Ctrl-S or a full pipe must not block the sensing loop. The queue is bounded; dropped lines are
counted, and the next written line is preceded by the count.
"""

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Protocol, TextIO

JOURNAL_SOCKET = "/run/systemd/journal/socket"
_QUEUE = 2000
PRIORITIES = {"critical": 2, "error": 3, "exception": 3, "warning": 4, "warn": 4, "info": 6, "debug": 7}
"""syslog priorities by structlog's level names."""


class Target(Protocol):
    def write(self, level: str, text: str, fields: Mapping[str, str]) -> None: ...

    def close(self) -> None: ...


class StreamTarget:
    """Plain lines; ``fields`` are already part of the text."""

    def __init__(self, stream: TextIO, *, prefix: bool = False) -> None:
        self._stream, self._prefix = stream, prefix

    def write(self, level: str, text: str, fields: Mapping[str, str]) -> None:
        lead = f"<{PRIORITIES.get(level, 6)}>" if self._prefix else ""
        lines = text.splitlines() if lead else [text]
        with contextlib.suppress(OSError, ValueError):
            self._stream.write("".join(f"{lead}{line}\n" for line in lines))
            self._stream.flush()

    def close(self) -> None:
        return


class JournalTarget:
    """The journal's native protocol: one datagram of KEY=value fields. Falls back to ``<N>`` lines on stderr."""

    def __init__(self, stream: TextIO, path: str = JOURNAL_SOCKET) -> None:
        self._fallback = StreamTarget(stream, prefix=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._path = path

    def write(self, level: str, text: str, fields: Mapping[str, str]) -> None:
        entry = {"MESSAGE": text, "PRIORITY": str(PRIORITIES.get(level, 6)), "SYSLOG_IDENTIFIER": "podwatch", **fields}
        try:
            self._socket.sendto(encode(entry), self._path)
        except OSError:  # journald does not run, or the entry is longer than a datagram
            self._fallback.write(level, text, fields)

    def close(self) -> None:
        self._socket.close()


def encode(entry: Mapping[str, str]) -> bytes:
    """The entry as ``KEY=value`` lines; a value with a newline as KEY, length (64 bit, little endian), bytes."""
    parts = []
    for key, value in entry.items():
        data = value.encode("utf-8", "replace")
        if b"\n" in data:
            parts.append(key.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(key.encode() + b"=" + data + b"\n")
    return b"".join(parts)


class Sink:
    """Passes lines to a target in a daemon thread. ``flush`` waits a bounded time; ``close`` flushes first."""

    def __init__(self, target: Target, *, size: int = _QUEUE) -> None:
        self._target = target
        self._queue: queue.Queue[tuple[str, str, Mapping[str, str]] | threading.Event | None] = queue.Queue(size)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, level: str, text: str, fields: Mapping[str, str]) -> None:
        """Never blocks."""
        try:
            self._queue.put_nowait((level, text, fields))
        except queue.Full:
            self._dropped += 1

    def flush(self, timeout: float = 1.0) -> bool:
        """Wait until the queue is written; False if that takes longer than ``timeout`` seconds."""
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout)
        except queue.Full:
            return False
        return done.wait(timeout)

    def close(self, timeout: float = 1.0) -> None:
        if self.flush(timeout):
            self._queue.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                self._target.close()
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            if self._dropped:
                count, self._dropped = self._dropped, 0
                self._target.write("warning", f"{count} log lines were dropped, because the log output was blocked", {})
            self._target.write(*item)


def under_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` is the one that systemd connected to the journal (compares device and inode)."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    if not (device.isdigit() and inode.isdigit()):
        return False
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (found.st_dev, found.st_ino) == (int(device), int(inode))
