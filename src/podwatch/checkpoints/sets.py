"""From what a scan found and a layout judged to one set: its description, its fingerprint, its name."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

from podwatch.checkpoints.layouts.base import Judgement, PartFiles
from podwatch.checkpoints.scan import is_temporary
from podwatch.domain.checkpoint import CheckpointSet, Completeness, FileEntry, PartState

_GAPS = 3
"""So many of the longest pauses between a set's files may be where a save ended and people began to add to it."""
NOTHING: Mapping[str, str] = MappingProxyType({})


def shown(part: PartFiles) -> bool:
    """Is it a part of the set's description? By-products that do not exist are none."""
    return part.present or part.part.required


def describe(step: int, layout: str, found: Sequence[PartFiles], judgement: Judgement) -> CheckpointSet:
    """The set as WRITING; the caller raises it to what it knows."""
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
    """Is it a file of this save, neither half done nor left by an earlier one?"""
    return not is_temporary(file.path) and f"{file.part}/{file.path}" not in leftovers


def own_files(found: Sequence[PartFiles], judgement: Judgement) -> list[tuple[PartFiles, FileEntry]]:
    """What a resume needs: the files of the required parts that belong to this save."""
    leftovers = frozenset(judgement.leftovers)
    return [(p, f) for p in found if p.part.required for f in p.files if belongs(f, leftovers)]


def fingerprint(found: Sequence[PartFiles]) -> bytes:
    """Of the required parts only: a by-product that comes or goes does not make it another save."""
    digest = hashlib.blake2b(digest_size=16)
    for part in found:
        if part.part.required:
            digest.update(f"\0{part.part.name}\0{part.present}".encode())
            for f in part.files:
                digest.update(f"\0{f.path}\0{f.size}\0{f.mtime_ns}\0{f.inode}".encode("utf-8", "surrogateescape"))
            for link in part.symlinks:
                digest.update(f"\0{link.path}\0{link.target}".encode("utf-8", "surrogateescape"))
    return digest.digest()


def save_id(found: Sequence[PartFiles], judgement: Judgement) -> str:
    """The same files give the same id, before a restart of podwatch, after it, and after a restore that put the mtimes
    back: no inode in it."""
    digest = hashlib.sha256(judgement.save_token.encode())
    for _, f in own_files(found, judgement):
        digest.update(f"\0{f.part}/{f.path}\0{f.size}\0{f.mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def without_additions(found: Sequence[PartFiles]) -> Iterator[tuple[tuple[PartFiles, ...], tuple[str, ...]]]:
    """The set as it may have been before somebody put files into it (an evaluation, merged weights): without what came
    after one of the longest pauses between its files, and ``<part>/<path>`` of what that leaves out."""
    times = sorted({f.mtime_ns for p in found if p.part.required for f in p.files})
    gaps = sorted(((after - before, before) for before, after in pairwise(times)), reverse=True)
    for _, last in gaps[:_GAPS]:
        fewer = tuple(
            replace(p, files=tuple(f for f in p.files if f.mtime_ns <= last)) if p.part.required else p for p in found
        )
        yield fewer, tuple(f"{f.part}/{f.path}" for p in found if p.part.required for f in p.files if f.mtime_ns > last)
