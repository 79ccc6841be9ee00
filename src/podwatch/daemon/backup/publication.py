"""Publishes what was sent whole, moves the pointer after a step back, and reports each publication once."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from podwatch.daemon.backup.connection import StoreConnection
from podwatch.daemon.backup.outgoing import OutgoingSave
from podwatch.daemon.backup.run_side import RunSide
from podwatch.daemon.backup.stock import Stock, departed_from, is_behind_lineage, newest_of_lineage
from podwatch.daemon.backup.tally import CheckpointTally
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import EventName
from podwatch.journal import AsyncJournal, Journal
from podwatch.store.documents import SaveIntent
from podwatch.store.inventory import Inventory, SaveKey, Stored
from podwatch.store.lease import Lease
from podwatch.store.objects.base import Objects
from podwatch.store.publish import Publisher
from podwatch.system.clock import Clock

T = TypeVar("T")
EVENTS_LOOKED_AT = 5000
"""Publications of the last days are among them."""


class Publication:
    """Loop-side object. ``named`` as in ``Publisher``. ``save_gap``: seconds from one save to the next."""

    def __init__(
        self, run: RunSide, journal: AsyncJournal, clock: Clock, connection: StoreConnection, lease: Lease,
        stock: Stock, tally: CheckpointTally, named: dict[SaveKey, float], save_gap: Callable[[], float | None],
    ) -> None:  # fmt: skip
        self._run, self._journal, self._clock, self._connection = run, journal, clock, connection
        self._lease, self._stock, self._tally, self._named, self._save_gap = lease, stock, tally, named, save_gap
        self._publisher: Publisher | None = None
        self._published_wall: float | None = None
        self.save: OutgoingSave | None = None
        """What is being published."""

    @property
    def last_wall(self) -> float | None:
        """When the newest publication was, by this machine's clock."""
        inventory, ahead = self._stock.inventory, self._connection.skew or 0.0
        walls = [s.wall + ahead for s in inventory.saves if not s.problem] if inventory is not None else []
        return max([*walls, *([self._published_wall] if self._published_wall else [])], default=None)

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

    async def publish(
        self, save: OutgoingSave, intent: SaveIntent, hashes: Mapping[str, str], *, newest: bool
    ) -> Stored:
        """As ``Publisher.publish``."""
        author = self._run.author(start_id=save.start_id, from_step=save.from_step, world_size=save.world_size)
        self.save = save
        try:
            stored = await self._with_publisher(
                lambda publisher: publisher.publish(intent, hashes, author, newest=newest)
            )
        finally:
            self.save = None
        self._stock.add(stored)
        self._published_wall = self._clock.wall()
        return stored

    # -- the pointer without a publication

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
        if saved is None or inventory is None or saved.manifest is None or not saved.seq:
            return False
        named = any(seen.pointer is not None and seen.pointer.save == saved.key for seen in inventory.pointers)
        lineage = self._run.lineage.id
        if named or saved.manifest.lineage != lineage or newest_of_lineage(inventory, lineage) > saved.step:
            return False
        await self._repoint(saved)
        self._published_wall = self._clock.wall()
        self._say_published(saved)
        return True

    async def _repoint(self, target: Stored | None) -> None:
        await self._with_publisher(lambda publisher: publisher.repoint(target, self._run.author()))
        await self._connection.call(self._stock.take)

    # -- reports

    def report(self, save: OutgoingSave, stored: Stored, *, newest: bool, seconds: float) -> None:
        """``seconds``: from its first byte in this life to its publication."""
        if not newest:
            text = f"step {save.step} is in the store; a newer checkpoint stays the one to resume from"
            self._connection.say(EventName.STORED, text, step=save.step, bytes=stored.bytes)
            return
        self._say_published(stored)
        took = max(seconds, self._clock.wall() - save.began_wall)
        self._tally.stored(save.key, seconds=took, save_seconds=self._save_gap())

    def _say_published(self, saved: Stored, more: str = "") -> None:
        fixed = {one.key for one in self._stock.checkpoints(()) if one.milestone}
        self._connection.say(
            EventName.PUBLISHED, f"step {saved.step} is in the store{more}", step=saved.step, bytes=saved.bytes,
            generation=saved.generation, seq=saved.seq, milestone=saved.key in fixed,
        )  # fmt: skip

    async def report_missed(self, inventory: Inventory) -> None:
        """Report the newest publication, if an earlier podwatch was killed before it could: hooks run for it at least
        once, and they read events."""
        newest, events = inventory.newest, await self._journal.run(Journal.events, limit=EVENTS_LOOKED_AT)
        mine = (
            newest is not None
            and newest.manifest is not None
            and newest.manifest.writer_id == self._run.record.writer_id
        )
        if newest is None or not mine or not events or newest.wall < events[0].wall:
            return
        reported = {(e.fields.get("generation"), e.fields.get("seq")) for e in events if e.name is EventName.PUBLISHED}
        if newest.order not in reported:
            self._say_published(newest, " (podwatch was interrupted before it could report this)")
