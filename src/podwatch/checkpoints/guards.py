"""What is looked at of a settled set, so that nothing else of it needs to be: each of its directories, and per required
part its first shard and its newest file.

Names that come or go touch a directory; a trainer that rewrites a set in place touches its first shard at once. What is
kept of each set is one number and a shape that it shares with all others: a thousand sets must cost nothing.
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
    """``stamp`` is made of the mtimes and inodes of all places, absent ones included."""

    shape: Shape
    stamp: int


def guard_of(scans: Sequence[Scan], rests_on: Sequence[str] = ()) -> Guard:
    """The guard of a set as it was scanned. ``rests_on``: files outside of it that were looked at as well; they are
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
    """Is everything as it was? ``roots`` are the directories of the parts, in their order. Never raises OSError."""
    stamps: list[int] = []
    for number, inside in guard.shape:
        if number == ELSEWHERE:
            stamps += stamp(inside)
        else:
            stamps += stamp(f"{roots[number]}/{inside}" if inside else roots[number])
    return hash(tuple(stamps)) == guard.stamp


def stamp(path: str) -> tuple[int, int]:
    """(mtime in ns, inode); zeros for what is not there or may not be looked at."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
