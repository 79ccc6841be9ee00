"""Set aside what is ahead of the step we start from: by rename, never destroyed, and returnable (promise 8).

The intent holds every pair of paths before the first rename, so a crash at any point is finished by doing the same
again: a source that is gone was moved already. ``index.json`` repeats the pairs beside the files for a person and for
``podwatch quarantine return``.

Paths of one set may lie on several filesystems. Each goes into the quarantine of its own (system/aside.py), under the
same number; the main directory, beside output_dir, has the index of all.

A full disk: renames work there and mkdir does not (facts/systemd.md, "SQLite at 100 % full"). So a spare directory
with a preallocated index lies ready.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.errors import HostError
from podwatch.domain.intent import Intent
from podwatch.system.aside import corners, corners_of, drop_empty, move_aside
from podwatch.system.files import fsync_dir, rename_noreplace
from podwatch.system.workspace import Workspace

SPARE = ".spare"
SPARE_INDEX_BYTES = 65_536
INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class Move:
    source: Path
    name: str
    """``<n>-<name>`` inside the intent's directory."""


def plan(
    paths: Sequence[Path],
    *,
    step: int | None,
    steps: Mapping[int, str],
    lineage: str,
    wall: float,
    number: int | None = None,
) -> dict[str, object]:
    """The intent's data. ``steps`` maps every known step that goes to its completeness, for those who judge later
    what may be deleted: a good set in quarantine keeps its protection until its successor is safe (promise 2).
    ``number`` names the directory (None: the intent's id, as the first podwatches did)."""
    return {
        **({} if number is None else {"number": number}),
        "step": step,
        "lineage": lineage,
        "wall": wall,
        "steps": {str(k): v for k, v in steps.items()},
        "moves": [{"from": str(path), "to": f"{n}-{path.name}"} for n, path in enumerate(paths)],
    }


def moves_of(intent: Intent) -> tuple[Move, ...]:
    raw = intent.data.get("moves")
    pairs = raw if isinstance(raw, list) else []
    return tuple(Move(Path(str(m["from"])), str(m["to"])) for m in pairs)


def free_number(workspace: Workspace, roots: Sequence[Path] = ()) -> int:
    """Above every directory that is there. Not the intent's id alone: the journal may have been lost and counts from 1
    again, and what lies in an older directory must neither be mixed with this nor lose its index. Blocks."""
    highest = 0
    try:
        for home in corners_of(workspace, roots, "quarantine"):
            highest = max(highest, *(int(p.name) for p in home.iterdir() if p.name.isdecimal()), 0)
    except OSError as error:
        raise HostError(
            f"cannot look at what was set aside before: {error.strerror}", where=str(error.filename)
        ) from error
    return highest + 1


def number_of(intent: Intent) -> int:
    """What ``podwatch quarantine return`` is given."""
    number = intent.data.get("number")
    return number if isinstance(number, int) else intent.id


def directory_of(workspace: Workspace, intent: Intent) -> Path:
    return workspace.quarantine / str(number_of(intent))


def carry_out(workspace: Workspace, intent: Intent, roots: Sequence[Path] = ()) -> int:
    """Do all moves that are not done yet; how many sources were moved now. Blocks. Raises HostError.

    ``roots`` are configured directories beside output_dir that a source may lie in (``trainer.checkpoint_dir``).
    """
    target = directory_of(workspace, intent)
    try:
        _make(workspace, target)
        _write_index(target, intent)
        moved, parents = 0, {target}
        for move in moves_of(intent):
            if not _allowed(move.source, workspace, roots):
                raise HostError("refusing to move what is outside the output directory", where=str(move.source))
            try:
                homes = corners(move.source, workspace, roots, "quarantine")
                there = move_aside(move.source, homes, target.name, move.name)
            except FileNotFoundError:
                continue
            moved += 1
            parents |= {move.source.parent, there.parent}
        for home in corners_of(workspace, roots, "quarantine"):
            if home != workspace.quarantine and (home / target.name).is_dir():
                _write_index(home / target.name, intent)
        for parent in parents:
            with contextlib.suppress(FileNotFoundError):
                fsync_dir(parent)
    except FileExistsError as error:
        raise HostError(
            "something was written again where it had been set aside already",
            where=str(error.filename),
            fix="look at both copies and remove one; podwatch overwrites neither",
        ) from error
    except OSError as error:
        raise HostError(
            f"cannot set aside what is ahead of the checkpoint: {error.strerror}",
            where=str(error.filename or target),
            fix="make the output directory and podwatch's directory beside it writable",
        ) from error
    make_spare(workspace)
    return moved


