"""Deletes from the store what ``retention`` has planned. Blocking.

A save goes manifest first, then the objects that it lists, then its other documents, then its intent: whatever is left
by a crash is an intent without a manifest, which goes a day later. Just before each save it looks again at what is
named and what is there; anything that the plan did not know ends the round.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.store.documents import SaveExports
from podwatch.store.interfaces import Ownership, Permit, list_save, read_or_none
from podwatch.store.inventory import Inventory, SaveKey, Stored, Unfinished
from podwatch.store.keys import EXPORTS, INTENT, MANIFEST, PINNED, Kind, RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import LeaseUnsettled
from podwatch.store.retention import RetentionPlan
from podwatch.system.clock import Clock

_BATCH = 200
"""Names between two looks at whether the confirmation is still valid; the store itself stops in the middle of one."""
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Removed:
    """``saves``: (step, save_id, reason). ``warning``: why the rest could not be removed, if so."""

    saves: tuple[tuple[int, str, str], ...] = ()
    warning: str = ""


@dataclass(slots=True)
class SaveRemover:
    store: Objects
    keys: RunKeys
    lease: Ownership
    clock: Clock
    _permit: Permit | None = field(init=False, default=None)

    def carry_out(self, plan: RetentionPlan, inventory: Inventory) -> Removed:
        """``inventory``: that of the plan. Raises RemoteError for trouble of the store, LeaseLost, LeaseUnsettled; a
        key that cannot delete is a warning."""
        removed: list[tuple[int, str, str]] = []
        known = {*(seen.key for seen in inventory.pointers), *inventory.forged}
        try:
            for verdict in plan.deleted:
                if not self._is_unchanged(known):
                    return Removed(tuple(removed), plan.blocked)
                if self._remove_save(verdict.save):
                    removed.append((*verdict.save.key, verdict.reason))
            for one in plan.unfinished:
                if self._is_unchanged(known) and self._remove_unfinished(one):
                    removed.append((*one.key, "its upload was never finished"))
            self._delete([*(seen.key for seen in plan.pointers), *plan.tmp])
        except RemoteError as error:
            if error.transient or isinstance(error, IntegrityError):
                raise
            return Removed(tuple(removed), f"old checkpoints stay in the store: {error.what}")
        return Removed(tuple(removed), plan.blocked)

    def _is_unchanged(self, known: set[str]) -> bool:
        """Whether no pointer was written since the plan was made."""
        self._permit = self.lease.confirm(self.store)
        listed = (item.key for item in self.store.list(self.keys.pointers))
        return all(key in known for key in listed if self.keys.parse(key).kind is Kind.POINTER)

    def _remove_save(self, save: Stored) -> bool:
        folder = self.keys.save(*save.key)
        there = list_save(self.store, folder)
        if save.manifest is None or PINNED in there:
            return False
        names = [*(piece.name for piece in save.manifest.objects()), *self._exports(save.key, there)]
        self._delete([folder + MANIFEST])
        self._delete([folder + name for name in (*names, INTENT)])
        return True

    def _exports(self, key: SaveKey, there: Collection[str]) -> Sequence[str]:
        if EXPORTS not in there:
            return ()
        data = read_or_none(self.store, self.keys.save(*key) + EXPORTS, SaveExports)
        try:
            return (*(file.name for file in SaveExports.from_bytes(data or b"").files), EXPORTS)
        except IntegrityError:
            return (EXPORTS,)

    def _remove_unfinished(self, one: Unfinished) -> bool:
        folder = self.keys.save(*one.key)
        there = list_save(self.store, folder)
        if one.intent is None or MANIFEST in there:
            return False
        names = [piece.name for piece in one.intent.objects()]
        if any(there[name].wall > one.newest_wall for name in names if name in there):
            return False
        self._delete([folder + name for name in (*names, PINNED, *self._exports(one.key, there), INTENT)])
        return True

    def _delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _BATCH):
            self._delete_batch(names[start : start + _BATCH])

    def _delete_batch(self, names: Sequence[str]) -> None:
        for left in reversed(range(_TRIES)):
            if self._permit is None or self.clock.boottime() > self._permit.until:
                self._permit = self.lease.confirm(self.store)
            try:
                self.store.delete(names, until=self._permit.until)
                break
            except LeaseUnsettled:
                self._permit = None
                if not left:
                    raise
