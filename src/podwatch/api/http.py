"""The HTTP endpoints (health, status, metrics, events, progress pings) and the server that serves them in the daemon's
event loop. Read-only apart from pings.

``Host`` is checked, so that a web page in a browser cannot reach the endpoints by DNS rebinding. Beyond loopback, or
where a password is set, requests need it. Requests are bounded in size and time. Responses come from memory, except
events, which come from the journal.
"""

import asyncio
import base64
import contextlib
import errno
import hashlib
import hmac
import http
import ipaddress
import json
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.domain.event import Event
from podwatch.domain.secrets import scrub
from podwatch.reporting.documents import SCHEMA_VERSION, event_document, incident_document
from podwatch.reporting.status import build_status
from podwatch.reporting.view import DaemonView

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from podwatch.recording.history import Moment
    from podwatch.reporting.html import Html


# -- bounded connections ---------------------------------------------------------------------------------------------
# uvicorn without signal handlers and polling. It has no time limit for a request head (only for keep-alive), limits
# the size of a head only if it arrives in pieces, lets idle connections block active ones, and wakes ten times a
# second. This section changes all four.

HEAD_SECONDS = 5.0
"""Deadline of a request head, and of a keep-alive connection. A client on loopback takes milliseconds."""
CONNECTION_SECONDS = 30.0
"""Deadline of a connection: responses are fast, so that only slow readers are dropped."""
MAX_HEAD_BYTES = 16 << 10
MAX_LINE_BYTES = 4 << 10
MAX_HEADERS = 64
MAX_BODY_BYTES = 64 << 10
"""No endpoint reads a body; a heartbeat can have a small one."""
MAX_CONNECTIONS = 64
MAX_IDLE = 48
"""Most connections without a request; the other slots are for connections with one."""
MAX_REQUESTS = 1000
"""Most requests of one connection."""
ACCEPT_AT_ONCE = 16
"""Less than MAX_IDLE, so that a connection survives the two rounds of accepting until its first bytes are read."""
BACKLOG = 512
PORT_TRIES = 20
_HEAD_END = re.compile(rb"\r?\n\r?\n")


