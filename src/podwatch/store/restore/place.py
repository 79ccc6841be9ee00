"""Puts a checkpoint that is whole in staging where the trainer looks for it: by renames, over nothing.

What is in the way is moved to quarantine first, as in a recovery, so that `podwatch quarantine` shows it and can return
it. All work is on pinned directories: no link is followed. Blocking.
"""

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import HostError, IntegrityError
from podwatch.domain.quarantine_index import INDEX, QuarantineIndex
from podwatch.store.restore.staging import StagedPart
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree
from podwatch.system.rename_places import corners, corners_of, move_aside


class Placing:
    """Of one save. ``in_place``: not below a directory that the operator chose."""

    def __init__(self, workspace: Workspace, tree: PinnedTree, step: int, lineage: str, *, in_place: bool) -> None:
        self._workspace, self._tree, self._in_place = workspace, tree, in_place
        self._step, self._lineage = step, lineage
        self._number: int | None = None
        self.moved: list[str] = []
        """What was in the way."""

    def put(self, part: StagedPart) -> None:
        """Rename it to its target. Raises OSError, HostError."""
        if not part.shared:
            self._put(part.path, part.target)
            return
        for entry in self._tree.names(part.path):
            self._put(part.path / entry, part.target / entry)
        self._tree.rmdir(part.path)

    def _put(self, staged: Path, target: Path) -> None:
        self._tree.make(target.parent)
        if self._tree.lstat(target) is not None:
            self._move_away(target)
        if not self._tree.rename(staged, target):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(staged))
        self._tree.sync(target.parent)

    def _move_away(self, target: Path) -> None:
        if self._in_place:
            self._to_quarantine(target)
        else:
            self._rename_nearby(target)
        self.moved.append(str(target))

    def _to_quarantine(self, target: Path) -> None:
        homes = corners(target, self._workspace, "quarantine")
        if self._number is None:
            self._number = free_number(self._tree, corners_of(self._workspace, "quarantine"))
        name = f"{len(self.moved)}-{target.name}"
        path = move_aside(self._tree, target, homes, str(self._number), name).parent / INDEX
        before: tuple[tuple[str, str], ...] = ()
        with contextlib.suppress(OSError, HostError, IntegrityError):
            before = QuarantineIndex.from_bytes(self._tree.read(path, QuarantineIndex.LARGEST)).moves
        # Complete as far as is known: retention keeps it until its successor is safe.
        steps, moves = {self._step: Completeness.COMPLETE}, (*before, (str(target), name))
        index = QuarantineIndex(self._number, time.time(), self._step, self._lineage, steps, moves)
        with contextlib.suppress(OSError):
            self._tree.write(path, index.to_bytes())

    def _rename_nearby(self, target: Path) -> None:
        """To ``<name>.aside``, or the next free name."""
        count = 1
        while True:
            name = f"{target.name}.aside" + ("" if count == 1 else f".{count}")
            try:
                self._tree.rename(target, target.with_name(name))
            except FileExistsError:
                count += 1
            else:
                return


def free_number(tree: PinnedTree, homes: Sequence[Path]) -> int:
    """A number above every numbered directory in any of them."""
    numbers = [0]
    for home in homes:
        with contextlib.suppress(FileNotFoundError):
            numbers += [int(name) for name in tree.names(home) if name.isascii() and name.isdecimal()]
    return 1 + max(numbers)
