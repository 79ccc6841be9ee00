"""``heartbeat.json``: a sign of life for other pods and for people who look at the bucket (DESIGN sections 4 and 5)."""

import json
from collections.abc import Mapping

from podwatch.domain.errors import RemoteError
from podwatch.domain.remote import SCHEMA_VERSION, Keys
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.sync.doors import RunIdentity
from podwatch.sync.publish import rfc3339


class Heartbeat:
    """Blocking. Removes the version it wrote before, so that a versioned store does not collect one a minute; with a
    key that may not delete they stay, which a lifecycle rule of the bucket can clear."""

    def __init__(self, store: ObjectStore, keys: Keys) -> None:
        self._store, self._keys = store, keys
        self._previous: StoredObject | None = None
        self._count = 0

    def write(self, identity: RunIdentity, wall: float, fields: Mapping[str, object]) -> None:
        """``fields`` are JSON-safe. Raises RemoteError."""
        self._count += 1
        document = {
            **fields,
            "schema_version": SCHEMA_VERSION,
            "kind": "podwatch-heartbeat",
            "run_id": identity.run_id,
            "lineage": identity.lineage,
            "writer_id": identity.writer_id,
            "host": identity.host,
            "generation": identity.generation,
            "written_at": rfc3339(wall),
            "count": self._count,
        }
        written = self._store.put_bytes(self._keys.heartbeat, json.dumps(document, indent=1, sort_keys=True).encode())
        previous, self._previous = self._previous, written
        if previous is not None and self._store.versioned:
            try:
                self._store.delete(previous)
            except RemoteError as error:
                if error.transient:
                    raise
