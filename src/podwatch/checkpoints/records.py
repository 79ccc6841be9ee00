"""Records: one small file about each inspected checkpoint, ``step_<N>.<save_id>.json``, and what they answer.

A record says which files a complete checkpoint had. Whether it is the same save, whether it lost something, how large
the next one will be, which start wrote it: all of that is answered by comparing it with a new listing. A lost record is
made again by an inspection and the starts, or from a manifest with equal files.
"""

import contextlib
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from podwatch.checkpoints.table import SaveEnd
from podwatch.checkpoints.templates import forms_of
from podwatch.domain.document import Document, Integer, Label, Many, RelativePath, SaveId, Text, Wall, Whole
from podwatch.domain.errors import IntegrityError
from podwatch.system.files import atomic_write, read_small

_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})\.([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.json")
_SIZES = 12
"""How many of the last saves tell how large the next one can be."""


@dataclass(frozen=True, slots=True, order=True)
class RecordedFile:
    """One regular file. ``path`` is POSIX, below its part."""

    part: Label
    path: RelativePath
    size: Whole
    mtime_ns: Integer
    inode: Whole = 0

    def named(self, *, several: bool) -> str:
        """The name by which rules know it."""
        return f"{self.part}:{self.path}" if several else self.path


class RecordSource(StrEnum):
    SAVED = "saved"
    ATTACHED = "attached"
    """Saved by a trainer that podwatch did not start."""
    RESTORED = "restored"
    ADOPTED = "adopted"
    """Written by nobody that this run knows, and accepted by the operator."""


@dataclass(frozen=True, slots=True)
class CheckpointRecord(Document):
    """One inspected checkpoint. ``start_id``: the start that wrote it, empty if none that is known did. ``boot_id``:
    the boot in which it was inspected. ``bytes``: of what is stored."""

    KIND: ClassVar[str] = "checkpoint-record"
    FILE: ClassVar[str] = "record of a checkpoint"
    LARGEST: ClassVar[int] = 64 << 20

    step: Whole
    save_id: SaveId
    start_id: Text
    source: RecordSource
    boot_id: Text
    layout: Label
    files: Many[RecordedFile]
    bytes: Whole
    wall: Wall
    ends: SaveEnd = SaveEnd.NONE
    token: Text = ""
    world_size: Whole | None = None

    @property
    def name(self) -> str:
        return f"step_{self.step}.{self.save_id}.json"

    @property
    def forms(self) -> frozenset[str]:
        """What the next save of this run must have, too."""
        several = len({f.part for f in self.files}) > 1
        return forms_of(f.named(several=several) for f in self.files)


def new_save_id() -> str:
    return secrets.token_hex(8)


# -- what a record answers: pure --------------------------------------------------------------------------------------


def is_same_save(record: CheckpointRecord, files: Iterable[RecordedFile], identity: Collection[str] = ()) -> bool:
    """Whether all its files are unchanged. What else is there was added later and is never stored. ``identity``: the
    parts that make the save, where a resume writes others again. Inodes do not count: a restore has others."""
    now = {(f.part, f.path): (f.size, f.mtime_ns) for f in files}
    own = [f for f in record.files if not identity or f.part in identity]
    return bool(own) and all(now.get((f.part, f.path)) == (f.size, f.mtime_ns) for f in own)


def lost_files(record: CheckpointRecord, files: Iterable[RecordedFile]) -> tuple[str, ...]:
    """``part/path`` of files that are gone or smaller than they were."""
    now = {(f.part, f.path): f.size for f in files}
    lost = (f for f in record.files if now.get((f.part, f.path), -1) < f.size)
    return tuple(sorted(f"{f.part}/{f.path}" for f in lost))


def was_deleted(record: CheckpointRecord, files: Iterable[RecordedFile], deleted_with: str) -> bool:
    """Whether nothing is left of the part with which the trainer deletes a checkpoint: what remains of other parts is
    no damage."""
    return any(f.part == deleted_with for f in record.files) and all(f.part != deleted_with for f in files)


def needs_inspection(record: CheckpointRecord | None, files: Collection[RecordedFile], boot_id: str) -> bool:
    """Whether these files were never inspected, or not in this boot: a power cut tears files that were whole."""
    return record is None or record.boot_id != boot_id or not is_same_save(record, files)


def next_save_bytes(records: Iterable[CheckpointRecord], layout: str) -> int | None:
    """Bytes of the largest of the last saves; None before the first."""
    own = sorted((r for r in records if r.layout == layout), key=lambda r: r.wall)
    return max((r.bytes for r in own[-_SIZES:]), default=None)


# -- files -------------------------------------------------------------------------------------------------------------


class RecordFiles:
    """The records in one directory, with a copy in a second one. Blocks. A record that cannot be read is as good as
    lost: the checkpoint is inspected again."""

    def __init__(self, directory: Path, copy: Path | None = None) -> None:
        self._directory, self._copy = directory, copy

    def read(self) -> tuple[CheckpointRecord, ...]:
        """By step, then by age. The copy adds what the first directory lacks."""
        found: dict[str, CheckpointRecord] = {}
        for directory in (self._directory, self._copy):
            for name in _names(directory):
                assert directory is not None
                if name not in found and (record := _read(directory / name)) is not None:
                    found[name] = record
        return tuple(sorted(found.values(), key=lambda r: (r.step, r.wall)))

    def write(self, record: CheckpointRecord) -> None:
        """Durable when it returns; the copy is best effort. OSError: it could not be written."""
        data = record.to_bytes()
        self._directory.mkdir(parents=True, exist_ok=True)
        atomic_write(self._directory / record.name, data)
        if self._copy is not None:
            with contextlib.suppress(OSError):
                self._copy.mkdir(parents=True, exist_ok=True)
                atomic_write(self._copy / record.name, data)

    def remove(self, record: CheckpointRecord) -> None:
        """The copy first: it would bring the record back."""
        if self._copy is not None:
            with contextlib.suppress(OSError):
                (self._copy / record.name).unlink(missing_ok=True)
        (self._directory / record.name).unlink(missing_ok=True)

    def keep_only(self, existing: Collection[tuple[int, str]], newest: int = _SIZES) -> tuple[CheckpointRecord, ...]:
        """Remove the records of checkpoints that are gone, except the newest ones, which the next save is compared
        with. ``existing``: (step, save id). Returns what is left."""
        records = self.read()
        recent = {r.name for r in sorted(records, key=lambda r: r.wall)[-newest:]}
        left = []
        for record in records:
            if record.name in recent or (record.step, record.save_id) in existing:
                left.append(record)
            else:
                self.remove(record)
        return tuple(left)


def _names(directory: Path | None) -> list[str]:
    try:
        return sorted(p.name for p in directory.iterdir() if _NAME.fullmatch(p.name)) if directory is not None else []
    except OSError:
        return []


def _read(path: Path) -> CheckpointRecord | None:
    try:
        record = CheckpointRecord.from_bytes(read_small(path, CheckpointRecord.LARGEST), where=str(path))
    except (OSError, IntegrityError):
        return None
    return record if record.name == path.name else None
