"""uvicorn inside the daemon's own loop: no signal handling of its own, no polling, bounded connections.

uvicorn has no limit on how long a client may take to send its request head (only keep-alive is timed), and its main
loop wakes ten times a second; both are put right here.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from podwatch.domain.errors import HostError, PermissionDenied

HEAD_SECONDS = 5.0
"""A client on loopback sends its request head within milliseconds."""
CONNECTION_SECONDS = 30.0
"""No answer of ours takes long; whoever reads slower than this is dropped."""
MAX_HEAD_BYTES = 16 << 10
MAX_CONNECTIONS = 64
PORT_TRIES = 20


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with a deadline on the request head and one on the whole connection."""

    head_seconds = HEAD_SECONDS
    connection_seconds = CONNECTION_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._asked = False
        self._timers = [
            self.loop.call_later(self.head_seconds, self._expire_head),
            self.loop.call_later(self.connection_seconds, transport.abort),
        ]

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._asked = self._asked or bool(self.scope)

    def _expire_head(self) -> None:
        if not self._asked and not self.transport.is_closing():
            self.transport.abort()


class LoopServer(uvicorn.Server):
    """Serves until told to leave; signals are the daemon's business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leave = asyncio.Event()
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
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
    protocol = type(
        "Protocol", (BoundedProtocol,), {"head_seconds": head_seconds, "connection_seconds": connection_seconds}
    )
    return LoopServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on ``port`` or one of the next twenty; port 0 takes any.

    HostError when the address is not ours or everything is taken; PermissionDenied for a privileged port.
    """
    where = f"{host}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise HostError(f"no such address: {error}", where=where, fix="set [http] host to 127.0.0.1") from error
    last = min(port + PORT_TRIES, 65535)
    for candidate in range(port, last + 1) if port else [0]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], candidate))
            listener.listen(128)
            listener.setblocking(False)
            return listener
        except PermissionError as error:
            listener.close()
            raise PermissionDenied("this port needs more rights", where=where, fix="use a port above 1023") from error
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise HostError(f"cannot listen: {error.strerror}", where=where, fix="check [http] host") from error
    raise HostError(f"ports {port} to {last} are all taken", where=host, fix="set [http] port to a free one, or 0")
