"""Where a fetched set is built up and how it gets to its place: by renames, and nothing is written over.

The directory it is built in is on the filesystem where it belongs, found out by trying. What is there and differs is
moved to quarantine first, as a recovery does it, so that ``podwatch quarantine`` shows it and can return it.

Everything works on pinned directories: no link is followed, and a directory of the trainer's is made with its user's
rights, never made by root and given away by its name.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import Busy, HostError
from podwatch.system.aside import corners, corners_of, drop_empty, move_aside, reachable
from podwatch.system.pinned import STAGING, Identity, PinnedTree
from podwatch.system.workspace import Workspace

LOCK_SECONDS = 5.0
"""A restore whose process was killed holds the lock until its child has noticed, within milliseconds."""
_PREFIX = "restore-"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one part belongs. ``shared``: its directory belongs to many steps, so its entries are put there one by
    one. ``home`` is the directory of ours from which a rename gets there."""

    part: str
    target: Path
    shared: bool
    home: Path


class Placer:
    """``to`` is a directory of the operator's choice, None: in place. ``owner`` is (uid, gid) of what is restored, None
    for our own."""

    def __init__(self, workspace: Workspace, to: Path | None, owner: tuple[int, int] | None) -> None:
        self._workspace, self._to = workspace, to
        self._uid = None if owner is None else owner[0]
        self.tree = workspace.tree if to is None else PinnedTree((to,), owner=self._uid)
        """What the child that fetches may write to as well."""
        self._number: int | None = None
        self.set_aside: list[str] = []
        """What was in the way and is in quarantine now."""

    @property
    def _first(self) -> Path:
        """The home that is tried first, and that is locked."""
        return self._workspace.staging if self._to is None else self._to / STAGING

    @contextlib.contextmanager
    def alone(self) -> Iterator[int]:
        """No two restores at once build up in the same place: yields a descriptor that holds the lock, for the child to
        hold, too. Raises Busy."""
        if self._to is not None:
            self.tree.make(self._to, owner=self._uid)
        else:
            self._workspace.check()
        end = time.monotonic() + LOCK_SECONDS
        while (descriptor := _lock(self.tree, self._first)) is None:
            if time.monotonic() > end:
                raise Busy("another restore is at work here", where=str(self._first), fix="wait for it, or stop it")
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
        """Where each part is built up. Raises HostError where nothing can be renamed to its place."""
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
        """``into``, or the nearest directory above it that exists: what is made below that is on the same filesystem.
        Nothing of a set is to be seen before it is whole. Raises NotADirectoryError where a link is on the way: before
        anything is fetched."""
        roots = (self._to,) if self._to is not None else self._workspace.roots
        while into not in roots:
            if self.tree.is_directory(into):
                return into
            if _is_there(self.tree, into):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(into))
            into = into.parent
        self.tree.make(into, owner=self._uid)
        return into

    def forget_others(self, keep: str) -> None:
        """What earlier restores of other saves have left takes the room that this one needs."""
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
        """Rename what was built up in ``<home>/<name>/<part>`` to its place. Raises OSError."""
        staged = place.home / name / place.part
        if not place.shared:
            self._put(staged, place.target, step, lineage)
            return
        for entry in self.tree.names(staged):
            self._put(staged / entry, place.target / entry, step, lineage)
        self.tree.rmdir(staged)

    def clean(self, places: Mapping[str, Place], name: str) -> None:
        """All of it is in place."""
        for home in {place.home for place in places.values()}:
            with contextlib.suppress(OSError):
                self.tree.rmdir(home / name)
            if home != self._first:
                drop_empty(self.tree, home)

    def _put(self, staged: Path, target: Path, step: int, lineage: str) -> None:
        self.tree.make(target.parent, owner=self._uid)
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
            # Complete as far as we know: what judges later what may go keeps it until its successor is safe.
            index = {
                "number": self._number,
                "step": step,
                "lineage": lineage,
                "wall": time.time(),
                "steps": {str(step): str(Completeness.COMPLETE)},
                "moves": [{"from": str(target), "to": name}],
            }
            path = aside.parent / "index.json"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, HostError):
                index["moves"] = [*json.loads(self.tree.read_ours(path))["moves"], *index["moves"]]  # type: ignore[misc]
            with contextlib.suppress(OSError):
                self.tree.write(path, (json.dumps(index, indent=1) + "\n").encode())
        self.set_aside.append(str(target))

    def _rename_beside(self, target: Path) -> None:
        """To ``<name>.aside``, or the next name that is free."""
        count = 1
        while True:
            name = f"{target.name}.aside" + ("" if count == 1 else f".{count}")
            try:
                self.tree.rename(target, target.with_name(name))
            except FileExistsError:
                count += 1
            else:
                return


def free_number(tree: PinnedTree, homes: Sequence[Path]) -> int:
    """Above every numbered directory in any of them."""
    numbers = [0]
    for home in homes:
        with contextlib.suppress(FileNotFoundError):
            numbers += [int(name) for name in tree.names(home) if name.isascii() and name.isdecimal()]
    return 1 + max(numbers)


def _is_there(tree: PinnedTree, path: Path) -> bool:
    try:
        return tree.lstat(path) is not None
    except NotADirectoryError:
        return False  # a link above it: that one is found next


def _lock(tree: PinnedTree, directory: Path) -> int | None:
    """An exclusive flock on the directory itself; None while another process has it. Nothing is left behind by it."""
    try:
        with tree.directory(directory, create=True) as found:
            descriptor = os.dup(found)
    except FileNotFoundError:
        return None  # the one before has just removed it
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)  # whoever can read a directory can lock it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if Identity.of(os.fstat(descriptor)) == tree.identity(directory):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
