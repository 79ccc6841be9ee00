"""Small writes that send nothing once the knowledge that they rest on is too old: for the pointer, the lease, and the
controller's requests."""

from io import BytesIO
from typing import Protocol

from podwatch.domain.errors import RemoteError
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.stores.part_reader import StreamSource


class TooLate(RemoteError):  # noqa: N818
    """What this write rests on was read too long ago (a freeze, a slow store): nothing was sent."""


class Boottime(Protocol):
    """The clock that continues during suspend; ``system.clock.Clock`` is one."""

    def boottime(self) -> float: ...


def put_before(store: ObjectStore, key: str, data: bytes, until: float, clock: Boottime) -> StoredObject:
    """Store a small object; sends no byte after ``until``, also not in a retry. Raises TooLate."""
    return store.put_small(key, _Fenced(data, until, clock), len(data))


def replace_before(
    store: ObjectStore, key: str, data: bytes, until: float, clock: Boottime, expected: StoredObject | None
) -> StoredObject | None:
    """The same in place of ``expected`` (None: the name must be free); None if the name holds another object by now.
    Only where ``store.conditional``."""
    return store.replace(key, _Fenced(data, until, clock), len(data), expected)


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
            raise TooLate("this write came too late: what it rests on must be confirmed again")
