"""Restores a checkpoint of a run from its store: chosen, fetched into staging, inspected there, put in place.

Blocking: for a thread or the command line. Nothing from the store is trusted: names, links and sizes are checked when a
document is read, each piece is hashed, and what has all its hashes is inspected before anything can resume from it.
``train_command`` in a manifest is only ever shown.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.records import RecordFiles
from podwatch.checkpoints.shapes import PartDir
from podwatch.checkpoints.trackers import repair_trackers
from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.domain.errors import ConfigurationError, HostError, IntegrityError, RemoteError, SaveGone
from podwatch.domain.run import valid_ids
from podwatch.store.documents import EXPORT_BYTES, SaveManifest
from podwatch.store.inventory import DocumentCache, Inventory, SaveKey, Stored, take_inventory
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.open import open_objects
from podwatch.store.restore.choose import candidates, passed_over, was_started_afresh
from podwatch.store.restore.compare import has_file, has_link, in_order
from podwatch.store.restore.exports import RestoredExports, export_target, read_exports
from podwatch.store.restore.inspect_staged import StagedDamaged, inspect_staged
from podwatch.store.restore.staging import StagedPart, StagingArea
from podwatch.store.transfer.job import TransferJob
from podwatch.store.transfer.start import Transfer
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree

if TYPE_CHECKING:
    from podwatch.store.objects.access import Access

RestoreProgress = Callable[[int, int], object]
"""(bytes that are here, bytes in all)."""


@dataclass(frozen=True, slots=True)
class StoreOfRun:
    """Where a run is stored. ``access`` is read for each restore, so that a corrected key counts at once."""

    url: str
    keys: RunKeys
    access: "Callable[[], Access]"
    connections: int = 8

    def open(self) -> Objects:
        return open_objects(self.url, self.access(), connections=self.connections)


@dataclass(frozen=True, slots=True)
class Restored:
    """``save_id``: in the store. ``parts``: directories that are in place now; ``moved``: what was in the way, in
    quarantine now; ``refused``: which checkpoints were passed over, and why. ``doubt``: what an inspection found wrong
    with a checkpoint that was asked for by its step. ``wandb``: ids of the trainer's W&B run."""

    step: int
    save_id: str
    lineage: str
    parts: tuple[str, ...]
    total_bytes: int
    downloaded_bytes: int
    moved: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    doubt: str = ""
    train_command: tuple[str, ...] = ()
    wandb: dict[str, str] = field(default_factory=dict)
    exports: RestoredExports = field(default_factory=RestoredExports)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is brought to its place as one: a checkpoint, or one part of its exported weights. ``name``: of its staging
    directory; ``targets``: by part, of which ``files`` can have more; ``shared``: parts whose directory belongs to many
    steps; ``manifest``: of a checkpoint that this layout can inspect."""

    name: str
    save: Stored
    files: tuple[FileEntry, ...]
    piece_size: int
    targets: Mapping[str, Path]
    links: tuple[SymlinkEntry, ...] = ()
    shared: frozenset[str] = frozenset()
    manifest: SaveManifest | None = None

    def missing(self, tree: PinnedTree) -> dict[str, Path]:
        """The parts that are not at their targets, byte for byte, with the targets: the part with the newest file last,
        because a save's end is written last."""
        found = []
        for part, target in self.targets.items():
            files = [file for file in self.files if file.part == part]
            whole = all(has_file(tree, target, file, self.piece_size) for file in files)
            if not whole or not all(has_link(tree, target, link) for link in self.links if link.part == part):
                found.append((max((file.mtime_ns for file in files), default=0), part))
        return {part: self.targets[part] for _, part in sorted(found)}


@dataclass(frozen=True, slots=True)
class OutagePatience:
    """For so many ``seconds`` a fetch waits for a store that does not answer; ``waiting`` is called each time with the
    reason and the pause. 0 leaves that to the caller."""

    seconds: float = 0.0
    waiting: Callable[[RemoteError, float], object] = lambda _error, _pause: None


