"""The HTTP server: uvicorn in the daemon's event loop, with bounded connections and requests, and the listening socket.

uvicorn alone has no time limit for a request (only for keep-alive), no limit for a body, lets idle connections block
active ones, handles signals, and wakes ten times a second. A connection has one request: then its limits are those of
the request, and nothing has to be counted between two.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from podwatch.domain.errors import HostError, PermissionDenied

CONNECTION_SECONDS = 30.0
"""How long a connection lives: answers are fast, so that only slow clients are dropped."""
MAX_HEAD_BYTES = 16 << 10
"""Of a head that comes in pieces; one that comes at once has at most what a socket hands over at once, 256 KiB."""
MAX_BODY_BYTES = 64 << 10
"""No endpoint reads a body; a heartbeat can have a small one."""
MAX_CONNECTIONS = 64
"""The oldest one is dropped for a new one, so that a new request is always read, one for /livez among them."""
ACCEPT_AT_ONCE = 16
"""Much less than MAX_CONNECTIONS, so that a connection survives the rounds of accepting until it has its answer."""
BACKLOG = 512
PORT_TRIES = 20


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 whose connections have a deadline, and whose number has a limit."""

    seconds = CONNECTION_SECONDS
    open_ones: "dict[BoundedProtocol, None]"
    """The connections of one server, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = transport
        self._timer = asyncio.get_running_loop().call_later(self.seconds, transport.abort)
        self.open_ones[self] = None
        while len(self.open_ones) > MAX_CONNECTIONS:
            oldest = next(iter(self.open_ones))
            del self.open_ones[oldest]
            oldest._connection.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_ones.pop(self, None)
        self._timer.cancel()
        super().connection_lost(exc)


class OneRequest:
    """Refuses a body that is too large, and lets each answer end its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        large = any(not size.isdigit() or len(size) > 9 or int(size) > MAX_BODY_BYTES for size in sizes)
        came, more = 0, True
        while more and not large:  # who still sends meets a closed connection, and never reads the answer
            message = await receive()
            came, more = came + len(message.get("body", b"")), message.get("more_body", False)
            large = came > MAX_BODY_BYTES
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


def make_server(app: Any, *, seconds: float = CONNECTION_SECONDS) -> LoopServer:
    """A server for ``app``. ``seconds``: how long a connection lives."""
    protocol = type("Protocol", (BoundedProtocol,), {"open_ones": {}, "seconds": seconds})
    return LoopServer(
        uvicorn.Config(
            OneRequest(app),
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
