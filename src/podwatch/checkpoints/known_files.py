"""Records the files of each complete checkpoint: a file that is gone or smaller later is damage, in every layout.

A layout's rule requires what its trainer always writes. It cannot know that a checkpoint had seven files and not four.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from podwatch.checkpoints.layouts.base import PartFiles
from podwatch.checkpoints.reboot_check import Memory
from podwatch.domain.checkpoint import FileEntry

KEY = "checkpoints.ledger"
"""Journal key: {step: {"part/path": [size, mtime_ns]}} of the checkpoints that were complete."""
KEPT = 32
"""Number of checkpoints kept, the highest steps: those that a resume or a publication can still use."""

Files = Mapping[str, tuple[int, int]]
Own = Sequence[tuple[PartFiles, FileEntry]]


class Ledger:
    """Loaded at the first use, written by ``save``."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._sets: dict[int, Files] | None = None
        self._dirty = False

    def lost(self, step: int, own: Own) -> str:
        """What the complete checkpoint of this step had and lacks now, in words; empty where nothing is lost.

        Another save of the same step is no loss: all its files differ.
        """
        before = self._load().get(step)
        if not before:
            return ""
        now = _files(own)
        if not any(now.get(name) == file for name, file in before.items()):
            return ""
        gone = sorted(name for name in before if name not in now)
        smaller = sorted(name for name, (size, _) in before.items() if name in now and now[name][0] < size)
        for names, what in ((gone, "is gone"), (smaller, "is smaller than it was")):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                return f"was complete, but now {PurePosixPath(names[0]).name} {what}{more}"
        return ""

    def note(self, step: int, own: Own) -> None:
        """Record that the checkpoint is complete as it is now."""
        sets, files = self._load(), _files(own)
        if sets.get(step) != files:
            sets[step] = files
            for old in sorted(sets)[:-KEPT]:
                del sets[old]
            self._dirty = True

    def save(self, there: Sequence[int]) -> None:
        """Save what is new, for the steps that are ``there``."""
        sets = self._load()
        for step in set(sets) - set(there):
            del sets[step]
            self._dirty = True
        if self._dirty:
            self._memory.learn(KEY, {str(s): {n: list(f) for n, f in files.items()} for s, files in sets.items()})
            self._dirty = False

    def _load(self) -> dict[int, Files]:
        if self._sets is None:
            self._sets = _from_plain(self._memory.learned(KEY, {}))
        return self._sets


def _files(own: Own) -> Files:
    return {f"{file.part}/{file.path}": (file.size, file.mtime_ns) for _, file in own}


def _from_plain(kept: Any) -> dict[int, Files]:
    """The inverse of the saved form. Invalid entries are dropped: then only the layout's rule judges."""
    try:
        return {
            int(step): {str(name): (int(size), int(mtime)) for name, (size, mtime) in files.items()}
            for step, files in kept.items()
        }
    except (AttributeError, TypeError, ValueError):
        return {}
