"""What takes space outside checkpoints: trash, quarantine, the trainer's by-products (docs/disk.md). Everything here
blocks.
"""

import contextlib
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints.layout import Layout
from podwatch.disk.plan import ByProduct, Leftovers, QuarantineEntry
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.errors import HostError, IntegrityError
from podwatch.domain.quarantine_index import INDEX, QuarantineIndex
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree
from podwatch.system.rename_places import corners_of

MOST_ENTRIES = 20_000
"""A measurement stops after so many directory entries (about 0.2 s); the next one continues there."""
_EVERY_STEP = 1 << 62


class Measurements:
    """``measure`` blocks, for the removal worker's thread; ``found`` is its last result."""

    def __init__(self, workspace: Workspace, layout: Layout, *, keep_seconds: float) -> None:
        """``keep_seconds``: how long what was moved to quarantine stays there."""
        self._workspace, self._layout, self._keep_seconds = workspace, layout, keep_seconds
        self._measured: dict[str, tuple[int, int]] = {}
        self.found = Leftovers(trash_path=str(workspace.trash))

    def measure(self, now_wall: float, verified: int, checkpoints: Sequence[CheckpointSet] = ()) -> Leftovers:
        """Measure. ``verified`` is the newest safe step: good checkpoints above it are needed. ``checkpoints``: those
        on this pod."""
        workspace = self._workspace
        entries = quarantine_entries(workspace, now_wall=now_wall, keep_seconds=self._keep_seconds, verified=verified)
        trash, _ = workspace.tree.measure(workspace.trash)
        linked = linked_bytes(workspace.tree, checkpoints)
        self.found = Leftovers(entries, self._by_products(verified), trash, str(workspace.trash), linked)
        return self.found

    def _by_products(self, verified: int) -> tuple[ByProduct, ...]:
        """Oldest first, within the limit. An old directory with unchanged mtime is not walked again; those above
        ``verified`` may grow inside, so they are walked each time."""
        budget = MOST_ENTRIES
        measured: dict[str, tuple[int, int]] = {}
        found: list[ByProduct] = []
        tree = self._workspace.tree
        try:
            paths = self._layout.spare_paths(_EVERY_STEP)
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
                size, seen = tree.measure(path, MOST_ENTRIES)
                budget -= seen
                measured[name] = (status.st_mtime_ns, size)
            else:
                continue  # measured next time, when the others are known
            found.append(ByProduct(name, step, measured[name][1], status.st_mtime))
        self._measured = measured
        return tuple(found)


def trash_entries(tree: PinnedTree, trash: Path) -> tuple[str, ...]:
    """Names in the trash; empty where there is no trash."""
    try:
        return tuple(sorted(tree.names(trash)))
    except FileNotFoundError:
        return ()


def quarantine_entries(
    workspace: Workspace,
    *,
    now_wall: float,
    keep_seconds: float,
    verified: int,
) -> tuple[QuarantineEntry, ...]:
    """Everything in quarantine, on every filesystem, oldest first, as each ``index.json`` records it.

    ``verified`` is the newest safe step. A complete checkpoint above it is needed: its new lineage has no verified
    checkpoint beyond it yet (promise 2). An entry without a readable index is always needed.
    """
    tree = workspace.tree
    found: list[Path] = []
    for home in corners_of(workspace, "quarantine"):
        with contextlib.suppress(OSError):
            found += [home / name for name in tree.names(home) if name.isascii() and name.isdecimal()]
    entries = []
    for path in sorted((p for p in found if tree.is_directory(p)), key=lambda p: int(p.name)):
        status, index = tree.lstat(path), _index(tree, path)
        size, _ = tree.measure(path)
        device = 0 if status is None else status.st_dev
        if index is None:
            entries.append(QuarantineEntry(str(path), -1, size, expired=False, needed=True, device=device))
            continue
        whole = [step for step, state in index.steps.items() if state == Completeness.COMPLETE]
        expired = now_wall - index.wall >= keep_seconds
        needed = any(step > verified for step in whole)
        entries.append(QuarantineEntry(str(path), max(index.steps, default=-1), size, expired, needed, device))
    return tuple(entries)


def _index(tree: PinnedTree, path: Path) -> QuarantineIndex | None:
    try:
        return QuarantineIndex.from_bytes(tree.read(path / INDEX, QuarantineIndex.LARGEST).rstrip(b"\0"))
    except (OSError, HostError, IntegrityError):
        return None


def linked_bytes(tree: PinnedTree, checkpoints: Sequence[CheckpointSet]) -> dict[int, int]:
    """Step -> bytes of files of its checkpoint that have a name outside it, too. A directory that several checkpoints
    share is left out."""
    users = Counter(part.path for one in checkpoints for part in one.parts)
    return {
        one.step: tree.linked_bytes(Path(part.path) for part in one.parts if users[part.path] == 1)
        for one in checkpoints
    }
