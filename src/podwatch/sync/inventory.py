"""Reads a run's contents from the store alone: every manifest, and the checkpoint that the pointer names."""

import re
from dataclasses import dataclass, replace

from podwatch.domain.errors import IntegrityError
from podwatch.domain.manifest import Keys, ManifestRef, Pointer, sha1_hex
from podwatch.domain.stored_checkpoint import StoredSave, stored_save
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.sync.publish_and_pointer import checked_manifest, newest_pointer, read_pointer

_LIMIT = 64 << 20


def _manifest_pattern(keys: Keys) -> re.Pattern[str]:
    """Matches step and save id in a manifest's key."""
    return re.compile(re.escape(keys.root) + r"/step_(\d{1,18})/([^/]+)/manifest\.json")


@dataclass(frozen=True, slots=True)
class Stock:
    """(step, save_id) of a run's checkpoints in the store, the step that the pointer names (None: none), and when it
    was stored."""

    saves: frozenset[tuple[int, str]] = frozenset()
    step: int | None = None
    stored_wall: float | None = None


def stock(store: ObjectStore, keys: Keys) -> Stock:
    """One listing and the pointer; no manifest is read. Raises RemoteError."""
    manifests, saves = dict[str, StoredObject](), set[tuple[int, str]]()
    for item in store.list(f"{keys.root}/step_"):
        if item.ours is not False and (match := _manifest_pattern(keys).fullmatch(item.key)):
            manifests[item.key] = item
            saves.add((int(match[1]), match[2]))
    try:
        pointer = newest_pointer(store, keys)
    except IntegrityError:
        pointer = None
    if pointer is None or pointer.step is None:
        return Stock(frozenset(saves))
    named = manifests.get(pointer.manifest_key)
    return Stock(frozenset(saves), pointer.step, None if named is None else named.uploaded_wall)


def inventory(store: ObjectStore, keys: Keys) -> tuple[list[StoredSave], str]:
    """Every checkpoint, newest first, and the pointer's problem ("" if it has none). Raises RemoteError."""
    pointer: Pointer | None = None
    problem = ""
    try:
        pointer = read_pointer(store, keys)
    except IntegrityError as error:
        problem = str(error)
    pattern = _manifest_pattern(keys)
    found, beside = list[StoredSave](), set[str]()
    for item in list(store.list(f"{keys.root}/step_")):
        if item.ours is False:
            continue
        if match := pattern.fullmatch(item.key):
            found.append(_save(store, keys, item, int(match[1]), match[2], pointer))
        elif item.key.endswith("/optional.json"):
            beside.add(item.key)
    found.sort(key=lambda save: (save.uploaded_wall, save.step), reverse=True)  # S3 lists whole seconds
    saves = [replace(save, optional=keys.optional(*save.key) in beside) for save in found]
    if pointer is not None and pointer.step is not None and not any(s.named for s in saves):
        problem = problem or f"it names step {pointer.step}, whose manifest is not in the store"
    return saves, problem


def _save(
    store: ObjectStore, keys: Keys, item: StoredObject, step: int, save_id: str, pointer: Pointer | None
) -> StoredSave:
    named = pointer is not None and pointer.names(item.key, item.file_id)
    try:
        data = store.get_bytes(item.key, item.file_id, limit=_LIMIT)
        if data is None:
            raise IntegrityError("the manifest disappeared while it was read", where=item.key)
        if pointer is not None and named and sha1_hex(data) != pointer.manifest_sha1:
            raise IntegrityError("the manifest is not the one that the pointer names", where=item.key)
        manifest = checked_manifest(keys, data, step, save_id, where=item.key)
    except IntegrityError as error:
        return StoredSave(step, save_id, uploaded_wall=item.uploaded_wall, named=named, problem=str(error))
    ref = ManifestRef(item.key, item.file_id, sha1_hex(data), len(data))
    return stored_save(manifest, ref, item.uploaded_wall, pointer if named else None)
