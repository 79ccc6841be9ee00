"""Which saves and unused objects podwatch deletes from the store, which saves get optional parts (docs/sync.md), and
which saves `runs archive` deletes (docs/runs.md).

Saves are ordered by ``seq``, never by step: after a step back the newest save can have a lower step than an older one.

Milestones must stay the same over time, although deleted saves leave the list, and although pointer moves without a
save also use seq numbers. So a milestone is not "each tenth entry of the list" but **the first save at or after each
multiple of keep_every in seq numbers**. It is fixed when it is published: later saves have higher numbers, and deleting
others never makes another one the first.

An operator archives a run from any machine with access to the bucket, often without the journal of the pod that
trained, so every decision rests on the store's contents alone.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from podwatch.domain.manifest import Pointer
from podwatch.domain.stored_checkpoint import KnownSaves, PublishedSave, StoredSave

if TYPE_CHECKING:
    from podwatch.config.settings import SyncSettings

SUPERSEDED_GRACE_SECONDS = 6 * 3600.0
"""A restore from a save that was just superseded may be running."""
FOREIGN_GENERATION_GRACE_SECONDS = 24 * 3600.0
"""A pod may still be restoring from a save of another generation (docs/two-pods.md)."""


@dataclass(frozen=True, slots=True)
class RemoteRemoval:
    step: int
    save_id: str
    reason: str


def plan_remote(
    published: Iterable[PublishedSave],
    pointer_save_ids: Collection[str],
    pins: Mapping[int, str],
    sync: "SyncSettings",
    now_wall: float,
    *,
    grace_seconds: float = SUPERSEDED_GRACE_SECONDS,
    own_generation: int | None = None,
    kept: Collection[tuple[int, str]] = (),
) -> tuple[RemoteRemoval, ...]:
    """Saves to delete, oldest first.

    Never deleted: ``kept`` (step, save_id), the newest save, the last ``keep_last``, milestones, pinned steps, every
    save that a pointer names, one without a seq (it was fetched, and its order is unknown), and any save superseded
    less than ``grace_seconds`` ago (by the publishing time of its successor; a time in the future counts as
    now, so a clock that was set back only delays deletion). With ``own_generation``, saves of another generation stay
    for 24 h.
    """
    saves = in_order(published)
    fixed = milestones(saves, sync.keep_every)
    keep_last = sync.keep_last
    removals: list[RemoteRemoval] = []
    for position, save in enumerate(saves[:-keep_last] if len(saves) > keep_last else []):
        if save.save_id in pointer_save_ids or save.step in pins or (save.step, save.save_id) in fixed:
            continue
        if (save.step, save.save_id) in kept or save.seq <= 0:
            continue
        superseded_for = now_wall - max(save.wall, saves[position + 1].wall)
        grace = grace_seconds
        if own_generation is not None and save.generation != own_generation:
            grace = max(grace, FOREIGN_GENERATION_GRACE_SECONDS)
        if superseded_for < grace:
            continue
        newer = len(saves) - position - 1
        removals.append(RemoteRemoval(save.step, save.save_id, f"{newer} newer saves are in the store"))
    return tuple(removals)


def earlier_newest(
    published: Iterable[PublishedSave], lineage: str, parent_step: int | None
) -> frozenset[tuple[int, str]]:
    """(step, save_id) of the newest save of the lineage that was left for ``lineage`` at ``parent_step`` (None: at the
    beginning); empty once ``lineage`` has a save of its own in the store."""
    saves = in_order(published)
    base = -1 if parent_step is None else parent_step
    if any(s.lineage == lineage and s.step > base for s in saves):
        return frozenset()
    left = [(s.step, s.save_id) for s in saves if s.lineage != lineage]
    return frozenset(left[-1:])


def handed_over(
    published: Iterable[PublishedSave],
    earlier: Iterable[PublishedSave],
    generation: int,
    *,
    since: int = 0,
    at: tuple[int, int] | None = None,
) -> KnownSaves | None:
    """What a pod that holds the run with ``generation`` lists for the next pod; None if nothing is certain. Of its own
    records those from before generation ``since`` are left out, because another pod has moved the pointer meanwhile,
    except the one that the pointer named ``at`` that (generation, seq)."""
    own = (s for s in published if s.generation >= since or (s.generation, s.seq) == at)
    known = [save for save in in_order([*own, *earlier]) if save.seq > 0]
    if not known or generation <= 0 or any(save.generation > generation for save in known):
        return None
    return KnownSaves(generation, known[-1].seq, tuple(known))


def taken_over(known: KnownSaves | None, pointer: Pointer | None, writer_id: str) -> tuple[PublishedSave, ...]:
    """The saves of earlier pods that retention judges too: those that the last heartbeat of another pod lists, in the
    order that they have now. ``pointer``: as read when this pod, ``writer_id``, won the run.

    Empty, so that all of them stay, where their order is not certain: a heartbeat is older than the pod that wrote the
    pointer (a frozen pod has written it late), or the pointer moved more than once since. One move is known: it is the
    pointer's own. Saves that are not listed stay; they only let others stay longer.
    """
    if known is None or pointer is None or pointer.writer_id == writer_id:
        return ()
    if known.generation < pointer.generation or not known.seq <= pointer.seq <= known.seq + 1:
        return ()
    named = (pointer.step, pointer.save_id)
    return tuple(
        replace(s, generation=pointer.generation, seq=pointer.seq) if (s.step, s.save_id) == named else s
        for s in known.saves
    )


def judged(
    published: Sequence[PublishedSave], earlier: Collection[PublishedSave], generation: int | None
) -> list[PublishedSave]:
    """What retention judges. The saves of ``earlier`` pods only once this pod has stored a save of its own with
    ``generation``: until then the newest save of a branch that training has left keeps its protection. And only if its
    own come after them: once the pointer was deleted, numbers begin again."""
    own = [save.seq for save in published if not save.restored and generation in (None, save.generation)]
    newer = bool(own) and all(save.seq < min(own) for save in earlier)
    return [*published, *(earlier if newer else ())]


def in_order(published: Iterable[PublishedSave]) -> list[PublishedSave]:
    """Each save once, with its newest record, ordered by seq."""
    newest_record: dict[tuple[int, str], PublishedSave] = {}
    for save in published:
        key = (save.step, save.save_id)
        if key not in newest_record or save.seq > newest_record[key].seq:
            newest_record[key] = save
    return sorted(newest_record.values(), key=lambda s: (s.seq, s.generation, s.step, s.save_id))


def milestones(saves: Iterable[PublishedSave], keep_every: int) -> frozenset[tuple[int, str]]:
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
    published: Iterable[PublishedSave], here: Collection[SaveKey], *, when: str, keep_every: int, finished: bool
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
# saves without a manifest. Objects known to lack podwatch's mark are never returned, and the others only when they are
# so old that no pod, frozen or slow, can still be working on them. Where a listing does not show the mark
# (``ours`` is None), the caller looks at what is returned and asks again.

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
    def id(self) -> str: ...
    @property
    def started_wall(self) -> float: ...
    @property
    def ours(self) -> bool | None: ...


class Version(Protocol):
    """One version of one object; ``stores.base.StoredObject`` is one."""

    @property
    def key(self) -> str: ...
    @property
    def file_id(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def ours(self) -> bool | None: ...
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
    """Uploads started at least ``grace`` seconds ago and not in ``live``, the ids that the journal plans to finish. One
    of which the store cannot tell whose it is stays: only the journal of the pod that started it shows that."""
    return tuple(
        Leftover("upload", u.key, u.id, "started and never finished")
        for u in unfinished
        if u.ours and u.id not in live and now_wall - u.started_wall >= grace
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
            and version.ours is not False
            and version.file_id not in named
            and now_wall - successor.uploaded_wall >= grace
        ):
            found.append(Leftover("version", version.key, version.file_id, "replaced by a later version", version.size))
        newer[version.key] = version
    return tuple(found)


CONTROLLER_JOURNAL_SECONDS = 90 * 86400.0
"""As incident bundles: decisions of a controller show what a month has cost."""
_CLAIM = re.compile(r"claims/(\d{1,18})-[A-Za-z0-9]{1,64}")
_DECISION = re.compile(r"journal/\d{8}T\d{6}Z-[0-9a-f]{8}\.json")
_PROBE = re.compile(r"podwatch-probe-[0-9a-f]{16}(?:-parts)?")
_MEASUREMENT = re.compile(r"[0-9a-f]{16}-\d")


def old_controller_records(
    versions: Iterable[Version], controller: str, now_wall: float, grace: float = ABANDONED_SECONDS
) -> tuple[Leftover, ...]:
    """Claims of a controller that one of a higher number replaced at least ``grace`` seconds ago, and old entries of
    its journal. ``controller``: the prefix of its records. The highest claim stays: the next number follows from it."""
    claims: list[tuple[int, Version]] = []
    found = []
    for version in versions:
        if not version.key.startswith(controller) or version.ours is False:
            continue
        name = version.key.removeprefix(controller)
        if claim := _CLAIM.fullmatch(name):
            claims.append((int(claim[1]), version))
        elif _DECISION.fullmatch(name) and now_wall - version.uploaded_wall >= CONTROLLER_JOURNAL_SECONDS:
            found.append(_version(version, "an old decision of the controller"))
    highest = max((number for number, _ in claims), default=0)
    since = min((v.uploaded_wall for number, v in claims if number == highest), default=now_wall)
    for number, version in claims:
        if number < highest and min(now_wall - since, now_wall - version.uploaded_wall) >= grace:
            found.append(_version(version, "a claim of the controller that a later one replaced"))
    return tuple(found)


def old_probes(
    versions: Iterable[Version], prefix: str, now_wall: float, grace: float = ABANDONED_SECONDS
) -> tuple[Leftover, ...]:
    """Objects with which a podwatch tried out a store and that it did not delete, because it was killed. ``prefix``:
    empty, or a path with its slash."""
    return tuple(
        _version(v, "a trial of the store that was interrupted")
        for v in versions
        if v.key.startswith(prefix)
        and _PROBE.fullmatch(v.key.removeprefix(prefix))
        and v.ours is not False
        and now_wall - v.uploaded_wall >= grace
    )


def old_probe_uploads(
    unfinished: Iterable[Begun], prefix: str, now_wall: float, grace: float = ABANDONED_SECONDS
) -> tuple[Leftover, ...]:
    """Unfinished uploads of such a trial, by their name. S3 shows no mark of them: the caller also looks at the size of
    their parts before it removes one."""
    return tuple(
        Leftover("upload", u.key, u.id, "a trial of the store that was interrupted")
        for u in unfinished
        if u.key.startswith(prefix)
        and u.key.endswith("-parts")
        and _PROBE.fullmatch(u.key.removeprefix(prefix))
        and u.ours is not False
        and now_wall - u.started_wall >= grace
    )


def old_measurements(
    versions: Iterable[Version], prefix: str, now_wall: float, grace: float = ABANDONED_SECONDS
) -> tuple[Leftover, ...]:
    """Objects below ``prefix`` with which `podwatch check --throughput` measured and that it did not delete."""
    return tuple(
        _version(v, "a measurement of the store that was interrupted")
        for v in versions
        if v.key.startswith(prefix)
        and _MEASUREMENT.fullmatch(v.key.removeprefix(prefix))
        and v.ours is not False
        and now_wall - v.uploaded_wall >= grace
    )


def _version(version: Version, reason: str) -> Leftover:
    return Leftover("version", version.key, version.file_id, reason, version.size)


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
        if all(v.ours is not False for v in inside) and now_wall - newest >= grace:
            size = sum(v.size for v in inside)
            found.append(Leftover("save", prefix, "", f"{len(inside)} objects without a manifest", size))
    return tuple(found)


ALIVE_SECONDS = 900.0
"""If a heartbeat or claim in the store is younger than this, a podwatch guards the run. Fifteen heartbeat intervals."""


class Keep(StrEnum):
    LATEST = "latest"
    MILESTONES = "milestones"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether ``save`` stays, and why. ``until`` (epoch seconds): when it can be deleted, if only its age keeps it."""

    save: StoredSave
    stays: bool
    reason: str
    until: float | None = None


