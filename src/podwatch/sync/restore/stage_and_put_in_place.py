"""The staging area of a restore: the directory in which a checkpoint is built, accessed by descriptors only, and the
move of a complete checkpoint to its place.

The directory belongs to the trainer's user and is closed to all others (0700). All work in it is done with that user's
rights: what is restored belongs to that user from its first byte on. Everything here blocks.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import Busy, HostError, IntegrityError
from podwatch.domain.quarantine_index import INDEX, QuarantineIndex
from podwatch.system.files import DIRECTORY_FLAGS, sync_descriptor
from podwatch.system.open_by_descriptor import is_own_and_guarded, open_or_make
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import STAGING, Identity, Pin, PinnedTree, open_pinned
from podwatch.system.rename_places import corners, corners_of, drop_empty, move_aside, reachable
from podwatch.system.rights import Rights


def open_staging(pins: Sequence[Pin], path: Path, rights: Rights | None) -> int:
    """A descriptor of the directory, made if it does not exist. Raises HostError outside of ``pins``, OSError."""
    above = open_pinned(pins, str(path.parent), rights)
    try:
        staging = open_or_make(above, path.name, True, 0o700)
    finally:
        os.close(above)
    _close_to_others(staging)
    return staging


def strip(directory: int, wanted: Collection[str], inside: str = "") -> None:
    """Remove everything that is not ``wanted``, and everything except plain files with one name."""
    for name in os.listdir(directory):
        relative = inside + name
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            below = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
            try:
                strip(below, wanted, relative + "/")
            finally:
                os.close(below)
            if relative in wanted:
                os.rmdir(name, dir_fd=directory)  # a file belongs here; a non-empty directory stops the restore
        elif not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or relative not in wanted:
            os.unlink(name, dir_fd=directory)


def allocated(directory: int) -> int:
    """Bytes on disk of everything in it."""
    total = 0
    for name in os.listdir(directory):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        total += found.st_blocks * 512
        if stat.S_ISDIR(found.st_mode):
            below = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
            try:
                total += allocated(below)
            finally:
                os.close(below)
    return total


def sync_directories(directory: int) -> None:
    """This one and all below it, innermost first."""
    for name in os.listdir(directory):
        if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            continue
        below = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
        try:
            sync_directories(below)
        finally:
            os.close(below)
    sync_descriptor(directory)


# -- move to the place -----------------------------------------------------------------------------------------------
# By renames, overwriting nothing. The staging directory is on the filesystem of the checkpoint's place, found out by
# trying. Existing files that differ are moved to quarantine first, as in a recovery, so that ``podwatch quarantine``
# shows them and can return them. All work is on pinned directories: no link is followed.

LOCK_SECONDS = 5.0
"""Seconds: the child of a killed restore holds the lock until it has noticed, within milliseconds."""
_PREFIX = "restore-"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one part belongs. ``shared``: its directory belongs to many steps, so its entries are moved there one by
    one. ``home`` is the directory of ours from which a rename works."""

    part: str
    target: Path
    shared: bool
    home: Path


