"""Records: one small file about each checkpoint that was found complete, ``step_<N>.<save_id>.json``, and what they
answer.

A record says which files a complete checkpoint had. Whether it is the same save, whether it lost something, what a save
without a mark at its end must have, how large the next one will be, which start wrote it: all of that is answered by
comparing it with a new listing. A lost record is made again by an inspection.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from podwatch.checkpoints.table import SaveEnd
from podwatch.checkpoints.templates import form_of
from podwatch.domain.document import Document, Flag, Integer, Label, Many, Real, RelativePath, SaveId, Text, Whole
from podwatch.domain.errors import HostError, IntegrityError, PodwatchError
from podwatch.domain.starts import Recorded
from podwatch.system.files import atomic_write, read_small
from podwatch.system.pinned_directories import PinnedTree

_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})\.([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.json")
RECENT = 32
"""How many of the last saves stay known after their checkpoints are gone: three milestones at every tenth save."""
MOST = 128
"""How many records are kept at all: those of a thousand checkpoints are 30 MiB. What has none is inspected and waited
for like a new one."""
_COMPARED = 2
"""A save must have what so many saves before it have. A file that only one of them has (an export, a best model) is not
required."""
_TOLERANCE = 0.01
"""A file can be this much smaller: buffers and states of data loaders vary a little."""
_SMALL = 64 * 1024
"""Bytes. Smaller files hold text and counters of varying length; they only must not be empty."""


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
    RESTORED = "restored"
    """It came from this run's store."""


@dataclass(frozen=True, slots=True)
class CheckpointRecord(Document):
    """One complete checkpoint. ``boot_id``: the boot in which it was inspected last. ``files``: those that a resume
    needs. ``parts``: bytes of each part that is deleted with it, by-products included, at their largest; ``file_count``
    counts these files. ``wall``: the newest change."""

    KIND: ClassVar[str] = "checkpoint-record"
    FILE: ClassVar[str] = "record of a checkpoint"
    LARGEST: ClassVar[int] = 64 << 20

    step: Whole
    save_id: SaveId
    layout: Label
    boot_id: Text
    files: Many[RecordedFile]
    wall: Real
    parts: Mapping[Label, Whole] = field(default_factory=dict)
    file_count: Whole = 0
    source: RecordSource = RecordSource.SAVED
    start_id: Text = ""
    """The start that wrote it; empty while only its times show that."""
    branch: Text = ""
    """Of one that is in the store: the branch that its manifest names."""
    ends: SaveEnd = SaveEnd.NONE
    sparse: Flag = False
    """It had ranges that were never written when it was found complete: after a reboot they prove nothing."""
    held: Text = ""
    """Why it is held back: a second trainer ran while it was written. ``released``: the operator named it since."""
    released: Flag = False
    doubted: Flag = False
    """Its step was implausible when it was looked at last: a podwatch that knows no step of training doubts it, too."""
    deleted: Flag = False
    """The checkpoint is no longer on this pod."""

    @property
    def name(self) -> str:
        return f"step_{self.step}.{self.save_id}.json"

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def key(self) -> tuple[int, str]:
        return self.step, self.save_id

    @property
    def origin(self) -> Recorded:
        return Recorded(self.start_id, self.source is RecordSource.RESTORED, self.branch)


# -- what a record answers: pure --------------------------------------------------------------------------------------

Files = Iterable[RecordedFile]


def is_same_save(record: CheckpointRecord, files: Files, identity: Collection[str] = ()) -> bool:
    """Whether all its files are unchanged. What else is there was added later and is never stored. ``identity``: the
    parts that make the save, where a resume writes others again. Inodes do not count: a restore has others."""
    now = {(f.part, f.path): (f.size, f.mtime_ns) for f in files}
    own = [f for f in record.files if not identity or f.part in identity]
    return bool(own) and all(now.get((f.part, f.path)) == (f.size, f.mtime_ns) for f in own)


def lost_files(record: CheckpointRecord, files: Files) -> str:
    """What the checkpoint had when it was complete and lacks now, in words; empty where nothing is lost. Another save
    of the same step is no loss: all its files differ."""
    now = {(f.part, f.path): (f.size, f.mtime_ns) for f in files}
    if not any(now.get((f.part, f.path)) == (f.size, f.mtime_ns) for f in record.files):
        return ""
    gone = sorted(f for f in record.files if (f.part, f.path) not in now)
    smaller = sorted(f for f in record.files if now.get((f.part, f.path), (f.size,))[0] < f.size)
    for lost, what in ((gone, "is gone"), (smaller, "is smaller than it was")):
        if lost:
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            return f"was complete, but now {PurePosixPath(lost[0].path).name} {what}{more}"
    return ""


def is_left_of(record: CheckpointRecord, files: Files) -> bool:
    """Whether these are some files of the save, unchanged, or none: what a deletion leaves is no damage."""
    return {_content(f) for f in files} <= {_content(f) for f in record.files}


