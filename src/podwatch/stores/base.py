"""The object-store protocol, and the count of calls by price class. Synchronous: used from worker threads and from the
upload child, never on the loop.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from podwatch.domain.errors import RemoteError
from podwatch.domain.manifest import Proof
from podwatch.stores.part_reader import Source

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

    ``file_id`` names exactly this version and may be passed back; empty where the store cannot name one. Only the
    writer knows ``parts_sha1``. ``ours``: it carries podwatch's
    writer tag; None: this answer does not tell (a listing of S3 carries no user metadata), and ``writer_id`` is then
    empty: see ``ObjectStore.identify``. ``uploaded_wall`` is the store's own clock in epoch seconds. ``proof`` is set
    by writes and by ``ObjectStore.prove``. ``info`` belongs to the store.
    """

    key: str
    size: int
    file_id: str = ""
    parts_sha1: tuple[str, ...] = ()
    ours: bool | None = False
    writer_id: str = ""
    uploaded_wall: float = 0.0
    info: Mapping[str, str] = field(default_factory=dict)
    proof: Proof = Proof.NONE


@dataclass(frozen=True, slots=True)
class Upload:
    """A multi-part upload in the store. The journal keeps ``id`` beside the key, so it must survive as text without
    line breaks."""

    key: str
    id: str


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of an unfinished upload in the store. ``sha1`` in hex: of what was sent, or what the store reports;
    empty where a listing of the parts does not tell it. ``etag``: the store's own name for exactly these bytes; empty
    where it has none."""

    size: int
    sha1: str = ""
    etag: str = ""

    @property
    def note(self) -> str:
        """As the journal keeps it, so that the part can be recognized: the SHA-1, and the etag where there is one."""
        return f"{self.sha1} {self.etag}" if self.etag else self.sha1

    @classmethod
    def noted(cls, note: str, size: int) -> "StoredPart":
        sha1, _, etag = note.partition(" ")
        return cls(size, sha1, etag)


MOST_PROBE_BYTES = 64
"""What a store is tried out with is smaller: the sweep recognizes by this what an interrupted trial left."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A multi-part upload that was started and neither finished nor cancelled: invisible by name, but paid for.

    ``ours`` None: the store cannot tell who started it. Then only an upload that our journal names may be cancelled.
    """

    upload: Upload
    started_wall: float
    ours: bool | None
    writer_id: str = ""

    @property
    def key(self) -> str:
        return self.upload.key

    @property
    def id(self) -> str:
        return self.upload.id


def recognized(there: Mapping[int, StoredPart], known: Mapping[int, StoredPart]) -> dict[int, StoredPart]:
    """The parts in the store whose SHA-1 is known: the store reports it, or ``known`` (the journal) has it for the same
    etag and size. The others must be sent again."""
    found = {}
    for number, part in there.items():
        own = known.get(number)
        if part.sha1:
            found[number] = part
        elif own is not None and part.etag and (own.etag, own.size) == (part.etag, part.size):
            found[number] = own
    return found


class ObjectStore(Protocol):
    """Immutable objects by key. Every error is a RemoteError with ``transient`` set, or an IntegrityError.

    Thread-safe. ``versioned``, ``exclusive`` and ``conditional`` may be known only from the store's answers: the first
    use may block for some requests and raise RemoteError. After that they do not change for this object. With a key
    that cannot write, the last two are False.
    """

    url: str
    """Safe to print: no credentials in it."""

    @property
    def versioned(self) -> bool:
        """Whether an overwritten or deleted version stays readable by its ``file_id`` (and is paid for)."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether ``create`` works: of two concurrent creations of one name, at most one succeeds. Every pod finds the
        same answer for the same store."""
        ...

    @property
    def conditional(self) -> bool:
        """Whether ``replace`` works."""
        ...

    @property
    def features(self) -> Mapping[str, object]:
        """What was found out about this endpoint and bucket by trying, JSON-safe, for `podwatch check` and to be
        remembered: ``open_store(features=...)`` of a later process need not try again. Never asks the store. Empty
        where there is nothing to find out."""
        ...

    @property
    def clock_skew(self) -> float | None:
        """Seconds that this machine's clock is ahead of the store's, by the last answer; None where the store has no
        clock of its own, or has not answered yet."""
        ...

    # Small objects: whole and visible at once, or not at all. ``source`` may refuse to be read (a write that must not
    # leave after a deadline): its exception passes unchanged. What is returned is ours, and its ``proof`` is set.

    def create(self, key: str, data: bytes) -> StoredObject | None:
        """Store a small object under a new name; None, and nothing done, if the name exists. A repetition after a lost
        answer that finds exactly these bytes returns the object. Only where ``exclusive``, else RemoteError."""
        ...

    def replace(self, key: str, source: Source, size: int, expected: StoredObject | None) -> StoredObject | None:
        """Store a small object in place of ``expected``, as ``read`` or a write returned it (None: the name must be
        free); None, and nothing done, if the name holds something else by now. A repetition after a lost answer that
        finds exactly these bytes returns the object. Only where ``conditional``, else RemoteError."""
        ...

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        """Store a small object, whatever the name holds."""
        ...

    def put_small(self, key: str, source: Source, size: int, progress: Progress | None = None) -> StoredObject:
        """The same from a source, hashing what is really sent."""
        ...

    # A multi-part upload: begin, send parts in any order from several threads, finish. An unfinished one is invisible
    # to readers and survives this process: ``parts_there`` lists the parts that need not be sent again.

    def begin_large(self, key: str, size: int) -> Upload:
        """Start an upload of ``size`` bytes in total."""
        ...

    def put_part(
        self, upload: Upload, number: int, source: Source, offset: int, length: int, progress: Progress | None = None
    ) -> StoredPart:
        """Send part ``number`` (from 1): ``length`` bytes from ``offset``, counted from the start of the whole object,
        which ``source`` shows. Returns it with the SHA-1 of what was
        sent."""
        ...

    def parts_there(self, upload: Upload) -> Mapping[int, StoredPart] | None:
        """The store's parts of an unfinished upload; None if there is no such upload (any more)."""
        ...

    def finish_large(self, upload: Upload, parts: Sequence[StoredPart], size: int) -> StoredObject:
        """Make the object visible; ``parts`` in order, from 1 on, with SHA-1 and (where the store has them) etag. A
        repeated call after a lost answer returns the object. IntegrityError if the store holds other parts, or another
        size."""
        ...

    def finished(self, upload: Upload, parts: Sequence[StoredPart], size: int) -> StoredObject | None:
        """The object that this upload became, after ``parts_there`` returned None: it was finished and the answer got
        lost. None where the store cannot show that it is this upload's, with exactly these parts."""
        ...

    def cancel_large(self, upload: Upload) -> None:
        """Cancel an unfinished upload. Unknown or finished is success. RemoteError if the store does not answer.

        The caller has to know that the upload is ours (``Unfinished.ours``, or its own journal)."""
        ...

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Every unfinished upload below ``prefix`` that the store lists, oldest first."""
        ...

    # Looking. A listing may leave ``ours`` None. Reading trusts the shape of a key and the hashes of manifest and
    # pointer, and needs no mark; whoever deletes, overwrites or counts something as ours identifies it first.

    def stat(self, key: str, file_id: str = "") -> StoredObject | None:
        """The object (that exact version where ``file_id`` is given), or None if it is not there. ``ours`` is known."""
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Newest versions of all objects under ``prefix``, in key order. ``ours`` may be None. A directory raises
        AccessDenied after the last one, if there is something that it cannot read."""
        ...

    def versions(self, prefix: str) -> Iterator[StoredObject]:
        """All versions of all objects under ``prefix``, in key order, newest first; without versions, as ``list``.
        ``ours`` may be None."""
        ...

    def identify(self, objects: Iterable[StoredObject]) -> Iterator[StoredObject]:
        """The same objects in the same order with ``ours`` and ``writer_id`` known. One request for each that is not
        known yet, several at a time; those that are gone by now are left out."""
        ...

    def prove(self, obj: StoredObject, parts_sha1: Sequence[str], part_size: int) -> Proof:
        """What the store itself shows about the bytes of ``obj`` (as ``stat`` returned it: then without a request), if
        they were hashed in parts of ``part_size``: STORE_CHECKED where it proves these hashes, FLUSHED for a directory,
        else NONE. IntegrityError if it proves that the bytes are different. Transfers no data."""
        ...

    # Reading.

    def read(self, key: str, *, limit: int = 64 << 20) -> tuple[StoredObject, bytes] | None:
        """A small object and its bytes, from one answer (``ours`` is known; usable as ``expected`` of ``replace``), or
        None if absent. More than ``limit`` bytes raises IntegrityError."""
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

    def delete(self, obj: StoredObject) -> None:
        """Delete this version. Absent is success, also when the name holds another version by now. The store itself
        looks at the writer tag of what it deletes, whatever ``obj.ours`` says: an object without it is refused with a
        RemoteError (promise 9)."""
        ...

    def check(self) -> tuple[str, ...]:
        """Prove that the store is usable; returns warnings, ``CannotDelete`` among them. Tries out whatever
        ``features`` holds. Raises RemoteError."""
        ...

    def close(self) -> None: ...


