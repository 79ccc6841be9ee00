"""Asks the child that inspects checkpoints. A child that dies, hangs or answers nonsense is an answer: unknown."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podwatch.checkpoints.tables.records import RecordedFile
from podwatch.checkpoints.tables.rules import CheckpointInspection, InspectionOutcome
from podwatch.checkpoints.tables.table import SaveEnd, TrainerTable
from podwatch.system.environment_without_secrets import scrubbed_environment

_CHILD = "podwatch.checkpoints.tables.inspect_child"
DEADLINE = 60.0
"""Seconds for one answer: longer than the child's own limit of CPU time, for slow storage."""
_UNKNOWN = InspectionOutcome.UNKNOWN


class Inspector:
    """One child for many questions; for one thread. Blocks until the deadline at most, and never raises."""

    def __init__(self, *, deadline: float = DEADLINE, account: Mapping[str, Any] | None = None) -> None:
        """``account``: the arguments of ``subprocess`` that let the child work as the trainer's user."""
        self._deadline, self._account = deadline, dict(account or {})
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Inspector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()

    def inspect(
        self,
        table: TrainerTable,
        step: int,
        parts: Mapping[str, Path],
        files: tuple[RecordedFile, ...],
        **about: Any,
    ) -> CheckpointInspection:
        """Exactly these files of one save. ``about``: see ``SaveFacts``; paths of ``trackers`` and ``beside``."""
        request = {
            "table": asdict(table),
            "step": step,
            "parts": {name: str(path) for name, path in parts.items()},
            "files": [(f.part, f.path, f.size, f.mtime_ns) for f in files],
            "trackers": {name: str(path) for name, path in about.get("trackers", {}).items()},
            "needed_parts": sorted(about.get("needed_parts", ())),
            "doubtful_parts": sorted(about.get("doubtful_parts", ())),
            "later": bool(about.get("later", False)),
            "forms": sorted(about.get("forms", ())),
            "other_forms": sorted(about.get("other_forms", ())),
            "beside": [str(path) for path in about.get("beside", ())],
            "twin": about.get("twin", ""),
        }
        answer = self._ask(request)
        try:
            return CheckpointInspection(
                InspectionOutcome(answer["outcome"]),
                str(answer["reason"]),
                SaveEnd(answer.get("end", SaveEnd.NONE)),
                str(answer.get("token", "")),
                answer.get("world_size"),
                tuple(answer.get("unlisted", ())),
                bool(answer.get("is_export", False)),
            )
        except (KeyError, ValueError, TypeError):
            return CheckpointInspection(_UNKNOWN, "the inspection gave no usable answer")

    def values(self, path: Path) -> Mapping[str, object]:
        """Small values in a torch file; empty if there are none, or none can be read."""
        found = self._ask({"values": str(path)}).get("values")
        return found if isinstance(found, dict) else {}

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            line = self._exchange(json.dumps(request).encode() + b"\n")
            answer = json.loads(line)
        except TimeoutError:
            self.close()
            return {"outcome": _UNKNOWN, "reason": f"the inspection took longer than {self._deadline:.0f} s"}
        except (OSError, ValueError):
            self.close()
            return {"outcome": _UNKNOWN, "reason": "the inspection ended without an answer"}
        return answer if isinstance(answer, dict) else {}

    def _exchange(self, line: bytes) -> bytes:
        child = self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(line)
        child.stdin.flush()
        end, found = time.monotonic() + self._deadline, bytearray()
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([child.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                raise OSError("the child ended")
            found += chunk
        return bytes(found)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-m", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=scrubbed_environment(os.environ),
                start_new_session=True,
                **self._account,
            )
        return self._child
