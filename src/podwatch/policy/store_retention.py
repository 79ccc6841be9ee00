"""Which saves podwatch deletes from the store, and which get optional parts (docs/sync.md).

Saves are ordered by ``seq``, never by step: after a step back the newest save can have a lower step than an older one.

Milestones must stay the same over time, although deleted saves leave the list, and although pointer moves without a
save also use seq numbers. So a milestone is not "each tenth entry of the list" but **the first save at or after each
multiple of keep_every in seq numbers**. It is fixed when it is published: later saves have higher numbers, and deleting
others never makes another one the first.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from podwatch.domain.policy import RemotePolicy

FOREIGN_GENERATION_GRACE_SECONDS = 24 * 3600.0
"""A pod may still be restoring from a save of another generation (docs/two-pods.md)."""


class StoredSave(Protocol):
    """The attributes of a published save that this module needs; ``journal.records.PublishedSave`` has them. ``wall``:
    publishing time (epoch seconds)."""

    @property
    def step(self) -> int: ...
    @property
    def save_id(self) -> str: ...
    @property
    def lineage(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def wall(self) -> float: ...


@dataclass(frozen=True, slots=True)
class RemoteRemoval:
    step: int
    save_id: str
    reason: str


def plan_remote(
    published: Iterable[StoredSave],
    pointer_save_ids: Collection[str],
    pins: Mapping[int, str],
    policy: RemotePolicy,
    now_wall: float,
    *,
    own_generation: int | None = None,
    kept: Collection[tuple[int, str]] = (),
) -> tuple[RemoteRemoval, ...]:
    """Saves to delete, oldest first.

    Never deleted: ``kept`` (step, save_id), the newest save, the last ``keep_last``, milestones, pinned steps, every
    save that a pointer names, and any save superseded less than ``superseded_grace_seconds`` ago (by the publishing
    time of its successor; a time in the future counts as now, so a clock that was set back only delays deletion). With
    ``own_generation``, saves of another generation stay for 24 h.
    """
    saves = in_order(published)
    fixed = milestones(saves, policy.keep_every)
    keep_last = max(1, policy.keep_last)
    removals: list[RemoteRemoval] = []
    for position, save in enumerate(saves[:-keep_last] if len(saves) > keep_last else []):
        if save.save_id in pointer_save_ids or save.step in pins or (save.step, save.save_id) in fixed:
            continue
        if (save.step, save.save_id) in kept:
            continue
        superseded_for = now_wall - max(save.wall, saves[position + 1].wall)
        grace = policy.superseded_grace_seconds
        if own_generation is not None and save.generation != own_generation:
            grace = max(grace, FOREIGN_GENERATION_GRACE_SECONDS)
        if superseded_for < grace:
            continue
        newer = len(saves) - position - 1
        removals.append(RemoteRemoval(save.step, save.save_id, f"{newer} newer saves are in the store"))
    return tuple(removals)


def earlier_newest(
    published: Iterable[StoredSave], lineage: str, parent_step: int | None
) -> frozenset[tuple[int, str]]:
    """(step, save_id) of the newest save of the lineage that was left for ``lineage`` at ``parent_step`` (None: at the
    beginning); empty once ``lineage`` has a save of its own in the store."""
    saves = in_order(published)
    base = -1 if parent_step is None else parent_step
    if any(s.lineage == lineage and s.step > base for s in saves):
        return frozenset()
    left = [(s.step, s.save_id) for s in saves if s.lineage != lineage]
    return frozenset(left[-1:])


def in_order(published: Iterable[StoredSave]) -> list[StoredSave]:
    """Each save once, with its newest record, ordered by seq."""
    newest_record: dict[tuple[int, str], StoredSave] = {}
    for save in published:
        key = (save.step, save.save_id)
        if key not in newest_record or save.seq > newest_record[key].seq:
            newest_record[key] = save
    return sorted(newest_record.values(), key=lambda s: (s.seq, s.generation, s.step, s.save_id))


def milestones(saves: Iterable[StoredSave], keep_every: int) -> frozenset[tuple[int, str]]:
    """(step, save_id) of the milestones. ``saves`` as ``in_order`` returns them."""
    if keep_every <= 0:
        return frozenset()
    first: dict[int, tuple[int, str]] = {}
    for save in saves:
        block = save.seq // keep_every
        if block > 0:  # before the first multiple there is no milestone yet
            first.setdefault(block, (save.step, save.save_id))
    return frozenset(first.values())


# -- optional parts --------------------------------------------------------------------------------------------------
# Parts that no resume needs: a layout's exports and ``[sync] extra``. Only published saves qualify: optional parts
# are uploaded afterwards and never delay required ones.

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
