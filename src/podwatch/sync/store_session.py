"""The daemon's work in the store besides sending: lease, heartbeat, recovery of publications, cleanup, reports."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from podwatch.config.settings import Settings, SyncSettings
from podwatch.domain.errors import (
    HostError,
    InternalError,
    PodwatchError,
    RemoteError,
    is_refusal,
)
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.lease import HolderState, Pod
from podwatch.domain.policy import RemotePolicy
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.journal.records import PublishedSave
from podwatch.policy.lease import Decision, LeaseAction, Timing
from podwatch.policy.store_retention import earlier_newest
from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import Credentials
from podwatch.stores.open import open_store
from podwatch.sync.inventory import Stock, stock
from podwatch.sync.lease.holder import LeaseHolder
from podwatch.sync.lease.protocol import NotHolding
from podwatch.sync.publish import Publisher, Superseded
from podwatch.sync.retention import RemoteRetention, Sweeper, told
from podwatch.sync.types import RunIdentity, SetSource, SyncState
from podwatch.sync.upload import job as jobs
from podwatch.sync.upload.optional_parts import OptionalParts
from podwatch.sync.upload.priority import Outlook
from podwatch.sync.upload.tally import CheckpointTally
from podwatch.sync.upload.uploader import Sender
from podwatch.system.clock import Clock
from podwatch.system.workers import Worker
from podwatch.system.workspace import Workspace

BACKOFF_MIN, BACKOFF_MAX = 5.0, 600.0
"""Seconds between tries while the store fails: quick after a blip, gentle in a long outage (full jitter)."""

SWEEP_EVERY = 86400.0
"""Seconds: a sweep lists the whole run, and listings are paid per call; what it removes is at least a day old."""
NOT_OURS = (LeaseAction.SUPERSEDED, LeaseAction.REFUSE, LeaseAction.ASIDE)
BEGUN = "sync.begun"
"""Journal key: [epoch second, step, save_id] of the newest upload's start, for ``upload_gap`` after a restart."""
SWEPT = "sync.swept"
"""Journal key: epoch second of the last sweep."""


