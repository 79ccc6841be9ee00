"""Reads a run's contents from the store alone: every manifest, and the checkpoint that the pointer names."""

import contextlib
import hashlib
import io
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import HolderState
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer, check_links
from podwatch.stores.base import ObjectStore, StoredObject, store_time
from podwatch.sync.publish import checked_manifest, newest_pointer, read_optional, read_pointer

_LIMIT = 64 << 20
_SMALL_JSON = 1 << 20
_LEFT = frozenset(HolderState) - {HolderState.RUNNING}


@dataclass(frozen=True, slots=True)
class SavedSet:
    """One checkpoint in the store. ``problem``: why its manifest cannot be used (``manifest`` is None then); ``named``:
    the pointer names it. Sizes in bytes, the age in seconds since the manifest was written."""

    step: int
    save_id: str
    age_seconds: float
    named: bool
    manifest: Manifest | None = None
    problem: str = ""
    optional: bool = False
    """Optional parts, which no resume needs, are stored beside it."""

    @property
    def total_bytes(self) -> int:
        return self.manifest.total_bytes if self.manifest else 0

    @property
    def file_count(self) -> int:
        return len(self.manifest.files) if self.manifest else 0


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
        if item.ours and (match := _manifest_pattern(keys).fullmatch(item.key)):
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


def inventory(store: ObjectStore, keys: Keys, now_wall: float) -> tuple[list[SavedSet], str]:
    """Every checkpoint, newest first, and the pointer's problem ("" if it has none). Raises RemoteError."""
    pointer: Pointer | None = None
    problem = ""
    try:
        pointer = read_pointer(store, keys)
    except IntegrityError as error:
        problem = str(error)
    pattern = _manifest_pattern(keys)
    found, beside = [], set[str]()
    listed = list(store.list(f"{keys.root}/step_"))
    now_wall = store_time(store, now_wall)
    for item in listed:
        match = pattern.fullmatch(item.key)
        if match is not None and item.ours:
            found.append((item.uploaded_wall, _save(store, keys, item, int(match[1]), match[2], pointer, now_wall)))
        elif item.ours and item.key.endswith("/optional.json"):
            beside.add(item.key)
    found.sort(key=lambda pair: pair[0], reverse=True)
    saves = [replace(save, optional=keys.optional(save.step, save.save_id) in beside) for _, save in found]
    if pointer is not None and pointer.step is not None and not any(s.named for s in saves):
        problem = problem or f"it names step {pointer.step}, whose manifest is not in the store"
    return saves, problem


def _save(
    store: ObjectStore, keys: Keys, item: StoredObject, step: int, save_id: str, pointer: Pointer | None, now: float
) -> SavedSet:
    named = pointer is not None and (pointer.manifest_key, pointer.manifest_file_id) == (item.key, item.file_id)
    age = max(0.0, now - item.uploaded_wall)
    try:
        data = store.get_bytes(item.key, item.file_id, limit=_LIMIT)
        if data is None:
            raise IntegrityError("the manifest disappeared while it was read", where=item.key)
        manifest = checked_manifest(keys, data, step, save_id, where=item.key)
    except IntegrityError as error:
        return SavedSet(step, save_id, age, named, problem=str(error))
    return SavedSet(step, save_id, age, named, manifest)


def verify_save(store: ObjectStore, save: SavedSet, *, deep: bool = False) -> tuple[str, ...]:
    """Reasons why this checkpoint cannot be restored; empty if it can. Raises RemoteError for store trouble."""
    if save.manifest is None:
        return (save.problem,)
    return _verify(store, save.manifest, deep=deep)


def verify_optional(store: ObjectStore, keys: Keys, save: SavedSet, *, deep: bool = False) -> tuple[str, ...]:
    """The same for its optional parts, which no resume needs. Raises RemoteError for store trouble."""
    try:
        manifest = read_optional(store, keys, save.step, save.save_id)
    except IntegrityError as error:
        return (str(error),)
    return () if manifest is None else _verify(store, manifest, deep=deep)


def _verify(store: ObjectStore, manifest: Manifest, *, deep: bool) -> tuple[str, ...]:
    reasons = []
    try:
        check_links(manifest.files, manifest.symlinks)
    except IntegrityError as error:
        reasons.append(str(error))
    for file in manifest.files:
        found = store.stat(file.key, file.file_id)
        if found is None:
            reasons.append(f"{file.path} is not in the store")
        elif not found.ours or found.size != file.size:
            reasons.append(f"{file.path} is not the object that was sent")
        elif deep and (reason := _differs(store, file, manifest.part_size)):
            reasons.append(reason)
    return tuple(reasons)


def hashes_of(store: ObjectStore, key: str, file_id: str, part_size: int) -> tuple[str, ...]:
    """The SHA-1 of each part of an object, by downloading it."""
    target = _Hashing(part_size)
    store.get_file(key, target, file_id=file_id)  # type: ignore[arg-type]  # it only writes
    return tuple(target.finished())


def _differs(store: ObjectStore, file: ManifestFile, part_size: int) -> str:
    hashes = hashes_of(store, file.key, file.file_id, part_size)
    for number, (is_, should) in enumerate(zip(hashes, file.parts_sha1, strict=False), 1):
        if is_ != should:
            return f"{file.path} part {number} does not match its recorded hash"
    return "" if len(hashes) == len(file.parts_sha1) else f"{file.path} does not have its recorded length"


class _Hashing(io.RawIOBase):
    """Hashes the bytes written to it, part by part."""

    def __init__(self, part_size: int) -> None:
        super().__init__()
        self._part_size, self._left = part_size, part_size
        self._hashes: list[str] = []
        self._hash = hashlib.sha1(usedforsecurity=False)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        view = memoryview(data)
        while view:
            piece = view[: self._left]
            self._hash.update(piece)
            self._left -= len(piece)
            view = view[len(piece) :]
            if not self._left:
                self._close_part()
        return len(data)

    def _close_part(self) -> None:
        self._hashes.append(self._hash.hexdigest())
        self._hash, self._left = hashlib.sha1(usedforsecurity=False), self._part_size

    def finished(self) -> list[str]:
        if self._left < self._part_size:
            self._close_part()
        return self._hashes


def last_word(store: ObjectStore, keys: Keys) -> str:
    """The run's last reported state: the state in which its pod left, else the phase in its last heartbeat; empty if
    neither can be read. Raises RemoteError."""
    with contextlib.suppress(IntegrityError, ValueError, RecursionError):
        data = store.get_bytes(keys.heartbeat, limit=_SMALL_JSON)
        doc: Any = json.loads(data) if data is not None else None
        if isinstance(doc, dict):
            state = str(doc.get("state", ""))
            return (state if state in _LEFT or not doc.get("phase") else str(doc["phase"]))[:40]
    return ""
