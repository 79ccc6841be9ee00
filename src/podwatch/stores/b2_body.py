"""The body of a download over a connection of our own (b2_wire.py), received into reused memory.

The library returns a body in fresh objects of at most one read each: each costs a few hand-offs of the interpreter's
lock, which the connections of one process share. Here the kernel fills a whole block before the thread wakes.
"""

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import requests

from podwatch.stores.b2_wire import BLOCK

SMALL = 1 << 18
"""Bytes: a body up to this size is read through the buffer that the head came through."""
LARGEST_ERROR = 1 << 20


class Body:
    """An answer whose body is still arriving: as much of the library's Response as the SDK and podwatch use.

    ``done(again)`` returns the connection to the pool, or ends it. Not thread-safe.
    """

    def __init__(
        self,
        url: str,
        status: int,
        headers: Mapping[str, str],
        line: socket.socket,
        answers: BinaryIO,
        done: Callable[[bool], None],
        *,
        reusable: bool,
    ) -> None:
        self.url, self.status_code, self.headers = url, status, headers
        self._line, self._answers, self._done, self._reusable = line, answers, done, reusable
        self.left = int(headers.get("content-length", -1))
        self._plain = not isinstance(line, ssl.SSLSocket)
        self._buffered = -1
        self._seconds = line.gettimeout() or 0.0
        self._open = True
        self._content: bytes | None = None
        if self.left < 0 or "chunked" in headers.get("transfer-encoding", "").lower():
            self.close()
            raise ValueError("answer has no length")

    @property
    def content(self) -> bytes:
        """An error's text; the connection is then free."""
        if self._content is None:
            buffer, got = memoryview(bytearray(min(self.left, LARGEST_ERROR))), 0
            while self.left and got < len(buffer):
                got += self.read_into(buffer[got:])
            self._content = bytes(buffer)
            self.close()
        return self._content

    def iter_content(self, size: int = BLOCK) -> Iterator[bytes]:
        buffer = memoryview(bytearray(min(size, max(1, self.left))))
        while self.left:
            count = self.read_into(buffer)
            yield bytes(buffer[:count])
        self.close()

    def read_into(self, buffer: memoryview) -> int:
        """Fill ``buffer``, or as much of it as arrives within one read timeout. At least one byte: requests.Timeout if
        none came, requests.ConnectionError if the connection ended."""
        buffer = buffer[: self.left]
        try:
            count = self._read(buffer)
        except (TimeoutError, BlockingIOError) as error:
            raise requests.Timeout("nothing came") from error
        except (OSError, ValueError) as error:
            raise requests.ConnectionError(str(error)) from error
        if not count:
            raise requests.ConnectionError("connection was closed early")
        self.left -= count
        return count

    def _read(self, buffer: memoryview) -> int:
        if self._buffered < 0 and self.left <= SMALL:
            return int(self._answers.readinto1(buffer))  # type: ignore[attr-defined]
        if self._buffered < 0:
            self._buffered = len(self._answers.peek(1))  # type: ignore[attr-defined]
        if self._buffered:
            count = int(self._answers.readinto(buffer[: self._buffered]))  # type: ignore[attr-defined]
            self._buffered -= count
            if not self._buffered and self._plain:
                self._line.settimeout(None)  # the kernel applies the timeout, so that it can also fill the buffer
                timeout = struct.pack("ll", int(self._seconds), int(self._seconds % 1 * 1e6))
                self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            return count
        if self._plain:
            return self._line.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
        end, got = time.monotonic() + self._seconds, 0
        while got < len(buffer):
            count = self._line.recv_into(buffer[got:])
            got += count
            if not count or time.monotonic() > end:
                break
        return got

    def close(self) -> None:
        """The connection is reused if the whole body was read."""
        if not self._open:
            return
        self._open = False
        again = self._reusable and self.left == 0
        if again and self._plain and self._buffered == 0:
            with contextlib.suppress(OSError):
                self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
                self._line.settimeout(self._seconds)
        self._done(again)


def read_into(response: Any, buffer: memoryview) -> int:
    """The same for either kind of answer: the library's goes through a proxy."""
    if isinstance(response, Body):
        return response.read_into(buffer)
    data: bytes = response.raw.read1(len(buffer), decode_content=False)
    buffer[: len(data)] = data
    return len(data)


def give_back(response: Any, *, complete: bool) -> None:
    if isinstance(response, Body) or not complete:
        response.close()
    else:
        response.raw.release_conn()