def is_suspect(record: CheckpointRecord | None, boot_id: str, *, before_boot: bool) -> bool:
    """Whether ranges that were never written can be what a power cut took. ``record``: of these files, if there is one;
    ``before_boot``: the files are older than this boot."""
    if record is None:
        return before_boot
    return record.boot_id != boot_id and not record.sparse


def lacking(step: int, files: Files, records: Iterable[CheckpointRecord], *, ends: SaveEnd = SaveEnd.NONE) -> str:
    """What a save lacks, compared with those before it; empty if nothing. Without a mark at its end also their number
    and size count: truncation of some formats shows in nothing else."""
    before = sorted((r for r in records if r.step < step), key=lambda r: (r.wall, r.step))[-_COMPARED:]
    if not before:
        return ""
    new, olds = _by_form(files), [_by_form(r.files, sized=ends is r.ends is SaveEnd.NONE) for r in before]
    for form in sorted(frozenset.intersection(*(frozenset(old) for old in olds))):
        count = min(len(old[form]) for old in olds)
        if len(new.get(form, ())) < count:
            return f"it has {len(new.get(form, ()))} files like {form}, step {before[-1].step} has {count}"
        least, wanted = min(new[form]), min(old[form][0] for old in olds)
        if _is_too_small(least, wanted):
            return f"{form} has {least} bytes, in step {before[-1].step} it had {wanted}"
    return ""


def agree(one: Files, other: Files, *, ends: SaveEnd = SaveEnd.NONE) -> bool:
    """Whether both have the same kinds of files, without a mark at their end also as many and about as large. Two saves
    that agree are not both interrupted: the trainer now saves other files."""
    first, second = (_by_form(files, sized=ends is SaveEnd.NONE) for files in (one, other))
    return first.keys() == second.keys() and all(
        len(sizes) == len(second[form])
        and not any(_is_too_small(a, b) or _is_too_small(b, a) for a, b in zip(sizes, second[form], strict=True))
        for form, sizes in first.items()
    )


def _content(file: RecordedFile) -> tuple[str, str, int, int]:
    return file.part, file.path, file.size, file.mtime_ns


def _by_form(files: Files, *, sized: bool = True) -> dict[str, list[int]]:
    """Name without its numbers -> the sizes of the files that have it, smallest first; not ``sized``: as if it were one
    empty file."""
    found = defaultdict[str, list[int]](list)
    for file in files:
        found[form_of(f"{file.part}/{file.path}")].append(file.size)
    return {form: sorted(sizes) if sized else [0] for form, sizes in found.items()}


def _is_too_small(size: int, wanted: int) -> bool:
    return size == 0 < wanted if wanted < _SMALL else size < wanted * (1 - _TOLERANCE)


# -- files -------------------------------------------------------------------------------------------------------------


class RecordFiles:
    """The records in one directory, with a copy in a second one, which lies in podwatch's directory beside output_dir.
    Blocks. A record that cannot be read is as good as lost: the checkpoint is inspected again."""

    def __init__(self, directory: Path, copy: Path | None = None, tree: PinnedTree | None = None) -> None:
        self.directory, self._copy, self._tree = directory, copy, tree

    def read(self) -> tuple[CheckpointRecord, ...]:
        """The copy adds what the first directory lacks."""
        found: dict[str, CheckpointRecord] = {}
        for directory in (self.directory, self._copy):
            for name in _names(directory):
                if directory is not None and name not in found and (record := _read(directory / name)) is not None:
                    found[name] = record
        return tuple(found.values())

    def stamp(self) -> int:
        """Changes when a record is added or removed."""
        try:
            return self.directory.stat().st_mtime_ns
        except OSError:
            return 0

    def write(self, record: CheckpointRecord) -> None:
        """Durable when it returns; the copy is best effort. OSError: it could not be written."""
        data = record.to_bytes()
        if self._copy is not None:
            with contextlib.suppress(OSError, HostError):
                self._write_copy(self._copy, record.name, data)
        self.directory.mkdir(parents=True, exist_ok=True)
        atomic_write(self.directory / record.name, data)

    def _write_copy(self, copy: Path, name: str, data: bytes) -> None:
        if self._tree is not None:
            self._tree.make(copy, 0o755)
            self._tree.write(copy / name, data, 0o644)
        else:
            copy.mkdir(parents=True, exist_ok=True)
            atomic_write(copy / name, data)

    def remove(self, record: CheckpointRecord) -> None:
        """The copy first: it would bring the record back."""
        if self._copy is not None:
            with contextlib.suppress(OSError, HostError):
                if self._tree is not None:
                    self._tree.unlink(self._copy / record.name)
                else:
                    (self._copy / record.name).unlink(missing_ok=True)
        (self.directory / record.name).unlink(missing_ok=True)


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


# -- the records of one layout -----------------------------------------------------------------------------------------


