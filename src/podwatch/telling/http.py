"""The HTTP endpoints: health, status, metrics, events, and progress pings. Read-only apart from pings.

``Host`` is checked, so that a web page in a browser cannot reach the endpoints by DNS rebinding. Requests are bounded
in size and time. Responses come from memory, except events, which come from the journal.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from podwatch.domain.event import Event
from podwatch.domain.secrets import scrub
from podwatch.telling.documents import SCHEMA_VERSION, event_document
from podwatch.telling.server import CONNECTION_SECONDS, HEAD_SECONDS, LoopServer, bind, make_server, refused_scope
from podwatch.telling.status import build_status
from podwatch.telling.view import DaemonView

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_EVENTS = 1000
MAX_NUMBER = 2**63 - 1
"""The largest row number of SQLite."""
_DIGITS = len(str(MAX_NUMBER))
_ROLE = re.compile(r"^[a-z]{1,32}$")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

EventSource = Callable[[int, int], list[Event] | Awaitable[list[Event]]]
"""(after_id, limit) -> events, oldest first; can be async because the journal runs in a thread."""


class HttpServer:
    """The HTTP server. ``start`` returns once the port is bound and ``url`` is set."""

    def __init__(
        self,
        host: str,
        port: int,
        source: Callable[[], DaemonView],
        events: EventSource,
        ping: Callable[[str], None],
        token: str,
        live: Callable[[], tuple[bool, str]],
        ready: Callable[[], tuple[bool, list[str]]],
        *,
        allowed_hosts: Iterable[str] = (),
        head_seconds: float = HEAD_SECONDS,
        connection_seconds: float = CONNECTION_SECONDS,
    ) -> None:
        self._host, self._port = host, port
        self._limits = {"head_seconds": head_seconds, "connection_seconds": connection_seconds}
        self._app = make_app(source, events, ping, token, live, ready, host=host, allowed_hosts=allowed_hosts)
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
    source: Callable[[], DaemonView],
    events: EventSource,
    ping: Callable[[str], None],
    token: str,
    live: Callable[[], tuple[bool, str]],
    ready: Callable[[], tuple[bool, list[str]]],
    *,
    host: str = "127.0.0.1",
    allowed_hosts: Iterable[str] = (),
) -> ASGIApp:
    """The application alone, without a socket."""
    registry: list[CollectorRegistry] = []

    async def livez(request: Request) -> Response:
        ok, reason = live()
        return _text(ok, [reason] if reason else [])

    async def readyz(request: Request) -> Response:
        ok, reasons = ready()
        return _text(ok, reasons)

    async def healthz(request: Request) -> Response:
        document = build_status(source())
        reasons = [f"{r['severity']}: {r['summary']}" for r in document["reasons"]]
        return _text(document["overall"] in ("ok", "warning"), reasons, word=document["overall"])

    async def status(request: Request) -> Response:
        return _json(build_status(source()))

    async def metrics(request: Request) -> Response:
        # Imported at the first request: 1.3 MiB that a daemon without Prometheus does not need.
        from podwatch.telling.metrics import CONTENT_TYPE, exposition, make_registry

        if not registry:
            registry.append(make_registry(source))
        return Response(exposition(registry[0]), media_type=CONTENT_TYPE)

    async def list_events(request: Request) -> Response:
        try:
            after = whole_number(request.query_params.getlist("after_id"), "after_id", 0)
            limit = whole_number(request.query_params.getlist("limit"), "limit", 100)
        except ValueError as error:
            return _json({"error": str(error)}, 400)
        found = events(after, max(1, min(limit, MAX_EVENTS)))
        listed = await found if isinstance(found, Awaitable) else found
        return _json({"schema_version": SCHEMA_VERSION, "events": [event_document(e) for e in listed]})

    async def heartbeat(request: Request) -> Response:
        given, role = request.path_params["token"], request.path_params["role"]
        if not token or not hmac.compare_digest(given.encode(), token.encode()) or not _ROLE.match(role):
            return Response(status_code=404)
        ping(role)
        return Response(status_code=200 if request.method == "GET" else 204)

    async def failed(request: Request, error: Exception) -> Response:
        return _json({"error": f"internal error in podwatch: {type(error).__name__}"}, 500)

    routes = [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/healthz", healthz),
        Route("/status", status),
        Route("/metrics", metrics),
        Route("/events", list_events),
        Route("/heartbeat/{token}/{role}", heartbeat, methods=["GET", "POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers={Exception: failed})
    return HostCheck(app, _host_rule(host, allowed_hosts))


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


class HostCheck:
    """Refuses requests beyond the limits, and requests with a foreign ``Host`` (421). A request without Host passes: it
    never comes from a browser."""

    def __init__(self, app: ASGIApp, allowed: Callable[[str], bool]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if status := refused_scope(scope):
                refusal = Response(status_code=status, headers={"Connection": "close"})
                await refusal(scope, receive, send)
                return
            for name, value in scope["headers"]:
                if name == b"host" and not self._allowed(_hostname(value.decode("latin-1"))):
                    await _json({"error": "Invalid value for Host (expected an address of this podwatch)"}, 421)(
                        scope, receive, send
                    )
                    return
        await self._app(scope, receive, send)


def _host_rule(host: str, extra: Iterable[str]) -> Callable[[str], bool]:
    """The test of a Host name: allows loopback and configured names, and beyond loopback any IP address, because DNS
    rebinding needs a name."""
    names = _LOOPBACK | {host.lower()} | {h.lower() for h in extra}
    try:
        open_to_all = not ipaddress.ip_address(host).is_loopback
    except ValueError:
        open_to_all = host.lower() != "localhost"

    def allowed(name: str) -> bool:
        if name in names:
            return True
        if not open_to_all:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    return allowed


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
