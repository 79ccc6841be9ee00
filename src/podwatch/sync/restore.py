"""Restore: find a whole save in the store, fetch and verify it, put it where the trainer expects it.

Blocking: for a thread or the command line. Nothing from the store is trusted (fetching.py, publish.checked_manifest);
``train_command`` in a manifest is only ever shown.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layouts.base import Layout
from podwatch.domain.errors import HostError, IntegrityError, PodwatchError, RemoteError
from podwatch.domain.intent import Intent, IntentKind, IntentState
from podwatch.domain.remote import Keys, Manifest, ManifestFile, Pointer, sha1_hex
from podwatch.journal.journal import Journal
from podwatch.journal.records import PublishedSave
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.sync.fetching import Stager, by_part, check_link, is_marker, same_file
from podwatch.sync.publish import SaveGone, checked_manifest, published_from, read_manifest, read_pointer
from podwatch.system.files import fsync_dir, rename_noreplace
from podwatch.system.workspace import Workspace

RestoreProgress = Callable[[int, int], None]
"""(bytes verified so far, bytes in all)."""
_PART = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


@dataclass(frozen=True, slots=True)
class RemoteSave:
    """One save in the store, its manifest checked. ``pointer`` is set for the one that latest.json names."""

    step: int
    save_id: str
    manifest: Manifest
    manifest_key: str
    manifest_file_id: str
    manifest_sha1: str
    manifest_size: int
    uploaded_wall: float
    pointer: Pointer | None = None


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """``parts`` are the directories now in place; ``set_aside`` went into quarantine; ``refused`` says which saves
    were passed over and why."""

    step: int
    save_id: str
    lineage: str
    parts: tuple[str, ...]
    total_bytes: int
    downloaded_bytes: int
    set_aside: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    train_command: tuple[str, ...] = ()


class Restorer:
    """``store_factory`` opens the store anew for each call, so that it may be used from any thread."""

    def __init__(
        self,
        store_factory: Callable[[], ObjectStore],
        keys: Keys,
        layout: Layout,
        workspace: Workspace,
        journal: Journal,
        *,
        connections: int = 4,
    ) -> None:
        self._open, self._keys, self._layout = store_factory, keys, layout
        self._workspace, self._journal, self._connections = workspace, journal, connections

    # -- what is there ----------------------------------------------------------------------------------------------

    def newest(self, *, exclude: frozenset[int] = frozenset()) -> RemoteSave | None:
        """The save the pointer names, or the next older one whose manifest is sound; steps in ``exclude`` are passed
        over. None when there is none, also after a deliberate fresh start. Raises RemoteError."""
        store = self._open()
        try:
            return next((s for s in self._candidates(store, [], None) if s.step not in exclude), None)
        finally:
            store.close()

    def _candidates(self, store: ObjectStore, refused: list[str], step: int | None) -> Iterator[RemoteSave]:
        """Best first. What cannot be used is told in ``refused``."""
        pointer, named = None, None
        try:
            pointer = read_pointer(store, self._keys)
            if pointer is not None and pointer.step is None and step is None:
                return
            if pointer is not None and pointer.step is not None:
                named = self._named(store, pointer)
                if step in (None, named.step):
                    yield named
        except IntegrityError as error:
            refused.append(str(error))
        for found in self._manifests(store):
            if pointer is not None and (found.key, found.file_id) == (pointer.manifest_key, pointer.manifest_file_id):
                continue
            if step is None and named is not None and found.uploaded_wall > named.uploaded_wall:
                continue  # left behind by a step back: newer, but not wanted
            try:
                save = self._unnamed(store, found)
            except IntegrityError as error:
                refused.append(str(error))
                continue
            if step in (None, save.step):
                yield save

    def _named(self, store: ObjectStore, pointer: Pointer) -> RemoteSave:
        manifest = read_manifest(store, self._keys, pointer)
        found = store.stat(pointer.manifest_key, pointer.manifest_file_id)
        return RemoteSave(
            manifest.step,
            manifest.save_id,
            manifest,
            pointer.manifest_key,
            pointer.manifest_file_id,
            pointer.manifest_sha1,
            pointer.manifest_size,
            found.uploaded_wall if found else 0.0,
            pointer,
        )

    def _manifests(self, store: ObjectStore) -> list[StoredObject]:
        pattern = re.compile(re.escape(self._keys.root) + r"/step_\d+/[^/]+/manifest\.json")
        found = [o for o in store.list(f"{self._keys.root}/step_") if o.ours and pattern.fullmatch(o.key)]
        return sorted(found, key=lambda o: o.uploaded_wall, reverse=True)

    def _unnamed(self, store: ObjectStore, found: StoredObject) -> RemoteSave:
        where = f"{store.url}/{found.key}"
        data = store.get_bytes(found.key, found.file_id)
        if data is None:
            raise SaveGone("manifest is not in the store any more", where=where)
        step, save_id = found.key.split("/")[-3:-1]
        manifest = checked_manifest(self._keys, data, int(step.removeprefix("step_")), save_id, where=where)
        return RemoteSave(
            manifest.step, save_id, manifest, found.key, found.file_id, sha1_hex(data), len(data), found.uploaded_wall
        )

    # -- bringing it here -------------------------------------------------------------------------------------------

    def fetch(
        self, step: int | None = None, *, to: Path | None = None, progress: RestoreProgress | None = None
    ) -> RestoreReport:
        """Put the newest whole save (or that of ``step``) in place, or below ``to`` as ``<to>/<part>/...``.

        A save that turns out damaged is passed over for the next older one; one that is removed while it is fetched,
        for the newer one that replaced it. Raises RemoteError when none is whole, HostError for trouble on this pod.
        """
        store = self._open()
        refused: list[str] = []
        tried: set[tuple[str, str]] = set()
        try:
            while True:
                notes: list[str] = []
                save = next(
                    (s for s in self._candidates(store, notes, step) if (s.manifest_key, s.manifest_sha1) not in tried),
                    None,
                )
                refused += [n for n in notes if n not in refused]
                if save is None:
                    what = "no whole checkpoint in the store" if step is None else f"step {step} is not in the store"
                    raise RemoteError(
                        what + (f" ({'; '.join(refused)})" if refused else ""),
                        where=f"{store.url}/{self._keys.root}",
                        fix="podwatch store ls shows what is there",
                        transient=False,
                    )
                tried.add((save.manifest_key, save.manifest_sha1))
                try:
                    return self._bring(store, save, to, progress, tuple(refused))
                except IntegrityError as error:
                    refused.append(f"step {save.step}: {error}")
        except OSError as error:
            raise HostError(
                f"restore cannot write here: {error.strerror or error}",
                where=str(error.filename or to or self._workspace.staging),
                fix="make room or correct the rights, then restore again: it goes on where it was",
            ) from error
        finally:
            store.close()

    def _bring(
        self,
        store: ObjectStore,
        save: RemoteSave,
        to: Path | None,
        progress: RestoreProgress | None,
        refused: tuple[str, ...],
    ) -> RestoreReport:
        manifest = save.manifest
        if self._layout.name != manifest.layout and to is None:
            raise HostError(
                f"save of step {save.step} has the layout {manifest.layout!r}, this run {self._layout.name!r}",
                where="[trainer] layout",
                fix="correct the layout, or restore with --to DIR",
            )
        parts = by_part(manifest.files)
        for link in manifest.symlinks:
            check_link(link)
            parts.setdefault(link.part, [])
        if to is None:
            self._layout.expect_parts(parts)
        targets = {part: self._target(part, save.step, to) for part in parts}
        wanted = [p for p in parts if not self._in_place(targets[p], parts[p], manifest.part_size)]
        staging = (to / ".podwatch-staging" if to else self._workspace.staging) / (
            f"restore-{save.step}-{save.save_id}-{save.manifest_sha1[:8]}"
        )
        intent = self._intent(save, staging, targets)
        total = manifest.total_bytes
        here = sum(f.size for p in parts if p not in wanted for f in parts[p])
        stager = Stager(
            store,
            staging,
            part_size=manifest.part_size,
            owner=_owner(to or self._workspace.output_dir),
            progress=lambda done: progress(here + done, total) if progress else None,
        )
        set_aside: list[str] = []
        try:
            self._check_room(staging, [f for p in wanted for f in parts[p]])
            if wanted:
                files = [f for p in wanted for f in parts[p]]
                links = [x for x in manifest.symlinks if x.part in wanted]
                stager.fetch(files, links, connections=self._connections)
            for part in sorted(wanted, key=lambda p: (any(is_marker(f.path) for f in parts[p]), p)):
                set_aside += self._put(staging / part, targets[part], part, save.step, intent)
            if staging.is_dir():
                staging.rmdir()
        except PodwatchError as error:
            self._journal.settle(intent.id, IntentState.FAILED, error.what)
            raise
        if to is None:
            self._note(save)
        self._journal.settle(intent.id, IntentState.DONE)
        return RestoreReport(
            save.step,
            save.save_id,
            manifest.lineage,
            tuple(str(targets[p]) for p in sorted(parts)),
            total,
            stager.downloaded,
            tuple(set_aside),
            refused,
            manifest.train_command,
        )

    def _intent(self, save: RemoteSave, staging: Path, targets: dict[str, Path]) -> Intent:
        """The one a killed restore of this very save left open, or a new one."""
        for intent in self._journal.open_intents(IntentKind.RESTORE):
            if intent.data.get("staging") == str(staging):
                return intent
        data = {"step": save.step, "save_id": save.save_id, "staging": str(staging)}
        return self._journal.open_intent(IntentKind.RESTORE, data | {"targets": [str(t) for t in targets.values()]})

    def _target(self, part: str, step: int, to: Path | None) -> Path:
        if not _PART.match(part):
            raise IntegrityError("manifest names an impossible part", where=repr(part)[:80])
        if to is not None:
            return to / part
        try:
            return self._layout.part_dir(part, step)
        except (KeyError, ValueError):
            raise IntegrityError(f"layout {self._layout.name!r} has no part {part!r}", where="manifest.json") from None

    @staticmethod
    def _in_place(target: Path, files: list[ManifestFile], part_size: int) -> bool:
        return bool(files) and all(same_file(target, f.path.partition("/")[2], f, part_size) for f in files)

    def _check_room(self, staging: Path, files: list[ManifestFile]) -> None:
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        needed = sum(f.size for f in files)
        room = os.statvfs(staging)
        staged = sum(p.lstat().st_blocks * 512 for p in staging.rglob("*") if p.is_file())
        if needed > room.f_bavail * room.f_frsize + staged:
            raise HostError(
                f"not enough room to restore: {needed / 1e9:.1f} GB needed, "
                f"{room.f_bavail * room.f_frsize / 1e9:.1f} GB free",
                where=str(staging),
                fix="make room (podwatch prune), then restore again",
            )

    def _put(self, staged: Path, target: Path, part: str, step: int, intent: Intent) -> list[str]:
        """Rename into place. What is there and differs goes into quarantine first; nothing is written over."""
        aside: list[str] = []
        _make(target.parent, _owner(target))
        try:
            if os.path.lexists(target):
                quarantine = self._workspace.quarantine / f"{intent.id}.restore.step_{step}"
                quarantine.mkdir(parents=True, exist_ok=True)
                rename_noreplace(target, _free_name(quarantine / part))
                fsync_dir(quarantine)
                aside.append(str(target))
            rename_noreplace(staged, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise HostError(
                "restored files cannot be moved into place: another filesystem",
                where=str(target),
                fix="restore with --to a directory on that filesystem and move them yourself",
            ) from error
        fsync_dir(target.parent)
        return aside

    def _note(self, save: RemoteSave) -> None:
        """The set is in the store already: it must not be sent again (its mtimes are restored, so its id is equal)."""
        if any((p.step, p.save_id) == (save.step, save.save_id) for p in self._journal.published()):
            return
        if save.pointer is not None:
            self._journal.note_published(published_from(save.pointer, save.uploaded_wall, restored=True))
            return
        self._journal.note_published(
            PublishedSave(
                step=save.step,
                save_id=save.save_id,
                lineage=save.manifest.lineage,
                generation=0,
                seq=0,
                manifest_key=save.manifest_key,
                manifest_file_id=save.manifest_file_id,
                manifest_sha1=save.manifest_sha1,
                manifest_size=save.manifest_size,
                total_bytes=save.manifest.total_bytes,
                wall=save.uploaded_wall,
                restored=True,
            )
        )


def _make(directory: Path, owner: tuple[int, int] | None) -> None:
    if directory.is_dir():
        return
    _make(directory.parent, owner)
    directory.mkdir(exist_ok=True)
    if owner is not None:
        os.chown(directory, *owner)


def _free_name(path: Path) -> Path:
    name, count = path, 1
    while os.path.lexists(name):
        count += 1
        name = path.with_name(f"{path.name}.{count}")
    return name


def _owner(path: Path) -> tuple[int, int] | None:
    """Restored files belong to whom the directory belongs to; only root can and need change that."""
    if os.geteuid() != 0:
        return None
    for candidate in (path, *path.parents):
        try:
            found = candidate.stat()
        except OSError:
            continue
        return found.st_uid, found.st_gid
    return None
