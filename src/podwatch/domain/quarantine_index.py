"""The index of a quarantine: what was moved there. It is written before the first move, and read to finish the moves,
to return them, and to decide what can be deleted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from podwatch.domain.document import Document, Many, Real, Text, Whole, matching

INDEX, MOVING = "index.json", "moving.json"
"""Its names once all moves are done, and until then."""
Name = Annotated[str, matching(r"[0-9]+-[^/\x00]+")]
"""``<n>-<name>``: one plain segment."""


@dataclass(frozen=True, slots=True)
class QuarantineIndex(Document):
    """``number`` names the directory. ``step``: that of the start before which it was moved; None: a fresh one.
    ``steps`` maps every moved step to its completeness: a good checkpoint in quarantine stays protected until its
    replacement is safe. ``moves``: each path, and its name in the quarantine's directory."""

    KIND = "podwatch-quarantine"
    FILE = "the index of a quarantine"
    LARGEST = 16 << 20

    number: Whole
    wall: Real
    step: Whole | None = None
    lineage: Text = ""
    steps: Mapping[int, Text] = field(default_factory=dict)
    moves: Many[tuple[Text, Name]] = ()
