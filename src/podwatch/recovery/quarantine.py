"""Quarantine: move away what is ahead of the step of a start. Moving is a rename; nothing is deleted, and everything
can be returned.

The index holds every pair of paths before the first rename, so after a crash the same moves are simply run again: a
missing source was already moved. It is called ``moving.json`` until all are done, then ``index.json``, for the operator
and for ``podwatch quarantine return``.

The paths of one checkpoint can be on several file systems. Each path goes into the quarantine of its own file system
(system/rename_places.py), under the same number; the main directory, beside output_dir, has the index of all.

On a full disk renames work and mkdir does not, so a spare directory with a preallocated index is kept ready.
"""

import contextlib
import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podwatch.domain.errors import HostError, IntegrityError, PermissionDenied
from podwatch.domain.quarantine_index import INDEX, MOVING, QuarantineIndex
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree, RootReplaced
from podwatch.system.rename_places import corners, corners_of, drop_empty, move_aside

SPARE = ".spare"
SPARE_INDEX_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Entry:
    """One quarantine. ``paths``: its directories, one for each file system, the main one first. ``index``: None where
    it cannot be used; ``problem`` then says why."""

    id: int
    paths: tuple[Path, ...]
    index: QuarantineIndex | None = None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """As `podwatch quarantine list --json` has it."""
        found: dict[str, Any] = {"moves": []}
        if self.index is not None:
            index = self.index.to_json()
            found = {name: index[name] for name in ("number", "step", "lineage", "wall", "steps")}
            found["moves"] = [{"from": source, "to": name} for source, name in self.index.moves]
        found |= {"id": self.id, "path": str(self.paths[0]), "paths": [str(path) for path in self.paths]}
        return found if not self.problem else {**found, "problem": self.problem}


def plan(
    paths: Sequence[Path],
    *,
    step: int | None,
    steps: Mapping[int, str],
    lineage: str,
    wall: float,
    number: int,
) -> QuarantineIndex:
    """Return the index. ``number`` names the directory."""
    moves = tuple((str(path), f"{n}-{path.name}") for n, path in enumerate(paths))
    return QuarantineIndex(number, wall, step, lineage, dict(steps), moves)


def free_number(workspace: Workspace) -> int:
    """Return a number above every existing quarantine. Blocks."""
    highest = 0
    try:
        for home in corners_of(workspace, "quarantine"):
            highest = max(highest, *_numbers(workspace.tree, home), 0)
    except OSError as error:
        raise HostError(f"cannot read the existing quarantines: {error.strerror}", where=str(error.filename)) from error
    return highest + 1


def _numbers(tree: PinnedTree, home: Path) -> list[int]:
    return [int(name) for name in tree.names(home) if name.isascii() and name.isdecimal()]


def directory_of(workspace: Workspace, index: QuarantineIndex) -> Path:
    return workspace.quarantine / str(index.number)


def unfinished(workspace: Workspace) -> list[QuarantineIndex]:
    """Return the index of every quarantine whose moves were interrupted. One that cannot be read moves nothing.
    Blocks."""
    found: list[QuarantineIndex] = []
    with contextlib.suppress(OSError, RootReplaced):
        for number in _numbers(workspace.tree, workspace.quarantine):
            with contextlib.suppress(OSError, HostError, IntegrityError):
                index = _read_index(workspace.tree, workspace.quarantine / str(number), MOVING)
                found.append(replace(index, number=number))
    return found


def leave_as_it_is(workspace: Workspace, index: QuarantineIndex) -> None:
    """Finish a quarantine without its remaining moves. Blocks. Raises HostError."""
    _finish(workspace, directory_of(workspace, index))


def _finish(workspace: Workspace, target: Path) -> None:
    try:
        workspace.tree.replace(target / MOVING, target / INDEX)
        workspace.tree.sync(target)
    except OSError as error:
        raise HostError(f"cannot finish a quarantine: {error.strerror}", where=str(target)) from error


def carry_out(workspace: Workspace, index: QuarantineIndex) -> int:
    """Do all moves that are not done yet; return how many sources were moved now. Blocks. Raises HostError."""
    tree, target = workspace.tree, directory_of(workspace, index)
    moves = [(Path(source), name) for source, name in index.moves]
    _check_index(index, str(target))
    for source, _ in moves:
        if not workspace.holds(source):
            raise HostError("refusing to move a path outside the output directory", where=str(source))
    workspace.check()
    try:
        _make(workspace, target)
        tree.sync(workspace.quarantine)
        _write_index(tree, target / MOVING, index)
        moved, parents = 0, {target}
        for source, name in moves:
            try:
                homes = corners(source, workspace, "quarantine")
                there = move_aside(tree, source, homes, target.name, name)
            except FileNotFoundError:
                continue
            moved += 1
            parents |= {source.parent, there.parent}
        for home in corners_of(workspace, "quarantine"):
            if home != workspace.quarantine and tree.is_directory(home / target.name):
                _write_index(tree, home / target.name / INDEX, index)
        for parent in parents:
            with contextlib.suppress(FileNotFoundError):
                tree.sync(parent)
        _finish(workspace, target)
    except FileExistsError as error:
        raise HostError(
            "the same path was written again after it was moved to quarantine",
            where=str(error.filename),
            fix="compare both copies and remove one; podwatch overwrites neither",
        ) from error
    except OSError as error:
        raise HostError(
            f"cannot move checkpoints to quarantine: {_reason(error)}",
            where=str(error.filename or target),
            fix=workspace.foreign_owners([Path(error.filename or target)])[1] or _fix(error),
        ) from error
    make_spare(workspace)
    return moved


