"""Reading a source in fixed-size parts while hashing exactly the bytes that leave."""

import hashlib
import io
from collections.abc import Callable
from typing import BinaryIO

from podwatch.domain.errors import IntegrityError

HEX_DIGITS = 40


class PartStream(io.RawIOBase):
    """One part of ``source`` followed by its SHA-1 in hex, as B2's ``hex_digits_at_end`` wants it.

    The hash is of the bytes handed out, so what is recorded is what was sent, even if the file changes meanwhile
    (facts/b2.md section 0, item 2). ``seek(0)`` starts over, which a retry needs.
    """

    def __init__(
        self, source: BinaryIO, offset: int, length: int, progress: Callable[[int], None] | None = None
    ) -> None:
        super().__init__()
        self._source, self._offset, self._length, self._progress = source, offset, length, progress
        self._position = 0
        self._tail = b""
        self._hash = hashlib.sha1(usedforsecurity=False)
        self._reported = 0
        self.failure: Exception | None = None
        """What reading (or the progress callback) raised: HTTP libraries hide it in errors of their own."""

    @property
    def sha1(self) -> str:
        """Of the part; only meaningful once everything was read."""
        return self._hash.hexdigest()

    def __len__(self) -> int:
        return self._length + HEX_DIGITS

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
        self._hash = hashlib.sha1(usedforsecurity=False)
        return 0

    def read(self, size: int | None = -1) -> bytes:
        try:
            return self._next(size)
        except Exception as error:
            self.failure = error
            raise

    def _next(self, size: int | None) -> bytes:
        if size is None or size < 0:
            size = len(self) - self._position
        if self._position < self._length:
            wanted = min(size, self._length - self._position)
            self._source.seek(self._offset + self._position)
            data = self._source.read(wanted)
            if len(data) < wanted:
                raise IntegrityError("a file became shorter while it was read", fix="the set is taken up again later")
            self._hash.update(data)
            self._position += len(data)
            if self._progress is not None and self._position > self._reported:
                self._progress(self._position - self._reported)  # bytes sent again do not count twice
                self._reported = self._position
            return data
        if not self._tail:
            self._tail = self._hash.hexdigest().encode()
        start = self._position - self._length
        data = self._tail[start : start + size]
        self._position += len(data)
        return data


def part_spans(size: int, part_size: int) -> list[tuple[int, int]]:
    """(offset, length) of each part of a file; none for an empty one."""
    return [(at, min(part_size, size - at)) for at in range(0, size, part_size)]
