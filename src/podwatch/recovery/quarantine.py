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
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree, RootReplaced
from podwatch.system.rename_places import corners, corners_of, drop_empty, move_aside

SPARE = ".spare"
SPARE_INDEX_BYTES = 65_536
INDEX, MOVING = "index.json", "moving.json"
INDEX_BYTES = 16 << 20
UNMOVED = "nothing was moved; report this as a bug"
_NAME = re.compile(r"[0-9]+-[^/\0]+")
"""``<n>-<name>``: one plain segment."""


Index = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Move:
    source: Path
    name: str
    """``<n>-<name>`` inside the quarantine's directory."""


def plan(
    paths: Sequence[Path],
    *,
    step: int | None,
    steps: Mapping[int, str],
    lineage: str,
    wall: float,
    number: int,
) -> Index:
    """Return the index. ``steps`` maps every moved step to its completeness, for the later decision what can be
    deleted: a good checkpoint in quarantine stays protected until its replacement is safe. ``number`` names the
    directory."""
    return {
        "number": number,
        "step": step,
        "lineage": lineage,
        "wall": wall,
        "steps": {str(k): v for k, v in steps.items()},
        "moves": [{"from": str(path), "to": f"{n}-{path.name}"} for n, path in enumerate(paths)],
    }


def _moves(raw: object) -> tuple[Move, ...]:
    """Return the moves. Raises ValueError if the index names anything but plain path segments."""
    found = []
    for pair in raw if isinstance(raw, list) else []:
        if not isinstance(pair, dict):
            raise ValueError("a move is not an object")
        source, name = pair.get("from"), pair.get("to")
        if not isinstance(source, str) or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"not one plain name: {str(name)[:100]!r}")
        found.append(Move(Path(source), name))
    return tuple(found)


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


def directory_of(workspace: Workspace, index: Index) -> Path:
    """Raises HostError."""
    number = index.get("number")
    if not isinstance(number, int):
        raise HostError("a quarantine's index has no number", where=str(workspace.quarantine), fix=UNMOVED)
    return workspace.quarantine / str(number)


def unfinished(workspace: Workspace) -> list[Index]:
    """Return the index of every quarantine whose moves were interrupted. One that cannot be read moves nothing.
    Blocks."""
    found: list[Index] = []
    with contextlib.suppress(OSError, RootReplaced):
        for number in _numbers(workspace.tree, workspace.quarantine):
            with contextlib.suppress(OSError, ValueError, HostError):
                index = _read_index(workspace.tree, workspace.quarantine / str(number), MOVING)
                found.append({**index, "number": number})
    return found


def leave_as_it_is(workspace: Workspace, index: Index) -> None:
    """Finish a quarantine without its remaining moves. Blocks. Raises HostError."""
    _finish(workspace, directory_of(workspace, index))


def _finish(workspace: Workspace, target: Path) -> None:
    try:
        workspace.tree.replace(target / MOVING, target / INDEX)
        workspace.tree.sync(target)
    except OSError as error:
        raise HostError(f"cannot finish a quarantine: {error.strerror}", where=str(target)) from error


def carry_out(workspace: Workspace, index: Index) -> int:
    """Do all moves that are not done yet; return how many sources were moved now. Blocks. Raises HostError."""
    tree, target = workspace.tree, directory_of(workspace, index)
    try:
        moves = _moves(index.get("moves"))
    except ValueError as error:
        raise HostError(f"a quarantine's index is damaged: {error}", where=str(target), fix=UNMOVED) from error
    for move in moves:
        if not workspace.holds(move.source):
            raise HostError("refusing to move a path outside the output directory", where=str(move.source))
    workspace.check()
    try:
        _make(workspace, target)
        tree.sync(workspace.quarantine)
        _write_index(tree, target / MOVING, index)
        moved, parents = 0, {target}
        for move in moves:
            try:
                homes = corners(move.source, workspace, "quarantine")
                there = move_aside(tree, move.source, homes, target.name, move.name)
            except FileNotFoundError:
                continue
            moved += 1
            parents |= {move.source.parent, there.parent}
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
            fix=_fix(error),
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


def listing(workspace: Workspace) -> list[dict[str, Any]]:
    """Return every quarantine, oldest first, as its index says; ``paths`` is one directory per file system. Blocks.

    A quarantine whose index cannot be used has no moves, and the reason as ``problem``. Raises PermissionDenied if a
    quarantine cannot be read.
    """
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
    entries = []
    for number, paths in sorted(found.items()):
        index: dict[str, Any] = {}
        problem = "it has no index"
        for path, name in ((p, n) for p in paths for n in (INDEX, MOVING)):  # the main one first
            try:
                index, problem = _read_index(tree, path, name), ""
            except FileNotFoundError:
                continue
            except (OSError, ValueError, HostError) as error:
                problem = f"its index cannot be used: {error}"
            break
        entry = {"moves": [], **index, "id": number, "path": str(paths[0]), "paths": [str(p) for p in paths]}
        entries.append(entry if not problem else {**entry, "problem": problem})
    return entries


def _read_index(tree: PinnedTree, directory: Path, name: str) -> dict[str, Any]:
    """Raises OSError, ValueError (damaged), RootReplaced (it belongs to another user)."""
    index = json.loads(tree.read_ours(directory / name, INDEX_BYTES).rstrip(b"\0"))
    if not isinstance(index, dict):
        raise ValueError("not an object")
    _moves(index.get("moves"))
    steps = index.get("steps", {})
    if not isinstance(steps, dict) or not all(isinstance(state, str) for state in steps.values()):
        raise ValueError("steps is not an object")
    return index


def give_back(workspace: Workspace, quarantine_id: int) -> tuple[Path, ...]:
    """Move everything of one quarantine back to where it was; return the restored paths. Blocks.

    Raises HostError, before anything moves, when there is no such quarantine, its index is damaged or forged, or a
    path exists already.
    """
    workspace.check()
    tree = workspace.tree
    entry = next((e for e in listing(workspace) if e["id"] == quarantine_id), None)
    if entry is None:
        raise HostError(f"there is no quarantine {quarantine_id}", where=str(workspace.quarantine))
    if problem := entry.get("problem"):
        fix = "nothing was moved; check the directory and move the files you need yourself"
        raise HostError(f"quarantine {quarantine_id} cannot be returned: {problem}", where=str(entry["path"]), fix=fix)
    directories = [Path(path) for path in entry["paths"]]
    pairs = [(d / move.name, move.source) for move in _moves(entry["moves"]) for d in directories]
    try:
        pairs = [(here, there) for here, there in pairs if tree.lstat(here) is not None]
        for _, there in pairs:
            if not workspace.holds(there):
                raise HostError("the index names a path outside the output directory", where=str(there))
            if tree.lstat(there) is not None:
                raise HostError("this path exists already", where=str(there), fix="move it away first")
        owner = workspace.trainers_uid()
        for here, there in pairs:
            tree.make(there.parent, owner=owner)
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


def _write_index(tree: PinnedTree, path: Path, index: Index) -> None:
    tree.overwrite(path, json.dumps(dict(index), indent=1).encode() + b"\n")