def sign_of_life(walls: Iterable[float], now_wall: float) -> float | None:
    """Seconds since the newest of ``walls`` (heartbeat and claims, epoch seconds) if it is younger than
    ``ALIVE_SECONDS``, so that a podwatch guards the run; None otherwise. A time in the future counts as now."""
    age = now_wall - max(walls, default=-ALIVE_SECONDS)
    return max(0.0, age) if age < ALIVE_SECONDS else None


def plan_archive(
    saves: Sequence[StoredSave],
    keep: Keep,
    *,
    keep_every: int,
    pins: Collection[int],
    pointer_wall: float,
    now_wall: float,
) -> tuple[Decision, ...]:
    """Return a decision for each save, oldest first. ``pointer_wall``: when the pointer was written (epoch seconds).

    A save is superseded from the time the next one was written; the last one from the time the pointer left it.
    """
    ordered = sorted(saves, key=lambda s: (s.uploaded_wall, s.step, s.save_id))
    milestones = _milestones(ordered, keep_every) if keep is Keep.MILESTONES else frozenset[tuple[int, str]]()
    decisions = []
    for position, save in enumerate(ordered):
        if save.named:
            decisions.append(Decision(save, True, "latest.json names it"))
        elif save.problem:
            decisions.append(Decision(save, True, f"kept because podwatch cannot judge it: {save.problem}"))
        elif save.step in pins:
            decisions.append(Decision(save, True, "pinned"))
        elif (save.step, save.save_id) in milestones:
            decisions.append(Decision(save, True, "milestone"))
        else:
            later = ordered[position + 1].uploaded_wall if position + 1 < len(ordered) else pointer_wall
            until = max(later, save.uploaded_wall) + SUPERSEDED_SECONDS
            if now_wall < until:
                decisions.append(Decision(save, True, "superseded less than a day ago", until))
            else:
                decisions.append(Decision(save, False, "a newer save is kept"))
    return tuple(decisions)


