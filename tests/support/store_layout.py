"""A store in a directory, read as its documentation describes it, with nothing but files."""

import json
from pathlib import Path
from typing import Any

from tests.support.pointer_check import Found, PointerCheck, pointers


class Files:
    """The objects of a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def newest(self, key: str) -> Found | None:
        path = self.root / key
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return Found(key, found.st_size, f"{key} {found.st_ino} {found.st_mtime_ns}", path)

    def names(self) -> list[str]:
        documents = [*self.root.glob("*/podwatch/latest.json"), *self.root.glob("*/podwatch/pointers/*.json")]
        return [str(path.relative_to(self.root)) for path in documents]


def newest_pointer(store: Path) -> dict[str, Any]:
    """The highest pointer of the only run in the store; empty if there is none. ``latest.json`` is a copy, which can be
    one save behind."""
    keys = list(pointers(name for name in Files(store).names() if "/pointers/" in name))
    assert len(keys) < 2, keys
    document: dict[str, Any] = json.loads((store / keys[0]).read_text()) if keys else {}
    return document


def violations(store: Path, run_id: str) -> list[str]:
    """Promise 1 at this moment: no pointer, or everything behind it is there and whole."""
    files = Files(store)
    check = PointerCheck(files)
    names = [name for name in files.names() if name.startswith(f"{run_id}/")]
    return [problem for key in pointers(names) if (problem := check.problem(key))]
