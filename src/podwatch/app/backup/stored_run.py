"""What the store has of this run, and what the daemon changes there with its lease: publications, the pointer, pins,
exports, and what retention removes. Each publication is reported once.

The store is the only record. A lost state directory, another store, a new pod and a copied bucket are the same case.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from podwatch.app.backup.connection import StoreConnection
from podwatch.app.backup.outbox import OutgoingSave
from podwatch.app.backup.run_side import RunSide
from podwatch.checkpoints.records import CheckpointRecord, CheckpointRecords, RecordedFile, is_same_save
from podwatch.config.settings import SyncSettings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.journal import AsyncJournal, Journal
from podwatch.store.documents import SaveExports, SaveIntent
from podwatch.store.inventory import DocumentCache, Inventory, SaveKey, Stored, pointer_due, take_inventory
from podwatch.store.keys import EXPORTS, PINNED
from podwatch.store.lease import Lease
from podwatch.store.objects.base import Objects
from podwatch.store.publish import LeaseLost, LeaseUnsettled, Publisher
from podwatch.store.remove import Removed, SaveRemover
from podwatch.store.retention import RetentionPlan, RetentionRules, milestones, named_lately, plan
from podwatch.system.clock import Clock

T = TypeVar("T")
EVENTS_LOOKED_AT = 5000
"""Publications of the last days are among them."""
ELSEWHERE = "on an earlier pod"
"""Reason of an adopted pin. The evaluations of this pod remove only their own pins."""


class StoredRun:
    """Loop-side object. ``inventory`` is None until the store was listed. ``warnings``: why old saves stay in the
    store, if so."""

    def __init__(
        self, sync: SyncSettings, run: RunSide, records: CheckpointRecords, journal: AsyncJournal, clock: Clock,
        connection: StoreConnection, lease: Lease,
    ) -> None:  # fmt: skip
        self._sync, self._run, self._records, self._journal, self._clock = sync, run, records, journal, clock
        self._connection, self._lease, self._keys = connection, lease, connection.keys
        self.inventory: Inventory | None = None
        self._cache = DocumentCache()
        self._same: dict[tuple[SaveKey, SaveKey, str], bool] = {}
        """(this pod's checkpoint, the store's save, its manifest): whether they are the same save."""
        self._publisher: Publisher | None = None
        self._named: dict[SaveKey, float] = {}
        """As in ``Publisher``."""
        self._published_wall: float | None = None
        self.publishing: OutgoingSave | None = None
        self.warnings: tuple[str, ...] = ()
        self.tidied = False
        """Old saves were removed since podwatch started."""
        self._adopted, self._first_life = False, run.last_claim() is None

    # -- what it has

    def take(self, store: Objects) -> Inventory:
        """List the store. Blocks."""
        self.inventory = take_inventory(store, self._keys, self._cache)
        return self.inventory

    @property
    def names(self) -> int:
        """About how many names a listing has."""
        return 1 if self.inventory is None else self.inventory.names

    def find(self, found: CheckpointSet) -> Stored | None:
        """The whole save in the store that is this checkpoint, also after a resume from it."""
        record = self._records.of(found.step)
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
            self._same[key] = is_same_save(record, stored, self._run.identity)
        return self._same[key]

    def checkpoints(self, sets: Iterable[CheckpointSet]) -> tuple[Stored, ...]:
        """Every save in the store, in the order of publication."""
        if self.inventory is None:
            return ()
        fixed = milestones([save for save in self.inventory.saves if not save.problem], self._sync.keep_every)
        local = {save.key: s.save_id for s in sets if s.complete and (save := self.find(s)) is not None}
        return tuple(replace(s, milestone=s.key in fixed, here=local.get(s.key, "")) for s in self.inventory.saves)

    def newest_stored(self) -> int:
        """The highest step of the run's lineage that is whole; -1 if there is none."""
        return -1 if self.inventory is None else self.inventory.newest_of(self._run.lineage.id)

    @property
    def last_wall(self) -> float | None:
        """When the newest publication was, by this machine's clock."""
        inventory, ahead = self.inventory, self._connection.skew or 0.0
        walls = [s.wall + ahead for s in inventory.saves if not s.problem] if inventory is not None else []
        return max([*walls, *([self._published_wall] if self._published_wall else [])], default=None)

    # -- publications

    async def _with_publisher(self, work: Callable[[Publisher], T]) -> T:
        """``work`` with the publisher of this life and the store as it is open now, in the store's thread."""

        def call(store: Objects) -> T:
            if self._publisher is None:
                self._publisher = Publisher(store, self._keys, self._lease, self._clock, named=self._named)
            self._publisher.store = store
            return work(self._publisher)

        return await self._connection.call(call)

    async def begin(self, intent: SaveIntent) -> None:
        """Before the first piece of a save is sent."""
        await self._with_publisher(lambda publisher: publisher.begin(intent))
        if self.inventory is not None:
            self.inventory = self.inventory.with_intent(intent)

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
        if self.inventory is not None:
            self.inventory = self.inventory.with_save(stored)
        self._published_wall = self._clock.wall()
        return stored

    async def move_pointer(self, newest: CheckpointSet | None) -> bool:
        """Write the pointer that is due (``pointer_due``); whether there was one. ``newest``: on this pod."""
        if self.inventory is None:
            return False
        here = None if newest is None else self.find(newest)
        due = pointer_due(self.inventory, self._run.record, here)
        if due is None:
            return False
        await self._with_publisher(lambda publisher: publisher.repoint(due.save, self._run.author()))
        await self._connection.call(self.take)
        if due.save is not None and due.interrupted:
            self._published_wall = self._clock.wall()
            self.say_published(due.save)
        return True

    def say_published(self, saved: Stored, more: str = "") -> None:
        fixed = {one.key for one in self.checkpoints(()) if one.milestone}
        self._connection.say(
            EventName.PUBLISHED, f"step {saved.step} is in the store{more}", step=saved.step, bytes=saved.total_bytes,
            generation=saved.generation, seq=saved.seq, milestone=saved.key in fixed,
        )  # fmt: skip

    async def report_missed(self) -> None:
        """Report the newest publication, if an earlier podwatch was killed before it could: hooks run for it at least
        once, and they read events."""
        newest = None if self.inventory is None else self.inventory.newest
        events = await self._journal.run(Journal.events, limit=EVENTS_LOOKED_AT)
        if newest is None or newest.manifest is None or not events or newest.wall < events[0].wall:
            return
        reported = {(e.fields.get("generation"), e.fields.get("seq")) for e in events if e.name is EventName.PUBLISHED}
        if newest.manifest.writer_id == self._run.record.writer_id and newest.order not in reported:
            self.say_published(newest, " (podwatch was interrupted before it could report this)")

    # -- exports and pins

    async def write_exports(self, document: SaveExports) -> None:
        """Raises LeaseLost, LeaseUnsettled or what the store raises."""
        name = self._keys.save(document.step, document.save_id) + EXPORTS

        def write(store: Objects) -> None:
            store.put(name, document.to_bytes(), until=self._lease.confirm(store).until)

        await self._connection.call(write)

    async def keep_pins(self, *, foreign: bool) -> None:
        """Make the pins in the store those of this pod, so that the next pod knows them; first take over those of the
        pod before. ``foreign``: another pod wrote the heartbeat last. Raises what the store raises."""
        inventory = self.inventory
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
            name, until = self._keys.save(*key) + PINNED, self._lease.confirm(store).until
            if key[0] in pins:
                store.put(name, f"{pins[key[0]]}\n".encode(), until=until)
            else:
                store.delete([name], until=until)
        self.take(store)

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
        if not self._connection.allows(self.names):
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
        inventory = self.take(store)
        wanted = self.plan_of(inventory, live)
        if not (wanted.deleted or wanted.unfinished or wanted.pointers or wanted.tmp):
            return Removed(warning=wanted.blocked)
        removed = SaveRemover(store, self._keys, self._lease, self._clock).carry_out(wanted, inventory)
        self.inventory = inventory.without({(step, save_id) for step, save_id, _ in removed.saves})
        return removed
