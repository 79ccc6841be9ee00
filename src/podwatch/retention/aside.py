"""How much lies where no checkpoint is: trash, quarantine, and the trainer's by-products (DESIGN section 6)."""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.judgement.retention import QuarantineEntry, SpareEntry
from podwatch.retention.trash import quarantine_entries, tree_bytes
from podwatch.system.workspace import Workspace

ENTRIES_PER_LOOK = 20_000
"""A look stops counting after so many directory entries (about 0.2 s) and goes on at the next one."""
_EVERY_STEP = 1 << 62

SparePaths = Callable[[int], Sequence[tuple[int, Path]]]


@dataclass(frozen=True, slots=True)
class Found:
    quarantine: tuple[QuarantineEntry, ...] = ()
    spares: tuple[SpareEntry, ...] = ()
    trash_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.trash_bytes + sum(e.bytes for e in self.quarantine) + sum(e.bytes for e in self.spares)


class Aside:
    """``look`` blocks and belongs into the removal worker; ``found`` is what it saw last.

    ``spare_paths`` is the layout's: (step, directory) below a step, oldest first. ``roots`` are configured directories
    beside output_dir, which may lie on other file systems and have a quarantine of their own.
    """

    def __init__(
        self, workspace: Workspace, spare_paths: SparePaths, *, keep_seconds: float, roots: Sequence[Path] = ()
    ) -> None:
        self._workspace, self._spare_paths, self._keep_seconds = workspace, spare_paths, keep_seconds
        self._roots = tuple(roots)
        self._measured: dict[str, tuple[int, int]] = {}
        self.found = Found()

    def look(self, now_wall: float, verified: int) -> Found:
        """Measure. ``verified`` is the newest step that is safe: good sets above it are needed."""
        entries = quarantine_entries(
            self._workspace,
            now_wall=now_wall,
            keep_seconds=self._keep_seconds,
            needed=lambda step: step > verified,
            roots=self._roots,
        )
        self.found = Found(entries, self._spares(verified), tree_bytes(self._workspace.trash))
        return self.found

    def _spares(self, verified: int) -> tuple[SpareEntry, ...]:
        """Oldest first, as far as the look's limit goes. An old directory whose mtime has not changed is not walked
        again; those above ``verified`` may grow inside, so they are each time."""
        budget = ENTRIES_PER_LOOK
        measured: dict[str, tuple[int, int]] = {}
        spares: list[SpareEntry] = []
        try:
            paths = self._spare_paths(_EVERY_STEP)
        except OSError:
            return ()
        for step, path in paths:
            try:
                status = path.lstat()
            except OSError:
                continue
            if not stat.S_ISDIR(status.st_mode):
                continue
            name = str(path)
            known = self._measured.get(name)
            if known is not None and known[0] == status.st_mtime_ns and step <= verified:
                measured[name] = known
            elif budget > 0:
                size, seen = _walk(name, status.st_blocks * 512)
                budget -= seen
                measured[name] = (status.st_mtime_ns, size)
            else:
                continue  # at the next look, which has the others in its memory
            spares.append(SpareEntry(name, step, measured[name][1], status.st_mtime))
        self._measured = measured
        return tuple(spares)


def _walk(path: str, size: int) -> tuple[int, int]:
    """(bytes on disk, entries seen) below ``path``; of a directory beyond ENTRIES_PER_LOOK it is what was counted, a
    lower bound. Follows no symlink."""
    seen, todo = 0, [path]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    if seen >= ENTRIES_PER_LOOK:
                        return size, seen
                    seen += 1
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue  # gone, or not ours to see: what was counted stands
    return size, seen
