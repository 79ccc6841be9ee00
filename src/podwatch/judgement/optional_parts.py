"""Which saves in the store get the parts that no resume needs: a layout's exports and ``[sync] extra`` (docs/sync.md).

Only published saves qualify: optional parts are uploaded afterwards and never delay required ones.
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
    """The saves that get optional parts, newest first. ``here``: saves still complete on this pod. ``when``:
    ``sync.optional_parts``; "none" excludes only the exports, so milestones and the final save still get the extras."""
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
    """The ``parts`` still to send. ``sent`` maps each sent part to its occasion. At the end of the run every part is
    checked once more: the export may have been written after the newest save was sent."""
    return tuple(p for p in parts if p not in sent or (kind is Kind.FINAL and sent[p] != kind))
