"""The run's store, opened for the daemon: lease, heartbeat, recovery of publications, cleanup, and how the store is.
``Syncer`` owns one and adds uploads.
"""

import asyncio
import contextlib
from dataclasses import asdict, dataclass, replace

from podwatch.config.settings import Settings, SyncSettings
from podwatch.domain.errors import (
    HostError,
    InternalError,
    PodwatchError,
    RemoteError,
    is_refusal,
)
from podwatch.domain.event import EventName
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import Severity
from podwatch.domain.lease import Decision, Heartbeat, HolderState, LeaseAction, Pod
from podwatch.domain.stored_checkpoint import KnownSaves, PublishedSave
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.policy.store_retention import handed_over, in_order, taken_over
from podwatch.policy.who_holds_the_run import Timing
from podwatch.stores.base import ObjectStore
from podwatch.stores.open_store import open_store
from podwatch.sync.interfaces import GuardedRun, SetSource, Tell, features_of, keep_features
from podwatch.sync.inventory import Stock, stock
from podwatch.sync.lease.holder import Follower, LeaseHolder
from podwatch.sync.lease.protocol import LeaseTerms, NotHolding
from podwatch.sync.publish_and_pointer import Publisher, Superseded
from podwatch.sync.store_removal import RemoteRetention, Sweeper, told
from podwatch.sync.upload.child_job import keys_for
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock

BACKOFF_MIN, BACKOFF_MAX = 5.0, 600.0
"""Seconds between tries while the store fails: quick after a blip, gentle in a long outage (full jitter)."""

SWEEP_EVERY = 86400.0
"""Seconds: a sweep lists the whole run, and listings are paid per call; what it removes is at least a day old."""
EARLIER = "sync.earlier_saves"
"""Journal key: the saves of earlier pods that retention judges too."""
SWEPT = "sync.swept"
"""Journal key: epoch second of the last sweep."""


@dataclass(frozen=True, slots=True)
class _Earlier:
    """``saves`` of earlier pods, right in order since the pointer had the (generation, seq) ``at``, until another pod
    moves it. This pod's own records are right from generation ``since`` on."""

    saves: tuple[PublishedSave, ...] = ()
    at: tuple[int, int] | None = None
    since: int = 0


