"""Keeps the newest complete checkpoint in the store: picks, sends, publishes, removes what is old, reports.

Trouble of the store never leaves this object as an exception: it is a state, reported once, and tried again for ever.
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from podwatch.checkpoints.known_checkpoints import Catalogue, SetContents
from podwatch.config.settings import Settings
from podwatch.daemon.backup.connection import StoreConnection, as_known
from podwatch.daemon.backup.exports import Exports
from podwatch.daemon.backup.outbox import Outbox
from podwatch.daemon.backup.outgoing import OutgoingSave, outgoing_files, outgoing_links, used_parts
from podwatch.daemon.backup.ownership import NOT_OURS, LeaseKeeper
from podwatch.daemon.backup.removal import StoreRetention
from podwatch.daemon.backup.run_side import RunSide
from podwatch.daemon.backup.stock import Stock, departed_from, is_behind_lineage, newest_of_lineage
from podwatch.daemon.backup.tally import CheckpointTally
from podwatch.daemon.backup.uploads import InFlight, Uploads, UploadStopped
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError, RemoteError
from podwatch.domain.event import EventName
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import Severity
from podwatch.domain.lease import Beat, Decision, Heartbeat, HolderState
from podwatch.journal import AsyncJournal, Journal
from podwatch.policy.uploads import PINNED, Begun, Waiting, next_upload, why_given_up
from podwatch.store.documents import SaveIntent, SentSave
from podwatch.store.inventory import REUSED_SECONDS, Inventory, SaveKey, Stored
from podwatch.store.lease import Lease
from podwatch.store.objects.base import Objects
from podwatch.store.publish import LeaseLost, LeaseUnsettled, PiecesMissing, Publisher
from podwatch.store.restore.thread import RestoreThread
from podwatch.store.transfer.send import SourceChanged, SourceForeign
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.pinned_directories import RootReplaced
from podwatch.system.procfs import boot_id

CHANGED = "the checkpoint changed on disk while it was uploaded"
BACKOFF_MIN, BACKOFF_MAX = 5.0, 600.0
"""Seconds between tries while the store fails: quick after a blip, gentle in a long outage (full jitter)."""
ENDED_BACKOFF = 60.0
"""Longest pause once the run has ended: the machine is billed only for what is not stored yet."""
CRAMPED_SECONDS = 5.0
"""Between two looks at the space for the next save: the disk fills no faster than a save is written."""
SWEEP_EVERY = 86400.0
"""A sweep lists the whole run, and listings are paid per call; what it removes is at least a day old."""
SWEPT, BEGUN = "sync.swept", "sync.begun"
"""Journal keys: epoch second of the last sweep; [epoch second, step, save_id] of the newest upload's start, for
``upload_gap`` after a restart."""
_TRIES = 3
EVENTS_LOOKED_AT = 5000
"""Publications of the last days are among them."""


@dataclass(frozen=True, slots=True)
class Unstored:
    """What of this run is not in the store, in words. ``pending``: podwatch stores it; ``refused``: it cannot be
    stored, with the reason."""

    pending: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class _Request:
    """An operator's ``sync``. ``looks``: how often the lease had been looked at when it came."""

    step: int | None
    answer: "asyncio.Future[None]"
    looks: int


@dataclass(slots=True)
class StoreParts:
    """What one backup works with."""

    connection: StoreConnection
    lease: Lease
    keeper: LeaseKeeper
    named: set[SaveKey]
    stock: Stock
    outbox: Outbox
    uploads: Uploads
    retention: StoreRetention