def _milestones(saves: Sequence[StoredSave], keep_every: int) -> frozenset[tuple[int, str]]:
    """One save for every ``keep_every`` save intervals, counted in steps.

    The daemon counts milestones by ``seq``, which is only in its journal; steps give the same result, whether or not
    retention has already deleted saves. The interval is the smallest distance between two saves. In each stretch the
    first save is taken, preferring the lineage of the pointer.
    """
    steps = sorted({s.step for s in saves})
    if keep_every <= 0 or len(steps) < 2:
        return frozenset()
    span = keep_every * min(b - a for a, b in pairwise(steps))
    current = next((s.lineage for s in saves if s.named), "")
    best: dict[int, tuple[tuple[bool, int, float], StoredSave]] = {}
    for save in saves:
        stretch = save.step // span
        rank = (save.lineage != current, save.step, -save.uploaded_wall)
        if not save.problem and stretch > 0 and (stretch not in best or rank < best[stretch][0]):
            best[stretch] = (rank, save)
    return frozenset((save.step, save.save_id) for _, save in best.values())


def stale_artefacts(
    found: Mapping[str, Sequence[tuple[str, float]]], now_wall: float, *, most: Mapping[str, int], seconds: float
) -> tuple[str, ...]:
    """Keys of logs, incident bundles and configurations to delete: all but the newest ``most`` of each kind, and those
    older than ``seconds``. The newest of each kind always stays. ``found`` maps a kind to (key, upload time)."""
    stale: list[str] = []
    for kind, objects in found.items():
        newest_first = sorted(objects, key=lambda pair: (-pair[1], pair[0]))
        for place, (key, wall) in enumerate(newest_first):
            if place >= max(1, most.get(kind, 0)) or (place > 0 and now_wall - wall > seconds):
                stale.append(key)
    return tuple(stale)
