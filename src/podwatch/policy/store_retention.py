"""Which saves and unused objects podwatch deletes from the store, and which saves get optional parts (docs/sync.md).

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


# -- unused objects ----------------------------------------------------------------------------------------------------
# Three kinds, all invisible to a restore and billed by the byte: unfinished multipart uploads, superseded versions, and
# saves without a manifest. Only objects with podwatch's mark are returned, and only when they are so old that no pod,
# frozen or slow, can still be working on them.

ABANDONED_SECONDS = 24 * 3600.0
"""Another pod may have started it: no upload of one checkpoint takes a day, and a frozen pod that wakes later has lost
its token (B2's tokens are valid for 24 h)."""
SUPERSEDED_SECONDS = 24 * 3600.0
"""An old version of the pointer shows a reader the earlier newest save; the saves that any version of the pointer names
are protected for 24 h too."""


class Begun(Protocol):
    """An unfinished upload; ``stores.base.Unfinished`` is one."""

    @property
    def key(self) -> str: ...
    @property
    def upload(self) -> str: ...
    @property
    def started_wall(self) -> float: ...
    @property
    def ours(self) -> bool: ...


class Version(Protocol):
    """One version of one object; ``stores.base.StoredObject`` is one."""

    @property
    def key(self) -> str: ...
    @property
    def file_id(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def ours(self) -> bool: ...
    @property
    def uploaded_wall(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Leftover:
    """``what`` is ``upload`` (by its id), ``version`` (by key and file id) or ``save`` (everything below ``key``)."""

    what: str
    key: str
    identifier: str
    reason: str
    size_bytes: int = 0


def abandoned_uploads(
    unfinished: Iterable[Begun], live: Collection[str], now_wall: float, grace: float = ABANDONED_SECONDS
) -> tuple[Leftover, ...]:
    """Uploads started at least ``grace`` seconds ago and not in ``live``, the ids that the journal plans to finish."""
    return tuple(
        Leftover("upload", u.key, u.upload, "started and never finished")
        for u in unfinished
        if u.ours and u.upload not in live and now_wall - u.started_wall >= grace
    )


def superseded_versions(
    versions: Iterable[Version], named: Collection[str], now_wall: float, grace: float = SUPERSEDED_SECONDS
) -> tuple[Leftover, ...]:
    """Versions that are not the newest of their key and that no manifest or pointer in use names by id.

    ``versions``: all below the run, newest first within a key. The age that counts is that of the next newer version.
    A store without versions has none.
    """
    found, newer = [], dict[str, Version]()
    for version in versions:
        successor = newer.get(version.key)
        if (
            successor is not None
            and version.ours
            and version.file_id not in named
            and now_wall - successor.uploaded_wall >= grace
        ):
            found.append(Leftover("version", version.key, version.file_id, "replaced by a later version", version.size))
        newer[version.key] = version
    return tuple(found)


def orphaned_saves(
    versions: Iterable[Version],
    save_of: Mapping[str, str],
    live: Collection[str],
    now_wall: float,
    grace: float = ABANDONED_SECONDS,
) -> tuple[Leftover, ...]:
    """Saves without a manifest to which no object was added for ``grace`` seconds.

    ``save_of`` maps the key of an object in a save to the save's prefix (``.../step_N/<save_id>/``). ``live``: prefixes
    of saves being uploaded. A save that contains an object without podwatch's mark is never returned.
    """
    saves: dict[str, list[Version]] = {}
    for version in versions:
        prefix = save_of.get(version.key)
        if prefix is not None:
            saves.setdefault(prefix, []).append(version)
    found = []
    for prefix, inside in sorted(saves.items()):
        if prefix in live or any(v.key == f"{prefix}manifest.json" for v in inside):
            continue
        newest = max(v.uploaded_wall for v in inside)
        if all(v.ours for v in inside) and now_wall - newest >= grace:
            size = sum(v.size for v in inside)
            found.append(Leftover("save", prefix, "", f"{len(inside)} objects without a manifest", size))
    return tuple(found)