class StoreSide:
    """The open store and its state. ``Syncer`` adds uploads."""

    def __init__(
        self,
        *,
        settings: Settings,
        identity: Callable[[], RunIdentity],
        catalogue: SetSource,
        journal: AsyncJournal,
        clock: Clock,
        credentials: Callable[[], Credentials | None],
        emit: Callable[[Event], None],
        backoff: tuple[float, float] = (BACKOFF_MIN, BACKOFF_MAX),
        me: Pod | None = None,
        timing: Timing | None = None,
        take_over: bool = False,
        training: Callable[[], bool] = lambda: False,
        trained: Callable[[], bool] = lambda: False,
        refused: Callable[[str], None] = lambda why: None,
        locked_out: Callable[[PodwatchError], None] = lambda error: None,
        finished: Callable[[], bool] = lambda: False,
        workspace: Workspace | None = None,
        withheld: Callable[[], str] = lambda: "",
    ) -> None:
        """``withheld``: why nothing may be uploaded, published or deleted in the store now; empty where it may."""
        self._withheld = withheld
        self._settings, self._identity, self._catalogue = settings, identity, catalogue
        self._journal, self._clock, self._credentials, self._emit = journal, clock, credentials, emit
        self._backoff = backoff
        self._url = settings.sync.store
        self._keys = jobs.keys_for(self._url, settings.run_id) if self._url else None
        self._state = SyncState(store_url=self._url)
        self._worker = Worker("sync")
        self._wake, self._hurry = asyncio.Event(), asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._opening = asyncio.Lock()
        self._requests: list[tuple[int | None, asyncio.Future[None]]] = []
        self._serving: tuple[int | None, asyncio.Future[None]] | None = None
        """The request that this turn serves; later requests wait for the next turn."""
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._listed: frozenset[tuple[int, str]] | None = None
        """(step, save_id) of the checkpoints in the store at the last listing, less those removed since."""
        self._sender = Sender(
            settings=settings,
            identity=identity,
            catalogue=catalogue,
            journal=journal,
            clock=clock,
            credentials=credentials,
            worker=self._worker,
            workspace=workspace,
            tell=self._tell,
        )
        self._tally = CheckpointTally(journal, self._tell)
        self._sender.priority.outlook = self._outlook
        self.prospects: Callable[[], Outlook] = Outlook
        """What the daemon knows of the next save, the steps and the disk."""
        self._holding: LeaseHolder | None = None
        if self._keys is not None:
            self._holding = LeaseHolder(
                me=me or Pod(identity().writer_id),
                keys=self._keys,
                memory=journal.sync,
                clock=clock,
                open_store=self._open,
                exclusive=self._url.startswith("file://"),
                emit=emit,
                timing=timing or _timing(settings.sync),
                take_over=take_over,
                training=training,
                trained=trained,
                changed=self._standing_changed,
                refused=refused,
                locked_out=locked_out,
                retry=backoff,
            )
        self._optional: OptionalParts | None = None
        if self._keys is not None:
            self._optional = OptionalParts(
                settings=settings,
                identity=identity,
                keys=self._keys,
                catalogue=catalogue,
                journal=journal,
                clock=clock,
                worker=self._worker,
                sender=self._sender,
                confirm=self._confirm,
                finished=finished,
                say=lambda text, step: self._tell(EventName.OPTIONAL_PARTS, text, step=step),
            )
        self._store: ObjectStore | None = None
        self._publisher: Publisher | None = None
        self._failures = 0
        self._told_trouble = ""
        """``what`` of the store's last reported error."""
        self._void: dict[tuple[int, str], str] = {}
        """Checkpoints that are not sent again, and why."""
        self._begun_at: float | None = None
        self._begun_set: tuple[int, str] | None = None
        self._ahead = False
        """Data is being sent while our own lease claim settles."""
        self._unfinished = True
        """An upload may be unfinished, from before this podwatch or by it."""
        self._tidied = False
        self._repairing: asyncio.Task[None] | None = None
        self._beat_error = ""
        """The error of the last heartbeat."""

    @property
    def state(self) -> SyncState:
        if self._holding is None:
            return self._state
        standing = self._holding.decision
        return replace(
            self._state,
            pace=self._sender.priority.pace,
            tally=self._tally.now,
            standing=standing,
            superseded=standing.act in NOT_OURS,
            clock_skew=self._holding.clock_skew,
        )

    def _outlook(self) -> Outlook:
        """What makes the upload in flight urgent."""
        step = self._state.uploading_step
        newer = step is not None and self._tally.newer_waits(step)
        nothing = self._state.last_step is None and not self._state.stored
        return replace(self.prospects(), newer_waits=newer, nothing_stored=nothing)

    @property
    def standing(self) -> Decision:
        """Which pod may train, as far as the lease shows; without a store every pod may."""
        return Decision(LeaseAction.HOLD, publish=True) if self._holding is None else self._holding.decision

    async def until_speaking(self, speaks: bool) -> None:
        """Returns once this pod writes the run's heartbeat, or once it no longer does."""
        assert self._holding is not None
        while self._holding.speaks is not speaks:
            await self._holding.change()

    def ask(self) -> None:
        """Start reading the lease from the store; ``start`` does it too."""
        if self._holding is not None:
            self._holding.start()

    async def beat(self, fields: Mapping[str, object], state: HolderState = HolderState.RUNNING) -> None:
        """Write heartbeat.json, if this pod holds the lease, and repair the pointer if another pod has set it back.
        Store trouble shows in the state, never as an exception."""
        if self._holding is None:
            return
        try:
            pointer = await self._holding.beat(state, fields)
        except (Superseded, NotHolding):
            return  # reported where it was found
        except PodwatchError as error:
            self._beat_error = str(error)
            self._unwell(error)
            return
        if self._holding.speaks and self._beat_error:
            if self._state.error == self._beat_error:  # not an error of publishing
                self._well()
            self._beat_error = ""
        pending = self._repairing is not None and not self._repairing.done()
        if pointer is not None and self.standing.publish and not pending and not self._withheld():
            # Not awaited: it queues behind verifications and sweeps, and the next heartbeat must not.
            self._repairing = asyncio.create_task(self._repair(pointer), name="pointer repair")

    async def _repair(self, pointer: bytes) -> None:
        try:
            publisher = await self._ready()
            repaired = await self._worker.call(publisher.repair, pointer)
        except (Superseded, NotHolding):
            return  # reported where it was found
        except Exception as error:
            known = error if isinstance(error, PodwatchError) else internal(error)
            if self._idle.is_set():
                self._trouble(known)
            else:
                self._unwell(known)  # an upload is using the open store
            return
        if repaired is not None:
            text = (
                "latest.json in the store named an older checkpoint, written late by another pod; podwatch corrected it"
                f" to step {repaired.step}"
            )
            self._tell(EventName.POINTER_REPAIRED, text, Severity.WARNING, seq=repaired.seq)

    def _standing_changed(self) -> None:
        self._wake.set()
        self._hurry.set()

    def _confirm(self, store: ObjectStore) -> tuple[int, float]:
        assert self._holding is not None
        return self._holding.confirm(store)

    def _open(self) -> ObjectStore:
        return open_store(self._url, self._credentials(), writer_id=self._identity().writer_id, connections=1)

    async def _ready(self) -> Publisher:
        """An open store with all interrupted publications settled. Raises RemoteError or ConfigurationError."""
        async with self._opening:
            if self._publisher is None:
                assert self._keys is not None
                store = await self._worker.call(self._open)
                publisher = Publisher(
                    store,
                    self._keys,
                    self._journal.sync,
                    self._identity,
                    self._clock.wall,
                    confirm=self._confirm,
                    boottime=self._clock.boottime,
                )
                try:
                    for line in await self._worker.call(publisher.recover):
                        self._tell(EventName.STATE_REBUILT, f"store: {line}")
                except BaseException:
                    store.close()
                    raise
                self._store, self._publisher = store, publisher
                self._note_stored(await self._journal.run(Journal.published))
                self._well()
            return self._publisher

    async def _read_stock(self) -> None:
        """List the store once: on a new pod, or after a lost state directory, the journal is incomplete. For display
        only: no decision rests on it."""
        keys, failures = self._keys, 0
        assert keys is not None

        def read() -> Stock:
            store = self._open()
            try:
                found, ahead = stock(store, keys), store.clock_skew or 0.0
            finally:
                store.close()
            return found if found.stored_wall is None else replace(found, stored_wall=found.stored_wall + ahead)

        while self._listed is None:
            try:
                found = await self._worker.call(read)
            except PodwatchError:
                failures += 1  # the loop reports it
                await self._clock.sleep(min(self._backoff[1], self._backoff[0] * 2.0 ** min(failures, 20)))
                continue
            self._listed = found.saves
            self._state = replace(self._state, saves=len(found.saves | self._state.stored))
            if not self._state.stored:
                self._state = replace(self._state, last_step=found.step, last_published_wall=found.stored_wall)
            self._wake.set()  # it is now known what may be sent before the lease is won

    async def sweep_store(self) -> None:
        """Remove unneeded objects from the store, if that was not done within a day. Not during an upload: the next
        call is soon enough."""
        if not self._url or not self._idle.is_set() or not self.standing.publish or self._withheld():
            return
        last = float(await self._journal.run(Journal.learned, SWEPT, 0.0))
        if 0 <= self._clock.wall() - last < SWEEP_EVERY:
            return
        live = [(s.step, s.save_id) for s in self._catalogue.sets if s.complete]
        try:
            await self._ready()
            assert self._store is not None
            assert self._keys is not None
            store, confirm = self._store, self._confirm
            sweeper = Sweeper(store, self._keys, self._journal.sync, self._clock.wall)
            await self._worker.call(lambda: confirm(store))
            swept = await self._worker.call(sweeper.carry_out, live)
        except RemoteError as error:
            self._trouble(error)
        except PodwatchError as error:
            self._state = replace(self._state, warnings=(f"podwatch could not clean up the store: {error}",))
        else:
            self._journal.post(Journal.learn, SWEPT, self._clock.wall())
            if swept.gone:
                self._tell(EventName.REMOTE_PRUNED, told(swept), bytes=swept.size_bytes)

    async def _prune_remote(self, saved: PublishedSave) -> None:
        if self._settings.mode == "observe" or self._withheld():
            return  # in this mode deletions are only reported, in the store too
        try:
            await self._ready()  # a failed repair may have closed it since the publication
        except PodwatchError as error:
            self._state = replace(self._state, warnings=(f"old checkpoints were not removed from the store: {error}",))
            return
        assert self._store is not None
        assert self._keys is not None
        sync = self._settings.sync
        identity = self._identity()
        policy = RemotePolicy(keep_last=sync.keep_last, keep_every=sync.keep_every, max_lag_seconds=sync.max_lag)
        retention = RemoteRetention(
            self._store,
            self._keys,
            self._journal.sync,
            policy,
            self._clock.wall,
            writer_id=identity.writer_id,
            confirm=self._confirm,
            kept=lambda saves: (
                earlier_newest(saves, identity.lineage, identity.parent_step) if identity.has_parent else frozenset()
            ),
        )
        try:
            pruned = await self._worker.call(lambda: retention.carry_out(own_generation=saved.generation))
        except PodwatchError as error:
            self._state = replace(self._state, warnings=(f"old checkpoints were not removed from the store: {error}",))
            return
        self._tidied = True
        self._state = replace(self._state, warnings=(pruned.warning,) if pruned.warning else ())
        for step, save_id, reason in pruned.removed:
            message = f"removed step {step} from the store: {reason}"
            self._tell(EventName.REMOTE_PRUNED, message, step=step, save_id=save_id)
        if pruned.removed:
            if self._listed is not None:
                self._listed -= {(step, save_id) for step, save_id, _ in pruned.removed}
            self._note_stored(await self._journal.run(Journal.published))

    def _note_stored(self, published: list[PublishedSave]) -> None:
        stored = frozenset((p.step, p.save_id) for p in published)
        newest_of: dict[str, int] = {}
        for saved in published:
            newest_of[saved.lineage] = max(saved.step, newest_of.get(saved.lineage, -1))
        self._state = replace(self._state, stored=stored, newest_of=newest_of)
        if self._listed is not None:
            self._state = replace(self._state, saves=len(self._listed | stored))
        if published:
            self._state = replace(
                self._state,
                last_step=published[-1].step,
                last_published_wall=max(p.wall for p in published),
            )

    def _note_sets(self) -> None:
        """After a rescan: record which checkpoints are pending."""
        lineage = self._identity().lineage
        last = self._state.newest_of.get(lineage, -1)
        self._tally.see(self._catalogue.sets, self._state.stored, lineage, last)

    def _well(self) -> None:
        if self._state.ok is False:
            self._tell(EventName.STORE_RECOVERED, "the store works again")
        self._state = replace(self._state, ok=True, error="", refused=False, next_attempt_wall=None)
        self._failures = 0

    def _trouble(self, error: PodwatchError) -> None:
        """Reported when it begins and when its kind changes, not at every try. The store is opened again, with
        credentials read again."""
        store, self._store, self._publisher = self._store, None, None
        if store is not None:
            store.close()
        if not isinstance(error, (Superseded, NotHolding)):  # not a store problem; reported where it was found
            self._unwell(error)

    def _unwell(self, error: PodwatchError) -> None:
        news = self._state.ok is not False or error.what != self._told_trouble
        self._told_trouble = error.what
        refused = is_refusal(error)
        self._state = replace(self._state, ok=False, error=str(error), refused=refused)
        if news:
            self._tell(EventName.SYNC_FAILED, str(error), Severity.CRITICAL if refused else Severity.WARNING)

    def _tell(
        self, name: EventName, message: str, severity: Severity = Severity.INFO, **fields: str | int | float | bool
    ) -> None:
        self._emit(Event(name, self._clock.wall(), message, severity, fields))


def _timing(sync: SyncSettings) -> Timing:
    return Timing(sync.holder_patience, sync.claim_wait, refusal=sync.refusal_wait)


def internal(error: Exception) -> PodwatchError:
    if isinstance(error, OSError):
        return HostError(f"the upload could not be started: {error.strerror or error}", where=str(error.filename or ""))
    return InternalError(f"sync failed inside podwatch: {type(error).__name__}: {error}", fix="please report this")
