"""The HTTP server: uvicorn in the daemon's event loop, with bounded connections and requests, and the listening socket.

uvicorn alone has no time limit for a request head (only for keep-alive), limits the size of a head only if it arrives
in pieces, lets idle connections block active ones, handles signals, and wakes ten times a second. A connection has one
request: then its limits are those of the request, and nothing has to be counted between two.
"""

import asyncio
import contextlib
import errno
import http
import re
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from podwatch.domain.errors import HostError, PermissionDenied

HEAD_SECONDS = 5.0
"""Deadline of a request head. A client on loopback takes milliseconds."""
CONNECTION_SECONDS = 30.0
"""Deadline of the answer: answers are fast, so that only slow readers are dropped."""
MAX_HEAD_BYTES = 16 << 10
MAX_LINE_BYTES = 4 << 10
MAX_HEADERS = 64
MAX_BODY_BYTES = 64 << 10
"""No endpoint reads a body; a heartbeat can have a small one."""
MAX_CONNECTIONS = 64
MAX_IDLE = 48
"""Most connections without a request."""
MAX_BUSY = 48
"""Most connections with a request: the other slots are for the requests that come next, /livez among them."""
ACCEPT_AT_ONCE = 16
"""Less than MAX_IDLE, so that a connection survives the two rounds of accepting until its first bytes are read."""
BACKLOG = 512
PORT_TRIES = 20
_HEAD_END = re.compile(rb"\r?\n\r?\n")


class Crowd:
    """The open connections of one server. A new one is always accepted and a new request always read: the oldest idle
    or busy one is dropped for it."""

    def __init__(self) -> None:
        self.idle: dict[tuple[str, int], BoundedProtocol] = {}
        self.busy: dict[tuple[str, int], BoundedProtocol] = {}

    def wait(self, connection: "BoundedProtocol") -> None:
        """The connection waits for its request."""
        self.idle[connection.address] = connection
        while len(self.idle) > MAX_IDLE or len(self.idle) + len(self.busy) > MAX_CONNECTIONS:
            self._drop(self.idle)

    def ask(self, address: tuple[str, int]) -> None:
        """The request of this client has come."""
        if (connection := self.idle.pop(address, None)) is not None:
            self.busy[address] = connection
            connection.asked()
        while len(self.busy) > MAX_BUSY:
            self._drop(self.busy)

    def leave(self, connection: "BoundedProtocol") -> None:
        for group in (self.idle, self.busy):
            if group.get(connection.address) is connection:
                del group[connection.address]

    def _drop(self, group: "dict[tuple[str, int], BoundedProtocol]") -> None:
        group.pop(next(iter(group))).abort()


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with size limits of head and body, and deadlines of head and answer."""

    crowd: Crowd
    head_seconds = HEAD_SECONDS
    connection_seconds = CONNECTION_SECONDS
    address: tuple[str, int]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = transport
        self._head: bytearray | None = bytearray()
        """What has come of the head; None once the request is known."""
        self._body_left = MAX_BODY_BYTES
        self._limit(self.head_seconds)
        host, port, *_ = transport.get_extra_info("peername") or ("", 0)
        self.address = (str(host), int(port))
        self.crowd.wait(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._connection.is_closing():
            return
        if self._head is None:
            self._body_left -= len(data)
            if self._body_left < 0:
                self.abort()
                return
        else:
            self._head += data
            if status := _refused_head(self._head):
                self._refuse(status)
                return
        super().data_received(data)

    def asked(self) -> None:
        self._head = None
        self._timer.cancel()
        self._limit(self.connection_seconds)

    def abort(self) -> None:
        self._connection.abort()

    def _limit(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def _refuse(self, status: int) -> None:
        text = f"{status} {http.HTTPStatus(status).phrase}"
        fields = ["Connection: close", "Content-Type: text/plain", f"Content-Length: {len(text) + 1}"]
        self._connection.write("\r\n".join([f"HTTP/1.1 {text}", *fields, "", f"{text}\n"]).encode())
        self._connection.close()


def _refused_head(data: bytearray) -> int:
    """The HTTP status that refuses the head received so far; 0 while it is within the limits."""
    end = _HEAD_END.search(data)
    size = end.end() if end else len(data)
    line = data.find(b"\n", 0, size)
    if (line if line >= 0 else size) > MAX_LINE_BYTES:
        return 414
    return 431 if size > MAX_HEAD_BYTES or data.count(b"\n", 0, size) > MAX_HEADERS + 2 else 0


class OneRequest:
    """Tells the crowd of each request, refuses a body that is too large, and lets each answer end its connection."""

    def __init__(self, app: ASGIApp, crowd: Crowd) -> None:
        self._app, self._crowd = app, crowd

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._crowd.ask(tuple(scope["client"] or ()))

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        large = any(not size.isdigit() or len(size) > 9 or int(size) > MAX_BODY_BYTES for size in sizes)
        while not large and (await receive()).get("more_body"):
            pass  # who still sends meets a closed connection, and never reads the answer
        await (Response(status_code=413) if large else self._app)(scope, receive, closing)


class LoopServer(uvicorn.Server):
    """Serves until ``leave``; the daemon handles signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leave = asyncio.Event()
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio uses one number for the kernel's queue and for its accepts per round
        self.listening.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._leave.wait()

    def leave(self) -> None:
        self.should_exit = True
        self._leave.set()


def make_server(
    app: Any, *, head_seconds: float = HEAD_SECONDS, connection_seconds: float = CONNECTION_SECONDS
) -> LoopServer:
    """A server for ``app``; both limits in seconds."""
    crowd = Crowd()
    limits = {"crowd": crowd, "head_seconds": head_seconds, "connection_seconds": connection_seconds}
    protocol = type("Protocol", (BoundedProtocol,), limits)
    return LoopServer(
        uvicorn.Config(
            OneRequest(app, crowd),
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            log_level="error",  # with warnings any user could fill the log with bad requests
            backlog=ACCEPT_AT_ONCE,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on ``port`` or one of the next twenty; port 0: any free port.

    Raises HostError if the address is not local or all ports are in use, PermissionDenied for a privileged port.
    """
    where = f"{host}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise HostError(
            f"cannot resolve the address: {error}", where=where, fix="set [http] host to 127.0.0.1"
        ) from error
    last = min(port + PORT_TRIES, 65535)
    for candidate in range(port, last + 1) if port else [0]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], candidate))
            listener.listen(BACKLOG)
            listener.setblocking(False)
            return listener
        except PermissionError as error:
            listener.close()
            raise PermissionDenied(
                "Permission denied: cannot use a privileged port", where=where, fix="use a port above 1023"
            ) from error
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise HostError(f"cannot listen: {error.strerror}", where=where, fix="check [http] host") from error
    raise HostError(f"ports {port} to {last} are all in use", where=host, fix="set [http] port to a free one, or 0")
