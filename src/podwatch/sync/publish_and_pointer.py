"""Publish a checkpoint: verify every object by id, write the manifest, then move the pointer, ``latest.json``
(docs/sync.md).

Blocking; runs in a thread of the daemon. An intent is journaled before each write to the store. After a crash
``recover`` checks the store's real state, confirms that this pod still holds the lease, and finishes or undoes.
"""

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from podwatch.domain.errors import IntegrityError, RemoteError, SaveGone
from podwatch.domain.intents import PublishIntent
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, ManifestRef, Pointer, Proof, sha1_hex
from podwatch.domain.run import Intent, IntentKind, IntentState
from podwatch.domain.safe_names import valid_run_id
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.journal.journal import Journal
from podwatch.policy.who_holds_the_run import next_pointer
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.stores.fenced_writes import put_before, replace_before
from podwatch.sync.interfaces import Lease, RunIdentity, RunSource, rfc3339
from podwatch.sync.lease.protocol import LeaseClock
from podwatch.sync.lease.protocol import Superseded as Superseded

_POINTER_LIMIT, _OPTIONAL_LIMIT = 1 << 20, 64 << 20
SEQ, LAST = "sync.seq", "sync.pointer"
"""Journal keys: the highest seq and the last pointer that this writer has published."""
POINTER_VERSIONS = 50
"""Versions of the pointer that are read at most to find the best one; a daily sweep removes the old ones."""


class ObjectsMissing(IntegrityError):  # noqa: N818
    """Objects that the journal records as stored are missing or different in the store. ``paths`` names them."""

    def __init__(self, paths: Sequence[str], *, where: str) -> None:
        super().__init__(
            f"{len(paths)} uploaded object(s) are missing or different in the store",
            where=where,
            fix="podwatch sends them again",
        )
        self.paths = tuple(paths)


def read_pointer(store: ObjectStore, keys: Keys) -> Pointer | None:
    """None if there is none. Raises IntegrityError for one that cannot be parsed, which is never overwritten."""
    return pointer_as_stored(store, keys)[0]


def pointer_as_stored(store: ObjectStore, keys: Keys) -> tuple[Pointer | None, StoredObject | None]:
    """The same, and the object that holds it: what a conditional write replaces."""
    found = store.read(keys.latest, limit=_POINTER_LIMIT)
    if found is None:
        return None, None
    where = f"{store.url}/{keys.latest}"
    pointer = Pointer.from_bytes(found[1], where=where)
    if pointer.run_id != keys.run_id:
        known = valid_run_id(pointer.run_id)
        raise IntegrityError(
            f"the pointer belongs to {f'run {pointer.run_id}' if known else 'another run'}",
            where=where,
            fix=f"if this is a copy of that run, rename its directory to {pointer.run_id}" if known else "",
        )
    return _here(pointer, keys), found[0]


def _here(pointer: Pointer, keys: Keys) -> Pointer:
    """In a store that was copied from below another prefix, the file ids are those of the other store. What is read
    instead is named by this run's own keys, and judged by the same hash."""
    if pointer.step is None or not keys.copied(pointer.manifest_key, keys.manifest(pointer.step, pointer.save_id)):
        return pointer
    return replace(pointer, manifest_key=keys.manifest(pointer.step, pointer.save_id), manifest_file_id="")


def newest_pointer(store: ObjectStore, keys: Keys) -> Pointer | None:
    """For readers: the highest (generation, seq) of all versions of the pointer, because a pod that was frozen in the
    middle of a write may have set the name back for a minute (docs/two-pods.md). One listing, where there are
    versions. Raises as ``read_pointer`` does."""
    newest = read_pointer(store, keys)
    if newest is None or not store.versioned:
        return newest
    named = (v for v in store.versions(keys.latest) if v.key == keys.latest and v.ours is not False)
    versions = [v for v in store.identify(islice(named, POINTER_VERSIONS)) if v.ours]
    for version in versions[1:] if len({v.writer_id for v in versions}) > 1 else ():
        data = store.get_bytes(version.key, version.file_id, limit=_POINTER_LIMIT)
        try:
            found = _here(Pointer.from_bytes(data), keys) if data is not None else None
        except IntegrityError:
            continue
        if found is not None and found.run_id == keys.run_id and found.order > newest.order:
            newest = found
    return newest


