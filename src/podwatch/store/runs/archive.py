"""Archive a finished run: only its newest checkpoint stays, or the milestones too. Blocking.

What goes is planned by ``retention`` and deleted by ``remove``, as for a run that trains: nothing that a pointer names
or named within a day, no pin, no export, no object of another program. An archive that was interrupted leaves an intent
without a manifest, which the next archive deletes a day later. Nothing is deleted while a podwatch can guard the run.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum

from podwatch.domain.errors import Busy, HostError, IntegrityError
from podwatch.domain.lease import Heartbeat
from podwatch.store.interfaces import Permit
from podwatch.store.inventory import Inventory, take_inventory
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.remove import SaveRemover
from podwatch.store.retention import RetentionPlan, RetentionRules, plan
from podwatch.store.runs.read import ArchiveRecord, read_activity, record_key, store_time
from podwatch.system.clock import Clock

PERMIT_SECONDS = 30.0
CERTAIN = frozenset({"finished", "stopped", "released", "preempted", ""})
"""Last reported states after which archiving needs no warning. A podwatch that reported ``restarting`` left training
running and did not come back."""


class ArchiveKeep(StrEnum):
    LATEST = "latest"
    MILESTONES = "milestones"


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """``newest_step``: what the newest pointer names; ``last``: the run's last heartbeat."""

    keep: ArchiveKeep
    newest_step: int
    retention: RetentionPlan
    inventory: Inventory
    last: Heartbeat = field(default_factory=Heartbeat)

    @property
    def freed_bytes(self) -> int:
        saves = sum(verdict.save.total_bytes for verdict in self.retention.deleted)
        return saves + sum(one.bytes for one in self.retention.unfinished)

    @property
    def is_empty(self) -> bool:
        return not (self.retention.deleted or self.retention.unfinished)


@dataclass(slots=True)
class Archiver:
    store: Objects
    keys: RunKeys
    clock: Clock
    host: str = ""

    def look(self, keep: ArchiveKeep, *, keep_every: int, pins: Collection[int] = ()) -> ArchivePlan:
        """What an archive deletes. Raises Busy while a podwatch can guard the run, IntegrityError where the newest
        checkpoint is not known or not whole, RemoteError for trouble of the store."""
        last = self._refuse_alive()
        inventory = take_inventory(self.store, self.keys)
        now = store_time(self.store, self.clock.wall())  # nothing has been written since the run ended
        inventory = replace(inventory, store_wall=max(inventory.store_wall, now))
        rules = RetentionRules(keep_last=1, keep_every=keep_every if keep is ArchiveKeep.MILESTONES else 0)
        found = plan(inventory, rules, pins=pins)
        if found.blocked:
            raise IntegrityError(found.blocked, where=self._where, fix="do not archive")
        return ArchivePlan(keep, self._newest(inventory), found, inventory, last)

    def _newest(self, inventory: Inventory) -> int:
        """The step that the highest pointer names: its save must be whole."""
        pointer = inventory.pointer
        save = None if pointer is None else inventory.named_by(pointer)
        if save is not None and not save.problem:
            return save.step
        if pointer is None:
            why = "the run has no pointer"
        elif pointer.step is None:
            why = "the run was started fresh"
        else:
            why = f"step {pointer.step}: {'its manifest is not in the store' if save is None else save.problem}"
        fix = "do not archive; `podwatch store verify` shows which checkpoints are whole"
        what = f"the newest checkpoint is not known, or damaged: {why}"
        raise IntegrityError(what, where=self._where, fix=fix)

    def why_not_deletable(self) -> str:
        """Why the key cannot delete; empty if it can."""
        checked = self.store.check(self.keys.root)
        return "" if checked.can_delete else "; ".join(checked.warnings)

    def carry_out(self, found: ArchivePlan) -> None:
        """Delete it. Raises Busy where a podwatch became active on the run, or its pointer moved, RemoteError. A later
        archive continues an interrupted one."""
        removed = SaveRemover(self.store, self.keys, self, self.clock).carry_out(found.retention, found.inventory)
        if removed.warning:
            raise HostError(f"not everything was deleted: {removed.warning}", where=self._where)
        if len(removed.saves) < len(found.retention.deleted) + len(found.retention.unfinished):
            what = "the run changed while it was archived: a pointer, a pin or an object is new"
            raise Busy(what, where=self._where, fix="look at it with --dry-run; what was not deleted stays")
        wall = store_time(self.store, self.clock.wall())
        record = ArchiveRecord(self.keys.run_id, str(found.keep), wall, self.host)
        self.store.put(record_key(self.keys), record.to_bytes())

    def confirm(self, store: Objects) -> Permit:
        """``Ownership`` of a run that no pod holds."""
        began = self.clock.boottime()
        self._refuse_alive()
        return Permit(0, began + PERMIT_SECONDS)

    def _refuse_alive(self) -> Heartbeat:
        """The run's last heartbeat. Raises Busy."""
        active = read_activity(self.store, self.keys, self.clock.wall())
        if active.seconds is not None:
            what = f"podwatch is active on run {self.keys.run_id}: its last heartbeat is {active.seconds:.0f} s old"
            raise Busy(what, where=self._where, fix="stop podwatch there, wait 15 minutes, then archive")
        return active.said

    @property
    def _where(self) -> str:
        return f"{self.store.url}/{self.keys.root}"