def listing(workspace: Workspace, roots: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Every quarantine, oldest first, as its index tells; ``paths`` is one directory on each filesystem.
    Blocks; what is unreadable is listed without moves."""
    found: dict[int, list[Path]] = {}
    for home in corners_of(workspace, roots, "quarantine"):
        with contextlib.suppress(OSError):
            for path in home.iterdir():
                if path.name.isdecimal() and path.is_dir():
                    found.setdefault(int(path.name), []).append(path)
    entries = []
    for number, paths in sorted(found.items()):
        index: dict[str, Any] = {"moves": []}
        for path in reversed(paths):  # the main one has the last word
            with contextlib.suppress(OSError, ValueError):
                index = json.loads((path / INDEX).read_bytes())
        entries.append({**index, "id": number, "path": str(paths[0]), "paths": [str(p) for p in paths]})
    return entries


def give_back(workspace: Workspace, quarantine_id: int, roots: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Return everything of one quarantine to where it was; the paths that are back. Blocks.

    Raises HostError, before anything moves, when there is no such quarantine or a place is taken.
    """
    entry = next((e for e in listing(workspace, roots) if e["id"] == quarantine_id), None)
    if entry is None:
        raise HostError(f"there is no quarantine {quarantine_id}", where=str(workspace.quarantine))
    directories = [Path(path) for path in entry["paths"]]
    pairs = [(d / str(m["to"]), Path(str(m["from"]))) for m in entry["moves"] for d in directories]
    pairs = [(here, there) for here, there in pairs if os.path.lexists(here)]
    for _, there in pairs:
        if not _allowed(there, workspace, roots):
            raise HostError("the index names a place outside the output directory", where=str(there))
        if os.path.lexists(there):
            raise HostError("something lies there already", where=str(there), fix="move it away first")
    try:
        for here, there in pairs:
            there.parent.mkdir(parents=True, exist_ok=True)
            rename_noreplace(here, there)
            fsync_dir(there.parent)
        for directory in directories:
            (directory / INDEX).unlink(missing_ok=True)
            directory.rmdir()
            if directory.parent != workspace.quarantine:
                drop_empty(directory.parent)
    except OSError as error:
        raise HostError(
            f"cannot return it: {error.strerror}", where=str(error.filename or workspace.quarantine)
        ) from error
    return tuple(there for _, there in pairs)


def make_spare(workspace: Workspace) -> None:
    """Have an empty directory with a preallocated index ready. Best effort; blocks."""
    spare = workspace.quarantine / SPARE
    with contextlib.suppress(OSError):
        spare.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(spare / INDEX, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, SPARE_INDEX_BYTES)
        finally:
            os.close(descriptor)


def _make(workspace: Workspace, target: Path) -> None:
    if target.is_dir():
        return
    try:
        rename_noreplace(workspace.quarantine / SPARE, target)
    except OSError:
        target.mkdir(parents=True, exist_ok=True)


def _write_index(target: Path, intent: Intent) -> None:
    """A missing index is not fatal: the journal has the same pairs."""
    data = json.dumps(dict(intent.data), indent=1).encode() + b"\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(target / INDEX, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], done)
            os.ftruncate(descriptor, len(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _allowed(path: Path, workspace: Workspace, roots: Sequence[Path]) -> bool:
    """Below a configured root, by name: nothing else is ever moved (promise 9)."""
    return ".." not in path.parts and any(root in path.parents for root in (workspace.output_dir, *roots))
