"""Sends a checkpoint's optional parts after the checkpoint is published, and lists them in ``optional.json``.

Optional parts never delay a checkpoint: a new checkpoint stops their upload, which continues later from the journal. A
part that is missing, changing or too large is left out and reported. ``optional.json`` is written when every object
that it names is verified by id.
"""

import asyncio
import json
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from podwatch import __version__
from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.checkpoints.layout import PartDir, PartFiles
from podwatch.checkpoints.scan import is_temporary, scan_part
from podwatch.client.times_and_sizes import size as in_words
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet, FileEntry
from podwatch.domain.errors import HostError, IntegrityError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.manifest import Keys, Manifest, ManifestFile
from podwatch.domain.safe_links import restorable
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.journal.upload_records import UploadedObject
from podwatch.policy.store_retention import EXTRA, Occasion, SaveKey, occasions, still_owed
from podwatch.stores.base import ObjectStore, Progress
from podwatch.stores.fenced_writes import put_before
from podwatch.sync.interfaces import GuardedRun, Lease, SetSource, Tell, Unstored, rfc3339
from podwatch.sync.publish_and_pointer import in_store, proof_of, read_optional
from podwatch.sync.upload import child_job as jobs
from podwatch.sync.upload.artifacts import looks_like_a_key
from podwatch.sync.upload.start_child import SetVoid, UploadStopped
from podwatch.sync.upload.uploader import Sender
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.files import read_file
from podwatch.system.pinned_directories import HIDDEN

# -- contents of a part ----------------------------------------------------------------------------------------------
# Lists them and judges whether they can be sent. Everything here blocks.

MOST_FILES = 10_000
"""Limit for ``extra``: an exported model has a hundred files; a tree of rollouts does not belong to a milestone."""
_INDEX = ".safetensors.index.json"
_INDEX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Looked:
    """``problem``: why the part is left out now; ``absent``: the part does not exist, which is no problem;
    ``changing``: the problem passes."""

    found: PartFiles
    problem: str = ""
    absent: bool = False
    changing: bool = False


def look(part: PartDir, *, quiet: float, now_wall: float, most_bytes: int = 0, private: Path | None = None) -> Looked:
    """``quiet``: seconds without a change. ``most_bytes`` limits the part, 0: no limit. ``private`` is never sent."""
    if part.name == EXTRA:
        part = replace(part, names=tuple(n for n in part.names if not _through_a_link(part.path, n)))
        if not part.names:
            return Looked(PartFiles(part, present=False), absent=True)
    scan = scan_part(part)
    found = scan.found
    if part.name == EXTRA:  # this part is the whole output_dir: a link inside it may lead anywhere in there
        files = tuple(f for f in found.files if _may_leave(part.path, f, private))
        found = replace(found, files=files, symlinks=())
    if not found.present or not found.files:
        return Looked(found, scan.error, absent=not scan.error)
    total = sum(f.size for f in found.files)
    changing = any(is_temporary(f.path) for f in found.files) or now_wall - scan.changed_ns / 1e9 < quiet
    if scan.error:
        problem = scan.error
    elif changing:
        problem = "it is still being written"
    elif most_bytes and total > most_bytes:
        problem = f"its {in_words(total)} exceed sync.extra_max ({in_words(most_bytes)})"
    elif part.name == EXTRA and len(found.files) > MOST_FILES:
        problem = f"it has more than {MOST_FILES} files"
    else:
        problem = _without_shards(part.path, found.files)
    return Looked(found, problem, changing=changing and not scan.error)


def _through_a_link(root: Path, name: str) -> bool:
    path = root
    for segment in name.split("/"):
        path = path / segment
        try:
            if stat.S_ISLNK(os.lstat(path).st_mode):
                return True
        except OSError:
            return False
    return False


def _may_leave(root: Path, file: FileEntry, private: Path | None) -> bool:
    segments = file.path.split("/")
    if any(s.startswith(HIDDEN) for s in segments) or any(looks_like_a_key(s) for s in segments):
        return False
    if private is None:
        return True
    try:
        return not os.path.samestat(os.lstat(root / file.path), private.stat())
    except OSError:
        return True


