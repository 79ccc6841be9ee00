"""Removes unneeded objects from the store: old checkpoints, unfinished uploads, superseded versions, checkpoints
without a manifest.

policy/store_retention.py decides; this module removes. Each removal of a checkpoint is an intent, and is finished after
a crash.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from podwatch.config.settings import SyncSettings
from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.intents import StoreIntent
from podwatch.domain.manifest import Keys, Manifest, Pointer
from podwatch.domain.run import Intent, IntentKind, IntentState
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.journal.journal import Journal
from podwatch.policy.store_retention import (
    SUPERSEDED_GRACE_SECONDS,
    Leftover,
    abandoned_uploads,
    earlier_newest,
    judged,
    old_controller_records,
    old_measurements,
    old_probe_uploads,
    old_probes,
    orphaned_saves,
    plan_remote,
    superseded_versions,
)
from podwatch.stores.base import MOST_PROBE_BYTES, NotMarked, ObjectStore, StoredObject, Upload, store_time
from podwatch.sync.interfaces import Lease, RunIdentity
from podwatch.sync.publish_and_pointer import named_by_others, read_pointer
from podwatch.system.clock import Clock

# -- old checkpoints -------------------------------------------------------------------------------------------------
# The manifest is removed before its objects, and only objects of this run.


@dataclass(frozen=True, slots=True)
class RemotePruned:
    """``removed`` are (step, save_id, reason); ``warning``: why nothing more could be removed, if so."""

    removed: tuple[tuple[int, str, str], ...] = ()
    warning: str = ""


class RemoteRetention:
    """Blocking. Never touches a checkpoint that the pointer names at this moment. Before any deletion ``lease`` must
    confirm that this pod still holds it. Whatever the policy decides, the newest checkpoints of the branch that
    ``identity`` continues stay."""

    def __init__(
        self,
        store: ObjectStore,
        keys: Keys,
        journal: Journal,
        sync: SyncSettings,
        clock: Clock,
        identity: RunIdentity,
        lease: Lease,
        pins: Mapping[int, str],
        *,
        grace_seconds: float = SUPERSEDED_GRACE_SECONDS,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._store, self._keys, self._journal, self._sync, self._clock = store, keys, journal, sync, clock
        self._identity, self._lease, self._pins = identity, lease, pins

    def carry_out(self, *, own_generation: int | None = None, earlier: Collection[PublishedSave] = ()) -> RemotePruned:
        """Finish what a crash interrupted, then remove what may be removed; ``earlier`` are the saves of earlier pods.
        Raises RemoteError for store trouble, Superseded when another pod has taken the lease; a key that cannot delete
        is not an error."""
        removed: list[tuple[int, str, str]] = []
        copied: list[int] = []
        era = self._journal.era
        self._journal.refuse_unread(era, "cannot remove checkpoints from the store")
        try:
            self._lease.confirm(self._store)
            for intent in self._journal.open_intents(IntentKind.REMOTE_DELETE):
                if (begun := StoreIntent.kept(intent.data)) is None:
                    self._journal.settle(intent.id, IntentState.FAILED, "it cannot be read; planned again")
                    continue
                if begun.save_id in self._named():
                    self._journal.settle(intent.id, IntentState.UNDONE, "the pointer names it again")
                    continue
                if self._removed(intent, begun.step, begun.save_id, "finished after a restart"):
                    removed.append((begun.step, begun.save_id, begun.reason))
            others = frozenset[str]()
            if own_generation is not None and own_generation > 1:
                # Another pod may have published, and may be restoring what it named.
                others = named_by_others(self._store, self._keys, self._identity.writer_id)
            saves = judged(self._journal.published(), earlier, own_generation)
            plan = plan_remote(
                saves,
                self._named() | others,
                self._pins,
                self._sync,
                self._clock.wall(),
                grace_seconds=self._grace_seconds,
                own_generation=own_generation,
                kept=self._kept(saves) | self._restored_now(),
            )
            for item in plan:
                self._lease.confirm(self._store)
                if item.save_id in self._named():
                    continue
                data = StoreIntent(item.step, item.save_id, item.reason).to_json()
                intent = self._journal.open_intent(IntentKind.REMOTE_DELETE, data, era=era)
                if self._removed(intent, item.step, item.save_id):
                    removed.append((item.step, item.save_id, item.reason))
                else:
                    copied.append(item.step)
        except RemoteError as error:
            if error.transient or isinstance(error, IntegrityError):
                raise
            return RemotePruned(tuple(removed), f"old checkpoints stay in the store: {error.what}")
        steps = ", ".join(map(str, copied[:10])) + (", ..." if len(copied) > 10 else "")
        return RemotePruned(tuple(removed), _COPIED.format(steps) if copied else "")

    def _removed(self, intent: Intent, step: int, save_id: str, note: str = "") -> bool:
        """Remove it and settle the intent. False, and nothing is removed, if its manifest does not carry podwatch's
        mark."""
        try:
            self._remove(step, save_id)
        except RemoteError as error:
            if not error.transient:
                self._journal.settle(intent.id, IntentState.FAILED, error.what)
            if not isinstance(error, NotMarked):
                raise
            return False
        self._journal.settle(intent.id, IntentState.DONE, note)
        return True

    def _kept(self, published: Iterable[PublishedSave]) -> frozenset[tuple[int, str]]:
        identity = self._identity
        return earlier_newest(published, identity.lineage, identity.parent_step) if identity.has_parent else frozenset()

    def _restored_now(self) -> frozenset[tuple[int, str]]:
        """(step, save_id) that are fetched to this pod now, or were when podwatch was killed. Raises IntegrityError for
        one that cannot be read: it could be any."""
        intents = self._journal.open_intents(IntentKind.RESTORE)
        begun = (StoreIntent.from_json(intent.data, where=f"intent {intent.id}") for intent in intents)
        return frozenset((one.step, one.save_id) for one in begun)

    def _named(self) -> frozenset[str]:
        pointer = read_pointer(self._store, self._keys)
        return frozenset() if pointer is None or not pointer.save_id else frozenset({pointer.save_id})

    def _remove(self, step: int, save_id: str) -> None:
        """Remove all our objects below the checkpoint's prefix, its manifest first: a reader must not trust a
        remainder.
        """
        manifest_key = self._keys.manifest(step, save_id)
        known = next((p for p in self._journal.published() if (p.step, p.save_id) == (step, save_id)), None)
        if known is not None:
            self._store.delete(
                StoredObject(manifest_key, known.manifest_size, file_id=known.manifest_file_id, ours=True)
            )
        # With versions, deleting one makes the previous one visible (a part sent twice around a crash).
        for _ in range(100):
            objects = [o for o in self._store.identify(self._store.list(self._keys.save(step, save_id))) if o.ours]
            for item in sorted(objects, key=lambda o: o.key != manifest_key):
                self._store.delete(item)
            if not objects or not self._store.versioned:
                break
        self._journal.forget_save(step, save_id)


_COPIED = (
    "podwatch keeps old checkpoints in the store (step {}), because they do not carry podwatch's mark: another tool"
    " copied this store. Delete them yourself"
)


# -- leftovers -------------------------------------------------------------------------------------------------------
# Listing the store costs a class C call per 1,000 objects, so this is done once a day.

_JSON_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class Swept:
    """``gone`` was removed; ``warning``: why the rest could not be, if so."""

    gone: tuple[Leftover, ...] = ()
    warning: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.gone)


class Sweeper:
    """Blocking. ``live_saves`` are (step, save_id) of checkpoints on this pod that are being uploaded or will be."""

    def __init__(self, store: ObjectStore, keys: Keys, journal: Journal, clock: Clock) -> None:
        self._store, self._keys, self._journal, self._clock = store, keys, journal, clock

    def look(self, live_saves: Collection[tuple[int, str]] = ()) -> tuple[Leftover, ...]:
        """What would be removed. Raises RemoteError; IntegrityError when a pointer or manifest cannot be parsed,
        because the objects that it names are then unknown."""
        root = f"{self._keys.root}/"
        unfinished = list(self._store.unfinished(root))
        versions = [*self._store.versions(root), *self._probes()]
        now = store_time(self._store, self._clock.wall())
        uploads = abandoned_uploads(unfinished, set(self._journal.begun()), now)
        live = {self._keys.save(step, save_id) for step, save_id in live_saves}
        found = self._unneeded(versions, live, now)
        if unknown := [v for v in versions if v.ours is None and any(_covers(item, v) for item in found)]:
            known = {(v.key, v.file_id): v for v in self._store.identify(unknown)}
            gone = {(v.key, v.file_id) for v in unknown} - set(known)
            versions = [known.get((v.key, v.file_id), v) for v in versions if (v.key, v.file_id) not in gone]
            found = self._unneeded(versions, live, now)
        return (*uploads, *self._probe_uploads(now), *found)

    def _probe_uploads(self, now: float) -> list[Leftover]:
        """Those that have only parts as small as a trial's: a name alone is no proof."""
        found = []
        try:
            unfinished = list(self._store.unfinished(self._keys.probes))
            for item in old_probe_uploads(unfinished, self._keys.outside, now):
                parts = self._store.parts_there(Upload(item.key, item.identifier))
                if parts is not None and all(part.size <= MOST_PROBE_BYTES for part in parts.values()):
                    found.append(item)
        except RemoteError as error:
            if error.transient:
                raise
        return found

    def _probes(self) -> list[StoredObject]:
        """They are outside the run's own prefix, where a key that is limited to the run cannot list."""
        try:
            return list(self._store.versions(self._keys.probes))
        except RemoteError as error:
            if error.transient:
                raise
            return []

    def _unneeded(self, versions: list[StoredObject], live: Collection[str], now: float) -> tuple[Leftover, ...]:
        saves = orphaned_saves(versions, self._saves(versions), live, now)
        twice = _names_with_several(versions)
        old = superseded_versions(versions, self._named(versions, twice), now) if twice else ()
        records = old_controller_records(versions, self._keys.controller, now)
        probes = old_probes(versions, self._keys.outside, now)
        measured = old_measurements(versions, self._keys.measurements, now)
        single = {(v.key, v.identifier): v for v in (*old, *records, *probes, *measured)}
        return (*saves, *(v for v in single.values() if not any(v.key.startswith(s.key) for s in saves)))

    def carry_out(self, live_saves: Collection[tuple[int, str]] = ()) -> Swept:
        """Remove it. A key that cannot delete is not an error, and can still cancel uploads."""
        gone: list[Leftover] = []
        era = self._journal.era
        for item in self.look(live_saves):
            self._journal.refuse_unread(era, "cannot clean up the store")
            try:
                self._remove(item, era)
            except RemoteError as error:
                if error.transient:
                    raise
                return Swept(tuple(gone), f"unneeded objects stay in the store: {error.what}")
            gone.append(item)
        return Swept(tuple(gone))

    def _remove(self, item: Leftover, era: int) -> None:
        if item.what == "upload":
            self._store.cancel_large(Upload(item.key, item.identifier))
        elif item.what == "version":
            self._store.delete(StoredObject(item.key, item.size_bytes, file_id=item.identifier, ours=True))
        else:
            self._remove_save(item, era)

    def _remove_save(self, item: Leftover, era: int) -> None:
        match = re.fullmatch(r"step_(\d+)/([^/]+)/", item.key.removeprefix(f"{self._keys.root}/"))
        if match is None:
            return
        data = StoreIntent(int(match[1]), match[2], item.reason).to_json()
        intent = self._journal.open_intent(IntentKind.REMOTE_DELETE, data, era=era)
        try:
            for version in list(self._store.versions(item.key)):
                if version.key == f"{item.key}manifest.json":  # it was written while we looked
                    self._journal.settle(intent.id, IntentState.UNDONE, "its manifest was written meanwhile")
                    return
                self._store.delete(version)
        except RemoteError as error:
            if not error.transient:
                self._journal.settle(intent.id, IntentState.FAILED, error.what)
            raise
        self._journal.settle(intent.id, IntentState.DONE)

    # -- looking ------------------------------------------------------------------------------------------------------

    def _saves(self, versions: list[StoredObject]) -> dict[str, str]:
        inside = re.compile(re.escape(self._keys.root) + r"/step_\d+/[^/]+/")
        return {v.key: m.group() for v in versions if (m := inside.match(v.key)) is not None}

    def _named(self, versions: list[StoredObject], twice: Collection[str]) -> set[str]:
        """File ids that any manifest or any version of the pointer names; read only for names with several versions."""
        named: set[str] = set()
        for version in versions:
            if version.key == self._keys.latest:
                named.add(self._pointer(version).manifest_file_id)
            elif version.key.endswith(("/manifest.json", "/optional.json")) and any(
                k.startswith(f"{version.key.rpartition('/')[0]}/") for k in twice
            ):
                named.update(f.file_id for f in self._manifest(version).files)
        return named - {""}

    def _pointer(self, version: StoredObject) -> Pointer:
        return Pointer.from_bytes(self._read(version), where=f"{self._store.url}/{version.key}")

    def _manifest(self, version: StoredObject) -> Manifest:
        return Manifest.from_bytes(self._read(version), where=f"{self._store.url}/{version.key}")

    def _read(self, version: StoredObject) -> bytes:
        data = self._store.get_bytes(version.key, version.file_id, limit=_JSON_LIMIT)
        if data is None:
            raise IntegrityError("the object was removed while read", where=f"{self._store.url}/{version.key}")
        return data


def _covers(item: Leftover, version: StoredObject) -> bool:
    return version.key.startswith(item.key) if item.what == "save" else version.key == item.key


def _names_with_several(versions: list[StoredObject]) -> set[str]:
    seen, several = set[str](), set[str]()
    for version in versions:
        (several if version.key in seen else seen).add(version.key)
    return several


def told(swept: Swept) -> str:
    """One line for the log."""
    kinds = [i.what for i in swept.gone]
    parts = [f"{kinds.count(k)} {k}{'s' if kinds.count(k) > 1 else ''}" for k in dict.fromkeys(kinds)]
    return f"removed unneeded objects from the store: {', '.join(parts)}"
