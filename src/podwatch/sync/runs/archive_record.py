"""``archive.json``: what an archive removes, written before the first removal, and the result.

The intent is in the store, not in a journal: the pod that archives need not be the pod that trained, and any pod can
finish an interrupted archive.
"""

import json
import re
from dataclasses import dataclass

from podwatch.domain.errors import IntegrityError
from podwatch.domain.manifest import SCHEMA_VERSION, Keys
from podwatch.stores.base import ObjectStore, StoredObject

_SAVE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LIMIT = 4 << 20
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """``removing``: (step, save_id) of the checkpoints to remove. ``pointer``: (generation, seq) of the pointer at the
    decision. ``keep``: ``latest`` or ``milestones``."""

    run_id: str
    keep: str
    pointer: tuple[int, int]
    wall: float
    host: str
    removing: tuple[tuple[int, str], ...] = ()
    done: bool = False

    def to_bytes(self) -> bytes:
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "podwatch-archive",
            "run_id": self.run_id,
            "state": "done" if self.done else "begun",
            "keep": self.keep,
            "generation": self.pointer[0],
            "seq": self.pointer[1],
            "wall": self.wall,
            "host": self.host,
            "removing": [{"step": step, "save_id": save_id} for step, save_id in self.removing],
        }
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def read_record(store: ObjectStore, keys: Keys) -> ArchiveRecord | None:
    """None if podwatch wrote none, or it cannot be parsed (it is then ignored). Raises RemoteError."""
    found = store.stat(keys.archive)
    if found is None or not found.ours:
        return None
    try:
        data = store.get_bytes(keys.archive, found.file_id, limit=_LIMIT)
        return None if data is None else _parsed(data, keys)
    except (IntegrityError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_record(store: ObjectStore, keys: Keys, record: ArchiveRecord) -> StoredObject:
    return store.put_bytes(keys.archive, record.to_bytes())


def _parsed(data: bytes, keys: Keys) -> ArchiveRecord:
    doc = json.loads(data)
    if doc["kind"] != "podwatch-archive" or doc["run_id"] != keys.run_id or doc["schema_version"] != SCHEMA_VERSION:
        raise ValueError("not an archive record of this run")
    removing = tuple((_number(item["step"]), _save_id(item["save_id"])) for item in doc["removing"])
    return ArchiveRecord(
        keys.run_id,
        str(doc["keep"])[:20],
        (_number(doc["generation"]), _number(doc["seq"])),
        float(doc["wall"]),
        str(doc["host"])[:255],
        removing,
        doc["state"] == "done",
    )


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise ValueError("not a valid number")
    return value


def _save_id(value: object) -> str:
    if not isinstance(value, str) or not _SAVE_ID.fullmatch(value):
        raise ValueError("not a valid save id")
    return value
