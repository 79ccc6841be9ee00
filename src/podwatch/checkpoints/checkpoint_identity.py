"""Identifies one checkpoint: its description from a scan and a layout's judgement, its fingerprint, its save id, and
the guard that shows later whether anything changed.
"""

import hashlib
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from podwatch.checkpoints.inspection import Inspection
from podwatch.checkpoints.records import CheckpointRecord, RecordedFile
from podwatch.checkpoints.scan import Scan, is_temporary
from podwatch.checkpoints.shapes import PartFiles
from podwatch.checkpoints.structures import is_shard
from podwatch.domain.checkpoint import CheckpointSet, Completeness, FileEntry, PartState


def shown(part: PartFiles) -> bool:
    """Whether it is a part of the checkpoint's description. By-products that do not exist are not."""
    return part.present or part.part.required


def describe(step: int, layout: str, found: Sequence[PartFiles], judgement: Inspection) -> CheckpointSet:
    """The checkpoint with state WRITING; the caller sets a better state."""
    parts = []
    for part in filter(shown, found):
        reason = judgement.problems.get(part.part.name, "")
        complete = part.present and not reason and (judgement.whole or bool(judgement.problems))
        size = sum(f.size for f in part.files)
        parts.append(PartState(part.part.name, str(part.part.path), part.part.required, complete, size, reason))
    own = [f for p in found if p.part.required for f in p.files]
    return CheckpointSet(
        step=step,
        layout=layout,
        completeness=Completeness.WRITING,
        parts=tuple(parts),
        size_bytes=sum(p.size_bytes for p in parts),
        file_count=sum(len(p.files) for p in found),
        changed_wall=max((f.mtime_ns for f in own), default=0) / 1e9,
        began_wall=min((f.mtime_ns for f in own), default=0) / 1e9,
        reason=judgement.reason,
    )


def belongs(file: FileEntry, leftovers: Collection[str]) -> bool:
    """Whether it is a file of this save: neither unfinished nor left by an earlier save."""
    return not is_temporary(file.path) and f"{file.part}/{file.path}" not in leftovers


def own_files(found: Sequence[PartFiles], judgement: Inspection) -> list[tuple[PartFiles, FileEntry]]:
    """The files that a resume needs: those of the required parts that belong to this save."""
    leftovers = frozenset(judgement.leftovers)
    return [(p, f) for p in found if p.part.required for f in p.files if belongs(f, leftovers)]


def fingerprint(found: Sequence[PartFiles]) -> bytes:
    """Hash of the required parts only: an added or removed by-product does not make it another save."""
    digest = hashlib.blake2b(digest_size=16)
    for part in found:
        if part.part.required:
            digest.update(f"\0{part.part.name}\0{part.present}".encode())
            for f in part.files:
                digest.update(f"\0{f.path}\0{f.size}\0{f.mtime_ns}\0{f.inode}".encode("utf-8", "surrogateescape"))
            for link in part.symlinks:
                digest.update(f"\0{link.path}\0{link.target}".encode("utf-8", "surrogateescape"))
    return digest.digest()


def save_id(found: Sequence[PartFiles], judgement: Inspection) -> str:
    """The id of a save. The same files give the same id across restarts of podwatch and after a restore, which sets the
    mtimes: inodes are not used."""
    digest = hashlib.sha256(judgement.save_token.encode())
    for _, f in own_files(found, judgement):
        digest.update(f"\0{f.part}/{f.path}\0{f.size}\0{f.mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def recorded(own: Sequence[tuple[PartFiles, FileEntry]]) -> tuple[RecordedFile, ...]:
    return tuple(RecordedFile(f.part, f.path, f.size, f.mtime_ns, f.inode) for _, f in own)


def all_files(found: Sequence[PartFiles]) -> tuple[RecordedFile, ...]:
    """Of the parts that a resume needs, whatever they are."""
    return recorded([(p, f) for p in found if p.part.required for f in p.files])


def without_additions(
    found: Sequence[PartFiles], record: CheckpointRecord
) -> tuple[tuple[PartFiles, ...], tuple[str, ...]]:
    """The save as it was recorded, and ``<part>/<path>`` of what was added to it since (an evaluation, merged
    weights)."""
    own = {(f.part, f.path) for f in record.files}
    fewer = tuple(
        replace(p, files=tuple(f for f in p.files if (f.part, f.path) in own)) if p.part.required else p for p in found
    )
    added = (f for p in found if p.part.required for f in p.files if (f.part, f.path) not in own)
    return fewer, tuple(f"{f.part}/{f.path}" for f in added)


# -- guards ----------------------------------------------------------------------------------------------------------
# The few files whose times show whether a settled checkpoint changed: each of its directories, and per required part
# the first shard and the newest file. A name that appears or disappears changes a directory; a trainer that rewrites
# a checkpoint in place changes its first shard at once.

Guard = tuple[tuple[str, int, int], ...]
"""(path, mtime in ns, inode); zeros for what is absent."""


def guard_of(scans: Sequence[Scan], rests_on: Sequence[Path] = ()) -> Guard:
    """The guard of a checkpoint as it was scanned. ``rests_on``: files outside of it that the rule read; they are
    stamped as they are now."""
    found: list[tuple[str, int, int]] = []
    for scan in scans:
        part, files, root = scan.found.part, scan.found.files, str(scan.found.part.path)
        if scan.found.present:
            found += scan.directories
        elif part.required:
            found += [(f"{root}/{name}" if name else root, 0, 0) for name in part.names or ("",)]
        if part.required and files:
            data = [f for f in files if is_shard(f.path)] or files
            newest = max(files, key=lambda f: f.mtime_ns)
            found += [(f"{root}/{f.path}", f.mtime_ns, f.inode) for f in sorted({data[0], newest})]
    return (*found, *((str(path), *stamp(str(path))) for path in rests_on))


def holds(guard: Guard) -> bool:
    """Whether everything is unchanged. Never raises OSError."""
    return all(stamp(path) == (mtime_ns, inode) for path, mtime_ns, inode in guard)


def stamp(path: str) -> tuple[int, int]:
    """(mtime in ns, inode); zeros for a file that is absent or cannot be read."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
