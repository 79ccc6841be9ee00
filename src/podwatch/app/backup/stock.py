"""What this store has of the run: its inventory, and which checkpoints of this pod are in it.

The store is the only record. A lost state directory, another store, a new pod and a copied bucket are the same case.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from podwatch.checkpoints.records import CheckpointRecord, CheckpointRecords, RecordedFile, is_same_save
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.run_state import RunState
from podwatch.store.documents import SaveIntent
from podwatch.store.inventory import DocumentCache, Inventory, SaveKey, Stored, Unfinished, take_inventory
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.retention import milestones


@dataclass(slots=True)
class Stock:
    """``inventory`` is None until the store was listed. ``identity``: the parts that make a save."""

    keys: RunKeys
    records: CheckpointRecords
    identity: Collection[str] = ()
    keep_every: int = 0
    inventory: Inventory | None = None
    _cache: DocumentCache = field(default_factory=DocumentCache)
    _same: dict[tuple[SaveKey, SaveKey, str], bool] = field(default_factory=dict)
    """(this pod's checkpoint, the store's save, its manifest): whether they are the same save."""

    def take(self, store: Objects) -> Inventory:
        """List the store. Blocks."""
        self.inventory = take_inventory(store, self.keys, self._cache)
        return self.inventory

    def add(self, saved: Stored) -> None:
        """After a publication, until the next listing."""
        if self.inventory is not None:
            others = tuple(s for s in self.inventory.saves if s.key != saved.key)
            left = tuple(u for u in self.inventory.unfinished if u.key != saved.key)
            saves = tuple(sorted((*others, saved), key=lambda s: (s.order, s.wall, s.key)))
            self.inventory = replace(self.inventory, saves=saves, unfinished=left)

    def begin(self, intent: SaveIntent) -> None:
        """After the intent of an upload was stored, until the next listing."""
        if self.inventory is not None:
            one = Unfinished(intent.step, intent.save_id, self.inventory.store_wall, 0, intent)
            self.inventory = replace(self.inventory, unfinished=(*self.inventory.unfinished, one))

    def drop(self, keys: Collection[SaveKey]) -> None:
        """After saves were removed from the store, until the next listing."""
        if self.inventory is not None:
            saves = tuple(save for save in self.inventory.saves if save.key not in keys)
            left = tuple(one for one in self.inventory.unfinished if one.key not in keys)
            self.inventory = replace(self.inventory, saves=saves, unfinished=left)

    @property
    def names(self) -> int:
        """About how many names a listing has."""
        found = self.inventory
        if found is None:
            return 1
        return len(found.pointers) + sum(s.files + 3 for s in found.saves) + 100 * len(found.unfinished)

    def find(self, found: CheckpointSet) -> Stored | None:
        """The whole save in the store that is this checkpoint, also after a resume from it."""
        record = self.records.of(found.step)
        if self.inventory is None or record is None or record.save_id != found.save_id:
            return None
        for save in reversed(self.inventory.saves):
            if save.step == found.step and not save.problem and self._is_same(record, save):
                return save
        return None

    def _is_same(self, record: CheckpointRecord, save: Stored) -> bool:
        key = (record.key, save.key, save.hash)
        if key not in self._same:
            files = () if save.manifest is None else save.manifest.files
            stored = [RecordedFile(f.part, f.path, f.size, f.mtime_ns) for f in files]
            self._same[key] = is_same_save(record, stored, self.identity)
        return self._same[key]

    def checkpoints(self, sets: Iterable[CheckpointSet]) -> tuple[Stored, ...]:
        """Every save in the store, in the order of publication."""
        if self.inventory is None:
            return ()
        fixed = milestones([save for save in self.inventory.saves if not save.problem], self.keep_every)
        local = {save.key: s.save_id for s in sets if s.complete and (save := self.find(s)) is not None}
        return tuple(replace(s, milestone=s.key in fixed, here=local.get(s.key, "")) for s in self.inventory.saves)


def newest_of_lineage(inventory: Inventory, lineage: str) -> int:
    """The highest step of the lineage that is whole in the store; -1 if there is none."""
    return max((s.step for s in inventory.saves if not s.problem and s.lineage == lineage), default=-1)


def is_behind_lineage(inventory: Inventory, run: RunState) -> bool:
    """Whether the newest pointer names what the run has left: a step back, or a fresh start, has opened a lineage since
    then. A new pod would restore the abandoned save."""
    newest = inventory.pointer
    return bool(run.lineage.parent) and newest is not None and newest.lineage != run.lineage.id


def departed_from(inventory: Inventory, run: RunState) -> Stored | None:
    """The save from which the current lineage continues, or the highest below it that the store has; None: it began
    from nothing, or the store has none of them."""
    if (limit := run.lineage.parent_step) is None:
        return None
    last = {**run.ancestry, run.lineage.parent: limit}
    own = [s for s in inventory.saves if not s.problem and s.step <= min(limit, last.get(s.lineage, -1))]
    return max(own, key=lambda s: (s.step, s.order), default=None)
