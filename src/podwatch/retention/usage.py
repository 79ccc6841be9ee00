"""Measures what is outside checkpoints: trash, quarantine, and the trainer's by-products (docs/disk.md)."""

import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.errors import HostError
from podwatch.policy.retention import QuarantineEntry, SpareEntry
from podwatch.retention.trash import quarantine_entries
from podwatch.system.workspace import Workspace

ENTRIES_PER_LOOK = 20_000
"""A measurement stops after so many directory entries (about 0.2 s); the next one continues there."""
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


class SetAsideUsage:
    """``look`` blocks, for the removal worker's thread; ``found`` is its last result.

    ``spare_paths`` is the layout's: (step, directory) below a step, oldest first.
    """

    def __init__(self, workspace: Workspace, spare_paths: SparePaths, *, keep_seconds: float) -> None:
        self._workspace, self._spare_paths, self._keep_seconds = workspace, spare_paths, keep_seconds
        self._measured: dict[str, tuple[int, int]] = {}
        self.found = Found()

    def look(self, now_wall: float, verified: int) -> Found:
        """Measure. ``verified`` is the newest safe step: good checkpoints above it are needed."""
        entries = quarantine_entries(
            self._workspace,
            now_wall=now_wall,
            keep_seconds=self._keep_seconds,
            needed=lambda step: step > verified,
        )
        trash, _ = self._workspace.tree.measure(self._workspace.trash)
        self.found = Found(entries, self._spares(verified), trash)
        return self.found

    def _spares(self, verified: int) -> tuple[SpareEntry, ...]:
        """Oldest first, within the limit. An old directory with unchanged mtime is not walked again; those above
        ``verified`` may grow inside, so they are walked each time."""
        budget = ENTRIES_PER_LOOK
        measured: dict[str, tuple[int, int]] = {}
        spares: list[SpareEntry] = []
        tree = self._workspace.tree
        try:
            paths = self._spare_paths(_EVERY_STEP)
        except OSError:
            return ()
        for step, path in paths:
            try:
                status = tree.lstat(path)
            except (OSError, HostError):
                continue
            if status is None or not stat.S_ISDIR(status.st_mode):
                continue
            name = str(path)
            known = self._measured.get(name)
            if known is not None and known[0] == status.st_mtime_ns and step <= verified:
                measured[name] = known
            elif budget > 0:
                size, seen = tree.measure(path, ENTRIES_PER_LOOK)
                budget -= seen
                measured[name] = (status.st_mtime_ns, size)
            else:
                continue  # measured next time, when the others are cached
            spares.append(SpareEntry(name, step, measured[name][1], status.st_mtime))
        self._measured = measured
        return tuple(spares)
