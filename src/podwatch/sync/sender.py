"""Sending one set: what is missing, the child that sends it, and the manifest that sums it up."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from podwatch import __version__
from podwatch.checkpoints.catalogue import SetContents
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.remote import Manifest
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.journal.records import PublishedSave, UploadedObject
from podwatch.stores.credentials import Credentials
from podwatch.sync import job as jobs
from podwatch.sync.doors import RunIdentity, SetSource
from podwatch.sync.engine import SetVoid, Upload
from podwatch.sync.publish import ObjectsMissing, Publisher, rfc3339
from podwatch.system.clock import Clock
from podwatch.system.threads import Worker


class Sender:
    """``running`` is the child at work, if there is one."""

    def __init__(
        self,
        *,
        settings: Settings,
        identity: Callable[[], RunIdentity],
        catalogue: SetSource,
        journal: AsyncJournal,
        clock: Clock,
        credentials: Callable[[], Credentials | None],
        worker: Worker,
    ) -> None:
        self._settings, self._identity, self._catalogue = settings, identity, catalogue
        self._journal, self._clock, self._credentials, self._worker = journal, clock, credentials, worker
        self.running: Upload | None = None

    async def contents(self, chosen: CheckpointSet) -> SetContents:
        """What is to be sent. Raises SetVoid when the set is no longer the one that was found complete."""
        try:
            contents = await self._worker.call(self._catalogue.contents, chosen.step)
        except (OSError, PodwatchError) as error:
            raise SetVoid(f"set is gone: {error}", where=f"step {chosen.step}") from error
        if not contents.set.complete or contents.set.save_id != chosen.save_id:
            raise SetVoid("set is another one now", where=f"step {chosen.step}")
        return contents

    async def upload(
        self,
        contents: SetContents,
        todo: tuple[jobs.JobFile, ...],
        done: dict[str, UploadedObject],
        progress: Callable[[int], None],
    ) -> None:
        """Send ``todo`` in a child process and add to ``done`` what arrived. Raises as ``Upload.run`` does."""
        step, save_id = contents.set.step, contents.set.save_id
        lock = self._settings.state_dir / self._settings.run_id / "upload.lock"
        job = jobs.UploadJob(
            step=step,
            save_id=save_id,
            store=self._settings.sync.store,
            writer_id=self._identity().writer_id,
            part_size=self._settings.sync.part_size,
            connections=self._settings.sync.connections,
            lock=str(lock),
            roots=jobs.roots(contents),
            files=todo,
        )
        expected = {f.remote: f for f in todo}

        async def arrived(message: dict[str, Any]) -> None:
            file = expected[str(message["remote"])]
            source = {"device": file.device, "inode": file.inode, "size": file.size, "mtime_ns": file.mtime_ns}
            if message["before"] != source or message["after"] != source or message["size"] != file.size:
                raise SetVoid("file changed while it was read", where=file.remote)
            done[file.remote] = obj = UploadedObject(
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
            await self._journal.run(Journal.save_object, step, save_id, obj)

        await self._worker.call(lambda: lock.parent.mkdir(parents=True, exist_ok=True))
        credentials = await self._worker.call(self._credentials)
        self.running = Upload(job)
        try:
            await self.running.run(credentials, arrived, progress)
        finally:
            self.running = None

    async def publish(
        self,
        publisher: Publisher,
        contents: SetContents,
        files: tuple[jobs.JobFile, ...],
        done: dict[str, UploadedObject],
    ) -> PublishedSave:
        """Verify, write manifest and pointer. An older set of this lineage is kept without moving the pointer."""
        await self._still_there(contents.set)
        identity, chosen = self._identity(), contents.set
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
            files=jobs.manifest_files(files, done),
            symlinks=jobs.manifest_symlinks(contents),
            world_size=contents.world_size,
            config_digest=identity.config_digest,
            producer=f"podwatch {__version__}",
            train_command=identity.train_command,
            wandb=dict(identity.wandb),
        )
        published = await self._journal.run(Journal.published)
        newer = any(p.lineage == identity.lineage and p.step > chosen.step for p in published)
        try:
            return await self._worker.call(lambda: publisher.publish(manifest, move_pointer=not newer))
        except ObjectsMissing as error:
            for path in error.paths:  # void the record, so that only these are sent again
                await self._journal.run(
                    Journal.save_object, chosen.step, chosen.save_id, replace(done[path], mtime_ns=-1)
                )
            raise

    async def _still_there(self, chosen: CheckpointSet) -> None:
        """A set that changed since its first file was read is void. One that was removed whole is not: what was sent
        was the complete set."""
        try:
            now = (await self._worker.call(self._catalogue.contents, chosen.step)).set
        except HostError:
            return
        if now.save_id != chosen.save_id:
            raise SetVoid("set changed while it was uploaded", where=f"step {chosen.step}")
