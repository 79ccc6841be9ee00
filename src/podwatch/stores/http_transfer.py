"""Sends upload bodies and receives downloads on plain HTTP/1.1 connections of our own: small requests are sent
thousands of times. Standard library only; every store that speaks HTTP uses it.

An HTTP library takes about 2 ms of CPU for each request, most of it to prepare what never changes, and a fresh megabyte
of memory for each block. Here a small body is sent with its head in one piece, and a large one through one buffer.
"""

import base64
import contextlib
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from podwatch.stores.tls import TlsLine

BLOCK = 1 << 20
"""Bytes handed to the socket at once; a smaller body leaves together with its head."""
MOST_HEAD = 1 << 16
"""Bytes of one line of an answer's head, and how many lines: more is not HTTP."""
MOST_BODY = 16 << 20
"""Bytes of an answer: a file's description is a few kilobytes."""
IDLE_CHECK = 0.05
"""Seconds of idleness after which a kept connection is checked before reuse."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Full jitter: before try n wait a random time in [0, min(cap, base x 2^n)] seconds, or what the server
    requested."""

    attempts: int = 7
    base: float = 0.5
    cap: float = 30.0

    def pause(self, attempt: int, asked: float | None) -> float:
        if asked is not None:
            return max(0.0, min(asked, 120.0)) + random.uniform(0, self.base)
        return random.uniform(0, min(self.cap, self.base * 2**attempt))


class WireBroken(OSError):  # noqa: N818
    """The connection could not be opened, or ended early; or the other side does not speak HTTP."""


class WireTimeout(WireBroken):
    """Nothing was accepted, or nothing came, for too long."""


class Headers(dict[str, str]):
    """An answer's headers; names in any case."""

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(name.lower(), value)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


class Outgoing(Protocol):
    """The body of a request. ``failure``: the exception from reading it, if it could not be read."""

    failure: Exception | None

    def __len__(self) -> int: ...
    def readinto(self, buffer: memoryview, /) -> int: ...


class Bytes:
    """A body that is in memory."""

    failure: Exception | None = None

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def readinto(self, buffer: memoryview, /) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, in the form in which HTTP libraries have it."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes
    url: str

    def close(self) -> None:
        """Nothing to close."""


@dataclass(slots=True)
class _Line:
    """One connection. ``answers`` reads from it; ``used`` is the time of its last use."""

    socket: "socket.socket | TlsLine"
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
            self.socket.recv_into(bytearray(1))
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(waited)
        return True


class Place(NamedTuple):
    """Where a connection leads. ``proxy``: the URL of the proxy on the way, else empty."""

    scheme: str
    host: str
    port: int
    proxy: str = ""