def _without_shards(root: Path, files: Sequence[FileEntry]) -> str:
    """An exported model names its shards in an index: each must exist."""
    there = {f.path for f in files}
    for index in sorted(p for p in there if p.endswith(_INDEX)):
        try:
            named = set(map(str, json.loads(read_file(root / index, _INDEX_BYTES))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{index} cannot be read"
        folder = index.rpartition("/")[0]
        missing = sorted(n for n in named if (f"{folder}/{n}" if folder else n) not in there)
        if missing:
            return f"{index} names {missing[0]}, which does not exist"
    return ""


# -- upload of optional parts ----------------------------------------------------------------------------------------

CARRIED = "sync.optional"
"""Journal key: {"<step>/<save_id>": {part: occasion}} of the sent parts."""
AGAIN_SECONDS = 600.0
"""Seconds until a part that is missing or could not be sent is checked again; a check costs a listing on disk."""
LOOK_SECONDS = 1.0
"""Seconds within which such an upload makes way for a new checkpoint."""


@dataclass(frozen=True, slots=True)
class Ready:
    """``contents`` contains only the parts to send now."""

    occasion: Occasion
    contents: SetContents

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(p.part.name for p in self.contents.parts)


class SpareTime(Protocol):
    """The time for optional parts."""

    def over(self) -> bool:
        """Does something more urgent wait?"""
        ...

    def progress(self, count: int, total: int) -> None:
        """Called with the bytes in the store, of ``total``."""
        ...


class OptionalParts:
    """Loop-side object of the syncer. Reports what was sent and what was left out."""

    def __init__(
        self,
        settings: Settings,
        run: GuardedRun,
        keys: Keys,
        catalogue: SetSource,
        journal: AsyncJournal,
        clock: Clock,
        *,
        worker: Worker,
        sender: Sender,
        lease: Lease,
        tell: Tell,
    ) -> None:
        self._settings, self._run, self._keys, self._catalogue = settings, run, keys, catalogue
        self._journal, self._clock, self._worker, self._sender = journal, clock, worker, sender
        self._lease, self._tell = lease, tell
        self._again: dict[Occasion, float] = {}
        self._told: set[tuple[Occasion, str, str]] = set()

    async def next(self, sets: Sequence[CheckpointSet]) -> Ready | None:
        """What to send now, as found on disk."""
        sync = self._settings.sync
        if sync.optional_parts == "none" and not sync.extra:
            return None
        now = self._clock.monotonic()
        for occasion in await self._occasions(sets):
            if self._again.get(occasion, now) <= now and (contents := await self._look(occasion)) is not None:
                return Ready(occasion, contents)
        return None

    async def unstored(self, sets: Sequence[CheckpointSet]) -> Unstored:
        """The parts on disk that are to be stored and are not."""
        found = Unstored()
        if self._settings.sync.optional_parts == "none" and not self._settings.sync.extra:
            return found
        for occasion in await self._occasions(sets):
            owed = await self._owed(occasion)
            for part in owed[1] if owed is not None else ():
                looked = await self._examine(part)
                name = f"{part.name} of step {occasion.step}"
                if looked.problem and not looked.changing:
                    found = replace(found, refused=(*found.refused, f"{name} ({looked.problem})"))
                elif not looked.absent:
                    found = replace(found, pending=(*found.pending, name))
        return found

    async def _occasions(self, sets: Sequence[CheckpointSet]) -> Sequence[Occasion]:
        return occasions(
            await self._journal.run(Journal.published),
            {(s.step, s.save_id) for s in sets if s.complete},
            when=self._settings.sync.optional_parts,
            keep_every=self._settings.sync.keep_every,
            finished=self._run.training_finished(),
        )

    async def send(self, store: ObjectStore, ready: Ready, time: SpareTime) -> None:
        """Send and record it; leave out what cannot be sent. Raises RemoteError for store trouble, Superseded when
        another pod has taken the lease."""
        try:
            sent = await self._send(store, ready, time)
        except UploadStopped:
            if not time.over():  # the disk needs this checkpoint's space: it is about to be removed
                self._again[ready.occasion] = self._clock.monotonic() + AGAIN_SECONDS
            else:
                self._again.pop(ready.occasion, None)  # continues as soon as there is time
            return
        except (SetVoid, HostError, IntegrityError) as error:
            self._again[ready.occasion] = self._clock.monotonic() + AGAIN_SECONDS
            self._leave_out(ready.occasion, ", ".join(ready.parts), error.what)
            return
        if sent:
            step = ready.occasion.step
            text = f"step {step}: {', '.join(ready.parts)} stored with it ({ready.occasion.kind})"
            self._tell(EventName.OPTIONAL_PARTS, text, step=step)

    # -- what is there ------------------------------------------------------------------------------------------------

    async def _look(self, occasion: Occasion) -> SetContents | None:
        """The parts that are complete, quiet and not sent yet; None if there are none."""
        self._again[occasion] = self._clock.monotonic() + AGAIN_SECONDS
        owed = await self._owed(occasion)
        if owed is None:
            return None
        whole, parts = owed
        if not parts:
            self._again[occasion] = math.inf
            return None
        found = []
        for part in parts:
            looked = await self._examine(part)
            if looked.problem:
                soon = max(LOOK_SECONDS, self._settings.checkpoints.settle_weak)
                self._again[occasion] = self._clock.monotonic() + soon
                self._leave_out(occasion, part.name, looked.problem)
            elif not looked.absent:
                found.append(looked.found)
        if not found:
            return None
        self._again.pop(occasion, None)
        files = tuple(f for p in found for f in p.files)
        return SetContents(whole.set, files, tuple(x for p in found for x in p.symlinks), tuple(found))

    async def _owed(self, occasion: Occasion) -> tuple[SetContents, tuple[PartDir, ...]] | None:
        """The checkpoint, and its parts that are not stored yet, on disk or not; None if it cannot be read, or is
        another save by now."""
        sync = self._settings.sync
        try:
            whole = await self._worker.call(self._catalogue.contents, occasion.step)
        except (OSError, PodwatchError):
            return None
        if (whole.set.step, whole.set.save_id) != occasion.key:
            return None
        parts = {p.part.name: p.part for p in whole.parts if p.part.export and sync.optional_parts != "none"}
        if sync.extra:
            root = self._settings.trainer.output_dir
            parts[EXTRA] = PartDir(EXTRA, root, required=False, uploaded=False, names=sync.extra, export=True)
        owed = still_owed(parts, occasion.kind, (await self._carried()).get(occasion.key, {}))
        return whole, tuple(parts[name] for name in owed)

    async def _examine(self, part: PartDir) -> Looked:
        return await self._worker.call(
            lambda: look(
                part,
                quiet=self._settings.checkpoints.settle_weak,
                now_wall=self._clock.wall(),
                most_bytes=self._settings.sync.extra_max if part.name == EXTRA else 0,
                private=self._settings.trainer.env_file,
            )
        )

    def _leave_out(self, occasion: Occasion, what: str, why: str) -> None:
        if (occasion, what, why) not in self._told:
            self._told.add((occasion, what, why))
            text = f"step {occasion.step}: {what} is not stored: {why}"
            self._tell(EventName.OPTIONAL_PARTS, text, step=occasion.step)

    async def _carried(self) -> dict[SaveKey, dict[str, str]]:
        kept = await self._journal.run(Journal.learned, CARRIED, {})
        return {(int(k.partition("/")[0]), k.partition("/")[2]): dict(v) for k, v in kept.items()}

    async def _note(self, ready: Ready) -> None:
        """Record only checkpoints that are still in the store, so that the record does not grow."""
        carried, occasion = await self._carried(), ready.occasion
        carried[occasion.key] = {**carried.get(occasion.key, {}), **dict.fromkeys(ready.parts, str(occasion.kind))}
        there = {(p.step, p.save_id) for p in await self._journal.run(Journal.published)}
        kept = {f"{step}/{save_id}": v for (step, save_id), v in carried.items() if (step, save_id) in there}
        await self._journal.run(Journal.learn, CARRIED, kept)
        self._again.pop(occasion, None)

    # -- sending it ---------------------------------------------------------------------------------------------------

    async def _send(self, store: ObjectStore, ready: Ready, time: SpareTime) -> bool:
        occasion, contents = ready.occasion, ready.contents
        key, call = occasion.key, self._worker.call
        files = jobs.all_files(contents, self._keys)
        before = await call(read_optional, store, self._keys, *key)
        done = await self._journal.run(Journal.objects, *key)
        todo = jobs.missing(files, done)
        if before is not None and not store.versioned and {f.key for f in before.files} & {f.key for f in todo}:
            # A store without versions keeps one content per name: nothing may still name the replaced one.
            await call(self._forget, store, key)
        if todo:
            total = sum(f.size for f in files)
            missing = sum(f.size for f in todo)
            await self._upload(contents, todo, done, time, lambda n: time.progress(total - missing + n, total))
        part_size = self._settings.sync.part_size
        proofs = await call(lambda: {f.remote: in_store(store, _named(f, done), part_size) for f in files})
        broken = [remote for remote, proof in proofs.items() if proof is None]
        for path in broken:  # sent again at the next check
            await self._journal.run(Journal.save_object, *key, replace(done[path], mtime_ns=-1))
        if broken:
            raise IntegrityError(f"{len(broken)} uploaded object(s) are missing or different in the store")
        manifest = self._manifest(ready, tuple(_named(f, done) for f in files), before)
        manifest = replace(manifest, proof=proof_of(proofs.values()))
        new = before is None or not _same(before, manifest)
        if new and not await call(self._write, store, manifest):
            raise HostError("the checkpoint was removed from the store meanwhile")
        await self._note(ready)
        return True

    async def _upload(
        self,
        contents: SetContents,
        todo: tuple[jobs.JobFile, ...],
        done: dict[str, UploadedObject],
        time: SpareTime,
        progress: Progress,
    ) -> None:
        sending = asyncio.ensure_future(self._sender.send(contents, todo, done, progress))
        try:
            while not sending.done():
                await asyncio.wait({sending}, timeout=LOOK_SECONDS)
                if time.over() and self._sender.running is not None and not sending.done():
                    self._sender.running.kill()
            await sending
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def _manifest(self, ready: Ready, files: tuple[ManifestFile, ...], before: Manifest | None) -> Manifest:
        """With the parts that were sent earlier and are not sent again."""
        links = restorable(files, jobs.manifest_symlinks(ready.contents))
        part_size = self._settings.sync.part_size
        if before is not None and before.part_size == part_size:
            files = (*(f for f in before.files if f.part not in ready.parts), *files)
            links = (*(x for x in before.symlinks if x.part not in ready.parts), *links)
        identity, chosen = self._run.identity(), ready.contents.set
        return Manifest(
            run_id=identity.run_id,
            lineage=identity.lineage,
            step=chosen.step,
            save_id=chosen.save_id,
            layout=chosen.layout,
            created_at=rfc3339(self._clock.wall()),
            writer_id=identity.writer_id,
            part_size=part_size,
            total_bytes=sum(f.size for f in files),
            files=tuple(sorted(files, key=lambda f: f.path)),
            symlinks=tuple(sorted(links, key=lambda x: x.path)),
            producer=f"podwatch {__version__}",
        )

    def _forget(self, store: ObjectStore, key: SaveKey) -> None:
        self._lease.confirm(store)
        found = store.stat(self._keys.optional(*key))
        if found is not None:
            store.delete(found)

    def _write(self, store: ObjectStore, manifest: Manifest) -> bool:
        """False when the checkpoint itself was removed: write nothing beside a removed checkpoint."""
        _, until = self._lease.confirm(store)
        if store.stat(self._keys.manifest(manifest.step, manifest.save_id)) is None:
            return False
        key = self._keys.optional(manifest.step, manifest.save_id)
        put_before(store, key, manifest.to_bytes(), until, self._clock)
        return True


def _named(file: jobs.JobFile, done: dict[str, UploadedObject]) -> ManifestFile:
    return jobs.manifest_files((file,), done)[0]


def _same(before: Manifest, now: Manifest) -> bool:
    return (before.files, before.symlinks) == (now.files, now.symlinks)
