"""Keeps the newest complete checkpoint in the store: the loop that chooses, sends, publishes and removes what is old.

Trouble of the store never leaves this object as an exception: it is a state, reported once, and tried again for ever.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from podwatch.app.backup.connection import StoreConnection, as_known
from podwatch.app.backup.exports import Exports
from podwatch.app.backup.outbox import Outbox, OutgoingSave
from podwatch.app.backup.ownership import NOT_OURS, LeaseKeeper
from podwatch.app.backup.run_side import RunSide
from podwatch.app.backup.stored_run import StoredRun
from podwatch.app.backup.upload_queue import Unstored, UploadQueue
from podwatch.app.backup.uploads import InFlight, Uploads, UploadStopped
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError, RemoteError
from podwatch.domain.event import EventName
from podwatch.domain.facts import StoreFacts
from podwatch.domain.lease import Decision, Heartbeat, HolderState
from podwatch.journal import AsyncJournal, Journal
from podwatch.store.documents import SaveIntent
from podwatch.store.inventory import SaveKey
from podwatch.store.lease import Lease
from podwatch.store.publish import LeaseLost, LeaseUnsettled, PiecesMissing
from podwatch.store.restore.thread import RestoreThread
from podwatch.store.transfer.send import SourceChanged, SourceForeign
from podwatch.system.clock import Clock
from podwatch.system.pinned_directories import RootReplaced

BACKOFF_MIN, BACKOFF_MAX = 5.0, 600.0
"""Seconds between tries while the store fails: quick after a blip, gentle in a long outage (full jitter)."""
ENDED_BACKOFF = 60.0
"""Longest pause once the run has ended: the machine is billed only for what is not stored yet."""
CRAMPED_SECONDS = 5.0
"""Between two looks at the space for the next save: the disk fills no faster than a save is written."""
SWEEP_EVERY = 86400.0
"""A sweep lists the whole run, and listings are paid per call; what it removes is at least a day old."""
SWEPT = "sync.swept"
"""Journal key: epoch second of the last sweep."""
_TRIES = 3


@dataclass(slots=True)
class _Request:
    """An operator's ``sync``. ``updates``: of the lease, that had ended when it came."""

    step: int | None
    answer: "asyncio.Future[None]"
    updates: int


