"""The object-store protocol, and the count of calls by price class. Synchronous: used from worker threads and from the
upload child, never on the loop.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from podwatch.stores.parts import Source

# -- protocol --------------------------------------------------------------------------------------------------------

Progress = Callable[[int], None]
"""Called with the number of bytes newly sent or received; may raise to cancel."""
Take = Callable[[memoryview], None]
"""Called with each piece of what is received, in order; it must use the bytes before it returns."""
OpenStore = Callable[[], "ObjectStore"]
"""Opens the run's store again, with the credentials of this moment. Raises RemoteError or ConfigurationError."""


class CannotDelete(str):
    """The warning of ``ObjectStore.check`` that the key cannot delete."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One version of one object as the store reports it.

    ``file_id`` is empty in stores without versions. Only the writer knows ``parts_sha1``. ``ours``: the object carries
    podwatch's writer tag; ``uploaded_wall`` is the store's own clock in epoch seconds.
    """

    key: str
    size: int
    file_id: str = ""
    parts_sha1: tuple[str, ...] = ()
    ours: bool = False
    writer_id: str = ""
    uploaded_wall: float = 0.0
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of an unfinished upload in the store, with the hash that the store checked."""

    size: int
    sha1: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A multi-part upload that was started and neither finished nor cancelled: invisible by name, but paid for."""

    key: str
    upload: str
    started_wall: float
    ours: bool
    writer_id: str = ""


class ObjectStore(Protocol):
    """Immutable objects by key. Every error is a RemoteError with ``transient`` set, or an IntegrityError."""

    url: str
    """Safe to print: no credentials in it."""
    versioned: bool
    exclusive: bool
    """Whether ``create`` works: of two concurrent creations of one name, at most one succeeds."""

    @property
    def clock_skew(self) -> float | None:
        """Seconds that this machine's clock is ahead of the store's, by the last answer; None where the store has no
        clock of its own, or has not answered yet."""
        ...

    def create(self, key: str, data: bytes) -> StoredObject | None:
        """Store a small object under a new name; None, and nothing done, if the name exists."""
        ...

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        """Store a small object whole; it becomes visible at once and entire, or not at all."""
        ...

    def put_small(self, key: str, source: Source, size: int, progress: Progress | None = None) -> StoredObject:
        """The same from a source, hashing what is really sent."""
        ...

    # A multi-part upload: begin, send parts in any order from several threads, finish. An unfinished one is invisible
    # to readers and survives this process: ``parts_there`` lists the parts that need not be sent again.

    def begin_large(self, key: str, size: int) -> str:
        """Start an upload; returns its id."""
        ...

    def put_part(
        self, upload: str, number: int, source: Source, offset: int, length: int, progress: Progress | None = None
    ) -> str:
        """Send part ``number`` (from 1): ``length`` bytes from ``offset``. Returns the SHA-1 of what was sent."""
        ...

    def parts_there(self, upload: str) -> Mapping[int, StoredPart] | None:
        """The store's parts of an unfinished upload; None if there is no such upload (any more)."""
        ...

    def finish_large(self, key: str, upload: str, parts_sha1: Sequence[str], size: int) -> StoredObject:
        """Make the object visible. A repeated call after a lost answer returns the object."""
        ...

    def cancel_large(self, upload: str) -> None:
        """Cancel an unfinished upload. Unknown or finished is success. RemoteError if the store does not answer."""
        ...

    # Copies inside the store, also of objects that are not ours; the copy is. No byte passes through this machine where
    # the store can copy. RemoteError (never transient) when the source is gone.

    def copy_small(self, key: str, source: StoredObject) -> StoredObject:
        """Copy a whole object of at most 5 GB. ``parts_sha1`` is empty where the store cannot tell the hash."""
        ...

    def copy_part(self, upload: str, number: int, source: StoredObject, offset: int, length: int) -> str:
        """As ``put_part``, from ``length`` bytes of ``source`` from ``offset`` on. Returns their SHA-1."""
        ...

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Every unfinished upload below ``prefix``, oldest first."""
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

    def get_range(self, key: str, offset: int, length: int, take: Take, *, file_id: str = "") -> int:
        """Pass ``length`` bytes (at least one) from ``offset`` on to ``take``, in order, in reused memory; returns the
        object's whole size. A broken connection is resumed where it broke. Exceptions of ``take`` pass unchanged; an
        object that is too short raises IntegrityError. Verifying the bytes is the caller's job."""
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Newest versions of all objects under ``prefix``, in key order."""
        ...

    def versions(self, prefix: str) -> Iterator[StoredObject]:
        """All versions of all objects under ``prefix``, in key order, newest first; without versions, as ``list``."""
        ...

    def delete(self, obj: StoredObject) -> None:
        """Delete this version. Absent is success. An object without our writer tag is refused (promise 9)."""
        ...

    def check(self) -> tuple[str, ...]:
        """Prove that the store is usable; returns warnings, ``CannotDelete`` among them. Raises RemoteError."""
        ...

    def close(self) -> None: ...


def store_time(store: ObjectStore, wall: float) -> float:
    """``wall`` (epoch seconds by this machine's clock) converted to the store's clock, as far as its last answer showed
    it: for ages of stored objects."""
    return wall - (store.clock_skew or 0.0)


# -- calls by price class --------------------------------------------------------------------------------------------
# Backblaze's classes: A is free; B and C are free up to 2,500 a day each, then $0.004 per 10,000 of B and per 1,000
# of C.

_FREE = frozenset(
    {
        "b2_upload_file", "b2_upload_part", "b2_get_upload_url", "b2_get_upload_part_url", "b2_start_large_file",
        "b2_finish_large_file", "b2_cancel_large_file", "b2_hide_file", "b2_delete_file_version",
    }
)  # fmt: skip
_READ = frozenset({"b2_download_file_by_id", "b2_download_file_by_name", "b2_get_file_info"})


def class_of(url: str) -> str:
    """A, B or C. An unknown call counts as the most expensive class."""
    path = url.partition("://")[2].partition("/")[2].partition("?")[0].split("/")
    if path[0] == "file":
        return "B"
    name = next((p for p in path if p.startswith("b2_")), "")
    return "A" if name in _FREE else "B" if name in _READ else "C"


class Calls:
    """Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = {"A": 0, "B": 0, "C": 0}

    def note(self, url: str) -> None:
        self.add({class_of(url): 1})

    def add(self, more: Mapping[str, int]) -> None:
        with self._lock:
            for name, count in more.items():
                if name in self._count:
                    self._count[name] += count

    def snapshot(self) -> dict[str, int]:
        """All calls since this process started."""
        with self._lock:
            return dict(self._count)

    def told(self) -> str:
        """One line for the operator."""
        count = self.snapshot()
        return f"calls to the store: {count['A']} free (A), {count['B']} of class B, {count['C']} of class C"


TOTAL = Calls()
"""Calls of this process, over all stores that it opened, because the account is charged for their sum. The parent of a
child process adds the child's calls."""


class ChildCalls:
    """Adds to ``TOTAL`` the calls that one child reports; its messages carry the sum in ``calls``."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}

    def hear(self, message: Mapping[str, Any]) -> None:
        calls = message.get("calls")
        if isinstance(calls, dict):
            TOTAL.add({name: count - self._counted.get(name, 0) for name, count in calls.items()})
            self._counted = calls