class Crowd:
    """The open connections of one server. A new one is always accepted: the oldest idle one is dropped for it."""

    def __init__(self) -> None:
        self.idle: dict[BoundedProtocol, None] = {}
        self.busy: dict[BoundedProtocol, None] = {}

    def wait(self, connection: "BoundedProtocol") -> None:
        """The connection waits for a request."""
        self.busy.pop(connection, None)
        self.idle[connection] = None
        while len(self.idle) > MAX_IDLE or (self.idle and len(self.idle) + len(self.busy) > MAX_CONNECTIONS):
            self._drop(next(iter(self.idle)))
        while len(self.busy) > MAX_CONNECTIONS:
            self._drop(next(iter(self.busy)))

    def ask(self, connection: "BoundedProtocol") -> None:
        if connection in self.idle:
            del self.idle[connection]
            self.busy[connection] = None

    def leave(self, connection: "BoundedProtocol") -> None:
        self.idle.pop(connection, None)
        self.busy.pop(connection, None)

    def _drop(self, connection: "BoundedProtocol") -> None:
        self.leave(connection)
        connection.transport.abort()


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with size limits of head and body, and deadlines of each request head and of the connection."""

    crowd: Crowd
    head_seconds = HEAD_SECONDS
    connection_seconds = CONNECTION_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head: bytearray | None = None
        """The received part of the next head; None while a request is in progress."""
        self._body_left = MAX_BODY_BYTES
        self._requests = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._timer = self.loop.call_later(self.connection_seconds, transport.abort)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        self._timer.cancel()
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head is None:
            self._body_left -= len(data)
            if self._body_left < 0:
                self.transport.abort()
                return
        else:
            self._head += data
            if status := _refused_head(self._head):
                self._refuse(status)
                return
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._asked()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_head()

    def _asked(self) -> None:
        self._head, self._body_left = None, MAX_BODY_BYTES
        self._stop_head_timer()
        self._requests += 1
        if self._requests >= MAX_REQUESTS:
            self.cycle.keep_alive = False
        self.crowd.ask(self)

    def _await_head(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)
        # The rest of an unread body can still arrive; it is no head.
        self._head = bytearray() if self.conn.their_state is h11.IDLE else None
        self.crowd.wait(self)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int) -> None:
        text = f"{status} {http.HTTPStatus(status).phrase}"
        fields = ["Connection: close", "Content-Type: text/plain", f"Content-Length: {len(text) + 1}"]
        self.transport.write("\r\n".join([f"HTTP/1.1 {text}", *fields, "", f"{text}\n"]).encode())
        self.transport.close()


def _refused_head(data: bytearray) -> int:
    """The HTTP status that refuses the head received so far; 0 while it is within the limits."""
    end = _HEAD_END.search(data)
    size = end.end() if end else len(data)
    line = data.find(b"\n", 0, size)
    if (line if line >= 0 else size) > MAX_LINE_BYTES:
        return 414
    return 431 if size > MAX_HEAD_BYTES or data.count(b"\n", 0, size) > MAX_HEADERS + 2 else 0


def refused_scope(scope: Scope) -> int:
    """The same for a parsed request: of several that arrived at once only the first was checked before."""
    headers = scope["headers"]
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_LINE_BYTES:
        return 414
    if len(headers) > MAX_HEADERS or sum(len(n) + len(v) + 4 for n, v in headers) > MAX_HEAD_BYTES:
        return 431
    for name, value in headers:
        if name == b"content-length" and (not value.isdigit() or len(value) > 9 or int(value) > MAX_BODY_BYTES):
            return 413
    return 0


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
    limits = {"crowd": Crowd(), "head_seconds": head_seconds, "connection_seconds": connection_seconds}
    protocol = type("Protocol", (BoundedProtocol,), limits)
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


# -- endpoints -------------------------------------------------------------------------------------------------------

MAX_EVENTS = 1000
PLOT_SECONDS = 60.0
MAX_NUMBER = 2**63 - 1
"""The largest row number of SQLite."""
_DIGITS = len(str(MAX_NUMBER))
_ROLE = re.compile(r"^[a-z]{1,32}$")
REFUSED_WITHOUT = (
    "podwatch listens beyond loopback without a password, so it answers only /livez, /readyz, /healthz and progress"
    " pings. Set [http] password_file and restart podwatch, or set [http] host to 127.0.0.1 and use"
    " `ssh -L 9477:127.0.0.1:9477 POD` (docs/page.md). Training continues either way.\n"
)
REFUSED_WRONG = "Permission denied: this address needs the password in [http] password_file (any user name).\n"
PROBES = frozenset({"/livez", "/readyz", "/healthz"})
"""Answered without a password too, with one word: orchestrators probe them."""
_UNCHECKED = "podwatch.unchecked"
"""Key of a request's scope that was not checked for a password where one is needed."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Source(Protocol):
    """What the endpoints show."""

    def view(self) -> DaemonView: ...

    async def events(self, after_id: int, limit: int) -> list[Event]:
        """Oldest first."""
        ...

    def log_lines(self) -> Sequence[str]:
        """The last lines of the trainer's log, oldest first; secrets are not removed."""
        ...

    async def history(self) -> "Sequence[Moment]":
        """The last day, oldest first."""
        ...

    def ping(self, role: str) -> None:
        """A process of this role reports progress."""
        ...

    def live(self) -> tuple[bool, str]:
        """Whether podwatch works, and a text about it."""
        ...

    def ready(self) -> tuple[bool, list[str]]:
        """Whether podwatch can guard the run, and the reasons if not."""
        ...