class Backup:
    """Loop-side object. ``save_gap``: seconds from one save to the next."""

    def __init__(
        self, settings: Settings, run: RunSide, catalogue: Catalogue, journal: AsyncJournal, clock: Clock,
        connection: StoreConnection, lease: Lease, outbox: Outbox, *,
        save_gap: Callable[[], float | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._run, self._journal, self._clock = run, journal, clock
        self.connection, self.lease = connection, LeaseKeeper(lease, connection, clock, run)
        self._uploads = Uploads(settings, connection, outbox)
        self._stored = StoredRun(settings.sync, run, catalogue.records, journal, clock, connection, lease)
        self._queue = UploadQueue(
            settings, run, catalogue, journal, clock, connection, self._stored, outbox, self._uploads, save_gap
        )
        self._exports = Exports(settings, run, catalogue, clock, connection, outbox, self._uploads, self._stored)
        self._wake, self._hurry = asyncio.Event(), asyncio.Event()
        self._ahead: SaveKey | None = None
        """Sent whole while this pod's claim settles."""
        self._requests: list[_Request] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failures = 0
        self._sending_failed = False
        """The last upload failed: a full store takes heartbeats, and only an upload shows that it works."""
        self._listed_for = 0
        """The generation of the claim after whose decision the store was listed."""
        self._beat_error = ""
        self.restores: list[RestoreThread] = []
        """What reads this store: retention leaves alone what they fetch."""

    # -- what others read ---------------------------------------------------------------------------------------------

    def status(self) -> StoreFacts:
        """From any thread."""
        connection, flight, decision = self.connection, self._uploads.in_flight, self.lease.decision
        trouble, publishing, inventory = connection.trouble, self._stored.publishing, self._stored.inventory
        if flight is None and publishing is not None:
            flight = InFlight(publishing.step, publishing.total_bytes, publishing.total_bytes)
        newest = None if inventory is None else inventory.newest
        return StoreFacts(
            store_url=connection.url,
            ok=connection.works,
            error="" if trouble is None else trouble.error,
            refused=trouble is not None and trouble.refused,
            next_attempt_wall=None if trouble is None else trouble.next_attempt_wall,
            locked_out=self.lease.locked_out,
            clock_skew=connection.skew,
            checkpoints=self._stored.checkpoints(self.sets),
            surplus=self._queue.surplus(),
            listed=inventory is not None,
            last_step=None if newest is None else newest.step,
            last_published_wall=self._stored.last_wall,
            uploading_step=None if flight is None else flight.step,
            uploaded_bytes=0 if flight is None else flight.sent,
            total_bytes=0 if flight is None else flight.total,
            upload_rate=None if flight is None else flight.rate,
            superseded=decision.act in NOT_OURS,
            lease=decision,
            settles_in=self.lease.settles_in,
            abandoned_in_a_row=self._queue.abandoned_in_a_row,
            warnings=self._warnings(),
            upload_seconds=self._queue.upload_seconds,
            save_seconds=self._queue.save_seconds,
            skipped=self._queue.skipped,
            calls=connection.calls,
        )  # fmt: skip

    def _warnings(self) -> tuple[str, ...]:
        shortage = self.connection.shortage
        return tuple(dict.fromkeys((*self._stored.warnings, *([shortage] if shortage else []))))

    @property
    def sets(self) -> tuple[CheckpointSet, ...]:
        """The checkpoints of this run on this pod."""
        return self._queue.sets

    @property
    def decision(self) -> Decision:
        """Which pod may train, as far as the lease shows."""
        return self.lease.decision

    # -- requests -----------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Call after a rescan, which may have found a new complete checkpoint. Cheap."""
        self._wake.set()
        if self._tasks and self._stored.inventory is not None:
            self._queue.see()
        self._make_way()

    async def sync_now(self, step: int | None = None) -> None:
        """Upload and publish the newest complete checkpoint, or that of ``step``, now. Returns when it is in the store.
        Raises PodwatchError when there is nothing to send, or the attempt fails."""
        if why := self._run.withheld():
            raise HostError(f"podwatch uploads nothing now: {why}")
        self._queue.pick(step)  # raises if there is nothing to send
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(step, answer, self.lease.updates))
        self.lease.hurry()
        self._hurry.set()
        self._wake.set()
        self._make_way()
        await answer

    def retry(self, step: int, save_id: str) -> None:
        """The operator's request to send a checkpoint that was abandoned or held back."""
        self._queue.void.pop((step, save_id), None)

    def run_ended(self) -> None:
        """Call while the run has ended here: the newest checkpoint, then pinned ones, then exports are stored until a
        trainer runs again. ``upload_gap`` does not count meanwhile. Cheap."""
        if self._queue.end():
            self._hurry.set()
        self.notify()

    def why_not_ours(self) -> str:
        """Why this pod stores nothing more, however long one waits: another pod holds the run. Empty otherwise. What
        the store refuses is waited for: an operator can change a key or a cap."""
        if self.lease.decision.act not in NOT_OURS:
            return ""
        return self.lease.decision.why_not or "another pod holds this run"

    async def unstored(self) -> Unstored:
        """What is not in the store: the newest checkpoint, pinned ones, and the newest one's exports."""
        newest, found = newest_complete(self.sets), self._queue.unstored()
        if self._stored.inventory is None or (newest is not None and self._queue.lacks(newest)):
            return found
        pending, refused = await self._exports.unstored(self._stored.checkpoints(self.sets))
        return Unstored((*found.pending, *pending), (*found.refused, *refused))

    async def abandon(self, step: int) -> None:
        """Stop uploading ``step``: the disk is about to fill up, and this checkpoint must be removed."""
        await self._queue.release_step(step)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._queue.load_gap()
        self.lease.start()
        self._tasks = [
            asyncio.create_task(self._work(), name="backup"),
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
        await self.lease.stop()
        self._queue.disk.close()
        self.connection.close()

    async def _follow_lease(self) -> None:
        while True:
            await self.lease.turned()
            self._wake.set()
            self._hurry.set()
            self._make_way()
            if not self.lease.may_upload and self._uploads.in_flight is not None:
                self._uploads.stop("another pod holds the run, or its lease is not known any more")

    async def _watch_space(self) -> None:
        while True:
            await self._clock.sleep(CRAMPED_SECONDS)
            await self._queue.release_cramped()

    async def _watch_silence(self) -> None:
        while True:
            await self._clock.sleep(CRAMPED_SECONDS)
            self.connection.judge_silence()

    # -- heartbeat ----------------------------------------------------------------------------------------------------

    async def beat(self, heartbeat: Heartbeat, state: HolderState = HolderState.RUNNING) -> None:
        """Write heartbeat.json, if this pod is the one that does. Trouble of the store is a state, never an
        exception."""
        if not self.lease.may_upload:
            return
        try:
            await self.lease.beat(heartbeat, state)
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
        if self.connection.trouble is None or self.connection.trouble.refused:
            self._hurry.set()  # a key that was refused may be corrected: the next try need not wait

    async def sweep_store(self) -> None:
        """Once a day: list the store again, remove what is old or was never finished."""
        if (
            not self.lease.holds
            or self._clock.wall() - float(await self._journal.run(Journal.learned, SWEPT, 0.0)) < SWEEP_EVERY
        ):
            return
        await self._stored.prune(self._live())
        await self.lease.tidy()
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
                    self.lease.hurry()
                self._answer(known)
                self._failures += 1
                await self._pause()
                continue
            if not more and not self._requests:
                if self._sending_failed and self._stored.inventory is not None:
                    self._done_well()
                await self._wake.wait()

    async def _pause(self) -> None:
        high = min(BACKOFF_MAX, ENDED_BACKOFF) if self._queue.is_over() else BACKOFF_MAX
        seconds = random.uniform(BACKOFF_MIN / 2, min(high, BACKOFF_MIN * 2.0 ** min(self._failures, 20)))
        self.connection.tries_again_in(seconds)
        await self._clock.wait(self._hurry, seconds)

    def _done_well(self) -> None:
        self._failures, self._sending_failed = 0, False
        self.connection.well()

    async def _turn(self) -> bool:
        """Do one thing, if there is one; whether something was done, so that the caller looks again. What the store has
        is shown also while another pod holds the run, or nothing can be sent."""
        if self._stored.inventory is None:
            await self._take_inventory()
        if why := self.why_not_ours():
            fix = "to take it over, run podwatch run --take-over"
            self._answer(LeaseLost(f"another pod holds this run: {why}", where=self.connection.url, fix=fix))
            return False
        if not self.lease.may_upload:
            return await self._wait_for_lease()
        if why := self._run.withheld():  # each rescan looks again
            self._answer(HostError(f"podwatch uploads nothing now: {why}"))
            return False
        try:
            await self._queue.check()
            await self._ready()
            await self._queue.recognise()
        except RootReplaced as error:  # what was sent stays sent: it continues once the directories are back
            self._answer(error)
            return False
        if self.lease.holds:
            if self._listed_for != self.lease.generation:  # another pod can have published until this claim was decided
                await self._take_inventory()
                self._listed_for = self.lease.generation
            if await self._follow_run():
                return True
        return await self._send_something()

    async def _wait_for_lease(self) -> bool:
        served = self._requests[0] if self._requests else None
        if served is not None and self.lease.updates == served.updates:
            self.lease.hurry()  # the answer of an earlier look is not that of a key which was corrected since
            await self.lease.turned()
            return True
        if self.lease.error is not None:
            raise self.lease.error
        if self.connection.works is False and not self._sending_failed:
            self.connection.well()
        await self._wake.wait()
        return True

    async def _ready(self) -> None:
        """With what the store has, and what an earlier podwatch was sending."""
        if self._queue.begun is None:
            await self._queue.load()
            await self._stored.report_missed()
        elif self._failures and await self._list_again() and not self._sending_failed:
            self._done_well()
        self._failures = min(self._failures, 1)

    async def _list_again(self) -> bool:
        """What was noted since the last listing is right, too: a publication lists its own save. So this can wait.
        Whether the store was listed."""
        if not self.connection.allows(self._stored.names):
            return False
        await self._take_inventory()
        return True

    async def _take_inventory(self) -> None:
        inventory = await self.connection.call(self._stored.take)
        if not self._sending_failed:
            self.connection.well()
        if inventory.stored:
            await self._run.note_stored()
        await self._queue.recognise()

    async def _follow_run(self) -> bool:
        """Keep the pins, and let the pointer follow the run. Whether it was moved."""
        beat = self.lease.earlier_beat
        await self._stored.keep_pins(foreign=beat is not None and beat.said.writer_id != self._run.record.writer_id)
        return await self._stored.move_pointer(newest_complete(self.sets))

    # -- sending and publishing ---------------------------------------------------------------------------------------

    async def _send_something(self) -> bool:
        served = self._requests[0] if self._requests else None
        begun = await self._queue.choose_begun() if served is None else None
        if begun is not None:
            return await self._attempt(begun)
        if served is None and (wait := self._queue.gap_left()) > 0:
            await self._clock.wait(self._hurry, wait)
            return True
        try:
            chosen = self._queue.pick(served.step if served is not None else None)
        except HostError as error:
            self._answer(error)
            return False
        if not self._queue.lacks(chosen):
            self._answer(None)
            return await self._when_stored()
        if why := self._queue.void.get((chosen.step, chosen.save_id)):
            self._answer(SourceChanged(why, where=f"step {chosen.step}"))
            return False
        return await self._attempt(chosen, served)

    async def _when_stored(self) -> bool:
        """The newest checkpoint is in the store: what else can be done."""
        if not self.lease.holds:
            return False
        if not self._stored.tidied:  # an earlier podwatch was killed between publication and retention
            await self._stored.prune(self._live())
        if (pinned := self._queue.pick_pinned()) is not None:
            return await self._attempt(pinned)
        if await self._exports.carry(self._stored.checkpoints(self.sets)):
            self._done_well()
            await self._list_again()
            return True
        return False

    def _make_way(self) -> None:
        """Exports wait for everything else."""
        if self._exports.sending and (self._requests or self._queue.newer_waits() or not self.lease.holds):
            self._exports.make_way()

    async def _attempt(self, chosen: CheckpointSet | OutgoingSave, served: _Request | None = None) -> bool:
        """Send and publish it; whether the caller looks again. ``served``: the request that this answers. One that came
        meanwhile may be for another checkpoint."""
        key = (chosen.step, chosen.save_id)
        if self._ahead == key and not self.lease.holds:
            await self._wake.wait()
            return True
        try:
            await self._send(chosen if isinstance(chosen, OutgoingSave) else await self._queue.take(chosen))
        except (SourceChanged, SourceForeign, UploadStopped) as error:
            if not isinstance(error, UploadStopped) or (self.lease.may_upload and key in self._queue.void):
                await self._queue.abandon(key, error)
                if served is not None:
                    self._answer(error)
            return True
        except (RootReplaced, LeaseLost, LeaseUnsettled):
            raise  # not of the store
        except PodwatchError:
            self._sending_failed = True
            raise
        if self.lease.holds:
            self._failures = 0
            if served is not None:
                self._answer(None)
        return True

    async def _send(self, save: OutgoingSave) -> None:
        """Send what is missing, and publish it once this pod holds the run. Raises as ``Uploads.send``."""
        for left in reversed(range(_TRIES)):
            if not self.lease.may_upload:  # the run was lost while the save was prepared
                raise UploadStopped(f"step {save.step} is not sent: this pod does not hold the run")
            intent, save = await self._queue.intend(save, self.lease.generation)
            self._queue.begin_gap(save.key)
            hashes = await self._uploads.send(save, urgent=self._is_urgent(save.step))
            if not self.lease.holds:
                self._ahead = save.key
                return
            try:
                await self._publish(save, intent, hashes)
                return
            except PiecesMissing as error:
                if not left:
                    raise
                await self._queue.send_again(save, error.names)
                await self._take_inventory()

    def _is_urgent(self, step: int) -> bool:
        """Whether the upload of this step gives way to nothing: a newer save waits, nothing is stored yet, an operator
        waits for it, or training has ended."""
        inventory = self._stored.inventory
        first = inventory is None or not inventory.stored
        return first or self._queue.newer_is_complete(step) or bool(self._requests) or self._queue.is_over()

    async def _publish(self, save: OutgoingSave, intent: SaveIntent, hashes: Mapping[str, str]) -> None:
        began = self._clock.monotonic()
        if not await self._queue.is_unchanged(save):
            raise SourceChanged("a file of it changed or disappeared", where=f"step {save.step}")
        if why := self._queue.why_mixed(save):
            self._queue.void[save.key] = why
            raise UploadStopped(f"it is held back: {why}", where=f"step {save.step}")
        newest = save.step > self._stored.newest_stored() and not self._queue.waits_for_end(save)
        stored = await self._stored.publish(save, intent, hashes, newest=newest)
        self._ahead, self._queue.abandoned_in_a_row = None, 0
        self._done_well()
        await self._run.note_stored()
        await self._queue.release(save)
        if newest:
            self._stored.say_published(stored)
            took = max(self._clock.monotonic() - began, self._clock.wall() - save.began_wall)
            self._queue.published(save, took)
        else:
            text = f"step {save.step} is in the store; a newer checkpoint stays the one to resume from"
            self.connection.say(EventName.STORED, text, step=save.step, bytes=stored.total_bytes)
        if not await self._stored.prune(self._live()):
            await self._list_again()

    def _live(self) -> set[SaveKey]:
        """Saves in the store that are being sent or fetched, or that this pod has and needs."""
        sending = {save.stored_key for save in self._queue.saves}
        fetched = {restore.fetching for restore in self.restores if restore.fetching is not None}
        inventory = self._stored.inventory
        used = self._run.in_use()
        return sending | fetched | {s.key for s in (inventory.saves if inventory is not None else ()) if s.step in used}

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
