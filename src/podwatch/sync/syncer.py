"""Keeps the newest complete checkpoint in the store: picks, uploads in a child, publishes, reports (docs/sync.md).

Store trouble never leaves this object as an exception: it is a state (``degraded``), reported once, and retried.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.errors import ConfigurationError, HostError, IntegrityError, PodwatchError, RemoteError
from podwatch.domain.event import Event, EventName
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import Severity
from podwatch.domain.lease import Decision, Heartbeat, HolderState, LeaseAction
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.journal.upload_records import UploadedObject
from podwatch.policy.implausible_steps import NO_TRAINING
from podwatch.policy.uploads import PINNED, GivenUp, Waiting, next_upload, sort_begun
from podwatch.stores.base import TOTAL
from podwatch.stores.base import Upload as StoreUpload
from podwatch.sync.interfaces import Emit, GuardedRun, SetSource, Unstored
from podwatch.sync.lease.protocol import LeaseTerms
from podwatch.sync.publish_and_pointer import ObjectsMissing, Publisher, Superseded
from podwatch.sync.store_session import BACKOFF_MAX, BACKOFF_MIN, StoreSession, internal
from podwatch.sync.upload import child_job as jobs
from podwatch.sync.upload.optional_parts import OptionalParts
from podwatch.sync.upload.outcomes import CheckpointTally
from podwatch.sync.upload.start_child import SetForeign, SetVoid, UploadStopped
from podwatch.sync.upload.uploader import Sender
from podwatch.system.clock import Clock
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import RootReplaced

CHANGED = "the checkpoint changed on disk while it was uploaded"
NOT_OURS = (LeaseAction.SUPERSEDED, LeaseAction.REFUSE, LeaseAction.ASIDE)
ENDED_BACKOFF = 60.0
"""Longest pause between two tries once the run has ended: the machine is billed only for what is not stored yet."""
BEGUN = "sync.begun"
"""Journal key: [epoch second, step, save_id] of the newest upload's start, for ``upload_gap`` after a restart."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One checkpoint to upload: its files, and by path those that are already in the store."""

    contents: SetContents
    files: tuple[jobs.JobFile, ...]
    done: dict[str, UploadedObject]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """The upload in flight, in bytes; ``step`` is None where there is none."""

    step: int | None = None
    sent: int = 0
    total: int = 0


class _SpareTime:
    """The time for optional parts (sync/upload/optional_parts.py), until something more urgent waits."""

    def __init__(self, syncer: "Syncer") -> None:
        self._syncer = syncer

    def over(self) -> bool:
        return self._syncer.more_urgent()

    def progress(self, count: int, total: int) -> None:
        self._syncer.note_progress(count, total)