def _reason(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return "a directory of this path is a symbolic link or a file, and podwatch follows no link"
    return error.strerror or str(error)


def _fix(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return "replace it by a directory, or set trainer.checkpoint_dir to the directory that the link points to"
    return "make the output directory and podwatch's directory beside it writable"


def listing(workspace: Workspace) -> list[Entry]:
    """Return every quarantine, oldest first. Blocks. Raises PermissionDenied if a quarantine cannot be read."""
    tree = workspace.tree
    found: dict[int, list[Path]] = {}
    for home in dict.fromkeys((workspace.quarantine, *corners_of(workspace, "quarantine"))):
        try:
            for number in _numbers(tree, home):
                if tree.is_directory(home / str(number)):
                    found.setdefault(number, []).append(home / str(number))
        except PermissionError as error:
            fix = "run this command as podwatch's user"
            raise PermissionDenied("cannot read the quarantine", where=str(home), fix=fix) from error
        except OSError:
            continue
    return [_entry(tree, number, tuple(paths)) for number, paths in sorted(found.items())]


def _entry(tree: PinnedTree, number: int, paths: tuple[Path, ...]) -> Entry:
    for path, name in ((p, n) for p in paths for n in (INDEX, MOVING)):  # the main one first
        try:
            return Entry(number, paths, _read_index(tree, path, name))
        except FileNotFoundError:
            continue
        except (OSError, HostError, IntegrityError) as error:
            return Entry(number, paths, problem=f"its index cannot be used: {error}")
    return Entry(number, paths, problem="it has no index")


def _read_index(tree: PinnedTree, directory: Path, name: str) -> QuarantineIndex:
    """With the steps in order. Raises OSError, IntegrityError (damaged)."""
    data = tree.read(directory / name, QuarantineIndex.LARGEST).rstrip(b"\0")  # reserved space
    index = QuarantineIndex.from_bytes(data, where=str(directory / name))
    return replace(index, steps=dict(sorted(index.steps.items())))  # in the file they are sorted as texts


def give_back(workspace: Workspace, quarantine_id: int) -> tuple[Path, ...]:
    """Move everything of one quarantine back to where it was; return the restored paths. Blocks.

    Raises HostError, before anything moves, when there is no such quarantine, its index is damaged or forged, or a
    path exists already.
    """
    workspace.check()
    tree = workspace.tree
    entry = next((e for e in listing(workspace) if e.id == quarantine_id), None)
    if entry is None:
        raise HostError(f"there is no quarantine {quarantine_id}", where=str(workspace.quarantine))
    if entry.index is None:
        fix = "nothing was moved; check the directory and move the files you need yourself"
        what = f"quarantine {quarantine_id} cannot be returned: {entry.problem}"
        raise HostError(what, where=str(entry.paths[0]), fix=fix)
    directories = entry.paths
    pairs = [(d / name, Path(source)) for source, name in entry.index.moves for d in directories]
    try:
        pairs = [(here, there) for here, there in pairs if tree.lstat(here) is not None]
        for _, there in pairs:
            if not workspace.holds(there):
                raise HostError("the index names a path outside the output directory", where=str(there))
            if tree.lstat(there) is not None:
                raise HostError("this path exists already", where=str(there), fix="move it away first")
        for here, there in pairs:
            tree.make(there.parent)
            tree.rename(here, there)
            tree.sync(there.parent)
        for directory in directories:
            for name in (INDEX, MOVING):
                with contextlib.suppress(FileNotFoundError):
                    tree.unlink(directory / name)
            tree.rmdir(directory)
            if directory.parent != workspace.quarantine:
                drop_empty(tree, directory.parent)
    except OSError as error:
        raise HostError(
            f"cannot return the quarantine: {_reason(error)}", where=str(error.filename or workspace.quarantine)
        ) from error
    return tuple(there for _, there in pairs)


def make_spare(workspace: Workspace) -> None:
    """Prepare a spare directory with a preallocated index. Best effort; blocks."""
    spare = workspace.quarantine / SPARE
    with contextlib.suppress(OSError, RootReplaced):
        workspace.tree.make(spare)
        workspace.tree.reserve(spare / MOVING, SPARE_INDEX_BYTES)


def _make(workspace: Workspace, target: Path) -> None:
    tree = workspace.tree
    if tree.is_directory(target):
        return
    with contextlib.suppress(OSError):
        if tree.rename(workspace.quarantine / SPARE, target):
            return
    tree.make(target)


def _check_index(index: QuarantineIndex, where: str) -> None:
    """Raises HostError for an index that the next podwatch could not read as it is."""
    try:
        if QuarantineIndex.from_bytes(index.to_bytes()) == index:
            return
        problem = "a name that is not UTF-8 cannot be recorded"
    except IntegrityError as error:
        problem = error.what
    raise HostError(f"cannot move checkpoints to quarantine: {problem}", where=where, fix="move them away first")


def _write_index(tree: PinnedTree, path: Path, index: QuarantineIndex) -> None:
    tree.overwrite(path, index.to_bytes())
