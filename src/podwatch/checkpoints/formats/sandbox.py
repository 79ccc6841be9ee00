"""Runs ``unpickler.py`` in a short-lived child process and caches its answers.

Without changes it costs nothing: an answer is cached per (path, inode, size, mtime_ns). A child takes about 30 ms to
start, so within ``session()`` one child answers many questions; each has a deadline, and the child limits its own
memory and CPU time and never prints. If a used child gives a bad answer, a new child is asked before the answer counts.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.checkpoints.formats import unpickler
from podwatch.system.files import open_file

DEADLINE = 45.0
"""Seconds. Longer than the child's own CPU limit; the rest is for slow storage."""
_KEPT = 32
_SOURCE = Path(unpickler.__file__)


@dataclass(frozen=True, slots=True)
class Parsed:
    """``answer`` is None when the file could not be parsed; ``gone``/``unreadable``: the content is not the cause."""

    answer: Mapping[str, Any] | None
    error: str = ""
    gone: bool = False
    unreadable: bool = False


_cache: OrderedDict[tuple[str, str, int, int, int], Parsed] = OrderedDict()
_lock = threading.Lock()


def parse(mode: str, path: Path) -> Parsed:
    """Ask the child about one file. Blocks until a deadline at most; never raises.

    ``mode``: ``dcp`` (a ``.metadata`` index), ``records`` (the same with the place of every record: large, so not
    cached), or ``values`` (small values of a torch zip).
    """
    try:
        descriptor = open_file(path)
    except FileNotFoundError:
        return Parsed(None, "vanished", gone=True)
    except OSError as error:
        return Parsed(None, error.strerror or str(error), unreadable=True)
    try:
        status = os.fstat(descriptor)
        key = (mode, str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        with _lock:
            known = _cache.get(key)
            if known is not None:
                _cache.move_to_end(key)
                return known
        parsed, stamp = _ask(mode, path, descriptor)
    finally:
        os.close(descriptor)
    ours = stamp == list(key[2:]) if parsed.answer is not None else not (parsed.gone or parsed.unreadable)
    if ours and mode != "records":
        with _lock:
            _cache[key] = parsed
            while len(_cache) > _KEPT:
                _cache.popitem(last=False)
    return parsed


class _Reader:
    """One child process."""

    def __init__(self) -> None:
        # The child gets no environment except the variable by which its interpreter finds its libraries.
        environment = {n: v for n, v in os.environ.items() if n == "LD_LIBRARY_PATH"}
        self.used = False
        self._files, theirs = socket.socketpair()
        with theirs:
            self._child = self._start(theirs, environment)

    def _start(self, theirs: socket.socket, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SOURCE), str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment,
        )

    def ask(self, mode: str, path: Path, descriptor: int) -> dict[str, Any] | None:
        """The child's answer about this open file (``path`` is its name in the child's cache), or None if it ended
        instead. TimeoutError after the deadline."""
        if self._child.stdin is None or self._child.stdout is None:
            return None
        try:
            socket.send_fds(self._files, [b"f"], [descriptor])
            self._child.stdin.write(json.dumps([mode, str(path)]).encode() + b"\n")
            self._child.stdin.flush()
            line = self._line(self._child.stdout.fileno())
            document = json.loads(line) if line else None
        except (ConnectionError, ValueError):
            return None
        return document if isinstance(document, dict) else None

    def _line(self, fd: int) -> bytes:
        limit = time.monotonic() + DEADLINE
        waiting = select.poll()  # not select(): the daemon can have more than 1024 open files
        waiting.register(fd, select.POLLIN)
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            if not waiting.poll(max(0.0, limit - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(fd, 1 << 16)
            if not piece:
                return b""
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self._child.kill()
        self._files.close()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        try:
            self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            pass  # hangs in the kernel (a dead NFS server): reaped later


_local = threading.local()


@contextmanager
def session() -> Iterator[None]:
    """Within it, all requests of this thread share one child, started at the first request."""
    if getattr(_local, "open", False):
        yield
        return
    _local.open, _local.reader = True, None
    try:
        yield
    finally:
        reader, _local.open, _local.reader = _local.reader, False, None
        if reader is not None:
            reader.close()


def _ask(mode: str, path: Path, descriptor: int) -> tuple[Parsed, list[int]]:
    with session():
        for _attempt in range(2):
            reader: _Reader | None = _local.reader
            if reader is None:
                try:
                    reader = _local.reader = _Reader()
                except OSError as error:
                    return Parsed(
                        None, f"cannot start the child process that reads it: {error.strerror}", unreadable=True
                    ), []
            used, reader.used = reader.used, True
            try:
                document = reader.ask(mode, path, descriptor)
            except TimeoutError:
                _local.reader = None
                reader.close()
                return Parsed(None, f"could not be read within {DEADLINE:.0f} s", unreadable=True), []
            if document is not None and document.get("ok"):
                return Parsed(document["answer"]), document["stamp"]
            if document is not None and (document.get("gone") or document.get("unreadable")):
                gone = bool(document.get("gone"))
                return Parsed(None, str(document.get("error")), gone=gone, unreadable=not gone), []
            _local.reader = None
            reader.close()
            if not used:
                break
    return Parsed(
        None, "the child process that read it crashed" if document is None else str(document.get("error"))
    ), []
