"""Restore: find a whole checkpoint in the store, fetch and verify it, move it to where the trainer expects it.

Blocking: for a thread or the command line. Nothing from the store is trusted (fetch.py, ``checked_manifest``);
``train_command`` in a manifest is only ever shown.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.records import CheckpointRecord, RecordedFile, RecordFiles, RecordSource
from podwatch.checkpoints.trackers import repair_trackers
from podwatch.domain.errors import HostError, IntegrityError, PodwatchError, RemoteError, SaveGone
from podwatch.domain.intents import StoreIntent
from podwatch.domain.manifest import Keys, Manifest, ManifestRef, Pointer, sha1_hex
from podwatch.domain.run import FROM_STORE, Intent, IntentKind, IntentState
from podwatch.domain.safe_links import check_links
from podwatch.domain.stored_checkpoint import PublishedSave, StoredSave, stored_save
from podwatch.journal.journal import Journal
from podwatch.stores.base import ObjectStore, OpenStore, Progress, StoredObject
from podwatch.sync.interfaces import features_of
from podwatch.sync.publish_and_pointer import checked_manifest, newest_pointer, read_manifest
from podwatch.sync.restore.child_job import Fetched, FetchJob
from podwatch.sync.restore.fetch import by_part, is_marker
from podwatch.sync.restore.optional_parts import Brought, Part, bring_optional
from podwatch.sync.restore.stage_and_put_in_place import StagingArea
from podwatch.sync.restore.start_child import Fetcher
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree
from podwatch.system.procfs import boot_id

RestoreProgress = Callable[[int, int], None]
"""(bytes that are here, verified or in flight; bytes in all)."""
Waiting = Callable[[RemoteError, float], None]
"""(the reason, the pause in seconds)."""
_STEP = re.compile(r"/step_(\d+)/[^/]+/manifest\.json$")
_PART = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


def _age(manifest: StoredObject) -> tuple[float, int]:
    """Sorts manifests by their upload. Of two in one second, which S3 does not tell apart, the higher step is newer."""
    step = _STEP.search(manifest.key)
    return manifest.uploaded_wall, int(step[1]) if step else -1


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """``parts`` are the directories now in place; ``set_aside`` was moved to quarantine; ``refused``: which checkpoints
    were passed over, and why."""

    step: int
    save_id: str
    lineage: str
    parts: tuple[str, ...]
    total_bytes: int
    downloaded_bytes: int
    set_aside: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    train_command: tuple[str, ...] = ()
    optional: Brought = field(default_factory=Brought)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A run's place in a store. ``open`` is called for each restore, so that any thread can use it; ``url`` and
    ``writer_id`` are for the child that fetches."""

    open: OpenStore
    keys: Keys
    url: str
    writer_id: str


def _silently(_error: RemoteError, _pause: float) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Patience:
    """For so many ``seconds`` a fetch waits for a store that does not answer; ``waiting`` is called each time. 0 leaves
    that to the caller."""

    seconds: float = 0.0
    waiting: Waiting = _silently