def named_by_others(store: ObjectStore, keys: Keys, writer_id: str) -> frozenset[str]:
    """Save ids that any version of the pointer by another writer names: a restoring pod may be reading them."""
    named = set()
    versions = (v for v in store.versions(keys.latest) if v.key == keys.latest) if store.versioned else ()
    for version in store.identify(versions):
        if version.writer_id == writer_id:
            continue
        data = store.get_bytes(version.key, version.file_id, limit=_POINTER_LIMIT)
        try:
            named.add(Pointer.from_bytes(data).save_id if data is not None else "")
        except IntegrityError:
            continue
    return frozenset(named - {""})


def read_manifest(store: ObjectStore, keys: Keys, pointer: Pointer) -> Manifest:
    """The manifest that a pointer names, checked against the pointer and its own place. Raises IntegrityError, SaveGone
    when it is not there."""
    where = f"{store.url}/{pointer.manifest_key}"
    if pointer.step is None or pointer.manifest_key != keys.manifest(pointer.step, pointer.save_id):
        raise IntegrityError("the pointer names a manifest outside its run", where=f"{store.url}/{keys.latest}")
    data = store.get_bytes(pointer.manifest_key, pointer.manifest_file_id)
    if data is None:
        raise SaveGone("the manifest is not in the store", where=where)
    if len(data) != pointer.manifest_size or not hmac.compare_digest(sha1_hex(data), pointer.manifest_sha1):
        raise IntegrityError("the manifest is not the one that the pointer names", where=where)
    return checked_manifest(keys, data, pointer.step, pointer.save_id, where=where)


def checked_manifest(keys: Keys, data: bytes, step: int, save_id: str, *, where: str) -> Manifest:
    """Parse, and refuse a manifest that names objects outside its own checkpoint (promise 9). In a store that was
    copied from below another prefix, the names become those of this one, without file ids."""
    manifest = Manifest.from_bytes(data, where=where)
    if (manifest.run_id, manifest.step, manifest.save_id) != (keys.run_id, step, save_id):
        raise IntegrityError("the manifest belongs to another checkpoint", where=where)
    manifest = replace(manifest, files=tuple(_file_here(file, keys, step, save_id) for file in manifest.files))
    for file in manifest.files:
        if not file.path.startswith(f"{file.part}/") or file.key != keys.data(step, save_id, file.path):
            raise IntegrityError("the manifest names an object outside its checkpoint", where=where)
    for link in manifest.symlinks:
        if not link.path.startswith(f"{link.part}/"):
            raise IntegrityError("the manifest names a link outside its part", where=where)
    return manifest


def _file_here(file: ManifestFile, keys: Keys, step: int, save_id: str) -> ManifestFile:
    here = keys.data(step, save_id, file.path)
    return replace(file, key=here, file_id="") if keys.copied(file.key, here) else file


def read_optional(store: ObjectStore, keys: Keys, step: int, save_id: str) -> Manifest | None:
    """``optional.json`` beside a checkpoint's manifest: the stored parts that a resume does not need. None if there is
    none. Raises IntegrityError if it cannot be used, RemoteError for store trouble.

    It is a manifest of its own, in the same form, so that ``manifest.json`` and the pointer stay as they were
    published. A store without versions can replace one file at a time: a rewritten manifest would, for a moment, not
    match the pointer. A podwatch that does not know ``optional.json`` restores the rest as always.
    """
    key = keys.optional(step, save_id)
    data = store.get_bytes(key, limit=_OPTIONAL_LIMIT)
    return None if data is None else checked_manifest(keys, data, step, save_id, where=f"{store.url}/{key}")