class Restorer:
    """One restore at a time."""

    def __init__(
        self,
        store: StoreOfRun,
        layout: Layout,
        workspace: Workspace,
        records: RecordFiles,
        patience: OutagePatience | None = None,
    ) -> None:
        self._store, self._layout, self._workspace, self._records = store, layout, workspace, records
        self._patience, self._cache = patience or OutagePatience(), DocumentCache()
        self._stopped = threading.Event()
        self._transfer: Transfer | None = None
        self.fetching: SaveKey | None = None
        """The save that is being fetched: it is not to be deleted from the store now."""

    def saves(self, step: int | None = None) -> tuple[Stored, ...]:
        """As ``choose.candidates``. Raises RemoteError; IntegrityError where documents cannot be read and no save can
        be used."""
        with self._opened() as store:
            inventory = self._inventory(store)
        found = candidates(inventory, step)
        if not found and inventory.problems and not was_started_afresh(inventory):
            raise IntegrityError(inventory.problems[0], where=self._store.url, fix="`podwatch store verify` shows more")
        return found

    def fetch(
        self,
        step: int | None = None,
        *,
        to: Path | None = None,
        progress: RestoreProgress | None = None,
        exports: bool = False,
    ) -> Restored:
        """Put the newest whole checkpoint in place, or below ``to`` as ``<to>/<part>/...``; the next older one where it
        is damaged, the one that replaced it where it is deleted meanwhile. With ``step`` a checkpoint of that step,
        also one that an inspection doubts. ``exports``: also its exported weights.

        Raises RemoteError when none is whole, NotInspected, HostError for trouble on this pod.
        """
        refused: list[str] = []
        tried: set[tuple[SaveKey, str]] = set()
        with self._opened() as store, self._on_this_pod(to):
            while True:
                inventory = self._inventory(store)
                refused += [text for text in passed_over(inventory, step) if text not in refused]
                usable = (s for s in candidates(inventory, step) if not s.problem and (s.key, s.hash) not in tried)
                if (save := next(usable, None)) is None:
                    raise self._none(inventory, step, refused)
                tried.add((save.key, save.hash))
                try:
                    restored = self._restore(save, to, progress, doubts=step is not None)
                except IntegrityError as error:
                    refused.append(f"step {save.step}: {error}")
                    continue
                found = self._exports(store, save, to) if exports else RestoredExports()
                return replace(restored, refused=tuple(refused), exports=found)

    def fetch_save(self, key: SaveKey, progress: RestoreProgress | None = None, *, doubts: bool = False) -> Restored:
        """Put exactly this save in place. ``doubts``: also if an inspection finds it damaged. Raises SaveGone,
        StagedDamaged, IntegrityError, NotInspected, RemoteError, HostError."""
        with self._opened() as store, self._on_this_pod(None):
            save = next((s for s in candidates(self._inventory(store), key[0]) if s.key == key), None)
            if save is None:
                raise SaveGone("the checkpoint is not in the store any more", where=self._where(store, key))
            if save.problem:
                raise IntegrityError(save.problem, where=self._where(store, key))
            return self._restore(save, None, progress, doubts=doubts)

    def kill(self) -> None:
        """End a running fetch, from any thread; the next one continues from there."""
        self._stopped.set()
        if (transfer := self._transfer) is not None:
            transfer.kill()

    # -- one save ---------------------------------------------------------------------------------------------------

    def _restore(self, save: Stored, to: Path | None, progress: RestoreProgress | None, *, doubts: bool) -> Restored:
        manifest = save.manifest
        assert manifest is not None
        known = self._layout.name == manifest.layout
        if not known and to is None:
            raise HostError(
                f"step {save.step} was saved with the layout {manifest.layout!r}, this run has {self._layout.name!r}",
                where="[trainer] layout",
                fix="correct the layout, or restore into another directory with --to DIR",
            )
        parts = sorted({f.part for f in manifest.files} | {link.part for link in manifest.symlinks})
        if known:
            self._layout.expect_parts(parts)
        wanted = _Wanted(
            f"{save.step}-{save.save_id}-{save.hash[-8:]}", save, manifest.files, manifest.piece_size,
            {part: self._target(part, save.step, to) for part in parts}, manifest.symlinks,
            self._layout.shared_parts if to is None else frozenset(), manifest if known else None,
        )  # fmt: skip
        self.fetching = save.key
        try:
            area, downloaded, doubt = self._bring(wanted, to, progress, doubts=doubts)
        finally:
            self.fetching = None
        if to is None:
            # Without its tracker a checkpoint counts as unfinished; a tracker that names a step is the trainer's.
            repair_trackers(self._layout.trackers(save.step), self._workspace.tree, only_missing=True)
        if progress is not None:
            progress(save.total_bytes, save.total_bytes)
        return Restored(
            save.step, save.save_id, manifest.lineage, tuple(map(str, wanted.targets.values())), save.total_bytes,
            downloaded, tuple(area.moved), (), doubt, manifest.train_command, valid_ids(manifest.wandb),
        )  # fmt: skip

    def _exports(self, store: Objects, save: Stored, to: Path | None) -> RestoredExports:
        """Part by part: one that is damaged in the store, or has no place here, is left out. The checkpoint is valid
        without it."""
        if not save.exports:
            return RestoredExports(left_out=(f"the store has no exported weights of step {save.step}",))
        try:
            found = read_exports(store, self._store.keys, save)
        except IntegrityError as error:
            return RestoredExports(left_out=(f"exported weights: {error}",))
        parts, left_out, downloaded = list[str](), list[str](), 0
        for part in sorted({file.part for file in found.files}):
            try:
                target = export_target(self._layout, save, part, to)
                name = f"{save.step}-{save.save_id}-{part}"
                downloaded += self._bring(_Wanted(name, save, found.files, EXPORT_BYTES, {part: target}), to)[1]
            except (IntegrityError, ConfigurationError) as error:
                left_out.append(f"{part}: {error}")
            else:
                parts.append(str(target))
        return RestoredExports(tuple(parts), tuple(left_out), downloaded)

    def _bring(
        self, wanted: _Wanted, to: Path | None, progress: RestoreProgress | None = None, *, doubts: bool = False
    ) -> tuple[StagingArea, int, str]:
        """Fetch into staging what is not in place, inspect it there, put it in place. (the area, bytes that came over
        the line, what is wrong with it)."""
        area = StagingArea(self._workspace, to, wanted.name)
        with area.alone():
            area.prepare(wanted.missing(area.tree), wanted.shared)
            try:
                downloaded = self._fetch(area, wanted, progress)
                doubt = self._inspect(wanted, area.parts, doubts=doubts, place=to is None)
            except IntegrityError:
                area.forget()
                raise
            area.place(wanted.save.step, "" if wanted.save.manifest is None else wanted.save.manifest.lineage)
        return area, downloaded, doubt

    def _target(self, part: str, step: int, to: Path | None) -> Path:
        if to is not None:
            return to / part
        try:
            return self._layout.part_dir(part, step)
        except (KeyError, ValueError):
            raise IntegrityError(f"layout {self._layout.name!r} has no part {part!r}", where="manifest.json") from None

    def _inspect(self, wanted: _Wanted, staged: tuple[StagedPart, ...], *, doubts: bool, place: bool) -> str:
        """What is wrong with it, in words, if ``doubts`` are allowed. Its record is there before the checkpoint is: it
        is this run's from the first moment on."""
        if (manifest := wanted.manifest) is None:
            return ""
        where = {**wanted.targets, **{part.part: part.path for part in staged}}
        parts = [PartDir(part, path, True, names=self._names(manifest, part)) for part, path in where.items()]
        try:
            record = inspect_staged(self._layout, manifest, parts, self._stopped.wait)
        except (StagedDamaged, HostError) as error:
            if not doubts:
                raise
            return error.what
        if place:
            with contextlib.suppress(OSError):  # it is then like a save of nobody that podwatch knows
                self._records.write(record)
        return ""

    def _names(self, manifest: SaveManifest, part: str) -> tuple[str, ...]:
        """What belongs to the part in a directory that many steps share."""
        if part not in self._layout.shared_parts:
            return ()
        return tuple(sorted({file.path.partition("/")[0] for file in manifest.files if file.part == part}))

    # -- the transfer -----------------------------------------------------------------------------------------------

    def _fetch(self, area: StagingArea, wanted: _Wanted, progress: RestoreProgress | None) -> int:
        """Fetch into the area's directories, through outages: each try continues the one before. Returns the bytes that
        came over the line."""
        parts = {part.part for part in area.parts}
        if not parts:
            return 0
        files = in_order(file for file in wanted.files if file.part in parts)
        total = sum(file.size for file in wanted.files)
        there = total - sum(file.size for file in files)
        tell = (lambda count: progress(there + count, total)) if progress is not None else None
        self._stopped.clear()
        rights, downloaded, waited = area.tree.rights, 0, 0.0
        with area.opened() as roots:
            job = TransferJob(
                "fetch", self._store.url, self._store.keys.save(*wanted.save.key), tuple(files), wanted.piece_size,
                roots, tuple(link for link in wanted.links if link.part in parts),
                connections=self._store.connections, user=-1 if rights is None else rights.uid,
            )  # fmt: skip
            while True:
                came = _Arrivals(tell)
                try:
                    self._run(job, came)
                    return downloaded + came.downloaded
                except IntegrityError:
                    raise
                except RemoteError as error:
                    downloaded, waited = downloaded + came.downloaded, 0.0 if came.downloaded else waited
                    pause = min(60.0, max(5.0, waited))
                    if not error.transient or waited + pause > self._patience.seconds:
                        raise
                    self._patience.waiting(error, pause)
                    waited += pause
                if self._stopped.wait(pause):
                    raise HostError("the restore was stopped", fix="the next one continues there")

    def _run(self, job: TransferJob, came: "_Arrivals") -> None:
        self._transfer = Transfer(job)
        try:
            if self._stopped.is_set():
                self._transfer.kill()
            self._transfer.run(self._store.access(), came)
        finally:
            self._transfer = None

    # -- around it --------------------------------------------------------------------------------------------------

    def _inventory(self, store: Objects) -> Inventory:
        return take_inventory(store, self._store.keys, self._cache)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Objects]:
        store = self._store.open()
        try:
            yield store
        finally:
            store.close()

    @contextlib.contextmanager
    def _on_this_pod(self, to: Path | None) -> Iterator[None]:
        """Errors of this pod's disk say what to do."""
        try:
            yield
        except OSError as error:
            place = Path(error.filename or to or self._workspace.staging)
            raise HostError(
                f"the restore cannot write here: {error.strerror or error}",
                where=str(place),
                fix=self._workspace.foreign_owners([place])[1]
                or "free space or correct the permissions, then restore again; it continues from there",
            ) from error

    def _none(self, inventory: Inventory, step: int | None, refused: list[str]) -> RemoteError:
        what = f"no whole checkpoint{'' if step is None else f' of step {step}'} is in the store"
        fix = "`podwatch store ls` lists the checkpoints in the store"
        if step is None and was_started_afresh(inventory):
            what = "this run was started from the beginning (--fresh) and has not stored a checkpoint since"
            fix = "`podwatch restore --step N` restores an earlier one; `podwatch store ls` lists them"
        detail = f" ({'; '.join(refused)[:1000]})" if refused else ""
        return RemoteError(what + detail, where=f"{self._store.url}/{self._store.keys.root}", fix=fix, transient=False)

    def _where(self, store: Objects, key: SaveKey) -> str:
        return f"{store.url}/{self._store.keys.save(*key)}"


class _Arrivals:
    """What the child says: bytes that are here, and bytes that came over the line."""

    def __init__(self, tell: Callable[[int], object] | None) -> None:
        self.downloaded, self._tell = 0, tell

    def __call__(self, message: dict[str, Any]) -> None:
        if message.get("type") == "piece" and message.get("fetched"):
            self.downloaded += int(message["size"])
        elif message.get("type") == "progress" and self._tell is not None:
            self._tell(int(message["bytes"]))
