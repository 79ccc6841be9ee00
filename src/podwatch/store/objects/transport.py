"""One HTTP request at a time, bounded: no redirect is followed, no answer is endless, and none takes for ever.

B2's SDK and presigned S3 requests are sent by it. A credential goes to the address that was asked for and to no other.
"""

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from socket import IPPROTO_TCP, SHUT_RDWR, TCP_USER_TIMEOUT
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from podwatch.config.aws_files import check_certificates
from podwatch.domain.errors import PermissionDenied, PodwatchError
from podwatch.store.objects.errors import NETWORK, ObjectTooLarge, StoreOutage, StoreRefused, too_late

BLOCK = 1 << 18
"""Bytes sent or received at once. The library's 16 KiB halve the speed; a slow line must take one within a timeout."""
LARGEST_REPLY = 16 << 20
"""Bytes of a listing's page or an error: 1,000 keys of 1 KiB, percent-encoded, take three megabytes."""
SLOWEST = 32 << 10
"""Bytes per second below which a download counts as hanging."""


_SOCKETS = [*HTTPConnection.default_socket_options, (IPPROTO_TCP, TCP_USER_TIMEOUT, 60_000)]
"""What lies in the kernel is given up after a minute without an answer, also while the process is frozen."""


_CA_NAMES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: for a connection or a block that is not accepted; for each byte of an answer; for a whole head or
    document."""

    connect: float = 30.0
    idle: float = 60.0
    document: float = 120.0


def boottime() -> float:
    """Seconds by the clock that continues during suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Bounds(threading.local):
    """Of the requests that this thread sends: boottimes at which they have ended, and after which they send nothing."""

    ends = until = math.inf

    @contextmanager
    def of(self, seconds: float, until: float) -> Iterator[float]:
        before = self.ends, self.until
        self.ends, self.until = boottime() + seconds, until
        try:
            yield self.ends
        finally:
            self.ends, self.until = before

    def left(self, most: float) -> float:
        """Seconds, at most so many and hardly any at the end."""
        return max(0.01, min(most, self.ends - boottime()))


class Transport:
    """Thread-safe. ``calls`` counts billed requests by class; whoever sends them adds."""

    def __init__(self, connections: int, patience: Patience | None = None, ca: str = "") -> None:
        self.patience, self._ca = patience or Patience(), ca
        self.calls: Counter[str] = Counter()
        self.skew: float | None = None
        self.bounds = Bounds()
        self._checked = False
        self._session = requests.Session()
        self._session.auth = lambda request: request  # else ~/.netrc replaces the key
        self._session.headers["Accept-Encoding"] = "identity"
        self._session.headers["User-Agent"] = "podwatch"
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _Adapter(connections + 2, self.patience.document, self.bounds))

    def send(self, method: str, url: str, headers: Mapping[str, str], body: Any = None) -> "Reply":
        """The answer, whose body is still to be read. Raises StoreOutage without one; never shows the URL, which can
        be signed. What reading a Slice raised passes unchanged."""
        host = urlsplit(url).hostname or ""
        self._check_certificates()
        timeout = self.bounds.left(self.patience.connect), self.bounds.left(self.patience.idle)
        try:
            response = self._session.request(
                method, url, headers=dict(headers), data=body, stream=True, allow_redirects=False,
                timeout=timeout, verify=self._ca or None,
            )  # fmt: skip
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            failure = getattr(body, "failure", None)
            if failure is not None:
                raise failure from None
            raise _unreachable(host, error) from None
        with suppress(KeyError, TypeError, ValueError):
            self.skew = time.time() - parsedate_to_datetime(response.headers["Date"]).timestamp()
        return Reply(response, host, self.patience, self.bounds)

    def trust(self, ca: str) -> None:
        """Servers with certificates of this file; empty: leave it as it is. One that was given before stays."""
        self._ca = self._ca or ca

    def _check_certificates(self) -> None:
        """Of the files that a request uses: the library takes those of the environment where none is given."""
        if not self._checked:
            try:
                for path in (self._ca, *(os.environ.get(name, "") for name in _CA_NAMES)):
                    check_certificates(path)
            except PermissionDenied as error:
                raise StoreRefused("key", error.what, where=error.where, fix=error.fix) from None
            self._checked = True

    def close(self) -> None:
        self._session.close()