class Backup:
    """Loop-side object. ``save_gap``: seconds from one save to the next."""

    def __init__(
        self, settings: Settings, run: RunSide, catalogue: Catalogue, journal: AsyncJournal, clock: Clock,
        parts: StoreParts, *, save_gap: Callable[[], float | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._settings, self._run, self._catalogue, self._journal, self._clock = (
            settings,
            run,
            catalogue,
            journal,
            clock,
        )
        self._save_gap = save_gap
        self.connection, self._keeper = parts.connection, parts.keeper
        self._named, self._stock, self._lease = parts.named, parts.stock, parts.lease
        self._publisher: Publisher | None = None
        self._outbox, self._uploads, self._retention = parts.outbox, parts.uploads, parts.retention
        self._exports = Exports(settings, run, catalogue, clock, parts.connection, parts.lease, parts.uploads)
        self._tally = CheckpointTally(journal, self.connection.say)
        self._disk = Worker("outbox")
        self._wake, self._hurry = asyncio.Event(), asyncio.Event()
        self._begun: dict[SaveKey, OutgoingSave] | None = None
        """What is being sent, by this pod's (step, save_id); None until the disk was read."""
        self._ahead: SaveKey | None = None
        """Sent whole while this pod's claim settles."""
        self._void: dict[SaveKey, str] = {}
        """Checkpoints that are not sent again, and why."""
        self._requests: list[_Request] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failures = self._abandoned_in_a_row = 0
        self._sending_failed = self._ended = False
        """The last upload failed: a full store takes heartbeats, and only an upload shows that it works. The run has
        ended here: pinned checkpoints are uploaded, too."""
        self._publishing: OutgoingSave | None = None
        self._gap_from: float | None = None
        self._gap_of: SaveKey | None = None
        self._published_wall: float | None = None
        self._beat_error = ""
        self.restores: list[RestoreThread] = []
        """What reads this store: retention leaves alone what they fetch."""

    # -- what others read ---------------------------------------------------------------------------------------------

    def status(self) -> StoreFacts:
        """From any thread."""
        connection, flight, decision = self.connection, self._uploads.in_flight, self._keeper.decision
        trouble, publishing, inventory = connection.trouble, self._publishing, self._stock.inventory
        if flight is None and publishing is not None:
            flight = InFlight(publishing.step, publishing.total_bytes, publishing.total_bytes)
        newest = None if inventory is None else inventory.newest
        return StoreFacts(
            store_url=connection.url,
            ok=connection.works,
            error="" if trouble is None else trouble.error,
            refused=trouble is not None and trouble.refused,
            next_attempt_wall=None if trouble is None else trouble.next_attempt_wall,
            locked_out=self._keeper.locked_out,
            clock_skew=connection.skew,
            checkpoints=self._stock.checkpoints(self.sets),
            listed=inventory is not None,
            last_step=None if newest is None else newest.step,
            last_published_wall=self._last_published_wall(inventory),
            uploading_step=None if flight is None else flight.step,
            uploaded_bytes=0 if flight is None else flight.sent,
            total_bytes=0 if flight is None else flight.total,
            upload_rate=self._uploads.rate,
            superseded=decision.act in NOT_OURS,
            standing=decision,
            settles_in=self._keeper.settles_in,
            abandoned_in_a_row=self._abandoned_in_a_row,
            warnings=self._warnings(),
            tally=self._tally.now,
            calls=connection.calls,
        )  # fmt: skip

    def _last_published_wall(self, inventory: Inventory | None) -> float | None:
        """By this machine's clock."""
        ahead = self.connection.skew or 0.0
        walls = [s.wall + ahead for s in inventory.saves if not s.problem] if inventory is not None else []
        return max([*walls, *([self._published_wall] if self._published_wall else [])], default=None)

    def _warnings(self) -> tuple[str, ...]:
        shortage = self.connection.shortage
        return tuple(dict.fromkeys((*self._retention.warnings, *([shortage] if shortage else []))))

    @property
    def sets(self) -> tuple[CheckpointSet, ...]:
        """The checkpoints of this run on this pod."""
        return tuple(found for found in self._catalogue.sets if self._run.owns(found))

    @property
    def standing(self) -> Decision:
        """Which pod may train, as far as the lease shows."""
        return self._keeper.decision

    @property
    def may_upload(self) -> bool:
        return self._keeper.may_upload

    @property
    def holds(self) -> bool:
        """Whether this pod publishes for the run."""
        return self._keeper.holds

    @property
    def refused_lately(self) -> bool:
        """Whether the store did not answer when it was asked last which pod holds the run."""
        return self._keeper.error is not None

    @property
    def earlier_beat(self) -> Beat | None:
        """The heartbeat of the life before this one, of whatever pod."""
        return self._keeper.earlier_beat

    @property
    def generation(self) -> int:
        """Of the claim that this pod has won; 0 if none."""
        return self._keeper.generation

    @property
    def claimed(self) -> int:
        """The generation of this pod's claim, decided or not; 0 if none."""
        return self._keeper.decision.generation if self.may_upload else 0

    async def confirm(self) -> int:
        """The generation with which this pod holds the run, confirmed by the store now. Raises PodwatchError."""
        return (await self._keeper.confirm()).generation

    async def until_holding(self) -> None:
        """Returns once this pod's claim is decided for it."""
        while not self.holds:
            await self.turned()

    async def until_speaking(self, speaks: bool) -> None:
        """Returns once this pod writes the run's heartbeat, or once it no longer does."""
        while self.may_upload is not speaks:
            await self.turned()

    async def turned(self) -> None:
        """Returns once the lease may have changed."""
        self._keeper.turned.clear()
        await self._keeper.turned.wait()

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Begin to ask the store which pod holds the run; ``start`` does it too."""
        self._keeper.start()

    def notify(self) -> None:
        """Call after a rescan, which may have found a new complete checkpoint. Cheap."""
        self._wake.set()
        if self._tasks and self._stock.inventory is not None:
            lineage = self._run.lineage.id
            stored = {(s.step, s.save_id) for s in self.sets if self._stock.find(s) is not None}
            self._tally.see(self.sets, stored, lineage, newest_of_lineage(self._stock.inventory, lineage))

    async def sync_now(self, step: int | None = None) -> None:
        """Upload and publish the newest complete checkpoint, or that of ``step``, now. Returns when it is in the store.
        Raises PodwatchError when there is nothing to send, or the attempt fails."""
        if why := self._run.withheld():
            raise HostError(f"podwatch uploads nothing now: {why}")
        self._pick(step)  # raises if there is nothing to send
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(step, answer, self._keeper.looks))
        self._keeper.hurry()
        self._hurry.set()
        self._wake.set()
        await answer

    def retry(self, step: int, save_id: str) -> None:
        """The operator's request to send a checkpoint that was abandoned or held back."""
        self._void.pop((step, save_id), None)

    def run_ended(self) -> None:
        """Call while the run has ended here: the newest checkpoint, then pinned ones, then exports are stored until a
        trainer runs again. ``upload_gap`` does not count meanwhile. Cheap."""
        if not self._ended:
            self._ended = True
            self._hurry.set()
        self.notify()

    def why_not_ours(self) -> str:
        """Why this pod stores nothing more, however long one waits: another pod holds the run. Empty otherwise. What
        the store refuses is waited for: an operator can change a key or a cap."""
        if self.standing.act not in NOT_OURS:
            return ""
        return self.standing.why_not or "another pod holds this run"

    async def unstored(self) -> Unstored:
        """What is not in the store: the newest checkpoint, pinned ones, and the newest one's exports."""
        newest, found = newest_complete(self.sets), Unstored()
        waits = [newest] if newest is not None and self._lacks(newest) else []
        for one in (*waits, *self._pinned_unstored()):
            why = self._void.get((one.step, one.save_id), "") or (f"held back: {one.held}" if one.held else "")
            name = f"the checkpoint of step {one.step}" if one is newest else f"{PINNED}{one.step}"
            if why:
                found = replace(found, refused=(*found.refused, f"{name} ({why})"))
            else:
                found = replace(found, pending=(*found.pending, name))
        if waits or self._stock.inventory is None:
            return found
        pending, refused = await self._exports.unstored(self._stock.checkpoints(self.sets))
        return Unstored((*found.pending, *pending), (*found.refused, *refused))

    async def abandon(self, step: int) -> None:
        """Stop uploading ``step``: the disk is about to fill up, and this checkpoint must be removed."""
        for key, save in list((self._begun or {}).items()):
            if save.step == step:
                self._void[key] = CHANGED
                flight = self._uploads.in_flight
                if flight is not None and flight.step == step:
                    self._uploads.stop("the disk needs the space of this checkpoint")
                    await self._uploads.ended()
                await self._release(save)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._tally.load()
        if begun := await self._journal.run(Journal.learned, BEGUN):
            self._gap_from = self._clock.monotonic() - max(0.0, self._clock.wall() - float(begun[0]))
            self._gap_of = (int(begun[1]), str(begun[2]))
        self.ask()
        self._tasks = [
            asyncio.create_task(self._work(), name="backup"),
            asyncio.create_task(self._list_first(), name="what the store has"),
            asyncio.create_task(self._follow_lease(), name="backup follows the lease"),
            asyncio.create_task(self._watch_space(), name="space of what is sent"),
            asyncio.create_task(self._watch_silence(), name="silence of the store"),
        ]

    async def stop(self) -> None:
        """Prompt: an upload in flight is ended, and the next podwatch continues it."""
        tasks, self._tasks = self._tasks, []
        self._uploads.stop("podwatch is leaving")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._uploads.close()
        self._answer(RemoteError("podwatch is stopping", where=self.connection.url, fix="the next podwatch continues"))
        await self._keeper.stop()
        self._disk.close()
        self.connection.close()

    async def _list_first(self) -> None:
        """Show what the store has also while another pod holds the run, or nothing can be sent."""
        while self._stock.inventory is None:
            with contextlib.suppress(PodwatchError, OSError):
                await self._take_inventory()
                self._wake.set()
                return
            await self._clock.sleep(random.uniform(BACKOFF_MIN, 4 * BACKOFF_MIN))

    async def _follow_lease(self) -> None:
        while True:
            await self.turned()
            self._wake.set()
            self._hurry.set()
            if not self.may_upload and self._uploads.in_flight is not None:
                self._uploads.stop("another pod holds the run, or its lease is not known any more")

    async def _watch_space(self) -> None:
        """Give up a checkpoint that only our links keep, as soon as the next save needs its space."""
        while True:
            await self._clock.sleep(CRAMPED_SECONDS)
            for save in list((self._begun or {}).values()):
                if save.linked and await self._disk.call(self._outbox.is_cramped, save):
                    await self._give_up(save, "the trainer removed it and the next save needs its space")

    async def _watch_silence(self) -> None:
        while True:
            await self._clock.sleep(CRAMPED_SECONDS)
            self.connection.judge_silence()

    # -- heartbeat ----------------------------------------------------------------------------------------------------

    async def beat(self, heartbeat: Heartbeat, state: HolderState = HolderState.RUNNING) -> None:
        """Write heartbeat.json, if this pod is the one that does. Trouble of the store is a state, never an
        exception."""
        if not self.may_upload:
            return
        try:
            await self._keeper.beat(heartbeat, state)
        except (LeaseLost, LeaseUnsettled):
            return
        except Exception as error:
            known = as_known(error)
            self._beat_error = str(known)
            self.connection.unwell(known)
            return
        trouble = self.connection.trouble
        if trouble is not None and not self._sending_failed and (trouble.error == self._beat_error or trouble.refused):
            self.connection.well()
        self._beat_error = ""
        self._hurry_after_refusal()

    def _hurry_after_refusal(self) -> None:
        """A heartbeat was taken: a key that was refused may be corrected, and the next try need not wait."""
        if self.connection.trouble is None or self.connection.trouble.refused:
            self._hurry.set()

    async def sweep_store(self) -> None:
        """Once a day: list the store again, remove what is old or was never finished."""
        if (
            not self.holds
            or self._clock.wall() - float(await self._journal.run(Journal.learned, SWEPT, 0.0)) < SWEEP_EVERY
        ):
            return
        await self._retention.prune(self._live())
        await self._keeper.tidy()
        self._journal.post(Journal.learn, SWEPT, self._clock.wall())

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            self._hurry.clear()
            try:
                more = await self._turn()
            except Exception as error:
                known = as_known(error)
                self.connection.unwell(known)
                if isinstance(known, (LeaseLost, LeaseUnsettled)):
                    self._keeper.hurry()
                self._answer(known)
                self._failures += 1
                await self._pause()
                continue
            if not more and not self._requests:
                if self._sending_failed and self._stock.inventory is not None:
                    self._done_well()
                await self._wake.wait()

    async def _pause(self) -> None:
        high = min(BACKOFF_MAX, ENDED_BACKOFF) if self._over() else BACKOFF_MAX
        seconds = random.uniform(BACKOFF_MIN / 2, min(high, BACKOFF_MIN * 2.0 ** min(self._failures, 20)))
        self.connection.tries_again_in(seconds)
        await self._rest(seconds)

    async def _rest(self, seconds: float) -> None:
        """Sleep, or until a request arrives."""
        await self._clock.wait(self._hurry, seconds)

    def _done_well(self) -> None:
        self._failures, self._sending_failed = 0, False
        self.connection.well()

    async def _turn(self) -> bool:
        """Do one thing, if there is one; whether something was done, so that the caller looks again."""
        if why := self.why_not_ours():
            fix = "to take it over, run podwatch run --take-over"
            self._answer(LeaseLost(f"another pod holds this run: {why}", where=self.connection.url, fix=fix))
            return False
        if not self.may_upload:
            return await self._wait_for_lease()
        if why := self._run.withheld():  # each rescan looks again
            self._answer(HostError(f"podwatch uploads nothing now: {why}"))
            return False
        try:
            await self._disk.call(self._outbox.workspace.check)
            await self._ready()
        except RootReplaced as error:  # what was sent stays sent: it continues once the directories are back
            self._answer(error)
            return False
        if self.holds and await self._follow_lineage():
            return True
        return await self._send_something()

    async def _wait_for_lease(self) -> bool:
        served = self._requests[0] if self._requests else None
        if served is not None and self._keeper.looks == served.looks:
            self._keeper.hurry()  # the answer of an earlier look is not that of a key which was corrected since
            await self.turned()
            return True
        if self._keeper.error is not None:
            raise self._keeper.error
        if self.connection.works is False and not self._sending_failed:
            self.connection.well()
        await self._wake.wait()
        return True

    async def _ready(self) -> None:
        """With what the store has, and what an earlier podwatch was sending."""
        if self._begun is None:
            found = await self._disk.call(self._outbox.found)
            self._begun = {save.key: save for save in found if save.run_id == self._settings.run_id}
            if self._stock.inventory is None:
                await self._take_inventory()
            assert self._stock.inventory is not None
            await self._report_missed(self._stock.inventory)
        if self._stock.inventory is None:
            await self._take_inventory()
        elif self._failures and await self._list_again() and not self._sending_failed:
            self._done_well()
        self._failures = min(self._failures, 1)

    async def _list_again(self) -> bool:
        """What was noted since the last listing is right, too: a publication lists its own save. So this can wait.
        Whether the store was listed."""
        if not self.connection.allows(self._stock.names):
            return False
        await self._take_inventory()
        return True

    async def _take_inventory(self) -> None:
        inventory = await self.connection.call(self._stock.take)
        if inventory.stored:
            await self._run.note_stored()

    async def _follow_lineage(self) -> bool:
        """After a step back on purpose or a fresh start: make the save from which training continued the newest. Also
        keep the pins. Whether the pointer was moved."""
        inventory, run = self._stock.inventory, self._run.record
        assert inventory is not None
        beat = self.earlier_beat
        await self._retention.keep_pins(foreign=beat is not None and beat.said.writer_id != run.writer_id)
        if not is_behind_lineage(inventory, run):
            return False
        target = departed_from(inventory, run)
        if target is None and run.lineage.parent_step is not None:
            return False  # the store has no save of it: what it has is better than nothing
        await self.connection.call(lambda store: self._repoint(store, target))
        return True

    def _repoint(self, store: Objects, target: Stored | None) -> None:
        self._publishes_to(store).repoint(target, self._run.author())
        self._stock.take(store)

    # -- choosing -----------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        """Whether the run has ended here, and no trainer runs again."""
        self._ended = self._ended and not self._run.trainer_alive()
        return self._ended

    def _lacks(self, found: CheckpointSet) -> bool:
        """Whether it is not in the store."""
        return self._stock.find(found) is None

    def _is_sendable(self, found: CheckpointSet) -> bool:
        return self._lacks(found) and (found.step, found.save_id) not in self._void

    def _pinned(self) -> set[int]:
        return {*self._run.named, *self._run.pins}

    def _pinned_unstored(self) -> list[CheckpointSet]:
        """Complete pinned checkpoints, except the newest, that are not in the store, newest first."""
        sets, pins = self.sets, self._pinned()
        newest = newest_complete(sets)
        found = (s for s in sets if s.step in pins and s.complete and s is not newest)
        return sorted((s for s in found if self._lacks(s)), key=lambda s: -s.step)

    def _pick(self, step: int | None) -> CheckpointSet:
        """The newest complete checkpoint, or the requested one. Raises HostError."""
        sets = self.sets
        chosen = newest_complete(sets) if step is None else next((s for s in sets if s.step == step), None)
        if chosen is None:
            what = "no complete checkpoint yet" if step is None else f"no checkpoint of step {step} on this pod"
            raise HostError(what, where=str(self._settings.trainer.output_dir))
        if not chosen.complete or not chosen.save_id:
            raise HostError(f"checkpoint of step {chosen.step} is not complete: {chosen.reason or chosen.completeness}")
        return chosen

    async def _send_something(self) -> bool:
        served = self._requests[0] if self._requests else None
        begun = await self._choose_begun() if served is None else None
        if begun is None and served is None and (wait := self._gap_left()) > 0:
            await self._rest(wait)
            return True
        if begun is not None:
            return await self._attempt(begun, None)
        try:
            chosen = self._pick(served.step if served is not None else None)
        except HostError as error:
            self._answer(error)
            return False
        key = (chosen.step, chosen.save_id)
        if not self._lacks(chosen):
            self._answer(None)
            return await self._when_stored()
        if key in self._void:
            self._answer(SourceChanged(self._void[key], where=f"step {chosen.step}"))
            return False
        return await self._attempt((self._begun or {}).get(key), chosen)

    async def _when_stored(self) -> bool:
        """The newest checkpoint is in the store: what else can be done."""
        if not self.holds:
            return False
        if await self._name_unnamed():
            return True
        if not self._retention.tidied:  # an earlier podwatch was killed between publication and retention
            await self._retention.prune(self._live())
        for chosen in self._pinned_unstored() if self._over() else ():
            if not chosen.held and self._is_sendable(chosen):
                return await self._attempt((self._begun or {}).get((chosen.step, chosen.save_id)), chosen)
        stored = self._stock.checkpoints(self.sets)
        if await self._exports.carry(stored, self.more_urgent):
            self._done_well()
            await self._list_again()
            return True
        return False

    async def _name_unnamed(self) -> bool:
        """Point to the newest checkpoint, which is whole in the store: its publication was interrupted before that."""
        newest, inventory = newest_complete(self.sets), self._stock.inventory
        saved = None if newest is None else self._stock.find(newest)
        if saved is None or inventory is None or saved.manifest is None or not saved.seq:
            return False
        named = any(seen.pointer is not None and seen.pointer.save == saved.key for seen in inventory.pointers)
        if named or saved.manifest.lineage != self._run.lineage.id or self._newest_stored() > saved.step:
            return False
        await self.connection.call(lambda store: self._repoint(store, saved))
        self._published_wall = self._clock.wall()
        self._say_published(saved)
        return True

    def _say_published(self, saved: Stored, more: str = "") -> None:
        fixed = {one.key for one in self._stock.checkpoints(()) if one.milestone}
        self.connection.say(
            EventName.PUBLISHED, f"step {saved.step} is in the store{more}", step=saved.step, bytes=saved.bytes,
            generation=saved.generation, seq=saved.seq, milestone=saved.key in fixed,
        )  # fmt: skip

    async def _report_missed(self, inventory: Inventory) -> None:
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
        told = {(e.fields.get("generation"), e.fields.get("seq")) for e in events if e.name is EventName.PUBLISHED}
        if newest.order not in told:
            self._say_published(newest, " (podwatch was interrupted before it could report this)")

    def more_urgent(self) -> bool:
        """Whether anything waits that is more urgent than exports."""
        newest = newest_complete(self.sets)
        new = newest is not None and self._is_sendable(newest)
        return bool(self._requests) or (new and self._gap_left() <= 0) or not self.holds

    async def _choose_begun(self) -> OutgoingSave | None:
        """The interrupted upload that is finished before the newest checkpoint is begun, because less is left of it.
        Those that nobody needs are given up."""
        newest, waiting = newest_complete(self.sets), list[Waiting]()
        for save in list((self._begun or {}).values()):
            if self._is_stored(save):
                await self._release(save)
            elif why := why_given_up(self._as_begun(save)):
                await self._give_up(save, why, interrupted=True)
            elif self._is_inspected(save) and not self._waits_for_end(save):
                left = await self._disk.call(self._uploads.left_bytes, save)
                waiting.append(Waiting(save.step, save.save_id, left))
        fresh = None
        if newest is not None and self._is_sendable(newest) and self._gap_left() <= 0:
            fresh = Waiting(newest.step, newest.save_id, newest.size_bytes)
        best = next_upload(fresh, [one for one in waiting if fresh is None or one.step != fresh.step])
        return None if best is None else (self._begun or {}).get((best.step, best.save_id))

    def _is_inspected(self, save: OutgoingSave) -> bool:
        """Whether exactly these files were found complete in this boot."""
        found = next((s for s in self.sets if s.step == save.step), None)
        if found is not None and found.save_id == save.save_id:
            return found.complete and not found.held
        return save.linked and save.boot_id == boot_id()

    def _is_stored(self, save: OutgoingSave) -> bool:
        inventory = self._stock.inventory
        return inventory is not None and save.stored_key in inventory.stored

    def _waits_for_end(self, save: OutgoingSave) -> bool:
        """A pinned one that is not the newest: the next checkpoint would wait for it."""
        return save.step in self._pinned() and save.step < self._newest_stored() and not self._over()

    def _newest_stored(self) -> int:
        inventory = self._stock.inventory
        return -1 if inventory is None else newest_of_lineage(inventory, self._run.lineage.id)

    def _as_begun(self, save: OutgoingSave) -> Begun:
        found = next((s for s in self.sets if s.step == save.step), None)
        return Begun(
            save.step, save.save_id, found, linked=save.linked, void=save.key in self._void,
            same_lineage=save.lineage == self._run.lineage.id, newest_stored=self._newest_stored(),
            pinned=save.step in self._pinned(), scanned=bool(self._catalogue.sets),
        )  # fmt: skip

    def _gap_left(self) -> float:
        """Seconds until the next upload may start; 0 where nothing would start anyway, or one continues."""
        newest = newest_complete(self.sets)
        if self._gap_from is None or newest is None or self._over():
            return 0.0
        if (newest.step, newest.save_id) == self._gap_of or not self._lacks(newest):
            return 0.0
        return self._gap_from + self._settings.sync.upload_gap - self._clock.monotonic()

    def _begin_gap(self, key: SaveKey) -> None:
        if self._gap_of != key:
            self._gap_from, self._gap_of = self._clock.monotonic(), key
            self._journal.post(Journal.learn, BEGUN, [self._clock.wall(), *key])

    # -- sending and publishing ---------------------------------------------------------------------------------------

    async def _attempt(self, save: OutgoingSave | None, chosen: CheckpointSet | None) -> bool:
        """Send and publish ``save``, or ``chosen`` where that is not begun yet; whether the caller looks again."""
        assert save is not None or chosen is not None
        step, key = (chosen.step, (chosen.step, chosen.save_id)) if chosen is not None else (save.step, save.key)  # type: ignore[union-attr]
        if self._ahead == key and not self.holds:
            await self._wake.wait()
            return True
        try:
            with self._sending():
                save = save if save is not None else await self._take(chosen)  # type: ignore[arg-type]
                await self._send(save)
        except (SourceChanged, SourceForeign) as error:
            await self._abandon(key, step, save, error)
            self._answer(error)
            return True
        except UploadStopped as error:
            if self.may_upload and save is not None and save.key in self._void:
                await self._abandon(key, step, save, error)
                self._answer(error)
            return True
        if self.holds:
            self._failures = 0
            self._answer(None)
        return True

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Around an upload: notes whether the store has failed it."""
        try:
            yield
        except (SourceChanged, SourceForeign, UploadStopped, RootReplaced, LeaseLost, LeaseUnsettled):
            raise  # not of the store
        except PodwatchError:
            self._sending_failed = True
            raise

    async def _take(self, chosen: CheckpointSet) -> OutgoingSave:
        """Record it, and link its files. Raises SourceChanged when it is no longer the one that was found complete."""
        contents = await self._contents(chosen)
        save = self._outgoing(chosen, contents)
        known = self._stock.inventory
        assert known is not None
        same = known.find_unfinished(chosen.step, save.saved_files(), self._run.record.writer_id)
        if same is not None and same.intent is not None and same.intent.piece_size == save.piece_size:
            save = replace(save, stored_as=same.save_id)
        save = await self._disk.call(self._outbox.take, save, contents)
        assert self._begun is not None
        self._begun[save.key] = save
        return save

    async def _contents(self, chosen: CheckpointSet) -> SetContents:
        try:
            contents = await self._disk.call(self._catalogue.contents, chosen.step)
        except (OSError, PodwatchError) as error:
            raise SourceChanged(f"the checkpoint is gone: {error}", where=f"step {chosen.step}") from error
        if not contents.set.complete or contents.set.save_id != chosen.save_id:
            what = "the step was saved again, so this checkpoint is gone"
            raise SourceChanged(what, where=f"step {chosen.step}")
        if contents.set.held:
            raise SourceChanged(f"the checkpoint is held back: {contents.set.held}", where=f"step {chosen.step}")
        return contents

    def _outgoing(self, chosen: CheckpointSet, contents: SetContents) -> OutgoingSave:
        run, files = self._run.record, outgoing_files(contents.files)
        last = run.last_start
        wrote = last is not None and (chosen.began_wall or chosen.changed_wall) >= last.wall
        paths = {p.part.name: str(p.part.path) for p in contents.parts}
        return OutgoingSave(
            self._settings.run_id, chosen.step, chosen.save_id, secrets.token_hex(8), chosen.layout,
            int(self._settings.sync.part_size), files, {part: paths[part] for part in used_parts(files)},
            outgoing_links(contents), run.lineage.id, last.start_id if last is not None and wrote else "",
            last.step if last is not None and wrote else None, contents.world_size, self._clock.wall(), boot_id(),
        )  # fmt: skip

    async def _send(self, save: OutgoingSave) -> None:
        """Send what is missing, and publish it once this pod holds the run. Raises as ``Uploads.send``."""
        for left in reversed(range(_TRIES)):
            intent, save = await self._intent(save)
            self._begin_gap(save.key)
            sent = await self._uploads.send(save, intent, urgent=self._is_urgent(save.step))
            if not self.holds:
                self._ahead = save.key
                return
            try:
                await self._publish(save, sent)
                return
            except PiecesMissing as error:
                if not left:
                    raise
                folder = self.connection.keys.save(*save.stored_key)
                await self._disk.call(self._outbox.send_again, save, [folder + name for name in error.names])
                await self._take_inventory()

    async def _intent(self, save: OutgoingSave) -> tuple[SaveIntent, OutgoingSave]:
        """The intent in the store, which is written first where there is none. An old one can be about to be swept:
        then the save is sent under a new name."""
        inventory = self._stock.inventory
        assert inventory is not None
        found = next((u for u in inventory.unfinished if u.key == save.stored_key), None)
        young = found is not None and inventory.store_wall - found.newest_wall < REUSED_SECONDS
        if found is not None and young and found.intent is not None:
            return found.intent, save
        sent = await self._disk.call(self._outbox.sent, save)
        if found is not None or sent:
            save = replace(save, stored_as=secrets.token_hex(8))
            await self._disk.call(self._outbox.rename, save)
            assert self._begun is not None
            self._begun[save.key] = save
        run = self._run.record
        try:
            intent = save.intent(run.writer_id, max(1, self.generation), self._clock.wall())
        except (ValueError, PodwatchError) as error:
            raise SourceChanged(f"its files cannot be stored: {error}", where=f"step {save.step}") from error
        text = f"step {save.step}: upload started"
        self.connection.say(EventName.UPLOAD_STARTED, text, step=save.step, bytes=save.total_bytes)
        await self.connection.call(lambda store: self._begin(store, intent))
        self._stock.begin(intent)
        return intent, save

    def _publishes_to(self, store: Objects) -> Publisher:
        """The publisher of this life, with the store as it is open now. In the store's thread."""
        if self._publisher is None:
            self._publisher = Publisher(store, self.connection.keys, self._lease, self._clock, named=self._named)
        self._publisher.store = store
        return self._publisher

    def _begin(self, store: Objects, intent: SaveIntent) -> None:
        self._publishes_to(store).begin(intent)

    def _is_urgent(self, step: int) -> bool:
        """Whether the upload of this step gives way to nothing: a newer save waits, nothing is stored yet, an operator
        waits for it, or training has ended."""
        inventory = self._stock.inventory
        first = inventory is None or not inventory.stored
        return first or self._tally.newer_waits(step) or bool(self._requests) or self._over()

    async def _publish(self, save: OutgoingSave, sent: SentSave) -> None:
        began, self._publishing = self._clock.monotonic(), save
        try:
            await self._disk.call(self._outbox.workspace.check)
            if not await self._disk.call(self._outbox.is_unchanged, save):
                raise SourceChanged("a file of it changed or disappeared", where=f"step {save.step}")
            newest = save.step > self._newest_stored() and not self._waits_for_end(save)
            stored = await self.connection.call(lambda store: self._publish_now(store, save, sent, newest=newest))
        finally:
            self._publishing = None
        self._stock.add(stored)
        self._ahead, self._abandoned_in_a_row, self._published_wall = None, 0, self._clock.wall()
        self._done_well()
        await self._release(save)
        self._report(save, stored, newest=newest, seconds=self._clock.monotonic() - began)
        if not await self._retention.prune(self._live()):
            await self._list_again()

    def _publish_now(self, store: Objects, save: OutgoingSave, sent: SentSave, *, newest: bool) -> Stored:
        author = self._run.author(start_id=save.start_id, from_step=save.from_step, world_size=save.world_size)
        return self._publishes_to(store).publish(sent, author, newest=newest)

    def _report(self, save: OutgoingSave, stored: Stored, *, newest: bool, seconds: float) -> None:
        say = self.connection.say
        if not newest:
            text = f"step {save.step}, which is pinned, is in the store"
            say(EventName.FINAL_SYNC, text, step=save.step, bytes=stored.bytes)
            return
        self._say_published(stored)
        took = max(seconds, self._clock.wall() - save.began_wall)
        self._tally.stored(save.key, seconds=took, save_seconds=self._save_gap())

    def _live(self) -> set[SaveKey]:
        """Saves in the store that are being sent or fetched, or that this pod has and needs."""
        sending = {save.stored_key for save in (self._begun or {}).values()}
        fetched = {restore.fetching for restore in self.restores if restore.fetching is not None}
        inventory = self._stock.inventory
        used = self._run.in_use()
        return sending | fetched | {s.key for s in (inventory.saves if inventory is not None else ()) if s.step in used}

    # -- what ends an upload ------------------------------------------------------------------------------------------

    async def _release(self, save: OutgoingSave) -> None:
        if self._begun is not None:
            self._begun.pop(save.key, None)
        await self._disk.call(self._outbox.release, save)

    async def _give_up(self, save: OutgoingSave, why: str, *, interrupted: bool = False) -> None:
        self._void[save.key] = why
        flight = self._uploads.in_flight
        if flight is not None and flight.step == save.step:
            self._uploads.stop(why)
            return  # whoever sends it abandons it
        self._tally.abandoned(save.key)
        await self._release(save)
        text = f"step {save.step}: {'interrupted upload not continued' if interrupted else 'upload abandoned'}: {why}"
        self.connection.say(EventName.UPLOAD_ABANDONED, text, step=save.step)

    async def _abandon(self, key: SaveKey, step: int, save: OutgoingSave | None, error: PodwatchError) -> None:
        foreign = isinstance(error, SourceForeign)
        self._void[key] = error.what if foreign else CHANGED
        self._tally.abandoned(key)
        if save is not None:
            await self._release(save)
        in_a_row = self._abandoned_in_a_row = self._abandoned_in_a_row + isinstance(error, SourceChanged)
        newer = any(s.complete and s.step > step for s in self.sets)
        if foreign:
            severity, hint = Severity.CRITICAL, ". Find out which user made it, remove it, and save again"
        elif in_a_row >= 2:
            severity = Severity.CRITICAL
            hint = ". The trainer removes checkpoints faster than they can be uploaded: let it keep more of them"
        else:
            severity, hint = (Severity.INFO if newer or isinstance(error, UploadStopped) else Severity.WARNING), ""
        text = f"step {step}: upload abandoned: {error.what}{hint}"
        self.connection.say(EventName.UPLOAD_ABANDONED, text, severity, step=step, in_a_row=in_a_row)

    def _answer(self, error: Exception | None) -> None:
        """Answer the request that was served, or all of them when the store fails."""
        one = error is None or isinstance(error, (HostError, SourceChanged, SourceForeign, ConfigurationError))
        for request in self._requests[: 1 if one else len(self._requests)]:
            self._requests.remove(request)
            if not request.answer.done():
                if error is None:
                    request.answer.set_result(None)
                else:
                    request.answer.set_exception(error)
