"""``config/archived.json``: that a run was archived, and has been left alone since."""

from dataclasses import dataclass

from podwatch.domain.document import At, Document, Label, RunId
from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import Beat
from podwatch.store.interfaces import read_or_none
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import ObjectTooLarge


@dataclass(frozen=True, slots=True)
class ArchiveRecord(Document):
    """Written after the last deletion. ``keep``: ``latest`` or ``milestones``."""

    KIND = "podwatch-archive"
    FILE = "archived.json"

    run_id: RunId
    keep: Label
    archived_at: At
    host: Label = ""


def record_key(keys: RunKeys) -> str:
    return keys.evidence("config") + ArchiveRecord.FILE


def archived_at(
    store: Objects, keys: RunKeys, beat: Beat | None, claim: tuple[int, float] | None, now: float
) -> float | None:
    """When the run was archived; None if it was not, or a pod has continued it since: then a heartbeat or a claim is
    newer. Raises RemoteError."""
    try:
        record = ArchiveRecord.from_bytes(read_or_none(store, record_key(keys), ArchiveRecord) or b"")
        listed = next((item.wall for item in store.list(record_key(keys))), None)
    except (IntegrityError, ObjectTooLarge):
        return None
    wall = record.archived_at if listed is None else listed
    newest = max(now - beat.age if beat is not None else 0.0, claim[1] if claim is not None else 0.0)
    return wall if wall is not None and record.run_id == keys.run_id and wall >= newest else None
