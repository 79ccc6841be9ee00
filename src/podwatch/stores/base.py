"""The object-store protocol. Synchronous: used from worker threads and from the upload child, never on the loop."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

Progress = Callable[[int], None]
"""Called with the number of bytes newly sent or received; may raise to cancel."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One version of one object as the store reports it.

    ``file_id`` is empty in stores without versions. ``parts_sha1`` is known to the writer only. ``ours`` tells whether
    the object carries our writer tag; ``uploaded_wall`` is the store's own clock in epoch seconds.
    """

    key: str
    size: int
    file_id: str = ""
    parts_sha1: tuple[str, ...] = ()
    ours: bool = False
    writer_id: str = ""
    uploaded_wall: float = 0.0
    info: Mapping[str, str] = field(default_factory=dict)


class ObjectStore(Protocol):
    """Immutable objects by key. Every error is a RemoteError with ``transient`` set, or an IntegrityError."""

    url: str
    """Safe to print: no credentials in it."""
    versioned: bool

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        """Store a small object whole; it becomes visible at once and entire, or not at all."""
        ...

    def put_file(
        self, key: str, source: BinaryIO, size: int, *, part_size: int, progress: Progress | None = None
    ) -> StoredObject:
        """Store ``size`` bytes from ``source`` and return the hashes of its parts as really sent."""
        ...

    def stat(self, key: str, file_id: str = "") -> StoredObject | None:
        """The object (that exact version where ``file_id`` is given), or None if it is not there."""
        ...

    def get_bytes(self, key: str, file_id: str = "", *, limit: int = 64 << 20) -> bytes | None:
        """A small object's bytes, or None if absent. More than ``limit`` bytes raises IntegrityError."""
        ...

    def get_file(
        self, key: str, target: BinaryIO, *, file_id: str = "", offset: int = 0, progress: Progress | None = None
    ) -> None:
        """Write the object's bytes from ``offset`` on to ``target``. Verifying them is the caller's job."""
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Newest versions of all objects under ``prefix``, in key order."""
        ...

    def delete(self, obj: StoredObject) -> None:
        """Delete this version. Absent is success. An object without our writer tag is refused (promise 9)."""
        ...

    def check(self) -> tuple[str, ...]:
        """Prove that the store can be used; returns warnings (a key that may not delete...). Raises RemoteError."""
        ...

    def close(self) -> None: ...