class CheckpointRecords:
    """The records of one layout in memory and, with ``files``, on disk. ``boot_wall``: when this boot began, epoch
    seconds, 0 if unknown. ``writes``: commands that only look change nothing.

    What cannot be written is known to this podwatch only: a later one inspects, and waits, again. One thread changes
    it; any thread reads it.
    """

    def __init__(
        self,
        files: RecordFiles | None = None,
        *,
        boot_id: str = "",
        boot_wall: float = 0.0,
        writes: bool = True,
    ) -> None:
        self.boot_id, self.boot_wall = boot_id, boot_wall
        self._files, self._writes = files, writes
        self._stamp: int | None = None
        self._all: dict[tuple[int, str], CheckpointRecord] = {}
        self._layout = ""
        self.known: Mapping[int, CheckpointRecord] = {}
        """Step -> the record of its newest save that is still here."""
        self.origins: Mapping[tuple[int, str], Recorded] = {}
        """(step, save_id) -> what its record says of its origin."""
        self.decided: Mapping[tuple[int, str], str] = {}
        """(step, save_id) -> why it is held back, empty if the operator released it."""
        self.doubted: frozenset[tuple[int, str]] = frozenset()
        """(step, save_id) of those with an implausible step."""
        self.restored: frozenset[tuple[int, str]] = frozenset()
        """(step, save_id) of what came from this run's store."""
        self.all: tuple[CheckpointRecord, ...] = ()
        """Oldest first."""

    def begin(self, layout: str) -> None:
        """Read what other commands wrote since the last time. Blocks."""
        self._layout = layout
        if self._files is not None and (stamp := self._files.stamp()) != self._stamp:
            self._stamp = stamp
            found = {record.key: record for record in self._files.read() if record.layout == layout}
            self._all = {**self._all, **found}
            self._learn()

    def of(self, step: int) -> CheckpointRecord | None:
        """Of the newest save of this step that is still here."""
        return self.known.get(step)

    def before(self, step: int) -> Sequence[CheckpointRecord]:
        """Those of lower steps with which the save of this step is compared."""
        return [r for r in self.all if r.step < step][-_COMPARED:]

    def same_save(self, step: int, files: Sequence[RecordedFile]) -> CheckpointRecord | None:
        """The record of exactly this save, also of one that was away."""
        return next((r for r in self._all.values() if r.step == step and is_same_save(r, files)), None)

    def note(self, record: CheckpointRecord) -> None:
        """Record a checkpoint that was found complete now. A save of this step that it replaces is gone. Blocks."""
        for other in [r for r in self._all.values() if r.step == record.step and r.key != record.key and not r.deleted]:
            self._keep(replace(other, deleted=True))
        self._keep(record)

    def grow(self, key: tuple[int, str], parts: Mapping[str, int], file_count: int) -> None:
        """By-products that came later: the save had to write them. Blocks."""
        record = self._all.get(key)
        if record is None:
            return
        larger = {name: size for name, size in parts.items() if size > record.parts.get(name, 0)}
        if larger or file_count > record.file_count:
            count = max(file_count, record.file_count)
            self._keep(replace(record, parts={**record.parts, **larger}, file_count=count))

    def change(self, key: tuple[int, str], **changes: Any) -> None:
        """Note what became known of a checkpoint, where it has a record. Blocks."""
        record = self._all.get(key)
        if record is not None:
            self._keep(replace(record, **changes))

    def keep_only(self, steps: Collection[int]) -> None:
        """Of steps that are gone, only the newest records stay: the next save is compared with them. Blocks."""
        for record in [r for r in self._all.values() if r.step not in steps and not r.deleted]:
            self._keep(replace(record, deleted=True))
        if len(self._all) <= RECENT:
            return
        spare = [r for n, r in enumerate(reversed(self.all)) if n >= MOST or (n >= RECENT and r.deleted)]
        for record in spare:
            self._all = {key: other for key, other in self._all.items() if other is not record}
            self._learn()
            if self._files is not None and self._writes:
                with contextlib.suppress(OSError):
                    self._files.remove(record)

    def _keep(self, record: CheckpointRecord) -> None:
        if self._all.get(record.key) == record:
            return
        self._all = {**self._all, record.key: record}
        self._learn()
        if self._files is not None and self._writes:
            known = self._files.stamp() == self._stamp  # else another command wrote one, which ``begin`` will read
            with contextlib.suppress(OSError, ValueError, PodwatchError):  # a name that no document can hold
                self._files.write(record)
            self._stamp = self._files.stamp() if known else None

    def _learn(self) -> None:
        self.all = tuple(sorted(self._all.values(), key=lambda r: (r.wall, r.step)))
        decided = (r for r in self._all.values() if r.held or r.released)
        self.decided = {r.key: "" if r.released else r.held for r in decided}
        self.doubted = frozenset(r.key for r in self._all.values() if r.doubted)
        self.restored = frozenset(r.key for r in self._all.values() if r.source is RecordSource.RESTORED)
        self.origins = {r.key: r.origin for r in self._all.values()}
        present = (record for record in self._all.values() if not record.deleted)
        self.known = {r.step: r for r in sorted(present, key=lambda r: (r.wall, r.save_id))}