class StoreSession:
    """Loop-side object. ``follower`` acts on the lease; ``lease`` and ``keys`` are None without a configured store."""

    def __init__(
        self,
        settings: Settings,
        run: GuardedRun,
        journal: AsyncJournal,
        clock: Clock,
        tell: Tell,
        follower: Follower,
        *,
        terms: LeaseTerms | None = None,
        backoff: tuple[float, float] = (BACKOFF_MIN, BACKOFF_MAX),
    ) -> None:
        self._settings, self._run, self._journal, self._clock = settings, run, journal, clock
        self._tell, self._backoff = tell, backoff
        self.url = settings.sync.store
        self.keys = keys_for(self.url, settings.run_id) if self.url else None
        self.known = StoreFacts(store_url=self.url)
        """What the store has and how it is; the uploads are ``Syncer``'s to add."""
        self.worker = Worker("sync")
        self.idle = asyncio.Event()
        """Set while no upload uses the open store."""
        self.idle.set()
        self.store: ObjectStore | None = None
        """Open since ``ready``; closed after trouble."""
        self.listed: frozenset[tuple[int, str]] | None = None
        """(step, save_id) of the checkpoints in the store at the last listing, less those removed since."""
        self._earlier = _Earlier()
        self._published: tuple[PublishedSave, ...] = ()
        self.failures = 0
        """Tries in a row that failed."""
        self.sending_failed = False
        """The last upload failed. A full store opens and takes heartbeats: only an upload shows that it works."""
        self.tidied = False
        """Old checkpoints were removed since podwatch started."""
        self.lease: LeaseHolder | None = None
        if self.keys is not None:
            self.lease = LeaseHolder(
                terms or LeaseTerms(Pod(run.identity().writer_id), timing_of(settings.sync)),
                self.keys,
                clock,
                run,
                open_store=self._open,
                follower=follower,
                tell=tell,
                retry=backoff,
            )
        self.era = journal.sync.era
        """The journal's, when it was read last."""
        self._publisher: Publisher | None = None
        self._opening = asyncio.Lock()
        self._told_trouble = ""
        """``what`` of the store's last reported error."""
        self._repairing: asyncio.Task[None] | None = None
        self._beat_error = ""
        """The error of the last heartbeat."""

    @property
    def standing(self) -> Decision:
        """Which pod may train, as far as the lease shows; without a store every pod may."""
        return Decision(LeaseAction.HOLD, publish=True) if self.lease is None else self.lease.decision

    async def until_speaking(self, speaks: bool) -> None:
        """Returns once this pod writes the run's heartbeat, or once it no longer does."""
        assert self.lease is not None
        while self.lease.speaks is not speaks:
            await self.lease.change()

    def ask(self) -> None:
        """Start reading the lease from the store; ``start`` does it too."""
        if self.lease is not None:
            self.lease.start()

    async def beat(self, heartbeat: Heartbeat, state: HolderState = HolderState.RUNNING) -> None:
        """Write heartbeat.json, if this pod holds the lease, and repair the pointer if another pod has set it back.
        Store trouble shows in the state, never as an exception."""
        if self.lease is None:
            return
        try:
            pointer = await self.lease.beat(state, heartbeat)
        except (Superseded, NotHolding):
            return  # reported where it was found
        except PodwatchError as error:
            self._beat_error = str(error)
            self.unwell(error)
            return
        if self.lease.speaks and self._beat_error:
            if self.known.error == self._beat_error and not self.sending_failed:  # not an error of publishing
                self.well()
            self._beat_error = ""
        pending = self._repairing is not None and not self._repairing.done()
        if pointer is not None and self.standing.publish and not pending and not self._run.withheld():
            # Not awaited: it queues behind verifications and sweeps, and the next heartbeat must not.
            self._repairing = asyncio.create_task(self._repair(pointer), name="pointer repair")

    async def end_repair(self) -> None:
        if self._repairing is not None:
            self._repairing.cancel()
            await asyncio.gather(self._repairing, return_exceptions=True)

    async def close(self) -> None:
        if self.lease is not None:
            await self.lease.stop()
        self.worker.close()

    async def _repair(self, pointer: bytes) -> None:
        try:
            publisher = await self.ready()
            repaired = await self.worker.call(publisher.repair, pointer)
        except (Superseded, NotHolding):
            return  # reported where it was found
        except Exception as error:
            known = error if isinstance(error, PodwatchError) else internal(error)
            if self.idle.is_set():
                self.trouble(known)
            else:
                self.unwell(known)  # an upload is using the open store
            return
        if repaired is not None:
            text = (
                "latest.json in the store named an older checkpoint, written late by another pod; podwatch corrected it"
                f" to step {repaired.step}"
            )
            self._tell(EventName.POINTER_REPAIRED, text, Severity.WARNING, seq=repaired.seq)

    def _open(self) -> ObjectStore:
        run, known = self._run, features_of(self._journal.sync, self.url)
        return open_store(
            self.url, run.credentials(), writer_id=run.identity().writer_id, connections=1, features=known
        )

    async def ready(self) -> Publisher:
        """An open store with all interrupted publications settled. Raises RemoteError or ConfigurationError."""
        async with self._opening:
            if self._publisher is None:
                assert self.keys is not None
                assert self.lease is not None
                store = await self.worker.call(self._open)
                publisher = Publisher(store, self.keys, self._journal.sync, self._run, self._clock, self.lease)
                try:
                    for line in await self.worker.call(publisher.recover):
                        self._tell(EventName.STATE_REBUILT, f"store: {line}")
                    await self.worker.call(keep_features, self._journal.sync, self.url, store)
                except BaseException:
                    store.close()
                    raise
                self.store, self._publisher = store, publisher
                self.note_stored(await self._journal.run(Journal.published))
                if not self.sending_failed:
                    self.well()
            return self._publisher

    async def list_store(self) -> None:
        """List the store once: on a new pod, or after a lost state directory, the journal is incomplete. For display
        only: no decision rests on it."""
        keys, failures = self.keys, 0
        assert keys is not None

        def read() -> Stock:
            store = self._open()
            try:
                found, ahead = stock(store, keys), store.clock_skew or 0.0
            finally:
                store.close()
            return found if found.stored_wall is None else replace(found, stored_wall=found.stored_wall + ahead)

        while self.listed is None:
            try:
                found = await self.worker.call(read)
            except PodwatchError:
                failures += 1  # the loop reports it
                await self._clock.sleep(min(self._backoff[1], self._backoff[0] * 2.0 ** min(failures, 20)))
                continue
            self.listed = found.saves
            self.known = replace(self.known, saves=len(found.saves | self.known.stored))
            if not self.known.stored:
                self.known = replace(self.known, last_step=found.step, last_published_wall=found.stored_wall)

    async def sweep(self, catalogue: SetSource) -> None:
        """Remove unneeded objects from the store, if that was not done within a day. Not during an upload: the next
        call is soon enough. Nothing in mode observe."""
        if not self.url or not self.idle.is_set() or not self.standing.publish or not self._may_delete():
            return
        last = float(await self._journal.run(Journal.learned, SWEPT, 0.0))
        if 0 <= self._clock.wall() - last < SWEEP_EVERY:
            return
        live = [(s.step, s.save_id) for s in catalogue.sets if s.complete]
        try:
            await self.ready()
            assert self.store is not None
            assert self.keys is not None
            assert self.lease is not None
            sweeper = Sweeper(self.store, self.keys, self._journal.sync, self._clock)
            await self.worker.call(self.lease.confirm, self.store)
            swept = await self.worker.call(sweeper.carry_out, live)
        except RemoteError as error:
            self.trouble(error)
        except PodwatchError as error:
            self.known = replace(self.known, warnings=(f"podwatch could not clean up the store: {error}",))
        else:
            self._journal.post(Journal.learn, SWEPT, self._clock.wall())
            if swept.gone:
                self._tell(EventName.REMOTE_PRUNED, told(swept), bytes=swept.size_bytes)

    def _may_delete(self) -> bool:
        """Whether podwatch may delete in the store without a command; never in mode observe."""
        return not self._run.observes() and not self._run.withheld()

    async def prune(self, saved: PublishedSave) -> None:
        """Remove old checkpoints from the store, after the publication of ``saved``."""
        if not self._may_delete():
            return
        if self.lease is not None and self.lease.foreign_pins:
            return  # the next heartbeat takes them over, and the next publication prunes
        try:
            await self.ready()  # a failed repair may have closed it since the publication
        except PodwatchError as error:
            self.known = replace(self.known, warnings=(f"old checkpoints were not removed from the store: {error}",))
            return
        assert self.store is not None
        assert self.keys is not None
        assert self.lease is not None
        journal, sync, run = self._journal.sync, self._settings.sync, self._run
        retention = RemoteRetention(
            self.store, self.keys, journal, sync, self._clock, run.identity(), self.lease, run.pins()
        )
        generation, earlier = max(saved.generation, self.lease.generation), self.earlier
        try:
            pruned = await self.worker.call(lambda: retention.carry_out(own_generation=generation, earlier=earlier))
        except PodwatchError as error:
            self.known = replace(self.known, warnings=(f"old checkpoints were not removed from the store: {error}",))
            return
        self.tidied = True
        self.known = replace(self.known, warnings=(pruned.warning,) if pruned.warning else ())
        for step, save_id, reason in pruned.removed:
            message = f"removed step {step} from the store: {reason}"
            self._tell(EventName.REMOTE_PRUNED, message, step=step, save_id=save_id)
        if pruned.removed:
            if self.listed is not None:
                self.listed -= {(step, save_id) for step, save_id, _ in pruned.removed}
            gone = {(step, save_id) for step, save_id, _ in pruned.removed}
            left = tuple(s for s in self._earlier.saves if (s.step, s.save_id) not in gone)
            if left != self._earlier.saves:
                self._keep_earlier(replace(self._earlier, saves=left))
            self.note_stored(await self._journal.run(Journal.published))

    # -- saves of earlier pods ----------------------------------------------------------------------------------------
    # A pod with an empty state directory knows only the save that the pointer names and what it fetched. The heartbeat
    # hands it the others, with their order, so that retention judges them as one pod would.

    async def load(self) -> None:
        """Read what the journal knows of the store. Call first, and again whenever its ``era`` is another one."""
        self.era = self._journal.sync.era
        self._close_store()  # interrupted publications are settled when it is opened again
        published = await self._journal.run(Journal.published)
        self.note_stored(published)
        kept = await self._journal.run(Journal.learned, EARLIER)
        if kept is None:
            return
        with contextlib.suppress(TypeError, KeyError, ValueError):
            at = None if kept["at"] is None else (int(kept["at"][0]), int(kept["at"][1]))
            saves = tuple(PublishedSave(**item) for item in kept["saves"])
            self._earlier = _Earlier(saves, at, int(kept["since"]))

    @property
    def earlier(self) -> tuple[PublishedSave, ...]:
        """Saves of earlier pods that retention judges too, in order; without the facts of their manifests. None until
        this pod holds the run."""
        return self._earlier.saves if self._pointer_known() else ()

    def _pointer_known(self) -> bool:
        """Whether the pointer was, when this pod won the lease, where this pod had left or found it before."""
        pointer = None if self.lease is None else self.lease.pointer
        mine = self._run.identity().writer_id
        return pointer is not None and (pointer.writer_id == mine or pointer.order == self._earlier.at)

    def take_over_saves(self) -> None:
        """Let retention judge the saves of the pod before, once this pod holds the run and has taken over the pins.
        Again only after another pod has held the run."""
        lease = self.lease
        if lease is None or not lease.holding or lease.foreign_pins:
            return
        if (pointer := lease.pointer) is None or self._pointer_known():
            return
        ahead = lease.clock_skew or 0.0
        found = taken_over(lease.foreign_saves, pointer, self._run.identity().writer_id)
        saves = in_order(replace(s, wall=s.wall + ahead) for s in found)
        self._keep_earlier(_Earlier(tuple(saves), pointer.order, 0 if saves else lease.generation))

    def _keep_earlier(self, earlier: "_Earlier") -> None:
        self._earlier = earlier
        self._journal.post(
            Journal.learn,
            EARLIER,
            {"saves": [asdict(s) for s in earlier.saves], "at": earlier.at, "since": earlier.since},
        )

    @property
    def newest_seq(self) -> int:
        return max((save.seq for save in self._published), default=0)

    def known_saves(self) -> KnownSaves | None:
        """What the heartbeat lists for the next pod; None before the pins of the pod before were taken over, and while
        no save is known. While this pod's claim is not settled: what the pod before has listed."""
        lease = self.lease
        if lease is None or lease.foreign_pins:
            return None
        if not lease.holding:
            return lease.foreign_saves
        behind = lease.clock_skew or 0.0
        since, at = self._earlier.since, self._earlier.at
        known = handed_over(self._published, self.earlier, lease.generation, since=since, at=at)
        return known and replace(known, saves=tuple(replace(s, wall=s.wall - behind) for s in known.saves))

    def note_stored(self, published: list[PublishedSave]) -> None:
        """Call when the journal's list of what is published has changed."""
        self._published = tuple(published)
        stored = frozenset((p.step, p.save_id) for p in published)
        newest_of: dict[str, int] = {}
        for saved in published:
            newest_of[saved.lineage] = max(saved.step, newest_of.get(saved.lineage, -1))
        self.known = replace(self.known, stored=stored, newest_of=newest_of)
        if self.listed is not None:
            self.known = replace(self.known, saves=len(self.listed | stored))
        if published:
            self.known = replace(
                self.known,
                # Of equal places the first: a pinned checkpoint that is stored later has that of the pointer.
                last_step=max(published, key=lambda p: (p.generation, p.seq)).step,
                last_published_wall=max(p.wall for p in published),
            )

    def well(self) -> None:
        """Call when the store has done what it was asked."""
        if self.known.ok is False:
            self._tell(EventName.STORE_RECOVERED, "the store works again")
        self.known = replace(self.known, ok=True, error="", refused=False, next_attempt_wall=None)
        self.failures, self.sending_failed = 0, False

    def lease_answered(self) -> None:
        """Call when the lease was read after trouble, while this pod's claim is not decided yet: that takes minutes."""
        if self.known.ok is False and not self.sending_failed:
            self.well()

    def nothing_to_send(self) -> None:
        """Call when no checkpoint waits: an open store is all that is asked then."""
        if self.sending_failed and self._publisher is not None:
            self.well()

    def tries_again_in(self, seconds: float) -> None:
        """Call before the pause after a failed try."""
        if self.known.ok is False:
            self.known = replace(self.known, next_attempt_wall=self._clock.wall() + seconds)

    def trouble(self, error: PodwatchError) -> None:
        """Reported when it begins and when its kind changes, not at every try. The store is opened again, with
        credentials read again."""
        self._close_store()
        if not isinstance(error, (Superseded, NotHolding)):  # not a store problem; reported where it was found
            self.unwell(error)

    def _close_store(self) -> None:
        store, self.store, self._publisher = self.store, None, None
        if store is not None:
            store.close()

    def unwell(self, error: PodwatchError) -> None:
        """Reported as ``trouble`` is; the open store stays."""
        news = self.known.ok is not False or error.what != self._told_trouble
        self._told_trouble = error.what
        refused = is_refusal(error)
        self.known = replace(self.known, ok=False, error=str(error), refused=refused)
        if news:
            self._tell(EventName.SYNC_FAILED, str(error), Severity.CRITICAL if refused else Severity.WARNING)


def timing_of(sync: SyncSettings) -> Timing:
    return Timing(sync.holder_patience, sync.claim_wait, refusal=sync.refusal_wait, heartbeat=sync.heartbeat)


def internal(error: Exception) -> PodwatchError:
    if isinstance(error, OSError):
        return HostError(f"the upload could not be started: {error.strerror or error}", where=str(error.filename or ""))
    return InternalError(f"sync failed inside podwatch: {type(error).__name__}: {error}", fix="please report this")
