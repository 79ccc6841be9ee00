"""What podwatch deletes from the pod's disk, in which order, and why it keeps everything else (docs/disk.md).

Two triggers: usage above ``prune_above`` (down to ``prune_to``), and room: the next save, as big as the last ones
times ``margin``, must fit before it comes (``prediction``), in bytes and in inodes. A percentage alone cannot protect:
85 % of a 250 GB disk leaves 37 GB, less than one save.

Order: trash and expired quarantine; incomplete checkpoints that no process writes; old broadcasts and rollouts that
belong to no checkpoint; parts that a resume does not need; complete checkpoints in the store, oldest first. Only at the
critical threshold (a save of the usual size does not fit and nothing else can be deleted): complete checkpoints that
are not in the store, oldest first, and last one that is being uploaded; and only when the next save is near, because an
upload may complete until then. Never the newest complete checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from podwatch.config.settings import DiskSettings
from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs, newest_complete, newest_whole
from podwatch.domain.snapshot import DiskSample

INODES_BELOW = 0.05
"""podwatch acts if less than this share of inodes is free."""
ROOM_HYSTERESIS = 0.05
"""podwatch frees this much more of a save than needed, so that a growing log does not trigger the next deletion."""


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
    """Why podwatch must not delete a step."""

    UPLOADING = "uploading"
    """Can be deleted at the critical threshold if it is not the newest; its upload is stopped first."""
    RESUME_SOURCE = "resume-source"
    EARLIER_BRANCH = "earlier-branch"
    """Of a branch that training has left and that has no successor in the store yet; can be deleted at the critical
    threshold."""
    EARLIER_NEWEST = "newest-of-earlier-branch"
    """The newest of those: never deleted."""
    READING = "reading"
    """A hook or an evaluation reads it, within its time limit; can be deleted at the critical threshold, because a full
    disk costs training."""


YIELDING = frozenset({Protection.UPLOADING, Protection.EARLIER_BRANCH, Protection.READING})
"""Protections that end at the critical threshold."""


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """One entry in quarantine. ``needed``: it must stay, because the current lineage has no verified checkpoint above
    it yet. ``device``: its file system (st_dev), for counting only; 0: unknown."""

    path: str
    step: int
    bytes: int
    expired: bool
    needed: bool = False
    device: int = 0


@dataclass(frozen=True, slots=True)
class SpareEntry:
    """A by-product of one step that belongs to no checkpoint: a broadcast or rollouts. ``path`` is absolute."""

    path: str
    step: int
    bytes: int
    changed_wall: float


@dataclass(frozen=True, slots=True)
class Removal:
    """One deletion. ``step`` is None if it is no checkpoint. ``path`` (absolute) is set then and for a single part."""

    kind: RemovalKind
    bytes: int
    reason: str
    step: int | None = None
    path: str = ""
    part: str = ""
    files: int = 0
    """Inodes that this frees at least; 0 if not counted."""


@dataclass(frozen=True, slots=True)
class Kept:
    """``unlock``: the condition under which podwatch would delete it, in words that follow "if step N were"; empty if
    there is none."""

    step: int
    reason: str
    bytes: int = 0
    unlock: str = ""


@dataclass(frozen=True, slots=True)
class RemovalInput:
    """``next_save_bytes`` and ``next_save_files``: expected before podwatch can delete anything again; ``usual_bytes``
    and ``usual_files`` (None: the same): what probably comes, for the critical threshold. ``soon``: the
    save can begin at any moment, otherwise in ``due_in`` seconds. ``stored``: (step, save_id) whose manifest is
    published. ``first_seen_wall``: checkpoints last changed before podwatch first guarded this directory are deleted
    only when they are in the store. ``trash_path``: the directory that holds ``trash_bytes``."""

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
    """Always keep at least this much free space."""
    next_save_files: int = 0
    soon: bool = True
    due_in: float | None = None
    usual_bytes: int | None = None
    usual_files: int | None = None
    steps_in_use: int = 2
    """By-products of this many steps below the newest complete checkpoint stay: inference samples with a policy up to
    two steps behind the trainer, more if the trainer is configured so."""


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """``removals``: deletions in their order. ``kept``: every other checkpoint, newest first, with the reason.

    ``target_bytes``: bytes to free; ``shortfall_bytes``: bytes of it still missing after all ``removals``.
    ``critical``: a save of the usual size does not fit unless podwatch deletes checkpoints that are not in the store,
    or not at all. ``waiting``: such checkpoints, deleted only when the save is near. ``missing_bytes`` and
    ``missing_inodes``: missing for a save of the usual size even after all of that; ``missing_for_biggest``: bytes
    missing for one as big as the biggest of the last ones.
    """

    removals: tuple[Removal, ...]
    kept: tuple[Kept, ...]
    trigger: Trigger
    target_bytes: int
    shortfall_bytes: int
    critical: bool
    waiting: tuple[Removal, ...] = ()
    missing_bytes: int = 0
    missing_inodes: int = 0
    missing_for_biggest: int = 0

    @property
    def freed_bytes(self) -> int:
        return sum(r.bytes for r in self.removals)


def room_needed(sets: Sequence[CheckpointSet], next_save_bytes: int, margin: float) -> int:
    """Free bytes that the next save needs, minus what a save in flight has already written."""
    written = max((s.size_bytes for s in sets if s.completeness is Completeness.WRITING), default=0)
    return max(0, int(next_save_bytes * margin) - written)


def inodes_needed(sets: Sequence[CheckpointSet], next_save_files: int, margin: float) -> int:
    written = max((s.file_count for s in sets if s.completeness is Completeness.WRITING), default=0)
    return max(0, int(next_save_files * margin) - written)


@dataclass(frozen=True, slots=True)
class _Pressure:
    """Bytes and inodes to free. ``room`` and ``inodes``: for the biggest save that can come. ``usual_room`` and
    ``usual_inodes``: for a save of the usual size, even at the cost of checkpoints that are not in the store.
    ``ample_room``: ``room`` and the hysteresis. ``usage``: for the usage threshold."""

    room: int
    usual_room: int
    usual_inodes: int
    ample_room: int
    usage: int
    inodes: int
    inodes_low: bool

    @property
    def target(self) -> int:
        return max(self.usage, self.ample_room)

    @property
    def trigger(self) -> Trigger:
        if self.target > 0:
            return Trigger.ROOM if self.ample_room >= self.usage else Trigger.USAGE
        return Trigger.INODES if self.inodes > 0 or self.inodes_low else Trigger.NONE


def pressure_of(given: RemovalInput, policy: DiskSettings) -> _Pressure:
    disk, sets = given.disk, given.sets
    room = max(room_needed(sets, given.next_save_bytes, policy.margin), given.free_floor_bytes) - disk.free_bytes
    ample_room = 0
    if room > 0:
        ample = room_needed(sets, given.next_save_bytes, policy.margin + ROOM_HYSTERESIS)
        ample_room = max(ample, given.free_floor_bytes) - disk.free_bytes
    usual_bytes, usual_files = _usual(given, policy.margin)
    usual_room = max(room_needed(sets, usual_bytes, policy.margin), given.free_floor_bytes) - disk.free_bytes
    usage = 0
    if disk.used_ratio > policy.prune_above:
        usage = disk.used_bytes - int(policy.prune_to * disk.capacity_bytes)
    inodes = usual_inodes = 0
    if disk.inodes_total > 0:  # some file systems create inodes on demand and report 0
        inodes = inodes_needed(sets, given.next_save_files, policy.margin) - disk.inodes_free
        usual_inodes = inodes_needed(sets, usual_files, policy.margin) - disk.inodes_free
    return _Pressure(
        room=max(0, room),
        usual_room=max(0, usual_room),
        usual_inodes=max(0, usual_inodes),
        ample_room=ample_room,
        usage=max(0, usage),
        inodes=max(0, inodes),
        inodes_low=disk.inodes_total > 0 and disk.inodes_free < INODES_BELOW * disk.inodes_total,
    )


def _usual(given: RemovalInput, margin: float) -> tuple[int, int]:
    """Bytes and files of a save of the usual size; of the biggest if a save in flight has outgrown the usual one."""
    size, files = given.usual_bytes, given.usual_files
    written = max((s.size_bytes for s in given.sets if s.completeness is Completeness.WRITING), default=0)
    outgrown = size is not None and written > size * margin
    return (
        given.next_save_bytes if size is None or outgrown else size,
        given.next_save_files if files is None or outgrown else files,
    )


def plan_removal(given: RemovalInput, policy: DiskSettings) -> RemovalPlan:
    """Plan the deletions. Pure. More pressure never keeps a checkpoint that less pressure deletes."""
    pressure = pressure_of(given, policy)
    trigger = pressure.trigger
    # Few inodes, but enough for the next save: delete the first candidate, then plan again.
    target = 1 if trigger is Trigger.INODES and not pressure.inodes else pressure.target
    keep = _reasons_to_keep(given)
    removals: list[Removal] = []
    freed = inodes = 0
    if trigger is not Trigger.NONE:
        for removal in _willing(given, keep):
            if freed >= target and inodes >= pressure.inodes:
                break
            freed += _add(removals, removal)
            inodes = sum(r.files for r in removals)
    critical = pressure.usual_room > freed or pressure.usual_inodes > inodes
    waiting: list[Removal] = []
    if critical:
        for removal in _critical(given, keep, {r.step for r in removals if not r.part}):
            if freed >= pressure.usual_room and inodes >= pressure.usual_inodes:
                break
            if given.soon:
                freed += _add(removals, removal)
            else:  # bytes of its parts are already counted: they are deleted now
                waiting.append(removal)
                freed += removal.bytes - sum(p.bytes for p in _parts_of(removal, removals))
            inodes += removal.files
    return RemovalPlan(
        tuple(removals),
        _kept(given, keep, removals, waiting),
        trigger,
        target,
        max(0, target - sum(r.bytes for r in removals)),
        critical,
        tuple(waiting),
        max(0, pressure.usual_room - freed),
        max(0, pressure.usual_inodes - inodes),
        max(0, pressure.room - freed),
    )


def _add(removals: list[Removal], removal: Removal) -> int:
    """Append ``removal``; a whole checkpoint replaces the removals of its parts. Returns the additional bytes."""
    parts = _parts_of(removal, removals)
    for part in parts:
        removals.remove(part)
    removals.append(removal)
    return removal.bytes - sum(p.bytes for p in parts)


def _parts_of(whole: Removal, removals: Sequence[Removal]) -> list[Removal]:
    return [] if whole.part else [r for r in removals if r.part and r.step == whole.step]


@dataclass(frozen=True, slots=True)
class _Reason:
    """Why a checkpoint stays; ``by_pin``: only because of the operator's pin."""

    text: str
    by_pin: bool = False