class Syncer:
    """Loop-side object. ``emit`` is called on the loop; ``terms`` are those of the lease (None: any pod's)."""

    def __init__(
        self,
        settings: Settings,
        run: GuardedRun,
        catalogue: SetSource,
        journal: AsyncJournal,
        clock: Clock,
        emit: Emit,
        *,
        terms: LeaseTerms | None = None,
        workspace: Workspace | None = None,
        backoff: tuple[float, float] = (BACKOFF_MIN, BACKOFF_MAX),
        save_gap: Callable[[], float | None] = lambda: None,
    ) -> None:
        """``save_gap``: seconds from one save to the next."""
        self._save_gap = save_gap
        self._settings, self._run, self._catalogue = settings, run, catalogue
        self._journal, self._clock, self._emit, self._backoff = journal, clock, emit, backoff
        self._wake, self._hurry = asyncio.Event(), asyncio.Event()
        self.session = StoreSession(settings, run, journal, clock, self._tell, self, terms=terms, backoff=backoff)
        self._requests: list[tuple[int | None, asyncio.Future[None]]] = []
        self._serving: tuple[int | None, asyncio.Future[None]] | None = None
        """The request that this turn serves; later requests wait for the next turn."""
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._sender = Sender(settings, run, catalogue, journal, clock, self.session.worker, workspace=workspace)
        self._tally = CheckpointTally(journal, self._tell)
        self._ended = False
        """The run has ended here, as far as is known: pinned checkpoints are uploaded, too."""
        self._optional: OptionalParts | None = None
        if self.session.keys is not None and self.session.lease is not None:
            self._optional = OptionalParts(
                settings,
                run,
                self.session.keys,
                catalogue,
                journal,
                clock,
                worker=self.session.worker,
                sender=self._sender,
                lease=self.session.lease,
                tell=self._tell,
            )
        self._in_flight = _InFlight()
        self._abandoned_in_a_row = 0
        self._void: dict[tuple[int, str], str] = {}
        """Checkpoints that are not sent again, and why."""
        self._begun_at: float | None = None
        self._begun_set: tuple[int, str] | None = None
        self._ahead = False
        """Data is being sent while our own lease claim settles."""
        self._unfinished = True
        """An upload may be unfinished, from before this podwatch or by it."""

    # -- for other parts -------------------------------------------------------------------------------------------

    def status(self) -> StoreFacts:
        """From any thread."""
        flight, lease, running = self._in_flight, self.session.lease, self._sender.running
        known = replace(
            self.session.known,
            uploading_step=flight.step,
            uploaded_bytes=flight.sent,
            total_bytes=flight.total,
            abandoned_in_a_row=self._abandoned_in_a_row,
            calls=TOTAL.snapshot(),
        )
        if lease is None:
            return known
        standing = lease.decision
        return replace(
            known,
            upload_rate=None if running is None else running.rate,
            tally=self._tally.now,
            standing=standing,
            superseded=standing.act in NOT_OURS,
            clock_skew=lease.clock_skew,
            locked_out=lease.locked_out,
        )

    @property
    def standing(self) -> Decision:
        """Which pod may train, as far as the lease shows; without a store every pod may."""
        return self.session.standing

    async def confirm(self) -> int:
        """The generation with which this pod holds the run, confirmed by the store now. Raises PodwatchError."""
        await self.session.ready()
        store, lease = self.session.store, self.session.lease
        if store is None or lease is None:
            raise RemoteError("the store was closed", where=self.session.url, fix="nothing: podwatch retries")
        generation, _ = await self.session.worker.call(lease.confirm, store)
        return generation

    def ask(self) -> None:
        """Start reading the lease from the store; ``start`` does it too."""
        self.session.ask()

    async def until_speaking(self, speaks: bool) -> None:
        """Returns once this pod writes the run's heartbeat, or once it no longer does."""
        await self.session.until_speaking(speaks)

    async def beat(self, heartbeat: Heartbeat, state: HolderState = HolderState.RUNNING) -> None:
        """Write heartbeat.json, if this pod holds the lease. Store trouble shows in the state, never as an
        exception."""
        await self.session.beat(heartbeat, state)

    async def sweep_store(self) -> None:
        """Remove unneeded objects from the store, if that was not done within a day."""
        await self.session.sweep(self._catalogue)

    def _pinned(self) -> Mapping[int, str]:
        """The steps whose checkpoints are pinned, by the operator or a file of the trainer, with the reason."""
        return {**self._run.named(), **self._run.pins()}

    def notify(self) -> None:
        """Call after a rescan, which may have found a new complete checkpoint. Cheap."""
        self._wake.set()
        if self._task is not None:
            self._note_sets()

    def sweep(self) -> None:
        """The regular check, in case a notification was lost."""
        self.notify()

    async def start(self) -> None:
        await self.session.load()
        await self._tally.load()
        if not self._run.withheld():
            await self._sender.take_over(self.session.known.stored)
        if begun := await self._journal.run(Journal.learned, BEGUN):
            self._begun_at = self._clock.monotonic() - max(0.0, self._clock.wall() - float(begun[0]))
            self._begun_set = (int(begun[1]), str(begun[2]))
        self.ask()
        if self.session.url:
            self._reading = asyncio.create_task(self._list_store(), name="store content")
        self._task = asyncio.create_task(self._work(), name="sync")

    async def stop(self) -> None:
        """Prompt: an upload in flight is ended, and the next podwatch continues it from the journal."""
        tasks = [t for t in (self._task, self._reading) if t is not None]
        self._task = self._reading = None
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._sender.close()
        await self.session.end_repair()
        self._answer(RemoteError("podwatch is stopping", where=self.session.url, fix="the next podwatch continues"))
        await self.session.close()

    async def sync_now(self, step: int | None = None) -> None:
        """Upload and publish the newest complete checkpoint, or that of ``step``, now. Returns when it is in the store.

        Raises PodwatchError when there is nothing to send, no store, or the attempt fails.
        """
        if not self.session.url:
            raise ConfigurationError(
                "NOT BACKED UP: no store is configured", where="[sync] store", fix='set it, e.g. "b2://bucket"'
            )
        if why := self._run.withheld():
            raise HostError(f"podwatch uploads nothing now: {why}")
        self._pick(step)  # raises if there is nothing to send
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests.append((step, future))
        self._hurry.set()
        if self.session.lease is not None:
            self.session.lease.hurry()
        self._wake.set()
        await future

    def retry(self, step: int, save_id: str) -> None:
        """The operator's request to send a checkpoint that was abandoned or held back."""
        self._void.pop((step, save_id), None)

    def run_ended(self) -> None:
        """Call while the run has ended here: the newest checkpoint, then pinned ones that are not in the store, then
        optional parts are uploaded, until a trainer runs again. ``upload_gap`` does not hold meanwhile. Cheap."""
        if not self._ended:
            self._ended = True
            self._hurry.set()
        self.notify()

    def _over(self) -> bool:
        """Whether the run has ended here, and no trainer runs again."""
        self._ended = self._ended and not self._run.trainer_alive()
        return self._ended

    def why_not_ours(self) -> str:
        """Why this pod stores nothing more, however long one waits: another pod holds the run. Empty otherwise. What
        the store refuses is waited for: an operator can change a key or a cap."""
        if self.standing.act not in NOT_OURS:
            return ""
        return self.standing.why_not or "another pod holds this run"

    async def unstored(self) -> Unstored:
        """What is not in the store: the newest checkpoint, pinned ones, and the newest one's optional parts."""
        newest, found = newest_complete(self._catalogue.sets), Unstored()
        waits = [newest] if newest is not None and self._lacks(newest) else []
        for one in (*waits, *self._pinned_unstored()):
            why = self._void.get((one.step, one.save_id), "") or (f"held back: {one.held}" if one.held else "")
            name = f"the checkpoint of step {one.step}" if one is newest else f"{PINNED}{one.step}"
            if why:
                found = replace(found, refused=(*found.refused, f"{name} ({why})"))
            else:
                found = replace(found, pending=(*found.pending, name))
        if waits or self._optional is None:
            return found
        parts = await self._optional.unstored(self._catalogue.sets)
        return Unstored((*found.pending, *parts.pending), (*found.refused, *parts.refused))

    def _pinned_unstored(self) -> list[CheckpointSet]:
        """Complete pinned checkpoints, except the newest, that are not in the store, newest first."""
        sets, pins = self._catalogue.sets, self._pinned()
        newest = newest_complete(sets)
        found = (s for s in sets if s.step in pins and s.complete and s is not newest)
        return sorted((s for s in found if self._lacks(s)), key=lambda s: -s.step)

    def _lacks(self, found: CheckpointSet) -> bool:
        """Whether it is not in the store."""
        return (found.step, found.save_id) not in self.session.known.stored

    async def abandon(self, step: int) -> None:
        """Stop uploading ``step``: the disk is about to fill up, and this checkpoint must be removed."""
        if self._sender.running is not None and self._sender.running.job.step == step:
            self._void[step, self._sender.running.job.save_id] = CHANGED
            self._sender.running.kill()
            await self.session.idle.wait()
        await self._sender.drop(step)

    async def repoint(self, step: int | None) -> None:
        """After a step back: make the stored checkpoint of ``step`` the newest at once, so that the bad one is not
        fetched again; None at a deliberate fresh start. Does nothing without a store or if ``step`` was never
        stored."""
        if not self.session.url:
            return
        saved = None
        if why := self._run.withheld():
            raise HostError(f"podwatch publishes nothing now: {why}")
        if step is not None:
            found = [p for p in await self._journal.run(Journal.published) if p.step == step]
            if not found:
                return
            saved = found[-1]
        try:
            publisher = await self.session.ready()
            await self.session.worker.call(self._follow, publisher, step, saved)
        except PodwatchError as error:
            self.session.trouble(error)
            raise
        self.session.note_stored(await self._journal.run(Journal.published))

    def _follow(self, publisher: Publisher, step: int | None, saved: PublishedSave | None) -> None:
        """Blocks. Does nothing if a later checkpoint of this lineage was published meanwhile."""
        identity = self._run.identity()
        base = -1 if step is None else step
        own = (p for p in self._journal.sync.published() if p.lineage == identity.lineage and p.step > base)
        if not (identity.has_parent and identity.parent_step == step and any(own)):
            publisher.repoint(saved)

    def standing_changed(self) -> None:
        """The lease's decision or its error may have changed."""
        self._wake.set()
        self._hurry.set()
        running = self._sender.running
        if self._ahead and running is not None and self.standing.act not in (LeaseAction.SETTLE, LeaseAction.HOLD):
            running.kill()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        if not self.session.url:
            return
        while True:
            self._wake.clear()
            self._hurry.clear()
            try:
                more = await self._turn()
            except Exception as error:
                known = error if isinstance(error, PodwatchError) else internal(error)
                self.session.trouble(known)
                self._answer(known)
                self.session.failures += 1
                await self._pause()
                continue
            if not more and not self._requests:
                self.session.nothing_to_send()
                await self._wake.wait()

    def _gap_left(self) -> float:
        """Seconds until the next upload may start; 0 where nothing would start anyway, or one continues."""
        newest = newest_complete(self._catalogue.sets)
        if self._begun_at is None or newest is None or self._over():
            return 0.0
        if (newest.step, newest.save_id) == self._begun_set or (
            newest.step,
            newest.save_id,
        ) in self.session.known.stored:
            return 0.0
        return self._begun_at + self._settings.sync.upload_gap - self._clock.monotonic()

    def _begin_gap(self, chosen: CheckpointSet) -> None:
        if self._begun_set != (chosen.step, chosen.save_id):
            self._begun_at, self._begun_set = self._clock.monotonic(), (chosen.step, chosen.save_id)
            self._journal.post(Journal.learn, BEGUN, [self._clock.wall(), *self._begun_set])

    async def _pause(self) -> None:
        low, high = self._backoff
        high = min(high, ENDED_BACKOFF) if self._over() else high
        seconds = random.uniform(low / 2, min(high, low * 2.0 ** min(self.session.failures, 20)))
        self.session.tries_again_in(seconds)
        await self._rest(seconds)

    async def _rest(self, seconds: float) -> None:
        """Sleep, or until a request arrives."""
        await self._clock.wait(self._hurry, seconds)

    async def _turn(self) -> bool:
        """Do one thing, if there is one; whether something was done, so that the caller looks again."""
        lease = self.session.lease
        assert lease is not None
        self._serving = self._requests[0] if self._requests else None
        standing = lease.decision
        if standing.act in NOT_OURS:
            why = f"another pod holds this run's lease: {standing.why_not}"
            self._answer(Superseded(why, where=self.session.url, fix="to take it over, run podwatch run --take-over"))
            return False
        if not standing.publish:
            if lease.error is not None:
                raise lease.error
            self.session.lease_answered()
            if standing.act is not LeaseAction.SETTLE or not await self._send_ahead():
                await self._wake.wait()  # a new decision, an error, or a rescan that may have found a checkpoint
            return True
        if why := self._run.withheld():  # each rescan checks again
            self._answer(HostError(f"podwatch uploads nothing now: {why}"))
            return False
        if self.session.era != self._journal.sync.era:  # the database was away meanwhile
            await self.session.load()
            self._unfinished = True
        publisher = await self.session.ready()
        await self._sender.drop_stored(self.session.known.stored)
        step = self._serving[0] if self._serving is not None else None
        try:
            await self._sender.check()
            begun = await self._begun() if step is None else None
            if self._serving is None and begun is None and (wait := self._gap_left()) > 0:
                await self._rest(wait)
                return True
            chosen = begun or self._pick(step)
        except PodwatchError as error:
            self._answer(error)
            return False
        if begun is None and (chosen.step, chosen.save_id) in self.session.known.stored:
            self._answer(None)
            if not self.session.tidied:  # an earlier podwatch was killed between publishing and retention
                await self.session.prune((await self._journal.run(Journal.published))[-1])
            return await self._send_pinned(publisher) or await self._carry_optional()
        if begun is None and (chosen.step, chosen.save_id) in self._void:
            self._answer(SetVoid(self._void[chosen.step, chosen.save_id], where=f"step {chosen.step}"))
            return False
        try:
            failed = await self._attempt(publisher, chosen, hold=begun is not None)
        except RootReplaced as error:  # the journal keeps what was sent: it continues once the directories are back
            self._answer(error)
            return False
        if begun is None:  # else a request for the newest still waits
            self._answer(failed)
        return True

    async def _send_pinned(self, publisher: Publisher) -> bool:
        """Once the run has ended, store a pinned checkpoint; true if anything was tried. Not during training: the next
        checkpoint would wait for it."""
        waiting = [s for s in self._pinned_unstored() if not s.held and self._sendable(s)] if self._over() else []
        if not waiting:
            return False
        try:
            await self._attempt(publisher, waiting[0], hold=False, pinned=True)
        except RootReplaced:
            return False
        except (HostError, IntegrityError) as error:
            if isinstance(error, ObjectsMissing):
                raise
            await self._abandoned(waiting[0], error)
        return True

    async def _attempt(
        self, publisher: Publisher, chosen: CheckpointSet, *, hold: bool, pinned: bool = False
    ) -> PodwatchError | None:
        """Send and publish it; the reason where it cannot be sent any more. Raises as ``_send`` for all else."""
        try:
            with self._sending():
                await self._send(publisher, chosen, hold=hold, pinned=pinned)
        except (SetVoid, UploadStopped) as error:
            await self._abandoned(chosen, error)
            return error
        self.session.failures = 0
        return None

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Around an upload: notes whether the store has failed it."""
        try:
            yield
        except (SetVoid, UploadStopped, RootReplaced):
            raise  # not of the store
        except PodwatchError:
            self.session.sending_failed = True
            raise

    async def _send_ahead(self) -> bool:
        """While our own lease claim settles, data may be sent already: only the publication waits for the decision.
        True if something was sent. Raises as ``_send``."""
        newest = newest_complete(self._catalogue.sets)
        if newest is None or not self._sendable(newest) or self._run.withheld() or self._gap_left() > 0:
            return False
        if self.session.listed is None or (newest.step, newest.save_id) in self.session.listed:
            return False  # a lost journal does not know that it is in the store already
        if any(key != (newest.step, newest.save_id) for key in await self._journal.run(Journal.unfinished)):
            return False  # interrupted uploads are judged once the lease is ours
        self._ahead = True
        try:
            await self._sender.check()
            with self._sending():
                return await self._upload(await self._plan(newest), hold=False)
        except RootReplaced:
            return False
        except SetVoid as error:
            await self._abandoned(newest, error)
            return True
        except UploadStopped:
            return False  # the lease was lost meanwhile, or the disk needs the space
        finally:
            self._ahead = False

    async def _begun(self) -> CheckpointSet | None:
        """The checkpoint whose interrupted upload is finished now (policy/uploads.py). All other interrupted
        uploads are given up and cancelled in the store, once it is certain that they will not be finished."""
        sets = {s.step: s for s in self._catalogue.sets}
        if held := self._sender.held:
            sets[held.step] = held
        if not self._unfinished or not sets:  # no scan yet
            return None
        published = await self._journal.run(Journal.published)
        lineage = self._run.identity().lineage
        last = max((p.step for p in published if p.lineage == lineage and p.step < NO_TRAINING), default=-1)
        begun = await self._journal.run(Journal.unfinished)
        self._unfinished = bool(begun)
        finish, given_up = sort_begun(begun, sets, void=self._void, published=last, pinned=self._pinned().keys())
        candidates = [await self._waiting(found) for found in finish]
        newest = newest_complete(self._catalogue.sets)
        fresh = newest if newest is not None and self._sendable(newest) and self._gap_left() <= 0 else None
        best = next_upload(None if fresh is None else await self._waiting(fresh), candidates)
        if best is not None:
            shorter = f"step {best.step} has less left to send"
            given_up += tuple(GivenUp(w.step, w.save_id, shorter) for w in candidates if w != best)
        for gone in given_up:
            await self._cancel(gone.step, gone.save_id)
            message = f"step {gone.step}: interrupted upload not continued: {gone.why}"
            self._tell(EventName.UPLOAD_ABANDONED, message, step=gone.step)
        return sets[best.step] if best is not None and best in candidates else None

    def _sendable(self, found: CheckpointSet) -> bool:
        return self._lacks(found) and (found.step, found.save_id) not in self._void

    async def _waiting(self, found: CheckpointSet) -> Waiting:
        """With its bytes that are not in the store. An unreadable checkpoint counts as nothing left: sending it reports
        the reason."""
        assert self.session.keys is not None
        try:
            files = jobs.all_files(await self._sender.contents(found), self.session.keys)
        except PodwatchError:
            return Waiting(found.step, found.save_id, 0)
        done = await self._journal.run(Journal.objects, found.step, found.save_id)
        begun = await self._journal.run(Journal.begun, found.step, found.save_id)
        left = jobs.left_bytes(files, done, begun, self._settings.sync.part_size)
        return Waiting(found.step, found.save_id, left)

    def _pick(self, step: int | None) -> CheckpointSet:
        """The newest complete checkpoint, or the requested one. Raises HostError."""
        sets = self._catalogue.sets
        chosen = newest_complete(sets) if step is None else next((s for s in sets if s.step == step), None)
        if chosen is None:
            what = "no complete checkpoint yet" if step is None else f"no checkpoint of step {step} on this pod"
            raise HostError(what, where=str(self._settings.trainer.output_dir))
        if not chosen.complete or not chosen.save_id:
            raise HostError(f"checkpoint of step {chosen.step} is not complete: {chosen.reason or chosen.completeness}")
        return chosen

    async def _plan(self, chosen: CheckpointSet) -> _Plan:
        """Its files to send. Raises SetVoid, IntegrityError."""
        contents = await self._sender.contents(chosen)
        assert self.session.keys is not None
        files = jobs.all_files(contents, self.session.keys)
        return _Plan(contents, files, await self._journal.run(Journal.objects, chosen.step, chosen.save_id))

    async def _upload(self, plan: _Plan, *, hold: bool) -> bool:
        """Send what is missing; false if nothing is. Adds to ``plan.done`` what arrived."""
        chosen, done = plan.contents.set, plan.done
        todo = jobs.missing(plan.files, done)
        if not todo:
            return False
        total = sum(f.size for f in plan.files)
        before = total - sum(f.size for f in todo)

        def progress(count: int) -> None:
            self._in_flight = replace(self._in_flight, sent=min(before + count, total))

        self._in_flight = _InFlight(chosen.step, before, total)
        self.session.idle.clear()
        self._unfinished = True
        try:
            self._begin_gap(chosen)
            message = f"step {chosen.step}: upload started"
            self._tell(EventName.UPLOAD_STARTED, message, step=chosen.step, bytes=total)
            await self._sender.upload(plan.contents, todo, done, progress, hold=hold, urgent=self._urgent(chosen.step))
        finally:
            self._in_flight = _InFlight()
            self.session.idle.set()
        return True

    async def _send(self, publisher: Publisher, chosen: CheckpointSet, *, hold: bool, pinned: bool = False) -> None:
        """``pinned``: it is stored without becoming the newest."""
        began = self._clock.monotonic()
        plan = await self._plan(chosen)
        await self._upload(plan, hold=hold)
        total = sum(f.size for f in plan.files)
        self._in_flight = _InFlight(chosen.step, total, total)
        self.session.idle.clear()
        try:
            saved = await self._sender.publish(publisher, plan.contents, plan.files, plan.done, move_pointer=not pinned)
        finally:
            self._in_flight = _InFlight()
            self.session.idle.set()
        self.session.note_stored(await self._journal.run(Journal.published))
        self._abandoned_in_a_row = 0
        self.session.well()
        if pinned:  # ``published`` is for what the pointer names
            message = f"step {saved.step}, which is pinned, is in the store"
            self._tell(EventName.FINAL_SYNC, message, step=saved.step, bytes=saved.total_bytes)
            return
        self._tell(
            EventName.PUBLISHED,
            f"step {saved.step} is in the store",
            step=saved.step,
            bytes=saved.total_bytes,
            generation=saved.generation,
            seq=saved.seq,
        )
        self._tally.stored(
            (saved.step, saved.save_id),
            seconds=self._clock.monotonic() - began,
            save_seconds=self._save_gap(),
        )
        await self.session.prune(saved)

    async def _carry_optional(self) -> bool:
        """Send optional parts once everything else is in the store; true if anything was tried."""
        assert self._optional is not None
        ready = await self._optional.next(self._catalogue.sets)
        if ready is None:
            return False
        await self.session.ready()  # a failed repair may have closed it
        assert self.session.store is not None
        self._in_flight = replace(self._in_flight, step=ready.occasion.step)
        self.session.idle.clear()
        try:
            with self._sending():
                await self._optional.send(self.session.store, ready, _SpareTime(self))
        finally:
            self._in_flight = _InFlight()
            self.session.idle.set()
        self.session.well()
        return True

    def note_progress(self, count: int, total: int) -> None:
        """Of the upload in flight."""
        self._in_flight = replace(self._in_flight, sent=min(count, total), total=total)

    def more_urgent(self) -> bool:
        """Does anything wait that is more urgent than optional parts?"""
        newest = newest_complete(self._catalogue.sets)
        new = newest is not None and self._sendable(newest)
        return bool(self._requests) or (new and self._gap_left() <= 0)

    async def _list_store(self) -> None:
        await self.session.list_store()
        self._wake.set()  # it is now known what may be sent before the lease is won

    # -- reporting --------------------------------------------------------------------------------------------------

    def _tell(
        self, name: EventName, message: str, severity: Severity = Severity.INFO, **fields: str | int | float | bool
    ) -> None:
        self._emit(Event(name, self._clock.wall(), message, severity, fields))

    def _urgent(self, step: int) -> bool:
        """Whether the upload of this step gives way to nothing: a newer save waits, nothing is stored yet, a preemption
        or an operator waits for it, or training has ended."""
        known = self.session.known
        first = known.last_step is None and not known.stored
        asked = (
            bool(self._requests) or self._serving is not None
        )  # one that came after the checkpoint was chosen waits too
        return first or self._tally.newer_waits(step) or asked or self._over()

    def _note_sets(self) -> None:
        """After a rescan: record which checkpoints are pending."""
        lineage, known = self._run.identity().lineage, self.session.known
        last = known.newest_of.get(lineage, -1)
        self._tally.see(self._catalogue.sets, known.stored, lineage, last)

    async def _abandoned(self, chosen: CheckpointSet, error: PodwatchError) -> None:
        not_ours = isinstance(error, SetForeign)
        self._void[chosen.step, chosen.save_id] = error.what if not_ours else CHANGED
        await self._cancel(chosen.step, chosen.save_id)
        in_a_row = self._abandoned_in_a_row + (isinstance(error, SetVoid) and not not_ours)
        self._abandoned_in_a_row = in_a_row
        newer = any(s.complete and s.step > chosen.step for s in self._catalogue.sets)
        if not_ours:
            severity, hint = Severity.CRITICAL, ". Find out which user made it, remove it, and save again"
        elif in_a_row >= 2:
            severity = Severity.CRITICAL
            hint = ". The trainer removes checkpoints faster than they can be uploaded: let it keep more of them"
        else:
            severity, hint = (Severity.INFO if newer or isinstance(error, UploadStopped) else Severity.WARNING), ""
        message = f"step {chosen.step}: upload abandoned: {error.what}{hint}"
        self._tell(EventName.UPLOAD_ABANDONED, message, severity, step=chosen.step, in_a_row=in_a_row)

    async def _cancel(self, step: int, save_id: str) -> None:
        """Of an upload that will not be finished, keep nothing: no links here, and no parts in the store, which
        cost."""
        self._tally.abandoned((step, save_id))
        await self._sender.drop(step, save_id)
        begun = await self._journal.run(Journal.begun, step, save_id)
        for upload in begun.values():  # a sweep finds what cannot be cancelled now
            if self.session.store is not None:
                with contextlib.suppress(PodwatchError):
                    await self.session.worker.call(
                        self.session.store.cancel_large, StoreUpload(upload.key, upload.upload)
                    )
        await self._journal.run(Journal.forget_save, step, save_id)

    def _answer(self, error: Exception | None) -> None:
        """Answer the callers of ``sync_now``: the one being served, or all when the store fails."""
        one = error is None or isinstance(error, (HostError, SetVoid))
        served = [r for r in self._requests if r is self._serving] if one else list(self._requests)
        for request in served:
            self._requests.remove(request)
            if not request[1].done():
                if error is None:
                    request[1].set_result(None)
                else:
                    request[1].set_exception(error)
