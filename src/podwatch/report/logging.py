"""Configures structlog (native journal fields under systemd, console text on a terminal, else JSON lines) and writes
the lines in a thread of their own.
"""

import atexit
import contextlib
import json
import logging
import os
import queue
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from podwatch.domain.event import Event
from podwatch.domain.finding import Severity
from podwatch.domain.secrets import scrub_all

# -- writing of log lines --------------------------------------------------------------------------------------------
# A terminal stopped with Ctrl-S or a full pipe must not block the sensing loop. The queue is bounded; dropped lines
# are counted, and the next written line is preceded by the count.

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


# -- configuration and format ----------------------------------------------------------------------------------------

Format = Literal["auto", "console", "json", "journal"]
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_BY_SEVERITY = {Severity.INFO: "info", Severity.WARNING: "warning", Severity.CRITICAL: "critical"}
_FIELD = re.compile(r"[^A-Z0-9_]")


class Logging:
    """The configured logging. ``close`` writes the queued lines."""

    def __init__(self, sink: Sink, form: str) -> None:
        self._sink = sink
        self.form = form

    def flush(self) -> bool:
        return self._sink.flush()

    def close(self) -> None:
        atexit.unregister(self.close)
        structlog.reset_defaults()
        root = logging.getLogger()
        for handler in [h for h in root.handlers if isinstance(h, _Bridge)]:
            root.removeHandler(handler)
        self._sink.close()


def configure(
    form: Format = "auto",
    level: str = "info",
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
    journal_socket: str = JOURNAL_SOCKET,
) -> Logging:
    """Route structlog and the standard library's logging to ``stream`` (stderr). Call once per process."""
    stream = stream or sys.stderr
    chosen = _choose(form, stream, environ)
    target = JournalTarget(stream, journal_socket) if chosen == "journal" else StreamTarget(stream)
    sink = Sink(target)
    colours = chosen == "console" and stream.isatty() and not environ.get("NO_COLOR")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact,
            _Emit(sink, chosen, colours=colours),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Bridge)]:
        root.removeHandler(handler)
    root.addHandler(_Bridge())
    root.setLevel(max(_LEVELS[level], logging.WARNING))  # libraries log too much below warning
    made = Logging(sink, chosen)
    atexit.register(made.close)
    return made


def log_event(event: Event) -> None:
    """Log one event, with PODWATCH_EVENT and its fields."""
    log = structlog.get_logger()
    fields = {k: v for k, v in event.fields.items() if k not in ("event", "level", "timestamp")}
    getattr(log, _BY_SEVERITY[event.severity])(event.message, podwatch_event=str(event.name), **fields)


def _choose(form: Format, stream: TextIO, environ: Mapping[str, str]) -> str:
    if form != "auto":
        return form
    if under_journal(stream, environ):
        return "journal"
    return "console" if stream.isatty() else "json"


def _redact(logger: WrappedLogger, method: str, event_dict: EventDict) -> EventDict:
    cleaned: dict[str, Any] = scrub_all(dict(event_dict))
    return cleaned


class _Emit:
    """The last structlog processor: renders the entry and passes it to the sink."""

    def __init__(self, sink: Sink, form: str, *, colours: bool) -> None:
        self._sink, self._form = sink, form
        self._colours = colours

    def __call__(self, logger: WrappedLogger, method: str, event_dict: EventDict) -> str:
        level = str(event_dict.get("level", method))
        fields: dict[str, str] = {}
        if self._form == "journal":
            text, fields = _journal_entry(event_dict)
        elif self._form == "console":
            text = _console_line(level, event_dict, colours=self._colours)
        else:
            text = json.dumps(event_dict, default=str, ensure_ascii=False)
        self._sink.write(level, text, fields)
        return ""


def _console_line(level: str, event_dict: EventDict, *, colours: bool) -> str:
    """The line on a terminal, as `podwatch events` prints it. The fields of events are omitted: the text has them."""
    mark, colour = {"warning": (" !", "33"), "error": ("!!", "31"), "critical": ("!!", "31")}.get(level, ("  ", ""))
    said = "".join(c if c.isprintable() else " " for c in str(event_dict.get("event", "")))
    line = f"{time.strftime('%H:%M:%S')} {mark} {said}"
    if "podwatch_event" not in event_dict:
        hidden = ("event", "level", "timestamp", "exception")
        fields = " ".join(f"{key}={value}" for key, value in event_dict.items() if key not in hidden)
        line += f"  {fields}" if fields else ""
    if event_dict.get("exception"):
        line += f"\n{event_dict['exception']}"
    if not colours:
        return line
    return f"\x1b[{colour}m{line}\x1b[0m" if colour else line.replace(line[:8], f"\x1b[2m{line[:8]}\x1b[0m", 1)


def _journal_entry(event_dict: EventDict) -> tuple[str, dict[str, str]]:
    """MESSAGE and the native fields: those of the event, in capitals, as journald requires."""
    fields = {}
    text = str(event_dict.get("event", ""))
    for key, value in event_dict.items():
        name = _FIELD.sub("_", key.upper()).lstrip("_0123456789")[:64]
        if key in ("event", "level", "timestamp") or value is None or not name:
            continue
        if key == "exception":
            text = f"{text}\n{value}"
        fields[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return text, fields


class _Bridge(logging.Handler):
    """Passes log records of libraries (uvicorn, b2sdk, apscheduler) to structlog, so that they are scrubbed, too."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            level = record.levelname.lower()
            method = level if level in _LEVELS else "warning"
            extra: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
            getattr(structlog.get_logger(), method)(record.getMessage(), logger=record.name, **extra)