class Reply:
    """An answer. ``content``: the whole body of an answer that is a document, once ``document`` was called."""

    def __init__(self, response: requests.Response, host: str, patience: Patience, bounds: Bounds) -> None:
        self._bounds = bounds
        self.status_code, self.headers, self.url = response.status_code, response.headers, host
        self._raw, self._close, self._patience = response.raw, response.close, patience
        self.content = b""

    def document(self, limit: int = LARGEST_REPLY) -> bytes:
        """The whole body, at most ``limit`` bytes. The connection is free then."""
        data, seconds = bytearray(), self._bounds.left(self._patience.document)
        end = boottime() + seconds
        announced = self.headers.get("Content-Length")
        with _ended_after(seconds, self._raw.shutdown):
            while block := self._next(end):
                data += block
                if len(data) > limit:
                    self.close()
                    raise ObjectTooLarge(self.url)
        if announced is not None and announced != str(len(data)) and self.status_code not in (204, 304):
            raise self._cut_off()
        self.content = bytes(data)
        return self.content

    def blocks(self, length: int) -> Iterator[memoryview]:
        """Exactly ``length`` bytes of the body."""
        end = boottime() + self._patience.document + length / SLOWEST
        while length:
            block = memoryview(self._next(end))[:length]
            if not block:
                raise self._cut_off()
            length -= len(block)
            yield block

    def _next(self, end: float) -> bytes:
        try:
            block: bytes = self._raw.read1(BLOCK, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise _unreachable(self.url, error) from None
        if boottime() > end:
            self.close()
            raise StoreOutage("the store's answer takes too long", where=self.url)
        return block

    def _cut_off(self) -> StoreOutage:
        self.close()
        return StoreOutage("the store's answer was cut off", where=self.url)

    def close(self) -> None:
        self._close()


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the store asks for; 0 for what is none."""
    with suppress(KeyError, ValueError):
        seconds = float(headers["Retry-After"])
        return seconds if 0 <= seconds < 1e6 else 0.0
    return 0.0


def _unreachable(host: str, error: Exception) -> PodwatchError:
    text = str(error).lower()
    if "resolve" in text or "name or service not known" in text or "name resolution" in text:
        return StoreOutage("the store's host name cannot be resolved", where=host, fix="check DNS and the network")
    if isinstance(error, requests.exceptions.SSLError) or "certificate" in text:
        fix = "check the endpoint, and REQUESTS_CA_BUNDLE or AWS_CA_BUNDLE for a certificate of your own"
        return StoreOutage("the store's certificate is not accepted", where=host, fix=fix)
    if isinstance(error, requests.Timeout | TimeoutError) or "timed out" in text:
        return StoreOutage("the store does not answer in time", where=host)
    return StoreOutage("the store cannot be reached", where=host, fix=NETWORK)


# -- connections -----------------------------------------------------------------------------------------------------
# A timeout of the library is one between two bytes: a head that arrives byte by byte would never end. And only what
# sends the bytes knows when they leave: a process can be frozen anywhere before.


@contextmanager
def _ended_after(seconds: float, end: Callable[[], object]) -> Iterator[None]:
    """``end`` is called where it takes longer; it may fail, since the connection can be gone by then."""

    def act() -> None:
        with suppress(OSError, AttributeError, ValueError, RuntimeError):
            end()

    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Adapter(HTTPAdapter):
    def __init__(self, connections: int, seconds: float, bounds: Bounds) -> None:
        self._seconds, self._bounds = seconds, bounds
        super().__init__(pool_connections=connections, pool_maxsize=connections, max_retries=0)

    def init_poolmanager(self, *positional: Any, **options: Any) -> None:
        super().init_poolmanager(*positional, **options, blocksize=BLOCK, socket_options=_SOCKETS)
        self._limit(self.poolmanager)

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        known = proxy in self.proxy_manager
        manager = super().proxy_manager_for(proxy, **options, blocksize=BLOCK, socket_options=_SOCKETS)
        if not known:
            self._limit(manager)
        return manager

    def _limit(self, manager: Any) -> None:
        class Plain(_Bounded, HTTPConnection):
            seconds, bounds = self._seconds, self._bounds

        class Secure(_Bounded, HTTPSConnection):
            seconds, bounds = self._seconds, self._bounds

        plain = type("PlainPool", (HTTPConnectionPool,), {"ConnectionCls": Plain})
        secure = type("SecurePool", (HTTPSConnectionPool,), {"ConnectionCls": Secure})
        manager.pool_classes_by_scheme = {"http": plain, "https": secure}


class _Bounded:
    """A connection that keeps the bounds of the thread that uses it."""

    seconds: float
    bounds: Bounds
    sock: Any
    host: str

    def _end(self) -> None:
        self.sock.shutdown(SHUT_RDWR)

    def request(self, *positional: Any, **named: Any) -> None:
        seconds = self.bounds.left(math.inf)
        with _ended_after(seconds, self._end) if seconds < math.inf else nullcontext():
            super().request(*positional, **named)  # type: ignore[misc]

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()  # type: ignore[attr-defined]
        view = memoryview(data) if isinstance(data, bytes) else data
        for at in range(0, len(view), BLOCK):
            if boottime() > self.bounds.until:
                raise too_late(self.host)
            super().send(view[at : at + BLOCK])  # type: ignore[misc]

    def getresponse(self) -> Any:
        with _ended_after(self.bounds.left(self.seconds), self._end):
            return super().getresponse()  # type: ignore[misc]
