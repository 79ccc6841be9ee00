"""Deletes old saves from the store, and keeps pins beside the saves, so that the next pod knows them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from podwatch.config.settings import SyncSettings
from podwatch.daemon.backup.connection import StoreConnection
from podwatch.daemon.backup.run_side import RunSide
from podwatch.daemon.backup.stock import Stock
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.store.inventory import Inventory, SaveKey
from podwatch.store.keys import PINNED
from podwatch.store.lease import Lease
from podwatch.store.objects.base import Objects
from podwatch.store.publish import LeaseLost, LeaseUnsettled
from podwatch.store.remove import Removed, Remover
from podwatch.store.retention import RetentionPlan, RetentionRules, named_lately, plan
from podwatch.system.clock import Clock

ELSEWHERE = "on an earlier pod"
"""Reason of an adopted pin. The evaluations of this pod remove only their own pins."""


@dataclass(slots=True)
class StoreRetention:
    """Loop-side object. ``named`` as in ``store.publish.Publisher``. ``warnings``: why old saves stay in the store, if
    so."""

    sync: SyncSettings
    connection: StoreConnection
    run: RunSide
    stock: Stock
    lease: Lease
    named: dict[SaveKey, float]
    clock: Clock
    warnings: tuple[str, ...] = ()
    tidied: bool = False
    """Old saves were removed since podwatch started."""
    _adopted: bool = field(init=False, default=False)
    _first_life: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._first_life = self.run.last_claim() is None

    def plan_of(self, inventory: Inventory, live: Collection[SaveKey]) -> RetentionPlan:
        rules = RetentionRules(self.sync.keep_last, self.sync.keep_every)
        named = named_lately(self.named, self.clock.boottime(), rules)
        return plan(inventory, rules, pins=self.run.pins.keys(), live=live, named=named)

    async def prune(self, live: Collection[SaveKey]) -> bool:
        """Remove what retention does not keep; whether the store was listed. ``live``: saves in use on this pod. Never
        raises store trouble: it is a warning, and the next publication tries again."""
        if self.run.observes or self.run.withheld():
            return False
        if not self.connection.allows(self.stock.names):
            self.warnings = (self.connection.shortage or "old checkpoints stay in the store until tomorrow",)
            return False
        try:
            removed = await self.connection.call(lambda store: self._carry_out(store, live))
        except (LeaseLost, LeaseUnsettled):
            return False
        except (PodwatchError, OSError) as error:
            self.warnings = (f"old checkpoints were not removed from the store: {error}",)
            return False
        self.tidied = True
        self.warnings = (removed.warning,) if removed.warning else ()
        for step, save_id, reason in removed.saves:
            text = f"removed step {step} from the store: {reason}"
            self.connection.say(EventName.REMOTE_PRUNED, text, step=step, save_id=save_id)
        return True

    def _carry_out(self, store: Objects, live: Collection[SaveKey]) -> Removed:
        inventory = self.stock.take(store)
        wanted = self.plan_of(inventory, live)
        if not (wanted.deleted or wanted.unfinished or wanted.pointers or wanted.tmp):
            return Removed(warning=wanted.blocked)
        removed = Remover(store, self.connection.keys, self.lease, self.clock).carry_out(wanted, inventory)
        self.stock.drop({(step, save_id) for step, save_id, _ in removed.saves})
        return removed

    # -- pins

    async def keep_pins(self, *, foreign: bool) -> None:
        """Make the pins in the store those of this pod; first take over those of the pod before. ``foreign``: another
        pod wrote the heartbeat last. Raises what the store raises."""
        inventory = self.stock.inventory
        if inventory is None:
            return
        if not self._adopted:
            self._adopted = True
            there = {save.step: ELSEWHERE for save in inventory.saves if save.pinned}
            if (foreign or self._first_life) and there.keys() - self.run.pins.keys():
                await self.run.adopt_pins(there)
        pins = dict(self.run.pins)
        wrong = [save for save in inventory.saves if not save.problem and save.pinned is not (save.step in pins)]
        if wrong and not self.run.withheld():
            keys = [save.key for save in wrong]
            await self.connection.call(lambda store: self._write_pins(store, keys, pins))

    def _write_pins(self, store: Objects, saves: Collection[SaveKey], pins: Mapping[int, str]) -> None:
        for key in saves:
            name = self.connection.keys.save(*key) + PINNED
            permit = self.lease.confirm(store)
            if key[0] in pins:
                store.put(name, f"{pins[key[0]]}\n".encode(), until=permit.until)
            else:
                store.delete([name], until=permit.until)
        self.stock.take(store)
