"""Publish a checkpoint: verify every object by id, write the manifest, then move the pointer, ``latest.json``
(docs/sync.md).

Blocking; runs in a thread of the daemon. An intent is journaled before each write to the store. After a crash
``recover`` checks the store's real state, confirms that this pod still holds the lease, and finishes or undoes.
"""

import hmac
from dataclasses import replace
from itertools import islice

from podwatch.domain.errors import IntegrityError, SaveGone
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer, sha1_hex
from podwatch.domain.safe_names import valid_run_id
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.stores.base import ObjectStore, StoredObject

_POINTER_LIMIT, _OPTIONAL_LIMIT = 1 << 20, 64 << 20
SEQ, LAST = "sync.seq", "sync.pointer"
"""Journal keys: the highest seq and the last pointer that this writer has published."""
POINTER_VERSIONS = 50
"""Versions of the pointer that are read at most to find the best one; a daily sweep removes the old ones."""


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
