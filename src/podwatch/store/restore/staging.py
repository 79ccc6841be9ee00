"""The directories in which what is restored is built, on the file system of its place, and how it gets there: by
renames, over nothing. What is in the way goes to quarantine first, so that `podwatch quarantine` shows it.

Each belongs to the trainer's user and is closed to all others (0700). All work in them is done by descriptors, without
following a link, and with that user's rights: what is restored belongs to that user from its first byte on. Blocking.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import Busy, HostError, IntegrityError
from podwatch.domain.quarantine_index import INDEX, QuarantineIndex
from podwatch.system.open_by_descriptor import is_own_and_guarded, open_or_make
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import STAGING, Identity, PinnedTree
from podwatch.system.rename_places import corners, corners_of, drop_empty, move_aside, reachable
from podwatch.system.rights import applied

LOCK_SECONDS = 5.0
"""The child of a killed restore holds its directories until it has noticed, within milliseconds."""
_PREFIX = "restore-"


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Where one part belongs, and the directory in which it is built. ``shared``: its directory belongs to many steps,
    so its entries are moved there one by one."""

    part: str
    target: Path
    shared: bool
    staging: Path

    @property
    def path(self) -> Path:
        return self.staging / self.part


class StagingArea:
    """``to`` is a directory that the operator chose, None: in place. ``name``: of this save, so that the next restore
    of it continues."""

    def __init__(self, workspace: Workspace, to: Path | None, name: str) -> None:
        self._workspace, self._to, self._name = workspace, to, f"{_PREFIX}{name}"
        self.tree = workspace.tree if to is None else chosen_tree(to)
        self.parts: tuple[StagedPart, ...] = ()
        self.moved: list[str] = []
        """What was in the way."""
        self._number: int | None = None

    @property
    def _first(self) -> Path:
        """The directory that is tried first, and that is locked."""
        return self._workspace.staging if self._to is None else self._to / STAGING

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude a second restore in the same place. Raises Busy, RootReplaced."""
        if self._to is not None:
            self.tree.make(self._to)
        else:
            self._workspace.check()
        end = time.monotonic() + LOCK_SECONDS
        while (descriptor := _lock(self.tree, self._first)) is None:
            if time.monotonic() > end:
                raise Busy("another restore is running here", where=str(self._first), fix="wait for it, or stop it")
            time.sleep(0.05)
        try:
            self._sweep(self._name)
            yield
        finally:
            if self._to is not None:
                with contextlib.suppress(OSError):
                    self.tree.rmdir(self._first)
                self.tree.close()
            os.close(descriptor)

    def prepare(self, targets: Mapping[str, Path], shared: frozenset[str]) -> tuple[StagedPart, ...]:
        """Find for each part a directory from which a rename to its target works. Raises HostError where there is none;
        NotADirectoryError where a link is on the way."""
        found: dict[Path, Path] = {}
        parts = []
        for part, target in targets.items():
            into = target if part in shared else target.parent
            if into not in found:
                homes: tuple[Path, ...] = (self._first, into / STAGING)
                if self._to is None:
                    homes = corners(target, self._workspace, "staging")
                found[into] = reachable(self.tree, homes, self._existing(into))
            parts.append(StagedPart(part, target, part in shared, found[into] / self._name))
        self.parts = tuple(parts)
        return self.parts

    @contextlib.contextmanager
    def opened(self) -> Iterator[dict[str, int]]:
        """By part a descriptor of its directory, made if it does not exist, for the child that fetches."""
        with contextlib.ExitStack() as stack:
            found = {}
            for part in self.parts:
                with self.tree.directory(part.staging, create=True) as above, applied(self.tree.rights):
                    found[part.part] = open_or_make(above, part.part, True, 0o755)
                stack.callback(os.close, found[part.part])
            yield found

    def forget(self) -> None:
        """Remove what was staged: it is damaged, and another save needs the space."""
        for staging in {part.staging for part in self.parts}:
            with contextlib.suppress(OSError):
                self.tree.remove_tree(staging)

    # -- putting it in place

    def place(self, step: int, lineage: str) -> None:
        """Rename every part to its target, then remove what is left, also by an earlier try that was killed. Raises
        OSError, HostError. ``step`` and ``lineage``: for the index of what goes to quarantine."""
        for part in self.parts:
            self._place_part(part, step, lineage)
        self._sweep("")
        for home in {part.staging.parent for part in self.parts} - {self._first}:
            drop_empty(self.tree, home)

    def _place_part(self, part: StagedPart, step: int, lineage: str) -> None:
        if not part.shared:
            self._put(part.path, part.target, step, lineage)
            return
        for entry in self.tree.names(part.path):
            self._put(part.path / entry, part.target / entry, step, lineage)
        self.tree.rmdir(part.path)

    def _put(self, staged: Path, target: Path, step: int, lineage: str) -> None:
        self.tree.make(target.parent)
        if self.tree.lstat(target) is not None:
            if self._to is None:
                self._to_quarantine(target, step, lineage)
            else:
                self._rename_nearby(target)
            self.moved.append(str(target))
        if not self.tree.rename(staged, target):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(staged))
        self.tree.sync(target.parent)

    def _to_quarantine(self, target: Path, step: int, lineage: str) -> None:
        homes = corners(target, self._workspace, "quarantine")
        if self._number is None:
            self._number = free_number(self.tree, corners_of(self._workspace, "quarantine"))
        name = f"{len(self.moved)}-{target.name}"
        path = move_aside(self.tree, target, homes, str(self._number), name).parent / INDEX
        before: tuple[tuple[str, str], ...] = ()
        with contextlib.suppress(OSError, HostError, IntegrityError):
            before = QuarantineIndex.from_bytes(self.tree.read(path, QuarantineIndex.LARGEST)).moves
        # Complete as far as is known: retention keeps it until its successor is safe.
        steps, moves = {step: Completeness.COMPLETE}, (*before, (str(target), name))
        index = QuarantineIndex(self._number, time.time(), step, lineage, steps, moves)
        with contextlib.suppress(OSError):
            self.tree.write(path, index.to_bytes())

    def _rename_nearby(self, target: Path) -> None:
        """To ``<name>.aside``, or the next free name."""
        count = 1
        while True:
            name = f"{target.name}.aside" + ("" if count == 1 else f".{count}")
            try:
                self.tree.rename(target, target.with_name(name))
            except FileExistsError:
                count += 1
            else:
                return

    # -- where

    def _existing(self, into: Path) -> Path:
        """``into``, or its nearest existing ancestor, which is on the same file system: a checkpoint is not to be seen
        before it is whole. Raises NotADirectoryError where a link is on the path: before anything is fetched."""
        roots = (self._to,) if self._to is not None else self._workspace.roots
        while into not in roots:
            if self.tree.is_directory(into):
                return into
            if _exists(self.tree, into):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(into))
            into = into.parent
        self.tree.make(into)
        return into

    def _sweep(self, keep: str) -> None:
        """Remove what restores have left, of all saves but one."""
        homes = corners_of(self._workspace, "staging") if self._to is None else (self._first,)
        for home in homes:
            with contextlib.suppress(OSError):
                for name in self.tree.names(home):
                    if name.startswith(_PREFIX) and name != keep:
                        self.tree.remove_tree(home / name)


def free_number(tree: PinnedTree, homes: Sequence[Path]) -> int:
    """A number above every numbered directory in any of them."""
    numbers = [0]
    for home in homes:
        with contextlib.suppress(FileNotFoundError):
            numbers += [int(name) for name in tree.names(home) if name.isascii() and name.isdecimal()]
    return 1 + max(numbers)


def chosen_tree(to: Path) -> PinnedTree:
    """Of a directory that the operator chose: podwatch works there as its owner. One of podwatch's user that another
    user can have put there is taken for that user's."""
    path = next((p for p in (to, *to.parents) if p.exists()), Path("/"))
    if path == to and path.stat().st_uid in (0, os.geteuid()) and not is_own_and_guarded(to):
        path = to.parent
    return PinnedTree((to,), owner=path.stat().st_uid or None)


def _exists(tree: PinnedTree, path: Path) -> bool:
    try:
        return tree.lstat(path) is not None
    except NotADirectoryError:
        return False  # a link above it: it is found next


def _lock(tree: PinnedTree, directory: Path) -> int | None:
    """An exclusive flock on the directory itself, which leaves no file behind; None while another process has it."""
    try:
        with tree.directory(directory, create=True) as found:
            with contextlib.suppress(OSError):  # a file system without modes
                if os.fstat(found).st_mode & 0o077:  # any user that can read a directory can lock it
                    os.fchmod(found, 0o700)
            descriptor = os.dup(found)
    except FileNotFoundError:
        return None  # the previous owner of the lock has just removed it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if Identity.of(os.fstat(descriptor)) == tree.identity(directory):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
