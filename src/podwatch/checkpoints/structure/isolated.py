"""Run ``unpickler.py`` in a short child process and remember its answers.

A steady state costs nothing: an answer is kept per (path, inode, size, mtime_ns). The child is prompt (about 30 ms),
has a deadline, limits its own memory, and never prints.
"""

import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.checkpoints.structure import unpickler

DEADLINE = 45.0
"""Seconds. Above the child's own CPU limit; the rest is for slow storage."""
_KEPT = 64
_SOURCE = Path(unpickler.__file__)


@dataclass(frozen=True, slots=True)
class Parsed:
    """``answer`` is None when the file could not be parsed; ``gone``/``unreadable``: not the content's fault."""

    answer: Mapping[str, Any] | None
    error: str = ""
    gone: bool = False
    unreadable: bool = False


_cache: OrderedDict[tuple[str, str, int, int, int], Parsed] = OrderedDict()
_lock = threading.Lock()


def parse(mode: str, path: Path) -> Parsed:
    """Ask the child about one file. Blocking (a deadline bounds it), never raises.

    ``mode``: ``dcp`` (a ``.metadata`` index), ``records`` (the same with every record's place: large, so not kept), or
    ``values`` (small values of a torch zip).
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return Parsed(None, "vanished", gone=True)
    except OSError as error:
        return Parsed(None, error.strerror or str(error), unreadable=True)
    key = (mode, str(path), status.st_ino, status.st_size, status.st_mtime_ns)
    with _lock:
        known = _cache.get(key)
        if known is not None:
            _cache.move_to_end(key)
            return known
    parsed, stamp = _ask(mode, path)
    ours = stamp == list(key[2:]) if parsed.answer is not None else not (parsed.gone or parsed.unreadable)
    if ours and mode != "records":
        with _lock:
            _cache[key] = parsed
            while len(_cache) > _KEPT:
                _cache.popitem(last=False)
    return parsed


def _ask(mode: str, path: Path) -> tuple[Parsed, list[int]]:
    command = [sys.executable, "-I", "-S", str(_SOURCE), mode, str(path)]
    # Nothing of our environment is the child's business, except where its interpreter finds its own libraries.
    environment = {n: v for n, v in os.environ.items() if n == "LD_LIBRARY_PATH"}
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment,
        )
    except OSError as error:
        return Parsed(None, f"cannot start the reader: {error.strerror}", unreadable=True), []
    try:
        output, _ = child.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.communicate(timeout=1.0)
        except subprocess.TimeoutExpired:
            # Stuck in the kernel (a dead NFS server): it is reaped later, we go on now.
            if child.stdout is not None:
                child.stdout.close()
        return Parsed(None, f"could not be read within {DEADLINE:.0f} s", unreadable=True), []
    try:
        document = json.loads(output)
    except ValueError:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"code {child.returncode}"
        return Parsed(None, f"reading it ended the reader ({how})"), []
    if document.get("ok"):
        return Parsed(document["answer"]), document["stamp"]
    return (
        Parsed(
            None,
            str(document.get("error", "unreadable")),
            gone=bool(document.get("gone")),
            unreadable=bool(document.get("unreadable")),
        ),
        [],
    )
