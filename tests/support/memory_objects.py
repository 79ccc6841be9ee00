"""A store in memory whose time a test sets, and a save that is stored there."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from podwatch.domain.checkpoint import FileEntry
from podwatch.store.documents import SaveIntent
from podwatch.store.interfaces import Author, Permit
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import ObjectMissing, ObjectTooLarge, too_late
from podwatch.store.publish import Publisher

KEYS = RunKeys("run", "p")
AUTHOR = Author("run", "me", lineage="main")


@dataclass(frozen=True)
class MemoryItem:
    key: str
    size: int
    wall: float
    hash: str = ""


@dataclass
class MemoryObjects:
    url: str = "memory://store"
    wall: float = 1.7e9
    data: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    hashes: bool = True
    before: Callable[[str, str], None] = lambda _operation, _key: None
    """Called before each operation; may raise."""
    after: Callable[[str], None] = lambda _key: None
    """Called after an object is stored; may raise."""
    reads: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    boottime: Callable[[], float] = lambda: 0.0

    def put(self, key: str, source: bytes, *, until: float = math.inf) -> None:
        self.before("put", key)
        self._check_time(until)
        self.data[key] = (source, self.wall)
        self.after(key)

    def read(self, key: str, limit: int) -> bytes:
        self.before("read", key)
        self.reads += 1
        if key not in self.data:
            raise ObjectMissing(key)
        if len(self.data[key][0]) > limit:
            raise ObjectTooLarge(key)
        return self.data[key][0]

    def list(self, prefix: str) -> Iterator[MemoryItem]:
        self.before("list", prefix)
        for key in sorted(key for key in self.data if key.startswith(prefix)):
            data, wall = self.data[key]
            digest = f"sha1:{hashlib.sha1(data).hexdigest()}" if self.hashes else ""
            yield MemoryItem(key, len(data), wall, digest)

    def delete(self, keys: Sequence[str], *, older: bool = False, until: float = math.inf) -> None:
        for key in () if older else keys:
            self.before("delete", key)
            self._check_time(until)
            self.data.pop(key, None)

    def _check_time(self, until: float) -> None:
        if self.boottime() > until:
            raise too_late(self.url)


@dataclass
class AlwaysHolds:
    """``Ownership``, and a clock that stands still."""

    generation: int = 1
    until: float = 1e9

    def confirm(self, store: Objects) -> Permit:
        return Permit(self.generation, self.until)

    def boottime(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1.7e9


def intent_of(step: int, save_id: str, data: bytes = b"weights " * 40) -> SaveIntent:
    files = (FileEntry("model", "w", len(data), step), FileEntry("sub/state", "w", 0, step))
    return SaveIntent("run", step, save_id, "me", 1, 1.7e9, "custom", 100, files)


def send(store: MemoryObjects, intent: SaveIntent, data: bytes = b"weights " * 40) -> tuple[SaveIntent, dict[str, str]]:
    """The intent and every piece: what a publication needs."""
    folder = KEYS.save(intent.step, intent.save_id)
    store.put(folder + "intent.json", intent.to_bytes())
    hashes = {}
    for piece in intent.objects():
        body = data[piece.offset : piece.offset + piece.size]
        store.put(folder + piece.name, body)
        hashes[piece.name] = f"sha1:{hashlib.sha1(body).hexdigest()}"
    return intent, hashes


def publisher(store: MemoryObjects, lease: AlwaysHolds | None = None) -> Publisher:
    lease = lease or AlwaysHolds()
    return Publisher(store, KEYS, lease, lease)
