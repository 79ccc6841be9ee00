"""Checkpoint sets: all the parts of one step that must travel together."""

from dataclasses import dataclass
from enum import StrEnum


class Completeness(StrEnum):
    COMPLETE = "complete"
    WRITING = "writing"
    """Not whole yet and still changing, or whole but not quiet for the settle time."""
    INCOMPLETE = "incomplete"
    """Something is missing and nothing changes any more: a save that was cut off."""
    DAMAGED = "damaged"
    """Every piece is there and at least one is structurally broken."""


class HeldAs(StrEnum):
    """Why a set is held back. Only the first kind may still be the newest of the line that is trained now."""

    TWO_WRITERS = "two-writers"
    IMPLAUSIBLE = "implausible"
    """No training of this run can have written a step of this number."""
    EARLIER_BRANCH = "earlier-branch"
    """Saved by a lineage that this run has left."""


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One regular file of a set. ``path`` is POSIX, relative to the layout's root, never absolute, never ``..``."""

    path: str
    part: str
    size: int
    mtime_ns: int
    mode: int = 0o644
    inode: int = 0
    device: int = 0


@dataclass(frozen=True, slots=True, order=True)
class SymlinkEntry:
    """A symlink inside a set, with its target as text; relative and inside the set, or it is left out."""

    path: str
    part: str
    target: str


@dataclass(frozen=True, slots=True)
class PartState:
    """One part of a set (``trainer``, ``orchestrator``, ``weights``, ``broadcast``, ``rollouts``...).

    ``path`` is absolute. ``required`` parts are needed for a resume; the others are removed with the set but never
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
    """What the catalogue knows of one step on this pod.

    ``save_id`` identifies this very save (derived from paths, sizes, mtimes and the DCP save id): a step written
    again after a rollback has another. It is empty until the set is complete. ``reason`` says why a set is not
    complete. ``began_wall`` and ``changed_wall`` are the oldest and the newest mtime in epoch seconds. ``resumable``
    means complete and all required parts present. ``held`` says why a complete set is held back: it is not published,
    and not resumed from unless the operator names it; ``held_as`` is the kind of that reason.

    ``settles_in``: the set is whole, and counts as complete after so many seconds if nothing changes; None for every
    other set. ``unclear``: it could not be read or its structure is broken, so it may be what a run has left; it is
    never passed over in silence.
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
    began_wall: float = 0.0
    overtaken: bool = False
    """It is not whole, has not changed for the longest settle time, and a trainer that waits for its saves has begun a
    newer one since: nothing will be added to it. Only reported; it counts as ``writing`` until its time is over."""
    held: str = ""
    held_as: HeldAs | None = None

    @property
    def complete(self) -> bool:
        return self.completeness is Completeness.COMPLETE

    @property
    def of_line(self) -> bool:
        """May be of the line that is trained now: neither of an earlier branch, nor implausible."""
        return self.held_as not in (HeldAs.IMPLAUSIBLE, HeldAs.EARLIER_BRANCH)

    @property
    def earlier(self) -> bool:
        """Saved by a lineage that this run has left."""
        return self.held_as is HeldAs.EARLIER_BRANCH


def newest_complete(sets: "tuple[CheckpointSet, ...] | list[CheckpointSet]") -> CheckpointSet | None:
    """The complete set with the highest step that is not held back, or None."""
    return max((s for s in sets if s.complete and not s.held), key=lambda s: s.step, default=None)


def newest_whole(sets: "tuple[CheckpointSet, ...] | list[CheckpointSet]") -> CheckpointSet | None:
    """The complete set with the highest step of the line that is trained now, held back or not, or None: what must stay
    on the disk."""
    return max((s for s in sets if s.complete and s.of_line), key=lambda s: s.step, default=None)
