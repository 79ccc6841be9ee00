"""Reads what the store holds of one run, for ``podwatch runs check``. Needs a key that can read; listing is used where
the key allows it."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

from podwatch.domain.errors import IntegrityError, RemoteError, SaveGone
from podwatch.domain.lease import parse_control
from podwatch.domain.manifest import Keys, Pointer, valid_run_id
from podwatch.policy.run_check import Evidence, parse_beat
from podwatch.policy.store_retention import IMPORT_LINEAGE
from podwatch.stores.base import ObjectStore, store_time
from podwatch.sync.publish import newest_pointer, read_manifest
from podwatch.sync.runs.archive import read_record

SMALL_JSON = 1 << 20


def read_evidence(store: ObjectStore, keys: Keys, wall: Callable[[], float]) -> Evidence:
    """``wall``: this machine's clock in epoch seconds. Raises RemoteError if the store does not answer or refuses the
    key."""
    pointer, problem = _pointer(store, keys)
    beat = _heartbeat(store, keys)
    claimed = _newest_claim(store, keys)
    now = store_time(store, wall())  # after an answer of the store, which shows its clock
    touched = max((t for t in (beat[0] if beat else None, claimed) if t is not None), default=0.0)
    return Evidence(
        keys.run_id,
        beat=None if beat is None else parse_beat(beat[1], now - beat[0]),
        claim_age=None if claimed is None else max(0.0, now - claimed),
        pointer=pointer is not None and pointer.step is not None,
        pointer_step=pointer.step if pointer is not None else None,
        pointer_problem=problem,
        stopped_by_control=_stopped(store, keys),
        archived=pointer is not None and _archived(store, keys, pointer, touched),
        imported=pointer is not None and pointer.lineage.startswith(IMPORT_LINEAGE),
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


def _heartbeat(store: ObjectStore, keys: Keys) -> tuple[float, dict[str, Any]] | None:
    """When it was written, by the store's clock, and its document, empty where it cannot be parsed."""
    document: Any = None
    try:
        found = store.read(keys.heartbeat, limit=SMALL_JSON)
    except IntegrityError:  # too large for one of podwatch's
        stored = store.stat(keys.heartbeat)
        return None if stored is None else (stored.uploaded_wall, {})
    if found is None:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(found[1])
    return found[0].uploaded_wall, document if isinstance(document, dict) else {}


def _newest_claim(store: ObjectStore, keys: Keys) -> float | None:
    """When the newest claim was made, by the store's clock; None without claims, and where the key cannot list."""
    try:
        return max((c.uploaded_wall for c in store.list(keys.claims) if c.ours is not False), default=None)
    except RemoteError as error:
        if error.transient:
            raise
        return None  # the heartbeat is what counts


def _stopped(store: ObjectStore, keys: Keys) -> str | None:
    try:
        control = parse_control(store.get_bytes(keys.control, limit=SMALL_JSON))
    except IntegrityError:
        return None  # the pods ignore it, too, and report it
    return (control.reason or "control.json") if control.stopped else None


def _archived(store: ObjectStore, keys: Keys, pointer: Pointer, touched: float) -> bool:
    """``touched``: when a pod last wrote a heartbeat or a claim. A later one continues the archived run."""
    found = store.stat(keys.archive)
    if found is None or found.uploaded_wall < touched:
        return False
    record = read_record(store, keys)
    return record is not None and record.done and record.pointer == pointer.order


def run_ids(store: ObjectStore, prefix: str) -> list[str]:
    """Every run of podwatch below the prefix, by name. Raises RemoteError, also where the key cannot list."""
    base = f"{prefix}/" if prefix else ""
    found = {
        run_id
        for item in store.list(base)
        for run_id, _, inside in [item.key.removeprefix(base).partition("/")]
        if item.ours is not False and inside.startswith("podwatch/") and valid_run_id(run_id)
    }
    return sorted(found)
