"""Keeps the newest complete set in the store: picks, uploads in a child, publishes, tells (DESIGN section 5).

Trouble with the store never leaves this room as an exception: it is a state (``degraded``), told once, tried again.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.errors import ConfigurationError, HostError, InternalError, PodwatchError, RemoteError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.policy import RemotePolicy
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.journal.records import PublishedSave
from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import Credentials
from podwatch.stores.open import open_store
from podwatch.sync import job as jobs
from podwatch.sync.doors import RunIdentity, SetSource, SyncState
from podwatch.sync.engine import SetVoid, UploadStopped
from podwatch.sync.heartbeat import Heartbeat
from podwatch.sync.publish import Publisher, Superseded
from podwatch.sync.remote_retention import RemoteRetention
from podwatch.sync.sender import Sender
from podwatch.system.clock import Clock
from podwatch.system.threads import Worker

BACKOFF_MIN, BACKOFF_MAX = 5.0, 600.0
"""Seconds between tries while the store fails: quick after a blip, gentle in a long outage (full jitter)."""


class Syncer:
    """Loop-side object. ``emit`` is called on the loop."""

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
    ) -> None:
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
        self._task: asyncio.Task[None] | None = None
        self._sender = Sender(
            settings=settings,
            identity=identity,
            catalogue=catalogue,
            journal=journal,
            clock=clock,
            credentials=credentials,
            worker=self._worker,
        )
        self._store: ObjectStore | None = None
        self._publisher: Publisher | None = None
        self._heartbeat: Heartbeat | None = None
        self._failures = 0
        self._void: set[tuple[int, str]] = set()
        self._superseded_at = 0

    # -- what others see --------------------------------------------------------------------------------------------

    @property
    def state(self) -> SyncState:
        return self._state

    @property
    def protect(self) -> frozenset[int]:
        """Steps being uploaded right now: not to be removed without ``abandon``."""
        step = self._state.uploading_step
        return frozenset() if step is None else frozenset({step})

    def notify(self) -> None:
        """A rescan happened; a new complete set may be there. Cheap."""
        self._wake.set()

    def sweep(self) -> None:
        """The regular look, in case a notification was lost."""
        self._wake.set()

    async def start(self) -> None:
        published = await self._journal.run(Journal.published)
        self._note_stored(published)
        self._task = asyncio.create_task(self._run(), name="sync")

    async def stop(self) -> None:
        """Prompt: an upload in flight is ended and goes on from the journal next time."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._answer(RemoteError("podwatch is ending", where=self._url, fix="the next podwatch goes on"))
        self._worker.close()

    async def sync_now(self, step: int | None = None) -> None:
        """Upload and publish the newest complete set, or that of ``step``, now. Returns when it is in the store.

        Raises PodwatchError when there is nothing to send, no store, or the attempt fails.
        """
        if not self._url:
            raise ConfigurationError(
                "no store is configured: NOT BACKED UP", where="[sync] store", fix='set it, e.g. "b2://bucket"'
            )
        self._pick(step)  # raises if there is nothing to send
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests.append((step, future))
        self._hurry.set()
        self._wake.set()
        await future

    async def abandon(self, step: int) -> None:
        """Stop uploading ``step`` (the disk is about to kill the run, and this set must go)."""
        if self._sender.running is not None and self._sender.running.job.step == step:
            self._void.add((step, self._sender.running.job.save_id))
            self._sender.running.kill()
            await self._idle.wait()

    async def repoint(self, step: int | None) -> None:
        """At a step back: make the stored save of ``step`` the newest at once, so that the bad one is not fetched
        again; None at a deliberate fresh start. Does nothing without a store or when ``step`` was never stored."""
        if not self._url:
            return
        saved = None
        if step is not None:
            found = [p for p in await self._journal.run(Journal.published) if p.step == step]
            if not found:
                return
            saved = found[-1]
        try:
            publisher = await self._ready()
            await self._worker.call(publisher.repoint, saved)
        except PodwatchError as error:
            self._trouble(error)
            raise
        self._note_stored(await self._journal.run(Journal.published))

    async def beat(self, fields: Mapping[str, object]) -> None:
        """Write heartbeat.json. Store trouble shows in the state, never as an exception."""
        if not self._url:
            return
        try:
            await self._ready()
            assert self._heartbeat is not None
            await self._worker.call(self._heartbeat.write, self._identity(), self._clock.wall(), dict(fields))
        except PodwatchError as error:
            self._trouble(error)

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        if not self._url:
            return
        while True:
            self._wake.clear()
            self._hurry.clear()
            try:
                more = await self._turn()
            except Exception as error:
                self._trouble(error if isinstance(error, PodwatchError) else _internal(error))
                self._answer(error if isinstance(error, PodwatchError) else _internal(error))
                self._failures += 1
                await self._pause()
                continue
            if not more and not self._requests:
                await self._wake.wait()

    async def _pause(self) -> None:
        low, high = self._backoff
        seconds = random.uniform(low / 2, min(high, low * 2.0 ** min(self._failures, 20)))
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        hurried = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({sleeping, hurried}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sleeping, hurried):
                task.cancel()
            await asyncio.gather(sleeping, hurried, return_exceptions=True)

    async def _turn(self) -> bool:
        """One look at what there is to do; true if something was done, so that it looks again."""
        if self._state.superseded and self._identity().generation <= self._superseded_at:
            self._answer(Superseded("another pod owns this run in the store", where=self._url))
            return False
        publisher = await self._ready()
        step = self._requests[0][0] if self._requests else None
        try:
            chosen = self._pick(step)
        except PodwatchError as error:
            self._answer(error)
            return False
        if (chosen.step, chosen.save_id) in self._state.stored:
            self._answer(None)
            return False
        if (chosen.step, chosen.save_id) in self._void:
            self._answer(SetVoid("set changed on disk while it was uploaded", where=f"step {chosen.step}"))
            return False
        try:
            await self._send(publisher, chosen)
        except (SetVoid, UploadStopped) as error:
            self._abandoned(chosen, error)
            self._answer(error)
            return True
        self._failures = 0
        self._answer(None)
        return True

    def _pick(self, step: int | None) -> CheckpointSet:
        """The newest complete set, or the one asked for. Raises HostError."""
        sets = self._catalogue.sets
        chosen = newest_complete(sets) if step is None else next((s for s in sets if s.step == step), None)
        if chosen is None:
            what = "no complete checkpoint yet" if step is None else f"no checkpoint of step {step} on this pod"
            raise HostError(what, where=str(self._settings.trainer.output_dir))
        if not chosen.complete or not chosen.save_id:
            raise HostError(f"checkpoint of step {chosen.step} is not complete: {chosen.reason or chosen.completeness}")
        return chosen

    async def _ready(self) -> Publisher:
        """An open store whose half-done publications are settled. Raises RemoteError or ConfigurationError."""
        async with self._opening:
            if self._publisher is None:
                assert self._keys is not None
                writer = self._identity().writer_id
                store = await self._worker.call(
                    lambda: open_store(self._url, self._credentials(), writer_id=writer, connections=1)
                )
                publisher = Publisher(store, self._keys, self._journal.sync, self._identity, self._clock.wall)
                try:
                    for line in await self._worker.call(publisher.recover):
                        self._tell(EventName.STATE_REBUILT, f"store: {line}")
                except BaseException:
                    store.close()
                    raise
                self._store, self._publisher = store, publisher
                self._heartbeat = Heartbeat(store, self._keys)
                self._note_stored(await self._journal.run(Journal.published))
                self._well()
            return self._publisher

    async def _send(self, publisher: Publisher, chosen: CheckpointSet) -> None:
        contents = await self._sender.contents(chosen)
        assert self._keys is not None
        files = jobs.all_files(contents, self._keys)
        done = await self._journal.run(Journal.objects, chosen.step, chosen.save_id)
        todo = jobs.missing(files, done)
        total = sum(f.size for f in files)
        before = total - sum(f.size for f in todo)

        def progress(count: int) -> None:
            self._state = replace(self._state, uploaded_bytes=min(before + count, total))

        self._state = replace(self._state, uploading_step=chosen.step, uploaded_bytes=before, total_bytes=total)
        self._idle.clear()
        try:
            if todo:
                message = f"step {chosen.step}: upload started"
                self._tell(EventName.UPLOAD_STARTED, message, step=chosen.step, bytes=total)
                await self._sender.upload(contents, todo, done, progress)
            saved = await self._sender.publish(publisher, contents, files, done)
        finally:
            self._state = replace(self._state, uploading_step=None, uploaded_bytes=0, total_bytes=0)
            self._idle.set()
        self._note_stored(await self._journal.run(Journal.published))
        self._state = replace(self._state, abandoned_in_a_row=0)
        self._well()
        self._tell(
            EventName.PUBLISHED,
            f"step {saved.step} is in the store",
            step=saved.step,
            bytes=saved.total_bytes,
            generation=saved.generation,
            seq=saved.seq,
        )
        await self._prune_remote(saved)

    async def _prune_remote(self, saved: PublishedSave) -> None:
        assert self._store is not None
        assert self._keys is not None
        sync = self._settings.sync
        policy = RemotePolicy(keep_last=sync.keep_last, keep_every=sync.keep_every, max_lag_seconds=sync.max_lag)
        retention = RemoteRetention(self._store, self._keys, self._journal.sync, policy, self._clock.wall)
        try:
            pruned = await self._worker.call(lambda: retention.carry_out(own_generation=saved.generation))
        except PodwatchError as error:
            self._state = replace(self._state, warnings=(f"old saves were not removed: {error}",))
            return
        self._state = replace(self._state, warnings=(pruned.warning,) if pruned.warning else ())
        for step, save_id, reason in pruned.removed:
            self._tell(EventName.REMOTE_PRUNED, f"step {step} left the store: {reason}", step=step, save_id=save_id)
        if pruned.removed:
            self._note_stored(await self._journal.run(Journal.published))

    # -- telling ----------------------------------------------------------------------------------------------------

    def _note_stored(self, published: list[PublishedSave]) -> None:
        last = published[-1] if published else None
        self._state = replace(
            self._state,
            stored=frozenset((p.step, p.save_id) for p in published),
            last_step=last.step if last else None,
            last_published_wall=max((p.wall for p in published), default=None),
        )

    def _well(self) -> None:
        if self._state.ok is False:
            self._tell(EventName.STORE_RECOVERED, "the store works again")
        self._state = replace(self._state, ok=True, error="", superseded=False)
        self._failures = 0

    def _trouble(self, error: PodwatchError) -> None:
        """Told when it begins and when its kind changes, not at every try. The store is opened anew, with credentials
        read again."""
        news = self._state.ok is not False or error.what not in self._state.error
        if isinstance(error, Superseded):
            self._superseded_at = max(self._identity().generation, self._superseded_at)
            news = news or not self._state.superseded
            self._state = replace(self._state, superseded=True)
        self._state = replace(self._state, ok=False, error=str(error))
        store, self._store, self._publisher, self._heartbeat = self._store, None, None, None
        if store is not None:
            store.close()
        if news:
            severity = Severity.CRITICAL if isinstance(error, Superseded) else Severity.WARNING
            self._tell(EventName.SYNC_FAILED, str(error), severity)

    def _abandoned(self, chosen: CheckpointSet, error: PodwatchError) -> None:
        self._void.add((chosen.step, chosen.save_id))
        in_a_row = self._state.abandoned_in_a_row + (isinstance(error, SetVoid))
        self._state = replace(self._state, abandoned_in_a_row=in_a_row)
        self._journal.post(Journal.forget_save, chosen.step, chosen.save_id)
        newer = any(s.complete and s.step > chosen.step for s in self._catalogue.sets)
        if in_a_row >= 2:
            severity, hint = Severity.CRITICAL, ": the trainer removes checkpoints faster than they can be uploaded"
        else:
            severity, hint = (Severity.INFO if newer or isinstance(error, UploadStopped) else Severity.WARNING), ""
        message = f"step {chosen.step}: upload abandoned, {error.what}{hint}"
        self._tell(EventName.UPLOAD_ABANDONED, message, severity, step=chosen.step, in_a_row=in_a_row)

    def _answer(self, error: Exception | None) -> None:
        """Settle those who wait in ``sync_now``: the one being served, or all when the store fails."""
        served = self._requests[:1] if error is None or isinstance(error, (HostError, SetVoid)) else self._requests
        for request in list(served):
            self._requests.remove(request)
            if not request[1].done():
                if error is None:
                    request[1].set_result(None)
                else:
                    request[1].set_exception(error)

    def _tell(
        self, name: EventName, message: str, severity: Severity = Severity.INFO, **fields: str | int | float | bool
    ) -> None:
        self._emit(Event(name, self._clock.wall(), message, severity, fields))


def _internal(error: Exception) -> PodwatchError:
    if isinstance(error, OSError):
        return HostError(f"upload could not be started: {error.strerror or error}", where=str(error.filename or ""))
    return InternalError(f"sync failed inside podwatch: {type(error).__name__}: {error}", fix="please report this")
