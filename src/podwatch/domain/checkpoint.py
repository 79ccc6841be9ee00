"""Checkpoints: all parts of one step, which are uploaded, restored and deleted together."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from podwatch.domain.document import FileMode, Integer, Many, RelativePath, Sparse, Text, Whole, matching

PartName = Annotated[str, matching(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")]
Digest = Annotated[str, matching(r"(?:sha1:[0-9a-f]{40}|sha256:[0-9a-f]{64})")]
"""The hash of an object in the store, as ``sha1:<hex>``: what the store itself compares."""
Identity = tuple[int, int, int, int]
"""Device, inode, size and mtime in nanoseconds of a file: another one is another file, or a changed one."""

NO_TRAINING = 10**15
"""No training reaches this step: a million steps a second for 30 years. Token and sample counters stay below it."""


class Completeness(StrEnum):
    COMPLETE = "complete"
    WRITING = "writing"
    """Not whole yet and still changing, or whole but changed within the settle time."""
    INCOMPLETE = "incomplete"
    """A part is missing and nothing changes any more: an interrupted save."""
    DAMAGED = "damaged"
    """Every file exists and at least one is structurally broken."""


class HeldAs(StrEnum):
    """Why a checkpoint is held back. Only one of the first kind can still be the newest of the current lineage."""

    TWO_WRITERS = "two-writers"
    IMPLAUSIBLE = "implausible"
    """No training of this run can have written a step with this number."""
    EARLIER_BRANCH = "earlier-branch"
    """Saved by a lineage that this run has left."""


@dataclass(frozen=True, slots=True, order=True)
class FileEntry(Sparse):
    """One regular file of a checkpoint, on this pod and in the store. ``path`` is POSIX, below the part's directory.
    ``inode`` and ``device``: which file was found complete; 0 away from its pod. ``hashes``: of each of its objects in
    the store, in their order; empty where they are not known."""

    path: RelativePath
    part: PartName
    size: Whole
    mtime_ns: Integer
    mode: FileMode = 0o644
    inode: Integer = 0
    device: Integer = 0
    hashes: Many[Digest] = ()

    @property
    def name(self) -> str:
        """Below its save in the store."""
        return f"{self.part}/{self.path}"

    @property
    def identity(self) -> Identity:
        return (self.device, self.inode, self.size, self.mtime_ns)


@dataclass(frozen=True, slots=True, order=True)
class SymlinkEntry:
    """A symlink inside a checkpoint, with its target as text. Only relative links that stay inside are included."""

    path: RelativePath
    part: PartName
    target: Text

    @property
    def name(self) -> str:
        return f"{self.part}/{self.path}"


@dataclass(frozen=True, slots=True)
class PartState:
    """One part of a checkpoint (``trainer``, ``orchestrator``, ``weights``, ``broadcast``, ``rollouts``...).

    ``path`` is absolute. A resume needs the ``required`` parts; the others are deleted with the checkpoint but never
    make it incomplete.
    """

    name: str
    path: str
    required: bool
    complete: bool
    size_bytes: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointSet:
    """The checkpoint of one step on this pod, as the catalogue knows it.

    ``save_id`` identifies this save (derived from paths, sizes, mtimes and the DCP save id): a step written again after
    a rollback has another one. It is empty until the checkpoint is complete. ``reason``: why it is not complete.
    ``began_wall`` and ``changed_wall``: the oldest and the newest mtime in epoch seconds. ``held``: why a complete
    checkpoint is held back, that is, not published, and not resumed from unless the operator names it; ``held_as`` is
    the kind of that reason.

    ``settles_in``: the checkpoint is whole and counts as complete after this many seconds without a change; None for
    every other one. ``unclear``: it could not be read or its structure is broken, so it may be the only checkpoint of
    the run; podwatch always reports it.
    """

    step: int
    layout: str
    completeness: Completeness
    parts: tuple[PartState, ...]
    size_bytes: int
    file_count: int
    changed_wall: float
    save_id: str = ""
    reason: str = ""
    settles_in: float | None = None
    unclear: bool = False
    unanswered: int = 0
    """How many inspections in a row gave no answer: a child that was killed, an I/O error, a time-out."""
    began_wall: float = 0.0
    held: str = ""
    held_as: HeldAs | None = None
    start_id: str = ""
    """The start that it belongs to (``domain.starts``); empty if it is older than every one."""
    ours: bool = True
    """It is this run's. Others are neither chosen nor uploaded until an operator adopts them."""
    remainder: bool = False
    """It was complete and was deleted: only parts outside the deleted directory are left."""

    @property
    def complete(self) -> bool:
        return self.completeness is Completeness.COMPLETE

    @property
    def of_line(self) -> bool:
        """Whether it can belong to the current lineage: neither of an earlier branch nor implausible."""
        return self.held_as not in (HeldAs.IMPLAUSIBLE, HeldAs.EARLIER_BRANCH)

    @property
    def earlier(self) -> bool:
        """Saved by a lineage that this run has left."""
        return self.held_as is HeldAs.EARLIER_BRANCH


def newest_complete(sets: "tuple[CheckpointSet, ...] | list[CheckpointSet]") -> CheckpointSet | None:
    """The complete checkpoint with the highest step that is not held back, or None."""
    return max((s for s in sets if s.complete and not s.held), key=lambda s: s.step, default=None)


def newest_whole(sets: "tuple[CheckpointSet, ...] | list[CheckpointSet]") -> CheckpointSet | None:
    """The complete checkpoint with the highest step of the current lineage, held back or not, or None. It must stay on
    the disk."""
    return max((s for s in sets if s.complete and s.of_line), key=lambda s: s.step, default=None)