class Publisher:
    """One per opened store. ``run`` is asked at every publication: lineage and W&B ids may have changed."""

    def __init__(
        self, store: ObjectStore, keys: Keys, journal: Journal, run: RunSource, clock: LeaseClock, lease: Lease
    ) -> None:
        self.store, self.keys = store, keys
        self._journal, self._run, self._clock, self._lease = journal, run, clock, lease

    # -- publishing -------------------------------------------------------------------------------------------------

    def publish(self, manifest: Manifest, *, move_pointer: bool = True) -> PublishedSave:
        """Raises ObjectsMissing, Superseded or RemoteError; readers see nothing before the very last write.

        ``move_pointer=False`` keeps an older checkpoint in the store without making it the newest.
        """
        self._own(self._current())
        manifest = replace(manifest, proof=self._verify(manifest.files, manifest.part_size))
        named = self._put_manifest(manifest)
        if move_pointer:
            pointer = self._move(manifest, named)
        else:
            current = self._current()
            pointer = _pointer_for(
                manifest, named, self._run.identity(), *(current.order if current else (0, 0)), self._clock.wall()
            )
        return self._note(pointer, restored=False)

    def repoint(self, save: PublishedSave | None) -> None:
        """Make an older checkpoint the newest, as after a step back; None names no checkpoint (a deliberate fresh
        start).
        """
        if save is None:
            self._move(None, None)
            return
        named = save.ref
        manifest = self._read_named(named, save.step, save.save_id)
        self._verify(manifest.files, manifest.part_size)
        self._note(self._move(manifest, named), restored=save.restored)

    def _current(self) -> Pointer | None:
        return read_pointer(self.store, self.keys)

    def _own(self, current: Pointer | None) -> tuple[int, int, float]:
        """The next (generation, seq) and the boottime until which the write may be sent, or Superseded."""
        generation, until = self._lease.confirm(self.store)
        decision = next_pointer(
            current,
            writer_id=self._run.identity().writer_id,
            generation=generation,
            own_seq=int(self._journal.learned(SEQ, 0)),
        )
        if not decision.ok:
            raise Superseded(
                f"another pod holds this run's lease: {decision.reason}",
                where=f"{self.store.url}/{self.keys.latest}",
                fix="stop training here, or take the lease over: podwatch run --take-over",
            )
        return decision.generation, decision.seq, until

    def _verify(self, files: Sequence[ManifestFile], part_size: int) -> Proof:
        """Raises ObjectsMissing. Returns how the bytes are known: where the store cannot show it, they were read back
        before the journal recorded them as stored."""
        found = [in_store(self.store, f, part_size) for f in files]
        if broken := [f.path for f, proof in zip(files, found, strict=True) if proof is None]:
            raise ObjectsMissing(broken, where=self.store.url)
        return proof_of(found)

    def _put_manifest(self, manifest: Manifest) -> ManifestRef:
        key = self.keys.manifest(manifest.step, manifest.save_id)
        if (reused := self._reusable(key, manifest)) is not None:
            return reused
        data = manifest.to_bytes()
        named = ManifestRef(key, "", sha1_hex(data), len(data))
        intent = self._journal.open_intent(IntentKind.PUBLISH, PublishIntent(manifest.step).to_json())
        stored = self.store.put_bytes(key, data)
        named = ManifestRef(key, stored.file_id, named.sha1, named.size)
        self._read_named(named, manifest.step, manifest.save_id)
        self._journal.settle(intent.id, IntentState.DONE, stored.file_id)
        return named

    def _reusable(self, key: str, manifest: Manifest) -> ManifestRef | None:
        """A manifest of ours from before a crash, if it lists exactly the same files."""
        there = self.store.read(key)
        if there is None or not there[0].ours:
            return None
        found, data = there
        try:
            old = checked_manifest(self.keys, data, manifest.step, manifest.save_id, where=key)
        except IntegrityError:
            return None
        same = (old.files, old.symlinks, old.lineage, old.part_size) == (
            manifest.files,
            manifest.symlinks,
            manifest.lineage,
            manifest.part_size,
        )
        return ManifestRef(key, found.file_id, sha1_hex(data), len(data)) if same else None

    def _read_named(self, named: ManifestRef, step: int, save_id: str) -> Manifest:
        where = f"{self.store.url}/{named.key}"
        data = self.store.get_bytes(named.key, named.file_id)
        if data is None:
            raise RemoteError("the manifest is not in the store", where=where, fix="podwatch tries again")
        if sha1_hex(data) != named.sha1 or len(data) != named.size:
            raise IntegrityError("the store returns a different manifest than podwatch wrote", where=where)
        return checked_manifest(self.keys, data, step, save_id, where=where)

    def _move(self, manifest: Manifest | None, named: ManifestRef | None) -> Pointer:
        era = self._journal.era
        current, stored = pointer_as_stored(self.store, self.keys)
        generation, seq, until = self._own(current)
        pointer = _pointer_for(manifest, named, self._run.identity(), generation, seq, self._clock.wall())
        return self._write(pointer, until, stored, era)

    def _write(self, pointer: Pointer, until: float, before: StoredObject | None, era: int) -> Pointer:
        """``before``: the stored pointer that this one was derived from. Where the store can, only that one is
        replaced, so that a writer that was frozen meanwhile cannot set the pointer back. ``era``: the journal's at that
        time."""
        data = pointer.to_bytes()
        intended = PublishIntent(pointer.step, pointer).to_json()
        intent = self._journal.open_intent(IntentKind.PUBLISH, intended, era=era)
        if self.store.conditional:
            written = replace_before(self.store, self.keys.latest, data, until, self._clock, before)
        else:
            written = put_before(self.store, self.keys.latest, data, until, self._clock)
        seen = self._current()
        if written is None or seen != Pointer.from_bytes(data):  # where names lost characters that deceive
            faster = "another writer was faster" if written is None else "a different pointer was read back"
            self._journal.settle(intent.id, IntentState.FAILED, faster)
            self._own(seen)  # raises Superseded when a newer writer was faster
            raise RemoteError(
                "latest.json was changed while podwatch wrote it"
                if written is None
                else "the store returns a different pointer than podwatch wrote",
                where=f"{self.store.url}/{self.keys.latest}",
                fix="podwatch tries again",
            )
        self._remember(pointer)
        self._journal.settle(intent.id, IntentState.DONE)
        return pointer

    def _remember(self, pointer: Pointer) -> None:
        self._journal.learn(LAST, pointer.to_bytes().decode())
        self._journal.learn(SEQ, max(pointer.seq, int(self._journal.learned(SEQ, 0))))

    def repair(self, seen: bytes) -> Pointer | None:
        """Restore our last pointer after another pod, frozen in the middle of a write, has set it back; ``seen`` is the
        pointer just read. None where there is nothing to repair. Raises as ``publish`` does."""
        era, kept = self._journal.era, self._journal.learned(LAST)
        if not isinstance(kept, str):
            return None
        last = Pointer.from_bytes(kept.encode())
        found = Pointer.from_bytes(seen, where=f"{self.store.url}/{self.keys.latest}")
        if found.order >= last.order:
            return None
        now, stored = pointer_as_stored(self.store, self.keys)  # what was seen may predate a publication
        if now is None or now.order >= last.order:
            return None
        found = now
        generation, seq, until = self._own(found)
        if last.generation != generation:
            return None  # from before we took the lease over: others have written since
        if last.step is not None:
            self._verify_named(last)
        return self._write(replace(last, seq=seq, created_at=rfc3339(self._clock.wall())), until, stored, era)

    def _verify_named(self, pointer: Pointer) -> None:
        manifest = read_manifest(self.store, self.keys, pointer)
        self._verify(manifest.files, manifest.part_size)

    def _note(self, pointer: Pointer, *, restored: bool) -> PublishedSave:
        saved = published_from(pointer, self._clock.wall(), restored=restored)
        self._journal.note_published(saved)
        return saved

    # -- after a crash ----------------------------------------------------------------------------------------------

    def recover(self) -> tuple[str, ...]:
        """Finish or undo every open publish intent, and record the checkpoint that the pointer names if the journal
        does not know it. Returns a line for each. Raises Superseded or RemoteError, with the intents left open for the
        next try."""
        self._journal.refuse_unread(self._journal.era, "cannot finish interrupted publications")
        intents = self._journal.open_intents(IntentKind.PUBLISH)
        current = self._current()
        if intents:
            self._own(current)  # ownership first: the intents of a superseded writer are not finished
        lines = [self._recover(intent, current) for intent in intents]
        if current is not None and current.step is not None:
            known = {(p.step, p.save_id) for p in self._journal.published()}
            if (current.step, current.save_id) not in known:
                try:
                    self._verify_named(current)
                except IntegrityError as error:
                    lines.append(f"the newest checkpoint in the store is damaged: {error.what}")
                else:
                    self._note(current, restored=current.writer_id != self._run.identity().writer_id)
                    lines.append(f"found the checkpoint of step {current.step} in the store")
        return tuple(lines)

    def _recover(self, intent: Intent, current: Pointer | None) -> str:
        intended = PublishIntent.kept(intent.data)
        if intended is None:
            return self._undo(intent, "its record cannot be read: the checkpoint is published again")
        wanted = intended.pointer
        if wanted is None:
            # A manifest that no pointer names has no effect; the next publication reuses it if it is whole.
            return self._undo(intent, "writing the manifest was interrupted: the checkpoint is published again")
        if current != wanted:
            return self._undo(intent, "the pointer was not written")
        self._remember(wanted)
        if wanted.step is not None:
            try:
                self._verify_named(wanted)
            except IntegrityError as error:
                return self._undo(intent, f"the pointer was written, but the checkpoint is damaged: {error.what}")
            self._note(wanted, restored=False)
        self._journal.settle(intent.id, IntentState.DONE, "found written after a restart")
        return f"step {wanted.step} was published just before podwatch stopped"

    def _undo(self, intent: Intent, note: str) -> str:
        self._journal.settle(intent.id, IntentState.UNDONE, note)
        return note


