"""Reads a source in fixed-size parts and hashes exactly the bytes that are sent."""

import hashlib
import io
import os
import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol

from podwatch.domain.errors import IntegrityError

HEX_DIGITS = 40


class Source(Protocol):
    """The bytes of one file, by offset. Used by several threads at once."""

    def read_at(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes; fewer only at the end of the file."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """The same into reused memory; returns the number of bytes."""
        ...


class FileSource:
    """An open file, read without moving its position."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, offset)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return os.preadv(self.descriptor, [buffer], offset)


class StreamSource:
    """A seekable stream, for small things."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def read_at(self, offset: int, size: int) -> bytes:
        with self._lock:
            self._stream.seek(offset)
            return self._stream.read(size)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        data = self.read_at(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def became_shorter() -> IntegrityError:
    return IntegrityError("a file became shorter while podwatch read it", fix="podwatch tries again later")


class PartStream(io.RawIOBase):
    """One part of ``source``, with ``tail`` followed by its SHA-1 in hex, as B2's ``hex_digits_at_end`` wants it.

    ``hashes``: names of the hashes to compute. Each is of the bytes handed out, so a recorded hash
    is of the sent bytes, even if the file changes meanwhile.
    ``seek(0)`` starts over, which a retry needs.
    """

    def __init__(
        self,
        source: Source,
        offset: int,
        length: int,
        progress: Callable[[int], None] | None = None,
        *,
        tail: bool = True,
        hashes: Sequence[str] = ("sha1",),
    ) -> None:
        super().__init__()
        self._with_tail, self._names = tail, tuple(hashes)
        self._source, self._offset, self._length, self._progress = source, offset, length, progress
        self._position = 0
        self._tail = b""
        self._hashes = [hashlib.new(name, usedforsecurity=False) for name in self._names]
        self._reported = 0
        self.failure: Exception | None = None
        """The exception from reading or from the progress callback: HTTP libraries hide it in their own errors."""

    @property
    def sha1(self) -> str:
        """SHA-1 of the part; only valid once everything was read."""
        return self.hash("sha1")

    def hash(self, name: str) -> str:
        """One of ``hashes`` in hex; only valid once everything was read."""
        return self._hashes[self._names.index(name)].hexdigest()

    def __len__(self) -> int:
        return self._length + (HEX_DIGITS if self._with_tail else 0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if offset != 0 or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only a rewind is supported")
        self._position = 0
        self._tail = b""
        self._hashes = [hashlib.new(name, usedforsecurity=False) for name in self._names]
        return 0

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            return self._next(memoryview(buffer))
        except Exception as error:
            self.failure = error
            raise

    def _next(self, buffer: memoryview) -> int:
        if self._position < self._length:
            wanted = buffer[: self._length - self._position]
            count = self._source.read_into(self._offset + self._position, wanted)
            if not count:
                raise became_shorter()
            for digest in self._hashes:
                digest.update(wanted[:count])
            self._position += count
            if self._progress is not None and self._position > self._reported:
                self._progress(self._position - self._reported)  # bytes sent again do not count twice
                self._reported = self._position
            return count
        if not self._with_tail:
            return 0
        if not self._tail:
            self._tail = self.sha1.encode()
        start = self._position - self._length
        data = self._tail[start : start + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def part_spans(size: int, part_size: int) -> list[tuple[int, int]]:
    """(offset, length) of each part of a file; none for an empty one."""
    return [(at, min(part_size, size - at)) for at in range(0, size, part_size)]


def part_sha1(source: Source, offset: int, length: int) -> str:
    """SHA-1 of one part as it is now; if the file has become shorter, of the rest."""
    return part_hashes(source, offset, length, ("sha1",))[0]


def part_hashes(source: Source, offset: int, length: int, names: Sequence[str]) -> tuple[str, ...]:
    """The same with the hashes of these names; read once."""
    digests = [hashlib.new(name, usedforsecurity=False) for name in names]
    block, done = memoryview(bytearray(min(length, 1 << 20))), 0
    while done < length:
        count = source.read_into(offset + done, block[: length - done])
        if not count:
            break
        for digest in digests:
            digest.update(block[:count])
        done += count
    return tuple(digest.hexdigest() for digest in digests)
