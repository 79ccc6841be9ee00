"""Reads a run's contents from the store alone: every manifest, and the checkpoint that the pointer names."""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from podwatch.domain.engine_and_attempt import NO_INSTANCE, Instance, parse_instance
from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import HolderState, parse_pins
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, ManifestRef, Pointer, Proof, sha1_hex
from podwatch.domain.safe_links import check_links
from podwatch.domain.stored_checkpoint import StoredSave, stored_save
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.sync.publish_and_pointer import checked_manifest, newest_pointer, read_optional, read_pointer
from podwatch.sync.read_back import hashes_of

_LIMIT = 64 << 20
_SMALL_JSON = 1 << 20
_LEFT = frozenset(HolderState) - {HolderState.RUNNING}


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
    named = pointer is not None and (pointer.manifest_key, pointer.manifest_file_id) == (item.key, item.file_id)
    try:
        data = store.get_bytes(item.key, item.file_id, limit=_LIMIT)
        if data is None:
            raise IntegrityError("the manifest disappeared while it was read", where=item.key)
        manifest = checked_manifest(keys, data, step, save_id, where=item.key)
    except IntegrityError as error:
        return StoredSave(step, save_id, uploaded_wall=item.uploaded_wall, named=named, problem=str(error))
    ref = ManifestRef(item.key, item.file_id, sha1_hex(data), len(data))
    return stored_save(manifest, ref, item.uploaded_wall, pointer if named else None)


@dataclass(frozen=True, slots=True)
class Verified:
    """``reasons`` why it cannot be restored; empty if it can. ``proof``: how the bytes of its objects are known, NONE
    where the store shows no more than their sizes."""

    reasons: tuple[str, ...] = ()
    proof: Proof = Proof.NONE


def verify_save(store: ObjectStore, save: StoredSave, *, deep: bool = False) -> tuple[str, ...]:
    """Reasons why this checkpoint cannot be restored; empty if it can. Raises RemoteError for store trouble."""
    return examine_save(store, save, deep=deep).reasons


def examine_save(store: ObjectStore, save: StoredSave, *, deep: bool = False) -> Verified:
    """``deep``: read every byte back. Raises RemoteError for store trouble."""
    if save.manifest is None:
        return Verified((save.problem,))
    return _verify(store, save.manifest, deep=deep)


def verify_optional(store: ObjectStore, keys: Keys, save: StoredSave, *, deep: bool = False) -> tuple[str, ...]:
    """The same for its optional parts, which no resume needs. Raises RemoteError for store trouble."""
    try:
        manifest = read_optional(store, keys, save.step, save.save_id)
    except IntegrityError as error:
        return (str(error),)
    return () if manifest is None else _verify(store, manifest, deep=deep).reasons


def _verify(store: ObjectStore, manifest: Manifest, *, deep: bool) -> Verified:
    reasons, proofs = [], set[Proof]()
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
        elif reason := _differs(store, file, manifest.part_size) if deep else "":
            reasons.append(reason)
        else:
            try:
                proofs.add(Proof.READ_BACK if deep else store.prove(found, file.parts_sha1, manifest.part_size))
            except IntegrityError as error:
                reasons.append(f"{file.path}: {error.what}")
    return Verified(tuple(reasons), proofs.pop() if len(proofs) == 1 and not reasons else Proof.NONE)


def _differs(store: ObjectStore, file: ManifestFile, part_size: int) -> str:
    hashes = hashes_of(store, file.key, file.file_id, part_size)
    for number, (is_, should) in enumerate(zip(hashes, file.parts_sha1, strict=False), 1):
        if is_ != should:
            return f"{file.path} part {number} does not match its recorded hash"
    return "" if len(hashes) == len(file.parts_sha1) else f"{file.path} does not have its recorded length"


@dataclass(frozen=True, slots=True)
class LastWord:
    """The run's last heartbeat. ``state``: the state in which its pod left, else the phase; empty if neither can be
    read, as ``outcome`` is."""

    state: str = ""
    outcome: str = ""
    instance: Instance = NO_INSTANCE
    pins: Mapping[int, str] = field(default_factory=dict)
    """Step: reason."""


def last_word(store: ObjectStore, keys: Keys) -> LastWord:
    """Raises RemoteError."""
    with contextlib.suppress(IntegrityError, ValueError, RecursionError):
        data = store.get_bytes(keys.heartbeat, limit=_SMALL_JSON)
        doc: Any = json.loads(data) if data is not None else None
        if isinstance(doc, dict):
            return parse_last_word(doc)
    return LastWord()


def parse_last_word(doc: Mapping[str, Any]) -> LastWord:
    state, outcome = str(doc.get("state", "")), doc.get("outcome")
    return LastWord(
        (state if state in _LEFT or not doc.get("phase") else str(doc["phase"]))[:40],
        outcome[:40] if isinstance(outcome, str) else "",
        parse_instance(doc.get("instance")),
        parse_pins(doc),
    )
