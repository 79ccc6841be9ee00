"""The structural check of one checkpoint, and its limits.

Reads header and tail of each file, and every record inside DCP shards. It finds files that are missing, truncated or
never written. It cannot find flipped bits, swapped or single lost pages inside tensor data, nor a truncated pickle of
the old format: the hashes taken during upload do that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.formats import dcp, torch_zip
from podwatch.checkpoints.formats.files import can_check, check_file, has_hole
from podwatch.checkpoints.layouts.base import Judgement, PartFiles
from podwatch.checkpoints.set_identity import belongs, own_files

BLIND = (
    "the structural check does not find flipped bits or lost pages inside tensor data; "
    "`podwatch checkpoints verify --deep` compares every byte with the hashes taken at upload"
)
HOLE_FROM = 64 * 1024
"""Bytes. Smaller files have few blocks, and the check of their format sees more."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """``problems``: damage. ``notes``: suspicious or unknown, but no proof of damage."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: int = 0
    """Number of files whose structure was checked."""


@dataclass(frozen=True, slots=True)
class StructureHints:
    """The first file with unwritten ranges and the first of the old torch format; empty where there is none."""

    hole: str = ""
    legacy: str = ""


def find_odd(found: Sequence[PartFiles], judgement: Judgement) -> StructureHints:
    """Examine each file that a resume needs, once per save. Files that vanish meanwhile are skipped."""
    hole = legacy = ""
    for part, file in own_files(found, judgement):
        path = Path(part.part.path) / file.path
        try:
            if not hole and file.size >= HOLE_FROM and has_hole(path):
                hole = f"{file.part}/{file.path}"
            if not legacy and torch_zip.is_torch_name(path.name) and torch_zip.is_legacy(path):
                legacy = f"{file.part}/{file.path}"
        except OSError:
            continue
    return StructureHints(hole, legacy)


def inspect(found: Sequence[PartFiles], judgement: Judgement) -> Inspection:
    """Check every file of a checkpoint that is uploaded or needed for a resume. Blocks; never raises OSError."""
    problems = [] if judgement.whole else [judgement.reason]
    notes: list[str] = []
    leftovers = frozenset(judgement.leftovers)
    checked = unknown = 0
    for part in found:
        if not part.present or not (part.part.required or part.part.uploaded):
            continue
        name, root = part.part.name, Path(part.part.path)
        for file in part.files:
            if not belongs(file, leftovers):
                continue
            path = root / file.path
            try:
                if path.name == dcp.INDEX:
                    checked += 1
                    problems += [f"{name}: {p}" for p in dcp.check_records(path.parent)]
                elif can_check(path.name) or dcp.is_shard(path.name):
                    checked += 1
                    if problem := check_file(path):
                        problems.append(f"{name}: {file.path} {problem}")
                else:
                    unknown += 1
                notes += _oddities(name, file.path, path, file.size)
            except OSError as error:
                problems.append(f"{name}: {file.path} cannot be read: {error.strerror}")
    if unknown:
        notes.append(f"{unknown} files have a format without a structure that podwatch can check")
    return Inspection(tuple(dict.fromkeys(problems)), tuple(dict.fromkeys(notes)), checked)


def _oddities(part: str, name: str, path: Path, size: int) -> list[str]:
    found = []
    if size >= HOLE_FROM and has_hole(path):
        found.append(
            f"{part}: {name} has ranges that were never written: preallocated and not filled, or a sparse copy"
        )
    if torch_zip.is_torch_name(path.name) and torch_zip.is_legacy(path):
        found.append(f"{part}: {name} has the old torch format: only its size shows whether it is truncated")
    return found
