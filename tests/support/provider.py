"""A server that speaks the calls by which a rented machine ends itself at Vast.ai, at RunPod, or at any URL."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Provider:
    """One machine at Vast.ai, RunPod or behind a URL. ``answers``: replies to give before the right one."""

    url: str = ""
    key: str = "pod-key"
    state: str = "running"
    calls: list[tuple[str, str, object]] = field(default_factory=list)
    at_call: Callable[[], object] = lambda: None
    """Called with each request, before it is answered; ``seen`` has what it returned."""
    seen: list[object] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)

    def wait(self, seconds: float = 30.0) -> None:
        """Until the machine does not run any more."""
        end = time.monotonic() + seconds
        while self.state == "running":
            assert time.monotonic() < end, self.calls
            time.sleep(0.05)

    def answer(self, method: str, path: str, key: str, body: object) -> tuple[int, str]:
        self.calls.append((method, path, body))
        self.seen.append(self.at_call())
        if self.answers:
            return self.answers.pop(0)
        if key != f"Bearer {self.key}":
            return 401, '{"success": false, "error": "auth", "msg": "no such key"}'
        match method, path, body:
            case "DELETE", "/api/v0/instances/123/", _:
                self.state = "destroyed"
                return 200, '{"success": true}'
            case "PUT", "/api/v0/instances/123/", {"state": "stopped"}:
                self.state = "stopped"
                return 200, '{"success": true}'
            case "POST", "/v2/pods/abc/action", {"action": "terminate" | "stop" as action}:
                self.state = {"terminate": "destroyed", "stop": "stopped"}[action]
                return 200, '{"id": "abc"}'
            case "POST", "/hook", {"action": "destroy" | "stop" as action, "run_id": "run", "outcome": "finished"}:
                self.state = {"destroy": "destroyed", "stop": "stopped"}[action]
                return 204, ""
        return 404, '{"success": false, "error": "no_such_instance"}'


@contextmanager
def provider_server() -> Iterator[Provider]:
    found = Provider()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, text = found.answer(
                self.command, self.path, self.headers.get("Authorization", ""), json.loads(data or b"null")
            )
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
