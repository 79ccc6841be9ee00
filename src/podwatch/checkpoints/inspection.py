"""What an inspection says of one save: the one shape from the child that reads to what ``verify`` prints."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from podwatch.checkpoints.table import SaveEnd
from podwatch.domain.document import Document


class InspectionOutcome(StrEnum):
    WHOLE = "whole"
    NOT_COMPLETE = "not complete"
    DAMAGED = "damaged"
    """Nothing is missing, and a file is broken."""
    UNKNOWN = "unknown"
    """It could not be inspected: no evidence about the checkpoint."""


@dataclass(frozen=True, slots=True)
class Inspection(Document):
    """What is known of one save. ``reason``: exactly what it lacks. ``ends``: the evidence that the save has ended,
    which decides the settle time. ``save_token`` identifies this save from inside (the DCP save id)."""

    FILE: ClassVar[str] = "answer of an inspection"

    outcome: InspectionOutcome
    reason: str = ""
    ends: SaveEnd = SaveEnd.NONE
    save_token: str = ""
    world_size: int | None = None
    is_export: bool = False
    """The trainer finished it without the state that a resume needs: no interrupted save, and never removed."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Part -> its problem, for the parts that have one."""
    faults: tuple[str, ...] = ()
    """Everything that is wrong, at most some dozens; ``reason`` is the first of it."""
    leftovers: tuple[str, ...] = ()
    """``<part>/<path>`` of files that are there but do not belong to this save; never uploaded."""
    hole: str = ""
    """The first large file with a range that was never written: suspicious, but no proof of damage."""
    unsized: str = ""
    """The first file whose format does not show whether its end is there."""
    checked: int = 0
    """Number of files whose structure was checked."""
    unchecked: int = 0
    pending: bool = False
    """The main part was not started: the present files belong to a later save, and nothing is being written."""
    deleted: bool = False
    """The directory that the trainer (or an operator) deletes with a checkpoint is not there: if the checkpoint was
    complete, its other parts are what is left of it (``remainder``), and not damage."""
    remainder: bool = False
    lacks: bool = False
    """It is whole by its own files, and lacks a kind of file that the saves before it have, or that such saves usually
    have."""
    unusual: str = ""
    """What it lacks of what such saves usually have, and a resume needs: an optimizer."""
    rests_on: tuple[Path, ...] = ()
    """Files outside the parts (a tracker in the parent) that the rule read: when one of them changes, the step must be
    judged again although its own files did not change."""

    def accepted(self) -> "Inspection":
        """The same of a save that needs nothing of what it lacks."""
        return replace(self, outcome=InspectionOutcome.WHOLE, lacks=False, reason="") if self.lacks else self

    @property
    def whole(self) -> bool:
        return self.outcome is InspectionOutcome.WHOLE

    @property
    def damaged(self) -> bool:
        return self.outcome is InspectionOutcome.DAMAGED

    @property
    def unreadable(self) -> bool:
        """No evidence about the checkpoint, which must not be removed."""
        return self.outcome is InspectionOutcome.UNKNOWN

    @property
    def reasons(self) -> tuple[str, ...]:
        """Everything that is wrong with it; empty if it is whole."""
        return () if self.whole else tuple(dict.fromkeys((self.reason, *self.faults)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is suspicious or unknown, but no proof of damage."""
        hole = f"{self.hole} has ranges that were never written: preallocated and not filled, or a sparse copy"
        unsized = f"{self.unsized} has the old torch format: only its size shows whether it is truncated"
        unchecked = f"{self.unchecked} files have a format without a structure that podwatch can check"
        said = ((self.hole, hole), (self.unsized, unsized), (self.unchecked, unchecked))
        return tuple(text for holds, text in said if holds)
