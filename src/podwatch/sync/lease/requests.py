"""Small store requests as data, and the function that performs them: a simulation can answer the same requests."""

from collections.abc import Generator
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

from podwatch.domain.errors import PodwatchError, RemoteError
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.stores.parts import StreamSource

LIMIT = 1 << 20
"""Largest document, in bytes, that is read this way."""


class TooLate(RemoteError):  # noqa: N818
    """The confirmation that this write rests on is too old (a freeze, a slow store): nothing was sent."""


class Boottime(Protocol):
    """The clock that continues during suspend; ``system.clock.Clock`` is one."""

    def boottime(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Get:
    key: str


@dataclass(frozen=True, slots=True)
class ListAll:
    prefix: str


@dataclass(frozen=True, slots=True)
class Put:
    """``until``: the boottime second after which no byte may be sent any more."""

    key: str
    data: bytes
    until: float


@dataclass(frozen=True, slots=True)
class Create:
    """Answered with None if the name is taken."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    item: StoredObject


Request = Get | ListAll | Put | Create | Delete


def perform(store: ObjectStore, steps: Generator[Request, Any, Any], clock: Boottime) -> Any:
    """Perform the requests against a real store; returns what the generator returns. Raises as both do."""
    try:
        request = next(steps)
        while True:
            try:
                answer = _answer(store, request, clock)
            except PodwatchError as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        return end.value


def _answer(store: ObjectStore, request: Request, clock: Boottime) -> Any:
    match request:
        case Get(key):
            return store.get_bytes(key, limit=LIMIT)
        case ListAll(prefix):
            return list(store.list(prefix))
        case Create(key, data):
            return store.create(key, data)
        case Delete(item):
            return store.delete(item)
        case Put(key, data, until):
            return put_before(store, key, data, until, clock)


def put_before(store: ObjectStore, key: str, data: bytes, until: float, clock: Boottime) -> StoredObject:
    """Store a small object; sends no byte after ``until``, also not in a retry. Raises TooLate."""
    return store.put_small(key, _Fenced(data, until, clock), len(data))


class _Fenced:
    """A document that can be read until ``until`` only."""

    def __init__(self, data: bytes, until: float, clock: Boottime) -> None:
        self._source, self._until, self._clock = StreamSource(BytesIO(data)), until, clock

    def read_at(self, offset: int, size: int) -> bytes:
        self._in_time()
        return self._source.read_at(offset, size)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._in_time()
        return self._source.read_into(offset, buffer)

    def _in_time(self) -> None:
        if self._clock.boottime() > self._until:
            raise TooLate("this write came too late: podwatch must confirm again that this pod holds the lease")