class AccessDenied(RemoteError):  # noqa: N818
    """The operating system denies access to ``keys``, objects or directories of a directory store. A listing raises it
    after everything else."""

    def __init__(self, what: str, *, where: str = "", keys: Sequence[str] = ()) -> None:
        fix = "let podwatch's user read and write there"
        super().__init__(what, where=where, fix=fix, transient=False)
        self.keys = tuple(keys)


class NotMarked(RemoteError):  # noqa: N818
    """An object is kept, because it does not carry podwatch's mark."""


def not_ours(url: str, key: str) -> RemoteError:
    """What ``delete`` raises for an object without podwatch's mark."""
    return NotMarked(
        "podwatch keeps this object, because it does not carry podwatch's mark",
        where=f"{url}/{key}",
        fix="delete it yourself if it is not needed",
        transient=False,
    )


def store_time(store: ObjectStore, wall: float) -> float:
    """``wall`` (epoch seconds by this machine's clock) converted to the store's clock, as far as its last answer showed
    it: for ages of stored objects."""
    return wall - (store.clock_skew or 0.0)


# -- calls by price class --------------------------------------------------------------------------------------------
# A is free, B costs as a small read, C as a listing; each store knows the class of its calls (docs/sync.md).


class Calls:
    """Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = {"A": 0, "B": 0, "C": 0}

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
    """Adds to ``TOTAL`` the calls that one child reports; its messages carry the sum in ``calls``. Threads of the child
    report on their own: a message can arrive after one with a larger sum, and then it adds nothing."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}

    def hear(self, message: Mapping[str, Any]) -> None:
        calls = message.get("calls")
        if isinstance(calls, dict):
            more = {name: max(0, count - self._counted.get(name, 0)) for name, count in calls.items()}
            TOTAL.add(more)
            self._counted |= {name: self._counted.get(name, 0) + count for name, count in more.items()}
