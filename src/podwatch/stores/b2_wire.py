"""Sends upload bodies and receives downloads on plain HTTP/1.1 connections of our own: small requests are sent
thousands of times.

The HTTP library beneath the SDK takes about 2 ms of CPU for each request, most of it to prepare what never changes, and
a fresh megabyte of memory for each block. Here a small body is sent with its head in one piece, and a large one through
one buffer. Everything else (JSON calls, anything through a proxy) stays with the library. Errors are raised as that
library's, so that the SDK translates them as before.
"""

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit
from urllib.request import getproxies

import requests
from requests.structures import CaseInsensitiveDict
from requests.utils import DEFAULT_CA_BUNDLE_PATH, select_proxy, should_bypass_proxies

from podwatch.stores.parts import PartStream

if TYPE_CHECKING:
    pass  # moved


BLOCK = 1 << 20
"""Bytes handed to the socket at once; a smaller body leaves together with its head."""
MOST_HEAD = 1 << 16
"""Bytes of one line of an answer's head, and how many lines: more is not HTTP."""
MOST_BODY = 16 << 20
"""Bytes of an answer: a file's description is a few kilobytes."""
IDLE_CHECK = 0.05
"""Seconds of idleness after which a kept connection is checked before reuse."""


@dataclass(frozen=True, slots=True)
class Answer:
    """As much of the library's Response as the SDK reads."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes
    url: str

    def close(self) -> None:
        """Nothing to close."""


@dataclass(slots=True)
class _Line:
    """One connection. ``answers`` reads from it; ``used`` is the time of its last use."""

    socket: socket.socket
    answers: BinaryIO
    used: float = 0.0
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray()))

    def block(self, length: int) -> memoryview:
        if len(self.buffer) < length:
            self.buffer = memoryview(bytearray(length))
        return self.buffer[:length]

    def close(self) -> None:
        self.answers.close()
        self.socket.close()

    def dropped(self) -> bool:
        """Whether the other side has closed it, or has sent unrequested bytes."""
        if time.monotonic() - self.used < IDLE_CHECK:
            return False
        waited = self.socket.gettimeout()
        try:
            self.socket.settimeout(0)
            if isinstance(self.socket, ssl.SSLSocket):
                self.socket.read(1)
            else:
                self.socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(waited)
        return True


class Wire:
    """Kept connections by host, for any number of threads. ``post`` sends one body and reads the answer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str, int], list[_Line]] = {}
        self._direct: dict[str, bool] = {}
        self._tls: ssl.SSLContext | None = None

    def reaches(self, url: str) -> bool:
        """Is ``url`` reached directly, without a proxy from the environment?"""
        host = urlsplit(url).netloc
        if host not in self._direct:
            proxies = getproxies()
            self._direct[host] = should_bypass_proxies(url, None) or not select_proxy(url, proxies)
        return self._direct[host]

    def post(self, url: str, headers: Mapping[str, str], body: PartStream, timeouts: tuple[float, float]) -> Answer:
        """``timeouts``: seconds to connect, and for a block to be accepted or an answer to come. Raises
        requests.Timeout and requests.ConnectionError; an exception from reading the body is in ``body.failure``."""
        place, lead = _request("POST", url, headers)
        line: _Line | None = None
        try:
            line = self._take(place, timeouts)
            status, found, content, again = self._exchange(line, lead, body)
        except Exception as error:
            late = isinstance(error, TimeoutError) and body.failure is None
            kind = requests.Timeout if late else requests.ConnectionError
            raise kind(f"{place[1]}: {error}") from error
        else:
            if again:
                self._keep(place, line)
                line = None
        finally:
            if line is not None:
                line.close()
        return Answer(status, found, content, url)

    def get(self, url: str, headers: Mapping[str, str], timeouts: tuple[float, float]) -> "Body":
        """Send the request and read the answer's head; the caller reads and closes its body. Raises as ``post``."""
        # moved

        place, lead = _request("GET", url, headers)
        line: _Line | None = None
        try:
            line = self._take(place, timeouts)
            line.socket.sendall(lead)
            status, version, found = _head(line.answers)
            again = _reusable(version, found)
            kept = line
            return Body(
                url,
                status,
                found,
                line.socket,
                line.answers,
                lambda reuse: self._keep(place, kept) if reuse else kept.close(),
                reusable=again,
            )
        except Exception as error:
            if line is not None:
                line.close()
            kind = requests.Timeout if isinstance(error, TimeoutError) else requests.ConnectionError
            raise kind(f"{place[1]}: {error}") from error

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, {}
        for lines in kept.values():
            for line in lines:
                line.close()

    # -- one exchange -------------------------------------------------------------------------------------------------

    def _exchange(
        self, line: _Line, lead: bytes, body: PartStream
    ) -> tuple[int, CaseInsensitiveDict[str], bytes, bool]:
        """Status, headers, content, and whether the connection can be reused."""
        broken: OSError | None = None
        try:
            self._send(line, lead, body)
        except (BrokenPipeError, ConnectionResetError) as error:
            if body.failure is not None:
                raise
            broken = error  # a refusing store does not read to the end: its answer has the reason
        try:
            status, headers, content, again = _answer(line.answers)
        except (OSError, ValueError):
            if broken is not None:
                raise broken from None
            raise
        return status, headers, content, again and broken is None

    @staticmethod
    def _send(line: _Line, lead: bytes, body: PartStream) -> None:
        left = len(body)
        first = len(lead)
        block = line.block(first + min(left, BLOCK))
        block[:first] = lead
        while left:
            end = first
            while left and end < len(block):
                count = body.readinto(block[end:])
                if not count:
                    raise ValueError("body ended early")
                end, left = end + count, left - count
            line.socket.sendall(block[:end])
            first = 0

    # -- connections --------------------------------------------------------------------------------------------------

    def _take(self, place: tuple[str, str, int], timeouts: tuple[float, float]) -> _Line:
        while True:
            with self._lock:
                kept = self._kept.get(place)
                line = kept.pop() if kept else None
            if line is None:
                return self._connect(place, timeouts)
            if not line.dropped():
                line.socket.settimeout(timeouts[1])
                return line
            line.close()

    def _keep(self, place: tuple[str, str, int], line: _Line) -> None:
        line.used = time.monotonic()
        with self._lock:
            kept = self._kept.setdefault(place, [])
            if sum(map(len, self._kept.values())) < self._most:
                kept.append(line)
                return
        line.close()

    def _connect(self, place: tuple[str, str, int], timeouts: tuple[float, float]) -> _Line:
        scheme, host, port = place
        try:
            found = socket.create_connection((host, port), timeouts[0])
        except socket.gaierror as error:
            raise OSError(f"failed to resolve: {error}") from error
        try:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if scheme == "https":
                found = self._context().wrap_socket(found, server_hostname=host)
            found.settimeout(timeouts[1])
        except BaseException:
            found.close()
            raise
        return _Line(found, found.makefile("rb"))

    def _context(self) -> ssl.SSLContext:
        """With the certificates that the library would use."""
        with self._lock:
            if self._tls is None:
                named = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
                chosen = named or DEFAULT_CA_BUNDLE_PATH
                folder = Path(chosen).is_dir()
                self._tls = ssl.create_default_context(
                    cafile=None if folder else chosen, capath=chosen if folder else None
                )
            return self._tls