def _reasons_to_keep(given: RemovalInput) -> dict[int, _Reason]:
    """Step -> why it stays regardless of the pressure. An upload alone is no such reason."""
    keep: dict[int, _Reason] = {}
    newest, whole = newest_complete(tuple(given.sets)), newest_whole(tuple(given.sets))
    for s in given.sets:
        protection = given.protected.get(s.step)
        if s.held_as is HeldAs.IMPLAUSIBLE:
            keep[s.step] = _Reason(f"possibly not of this run: {s.held}")
        elif newest is not None and s.step == newest.step:
            keep[s.step] = _Reason("the newest complete checkpoint")
        elif whole is not None and s.step == whole.step:
            keep[s.step] = _Reason("the newest complete checkpoint (held back)")
        elif protection is not None and protection not in YIELDING:
            keep[s.step] = _Reason(f"protected: {protection}")
        elif s.step in given.pins:
            keep[s.step] = _Reason(f"pinned: {given.pins[s.step]}", by_pin=True)
        elif s.completeness is Completeness.WRITING:
            keep[s.step] = _Reason("being written")
        elif newest is not None and not s.complete and s.step > newest.step and s.changed_wall >= newest.changed_wall:
            # It may be the save in flight of a trainer that pauses for longer than the settle time.
            keep[s.step] = _Reason("newer than the newest complete checkpoint: possibly still being saved")
        elif newest is None:
            keep[s.step] = _Reason("no complete checkpoint exists, so podwatch deletes none")
    return keep


