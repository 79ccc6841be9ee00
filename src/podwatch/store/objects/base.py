"""The seven operations, and what every kind of store does alike: slices of files, hashes, repetition, ranges.

An object is stored by one PUT, whole or not at all, with a hash that was computed before and that the store compares.
Objects never change, except a few documents, so that a repeated PUT is harmless. Synchronous, used by several threads;
nothing here runs on the event loop.
"""

import hashlib
import math
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from podwatch.domain.errors import IntegrityError, PodwatchError, RemoteError
from podwatch.domain.safe_names import check_relative_path
from podwatch.store.objects.errors import (
    ObjectTooLarge,
    StoreOutage,
    StoreRefused,
    became_shorter,
    not_the_store,
)
from podwatch.store.objects.transport import BLOCK, Reply, Transport, boottime

DOCUMENT = 8 << 20
"""Bytes of the largest document: a manifest of 20,000 pieces has half of it."""
MOST_LISTED = 1_000_000
SMALL_SECONDS = 60.0
"""A request that is no piece ends within this time, its repetitions included: a lease waits for it."""
SEND_DAMAGED = 4
"""How often a body that arrives damaged is sent; what still fails has its cause on this machine."""
Take = Callable[[memoryview], object]
"""Called with each block in order; it uses the bytes before it returns."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An entry of a listing. ``wall``: when it was uploaded, by the store's clock, in epoch seconds; ``version``: the
    store's name for exactly these bytes, empty where it has none; ``hash``: ``sha1:<hex>`` where listings have what the
    store itself compared (B2), else empty (S3's ETag is no hash of ours, and of a directory nothing is known)."""

    key: str
    size: int
    wall: float
    version: str = ""
    hash: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """``verifies``: the hash whose wrong value this store refuses, empty if none. ``skew``: seconds that this machine's
    clock is ahead of the store's; None where the store has no clock of its own."""

    verifies: str
    can_delete: bool
    skew: float | None
    warnings: tuple[str, ...] = ()


class Slice:
    """``length`` bytes of an open file from ``offset`` on, as a stream that HTTP libraries send; read by position.

    ``on_read`` is called with the number of bytes that are sent, and may wait; bytes that are sent again do not count
    twice. ``failure``: what reading raised, which a library may hide in an error of its own.
    """

    def __init__(self, descriptor: int, offset: int, length: int, on_read: Callable[[int], object] | None = None):
        self.descriptor, self.offset, self.length = descriptor, offset, length
        self.failure: Exception | None = None
        self._on_read, self._position, self._counted = on_read, 0, 0

    def __len__(self) -> int:
        return self.length

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self.length)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = self.length - self._position
        wanted = left if size < 0 else min(size, left)
        try:
            data = os.pread(self.descriptor, wanted, self.offset + self._position)
            if wanted and not data:
                raise became_shorter()
            self._position += len(data)
            if self._on_read is not None and self._position > self._counted:
                new, self._counted = self._position - self._counted, self._position
                self._on_read(new)
        except Exception as error:
            self.failure = error
            raise
        return data

    def hashes(self, names: Iterable[str]) -> dict[str, str]:
        """Read once, for all of them; in hex. Raises IntegrityError where the file ends early."""
        digests = {name: hashlib.new(name, usedforsecurity=False) for name in names}
        block, done = memoryview(bytearray(min(self.length, BLOCK))), 0
        while done < self.length:
            count = os.preadv(self.descriptor, [block[: self.length - done]], self.offset + done)
            if not count:
                raise became_shorter()
            for digest in digests.values():
                digest.update(block[:count])
            done += count
        return {name: digest.hexdigest() for name, digest in digests.items()}


Source = bytes | Slice


def hashes_of(source: Source, names: Iterable[str]) -> dict[str, str]:
    if isinstance(source, Slice):
        return source.hashes(names)
    return {name: hashlib.new(name, source, usedforsecurity=False).hexdigest() for name in names}


