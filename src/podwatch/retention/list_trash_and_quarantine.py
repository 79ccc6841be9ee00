"""Trash and quarantine: moves the trainer's paths to the trash, lists both, and measures them and the trainer's
by-products, which are outside checkpoints (docs/disk.md; promises 8 and 9).

A trash entry is called ``<intent id>.<step>.<n>``: the rename is itself the removal's intent, and needs
neither a new directory nor space, so it works on a disk that is 100 % full. ``retention/remove_checkpoints.py`` empties
the trash: before the first removal of a plan, after each one, and at podwatch's start (``sweep_trash``).
"""

import contextlib
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import HostError, IntegrityError
from podwatch.domain.quarantine_index import INDEX, QuarantineIndex
from podwatch.policy.local_retention import QuarantineEntry, SpareEntry
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import Identity, PinnedTree
from podwatch.system.rename_places import corners, corners_of

INDEX_BYTES = 16 << 20
"""Limit of an index: the paths of a quarantine of thousands of entries are a few MiB."""
ENTRIES_PER_LOOK = 20_000
"""A measurement stops after so many directory entries (about 0.2 s); the next one continues there."""
_EVERY_STEP = 1 << 62

SparePaths = Callable[[int], Sequence[tuple[int, Path]]]
"""Of the layout: (step, directory) of by-products below a step, oldest first."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A completed rename: ``name`` is the entry's name in the trash."""

    path: Path
    name: str


def removable(path: Path, workspace: Workspace) -> Path:
    """``path``, if it may be removed: it is below one of the trainer's directories, or an entry of our quarantine.
    Raises HostError."""
    home = path.parent
    kept = home.name == "quarantine" and path.name.isdecimal() and home in corners_of(workspace, "quarantine")
    if kept or workspace.holds(path):
        return path
    raise HostError(
        "podwatch refuses to remove a path outside the configured directories",
        where=str(path),
        fix="configure its directory as output_dir or trainer.checkpoint_dir if it is the trainer's",
    )


def move_to_trash(
    path: Path, workspace: Workspace, trash: Path, name: str, *, expected: Identity | None
) -> Moved | None:
    """Rename ``path`` into ``trash`` as ``name``. A symlink is moved itself, never what it points to.

    None when it is gone already, or is not what ``expected`` says. Raises OSError (EXDEV where output_dir cannot be
    renamed from; ELOOP or ENOTDIR where a symlink is on the way) and HostError.
    """
    tree = workspace.tree
    try:
        moved = tree.rename(path, trash / name, expected=expected)
    except FileExistsError:
        name = f"{name}.{secrets.token_hex(4)}"
        moved = tree.rename(path, trash / name, expected=expected)
    except FileNotFoundError:
        return None  # the directory it was in is gone
    return Moved(path, name) if moved else None


def other_trashes(path: Path, workspace: Workspace) -> tuple[Path, ...]:
    """Where ``path`` may be moved if a rename into podwatch's own trash fails (EXDEV): its root is another volume, or
    it is on a mount below it. In the order to try: beside the root, in it, beside ``path``."""
    if path.parent.name == "quarantine":
        return (path.parent.with_name("trash"),)  # our own, on whichever file system
    return tuple(p for p in corners(path, workspace, "trash") if p != workspace.trash)


def trash_entries(tree: PinnedTree, trash: Path) -> tuple[str, ...]:
    """Names in the trash, oldest intent first; empty where there is no trash."""
    try:
        names = tree.names(trash)
    except FileNotFoundError:
        return ()
    return tuple(sorted(names, key=_by_number))


def quarantine_entries(
    workspace: Workspace,
    *,
    now_wall: float,
    keep_seconds: float,
    verified: int,
) -> tuple[QuarantineEntry, ...]:
    """Everything in quarantine, on every filesystem, oldest first, as each ``index.json`` records it.

    ``verified`` is the newest safe step. A complete checkpoint above it is needed: its new lineage has no verified
    checkpoint beyond it yet (promise 2). An entry without a readable index is always needed. Blocks.
    """
    tree = workspace.tree
    found: list[Path] = []
    for home in corners_of(workspace, "quarantine"):
        with contextlib.suppress(OSError):
            found += [home / name for name in tree.names(home) if name.isascii() and name.isdecimal()]
    entries = []
    for path in sorted((p for p in found if tree.is_directory(p)), key=lambda p: int(p.name)):
        read, device = _index(tree, path), _device(tree, path)
        size, _ = tree.measure(path)
        if read is None:
            entries.append(QuarantineEntry(str(path), -1, size, expired=False, needed=True, device=device))
            continue
        wall, steps = read
        must_stay = any(whole and step > verified for step, whole in steps.items())
        step = max(steps, default=-1)
        old = now_wall - wall >= keep_seconds
        entries.append(QuarantineEntry(str(path), step, size, old, must_stay, device))
    return tuple(entries)


def _device(tree: PinnedTree, path: Path) -> int:
    status = tree.lstat(path)
    return 0 if status is None else status.st_dev


def _index(tree: PinnedTree, path: Path) -> tuple[float, dict[int, bool]] | None:
    """When it was moved to quarantine, and which steps are in it: True for those that are complete."""
    try:
        index = QuarantineIndex.from_bytes(tree.read(path / INDEX, QuarantineIndex.LARGEST).rstrip(b"\0"))
    except (OSError, HostError, IntegrityError):
        return None
    return index.wall, {step: state == Completeness.COMPLETE for step, state in index.steps.items()}


def _by_number(name: str) -> tuple[int, str]:
    head = name.split(".", 1)[0]
    return (int(head) if head.isdigit() else 0, name)


@dataclass(frozen=True, slots=True)
class Found:
    quarantine: tuple[QuarantineEntry, ...] = ()
    spares: tuple[SpareEntry, ...] = ()
    trash_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.trash_bytes + sum(e.bytes for e in self.quarantine) + sum(e.bytes for e in self.spares)


class SetAsideUsage:
    """``look`` blocks, for the removal worker's thread; ``found`` is its last result."""

    def __init__(self, workspace: Workspace, spare_paths: SparePaths, *, keep_seconds: float) -> None:
        self._workspace, self._spare_paths, self._keep_seconds = workspace, spare_paths, keep_seconds
        self._measured: dict[str, tuple[int, int]] = {}
        self.trash = workspace.trash
        self.found = Found()

    def look(self, now_wall: float, verified: int) -> Found:
        """Measure. ``verified`` is the newest safe step: good checkpoints above it are needed."""
        entries = quarantine_entries(
            self._workspace, now_wall=now_wall, keep_seconds=self._keep_seconds, verified=verified
        )
        trash, _ = self._workspace.tree.measure(self.trash)
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
