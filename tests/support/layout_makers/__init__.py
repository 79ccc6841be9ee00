"""Checkpoints of many trainers as their writers leave them, one file operation at a time and in the writer's order.

Every maker is ``operations(output_dir, step) -> list of callables``: doing the first n of them is a trainer that was
killed, or is looked at, after operation n. File contents are structurally real (torch zip, safetensors, DCP).
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.checkpoints import dcp_files, torch_zip_bytes

Operation = Callable[[], None]
Maker = Callable[[Path, int], list[Operation]]


class Script:
    """Collects operations. Nothing is done before they are called."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def do(self, operation: Operation) -> None:
        self.operations.append(operation)

    def write(self, path: Path, data: bytes | str) -> None:
        """Open (and truncate), half of it, the rest: three moments at which a writer can die."""
        raw = data.encode() if isinstance(data, str) else data

        def opened() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")

        def put(part: bytes) -> None:
            with path.open("ab") as file:
                file.write(part)

        self.do(opened)
        if len(raw) > 1:
            self.do(lambda: put(raw[: len(raw) // 2]))
        if raw:
            self.do(lambda: put(raw[len(raw) // 2 if len(raw) > 1 else 0 :]))

    def replace(self, path: Path, data: bytes | str) -> None:
        """A temporary file, and a rename over the old one."""
        tmp = path.with_name(path.name + ".tmp")
        self.write(tmp, data)
        self.do(lambda: _rename(tmp, path))

    def json(self, path: Path, value: Any) -> None:
        self.write(path, json.dumps(value))

    def torch(self, path: Path, value: Any = None, size: int = 256) -> None:
        self.write(path, torch_zip_bytes({"state": {}} if value is None else value, (os.urandom(size),)))

    def dcp(self, directory: Path, *, ranks: int = 2, keys: Sequence[str] = ()) -> None:
        """``dcp.save``: shards, ``.metadata.tmp``, remove the old ``.metadata``, rename."""
        files = dcp_files(600, ranks, "", records=1, keys=keys)
        index = files.pop(".metadata")
        for name, data in files.items():
            self.write(directory / name, data)
        self.write(directory / ".metadata.tmp", index)
        self.do(lambda: (directory / ".metadata").unlink(missing_ok=True))
        self.do(lambda: _rename(directory / ".metadata.tmp", directory / ".metadata"))


def _rename(source: Path, target: Path) -> None:
    source.replace(target)


def run(operations: Sequence[Operation], count: int | None = None) -> None:
    for operation in operations[:count]:
        operation()