def published_from(pointer: Pointer, wall: float, *, restored: bool) -> PublishedSave:
    assert pointer.step is not None
    return PublishedSave(
        step=pointer.step,
        save_id=pointer.save_id,
        lineage=pointer.lineage,
        generation=pointer.generation,
        seq=pointer.seq,
        manifest_key=pointer.manifest_key,
        manifest_file_id=pointer.manifest_file_id,
        manifest_sha1=pointer.manifest_sha1,
        manifest_size=pointer.manifest_size,
        total_bytes=pointer.total_bytes,
        wall=wall,
        restored=restored,
    )


def in_store(store: ObjectStore, file: ManifestFile, part_size: int) -> Proof | None:
    """What the store shows of the object under its id; None if it is not there with our mark and its size, or has other
    bytes."""
    found = store.stat(file.key, file.file_id)
    if found is None or not found.ours or found.size != file.size:
        return None
    try:
        return store.prove(found, file.parts_sha1, part_size)
    except IntegrityError:
        return None


def proof_of(found: Iterable[Proof | None]) -> Proof:
    """The proof of a whole checkpoint, for its manifest, from that of each object. Where the store shows none, podwatch
    read the bytes back before it recorded the object as stored."""
    proofs = [proof for proof in found if proof is not None]
    return Proof.READ_BACK if Proof.NONE in proofs else next(iter(proofs), Proof.NONE)


def _pointer_for(
    manifest: Manifest | None, named: ManifestRef | None, identity: RunIdentity, generation: int, seq: int, wall: float
) -> Pointer:
    details: dict[str, Any] = {}
    if manifest is not None and named is not None:
        details = {
            "save_id": manifest.save_id,
            "manifest_key": named.key,
            "manifest_file_id": named.file_id,
            "manifest_sha1": named.sha1,
            "manifest_size": named.size,
            "total_bytes": manifest.total_bytes,
            "layout": manifest.layout,
        }
    return Pointer(
        generation=generation,
        seq=seq,
        run_id=identity.run_id,
        lineage=identity.lineage,
        step=manifest.step if manifest else None,
        writer_id=identity.writer_id,
        created_at=rfc3339(wall),
        host=identity.host,
        wandb=dict(identity.wandb),
        **details,
    )
