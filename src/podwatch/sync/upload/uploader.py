"""Sends one checkpoint: finds the missing files, runs the child that sends them, publishes the manifest."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from podwatch import __version__
from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import HostError, PodwatchError, RemoteError
from podwatch.domain.manifest import Manifest
from podwatch.domain.safe_links import restorable
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.journal.upload_records import BegunUpload, UploadedObject
from podwatch.policy.implausible_steps import NO_TRAINING
from podwatch.stores.base import Progress
from podwatch.sync.interfaces import RunSource, SetSource, features_of, rfc3339
from podwatch.sync.publish_and_pointer import ObjectsMissing, Publisher
from podwatch.sync.upload import child_job as jobs
from podwatch.sync.upload.keep_files_until_sent import Held, Holder
from podwatch.sync.upload.start_child import NICE, SetVoid, Upload, UploadStopped
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import RootReplaced

Write = Callable[[Journal], None]
OUTRUN = "sync.outrun"
"""Journal key: true once the trainer removed a checkpoint while it was being sent."""
HELD_LOOK = 5.0
"""Seconds between checks of disk space while a checkpoint is held: the disk fills no faster than a save is written."""


class _Record:
    """Records what a child reports: in the journal, and in ``done`` what arrived."""

    def __init__(self, journal: AsyncJournal, job: jobs.UploadJob, done: dict[str, UploadedObject]) -> None:
        self._journal, self._job, self._done = journal, job, done
        self._files = {f.remote: f for f in job.files}
        self._uploads = {f.remote: f.upload for f in job.files}

    async def heard(self, messages: Sequence[dict[str, Any]]) -> None:
        """Raises SetVoid when a file is not the one that was to be sent."""
        kinds = {"begun": self._begun, "part": self._part, "object": self._arrived}
        writes: list[Write] = []
        try:
            writes.extend(kinds[m["type"]](m) for m in messages)
        finally:
            await self._journal.run(Journal.together, writes)  # also what came before a changed file

    def _begun(self, message: dict[str, Any]) -> Write:
        job, file = self._job, self._files[str(message["remote"])]
        self._uploads[file.remote] = upload = str(message["upload"])
        record = BegunUpload(
            path=file.remote,
            upload=upload,
            key=file.key,
            part_size=job.part_size,
            size=file.size,
            mtime_ns=file.mtime_ns,
            inode=file.inode,
            device=file.device,
            ctime_ns=int(message.get("ctime_ns", 0)),
        )
        return lambda journal: journal.save_begun(job.step, job.save_id, record)

    def _part(self, message: dict[str, Any]) -> Write:
        upload, number = self._uploads[str(message["remote"])], int(message["number"])
        return lambda journal: journal.save_part(upload, number, str(message["note"]))

    def _arrived(self, message: dict[str, Any]) -> Write:
        job, file = self._job, self._files[str(message["remote"])]
        source = {"device": file.device, "inode": file.inode, "size": file.size, "mtime_ns": file.mtime_ns}
        if message["source"] != source or message["size"] != file.size:
            raise SetVoid("a file changed while it was read", where=file.remote)
        self._done[file.remote] = stored = UploadedObject(
            path=file.remote,
            part=file.part,
            size=file.size,
            mtime_ns=file.mtime_ns,
            mode=file.mode,
            inode=file.inode,
            device=file.device,
            key=file.key,
            file_id=str(message["file_id"]),
            parts_sha1=tuple(str(h) for h in message["parts_sha1"]),
        )
        return lambda journal: journal.save_object(job.step, job.save_id, stored)


class Sender:
    """``running`` is the working child, if there is one."""

    def __init__(
        self,
        settings: Settings,
        run: RunSource,
        catalogue: SetSource,
        journal: AsyncJournal,
        clock: Clock,
        worker: Worker,
        *,
        workspace: Workspace | None = None,
    ) -> None:
        self._settings, self._run, self._catalogue = settings, run, catalogue
        self._journal, self._clock, self._worker = journal, clock, worker
        self.running: Upload | None = None
        trainer = settings.trainer
        beside = (trainer.checkpoint_dir,) if trainer.checkpoint_dir is not None else ()
        self._workspace = workspace or Workspace(trainer.output_dir, beside=beside)
        self._holder = Holder(self._workspace, journal.sync, settings.disk.margin)
        self._held: Held | None = None
        """Kept until its checkpoint is published or given up, also through an outage of the store."""
        self._watching: asyncio.Task[None] | None = None

    async def take_over(self, published: Collection[tuple[int, str]]) -> None:
        """At the start: keep what an earlier podwatch held and did not publish, and release all else."""
        held = await self._worker.call(self._holder.take_over, self._run.identity().lineage, published)
        if held is not None:
            self._keep(held)

    @property
    def held(self) -> CheckpointSet | None:
        """The checkpoint of which podwatch holds every file by hard links, whatever the trainer removes."""
        return (
            None
            if self._held is None or self._held.lineage != self._run.identity().lineage
            else self._held.contents.set
        )

    async def drop(self, step: int, save_id: str | None = None) -> None:
        """Release this checkpoint, if it is held and not being sent."""
        if self._held is None or self.running is not None:
            return
        held = self._held.contents.set
        if held.step == step and save_id in (None, held.save_id):
            await self._let_go()

    async def drop_stored(self, stored: Collection[tuple[int, str]]) -> None:
        """Release the held checkpoint if it is in the store: an earlier podwatch was killed between publishing it and
        releasing it."""
        if self._held is not None and (found := self._held.contents.set) and (found.step, found.save_id) in stored:
            await self.drop(found.step, found.save_id)

    async def close(self) -> None:
        """A held checkpoint stays: the next podwatch finishes or releases it."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def check(self) -> None:
        """Raises RootReplaced where podwatch must not read the run's directories: nothing is sent or published."""
        await self._worker.call(self._workspace.check)

    async def contents(self, chosen: CheckpointSet) -> SetContents:
        """The files to send. Raises SetVoid when the checkpoint is no longer the one that was found complete."""
        if self._held is not None and self._held.is_of(chosen.step, chosen.save_id):
            if not await self._worker.call(self._holder.unchanged, self._held):
                raise SetVoid("the step was saved again, so this checkpoint is gone", where=f"step {chosen.step}")
            return self._held.contents
        try:
            contents = await self._worker.call(self._catalogue.contents, chosen.step)
        except (OSError, PodwatchError) as error:
            raise SetVoid(f"the checkpoint is gone: {error}", where=f"step {chosen.step}") from error
        if not contents.set.complete or contents.set.save_id != chosen.save_id:
            raise SetVoid("the step was saved again, so this checkpoint is gone", where=f"step {chosen.step}")
        if contents.set.held:
            raise SetVoid(f"the checkpoint is held back: {contents.set.held}", where=f"step {chosen.step}")
        return contents

    async def upload(
        self,
        contents: SetContents,
        todo: tuple[jobs.JobFile, ...],
        done: dict[str, UploadedObject],
        progress: Progress,
        *,
        hold: bool = False,
        urgent: bool = False,
    ) -> None:
        """Send ``todo`` in a child process and add to ``done`` what arrived. Raises as ``Upload.run`` does.

        With ``hold``, and always once the trainer has removed a checkpoint during its upload, podwatch holds every file
        by its own hard links until ``publish`` has ended or the checkpoint is given up."""
        if self._held is not None and not self._held.is_of(contents.set.step, contents.set.save_id):
            await self._let_go()
        if self._held is None and (hold or await self._journal.run(Journal.learned, OUTRUN, False)):
            with contextlib.suppress(HostError):
                held = await self._worker.call(self._hold, contents)
                if held is not None:
                    self._keep(held)
        held, watching = self._held, self._watching
        try:
            sent = contents if held is None else held.contents
            await self.send(sent, todo, done, progress, held=held is not None, urgent=urgent)
        except BaseException as error:
            if held is None and isinstance(error, SetVoid) and await self._worker.call(_gone, contents):
                self._journal.post(Journal.learn, OUTRUN, True)
            cramped = watching is not None and watching.done()
            await self._after(error)
            if cramped and isinstance(error, UploadStopped):
                raise SetVoid("the trainer removed it and the next save needs its space", where=error.where) from error
            raise

    async def _after(self, error: BaseException) -> None:
        """Keep held files through store trouble and podwatch's own stop; every other error ends the checkpoint."""
        if not isinstance(error, (RemoteError, RootReplaced, asyncio.CancelledError)):
            await self._let_go()

    def _hold(self, contents: SetContents) -> Held | None:
        """Blocks."""
        with contextlib.suppress(OSError):
            return self._holder.hold(contents, self._run.identity().lineage)
        return None

    def _keep(self, held: Held) -> None:
        self._held = held
        self._watching = asyncio.create_task(self._watch(held), name="held checkpoint")

    async def _watch(self, held: Held) -> None:
        """Ends when the checkpoint was released because the disk needs its space; its upload is then stopped."""
        while not await self._cramped(held):
            await self._clock.sleep(HELD_LOOK)
        if self.running is not None:
            self.running.kill()  # its caller releases the checkpoint
        else:
            await self._let_go()

    async def _cramped(self, held: Held) -> bool:
        try:
            return await self._worker.call(self._holder.cramped, held)
        except (OSError, HostError):
            return False  # its directory cannot be read; sending it finds out why

    async def _let_go(self) -> None:
        held, self._held = self._held, None
        watching, self._watching = self._watching, None
        if watching is not None and watching is not asyncio.current_task():
            watching.cancel()
        if held is not None:
            await self._worker.call(self._holder.release, held)

    async def send(
        self,
        contents: SetContents,
        todo: tuple[jobs.JobFile, ...],
        done: dict[str, UploadedObject],
        progress: Progress,
        *,
        held: bool = False,
        urgent: bool = False,
    ) -> None:
        """As ``upload``, but holds nothing: for parts that may be left out. ``held``: the files are links of ours, and
        their owners were judged before the links were made. Unless
        ``urgent``, the child gives way to training (``NICE``)."""
        job = await self._job(contents, todo, held=held)
        credentials = await self._worker.call(self._run.credentials)
        self.running = Upload(job, 0 if urgent else NICE)
        try:
            await self.running.run(credentials, _Record(self._journal, job, done).heard, progress)
        finally:
            self.running = None

    async def _job(
        self,
        contents: SetContents,
        todo: tuple[jobs.JobFile, ...],
        *,
        held: bool,
    ) -> jobs.UploadJob:
        pins = await self._worker.call(self._workspace.tree.pins)
        rights = await self._worker.call(lambda: self._workspace.tree.rights)
        step, save_id = contents.set.step, contents.set.save_id
        lock = self._settings.state_dir / self._settings.run_id / "upload.lock"
        job = jobs.UploadJob(
            step=step,
            save_id=save_id,
            store=self._settings.sync.store,
            writer_id=self._run.identity().writer_id,
            part_size=self._settings.sync.part_size,
            connections=self._settings.sync.connections,
            lock=str(lock),
            roots=jobs.roots(contents),
            files=jobs.taken_up(
                todo, await self._journal.run(Journal.begun, step, save_id), self._settings.sync.part_size
            ),
            max_rate=float(self._settings.sync.max_rate or 0),
            pins=pins,
            rights=rights,
            features=await self._worker.call(features_of, self._journal.sync, self._settings.sync.store),
        )
        await self._worker.call(lambda: lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700))
        return job

    async def publish(
        self,
        publisher: Publisher,
        contents: SetContents,
        files: tuple[jobs.JobFile, ...],
        done: dict[str, UploadedObject],
        *,
        move_pointer: bool = True,
    ) -> PublishedSave:
        """Verify, write manifest and pointer. An older checkpoint of this lineage is stored without moving the pointer,
        as with ``move_pointer`` false."""
        try:
            saved = await self._publish(publisher, contents, files, done, move_pointer=move_pointer)
        except BaseException as error:
            await self._after(error)
            raise
        await self._let_go()
        return saved

    async def _publish(
        self,
        publisher: Publisher,
        contents: SetContents,
        files: tuple[jobs.JobFile, ...],
        done: dict[str, UploadedObject],
        *,
        move_pointer: bool,
    ) -> PublishedSave:
        await self._still_there(contents.set)
        await self.check()
        identity, chosen = self._run.identity(), contents.set
        sent = jobs.manifest_files(files, done)
        manifest = Manifest(
            run_id=identity.run_id,
            lineage=identity.lineage,
            step=chosen.step,
            save_id=chosen.save_id,
            layout=chosen.layout,
            created_at=rfc3339(self._clock.wall()),
            writer_id=identity.writer_id,
            part_size=self._settings.sync.part_size,
            total_bytes=sum(f.size for f in files),
            files=sent,
            symlinks=restorable(sent, jobs.manifest_symlinks(contents)),
            world_size=contents.world_size,
            config_digest=identity.config_digest,
            producer=f"podwatch {__version__}",
            train_command=identity.train_command,
            wandb=dict(identity.wandb),
        )
        published = await self._journal.run(Journal.published)
        # A stray directory that was published before it was known as one must not keep the pointer from the trained
        # checkpoints.
        odd = {(s.step, s.save_id) for s in self._catalogue.sets if not s.of_line}
        line = (p for p in published if p.lineage == identity.lineage and (p.step, p.save_id) not in odd)
        moves = move_pointer and not any(NO_TRAINING > p.step > chosen.step for p in line)
        try:
            return await self._worker.call(lambda: publisher.publish(manifest, move_pointer=moves))
        except ObjectsMissing as error:
            for path in error.paths:  # void the record, so that only these are sent again
                await self._journal.run(
                    Journal.save_object, chosen.step, chosen.save_id, replace(done[path], mtime_ns=-1)
                )
            raise

    async def _still_there(self, chosen: CheckpointSet) -> None:
        """Raises SetVoid for a checkpoint that is held back meanwhile, or that changed since its first file was read.
        One that was removed whole is still published: the complete checkpoint was sent. So is one whose every file we
        hold unchanged."""
        if held := next((s.held for s in self._catalogue.sets if s.step == chosen.step), ""):
            raise SetVoid(f"the checkpoint is held back: {held}", where=f"step {chosen.step}")
        if self._held is not None and self._held.is_of(chosen.step, chosen.save_id):
            if not await self._worker.call(self._holder.unchanged, self._held):
                raise SetVoid("the checkpoint changed while it was uploaded", where=f"step {chosen.step}")
            return
        try:
            now = (await self._worker.call(self._catalogue.contents, chosen.step)).set
        except HostError:
            return
        if now.save_id != chosen.save_id:
            raise SetVoid("the checkpoint changed while it was uploaded", where=f"step {chosen.step}")


def _gone(contents: SetContents) -> bool:
    """Is a file of the checkpoint gone, under any content? Blocks."""
    roots = {p.part.name: p.part.path for p in contents.parts}
    return any(not (roots[f.part] / f.path).exists() for f in contents.files)
