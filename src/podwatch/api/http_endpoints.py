"""The HTTP endpoints: health, status, metrics, events, progress pings, the page. Read-only apart from pings.

``http_access.py`` decides who gets an answer; ``http_server.py`` serves, and bounds requests in size and time.
Responses come from memory, except events, which come from the journal.
"""

import asyncio
import contextlib
import hmac
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from podwatch.api.http_access import HEADERS, Access, unchecked
from podwatch.api.http_server import CONNECTION_SECONDS, LoopServer, bind, make_server
from podwatch.domain.document import writable
from podwatch.domain.event import Event
from podwatch.domain.secrets import scrub
from podwatch.report.daemon_view import DaemonView
from podwatch.report.json_documents import SCHEMA_VERSION, event_document, incident_document
from podwatch.report.metrics import exposition, make_registry
from podwatch.report.status import build_status

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from podwatch.recording.last_day import Moment


# -- endpoints -------------------------------------------------------------------------------------------------------

MAX_EVENTS = 1000
MAX_NUMBER = 2**63 - 1
"""The largest row number of SQLite."""
_DIGITS = len(str(MAX_NUMBER))
_ROLE = re.compile(r"^[a-z]{1,32}$")


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
    progress pings. ``password`` (empty: none): see ``Access``. ``seconds``: how long a connection lives."""

    def __init__(
        self,
        host: str,
        port: int,
        source: Source,
        token: str,
        *,
        password: str = "",
        allowed_hosts: Iterable[str] = (),
        seconds: float = CONNECTION_SECONDS,
    ) -> None:
        self._host, self._port = host, port
        self._seconds = seconds
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
        self._server = make_server(self._app, seconds=self._seconds)
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
    pages = Pages(source, token)
    routes = [
        Route("/", pages.page),
        Route("/livez", pages.livez),
        Route("/readyz", pages.readyz),
        Route("/healthz", pages.healthz),
        Route("/status", pages.status),
        Route("/metrics", pages.metrics),
        Route("/events", pages.events),
        Route("/history", pages.history),
        Route("/heartbeat/{token}/{role}", pages.heartbeat, methods=["GET", "POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers={Exception: _failed})
    return Access(app, host, allowed_hosts, password)


class Pages:
    """One method for each address."""

    def __init__(self, source: Source, token: str) -> None:
        self._source, self._token = source, token
        self._registry: CollectorRegistry | None = None

    async def page(self, request: Request) -> Response:
        # Imported at the first request: most daemons never show it.
        from podwatch.report.page import LOG_LINES, headers, render
        from podwatch.report.rows import incident_text

        view = self._source.view()
        log = scrub("\n".join(list(self._source.log_lines())[-LOG_LINES:])).splitlines()
        found = [incident_document(one, view.account) for one in view.incidents]
        incidents = [(scrub(incident_text(one, view.now_wall)), one.open) for one in found]
        body = render(build_status(view), incidents=incidents, log=log)
        return Response(body, media_type="text/html", headers=HEADERS | dict(headers()))

    async def livez(self, request: Request) -> Response:
        ok, reason = self._source.live()
        return _text(ok, [reason] if reason and not unchecked(request) else [])

    async def readyz(self, request: Request) -> Response:
        ok, reasons = self._source.ready()
        return _text(ok, [] if unchecked(request) else reasons)

    async def healthz(self, request: Request) -> Response:
        document = build_status(self._source.view())
        reasons = [] if unchecked(request) else [f"{r['severity']}: {r['summary']}" for r in document["reasons"]]
        return _text(document["overall"] in ("ok", "warning"), reasons, word=document["overall"])

    async def status(self, request: Request) -> Response:
        return _json(build_status(self._source.view()))

    async def metrics(self, request: Request) -> Response:
        self._registry = self._registry or make_registry(self._source.view)
        return Response(exposition(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def events(self, request: Request) -> Response:
        try:
            after = whole_number(request.query_params.getlist("after_id"), "after_id", 0)
            limit = whole_number(request.query_params.getlist("limit"), "limit", 100)
        except ValueError as error:
            return _json({"error": str(error)}, 400)
        listed = await self._source.events(after, max(1, min(limit, MAX_EVENTS)))
        return _json({"schema_version": SCHEMA_VERSION, "events": [event_document(e) for e in listed]})

    async def history(self, request: Request) -> Response:
        """The last day, oldest first, one row a minute."""
        moments = [writable(moment.to_json()) for moment in await self._source.history()]
        return _json({"schema_version": SCHEMA_VERSION, "moments": moments})

    async def heartbeat(self, request: Request) -> Response:
        token, given, role = self._token, request.path_params["token"], request.path_params["role"]
        if not token or not hmac.compare_digest(given.encode(), token.encode()) or not _ROLE.match(role):
            return Response(status_code=404)
        self._source.ping(role)
        return Response(status_code=200 if request.method == "GET" else 204)


async def _failed(request: Request, error: Exception) -> Response:
    return _json({"error": f"internal error in podwatch: {type(error).__name__}"}, 500)


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


def _text(ok: bool, reasons: list[str], *, word: str = "") -> Response:
    lines = [word or ("ok" if ok else "not ok"), *reasons]
    body = "".join(f"{scrub(line)}\n" for line in lines)
    return Response(body, status_code=200 if ok else 503, media_type="text/plain", headers=HEADERS)


def _json(document: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(document) + "\n", status_code=status, media_type="application/json", headers=HEADERS)
