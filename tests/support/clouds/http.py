"""A provider's HTTP server: real sockets, answers cut, late, lost or wrong on demand."""

import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, object]
"""Status and JSON. Text is sent as it is."""


@dataclass
class Fault:
    """For the next ``times`` requests whose "METHOD /path" matches.

    ``status`` and ``body`` replace the answer. ``effect``: the request is carried out before. ``cut``: half of the text
    is sent ("text") and declared whole, or declared but not sent ("body"). ``hang``: no answer at all, until the server
    ends. ``drop``: the connection is closed instead.
    """

    request: str
    status: int = 0
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)
    effect: bool = False
    cut: str = ""
    hang: bool = False
    drop: bool = False
    times: int = 1

    def __str__(self) -> str:
        """As the name of a test case."""
        shown = {
            k: v for k, v in vars(self).items() if v and k not in ("request", "headers") and (k, v) != ("times", 1)
        }
        return f"{self.request} {' '.join(f'{k}={json.dumps(v)}' for k, v in shown.items())}"[:80]


class Cloud:
    """``serve`` is the API; ``calls`` are the requests, as "METHOD /path", with their bodies."""

    KEY = "account-key"

    def __init__(self) -> None:
        self.instances: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.faults: list[Fault] = []
        self.at_call: dict[str, Callable[[], object]] = {}
        """By "METHOD /path": called with the request, before it is answered."""
        self.lock = threading.Lock()
        self._ended = threading.Event()
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                cloud._answer(self)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _any  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> "Cloud":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def count(self, request: str) -> int:
        """How often a request came."""
        return sum(bool(re.fullmatch(request, call)) for call, _ in self.calls)

    def serve(self, method: str, path: str, query: dict[str, str], body: Any) -> Reply:
        raise NotImplementedError

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length) or b"null")
        url = urllib.parse.urlsplit(handler.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        call = f"{handler.command} {url.path}"
        with self.lock:
            self.calls.append((call, body))
            self.at_call.get(call, lambda: None)()
            fault = next((f for f in self.faults if f.times > 0 and re.fullmatch(f.request, call)), None)
            if fault is not None:
                fault.times -= 1
            if handler.headers.get("Authorization") != f"Bearer {self.KEY}":
                status, found = self.unauthorized()
            elif fault is None or fault.effect or not (fault.status or fault.hang or fault.drop):
                status, found = self.serve(handler.command, url.path, query, body)
            else:
                status, found = 200, None
        if fault is None:
            return self._send(handler, status, found)
        if fault.hang:
            self._ended.wait(600)
        if fault.hang or fault.drop:
            handler.close_connection = True
            return None
        found = fault.body if fault.body is not None or fault.status else found
        return self._send(handler, fault.status or status, found, fault.headers, fault.cut)

    def unauthorized(self) -> Reply:
        return 401, {"title": "Unauthorized", "status": 401, "detail": "invalid key", "msg": "Invalid key"}

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, found: object, headers: dict[str, str] | None = None,
        cut: str = "",
    ) -> None:  # fmt: skip
        text = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        if status == 204:
            text = b""
        handler.send_response(status)
        handler.send_header("Content-Type", "text/plain" if isinstance(found, str) else "application/json")
        sent = text[: len(text) // 2] if cut else text
        handler.send_header("Content-Length", str(len(text) if cut == "body" else len(sent)))
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(sent)
        if cut == "body":
            handler.close_connection = True
