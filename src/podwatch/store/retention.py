"""Which saves and other objects of a run podwatch deletes from the store. Pure; for retention, for `runs archive`, and
for what crashes left behind.

Saves are ordered by (generation, seq), never by step: after a step back the newest save can have a lower step. One
that never was the newest has no seq: by its order alone it would replace newer ones of an earlier life of podwatch. A
milestone is the first save at or after each multiple of ``keep_every`` in seq: later saves have higher numbers, and
deleting others never makes another one the first. All ages are by the store's clock, whose present time is at least
the time of the newest document.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from podwatch.store.inventory import Inventory, SaveKey, Stored, Unfinished
from podwatch.store.pointers import PointerSeen


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """``superseded``: a restore from a save that was just replaced may be running. ``named``: another pod may still
    restore what a pointer named. ``unfinished``: no upload pauses that long."""

    keep_last: int = 3
    keep_every: int = 10
    superseded: float = 6 * 3600.0
    named: float = 24 * 3600.0
    unfinished: float = 24 * 3600.0
    keep_pointers: int = 100


@dataclass(frozen=True, slots=True)
class SaveVerdict:
    """``until``: when it can be deleted, if only its age keeps it."""

    save: Stored
    stays: bool
    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """``saves``: a verdict for each, in their order. ``blocked``: why nothing can be deleted that a pointer could
    name."""

    saves: tuple[SaveVerdict, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    pointers: tuple[PointerSeen, ...] = ()
    tmp: tuple[str, ...] = ()
    blocked: str = ""

    @property
    def deleted(self) -> tuple[SaveVerdict, ...]:
        return tuple(verdict for verdict in self.saves if not verdict.stays)


def plan(
    inventory: Inventory,
    rules: RetentionRules,
    *,
    pins: Collection[int] = (),
    live: Collection[SaveKey] = (),
    named: Collection[SaveKey] = (),
) -> RetentionPlan:
    """``pins``: steps that stay. ``live``: saves that are being sent, restored or resumed from on this pod. ``named``:
    what this pod's own pointers have named, which the listing may not show yet."""
    now = inventory.store_wall
    blocked = _unknown(inventory, rules, now)
    protected = {*live, *named, *_named(inventory, rules, now)}
    return RetentionPlan(
        () if blocked else tuple(_verdicts(inventory, rules, pins, protected, now)),
        tuple(u for u in inventory.unfinished if _is_abandoned(u, rules, protected, now)),
        () if blocked else _old_pointers(inventory, rules, now),
        tuple(key for key, wall in inventory.tmp if now - wall >= 86400.0),
        blocked,
    )


def named_lately(named: Mapping[SaveKey, float], boottime: float, rules: RetentionRules) -> frozenset[SaveKey]:
    """What this pod's own pointers named less than a day ago. Older ones every listing shows, and it alone counts:
    else nothing that one life of podwatch published would ever be deleted by it."""
    return frozenset(key for key, since in named.items() if boottime - since < rules.named)


def keeps(inventory: Inventory, rules: RetentionRules, step: int, *, lineage: str) -> bool:
    """Whether a checkpoint that the store lacks, and nobody has pinned, would stay there if it were stored now. If not,
    it may be deleted from the disk as if it were stored."""
    newer = [save for save in inventory.saves if not save.problem and save.lineage == lineage]
    return sum(save.step > step for save in newer) < max(1, rules.keep_last)


def _unknown(inventory: Inventory, rules: RetentionRules, now: float) -> str:
    """A pointer that counts and cannot be read could name any save."""
    for number, seen in enumerate(inventory.pointers):
        if seen.pointer is None and (number == 0 or now - seen.wall < rules.named):
            return f"{seen.key} cannot be read, so what it names is not known: {seen.problem}"
    return ""


def _named(inventory: Inventory, rules: RetentionRules, now: float) -> Iterable[SaveKey]:
    """By the highest pointer, always; by any of the last day; by latest.json, which some readers follow."""
    if inventory.newest is not None:
        yield inventory.newest.key
    pointers = [p.pointer for n, p in enumerate(inventory.pointers) if n == 0 or now - p.wall < rules.named]
    for pointer in (*pointers, inventory.latest):
        if pointer is not None and pointer.save is not None:
            yield pointer.save


def _verdicts(
    inventory: Inventory, rules: RetentionRules, pins: Collection[int], protected: Collection[SaveKey], now: float
) -> Iterable[SaveVerdict]:
    whole = [save for save in inventory.saves if not save.problem]
    last = {save.key for save in [save for save in whole if save.seq][-max(1, rules.keep_last) :]}
    fixed = milestones(whole, rules.keep_every)
    for save in inventory.saves:
        until = _superseded_at(save, whole, inventory, rules)
        if save.key in protected:
            yield SaveVerdict(save, True, "a pointer names it, or it is in use")
        elif save.manifest is None:
            yield SaveVerdict(save, True, f"podwatch cannot judge it: {save.problem}")
        elif save.pinned or save.step in pins:
            yield SaveVerdict(save, True, "pinned")
        elif save.exports:
            yield SaveVerdict(save, True, "exported weights are stored with it")
        elif save.key in last:
            yield SaveVerdict(save, True, f"one of the last {max(1, rules.keep_last)}")
        elif save.key in fixed:
            yield SaveVerdict(save, True, "milestone")
        elif now < until:
            yield SaveVerdict(save, True, "replaced a short time ago", until)
        else:
            yield SaveVerdict(save, False, "newer saves are stored")


def _superseded_at(save: Stored, whole: list[Stored], inventory: Inventory, rules: RetentionRules) -> float:
    """When its age keeps it no longer. It was replaced when the next save was stored, or when the next pointer was
    written after one that named it. A pointer to a save that none has named may still arrive."""
    later = [other.wall for other in whole if other.order > save.order]
    replaced = max(save.wall, min(later, default=save.wall))
    moved, ever = 0.0, False
    for newer, seen in zip((None, *inventory.pointers), inventory.pointers, strict=False):
        if seen.pointer is not None and seen.pointer.save == save.key:
            moved, ever = max(moved, newer.wall if newer is not None else inventory.store_wall), True
    grace = max(replaced, moved) + rules.superseded
    return grace if ever else max(grace, save.wall + rules.named)


def milestones(saves: Iterable[Stored], keep_every: int) -> frozenset[SaveKey]:
    """``saves`` in their order."""
    first: dict[int, SaveKey] = {}
    for save in saves if keep_every > 0 else ():
        if (block := save.seq // keep_every) > 0:  # before the first multiple there is none
            first.setdefault(block, save.key)
    return frozenset(first.values())


def _is_abandoned(one: Unfinished, rules: RetentionRules, protected: Collection[SaveKey], now: float) -> bool:
    return one.intent is not None and one.key not in protected and now - one.newest_wall >= rules.unfinished


def _old_pointers(inventory: Inventory, rules: RetentionRules, now: float) -> tuple[PointerSeen, ...]:
    old = inventory.pointers[max(1, rules.keep_pointers) :]
    return tuple(seen for seen in old if now - seen.wall >= rules.named)
