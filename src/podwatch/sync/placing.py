"""Where a fetched set is built up and how it gets to its place: by renames, and nothing is written over.

The directory it is built in lies on the filesystem where it belongs, found out by trying. What is there and differs is
set aside first, as a recovery does it, so that ``podwatch quarantine`` shows it and can return it.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import Busy
from podwatch.system.aside import corners, corners_of, drop_empty, move_aside, reachable
from podwatch.system.files import atomic_write, fsync_dir, remove_tree, rename_noreplace
from podwatch.system.workspace import Workspace

LOCK_SECONDS = 5.0
"""A restore whose process was killed holds the lock until its child has noticed, within milliseconds."""
STAGING = ".podwatch-staging"
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
    """``to`` is a person's directory, None: in place. ``roots`` are configured directories beside output_dir."""

    def __init__(
        self, workspace: Workspace, roots: Sequence[Path], to: Path | None, owner: tuple[int, int] | None
    ) -> None:
        self._workspace, self._roots, self._to, self._owner = workspace, tuple(roots), to, owner
        self._number: int | None = None
        self.set_aside: list[str] = []
        """What was in the way and lies in quarantine now."""

    @property
    def _first(self) -> Path:
        """The home that is tried first, and that is locked."""
        return self._workspace.staging if self._to is None else self._to / STAGING

    @contextlib.contextmanager
    def alone(self) -> Iterator[int]:
        """No two restores at once build up in the same place: yields a descriptor that holds the lock, for the child to
        hold, too. Raises Busy."""
        if self._to is not None:
            make_directories(self._to, self._owner)
        end = time.monotonic() + LOCK_SECONDS
        while (descriptor := _lock(self._first)) is None:
            if time.monotonic() > end:
                raise Busy("another restore is at work here", where=str(self._first), fix="wait for it, or stop it")
            time.sleep(0.05)
        try:
            yield descriptor
        finally:
            if self._to is not None:
                with contextlib.suppress(OSError):
                    self._first.rmdir()
            os.close(descriptor)

    def homes(self, targets: Mapping[str, Path], shared: frozenset[str]) -> dict[str, Place]:
        """Where each part is built up. Raises HostError where nothing can be renamed to its place."""
        places = {}
        found: dict[Path, Path] = {}
        for part, target in sorted(targets.items()):
            into = target if part in shared else target.parent
            if into not in found:
                if self._to is None:
                    candidates = corners(target, self._workspace, self._roots, "staging")
                else:
                    candidates = (self._first, into / STAGING)
                found[into] = reachable(candidates, into)
            places[part] = Place(part, target, part in shared, found[into])
        return places

    def forget_others(self, keep: str) -> None:
        """What earlier restores of other saves have left takes the room that this one needs."""
        homes = corners_of(self._workspace, self._roots, "staging") if self._to is None else (self._first,)
        for home in homes:
            with contextlib.suppress(OSError):
                for path in home.iterdir():
                    if path.name.startswith(_PREFIX) and path.name != keep:
                        remove_tree(home, path.name)

    def forget(self, places: Mapping[str, Place], name: str) -> None:
        for home in {place.home for place in places.values()}:
            with contextlib.suppress(OSError):
                remove_tree(home, name)

    # -- putting it there ---------------------------------------------------------------------------------------------

    def put(self, place: Place, name: str, step: int, lineage: str) -> None:
        """Rename what was built up in ``<home>/<name>/<part>`` to its place. Raises OSError."""
        staged = place.home / name / place.part
        if not place.shared:
            self._put(staged, place.target, step, lineage)
            return
        for entry in sorted(staged.iterdir()):
            self._put(entry, place.target / entry.name, step, lineage)
        staged.rmdir()

    def clean(self, places: Mapping[str, Place], name: str) -> None:
        """All of it is in place."""
        for home in {place.home for place in places.values()}:
            with contextlib.suppress(OSError):
                (home / name).rmdir()
            if home != self._first:
                drop_empty(home)

    def _put(self, staged: Path, target: Path, step: int, lineage: str) -> None:
        make_directories(target.parent, self._owner)
        if os.path.lexists(target):
            self._set_aside(target, step, lineage)
        rename_noreplace(staged, target)
        fsync_dir(target.parent)

    def _set_aside(self, target: Path, step: int, lineage: str) -> None:
        if self._to is not None:
            rename_noreplace(target, _free_name(target.with_name(f"{target.name}.aside")))
        else:
            homes = corners(target, self._workspace, self._roots, "quarantine")
            known = corners_of(self._workspace, self._roots, "quarantine")
            if self._number is None:
                self._number = free_number(known)
            name = f"{len(self.set_aside)}-{target.name}"
            aside = move_aside(target, homes, str(self._number), name)
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
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                index["moves"] = [*json.loads(path.read_bytes())["moves"], *index["moves"]]  # type: ignore[misc]
            with contextlib.suppress(OSError):
                atomic_write(path, json.dumps(index, indent=1) + "\n", 0o644)
        self.set_aside.append(str(target))


def free_number(homes: Sequence[Path]) -> int:
    """Above every numbered directory in any of them."""
    numbers = [0]
    for home in homes:
        with contextlib.suppress(FileNotFoundError):
            numbers += [int(p.name) for p in home.iterdir() if p.name.isdecimal()]
    return 1 + max(numbers)


def make_directories(directory: Path, owner: tuple[int, int] | None) -> None:
    if directory.is_dir():
        return
    make_directories(directory.parent, owner)
    directory.mkdir(exist_ok=True)
    if owner is not None:
        os.chown(directory, *owner)


def _lock(directory: Path) -> int | None:
    """An exclusive flock on the directory itself; None while somebody else has it. Nothing is left behind by it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # the one before has just removed it
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)  # whoever can read a directory can lock it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), directory.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _free_name(path: Path) -> Path:
    name, count = path, 1
    while os.path.lexists(name):
        count += 1
        name = path.with_name(f"{path.name}.{count}")
    return name
