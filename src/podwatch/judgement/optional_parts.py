"""Which saves carry what no resume needs: a layout's exports and ``[sync] extra`` (DESIGN section 5, "Optional parts").

Only saves that are published already are asked about: what is optional comes after, and never holds up what is needed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from podwatch.judgement.remote_retention import StoredSave, in_order, milestones

EXTRA = "extra"
"""The part that holds ``[sync] extra``."""
SaveKey = tuple[int, str]
"""(step, save_id)."""


class Kind(StrEnum):
    SAVE = "save"
    MILESTONE = "milestone"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class Occasion:
    step: int
    save_id: str
    kind: Kind

    @property
    def key(self) -> SaveKey:
        return (self.step, self.save_id)


def occasions(
    published: Iterable[StoredSave], here: Collection[SaveKey], *, when: str, keep_every: int, finished: bool
) -> tuple[Occasion, ...]:
    """Newest first. ``here`` are the saves that are still complete on this pod; ``when`` is ``sync.optional_parts``:
    "none" is about the exports only, so milestones and the final save carry extras all the same."""
    saves = in_order(published)
    fixed = milestones(saves, keep_every)
    found = []
    for save in reversed(saves):
        key = (save.step, save.save_id)
        if key not in here:
            continue
        if finished and save is saves[-1]:
            found.append(Occasion(*key, Kind.FINAL))
        elif key in fixed:
            found.append(Occasion(*key, Kind.MILESTONE))
        elif when == "all":
            found.append(Occasion(*key, Kind.SAVE))
    return tuple(found)


def still_owed(parts: Iterable[str], kind: Kind, sent: Mapping[str, str]) -> tuple[str, ...]:
    """``sent`` says at which occasion each part of the save was. At the end of the run all are looked at once more: the
    export may have been written after the newest save was sent."""
    return tuple(p for p in parts if p not in sent or (kind is Kind.FINAL and sent[p] != kind))