class Restorer:
    """``fetcher`` runs the child that fetches."""

    def __init__(
        self,
        store: StorePlace,
        layout: Layout,
        workspace: Workspace,
        journal: Journal,
        fetcher: Fetcher,
        records: RecordFiles,
        *,
        connections: int = 8,
        patience: Patience = Patience(),
    ) -> None:
        self._store, self._keys, self._layout = store, store.keys, layout
        self._workspace, self._journal, self._fetcher = workspace, journal, fetcher
        self._records = records
        self._connections, self._patience = connections, patience
        self._killed = threading.Event()

    # -- what is there ----------------------------------------------------------------------------------------------

    def newest(self, *, exclude: frozenset[int] = frozenset(), step: int | None = None) -> StoredSave | None:
        """The checkpoint that the pointer names, or the next older one with a sound manifest; steps in ``exclude`` are
        passed over. With ``step`` the newest save of that step. None when there is none, without ``step`` also after a
        deliberate fresh start. Raises RemoteError."""
        store = self._store.open()
        try:
            return next((s for s in self._candidates(store, [], step) if s.step not in exclude), None)
        finally:
            store.close()

    def _candidates(self, store: ObjectStore, refused: list[str], step: int | None) -> Iterator[StoredSave]:
        """Best first. Adds the reasons for unusable ones to ``refused``."""
        pointer, named = None, None
        try:
            pointer = newest_pointer(store, self._keys)
            if pointer is not None and pointer.step is None and step is None:
                return
            if pointer is not None and pointer.step is not None:
                named = self._named(store, pointer)
                if step in (None, named.step):
                    yield named
        except IntegrityError as error:
            refused.append(str(error))
        for found in self._manifests(store, step):
            if pointer is not None and pointer.names(found.key, found.file_id):
                continue
            if step is None and named is not None and _age(found) > (named.uploaded_wall, named.step):
                continue  # left behind by a step back: newer, but not to be used
            try:
                save = self._unnamed(store, found)
            except IntegrityError as error:
                refused.append(str(error))
                continue
            if step in (None, save.step):
                yield save

    def _started_afresh(self, store: ObjectStore) -> bool:
        """Whether the pointer deliberately names no checkpoint (`clean`, `start --fresh`)."""
        try:
            pointer = newest_pointer(store, self._keys)
        except IntegrityError:
            return False
        return pointer is not None and pointer.step is None

    def _named(self, store: ObjectStore, pointer: Pointer) -> StoredSave:
        manifest = read_manifest(store, self._keys, pointer)
        found = store.stat(pointer.manifest_key, pointer.manifest_file_id)
        return stored_save(manifest, pointer.ref, found.uploaded_wall if found else 0.0, pointer)

    def _manifests(self, store: ObjectStore, step: int | None) -> list[StoredObject]:
        pattern = re.compile(re.escape(self._keys.root) + r"/step_\d+/[^/]+/manifest\.json")
        prefix = f"{self._keys.root}/step_" + ("" if step is None else f"{step}/")
        found = [o for o in store.list(prefix) if o.ours is not False and pattern.fullmatch(o.key)]
        return sorted(found, key=_age, reverse=True)

    def _unnamed(self, store: ObjectStore, found: StoredObject) -> StoredSave:
        where = f"{store.url}/{found.key}"
        data = store.get_bytes(found.key, found.file_id)
        if data is None:
            raise SaveGone("the manifest is not in the store any more", where=where)
        step, save_id = found.key.split("/")[-3:-1]
        manifest = checked_manifest(self._keys, data, int(step.removeprefix("step_")), save_id, where=where)
        ref = ManifestRef(found.key, found.file_id, sha1_hex(data), len(data))
        return stored_save(manifest, ref, found.uploaded_wall)

    # -- bringing it here -------------------------------------------------------------------------------------------

    def fetch(
        self,
        step: int | None = None,
        *,
        to: Path | None = None,
        progress: RestoreProgress | None = None,
        all_parts: bool = False,
    ) -> RestoreReport:
        """Put the newest whole checkpoint (or that of ``step``) in place, or below ``to`` as ``<to>/<part>/...``.

        If a checkpoint is damaged, the next older one is used; if it is removed during the fetch, the newer one that
        replaced it. Raises RemoteError when none is whole, HostError for trouble on this pod. ``all_parts``: also the
        optional parts, where they are whole.
        """
        store = self._store.open()
        refused: list[str] = []
        tried: set[ManifestRef | None] = set()
        try:
            while True:
                notes: list[str] = []
                save = next((s for s in self._candidates(store, notes, step) if s.ref not in tried), None)
                refused += [n for n in notes if n not in refused]
                if save is None:
                    what = f"no whole checkpoint{'' if step is None else f' of step {step}'} is in the store"
                    fix = "`podwatch store ls` lists the checkpoints in the store"
                    if step is None and self._started_afresh(store):
                        what = "this run was started from the beginning (--fresh) and has not stored a checkpoint since"
                        fix = "`podwatch restore --step N` restores an earlier one; `podwatch store ls` lists them"
                    raise RemoteError(
                        what + (f" ({'; '.join(refused)})" if refused else ""),
                        where=f"{store.url}/{self._keys.root}",
                        fix=fix,
                        transient=False,
                    )
                tried.add(save.ref)
                try:
                    report = self._bring(save, to, progress, tuple(refused))
                except IntegrityError as error:
                    refused.append(f"step {save.step}: {error}")
                else:
                    return replace(report, optional=self._beside(store, save, to)) if all_parts else report
        except OSError as error:
            raise HostError(
                f"the restore cannot write here: {error.strerror or error}",
                where=str(error.filename or to or self._workspace.staging),
                fix=self._workspace.foreign_owners([Path(error.filename or self._workspace.staging)])[1]
                or "free space or correct the permissions, then restore again; it continues from there",
            ) from error
        finally:
            store.close()

    def _bring(
        self,
        save: StoredSave,
        to: Path | None,
        progress: RestoreProgress | None,
        refused: tuple[str, ...],
    ) -> RestoreReport:
        manifest, ref = save.content, save.ref
        assert ref is not None
        if self._layout.name != manifest.layout and to is None:
            raise HostError(
                f"step {save.step} was saved with the layout {manifest.layout!r}, this run has {self._layout.name!r}",
                where="[trainer] layout",
                fix="correct the layout, or restore into another directory with --to DIR",
            )
        files = manifest.files
        parts = by_part(files)
        check_links(manifest.files, manifest.symlinks)
        for link in manifest.symlinks:
            parts.setdefault(link.part, [])
        if to is None:
            self._layout.expect_parts(parts)
        targets = {part: self._target(part, save.step, to) for part in parts}
        placer = self._staging(to)
        name = f"restore-{save.step}-{save.save_id}-{ref.sha1[:8]}"
        with placer.alone() as lock:
            placer.forget_others(name)
            places = placer.homes(targets, frozenset(parts) & self._layout.shared_parts if to is None else frozenset())
            job = self._job(
                placer.tree,
                step=save.step,
                part_size=manifest.part_size,
                files=files,
                symlinks=manifest.symlinks,
                staging={part: str(place.home / name) for part, place in places.items()},
                targets={part: str(target) for part, target in targets.items()},
            )
            intent = self._intent(save, job)
            try:
                total = sum(f.size for f in files)
                done = self._fetch_patiently(job, lambda here: progress(here, total) if progress else None, lock)
                for part in sorted(done.staged, key=lambda p: (any(is_marker(f.path) for f in parts[p]), p)):
                    placer.put(places[part], name, save.step, manifest.lineage)
                placer.clean(places, name)
            except IntegrityError as error:
                placer.forget(places, name)  # never complete: another checkpoint needs the space
                self._journal.settle(intent.id, IntentState.FAILED, error.what)
                raise
            except PodwatchError as error:
                self._journal.settle(intent.id, IntentState.FAILED, error.what)
                raise
            if to is None:
                self._note(save, manifest)
                # Without its tracker a checkpoint counts as unfinished; a tracker that names a step is the trainer's.
                repair_trackers(self._layout.trackers(save.step), self._workspace.tree, only_missing=True)
            self._journal.settle(intent.id, IntentState.DONE)
        if progress is not None:
            progress(total, total)
        return RestoreReport(
            save.step,
            save.save_id,
            manifest.lineage,
            tuple(str(targets[p]) for p in sorted(parts)),
            total,
            done.downloaded,
            tuple(placer.set_aside),
            refused,
            manifest.train_command,
        )

    def _staging(self, to: Path | None) -> StagingArea:
        if to is None:
            self._workspace.check()
        return StagingArea(self._workspace, to)

    def _job(self, tree: PinnedTree, **fields: Any) -> FetchJob:
        """Call when all staging directories exist. Raises RootReplaced."""
        known = features_of(self._journal, self._store.url)
        return FetchJob(
            store=self._store.url,
            writer_id=self._store.writer_id,
            pins=tree.pins(),
            rights=tree.rights,
            features=known,
            **fields,
            connections=self._connections,
        )

    def _beside(self, store: ObjectStore, save: StoredSave, to: Path | None) -> Brought:
        place = self._staging(to)
        return bring_optional(
            store, self._keys, self._layout, save.content, place, to, _PartFetch(self, save.step, place.tree)
        )

    def fetch_part(self, part: Part, *, step: int, tree: PinnedTree) -> Fetched:
        """Fetch one optional part into its staging directory."""
        job = self._job(
            tree,
            step=step,
            part_size=part.part_size,
            files=part.files,
            symlinks=part.symlinks,
            staging={part.name: str(part.staging)},
            targets={part.name: str(part.target)},
        )
        return self._fetch_patiently(job, lambda _here: None, part.lock)

    def kill(self) -> None:
        """End a running fetch, from any thread; the next one continues from there."""
        self._killed.set()
        self._fetcher.kill()

    def _fetch_patiently(self, job: FetchJob, told: Progress, lock: int) -> Fetched:
        """Fetch through outages: staged bytes stay, so each try continues the one before."""
        self._killed.clear()
        before, last, waited = 0, 0, 0.0

        def heard(here: int, downloaded: int) -> None:
            nonlocal last
            last = downloaded
            told(here)

        while True:
            try:
                done = self._fetcher.fetch(job, heard, (lock,))
                return Fetched(done.staged, before + done.downloaded)
            except IntegrityError:
                raise
            except RemoteError as error:
                waited = 0.0 if last else waited  # bytes arrived: this is a new outage
                pause = min(60.0, max(5.0, waited))
                if not error.transient or waited + pause > self._patience.seconds:
                    raise
                self._patience.waiting(error, pause)
            before, last, waited = before + last, 0, waited + pause
            if self._killed.wait(pause):
                raise HostError("the restore was stopped", where=f"step {job.step}", fix="the next one continues there")

    def _intent(self, save: StoredSave, job: FetchJob) -> Intent:
        """The intent that a killed restore of this checkpoint left open, or a new one."""
        staging, targets = (tuple(sorted(set(paths.values()))) for paths in (job.staging, job.targets))
        for intent in self._journal.open_intents(IntentKind.RESTORE):
            if (begun := StoreIntent.kept(intent.data)) is not None and begun.staging == staging:
                return intent
        data = StoreIntent(save.step, save.save_id, staging=staging, targets=targets).to_json()
        return self._journal.open_intent(IntentKind.RESTORE, data)

    def _target(self, part: str, step: int, to: Path | None) -> Path:
        if not _PART.match(part):
            raise IntegrityError("the manifest names an impossible part", where=repr(part)[:80])
        if to is not None:
            return to / part
        try:
            return self._layout.part_dir(part, step)
        except (KeyError, ValueError):
            raise IntegrityError(f"layout {self._layout.name!r} has no part {part!r}", where="manifest.json") from None

    def _note(self, save: StoredSave, manifest: Manifest) -> None:
        """Record the checkpoint as this run's, and as stored: it must not be sent again (its mtimes are restored, so
        its id is equal). Keep its W&B ids, if they are valid ids: a new pod knows no others."""
        with contextlib.suppress(OSError):  # it is then like a save of nobody that podwatch knows
            self._records.write(self._record(save, manifest))
        self._journal.learn(FROM_STORE, dict(save.wandb))
        if any((p.step, p.save_id) == save.key for p in self._journal.published()):
            return
        assert save.ref is not None
        self._journal.note_published(
            PublishedSave(
                step=save.step,
                save_id=save.save_id,
                lineage=save.lineage,
                generation=save.generation,
                seq=save.seq,
                manifest_key=save.ref.key,
                manifest_file_id=save.ref.file_id,
                manifest_sha1=save.ref.sha1,
                manifest_size=save.ref.size,
                total_bytes=save.total_bytes,
                wall=save.uploaded_wall,
                restored=True,
            )
        )

    def _record(self, save: StoredSave, manifest: Manifest) -> CheckpointRecord:
        needed = {p.name for p in self._layout.steps().get(save.step, ()) if p.required}
        files = [f for f in manifest.files if f.part in needed]
        return CheckpointRecord(
            save.step,
            save.save_id,
            self._layout.name,
            boot_id(),
            tuple(RecordedFile(f.part, f.path.removeprefix(f"{f.part}/"), f.size, f.mtime_ns) for f in files),
            max((f.mtime_ns for f in files), default=0) / 1e9,
            {part: sum(f.size for f in few) for part, few in by_part(manifest.files).items()},
            len(manifest.files),
            source=RecordSource.RESTORED,
        )


@dataclass(frozen=True, slots=True)
class _PartFetch:
    """Fetches the optional parts of one checkpoint."""

    restorer: Restorer
    step: int
    tree: PinnedTree

    def fetch(self, part: Part) -> Fetched:
        return self.restorer.fetch_part(part, step=self.step, tree=self.tree)
