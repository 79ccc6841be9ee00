"""Asks the child that inspects checkpoints. A child that dies, hangs or answers nonsense is an answer: unknown."""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podwatch.checkpoints.inspection import Inspection, InspectionOutcome
from podwatch.checkpoints.records import RecordedFile
from podwatch.checkpoints.rules import Surroundings
from podwatch.checkpoints.table import TrainerTable
from podwatch.domain.errors import IntegrityError
from podwatch.system.pinned_directories import PinnedTree

_CHILD = "podwatch.checkpoints.inspect_child"
DEADLINE = 60.0
"""Seconds for one answer: longer than the child's own limit of CPU time, for slow storage."""
_MANY = 1000
"""So many files double it."""
_UNKNOWN = InspectionOutcome.UNKNOWN


class Inspector:
    """Each thread has a child of its own, for as long as its outermost ``with`` lasts; without one, for one question: a
    child that has read a large index keeps its memory. Blocks until the deadline at most, and never raises."""

    def __init__(self, *, deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        self._own = threading.local()
        self.tree: PinnedTree | None = None
        """The directories whose files are read: the children have the rights of their user. None: podwatch's own."""

    def __enter__(self) -> "Inspector":
        self._own.depth = getattr(self._own, "depth", 0) + 1
        return self

    def __exit__(self, *_: object) -> None:
        self._own.depth -= 1
        if not self._own.depth:
            self._end()

    def inspect(
        self,
        table: TrainerTable,
        step: int,
        parts: Mapping[str, Path],
        files: Collection[RecordedFile],
        about: Surroundings | None = None,
    ) -> Inspection:
        """Exactly these files of one save. ``parts``: the directories that contain them."""
        request = {
            "table": asdict(table),
            "step": step,
            "parts": {name: str(path) for name, path in parts.items()},
            "files": [(f.part, f.path, f.size, f.mtime_ns) for f in files],
            "about": asdict(about or Surroundings()),
        }
        answer = self._ask(request, self._deadline * (1 + len(files) / _MANY))
        try:
            return Inspection.from_json(answer)
        except IntegrityError:
            return Inspection(_UNKNOWN, "the inspection gave no usable answer")

    def values(self, path: Path) -> Mapping[str, object] | None:
        """Small values in a torch file; empty if there are none. None: unknown."""
        found = self._ask({"values": str(path)}, self._deadline).get("values")
        return found if isinstance(found, dict) else None

    def _ask(self, request: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        with self:
            try:
                answer = json.loads(self._exchange(json.dumps(request).encode() + b"\n", seconds))
            except TimeoutError:
                self._end()
                return {"outcome": _UNKNOWN, "reason": f"the inspection took longer than {seconds:.0f} s"}
            except (OSError, ValueError):
                self._end()
                return {"outcome": _UNKNOWN, "reason": "the inspection ended without an answer"}
            return answer if isinstance(answer, dict) else {}

    def _exchange(self, line: bytes, seconds: float) -> bytes:
        child, end = self._started(), time.monotonic() + seconds
        assert child.stdin is not None
        assert child.stdout is not None
        for sent in _moments(child.stdin.fileno(), select.POLLOUT, end):
            line = line[os.write(sent, line) :]
            if not line:
                break
        found = bytearray()
        for ready in _moments(child.stdout.fileno(), select.POLLIN, end):
            chunk = os.read(ready, 1 << 16)
            if not chunk:
                raise OSError("the child ended")
            found += chunk
            if found.endswith(b"\n"):
                break
        return bytes(found)

    def _started(self) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] | None = getattr(self._own, "child", None)
        if child is None or child.poll() is not None:
            self._end()
            user = None if self.tree is None else self.tree.rights
            rights = [] if user is None else [json.dumps(asdict(user))]
            child = self._own.child = subprocess.Popen(
                [sys.executable, "-I", "-m", _CHILD, *rights],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={n: v for n, v in os.environ.items() if n == "LD_LIBRARY_PATH"},  # it reads hostile files
                start_new_session=True,
            )
            assert child.stdin is not None
            os.set_blocking(child.stdin.fileno(), False)
        return child

    def _end(self) -> None:
        child: subprocess.Popen[bytes] | None = getattr(self._own, "child", None)
        self._own.child = None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel (a dead NFS server)
            child.wait(timeout=1.0)


def _moments(fd: int, event: int, end: float) -> Iterator[int]:
    """The descriptor, each time that it can be read or written. TimeoutError at the end."""
    waiting = select.poll()  # not select(): the daemon can have more than 1024 open files
    waiting.register(fd, event)
    while True:
        if not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError
        yield fd


INSPECTOR = Inspector()
"""The one of this process."""
