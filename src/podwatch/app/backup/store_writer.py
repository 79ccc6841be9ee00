"""What the daemon changes in the store with its lease: publications, the pointer after a step back, pins, exports, and
what retention removes. Each publication is reported once.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from podwatch.app.backup.connection import StoreConnection
from podwatch.app.backup.outbox import OutgoingSave
from podwatch.app.backup.run_side import RunSide
from podwatch.app.backup.stock import Stock, departed_from, is_behind_lineage, newest_of_lineage
from podwatch.config.settings import SyncSettings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.journal import AsyncJournal, Journal
from podwatch.store.documents import SaveExports, SaveIntent
from podwatch.store.inventory import Inventory, SaveKey, Stored
from podwatch.store.keys import EXPORTS, PINNED
from podwatch.store.lease import Lease
from podwatch.store.objects.base import Objects
from podwatch.store.publish import LeaseLost, LeaseUnsettled, Publisher
from podwatch.store.remove import Removed, Remover
from podwatch.store.retention import RetentionPlan, RetentionRules, named_lately, plan
from podwatch.system.clock import Clock

T = TypeVar("T")
EVENTS_LOOKED_AT = 5000
"""Publications of the last days are among them."""
ELSEWHERE = "on an earlier pod"
"""Reason of an adopted pin. The evaluations of this pod remove only their own pins."""


class StoreWriter:
    """Loop-side object. ``warnings``: why old saves stay in the store, if so."""

    def __init__(
        self, sync: SyncSettings, run: RunSide, journal: AsyncJournal, clock: Clock, connection: StoreConnection,
        lease: Lease, stock: Stock,
    ) -> None:  # fmt: skip
        self._sync, self._run, self._journal, self._clock = sync, run, journal, clock
        self._connection, self._lease, self._stock = connection, lease, stock
        self._publisher: Publisher | None = None
        self._named: dict[SaveKey, float] = {}
        """As in ``Publisher``."""
        self._published_wall: float | None = None
        self.publishing: OutgoingSave | None = None
        self.warnings: tuple[str, ...] = ()
        self.tidied = False
        """Old saves were removed since podwatch started."""
        self._adopted, self._first_life = False, run.last_claim() is None

    @property
    def last_wall(self) -> float | None:
        """When the newest publication was, by this machine's clock."""
        inventory, ahead = self._stock.inventory, self._connection.skew or 0.0
        walls = [s.wall + ahead for s in inventory.saves if not s.problem] if inventory is not None else []
        return max([*walls, *([self._published_wall] if self._published_wall else [])], default=None)

    # -- publications

    async def _with_publisher(self, work: Callable[[Publisher], T]) -> T:
        """``work`` with the publisher of this life and the store as it is open now, in the store's thread."""

        def call(store: Objects) -> T:
            if self._publisher is None:
                self._publisher = Publisher(store, self._connection.keys, self._lease, self._clock, named=self._named)
            self._publisher.store = store
            return work(self._publisher)

        return await self._connection.call(call)

    async def begin(self, intent: SaveIntent) -> None:
        """Before the first piece of a save is sent."""
        await self._with_publisher(lambda publisher: publisher.begin(intent))
        self._stock.begin(intent)

    async def publish(
        self, save: OutgoingSave, intent: SaveIntent, hashes: Mapping[str, str], *, newest: bool
    ) -> Stored:
        """As ``Publisher.publish``, with its report."""
        author = self._run.author(start_id=save.start_id, from_step=save.from_step, world_size=save.world_size)
        self.publishing = save
        try:
            stored = await self._with_publisher(
                lambda publisher: publisher.publish(intent, hashes, author, newest=newest)
            )
        finally:
            self.publishing = None
        self._stock.add(stored)
        self._published_wall = self._clock.wall()
        return stored

    async def follow_lineage(self) -> bool:
        """After a step back on purpose or a fresh start: make the save from which training continued the newest.
        Whether the pointer was moved."""
        inventory, run = self._stock.inventory, self._run.record
        if inventory is None or not is_behind_lineage(inventory, run):
            return False
        target = departed_from(inventory, run)
        if target is None and run.lineage.parent_step is not None:
            return False  # the store has no save of it: what it has is better than nothing
        await self._repoint(target)
        return True

    async def name_unnamed(self, newest: CheckpointSet | None) -> bool:
        """Point to the newest checkpoint, which is whole in the store: its publication was interrupted before that."""
        inventory = self._stock.inventory
        saved = None if newest is None else self._stock.find(newest)
        if saved is None or inventory is None or not saved.seq:
            return False
        named = any(seen.pointer is not None and seen.pointer.save == saved.key for seen in inventory.pointers)
        lineage = self._run.lineage.id
        if named or saved.lineage != lineage or newest_of_lineage(inventory, lineage) > saved.step:
            return False
        await self._repoint(saved)
        self._published_wall = self._clock.wall()
        self.say_published(saved)
        return True

    async def _repoint(self, target: Stored | None) -> None:
        await self._with_publisher(lambda publisher: publisher.repoint(target, self._run.author()))
        await self._connection.call(self._stock.take)

    def say_published(self, saved: Stored, more: str = "") -> None:
        fixed = {one.key for one in self._stock.checkpoints(()) if one.milestone}
        self._connection.say(
            EventName.PUBLISHED, f"step {saved.step} is in the store{more}", step=saved.step, bytes=saved.total_bytes,
            generation=saved.generation, seq=saved.seq, milestone=saved.key in fixed,
        )  # fmt: skip

    async def report_missed(self, inventory: Inventory) -> None:
        """Report the newest publication, if an earlier podwatch was killed before it could: hooks run for it at least
        once, and they read events."""
        newest, events = inventory.newest, await self._journal.run(Journal.events, limit=EVENTS_LOOKED_AT)
        if newest is None or newest.manifest is None or not events or newest.wall < events[0].wall:
            return
        reported = {(e.fields.get("generation"), e.fields.get("seq")) for e in events if e.name is EventName.PUBLISHED}
        if newest.manifest.writer_id == self._run.record.writer_id and newest.order not in reported:
            self.say_published(newest, " (podwatch was interrupted before it could report this)")

    # -- exports and pins

    async def write_exports(self, document: SaveExports) -> None:
        """Raises LeaseLost, LeaseUnsettled or what the store raises."""
        name = self._connection.keys.save(document.step, document.save_id) + EXPORTS

        def write(store: Objects) -> None:
            store.put(name, document.to_bytes(), until=self._lease.confirm(store).until)

        await self._connection.call(write)

    async def keep_pins(self, *, foreign: bool) -> None:
        """Make the pins in the store those of this pod, so that the next pod knows them; first take over those of the
        pod before. ``foreign``: another pod wrote the heartbeat last. Raises what the store raises."""
        inventory = self._stock.inventory
        if inventory is None:
            return
        if not self._adopted:
            self._adopted = True
            there = {save.step: ELSEWHERE for save in inventory.saves if save.pinned}
            if (foreign or self._first_life) and there.keys() - self._run.pins.keys():
                await self._run.adopt_pins(there)
        pins = dict(self._run.pins)
        wrong = [save.key for save in inventory.saves if not save.problem and save.pinned is not (save.step in pins)]
        if wrong and not self._run.withheld():
            await self._connection.call(lambda store: self._write_pins(store, wrong, pins))

    def _write_pins(self, store: Objects, saves: Collection[SaveKey], pins: Mapping[int, str]) -> None:
        for key in saves:
            name, until = self._connection.keys.save(*key) + PINNED, self._lease.confirm(store).until
            if key[0] in pins:
                store.put(name, f"{pins[key[0]]}\n".encode(), until=until)
            else:
                store.delete([name], until=until)
        self._stock.take(store)

    # -- retention

    def plan_of(self, inventory: Inventory, live: Collection[SaveKey]) -> RetentionPlan:
        rules = RetentionRules(self._sync.keep_last, self._sync.keep_every)
        named = named_lately(self._named, self._clock.boottime(), rules)
        return plan(inventory, rules, pins=self._run.pins.keys(), live=live, named=named)

    async def prune(self, live: Collection[SaveKey]) -> bool:
        """Remove what retention does not keep; whether the store was listed. ``live``: saves in use on this pod. Never
        raises store trouble: it is a warning, and the next publication tries again."""
        if self._run.observes or self._run.withheld():
            return False
        if not self._connection.allows(self._stock.names):
            self.warnings = (self._connection.shortage or "old checkpoints stay in the store until tomorrow",)
            return False
        try:
            removed = await self._connection.call(lambda store: self._carry_out(store, live))
        except (LeaseLost, LeaseUnsettled):
            return False
        except (PodwatchError, OSError) as error:
            self.warnings = (f"old checkpoints were not removed from the store: {error}",)
            return False
        self.tidied = True
        self.warnings = (removed.warning,) if removed.warning else ()
        for step, save_id, reason in removed.saves:
            text = f"removed step {step} from the store: {reason}"
            self._connection.say(EventName.REMOTE_PRUNED, text, step=step, save_id=save_id)
        return True

    def _carry_out(self, store: Objects, live: Collection[SaveKey]) -> Removed:
        inventory = self._stock.take(store)
        wanted = self.plan_of(inventory, live)
        if not (wanted.deleted or wanted.unfinished or wanted.pointers or wanted.tmp):
            return Removed(warning=wanted.blocked)
        removed = Remover(store, self._connection.keys, self._lease, self._clock).carry_out(wanted, inventory)
        self._stock.drop({(step, save_id) for step, save_id, _ in removed.saves})
        return removed
