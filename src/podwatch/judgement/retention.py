"""What may leave the disk of the pod, in which order, and why everything else stays (DESIGN section 6; promise 2).

Two triggers: usage above ``prune_above`` (down to ``prune_to``), and room: the next save, as big as the last ones
times ``margin``, must fit before it comes. A percentage alone cannot protect: 85 % of a 250 GB disk leaves 37 GB,
less than one save (facts/peers.md section 1).

Order: trash and expired quarantine; incomplete sets that nobody writes; old broadcasts and rollouts that belong to no
set; parts that a resume does not need; complete sets in the store, oldest first. Only at the critical mark (the next
save does not fit and nothing else can go): complete sets that are not in the store, oldest first, even one being
uploaded. Never the newest complete set.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from podwatch.domain.checkpoint import CheckpointSet, Completeness, newest_complete
from podwatch.domain.policy import DiskPolicy
from podwatch.domain.snapshot import DiskSample

SETS_FOR_PREDICTION = 3
"""The next save is expected as big as the biggest of the last few: a first save without optimizer state, or a
milestone that carries an export, must not make the guess too small."""

STEPS_IN_USE = 2
"""By-products of so many steps below the newest complete set, and of everything above them, stay: inference samples
with a policy up to two steps behind the trainer (facts/prime-rl.md section 1), and the trainer is never behind the
newest complete set. What prime-rl itself would still remove lies there too, so the two never meet in one directory."""


class RemovalKind(StrEnum):
    TRASH = "trash"
    QUARANTINE = "quarantine"
    INCOMPLETE = "incomplete-set"
    SPARE = "by-product"
    OPTIONAL_PART = "optional-part"
    STORED_SET = "stored-set"
    UNSTORED_SET = "unstored-set"


class Trigger(StrEnum):
    NONE = "none"
    USAGE = "usage"
    ROOM = "room"
    INODES = "inodes"


class Protection(StrEnum):
    """Why a step must not be touched."""

    UPLOADING = "uploading"
    """May go at the critical mark if it is not the newest: its upload is stopped first."""
    RESUME_SOURCE = "resume-source"
    RESTORING = "restoring"
    WRITING = "writing"
    UNCONFIRMED = "unconfirmed"
    """The last resume could not be confirmed by a step number."""


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """Something set aside. ``needed`` is true while it must stay: its new line has no verified set beyond it yet."""

    path: str
    step: int
    bytes: int
    expired: bool
    needed: bool = False


@dataclass(frozen=True, slots=True)
class SpareEntry:
    """A by-product of one step that belongs to no checkpoint: an old broadcast or rollouts. ``path`` is absolute."""

    path: str
    step: int
    bytes: int
    changed_wall: float


@dataclass(frozen=True, slots=True)
class Removal:
    """``step`` is None for what is no checkpoint set; ``path`` is set for that and for a single part (absolute)."""

    kind: RemovalKind
    bytes: int
    reason: str
    step: int | None = None
    path: str = ""
    part: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class RemovalInput:
    """``stored`` are (step, save_id) whose manifest is published. ``first_seen_wall``: sets last changed before
    podwatch first guarded this directory go only once they are in the store. ``trash_path`` is what ``trash_bytes``
    lie in."""

    sets: Sequence[CheckpointSet]
    disk: DiskSample
    next_save_bytes: int
    has_store: bool
    stored: frozenset[tuple[int, str]] = frozenset()
    pins: Mapping[int, str] = field(default_factory=dict)
    protected: Mapping[int, Protection] = field(default_factory=dict)
    quarantine: Sequence[QuarantineEntry] = ()
    spares: Sequence[SpareEntry] = ()
    trash_bytes: int = 0
    trash_path: str = ""
    first_seen_wall: float = 0.0
    free_floor_bytes: int = 0
    """Never plan for less free space than this, whatever the percentage says."""


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """``removals`` in the order in which they are to be done; ``kept`` every other set, newest first, with the reason.

    ``target_bytes`` is what has to come free, ``shortfall_bytes`` what is still missing after all removals.
    ``critical``: the next save would not fit without taking sets that are not in the store, or does not fit at all.
    """

    removals: tuple[Removal, ...]
    kept: tuple[Kept, ...]
    trigger: Trigger
    target_bytes: int
    shortfall_bytes: int
    critical: bool

    @property
    def freed_bytes(self) -> int:
        return sum(r.bytes for r in self.removals)


def predict_next_save(sets: Iterable[CheckpointSet]) -> int:
    """Bytes of the next save, without margin: the biggest of the newest complete sets; 0 when none was seen yet."""
    complete = sorted((s for s in sets if s.complete), key=lambda s: (s.changed_wall, s.step))
    return max((s.size_bytes for s in complete[-SETS_FOR_PREDICTION:]), default=0)


def room_needed(sets: Sequence[CheckpointSet], next_save_bytes: int, policy: DiskPolicy) -> int:
    """Free bytes the next save needs. What a save in flight has already written need not be free a second time."""
    written = max((s.size_bytes for s in sets if s.completeness is Completeness.WRITING), default=0)
    return max(0, int(next_save_bytes * policy.margin) - written)


def plan_removal(given: RemovalInput, policy: DiskPolicy) -> RemovalPlan:
    """Plan. Pure: the same input gives the same plan, and more pressure never keeps what less pressure removed."""
    disk = given.disk
    room = room_needed(given.sets, given.next_save_bytes, policy)
    inodes_low = disk.inodes_total > 0 and disk.inodes_free < policy.inodes_below * disk.inodes_total
    by_usage = 0
    if disk.used_ratio > policy.prune_above:
        by_usage = max(0, disk.used_bytes - int(policy.prune_to * disk.capacity_bytes))
    by_room = max(0, max(room, given.free_floor_bytes) - disk.free_bytes)
    target = max(by_usage, by_room)
    trigger = Trigger.NONE
    if target > 0:
        trigger = Trigger.ROOM if by_room >= by_usage else Trigger.USAGE
    elif inodes_low:
        # How many inodes a set frees is not known: take the first thing that may go, and look again.
        trigger, target = Trigger.INODES, 1
    keep = _reasons_to_keep(given)
    removals: list[Removal] = []
    freed = 0
    if trigger is not Trigger.NONE:
        for removal in _willing(given, keep):
            if freed >= target:
                break
            freed += _add(removals, removal)
    critical = by_room > freed
    if critical:
        for removal in _critical(given, keep, {r.step for r in removals if not r.part}):
            if freed >= by_room:
                break
            freed += _add(removals, removal)
    return RemovalPlan(tuple(removals), _kept(given, keep, removals), trigger, target, max(0, target - freed), critical)


def _add(removals: list[Removal], removal: Removal) -> int:
    """Append; a whole set takes the place of its parts that were to go before. Returns the bytes this adds."""
    parts = [r for r in removals if r.part and r.step == removal.step] if not removal.part else []
    for part in parts:
        removals.remove(part)
    removals.append(removal)
    return removal.bytes - sum(p.bytes for p in parts)


def _reasons_to_keep(given: RemovalInput) -> dict[int, str]:
    """Step -> why it stays whatever the pressure; "uploading" is not among these."""
    keep: dict[int, str] = {}
    newest = newest_complete(tuple(given.sets))
    for s in given.sets:
        protection = given.protected.get(s.step)
        if newest is not None and s.step == newest.step:
            keep[s.step] = "the newest complete checkpoint"
        elif protection is not None and protection is not Protection.UPLOADING:
            keep[s.step] = f"protected: {protection}"
        elif s.step in given.pins:
            keep[s.step] = f"pinned: {given.pins[s.step]}"
        elif s.completeness is Completeness.WRITING:
            keep[s.step] = "being written"
        elif newest is not None and not s.complete and s.step > newest.step and s.changed_wall >= newest.changed_wall:
            # It may be the save in flight of a trainer that pauses for longer than the settle time.
            keep[s.step] = "newer than the newest complete checkpoint: perhaps still being saved"
        elif newest is None:
            keep[s.step] = "no complete checkpoint exists: nothing is thrown away"
    return keep


def _willing(given: RemovalInput, keep: Mapping[int, str]) -> Iterable[Removal]:
    """Everything that may go before the critical mark, in order."""
    if given.trash_bytes > 0:
        yield Removal(RemovalKind.TRASH, given.trash_bytes, "already thrown away", path=given.trash_path)
    for entry in sorted(given.quarantine, key=lambda e: (e.step, e.path)):
        if entry.expired and not entry.needed and entry.step not in given.pins:
            yield Removal(
                RemovalKind.QUARANTINE, entry.bytes, f"quarantine of step {entry.step} expired", path=entry.path
            )
    oldest_first = sorted(given.sets, key=_age)
    free = [s for s in oldest_first if s.step not in keep and s.step not in given.protected]
    for s in free:
        if not s.complete and _ours_to_judge(s, given):
            yield Removal(RemovalKind.INCOMPLETE, s.size_bytes, f"{s.completeness}: {s.reason or 'not whole'}", s.step)
    unused = _unused_below(given)
    belongs = {s.step for s in given.sets}
    for spare in sorted(given.spares, key=lambda e: (e.step, e.path)):
        ours = spare.changed_wall >= given.first_seen_wall and spare.step not in given.pins
        if spare.step < unused and spare.step not in belongs and ours:
            why = f"of step {spare.step}: belongs to no checkpoint, and training is past it"
            yield Removal(RemovalKind.SPARE, spare.bytes, why, path=spare.path)
    for s in free:
        if s.complete and s.step < unused and (_stored(s, given) or _ours_to_judge(s, given)):
            for part in s.parts:
                if not part.required and part.size_bytes > 0:
                    why = "a resume does not need it"
                    yield Removal(RemovalKind.OPTIONAL_PART, part.size_bytes, why, s.step, part.path, part.name)
    for s in free:
        if s.complete and _stored(s, given):
            yield Removal(RemovalKind.STORED_SET, s.size_bytes, "in the store, and a newer one is complete", s.step)


def _unused_below(given: RemovalInput) -> int:
    """By-products of steps below this are read by nobody: not by what trains now, nor after a resume."""
    newest = newest_complete(tuple(given.sets))
    if newest is None:
        return 0
    resumed = (step for step, why in given.protected.items() if why is not Protection.UPLOADING)
    return min((newest.step, *resumed)) - STEPS_IN_USE


def _critical(given: RemovalInput, keep: Mapping[int, str], gone: set[int | None]) -> Iterable[Removal]:
    for s in sorted(given.sets, key=_age):
        if not s.complete or s.step in keep or s.step in gone or not _ours_to_judge(s, given):
            continue
        why = "not in the store" if given.has_store else "no store is configured"
        if given.protected.get(s.step) is Protection.UPLOADING:
            why = "its upload is stopped"
        yield Removal(RemovalKind.UNSTORED_SET, s.size_bytes, f"the next save does not fit; {why}", s.step)


def _ours_to_judge(s: CheckpointSet, given: RemovalInput) -> bool:
    return s.changed_wall >= given.first_seen_wall


def _stored(s: CheckpointSet, given: RemovalInput) -> bool:
    return (s.step, s.save_id) in given.stored


def _age(s: CheckpointSet) -> int:
    """Oldest first is lowest step first: mtimes change when a set is restored, and what was left behind is in
    quarantine.
    """
    return s.step


def _kept(given: RemovalInput, keep: Mapping[int, str], removals: Sequence[Removal]) -> tuple[Kept, ...]:
    gone = {r.step for r in removals if r.step is not None and not r.part}
    kept = []
    for s in sorted(given.sets, key=lambda s: -s.step):
        if s.step in gone:
            continue
        kept.append(Kept(s.step, keep.get(s.step) or _why_still_here(s, given)))
    return tuple(kept)


def _why_still_here(s: CheckpointSet, given: RemovalInput) -> str:
    protection = given.protected.get(s.step)
    if protection is not None:
        return f"protected: {protection}"
    if s.complete and _stored(s, given):
        return "in the store; no need to remove it yet"
    if not _ours_to_judge(s, given):
        return "older than podwatch's first start and not in the store"
    if not s.complete:
        return "incomplete; no need to remove it yet"
    return "not in the store" if given.has_store else "no store is configured, and the next save fits"
