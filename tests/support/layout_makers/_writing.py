"""The pieces of ``Script`` as lists of operations, for makers that put several writers together."""

from pathlib import Path
from typing import Any

from tests.support.layout_makers import Operation, Script


def write(path: Path, data: bytes) -> list[Operation]:
    script = Script()
    script.write(path, data)
    return script.operations


def write_json(path: Path, value: Any) -> list[Operation]:
    script = Script()
    script.json(path, value)
    return script.operations


def mkdir(path: Path) -> list[Operation]:
    return [lambda: path.mkdir(parents=True, exist_ok=True)]


def rename(path: Path, target: Path) -> list[Operation]:
    def done() -> None:
        path.rename(target)

    return [done]


def dcp(directory: Path, ranks: int = 1) -> list[Operation]:
    script = Script()
    script.dcp(directory, ranks=ranks)
    return script.operations