def _willing(given: RemovalInput, keep: Mapping[int, _Reason]) -> Iterable[Removal]:
    """Everything that can be deleted below the critical threshold, in order."""
    if given.trash_bytes > 0:
        yield Removal(RemovalKind.TRASH, given.trash_bytes, "already in the trash", path=given.trash_path)
    for entry in sorted(given.quarantine, key=lambda e: (e.step, e.path)):
        if entry.expired and not entry.needed and entry.step not in given.pins:
            yield Removal(
                RemovalKind.QUARANTINE, entry.bytes, f"quarantine of step {entry.step} expired", path=entry.path
            )
    oldest_first = sorted(given.sets, key=_age)
    free = [s for s in oldest_first if s.step not in keep and s.step not in given.protected and _takes_room(s)]
    for s in free:
        if not s.complete and _ours_to_judge(s, given):
            yield Removal(
                RemovalKind.INCOMPLETE,
                s.size_bytes,
                f"{s.completeness}: {s.reason or 'not whole'}",
                s.step,
                files=s.file_count,
            )
    unused = _unused_below(given)
    for spare in sorted(given.spares, key=lambda e: (e.step, e.path)):
        if _idle_spare(spare, given, unused):
            why = f"of step {spare.step}: belongs to no checkpoint, and training no longer needs it"
            yield Removal(RemovalKind.SPARE, spare.bytes, why, path=spare.path)
    for s in free:
        if s.complete and s.step < unused and (_stored(s, given) or _ours_to_judge(s, given)):
            for part in s.parts:
                if not part.required and part.size_bytes > 0:
                    why = "a resume does not need it"
                    yield Removal(RemovalKind.OPTIONAL_PART, part.size_bytes, why, s.step, part.path, part.name)
    for s in free:
        if s.complete and _stored(s, given):
            yield Removal(
                RemovalKind.STORED_SET,
                s.size_bytes,
                "in the store, and a newer checkpoint is complete",
                s.step,
                files=s.file_count,
            )


