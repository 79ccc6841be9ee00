"""A service that is pinged while all is well, as healthchecks.io is: a web server that notes each call."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Service:
    def __init__(self) -> None:
        self.status, self.seen = 200, []  # type: ignore[var-annotated]
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                service.seen.append((self.command, self.path, body))
                self.send_response(service.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/ping/T0K3N-4711"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
