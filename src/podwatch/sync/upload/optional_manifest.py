"""``optional.json`` beside a checkpoint's manifest: the stored parts that a resume does not need.

It is a manifest of its own, in the same form, so that ``manifest.json`` and the pointer stay as they were published. A
store without versions can replace one file at a time: a rewritten manifest would, for a moment, not match the pointer.
A podwatch that does not know ``optional.json`` restores the rest as always.
"""

from podwatch.domain.errors import IntegrityError
from podwatch.domain.manifest import Keys, Manifest
from podwatch.stores.base import ObjectStore
from podwatch.sync.publish import checked_manifest

_LIMIT = 64 << 20


def read_optional(store: ObjectStore, keys: Keys, step: int, save_id: str) -> Manifest | None:
    """None if there is none. Raises IntegrityError if it cannot be used, RemoteError for store trouble."""
    key = keys.optional(step, save_id)
    found = store.stat(key)
    if found is None:
        return None
    where = f"{store.url}/{key}"
    if not found.ours:
        raise IntegrityError("optional.json is not podwatch's", where=where)
    data = store.get_bytes(key, found.file_id, limit=_LIMIT)
    return None if data is None else checked_manifest(keys, data, step, save_id, where=where)
