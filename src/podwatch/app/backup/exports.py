"""Stores exported weights and other named files beside a published save, as plain files that people download.

They never delay a checkpoint: a new one stops their upload, which continues later. ``exports.json`` is written before
the files, so that whatever a crash leaves is known, and again once all of them are there.
"""

import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.app.backup.connection import StoreConnection
from podwatch.app.backup.outbox import Outbox, OutgoingSave, outgoing_files, used_parts
from podwatch.app.backup.run_side import RunSide
from podwatch.app.backup.stored_run import StoredRun
from podwatch.app.backup.uploads import Uploads, UploadStopped
from podwatch.checkpoints.formats.safetensors import read_index
from podwatch.checkpoints.known_checkpoints import Catalogue, SetContents
from podwatch.checkpoints.scan import is_temporary, scan_part
from podwatch.checkpoints.shapes import PartDir, PartFiles
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import HostError, IntegrityError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.domain.times import size as in_words
from podwatch.store.documents import EXPORT_BYTES, SaveExports
from podwatch.store.interfaces import list_save, read_or_none
from podwatch.store.inventory import SaveKey, missing_objects
from podwatch.store.keys import EXPORTS, pieces
from podwatch.store.runs.start import looks_like_a_key
from podwatch.store.transfer.send import SourceChanged, SourceForeign
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.pinned_directories import HIDDEN

AGAIN_SECONDS = 600.0
"""Seconds until a part that is missing or could not be sent is read again, which costs a listing on disk."""
LOOK_SECONDS = 1.0
"""Seconds until a part that is still written is read again, at least."""


EXTRA = "extra"
"""The part that holds ``[sync] extra``."""
MOST_FILES = 10_000
"""Limit for ``extra``: an exported model has a hundred files; a tree of rollouts does not belong to a milestone."""
_INDEX = ".safetensors.index.json"


_MAKES_WAY = "a new checkpoint is sent first"


@dataclass(frozen=True, slots=True)
class DueExport:
    """A stored save that gets exports. ``final``: the last one of a run that has ended, else a milestone."""

    saved: StoredCheckpoint
    final: bool = False

    @property
    def key(self) -> tuple[SaveKey, bool]:
        return (self.saved.key, self.final)


@dataclass(frozen=True, slots=True)
class ExportState:
    """``problem``: why the part is left out now; ``absent``: the part does not exist, which is no problem;
    ``changing``: the problem passes."""

    found: PartFiles
    problem: str = ""
    absent: bool = False
    changing: bool = False


def due_exports(stored: Sequence[StoredCheckpoint], *, finished: bool) -> Iterator[DueExport]:
    """The newest first, of saves that are on this pod: milestones, and the final save."""
    whole = [save for save in stored if save.whole]
    for save in reversed(whole):
        if not save.here:
            continue
        if finished and save is whole[-1]:
            yield DueExport(save, final=True)
        elif save.milestone:
            yield DueExport(save)


