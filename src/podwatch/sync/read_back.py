"""What the store holds, by reading it: the proof where the store gives none (docs/sync.md)."""

import hashlib
import io
from collections.abc import Sequence

from podwatch.domain.errors import RemoteError
from podwatch.domain.manifest import Proof
from podwatch.stores.base import ObjectStore, Progress, StoredObject


def hashes_of(
    store: ObjectStore, key: str, file_id: str, part_size: int, progress: Progress | None = None
) -> tuple[str, ...]:
    """The SHA-1 of each part of an object, by downloading it."""
    target = _Hashing(part_size)
    store.get_file(key, target, file_id=file_id, progress=progress)  # type: ignore[arg-type]  # it only writes
    return tuple(target.finished())


def read_back(
    store: ObjectStore, stored: StoredObject, parts_sha1: Sequence[str], part_size: int, progress: Progress | None
) -> Proof:
    """READ_BACK if the store returns exactly the bytes that were sent. RemoteError (transient: send again) if not."""
    if hashes_of(store, stored.key, stored.file_id, part_size, progress) != tuple(parts_sha1):
        raise RemoteError(
            "the store returns different bytes than podwatch sent",
            where=f"{store.url}/{stored.key}",
            fix="podwatch sends them again; if this continues, use another store",
        )
    return Proof.READ_BACK


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
