"""The last heartbeat of a run, as another machine reads it from the store."""

from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import Heartbeat, read_beat
from podwatch.domain.manifest import Keys
from podwatch.stores.base import ObjectStore, StoredObject


def last_heartbeat(store: ObjectStore, keys: Keys) -> tuple[Heartbeat, float] | None:
    """The heartbeat, not ``readable`` if it cannot be read, and when it was written, by the store's clock. None if
    there is none. Raises RemoteError."""
    try:
        found = store.read(keys.heartbeat, limit=Heartbeat.LARGEST)
    except IntegrityError:  # too large for one of podwatch's
        stored = store.stat(keys.heartbeat)
        return None if stored is None else (Heartbeat(), stored.uploaded_wall)
    beat = read_beat(found[1]) if found is not None else None
    return None if found is None or beat is None else (beat.said, _written(found[0], beat.said))


def _written(stored: StoredObject, said: Heartbeat) -> float:
    """Of a copy that another tool made, the store knows only when it was copied: there, the pod's own record counts, if
    it is earlier."""
    if stored.ours is False and said.written_wall is not None and 0 < said.written_wall < stored.uploaded_wall:
        return said.written_wall
    return stored.uploaded_wall