class Exports:
    """Loop-side object."""

    def __init__(
        self, settings: Settings, run: RunSide, catalogue: Catalogue, clock: Clock, connection: StoreConnection,
        outbox: Outbox, uploads: Uploads, run_in_store: StoredRun,
    ) -> None:  # fmt: skip
        self._settings, self._run, self._catalogue, self._clock = settings, run, catalogue, clock
        self._connection, self._outbox, self._uploads, self._stored = connection, outbox, uploads, run_in_store
        self._disk = Worker("exports")
        self._known: dict[SaveKey, SaveExports | None] = {}
        self._again: dict[tuple[SaveKey, bool], float] = {}
        self._told: set[tuple[int, str, str]] = set()
        self.sending = False
        """A new checkpoint is sent first: ``make_way`` stops this at any time."""
        self._makes_way = False

    async def carry(self, stored: Sequence[StoredCheckpoint]) -> bool:
        """Send what is owed and ready now; whether anything was sent. Leaves out what cannot be sent. Raises
        RemoteError for store trouble, LeaseLost when another pod holds the run."""
        now = self._clock.monotonic()
        for due in due_exports(stored, finished=self._run.finished):
            if self._again.get(due.key, now) <= now and (found := await self._ready(due)):
                return await self._carry(due, found)
        return False

    async def unstored(self, stored: Sequence[StoredCheckpoint]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parts on disk that are to be stored and are not: those that come; those that cannot, with the reason."""
        pending, refused = list[str](), list[str]()
        for due in due_exports(stored, finished=self._run.finished):
            for part, state in await self._owed(due):
                name = f"{part.name} of step {due.saved.step}"
                if state.problem and not state.changing:
                    refused.append(f"{name} ({state.problem})")
                elif not state.absent:
                    pending.append(name)
        return tuple(pending), tuple(refused)

    async def _ready(self, due: DueExport) -> list[PartFiles]:
        """The parts that are whole, quiet and not stored yet."""
        self._again[due.key] = self._clock.monotonic() + AGAIN_SECONDS  # also where what is stored cannot be read
        owed, now, found = await self._owed(due), self._clock.monotonic(), []
        self._again[due.key] = now + AGAIN_SECONDS if owed or due.final else math.inf
        for part, state in owed:
            if state.problem:
                self._again[due.key] = now + max(LOOK_SECONDS, self._settings.checkpoints.settle_weak)
                self._leave_out(due, part.name, state.problem)
            elif not state.absent:
                found.append(state.found)
        return found

    async def _owed(self, due: DueExport) -> list[tuple[PartDir, ExportState]]:
        """The save's parts that are not stored as they are now."""
        contents = await self._contents(due.saved)
        if contents is None:
            return []
        known = await self._exports_of(due.saved)
        stored = {(f.part, f.path, f.size) for f in known.files} if known is not None and known.complete else set()
        owed = []
        for part in self._parts(contents):
            there = {entry for entry in stored if entry[0] == part.name}
            if there and not due.final:
                continue
            state = await self._read_part(part)
            if state.problem or state.absent or there != {(part.name, f.path, f.size) for f in state.found.files}:
                owed.append((part, state))
        return owed

    async def _contents(self, saved: StoredCheckpoint) -> SetContents | None:
        try:
            contents = await self._disk.call(self._catalogue.contents, saved.step)
        except (OSError, PodwatchError):
            return None
        return contents if contents.set.save_id == saved.here else None

    def _parts(self, contents: SetContents) -> list[PartDir]:
        sync = self._settings.sync
        parts = [p.part for p in contents.parts if p.part.export]
        if sync.extra:
            root = self._settings.trainer.output_dir
            parts.append(PartDir(EXTRA, root, required=False, uploaded=False, names=sync.extra, export=True))
        return parts

    async def _read_part(self, part: PartDir) -> ExportState:
        settings = self._settings
        return await self._disk.call(
            lambda: read_part(
                part, quiet=settings.checkpoints.settle_weak, now_wall=self._clock.wall(),
                most_bytes=settings.sync.extra_max if part.name == EXTRA else 0, private=settings.trainer.env_file,
            )
        )  # fmt: skip

    async def _exports_of(self, saved: StoredCheckpoint) -> SaveExports | None:
        if saved.key not in self._known:
            name = self._connection.keys.save(*saved.key) + EXPORTS
            data = None
            if saved.exports:
                data = await self._connection.call(lambda store: read_or_none(store, name, SaveExports))
            try:
                self._known[saved.key] = None if data is None else SaveExports.from_bytes(data)
            except IntegrityError:
                self._known[saved.key] = None
        return self._known[saved.key]

    def _leave_out(self, due: DueExport, what: str, why: str) -> None:
        if (due.saved.step, what, why) not in self._told:
            self._told.add((due.saved.step, what, why))
            text = f"step {due.saved.step}: {what} is not stored: {why}"
            self._connection.say(EventName.OPTIONAL_PARTS, text, step=due.saved.step)

    # -- sending

    async def _carry(self, due: DueExport, found: list[PartFiles]) -> bool:
        step, names = due.saved.step, ", ".join(p.part.name for p in found)
        try:
            await self._store(due.saved, found)
        except UploadStopped:
            self._again.pop(due.key, None)  # continues as soon as there is time
            return False
        except (SourceChanged, SourceForeign, HostError, IntegrityError) as error:
            self._again[due.key] = self._clock.monotonic() + AGAIN_SECONDS
            self._leave_out(due, names, error.what)
            return False
        self._again.pop(due.key, None)
        text = f"step {step}: {names} stored with it ({'final' if due.final else 'milestone'})"
        self._connection.say(EventName.OPTIONAL_PARTS, text, step=step)
        return True

    async def _store(self, saved: StoredCheckpoint, found: list[PartFiles]) -> None:
        save = self._outgoing(saved, found)
        before = await self._exports_of(saved)
        own = set(used_parts(save.files))
        others = [] if before is None else [f for f in before.files if f.part not in own and f.hashes]
        named = [*others, *(replace(file, inode=0, device=0) for file in save.files)]
        document = SaveExports(save.run_id, saved.step, saved.save_id, self._clock.wall(), tuple(named))
        self.sending, self._makes_way = True, False
        try:
            await self._stored.write_exports(document)
            if self._makes_way:
                raise UploadStopped(_MAKES_WAY, where=f"step {save.step}")
            sent = await self._uploads.send(save)
        finally:
            self.sending = False
        folder = self._connection.keys.save(*saved.key)
        there = await self._connection.call(lambda store: list_save(store, folder))
        files = [f if f.hashes or f.name not in sent else replace(f, hashes=(sent[f.name],)) for f in named]
        if not all(f.hashes for f in files) or missing_objects(pieces(files, EXPORT_BYTES), there):
            raise IntegrityError("an uploaded file is missing or different in the store", where=folder)
        whole = replace(document, files=tuple(files), complete=True)
        await self._stored.write_exports(whole)
        self._known[saved.key] = whole

    def make_way(self) -> None:
        """Stop what is being sent: it continues once there is nothing else to do."""
        self._makes_way = True
        self._uploads.stop(_MAKES_WAY)

    def _outgoing(self, saved: StoredCheckpoint, found: list[PartFiles]) -> OutgoingSave:
        return OutgoingSave(
            self._settings.run_id, saved.step, f"{saved.save_id}-exports", saved.save_id, self._run.author().layout,
            EXPORT_BYTES, outgoing_files(f for p in found for f in p.files),
            {p.part.name: str(p.part.path) for p in found},
        )  # fmt: skip


# -- what a part contains now, and whether that can be stored; blocks ------------------------------------------------


def read_part(
    part: PartDir, *, quiet: float, now_wall: float, most_bytes: int = 0, private: Path | None = None
) -> ExportState:
    """``quiet``: seconds without a change. ``most_bytes`` limits the part, 0: no limit. ``private`` is never sent."""
    if part.name == EXTRA:
        part = replace(part, names=tuple(n for n in part.names if not _through_a_link(part.path, n)))
        if not part.names:
            return ExportState(PartFiles(part, present=False), absent=True)
    scan = scan_part(part)
    found = scan.found
    if part.name == EXTRA:  # this part is the whole output_dir: a link inside it may lead anywhere in there
        files = tuple(f for f in found.files if _may_leave(part.path, f, private))
        found = replace(found, files=files, symlinks=())
    if not found.present or not found.files:
        return ExportState(found, scan.error, absent=not scan.error)
    total = sum(f.size for f in found.files)
    changing = any(is_temporary(f.path) for f in found.files) or now_wall - scan.changed_ns / 1e9 < quiet
    if scan.error:
        problem = scan.error
    elif changing:
        problem = "it is still being written"
    elif most_bytes and total > most_bytes:
        problem = f"its {in_words(total)} exceed what sync.extra can be ({in_words(most_bytes)})"
    elif any(f.size > EXPORT_BYTES for f in found.files):
        problem = f"one of its files exceeds {in_words(EXPORT_BYTES)}, the most that every store takes at once"
    elif part.name == EXTRA and len(found.files) > MOST_FILES:
        problem = f"it has more than {MOST_FILES} files"
    else:
        problem = _without_shards(part.path, found.files)
    return ExportState(found, problem, changing=changing and not scan.error)


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
            listed = read_index(root / index)
        except OSError:
            return f"{index} cannot be read"
        if listed.problem:
            return f"{index} {listed.problem}"
        folder = index.rpartition("/")[0]
        missing = sorted(n for n in listed.shards if (f"{folder}/{n}" if folder else n) not in there)
        if missing:
            return f"{index} names {missing[0]}, which does not exist"
    return ""