def _request(method: str, url: str, headers: Mapping[str, str]) -> tuple[tuple[str, str, int], bytes]:
    """The destination and the request's head."""
    parts = urlsplit(url)
    place = (parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    head = [f"{method} {target} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    return place, "\r\n".join([*head, "", ""]).encode("latin-1")


def _reusable(version: str, headers: Mapping[str, str]) -> bool:
    said = headers.get("connection", "").lower()
    return "close" not in said if version == "HTTP/1.1" else "keep-alive" in said


def _answer(line: BinaryIO) -> tuple[int, CaseInsensitiveDict[str], bytes, bool]:
    status, version, headers = _head(line)
    while 100 <= status < 200:
        status, version, headers = _head(line)
    again = _reusable(version, headers)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        content = _chunks(line)
    elif "content-length" in headers:
        length = int(headers["content-length"])
        if not 0 <= length <= MOST_BODY:
            raise ValueError("answer has an impossible length")
        content = _exactly(line, length)
    else:
        content, again = line.read(MOST_BODY), False
    return status, headers, content, again


def _head(line: BinaryIO) -> tuple[int, str, CaseInsensitiveDict[str]]:
    first = line.readline(MOST_HEAD)
    if not first:
        raise ConnectionResetError("connection was closed without an answer")
    version, _, rest = first.decode("latin-1").partition(" ")
    if not version.startswith("HTTP/"):
        raise ValueError("answer is not HTTP")
    headers: CaseInsensitiveDict[str] = CaseInsensitiveDict()
    for _ in range(200):
        text = line.readline(MOST_HEAD)
        if text in (b"\r\n", b"\n"):
            return int(rest[:3]), version, headers
        if not text.endswith(b"\n"):
            break
        name, _, value = text.decode("latin-1").partition(":")
        headers[name.strip()] = value.strip()
    raise ValueError("answer's head is cut off")


def _exactly(line: BinaryIO, length: int) -> bytes:
    data = line.read(length)
    if len(data) != length:
        raise ConnectionResetError("answer is cut off")
    return data


def _chunks(line: BinaryIO) -> bytes:
    content = bytearray()
    while True:
        size = int(line.readline(MOST_HEAD).split(b";")[0], 16)
        if not 0 <= size <= MOST_BODY - len(content):
            raise ValueError("answer has an impossible length")
        if not size:
            break
        content += _exactly(line, size)
        line.readline(MOST_HEAD)
    while line.readline(MOST_HEAD) not in (b"\r\n", b"\n", b""):
        pass
    return bytes(content)


# -- body of a download ----------------------------------------------------------------------------------------------
# The library returns a body in fresh objects of at most one read each: each costs a few hand-offs of the
# interpreter's lock, which the connections of one process share. Here the kernel fills a whole block before the
# thread wakes.

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