class Wire:
    """Kept connections by host, for any number of threads.

    ``most``: kept at once. ``ca``: a file or directory of certificates, empty for the usual ones. ``proxies``: whether
    the proxies of the environment (HTTPS_PROXY, HTTP_PROXY, NO_PROXY) are used. All errors of the line are WireBroken.
    """

    def __init__(self, most: int, *, ca: str = "", proxies: bool = False) -> None:
        self._most, self._ca, self._proxies = most, ca, proxies
        self._lock = threading.Lock()
        self._kept: dict[Place, list[_Line]] = {}
        self._via: dict[tuple[str, str], str] = {}
        self._tls: ssl.SSLContext | None = None

    def post(self, url: str, headers: Mapping[str, str], body: Outgoing, timeouts: tuple[float, float]) -> Answer:
        return self.send("POST", url, headers, body, timeouts)

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Outgoing | None,
        timeouts: tuple[float, float],
    ) -> Answer:
        """Send a request and read the whole answer. ``headers`` have the body's Content-Length. ``timeouts``: seconds
        to connect, and for a block to be accepted or an answer to come. Raises WireBroken; an exception from reading
        the body is in ``body.failure``."""
        place, lead = self._request(method, url, headers)
        line: _Line | None = None
        try:
            line = self._take(place, timeouts)
            status, found, content, again = self._exchange(line, lead, body, bodiless=method == "HEAD")
        except Exception as error:
            late = isinstance(error, TimeoutError) and (body is None or body.failure is None)
            raise (WireTimeout if late else WireBroken)(f"{place.host}: {error}") from error
        else:
            if again:
                self._keep(place, line)
                line = None
        finally:
            if line is not None:
                line.close()
        return Answer(status, found, content, url)

    def get(self, url: str, headers: Mapping[str, str], timeouts: tuple[float, float]) -> "Body":
        """Send the request and read the answer's head; the caller reads and closes its body. Raises as ``send``."""
        place, lead = self._request("GET", url, headers)
        line: _Line | None = None
        try:
            line = self._take(place, timeouts)
            line.socket.sendall(lead)
            status, version, found = _head(line.answers)
            while 100 <= status < 200:
                status, version, found = _head(line.answers)
            again = _reusable(version, found)
            if status not in (200, 206):
                content, again = _content(line.answers, found, again)
                body = Body.whole(url, status, found, content)
                if again:
                    self._keep(place, line)
                else:
                    line.close()
                return body
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
            raise (WireTimeout if isinstance(error, TimeoutError) else WireBroken)(f"{place.host}: {error}") from error

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, {}
        for lines in kept.values():
            for line in lines:
                line.close()

    # -- one exchange -------------------------------------------------------------------------------------------------

    def _exchange(
        self, line: _Line, lead: bytes, body: Outgoing | None, *, bodiless: bool
    ) -> tuple[int, Headers, bytes, bool]:
        """Status, headers, content, and whether the connection can be reused."""
        broken: OSError | None = None
        try:
            if body is None:
                line.socket.sendall(lead)
            else:
                self._send(line, lead, body)
        except (BrokenPipeError, ConnectionResetError) as error:
            if body is not None and body.failure is not None:
                raise
            broken = error  # a refusing store does not read to the end: its answer has the reason
        try:
            status, headers, content, again = _answer(line.answers, bodiless=bodiless)
        except (OSError, ValueError):
            if broken is not None:
                raise broken from None
            raise
        return status, headers, content, again and broken is None

    @staticmethod
    def _send(line: _Line, lead: bytes, body: Outgoing) -> None:
        left = len(body)
        first = len(lead)
        block = line.block(first + min(left, BLOCK))
        block[:first] = lead
        while left or first:
            end = first
            while left and end < len(block):
                count = body.readinto(block[end:])
                if not count:
                    raise ValueError("body ended early")
                end, left = end + count, left - count
            line.socket.sendall(block[:end])
            first = 0

    # -- connections --------------------------------------------------------------------------------------------------

    def _request(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[Place, bytes]:
        """The destination and the request's head."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        place = Place(parts.scheme, parts.hostname or "", parts.port or (443 if secure else 80), self._proxy(parts))
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        host = parts.netloc.rpartition("@")[2]
        if place.proxy and not secure:
            target = f"http://{host}{target}"
        head = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
        if place.proxy and not secure:
            head += _proxy_login(place.proxy)
        head += [f"{name}: {value}" for name, value in headers.items()]
        return place, "\r\n".join([*head, "", ""]).encode("latin-1")

    def _proxy(self, parts: SplitResult) -> str:
        if not self._proxies:
            return ""
        key = (parts.scheme, parts.hostname or "")
        if key not in self._via:
            proxy = getproxies().get(parts.scheme, "")
            self._via[key] = "" if not proxy or proxy_bypass(key[1]) else proxy
        return self._via[key]

    def _take(self, place: Place, timeouts: tuple[float, float]) -> _Line:
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

    def _keep(self, place: Place, line: _Line) -> None:
        line.used = time.monotonic()
        with self._lock:
            kept = self._kept.setdefault(place, [])
            if sum(map(len, self._kept.values())) < self._most:
                kept.append(line)
                return
        line.close()

    def _connect(self, place: Place, timeouts: tuple[float, float]) -> _Line:
        via = urlsplit(place.proxy if "://" in place.proxy else f"http://{place.proxy}") if place.proxy else None
        target = (place.host, place.port) if via is None else (via.hostname or "", via.port or 3128)
        try:
            found = socket.create_connection(target, timeouts[0])
        except socket.gaierror as error:
            raise OSError(f"failed to resolve: {error}") from error
        try:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if place.scheme == "https":
                if via is not None:
                    _tunnel(found, place)
                line: socket.socket | TlsLine = TlsLine(found, self._context(), place.host)
            else:
                line = found
            line.settimeout(timeouts[1])
        except BaseException:
            found.close()
            raise
        return _Line(line, line.makefile("rb"))

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                chosen = self._ca or usual_certificates()
                folder = Path(chosen).is_dir() if chosen else False
                self._tls = ssl.create_default_context(
                    cafile=None if folder or not chosen else chosen, capath=chosen if folder else None
                )
            return self._tls


def usual_certificates() -> str:
    """The certificates that Python's HTTP libraries use: those that the environment names, else certifi's, which come
    with b2sdk; empty for those of the system."""
    named = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if named:
        return named
    try:
        import certifi
    except ImportError:
        return ""
    return str(certifi.where())


def _proxy_login(proxy: str) -> list[str]:
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if not parts.username:
        return []
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return [f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}"]


def _tunnel(line: socket.socket, place: Place) -> None:
    """Ask a proxy to connect through to ``place`` (RFC 9110, CONNECT)."""
    end = f"{place.host}:{place.port}"
    head = [f"CONNECT {end} HTTP/1.1", f"Host: {end}", *_proxy_login(place.proxy), "", ""]
    line.sendall("\r\n".join(head).encode("latin-1"))
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):  # byte by byte: what follows belongs to TLS
        piece = line.recv(1)
        if not piece or len(answer) > MOST_HEAD:
            raise ConnectionResetError("the proxy ended the connection")
        answer += piece
    words = answer.split(b" ", 2)
    if len(words) < 2 or words[1] != b"200":
        raise ConnectionError(f"the proxy refuses: {answer.splitlines()[0][:100].decode('latin-1')}")


def _reusable(version: str, headers: Mapping[str, str]) -> bool:
    said = headers.get("connection", "").lower()
    return "close" not in said if version == "HTTP/1.1" else "keep-alive" in said


def _answer(line: BinaryIO, *, bodiless: bool = False) -> tuple[int, Headers, bytes, bool]:
    status, version, headers = _head(line)
    while 100 <= status < 200:
        status, version, headers = _head(line)
    again = _reusable(version, headers)
    if bodiless or status in (204, 304):
        return status, headers, b"", again
    content, again = _content(line, headers, again)
    return status, headers, content, again


def _content(line: BinaryIO, headers: Headers, again: bool) -> tuple[bytes, bool]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return _chunks(line), again
    if "content-length" in headers:
        length = int(headers["content-length"])
        if not 0 <= length <= MOST_BODY:
            raise ValueError("answer has an impossible length")
        return _exactly(line, length), again
    return line.read(MOST_BODY), False


def _head(line: BinaryIO) -> tuple[int, str, Headers]:
    first = line.readline(MOST_HEAD)
    if not first:
        raise ConnectionResetError("connection was closed without an answer")
    version, _, rest = first.decode("latin-1").partition(" ")
    if not version.startswith("HTTP/"):
        raise ValueError("answer is not HTTP")
    headers = Headers()
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
# A library returns a body in fresh objects of at most one read each: each costs a few hand-offs of the
# interpreter's lock, which the connections of one process share. Here the kernel fills a whole block before the
# thread wakes.

SMALL = 1 << 18
"""Bytes: a body up to this size is read through the buffer that the head came through."""
LARGEST_ERROR = 1 << 20


class Body:
    """An answer whose body is still arriving: as much of an HTTP library's Response as b2sdk and podwatch use.

    ``done(again)`` returns the connection to the pool, or ends it. Not thread-safe.
    """

    def __init__(
        self,
        url: str,
        status: int,
        headers: Mapping[str, str],
        line: socket.socket | TlsLine,
        answers: BinaryIO,
        done: Callable[[bool], None],
        *,
        reusable: bool,
    ) -> None:
        self.url, self.status_code, self.headers = url, status, headers
        self._line, self._answers, self._done, self._reusable = line, answers, done, reusable
        self.left = int(headers.get("content-length", -1))
        self._buffered = -1
        self._seconds = line.gettimeout() or 0.0
        self._open = True
        self._content: bytes | None = None
        if self.left < 0 or "chunked" in headers.get("transfer-encoding", "").lower():
            self.close()
            raise ValueError("answer has no length")

    @classmethod
    def whole(cls, url: str, status: int, headers: Headers, content: bytes) -> "Body":
        """An answer that has been read already: an error's text."""
        made = cls.__new__(cls)
        made.url, made.status_code, made.headers = url, status, headers
        made.left, made._open, made._content = 0, False, content
        return made

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
        """Fill ``buffer``, or as much of it as arrives within one read timeout. At least one byte: WireTimeout if
        none came, WireBroken if the connection ended."""
        buffer = buffer[: self.left]
        try:
            count = self._read(buffer)
        except (TimeoutError, BlockingIOError) as error:
            raise WireTimeout("nothing came") from error
        except (OSError, ValueError) as error:
            raise WireBroken(str(error)) from error
        if not count:
            raise WireBroken("connection was closed early")
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
            if not self._buffered and isinstance(self._line, socket.socket):
                self._line.settimeout(None)  # the kernel applies the timeout, so that it can also fill the buffer
                timeout = struct.pack("ll", int(self._seconds), int(self._seconds % 1 * 1e6))
                self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            return count
        if isinstance(self._line, socket.socket):
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
        if again and isinstance(self._line, socket.socket) and self._buffered == 0:
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
