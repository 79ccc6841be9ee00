"""Which checkpoint goes, in which order, and why everything else stays (docs/disk.md). Pure.

Two triggers: usage above ``prune_above`` (down to ``prune_to``), and room: the next save, as big as the last ones times
``margin``, must fit before it comes, in bytes and in inodes. A percentage alone cannot protect: 85 % of a 250 GB disk
leaves 37 GB, less than one save.

Order: that of ``RemovalKind``. Complete checkpoints that the store lacks and would keep go only when a save of the
usual size does not fit otherwise, and only when it is near, because an upload may complete until then; the one that is
being uploaded goes last. The newest complete checkpoint never goes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from podwatch.config.settings import DiskSettings
from podwatch.disk.next_save import NextSave
from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs, newest_complete, newest_whole
from podwatch.domain.snapshot import DiskSample

_SURPLUS = "enough newer checkpoints are in the store"
ROOM_HYSTERESIS = 0.05
"""podwatch frees this much more of a save than needed, so that a growing log does not trigger the next deletion."""


class RemovalKind(StrEnum):
    """In the order of removal."""

    TRASH = "trash"
    QUARANTINE = "quarantine"
    INCOMPLETE = "incomplete-set"
    BY_PRODUCT = "by-product"
    OPTIONAL_PART = "optional-part"
    STORED = "stored-set"
    SURPLUS = "surplus-set"
    """Not in the store, which would not keep it either."""
    UNSTORED = "unstored-set"


class Trigger(StrEnum):
    NONE = "none"
    USAGE = "usage"
    ROOM = "room"
    INODES = "inodes"


class Protection(StrEnum):
    """Why podwatch must not delete a step."""

    UPLOADING = "uploading"
    """Its upload is stopped first."""
    RESUME_SOURCE = "resume-source"
    EARLIER_BRANCH = "earlier-branch"
    """Of a branch that training has left and that has no successor in the store yet."""
    EARLIER_NEWEST = "newest-of-earlier-branch"
    """The newest of those."""
    READING = "reading"
    """A hook or an evaluation reads it, within its time limit; a full disk costs training."""


YIELDING = frozenset({Protection.UPLOADING, Protection.EARLIER_BRANCH, Protection.READING})
"""Protections that end when the next save does not fit otherwise."""


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
class ByProduct:
    """Files of one step that belong to no checkpoint: a broadcast or rollouts. ``path`` is absolute."""

    path: str
    step: int
    bytes: int
    changed_wall: float


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What takes space outside checkpoints. ``linked``: step -> bytes of files of its checkpoint that have a name
    outside it, too: to delete the checkpoint does not free them."""

    quarantine: tuple[QuarantineEntry, ...] = ()
    by_products: tuple[ByProduct, ...] = ()
    trash_bytes: int = 0
    trash_path: str = ""
    linked: Mapping[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.trash_bytes + sum(e.bytes for e in self.quarantine) + sum(e.bytes for e in self.by_products)

    def on(self, device: int) -> "Leftovers":
        """Without quarantine on other file systems than ``device``; 0: unknown."""
        return replace(self, quarantine=tuple(e for e in self.quarantine if not device or e.device in (0, device)))


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """``stored``: (step, save_id) of what is whole in the store; None: no store is configured. ``surplus``: of what is
    not in it, and would be deleted there because enough newer saves of the same lineage are. ``elsewhere``: parts on
    other file systems than ``disk``. ``first_seen_wall``: checkpoints last changed before podwatch first guarded this
    directory are deleted only when they are in the store. ``steps_in_use``: by-products of this many steps below the
    newest complete checkpoint stay: inference samples with a policy up to two steps behind the trainer, more if the
    trainer is configured so."""

    checkpoints: Sequence[CheckpointSet]
    disk: DiskSample
    next_save: NextSave = field(default_factory=NextSave)
    stored: Collection[tuple[int, str]] | None = None
    surplus: Collection[tuple[int, str]] = ()
    pins: Mapping[int, str] = field(default_factory=dict)
    protected: Mapping[int, Protection] = field(default_factory=dict)
    leftovers: Leftovers = field(default_factory=Leftovers)
    first_seen_wall: float = 0.0
    steps_in_use: int = 2
    elsewhere: Collection[str] = ()

    def size_here(self, found: CheckpointSet) -> int:
        return found.size_bytes - sum(p.size_bytes for p in found.parts if p.name in self.elsewhere)

    def freed_by(self, found: CheckpointSet) -> int:
        """Bytes that the disk regains when it is deleted. Its upload, which keeps links of it, ends before that."""
        uploading = self.protected.get(found.step) is Protection.UPLOADING
        return max(0, self.size_here(found) - (0 if uploading else self.leftovers.linked.get(found.step, 0)))

    def is_stored(self, found: CheckpointSet) -> bool:
        return self.stored is not None and (found.step, found.save_id) in self.stored

    def is_surplus(self, found: CheckpointSet) -> bool:
        return (found.step, found.save_id) in self.surplus and not self.is_stored(found) and self.is_ours(found)

    def is_ours(self, found: CheckpointSet) -> bool:
        """Whether it changed since podwatch first guarded this directory."""
        return found.changed_wall >= self.first_seen_wall


@dataclass(frozen=True, slots=True)
class Removal:
    """One deletion. ``bytes``: what it frees. ``step`` is None if it is no checkpoint. ``path`` (absolute) is set then
    and for a single part. ``files``: inodes that this frees at least; 0 if not counted."""

    kind: RemovalKind
    bytes: int
    reason: str
    step: int | None = None
    path: str = ""
    part: str = ""
    files: int = 0


@dataclass(frozen=True, slots=True)
class Remaining:
    """``bytes``: what its removal would free."""

    step: int
    reason: str
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """``removals``: deletions in their order. ``remaining``: every other checkpoint, newest first, with the reason.

    ``target_bytes``: bytes to free. ``critical``: a save of the usual size does not fit unless podwatch deletes
    checkpoints that are not in the store, or not at all. ``waiting``: such checkpoints, deleted only when the save is
    near. ``missing_bytes`` and ``missing_inodes``: missing for a save of the usual size even after all of that;
    ``missing_for_biggest``: bytes missing for one as big as the biggest of the last ones.
    """

    removals: tuple[Removal, ...]
    remaining: tuple[Remaining, ...] = ()
    trigger: Trigger = Trigger.NONE
    target_bytes: int = 0
    critical: bool = False
    waiting: tuple[Removal, ...] = ()
    missing_bytes: int = 0
    missing_inodes: int = 0
    missing_for_biggest: int = 0

    @property
    def freed_bytes(self) -> int:
        return sum(r.bytes for r in self.removals)

    @property
    def shortfall_bytes(self) -> int:
        """Bytes of the target that are still missing after all ``removals``."""
        return max(0, self.target_bytes - self.freed_bytes)


def plan_removals(given: DiskFacts, policy: DiskSettings) -> RemovalPlan:
    """The deletions for this moment. More pressure never keeps a checkpoint that less pressure deletes."""
    need = pressure_of(given, policy)
    keep = _reasons_to_keep(given)
    taken = _Taken()
    for removal in _candidates(given, keep):
        last_resort = removal.kind is RemovalKind.UNSTORED
        size, files = (need.usual_room, need.usual_inodes) if last_resort else (need.target, need.inodes)
        frees_nothing = last_resort and taken.gain(removal) <= 0 and not need.usual_inodes
        if (taken.bytes < size or taken.files < files) and not frees_nothing:
            taken.add(removal, waits=last_resort and not given.next_save.near)
    last = any(r.kind is RemovalKind.UNSTORED for r in (*taken.now, *taken.later))
    missing = max(0, need.usual_room - taken.bytes), max(0, need.usual_inodes - taken.files)
    return RemovalPlan(
        removals=tuple(taken.now),
        remaining=_remaining(given, keep, taken),
        trigger=need.trigger,
        target_bytes=need.target,
        critical=last or any(missing),
        waiting=tuple(taken.later),
        missing_bytes=missing[0],
        missing_inodes=missing[1],
        missing_for_biggest=max(0, need.room - taken.bytes),
    )


# -- how much ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pressure:
    """Bytes and inodes to free. ``target``: for usage and room together, hysteresis included. ``room`` and ``inodes``:
    for the biggest save that can come. ``usual_room`` and ``usual_inodes``: for a save of the usual size."""

    trigger: Trigger
    target: int
    room: int
    inodes: int
    usual_room: int
    usual_inodes: int


def pressure_of(given: DiskFacts, policy: DiskSettings) -> Pressure:
    """What the next save and the usage threshold ask for, minus what a save in flight has already written."""
    disk, save, margin = given.disk, given.next_save, policy.margin
    writing = [s for s in given.checkpoints if s.completeness is Completeness.WRITING and not s.unclear]
    written = max((s.size_bytes for s in writing), default=0)
    written_files = max((s.file_count for s in writing), default=0)
    outgrown = written > save.usual_bytes * margin  # the save in flight is a big one

    def short(size: int, share: float) -> int:
        return max(0, int(size * share) - written - disk.free_bytes)

    def short_inodes(files: int) -> int:
        # Some file systems create inodes on demand and report 0.
        return max(0, int(files * margin) - written_files - disk.inodes_free) if disk.inodes_total > 0 else 0

    usage = 0
    if disk.used_ratio > policy.prune_above:
        usage = max(0, disk.used_bytes - int(policy.prune_to * disk.capacity_bytes))
    room = short(save.bytes, margin)
    ample = short(save.bytes, margin + ROOM_HYSTERESIS) if room else 0
    inodes, target = short_inodes(save.files), max(usage, ample)
    trigger = Trigger.NONE
    if target:
        trigger = Trigger.ROOM if ample >= usage else Trigger.USAGE
    elif inodes or disk.inodes_low:
        trigger = Trigger.INODES
    return Pressure(
        trigger,
        # Few inodes, but enough for the next save: the first candidate goes, then podwatch plans again.
        target=1 if trigger is Trigger.INODES and not inodes else target,
        room=room,
        inodes=inodes,
        usual_room=short(save.bytes if outgrown else save.usual_bytes, margin),
        usual_inodes=short_inodes(save.files if outgrown else save.usual_files),
    )


@dataclass(slots=True)
class _Taken:
    """The removals so far; ``later``: those that wait. A whole checkpoint replaces the removals of its parts."""

    now: list[Removal] = field(default_factory=list)
    later: list[Removal] = field(default_factory=list)
    bytes: int = 0
    files: int = 0

    def gain(self, removal: Removal) -> int:
        """The bytes that it frees besides those of its parts that are taken already."""
        return removal.bytes - sum(p.bytes for p in self._parts_of(removal))

    def add(self, removal: Removal, *, waits: bool) -> None:
        self.bytes += self.gain(removal)
        self.files += removal.files
        if waits:  # its parts are deleted now
            self.later.append(removal)
        else:
            parts = self._parts_of(removal)
            self.now = [*(r for r in self.now if r not in parts), removal]

    def _parts_of(self, removal: Removal) -> list[Removal]:
        return [] if removal.part else [r for r in self.now if r.part and r.step == removal.step]


# -- what may go, in order ---------------------------------------------------------------------------------------------


def _candidates(given: DiskFacts, keep: Mapping[int, str]) -> Iterator[Removal]:
    """Everything that may go, in the order of ``RemovalKind``. Within a kind the lowest step goes first: mtimes change
    when a checkpoint is restored, and higher steps of an earlier attempt are in quarantine."""
    left = given.leftovers
    if left.trash_bytes > 0:
        yield Removal(RemovalKind.TRASH, left.trash_bytes, "already in the trash", path=left.trash_path)
    for entry in sorted(left.quarantine, key=lambda e: (e.step, e.path)):
        if entry.expired and not entry.needed and entry.step not in given.pins:
            why = f"quarantine of step {entry.step} expired"
            yield Removal(RemovalKind.QUARANTINE, entry.bytes, why, path=entry.path)
    may_go = [s for s in sorted(given.checkpoints, key=lambda s: s.step) if s.step not in keep]
    free = [s for s in may_go if s.step not in given.protected and _takes_room(s, given)]
    for s in free:
        if not s.complete and given.is_ours(s):
            yield _whole(RemovalKind.INCOMPLETE, s, f"{s.completeness}: {s.reason or 'not whole'}", given)
    unused = _unused_below(given)
    for one in sorted(left.by_products, key=lambda e: (e.step, e.path)):
        if _is_unused(one, given, unused):
            why = f"of step {one.step}: belongs to no checkpoint, and training no longer needs it"
            yield Removal(RemovalKind.BY_PRODUCT, one.bytes, why, path=one.path)
    for s in free:
        if s.complete and s.step < unused and (given.is_stored(s) or given.is_ours(s)):
            for part in s.parts:
                if not part.required and part.size_bytes > 0 and part.name not in given.elsewhere:
                    why = "a resume does not need it"
                    yield Removal(RemovalKind.OPTIONAL_PART, part.size_bytes, why, s.step, part.path, part.name)
    stored = [s for s in free if s.complete and given.is_stored(s)]
    for s in stored:
        yield _whole(RemovalKind.STORED, s, "in the store, and a newer checkpoint is complete", given)
    surplus = [s for s in free if s.complete and given.is_surplus(s)]
    for s in surplus:
        yield _whole(RemovalKind.SURPLUS, s, f"{_SURPLUS}, and retention would not keep it there", given)
    safe = (*stored, *surplus)
    others = [s for s in may_go if s.complete and s not in safe and given.is_ours(s) and _takes_room(s, given)]
    for s in sorted(others, key=lambda s: _last_resort(s, given)):
        yield _whole(RemovalKind.UNSTORED, s, f"the next save does not fit; {_why_unstored(s, given)}", given)


def _whole(kind: RemovalKind, found: CheckpointSet, reason: str, given: DiskFacts) -> Removal:
    size = given.freed_by(found)
    all_linked = size == 0 < given.size_here(found)
    return Removal(kind, size, reason, found.step, files=0 if all_linked else found.file_count)


def _takes_room(found: CheckpointSet, given: DiskFacts) -> bool:
    """False if all of it is on another file system."""
    return given.size_here(found) > 0 or (found.size_bytes == 0 and found.file_count > 0)


def _last_resort(found: CheckpointSet, given: DiskFacts) -> tuple[int, int]:
    """Sort key. A stored checkpoint that a command reads goes first: only the command loses something. The one that is
    being uploaded goes last: if uploads take longer than two saves, it is always the oldest, and almost no checkpoint
    would reach the store (simulated: 1 of 60 at 15 MB/s, 12 with this order)."""
    protection = given.protected.get(found.step)
    if protection is Protection.READING and (given.is_stored(found) or given.is_surplus(found)):
        return 0, found.step
    return (2 if protection is Protection.UPLOADING else 1), found.step


def _why_unstored(found: CheckpointSet, given: DiskFacts) -> str:
    protection = given.protected.get(found.step)
    if protection is Protection.UPLOADING:
        return "podwatch stops its upload"
    if protection is Protection.READING:
        return "podwatch does not wait for the command that reads it"
    return "no store is configured" if given.stored is None else "not in the store"


def _is_unused(one: ByProduct, given: DiskFacts, unused: int) -> bool:
    """Whether no process reads it any more. A by-product from before podwatch's first start also needs a checkpoint
    that this run saved since, and must not be one that a resume from an older unstored checkpoint would read."""
    if one.step >= unused or one.step in given.pins or any(s.step == one.step for s in given.checkpoints):
        return False
    if one.changed_wall >= given.first_seen_wall:
        return True
    newest = newest_complete(tuple(given.checkpoints))
    if newest is None or not given.is_ours(newest):
        return False
    older = [s.step for s in given.checkpoints if s.complete and not given.is_ours(s)]
    return not any(step - given.steps_in_use <= one.step <= step for step in older)


def _unused_below(given: DiskFacts) -> int:
    """By-products of steps below this are not read by the running training nor after a resume."""
    newest = newest_complete(tuple(given.checkpoints))
    if newest is None:
        return 0
    resumed = (step for step, why in given.protected.items() if why not in YIELDING)
    return min((newest.step, *resumed)) - given.steps_in_use


# -- what stays, and why -----------------------------------------------------------------------------------------------


def _reasons_to_keep(given: DiskFacts) -> dict[int, str]:
    """Step -> why it stays regardless of the pressure. An upload alone is no such reason."""
    newest, whole = newest_complete(tuple(given.checkpoints)), newest_whole(tuple(given.checkpoints))
    found = ((s.step, _reason_to_keep(s, newest, whole, given)) for s in given.checkpoints)
    return {step: reason for step, reason in found if reason is not None}


def _reason_to_keep(
    s: CheckpointSet, newest: CheckpointSet | None, whole: CheckpointSet | None, given: DiskFacts
) -> str | None:
    protection = given.protected.get(s.step)
    if s.held_as is HeldAs.IMPLAUSIBLE:
        return f"possibly not of this run: {s.held}"
    if newest is not None and s.step == newest.step:
        return "the newest complete checkpoint"
    if whole is not None and s.step == whole.step:
        return "the newest complete checkpoint (held back)"
    if protection is not None and protection not in YIELDING:
        return f"protected: {protection}"
    if s.step in given.pins:
        return f"pinned: {given.pins[s.step]}"
    if s.completeness is Completeness.WRITING:
        return "being written"
    if newest is None:
        return "no complete checkpoint exists, so podwatch deletes none"
    if not s.complete and s.step > newest.step and s.changed_wall >= newest.changed_wall:
        # It may be the save in flight of a trainer that pauses for longer than the settle time.
        return "newer than the newest complete checkpoint: possibly still being saved"
    return None


def _remaining(given: DiskFacts, keep: Mapping[int, str], taken: _Taken) -> tuple[Remaining, ...]:
    gone = {r.step for r in taken.now if r.step is not None and not r.part}
    remaining = []
    for s in sorted(given.checkpoints, key=lambda s: -s.step):
        if s.step not in gone:
            size = given.freed_by(s) - sum(r.bytes for r in taken.now if r.step == s.step)
            remaining.append(Remaining(s.step, _why_it_stays(s, given, keep, taken), max(0, size)))
    return tuple(remaining)


def _why_it_stays(s: CheckpointSet, given: DiskFacts, keep: Mapping[int, str], taken: _Taken) -> str:
    if s.step in keep:
        return keep[s.step]
    waits = next((r for r in taken.later if r.step == s.step), None)
    if waits is not None:
        when = f", due in {(given.next_save.due_in or 0.0) / 60:.0f} min"
        return f"{waits.reason}: podwatch deletes it before the next save{when} unless it is stored"
    protection = given.protected.get(s.step)
    if protection is not None:
        return f"protected: {protection}"
    if s.complete and given.is_stored(s):
        return "in the store; no need to delete it yet"
    if s.complete and given.is_surplus(s):
        return f"{_SURPLUS}; no need to delete it yet"
    if not given.is_ours(s):
        return "older than podwatch's first start and not in the store"
    if not s.complete:
        return "incomplete; no need to delete it yet"
    if given.freed_by(s) <= sum(r.bytes for r in taken.now if r.step == s.step) and given.size_here(s) > 0:
        return "its files have other names outside it: to delete it frees nothing"
    return "no store is configured, and the next save fits" if given.stored is None else "not in the store"