class Objects(Protocol):
    """Every error is a RemoteError: StoreOutage, StoreRefused, ObjectMissing, ObjectTooLarge or IntegrityError."""

    url: str
    """Safe to print."""
    calls: Counter[str]
    """Billed calls of this object by price class: A is free, B costs as a small read, C as a listing."""

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hashes that ``put`` needs; the first is the one to record."""
        ...

    @property
    def skew(self) -> float | None:
        """Seconds that this machine's clock is ahead of the store's, by its last answer."""
        ...

    def put(
        self, key: str, source: Source, hashes: Mapping[str, str] | None = None, *, until: float = math.inf
    ) -> None:
        """One PUT. ``hashes``: those of ``self.hashes`` in hex, where they are known. A source with other bytes is not
        stored: StoreOutage with ``damaged``. A directory keeps the mode of a slice's file. ``until``: the boottime
        after which nothing is sent any more, also by a process that was frozen in this call: LeaseUnsettled. A document
        (``bytes``) ends in bounded time, repetitions included."""
        ...

    def get(self, key: str, take: Take, *, length: int, hash_name: str = "sha256") -> str:
        """Pass the bytes of an object to ``take``; their hex hash. One that has not ``length`` bytes raises
        IntegrityError, and nothing of it is passed. A broken connection is resumed where it broke. What ``take`` raises
        passes unchanged."""
        ...

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        """A small document. Raises ObjectTooLarge above ``limit``."""
        ...

    def list(self, prefix: str, limit: int = MOST_LISTED) -> Iterator[ObjectInfo]:
        """What is there now below ``prefix``, in the order of keys. More than ``limit`` raises ObjectTooLarge."""
        ...

    def delete(self, keys: Sequence[str], *, older: bool = False, until: float = math.inf) -> None:
        """Delete every version of these objects, in this order; ``older``: those that a newer one has replaced, which
        some stores keep. Absent is success. One listing of what the keys' common folder holds, then a free call for
        each version. ``until`` as for ``put``."""
        ...

    def check(self, prefix: str) -> Checked:
        """Try out everything below ``prefix`` that a run needs, with one small object that is deleted again. A store
        that refuses no wrong hash, and keys that cannot delete, are warnings. From then on ``put`` uses the hash that
        this store was seen to compare."""
        ...

    def close(self) -> None: ...


# -- repetition ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retry:
    """Exponential pauses with jitter; a store that asks for a longer one gets it, up to two minutes."""

    attempts: int = 6
    base: float = 1.0
    cap: float = 30.0
    sleep: Callable[[float], object] = time.sleep

    def pause(self, attempt: int, asked: float) -> float:
        wait = min(self.cap, self.base * 2.0 ** (attempt - 1)) * (0.5 + random.random() / 2)
        return max(wait, min(asked, 120.0))


T = TypeVar("T")


def persist(call: Callable[[], T], retry: Retry, ends: float = math.inf) -> T:
    """Repeat ``call`` while waiting can help, until the boottime ``ends``. What arrived damaged is sent again at once,
    by a new connection."""
    attempt = damaged = 0
    while True:
        try:
            return call()
        except StoreOutage as problem:
            if problem.damaged and (damaged := damaged + 1) < SEND_DAMAGED:
                continue
            attempt += 1
            pause = retry.pause(attempt, problem.wait)
            if problem.damaged or attempt >= retry.attempts or boottime() + pause >= ends:
                raise
            retry.sleep(pause)


# -- stores that speak HTTP ------------------------------------------------------------------------------------------


class HttpObjects:
    """What B2 and S3 have in common; each adds one request of every kind."""

    url: str
    mark: str
    """A header of every answer that has an object in it: a page in its place has none."""

    def __init__(self, transport: Transport, retry: Retry) -> None:
        self._transport, self._retry = transport, retry
        self.calls = transport.calls

    @property
    def skew(self) -> float | None:
        return self._transport.skew

    @property
    def hashes(self) -> tuple[str, ...]:
        raise NotImplementedError

    small_seconds = SMALL_SECONDS

    def _persist(self, call: Callable[[], T], size: float = 0.0, until: float = math.inf) -> T:
        """Within the time of a small request, longer for a document of more than a megabyte (a quarter of one per
        second), unbounded for an infinite ``size``; sending nothing after the boottime ``until``."""
        seconds = self.small_seconds + max(0.0, size - (1 << 20)) / (1 << 18)
        with self._transport.bounds.of(seconds, until) as ends:
            return persist(call, self._retry, ends)

    def put(
        self, key: str, source: Source, hashes: Mapping[str, str] | None = None, *, until: float = math.inf
    ) -> None:
        check_relative_path(key)
        size = len(source) if isinstance(source, bytes) else math.inf
        known = dict(hashes or {})
        missing = [name for name in self.hashes if name not in known]
        known |= hashes_of(source, missing) if missing else {}
        with self._about(key):
            self._persist(lambda: self._put(key, source, known), size, until)

    def get(self, key: str, take: Take, *, length: int, hash_name: str = "sha256") -> str:
        check_relative_path(key)
        digest, done = hashlib.new(hash_name, usedforsecurity=False), 0

        def receive() -> None:
            nonlocal done
            with closing(self._open(key, (done, length - 1) if done else None)) as reply:
                if self._size(reply, key, done) != length:
                    raise IntegrityError("the object's size differs from the recorded one", where=self.where(key))
                for block in reply.blocks(length - done):
                    digest.update(block)
                    take(block)
                    done += len(block)

        while True:
            before = done
            try:
                with self._about(key):
                    self._persist(receive, math.inf)
                return digest.hexdigest()
            except StoreOutage:
                if done == before:
                    raise  # as long as bytes arrive it continues, however often the line breaks

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        check_relative_path(key)

        def receive() -> bytes:
            with closing(self._open(key, None)) as reply:
                size = self._size(reply, key, 0)
                if size > limit:
                    raise ObjectTooLarge(self.where(key))
                return reply.document(limit)

        with self._about(key):
            return self._persist(receive, limit)

    def list(self, prefix: str, limit: int = MOST_LISTED) -> Iterator[ObjectInfo]:
        return self._ordered(self._pages(prefix, versions=False), prefix, limit)

    def delete(self, keys: Sequence[str], *, older: bool = False, until: float = math.inf) -> None:
        wanted = {check_relative_path(key): list[str]() for key in keys}
        if not wanted:
            return
        common = os.path.commonprefix(list(wanted))  # noqa: RUF071 - of names
        try:
            for item in self._ordered(self._pages(common, versions=True), common, MOST_LISTED):
                if item.key in wanted:
                    wanted[item.key].append(item.version)
        except StoreRefused as error:
            if error.kind not in ("unsupported", "permission"):
                raise
            wanted = {} if older else {key: [""] for key in wanted}  # without versions, or the right to list them
        for key, versions in wanted.items():
            for version in reversed(versions[1:] if older else versions):  # the name never shows an older one
                with self._about(key):
                    self._persist(partial(self._delete, key, version), until=until)

    def check(self, prefix: str) -> Checked:
        self._check_key(prefix)
        key, body = f"{prefix}tmp/check-{secrets.token_hex(6)}", b"podwatch tries out this store\n"
        warnings: list[str] = []
        try:
            verifies = self._find_hash(key, body)
            self.put(key, body)
            if self.read(key) != body:
                raise IntegrityError("the store returns different bytes than podwatch wrote", where=self.where(key))
            if key not in {item.key for item in self.list(key)}:
                raise IntegrityError("a listing does not show what was just stored", where=self.where(key))
        finally:
            try:
                self.delete([key])
                can_delete = True
            except RemoteError:
                can_delete = False
        if not verifies:
            warnings.append("the store compares no hash: an upload that arrives damaged is found at its restore only")
        if not can_delete:
            warnings.append("the key cannot delete: old checkpoints stay in the store until you remove them")
        if self.skew is not None and abs(self.skew) > 60:
            warnings.append(f"this machine's clock differs from the store's by {self.skew:.0f} s: set it")
        return Checked(verifies, can_delete, self.skew, tuple(warnings))

    def close(self) -> None:
        self._transport.close()

    def where(self, key: str) -> str:
        return f"{self.url}/{key}"

    @contextmanager
    def _about(self, key: str) -> Iterator[None]:
        """Errors about the store name the object."""
        try:
            yield
        except PodwatchError as error:
            if error.where == self.url:
                error.where = self.where(key)
            raise

    def _refuses(self, key: str, body: bytes, name: str) -> bool:
        """Whether a PUT with a wrong hash of this name is refused."""
        wrong = hashes_of(b"podwatch did not send this", [name])

        def send() -> bool:
            try:
                self._put(key, body, wrong)
            except StoreOutage as problem:
                if problem.damaged:
                    return True
                raise
            return False

        return self._persist(send)

    def _size(self, reply: Reply, key: str, at: int) -> int:
        """The whole object's size, by an answer that has its bytes from ``at`` on. Some servers answer a range with
        status 200, so that only its header counts."""
        if self.mark not in reply.headers:
            raise not_the_store(self.where(key))
        try:
            if not at:
                return int(reply.headers["Content-Length"])
            span, _, total = reply.headers["Content-Range"].removeprefix("bytes ").partition("/")
            if int(span.partition("-")[0]) != at:
                raise ValueError
            return int(total)
        except (KeyError, ValueError):
            raise not_the_store(self.where(key)) from None

    def _ordered(self, items: Iterable[ObjectInfo], prefix: str, limit: int) -> Iterator[ObjectInfo]:
        """A listing that goes backwards never ends; and a key outside was not asked for."""
        last, count = "", 0
        for item in items:
            if not item.key.startswith(prefix) or item.key < last:
                raise IntegrityError("the store's listing is in no order", where=self.where(prefix))
            last, count = item.key, count + 1
            if count > limit:
                raise ObjectTooLarge(self.where(prefix))
            yield item

    # One request of every kind. Each raises StoreOutage, StoreRefused or ObjectMissing.

    def _put(self, key: str, source: Source, hashes: Mapping[str, str]) -> None:
        raise NotImplementedError

    def _open(self, key: str, span: tuple[int, int] | None) -> Reply:
        """The object, or its bytes from the first to the last of ``span``."""
        raise NotImplementedError

    def _pages(self, prefix: str, *, versions: bool) -> Iterator[ObjectInfo]:
        """All pages of a listing, each request repeated. With ``versions`` all of each key, the newest first."""
        raise NotImplementedError

    def _delete(self, key: str, version: str) -> None:
        raise NotImplementedError

    def _check_key(self, prefix: str) -> None:
        """Raises StoreRefused where the key itself tells that it cannot do what is needed."""

    def _find_hash(self, key: str, body: bytes) -> str:
        raise NotImplementedError
