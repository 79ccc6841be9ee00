"""Reads what the store holds of one run, for ``podwatch runs check``. Needs a key that can read; listing is used where
the key allows it."""

import contextlib
import json
from typing import Any

from podwatch.domain.errors import IntegrityError, RemoteError, SaveGone
from podwatch.domain.lease import parse_control
from podwatch.domain.manifest import Keys, Pointer, valid_run_id
from podwatch.policy.run_check import Beat, Evidence, parse_beat
from podwatch.stores.base import ObjectStore, StoredObject, store_time
from podwatch.sync.publish import newest_pointer, read_manifest
from podwatch.sync.runs.archive import read_record

SMALL_JSON = 1 << 20


def read_evidence(store: ObjectStore, keys: Keys, now_wall: float) -> Evidence:
    """Raises RemoteError if the store does not answer or refuses the key."""
    pointer, problem = _pointer(store, keys)
    beat = _heartbeat(store, keys, now_wall)
    return Evidence(
        keys.run_id,
        beat=beat,
        claim_age=_claim_age(store, keys, now_wall),
        pointer=pointer is not None and pointer.step is not None,
        pointer_step=pointer.step if pointer is not None else None,
        pointer_problem=problem,
        stopped_by_control=_stopped(store, keys),
        archived=pointer is not None and _archived(store, keys, pointer),
    )


def _pointer(store: ObjectStore, keys: Keys) -> tuple[Pointer | None, str]:
    """The pointer, and why it is not usable: the manifest that it names must be there, whole and of this run. The data
    objects are not read: `podwatch store verify` does that."""
    pointer: Pointer | None = None
    for _ in range(2):  # between the two reads the pod can publish, and delete what the pointer named
        problem = ""
        try:
            pointer = newest_pointer(store, keys)
            if pointer is not None and pointer.step is not None:
                read_manifest(store, keys, pointer)
            return pointer, ""
        except (IntegrityError, SaveGone) as error:
            problem = str(error)
    return pointer, problem


def _heartbeat(store: ObjectStore, keys: Keys, now_wall: float) -> Beat | None:
    found = store.stat(keys.heartbeat)
    if found is None:
        return None
    document: Any = None
    with contextlib.suppress(IntegrityError, ValueError, RecursionError):
        data = store.get_bytes(keys.heartbeat, found.file_id, limit=SMALL_JSON)
        document = json.loads(data) if data is not None else None
    age = store_time(store, now_wall) - found.uploaded_wall
    return parse_beat(document if isinstance(document, dict) else {}, age)


def _claim_age(store: ObjectStore, keys: Keys, now_wall: float) -> float | None:
    try:
        claims: list[StoredObject] = [c for c in store.list(keys.claims) if c.ours]
    except RemoteError as error:
        if error.transient:
            raise
        return None  # the key cannot list: the heartbeat is what counts
    newest = max((c.uploaded_wall for c in claims), default=None)
    return None if newest is None else max(0.0, store_time(store, now_wall) - newest)


def _stopped(store: ObjectStore, keys: Keys) -> str | None:
    try:
        control = parse_control(store.get_bytes(keys.control, limit=SMALL_JSON))
    except IntegrityError:
        return None  # the pods ignore it, too, and report it
    return (control.reason or "control.json") if control.stopped else None


def _archived(store: ObjectStore, keys: Keys, pointer: Pointer) -> bool:
    record = read_record(store, keys)
    return record is not None and record.done and record.pointer == pointer.order


def run_ids(store: ObjectStore, prefix: str) -> list[str]:
    """Every run of podwatch below the prefix, by name. Raises RemoteError, also where the key cannot list."""
    base = f"{prefix}/" if prefix else ""
    found = {
        run_id
        for item in store.list(base)
        for run_id, _, inside in [item.key.removeprefix(base).partition("/")]
        if item.ours and inside.startswith("podwatch/") and valid_run_id(run_id)
    }
    return sorted(found)