def _idle_spare(spare: SpareEntry, given: RemovalInput, unused: int) -> bool:
    """Whether no process reads it any more. A by-product from before podwatch's first start also needs a checkpoint
    that this run saved since, and must not be one that a resume from an older unstored checkpoint would read."""
    if spare.step >= unused or spare.step in given.pins or any(s.step == spare.step for s in given.sets):
        return False
    if spare.changed_wall >= given.first_seen_wall:
        return True
    newest = newest_complete(tuple(given.sets))
    if newest is None or newest.changed_wall < given.first_seen_wall:
        return False
    older = [s.step for s in given.sets if s.complete and s.changed_wall < given.first_seen_wall]
    return not any(step - given.steps_in_use <= spare.step <= step for step in older)


def _unused_below(given: RemovalInput) -> int:
    """By-products of steps below this are not read by the running training nor after a resume."""
    newest = newest_complete(tuple(given.sets))
    if newest is None:
        return 0
    resumed = (step for step, why in given.protected.items() if why not in YIELDING)
    return min((newest.step, *resumed)) - given.steps_in_use


def _critical(given: RemovalInput, keep: Mapping[int, _Reason], gone: set[int | None]) -> Iterable[Removal]:
    """Oldest first, but the one being uploaded last: if uploads take longer than two saves, it is always the oldest,
    and almost no checkpoint would reach the store (simulated: 1 of 60 at 15 MB/s, 12 with this order)."""
    for s in sorted(given.sets, key=lambda s: _last_resort(s, given)):
        if not s.complete or s.step in keep or s.step in gone or not (_ours_to_judge(s, given) and _takes_room(s)):
            continue
        why = "not in the store" if given.has_store else "no store is configured"
        if given.protected.get(s.step) is Protection.UPLOADING:
            why = "podwatch stops its upload"
        elif given.protected.get(s.step) is Protection.READING:
            why = "podwatch does not wait for the command that reads it"
        reason = f"the next save does not fit; {why}"
        yield Removal(RemovalKind.UNSTORED_SET, s.size_bytes, reason, s.step, files=s.file_count)


def _last_resort(s: CheckpointSet, given: RemovalInput) -> tuple[int, int]:
    """A stored checkpoint that a command reads goes first: only the command loses something."""
    protection = given.protected.get(s.step)
    if protection is Protection.READING and _stored(s, given):
        return 0, _age(s)
    return (2 if protection is Protection.UPLOADING else 1), _age(s)


def _ours_to_judge(s: CheckpointSet, given: RemovalInput) -> bool:
    return s.changed_wall >= given.first_seen_wall


def _takes_room(s: CheckpointSet) -> bool:
    """False if all of it is on another file system."""
    return s.size_bytes > 0 or s.file_count > 0


def _stored(s: CheckpointSet, given: RemovalInput) -> bool:
    return (s.step, s.save_id) in given.stored


def _age(s: CheckpointSet) -> int:
    """Sort key, lowest step first: mtimes change when a checkpoint is restored, and higher steps of an earlier attempt
    are in quarantine."""
    return s.step


def _kept(
    given: RemovalInput, keep: Mapping[int, _Reason], removals: Sequence[Removal], waiting: Sequence[Removal]
) -> tuple[Kept, ...]:
    gone = {r.step for r in removals if r.step is not None and not r.part}
    later = {r.step: r for r in waiting}
    kept = []
    for s in sorted(given.sets, key=lambda s: -s.step):
        if s.step in gone:
            continue
        parts = sum(r.bytes for r in removals if r.step == s.step and r.part)
        reason = keep[s.step].text if s.step in keep else _why_still_here(s, given)
        if s.step in later:
            when = "" if given.due_in is None else f", due in {max(0.0, given.due_in) / 60:.0f} min"
            reason = f"{later[s.step].reason}: podwatch deletes it before the next save{when} unless it is stored"
        kept.append(Kept(s.step, reason, s.size_bytes - parts, _unlock(s, given, keep)))
    return tuple(kept)


def _unlock(s: CheckpointSet, given: RemovalInput, keep: Mapping[int, _Reason]) -> str:
    if s.step in keep:
        return "not pinned" if keep[s.step].by_pin else ""
    if s.complete and not _stored(s, given) and not _ours_to_judge(s, given):
        return "in the store"
    return ""


def _why_still_here(s: CheckpointSet, given: RemovalInput) -> str:
    protection = given.protected.get(s.step)
    if protection is not None:
        return f"protected: {protection}"
    if s.complete and _stored(s, given):
        return "in the store; no need to delete it yet"
    if not _ours_to_judge(s, given):
        return "older than podwatch's first start and not in the store"
    if not s.complete:
        return "incomplete; no need to delete it yet"
    return "not in the store" if given.has_store else "no store is configured, and the next save fits"