class StagingArea:
    """``to`` is a directory that the operator chose, None: in place."""

    def __init__(self, workspace: Workspace, to: Path | None) -> None:
        self._workspace, self._to = workspace, to
        self.tree = workspace.tree if to is None else chosen_tree(to)
        """Directories to which the fetching child may also write, and the rights that it has there."""
        self._number: int | None = None
        self.set_aside: list[str] = []
        """What was in the way and is now in quarantine."""

    @property
    def _first(self) -> Path:
        """The home that is tried first, and that is locked."""
        return self._workspace.staging if self._to is None else self._to / STAGING

    @contextlib.contextmanager
    def alone(self) -> Iterator[int]:
        """Exclude a second restore in the same place: yields a descriptor that holds the lock, which the child holds
        too. Raises Busy."""
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
            yield descriptor
        finally:
            if self._to is not None:
                with contextlib.suppress(OSError):
                    self.tree.rmdir(self._first)
                self.tree.close()
            os.close(descriptor)

    def homes(self, targets: Mapping[str, Path], shared: frozenset[str]) -> dict[str, Place]:
        """The staging place of each part. Raises HostError where no rename to its place works."""
        places = {}
        found: dict[Path, Path] = {}
        for part, target in sorted(targets.items()):
            into = target if part in shared else target.parent
            if into not in found:
                if self._to is None:
                    candidates = corners(target, self._workspace, "staging")
                else:
                    candidates = (self._first, into / STAGING)
                found[into] = reachable(self.tree, candidates, self._standing(into))
            places[part] = Place(part, target, part in shared, found[into])
        return places

    def _standing(self, into: Path) -> Path:
        """``into``, or its nearest existing ancestor, which is on the same filesystem. An incomplete checkpoint must
        not be visible. Raises NotADirectoryError where a link is on the path: before anything is fetched."""
        roots = (self._to,) if self._to is not None else self._workspace.roots
        while into not in roots:
            if self.tree.is_directory(into):
                return into
            if _is_there(self.tree, into):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(into))
            into = into.parent
        self.tree.make(into)
        return into

    def forget_others(self, keep: str) -> None:
        """Remove what earlier restores of other checkpoints left: this one needs the space."""
        homes = corners_of(self._workspace, "staging") if self._to is None else (self._first,)
        for home in homes:
            with contextlib.suppress(OSError):
                for name in self.tree.names(home):
                    if name.startswith(_PREFIX) and name != keep:
                        self.tree.remove_tree(home / name)

    def forget(self, places: Mapping[str, Place], name: str) -> None:
        for home in {place.home for place in places.values()}:
            with contextlib.suppress(OSError):
                self.tree.remove_tree(home / name)

    # -- putting it there ---------------------------------------------------------------------------------------------

    def put(self, place: Place, name: str, step: int, lineage: str) -> None:
        """Rename ``<home>/<name>/<part>`` to its place. Raises OSError."""
        staged = place.home / name / place.part
        if not place.shared:
            self._put(staged, place.target, step, lineage)
            return
        for entry in self.tree.names(staged):
            self._put(staged / entry, place.target / entry, step, lineage)
        self.tree.rmdir(staged)

    def clean(self, places: Mapping[str, Place], name: str) -> None:
        """Clean up after everything is in place."""
        for home in {place.home for place in places.values()}:
            with contextlib.suppress(OSError):
                self.tree.rmdir(home / name)
            if home != self._first:
                drop_empty(self.tree, home)

    def _put(self, staged: Path, target: Path, step: int, lineage: str) -> None:
        self.tree.make(target.parent)
        if self.tree.lstat(target) is not None:
            self._set_aside(target, step, lineage)
        if not self.tree.rename(staged, target):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(staged))
        self.tree.sync(target.parent)

    def _set_aside(self, target: Path, step: int, lineage: str) -> None:
        if self._to is not None:
            self._rename_beside(target)
        else:
            homes = corners(target, self._workspace, "quarantine")
            if self._number is None:
                self._number = free_number(self.tree, corners_of(self._workspace, "quarantine"))
            name = f"{len(self.set_aside)}-{target.name}"
            aside = move_aside(self.tree, target, homes, str(self._number), name)
            # Complete as far as we know: retention keeps it until its successor is safe.
            path, before = aside.parent / INDEX, ()  # type: tuple[Path, tuple[tuple[str, str], ...]]
            with contextlib.suppress(OSError, HostError, IntegrityError):
                before = QuarantineIndex.from_bytes(self.tree.read(path, QuarantineIndex.LARGEST)).moves
            index = QuarantineIndex(
                self._number,
                time.time(),
                step,
                lineage,
                {step: Completeness.COMPLETE},
                (*before, (str(target), name)),
            )
            with contextlib.suppress(OSError):
                self.tree.write(path, index.to_bytes())
        self.set_aside.append(str(target))

    def _rename_beside(self, target: Path) -> None:
        """Rename to ``<name>.aside``, or the next free name."""
        count = 1
        while True:
            name = f"{target.name}.aside" + ("" if count == 1 else f".{count}")
            try:
                self.tree.rename(target, target.with_name(name))
            except FileExistsError:
                count += 1
            else:
                return


def chosen_tree(to: Path) -> PinnedTree:
    """Of a directory that the operator chose: podwatch works there as its owner. One of podwatch's user that another
    user can have put there is taken for that user's."""
    path = next((p for p in (to, *to.parents) if p.exists()), Path("/"))
    if path == to and path.stat().st_uid in (0, os.geteuid()) and not is_own_and_guarded(to):
        path = to.parent
    return PinnedTree((to,), owner=path.stat().st_uid or None)


def free_number(tree: PinnedTree, homes: Sequence[Path]) -> int:
    """A number above every numbered directory in any of them."""
    numbers = [0]
    for home in homes:
        with contextlib.suppress(FileNotFoundError):
            numbers += [int(name) for name in tree.names(home) if name.isascii() and name.isdecimal()]
    return 1 + max(numbers)


def _close_to_others(directory: int) -> None:
    with contextlib.suppress(OSError):  # a file system without modes
        if os.fstat(directory).st_mode & 0o077:
            os.fchmod(directory, 0o700)


def _is_there(tree: PinnedTree, path: Path) -> bool:
    try:
        return tree.lstat(path) is not None
    except NotADirectoryError:
        return False  # a link above it: it is found next


def _lock(tree: PinnedTree, directory: Path) -> int | None:
    """An exclusive flock on the directory itself; None while another process has it. It leaves no file behind."""
    try:
        with tree.directory(directory, create=True) as found:
            _close_to_others(found)  # any user that can read a directory can lock it
            descriptor = os.dup(found)
    except FileNotFoundError:
        return None  # the previous holder has just removed it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if Identity.of(os.fstat(descriptor)) == tree.identity(directory):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