class HttpServer:
    """The HTTP server. ``start`` returns once the port is bound and ``url`` is set. ``token`` is part of the address of
    progress pings. ``password`` (empty: none): see ``PasswordCheck``."""

    def __init__(
        self,
        host: str,
        port: int,
        source: Source,
        token: str,
        *,
        password: str = "",
        allowed_hosts: Iterable[str] = (),
        head_seconds: float = HEAD_SECONDS,
        connection_seconds: float = CONNECTION_SECONDS,
    ) -> None:
        self._host, self._port = host, port
        self._limits = {"head_seconds": head_seconds, "connection_seconds": connection_seconds}
        self._app = make_app(source, token, host=host, password=password, allowed_hosts=allowed_hosts)
        self._server: LoopServer | None = None
        self._task: asyncio.Task[None] | None = None
        self.url = ""
        """``http://host:port`` with the bound port; empty while not serving."""
        self.port = 0

    async def start(self) -> str:
        """Bind and serve; returns ``url``. Raises HostError if no port is free."""
        listener = bind(self._host, self._port)
        self.port = int(listener.getsockname()[1])
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self._server = make_server(self._app, **self._limits)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({listening, self._task}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            self._task.result()
        self.url = f"http://{shown}:{self.port}"
        return self.url

    async def stop(self) -> None:
        """Stop listening; responses in progress get one second. Safe to call twice."""
        server, task = self._server, self._task
        self._server = self._task = None
        self.url = ""
        if server is not None and task is not None:
            server.leave()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def make_app(
    source: Source, token: str, *, host: str = "127.0.0.1", password: str = "", allowed_hosts: Iterable[str] = ()
) -> ASGIApp:
    """The application alone, without a socket."""
    rule = HostRule(host, allowed_hosts)
    pages = Pages(source, token)
    routes = [
        Route("/", pages.page),
        Route("/livez", pages.livez),
        Route("/readyz", pages.readyz),
        Route("/healthz", pages.healthz),
        Route("/status", pages.status),
        Route("/metrics", pages.metrics),
        Route("/events", pages.events),
        Route("/heartbeat/{token}/{role}", pages.heartbeat, methods=["GET", "POST"]),
    ]
    # A router without Starlette's application, whose error pages would bring 0.4 MiB of modules.
    app = ErrorsAsJson(Router(routes))
    checked = HostCheck(app, rule)
    return Limits(PasswordCheck(app, checked, password) if password or rule.open_to_all else checked)


class Pages:
    """One method for each address."""

    def __init__(self, source: Source, token: str) -> None:
        self._source, self._token = source, token
        self._registry: CollectorRegistry | None = None
        self._plots: tuple[str, Html] | None = None
        """The plots and their stamp: drawn at most once a minute, and only on request."""

    async def page(self, request: Request) -> Response:
        # Imported at the first request: most daemons never show it.
        from podwatch.reporting.page import LOG_LINES, headers, history_of, render

        view = self._source.view()
        stamp = str(int(view.now_wall // PLOT_SECONDS))
        if self._plots is None or self._plots[0] != stamp:
            self._plots = stamp, history_of(await self._source.history(), view.now_wall, stamp)
        plots = None if request.query_params.get("drawn") == stamp else self._plots[1]
        log = scrub("\n".join(list(self._source.log_lines())[-LOG_LINES:])).splitlines()
        incidents = [incident_document(one, view.account) for one in view.incidents]
        body = render(build_status(view), incidents=incidents, log=log, history=plots)
        return Response(body, media_type="text/html", headers=_HEADERS | dict(headers()))

    async def livez(self, request: Request) -> Response:
        ok, reason = self._source.live()
        return _text(ok, [reason] if reason and not _brief(request) else [])

    async def readyz(self, request: Request) -> Response:
        ok, reasons = self._source.ready()
        return _text(ok, [] if _brief(request) else reasons)

    async def healthz(self, request: Request) -> Response:
        document = build_status(self._source.view())
        reasons = [] if _brief(request) else [f"{r['severity']}: {r['summary']}" for r in document["reasons"]]
        return _text(document["overall"] in ("ok", "warning"), reasons, word=document["overall"])

    async def status(self, request: Request) -> Response:
        return _json(build_status(self._source.view()))

    async def metrics(self, request: Request) -> Response:
        # Imported at the first request: 1.3 MiB that a daemon without Prometheus does not need.
        from podwatch.reporting.metrics import CONTENT_TYPE, exposition, make_registry

        self._registry = self._registry or make_registry(self._source.view)
        return Response(exposition(self._registry), media_type=CONTENT_TYPE)

    async def events(self, request: Request) -> Response:
        try:
            after = whole_number(request.query_params.getlist("after_id"), "after_id", 0)
            limit = whole_number(request.query_params.getlist("limit"), "limit", 100)
        except ValueError as error:
            return _json({"error": str(error)}, 400)
        listed = await self._source.events(after, max(1, min(limit, MAX_EVENTS)))
        return _json({"schema_version": SCHEMA_VERSION, "events": [event_document(e) for e in listed]})

    async def heartbeat(self, request: Request) -> Response:
        token, given, role = self._token, request.path_params["token"], request.path_params["role"]
        if not token or not hmac.compare_digest(given.encode(), token.encode()) or not _ROLE.match(role):
            return Response(status_code=404)
        self._source.ping(role)
        return Response(status_code=200 if request.method == "GET" else 204)


class ErrorsAsJson:
    """Answers 500 where a page raised before it answered. The error is raised again, so that the server logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            if not started:
                failed = _json({"error": f"internal error in podwatch: {type(error).__name__}"}, 500)
                await failed(scope, receive, send)
            raise


def whole_number(given: Sequence[str], name: str, default: int) -> int:
    """The value of a query parameter. Raises ValueError if it does not fit SQLite, or is given more than once."""
    if not given:
        return default
    if len(given) > 1:
        raise ValueError(f"Invalid value for {name}: it is given {len(given)} times (expected once)")
    text = given[0]
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text) <= MAX_NUMBER):
        raise ValueError(f"Invalid value for {name} (expected a whole number from 0 to {MAX_NUMBER})")
    return int(text)


class Limits:
    """Refuses requests beyond the limits."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (status := refused_scope(scope)):
            await Response(status_code=status, headers={"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


class PasswordCheck:
    """Requests with the password (HTTP Basic, any user name) reach ``app``, under any ``Host``: a web page of another
    site cannot send the password. The others reach ``unchecked``, and there only probes and progress pings; the rest is
    refused: 401, or 403 where podwatch has no password."""

    def __init__(self, app: ASGIApp, unchecked: ASGIApp, password: str) -> None:
        self._app, self._unchecked = app, unchecked
        self._digest = _digest(password.encode()) if password else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._right(scope):
                await self._app(scope, receive, send)
                return
            if scope["path"] not in PROBES and not scope["path"].startswith("/heartbeat/"):
                await self._refusal()(scope, receive, send)
                return
            scope[_UNCHECKED] = True
        await self._unchecked(scope, receive, send)

    def _right(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not self._digest or len(given) != 1:
            return False
        kind, _, encoded = given[0].partition(b" ")
        if kind.lower() != b"basic":
            return False
        try:
            _, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        except ValueError:
            return False
        return bool(colon) and hmac.compare_digest(_digest(password), self._digest)

    def _refusal(self) -> Response:
        if not self._digest:
            return Response(REFUSED_WITHOUT, status_code=403, media_type="text/plain", headers=_HEADERS)
        ask = {"WWW-Authenticate": 'Basic realm="podwatch", charset="UTF-8"'}
        return Response(REFUSED_WRONG, status_code=401, media_type="text/plain", headers=_HEADERS | ask)


def _digest(password: bytes) -> bytes:
    """Of one length, so that a comparison does not show how long the password is."""
    return hashlib.sha256(password).digest()


def _brief(request: Request) -> bool:
    return _UNCHECKED in request.scope


class HostCheck:
    """Refuses requests with a foreign ``Host`` (421). A request without Host passes: it never comes from a browser."""

    def __init__(self, app: ASGIApp, rule: "HostRule") -> None:
        self._app, self._rule = app, rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._rule.allows(_hostname(value.decode("latin-1"))):
                    await _json({"error": "Invalid value for Host (expected an address of this podwatch)"}, 421)(
                        scope, receive, send
                    )
                    return
        await self._app(scope, receive, send)


def beyond_loopback(host: str) -> bool:
    """Whether a listener on ``host`` can be reached from other machines; names other than localhost count."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() != "localhost"


class HostRule:
    """Allows loopback and configured names, and beyond loopback any IP address, because DNS rebinding needs a name."""

    def __init__(self, host: str, extra: Iterable[str]) -> None:
        self._names = _LOOPBACK | {host.lower()} | {h.lower() for h in extra}
        self.open_to_all = beyond_loopback(host)

    def allows(self, name: str) -> bool:
        if name in self._names:
            return True
        if not self.open_to_all:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _hostname(header: str) -> str:
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def _text(ok: bool, reasons: list[str], *, word: str = "") -> Response:
    lines = [word or ("ok" if ok else "not ok"), *reasons]
    body = "".join(f"{scrub(line)}\n" for line in lines)
    return Response(body, status_code=200 if ok else 503, media_type="text/plain", headers=_HEADERS)


def _json(document: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(document) + "\n", status_code=status, media_type="application/json", headers=_HEADERS)
