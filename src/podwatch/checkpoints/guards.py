"""The guard of a settled checkpoint: the few files whose times show whether anything changed. These are each of its
directories, and per required part the first shard and the newest file.

A name that appears or disappears changes a directory; a trainer that rewrites a checkpoint in place changes its first
shard at once. A guard is one number and a shape shared with all other checkpoints, so that a thousand checkpoints cost
almost nothing.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from podwatch.checkpoints.scan import Scan
from podwatch.checkpoints.sets import shown
from podwatch.checkpoints.structure import dcp

ELSEWHERE = -1
Place = tuple[int, str]
"""(number of the part in ``CheckpointSet.parts``, path inside it), or (ELSEWHERE, absolute path)."""
Shape = tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Guard:
    """``stamp`` is a hash of the mtimes and inodes of all places, including absent ones."""

    shape: Shape
    stamp: int


def guard_of(scans: Sequence[Scan], rests_on: Sequence[str] = ()) -> Guard:
    """The guard of a checkpoint as it was scanned. ``rests_on``: files outside of it that the rule read; they are
    stamped as they are now."""
    places: list[Place] = []
    stamps: list[int] = []
    for number, scan in enumerate(s for s in scans if shown(s.found)):
        part = scan.found.part
        root = str(part.path)
        if scan.found.present:
            for path, mtime_ns, inode in scan.directories:
                places.append((number, path[len(root) + 1 :]))
                stamps += (mtime_ns, inode)
        elif part.required:
            for name in part.names or ("",):
                places.append((number, name))
                stamps += (0, 0)
        files = scan.found.files
        if part.required and files:
            data = [f for f in files if dcp.is_shard(f.path)] or files
            for file in sorted({data[0], max(files, key=lambda f: f.mtime_ns)}):
                places.append((number, file.path))
                stamps += (file.mtime_ns, file.inode)
    for path in rests_on:
        places.append((ELSEWHERE, path))
        stamps += stamp(path)
    return Guard(tuple(places), hash(tuple(stamps)))


def holds(guard: Guard, roots: Sequence[str]) -> bool:
    """Whether everything is unchanged. ``roots`` are the directories of the parts, in order. Never raises OSError."""
    stamps: list[int] = []
    for number, inside in guard.shape:
        if number == ELSEWHERE:
            stamps += stamp(inside)
        else:
            stamps += stamp(f"{roots[number]}/{inside}" if inside else roots[number])
    return hash(tuple(stamps)) == guard.stamp


def stamp(path: str) -> tuple[int, int]:
    """(mtime in ns, inode); zeros for a file that is absent or cannot be read."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
