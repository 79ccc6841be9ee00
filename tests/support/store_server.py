"""What the tests' B2 and S3 servers have in common: a process of its own that can be killed and started again on the
same port and data, requests whose bodies travel at a given speed, and faults on demand."""

import gc
import json
import os
import signal
import socket
import ssl
import struct
import time
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol, Self

from tests.support import warm

_PACED = 1 << 18
"""Bytes read at once where the line's speed is limited."""


class ApiError(Exception):
    """An answer that refuses. ``extra``: more of an S3 error document."""

    def __init__(
        self, status: int, code: str, message: str = "", headers: dict[str, str] | None = None, extra: str = ""
    ) -> None:
        super().__init__(message or code)
        self.status, self.code, self.message = status, code, message or code
        self.headers, self.extra = headers or {}, extra


class Cut(Exception):  # noqa: N818
    """End the connection without an answer."""


class Fault(Protocol):
    """What both servers' faults have; ``action``: status, reset, hang, slow, stall, lost, late, torn, flip, page."""

    action: str
    status: int
    code: str
    retry_after: str
    seconds: float
    after_bytes: int


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    state: Any

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is normal here."""


class Handler(BaseHTTPRequestHandler):
    """One connection. ``unread``: bytes of the request's body that are still to be read."""

    protocol_version = "HTTP/1.1"
    server: Server
    disable_nagle_algorithm = True
    fault: Any = None
    unread = 0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    @property
    def state(self) -> Any:
        return self.server.state

    def suffer(self, rule: Fault, *, download: bool) -> None:
        """The part of a fault that comes before the answer. Raises ApiError and Cut."""
        if rule.after_bytes:
            self.read(min(self.unread, rule.after_bytes))
        if rule.action == "status":
            headers = {"Retry-After": rule.retry_after} if rule.retry_after else {}
            raise ApiError(rule.status, rule.code, f"injected {rule.code}", headers)
        if rule.action == "reset":
            raise Cut
        if rule.action == "page":
            self._page(rule.status)
            raise Cut
        if rule.action in ("hang", "slow") or (rule.action == "stall" and not download):
            time.sleep(rule.seconds)
            if rule.action != "slow":
                raise Cut

    def read(self, size: int) -> bytes:
        """The next bytes of the body. Raises Cut where the client dies in the middle of its request."""
        if (rate := self.state.rate) and size > _PACED:  # as a line over a distance: in pieces, each in its time
            return b"".join(self.read(min(_PACED, size - at)) for at in range(0, size, _PACED))
        began = time.monotonic()
        data = self.rfile.read(size)
        if rate and size > 1 << 16:
            time.sleep(max(0.0, size / rate - (time.monotonic() - began)))
        self.unread -= len(data)
        if len(data) < size:
            raise Cut
        return data

    def drain(self) -> None:
        while self.unread:
            self.read(min(self.unread, 1 << 20))

    def send_file(self, file: Path, start: int, end: int) -> None:
        """The bytes from disk, with the faults that a download can have."""
        state, fault = self.state, self.fault
        cut_at = fault.after_bytes if fault and fault.action in ("lost", "stall") else None
        block, sent = 1 << 16 if state.rate else 1 << 18, 0
        with file.open("rb") as body:
            body.seek(start)
            while data := body.read(min(block, end - start - sent)):
                if fault and fault.action == "flip" and sent == 0:
                    data = bytes([data[0] ^ 1]) + data[1:]
                if state.rate:
                    time.sleep(len(data) / state.rate)
                if cut_at is not None and sent + len(data) > cut_at:
                    self.wfile.write(data[: cut_at - sent])
                    self.wfile.flush()
                    stalled = fault.seconds if fault and fault.action == "stall" else 0.0
                    time.sleep(stalled or 0.05)  # what was sent must reach the client before the reset does
                    raise Cut
                with state.lock:
                    state.sent += len(data)  # before the client can have it, and ask
                self.wfile.write(data)
                sent += len(data)

    def _page(self, status: int) -> None:
        """What a proxy or a portal in between would say."""
        self.drain()
        data = b"<html><body>Please log in</body></html>"
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        if status == 302:
            host, port = self.server.server_address[:2]
            self.send_header("Location", f"http://{host!s}:{port}/login")
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
        time.sleep(0.05)

    def cut(self) -> None:
        self.close_connection = True
        with suppress(OSError, ValueError):
            self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class ServerProcess:
    """Starts the server on a free port; ``stop`` and ``start`` again make an outage on the same port and data."""

    module = ""

    def __init__(self, directory: Path, bucket: str, certificate: Path | None = None) -> None:
        self.directory, self.bucket, self._certificate = directory, bucket, certificate
        self.port, self.url = 0, ""
        self._process: warm.Started | None = None

    def start(self) -> Self:
        arguments = ["--port", str(self.port), "--dir", str(self.directory), "--bucket", self.bucket]
        if self._certificate is not None:
            arguments += ["--certificate", str(self._certificate)]
        reading, writing = os.pipe()
        with os.fdopen(reading) as answer, Path(os.devnull).open() as nothing:
            with os.fdopen(writing, "w") as told:
                streams = [nothing.fileno(), told.fileno(), 2]
                module = f"{self.module}.__main__"
                self._process = warm.start(module, arguments, cwd=warm.ROOT, env=os.environ, streams=streams)
            self.url = answer.readline().strip()
        assert self.url.startswith("http"), "the server did not start"
        self.port = int(self.url.rsplit(":", 1)[1])
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def admin(self, what: str, **body: Any) -> Any:
        request = urllib.request.Request(f"{self.url}/admin/{what}", json.dumps(body).encode(), method="POST")
        context = ssl._create_unverified_context() if self.url.startswith("https") else None
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return json.load(answer)

    def fault(self, ep: str, action: str, **details: Any) -> None:
        self.admin("fault", ep=ep, action=action, **details)

    def pace(self, latency: float = 0.0, rate: float = 0.0) -> None:
        """Seconds before each answer, and bytes per second of each connection; 0 is no limit."""
        self.admin("pace", latency=latency, rate=rate)

    def calls(self) -> dict[str, int]:
        """How often each operation was requested, failed ones included."""
        return dict(self.admin("state")["calls"])

    def sent(self) -> int:
        """Bytes of objects that clients have downloaded."""
        return int(self.admin("state")["sent"])

    def events(self) -> list[dict[str, Any]]:
        return list(self.admin("state")["events"])


def serve(make_state: Any, handler: type[Handler]) -> None:
    """The process itself: prints its URL and serves until it is killed, never longer than the test run."""
    import argparse
    import ctypes

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--bucket", default="test-bucket")
    parser.add_argument("--certificate", type=Path, help="a PEM file with certificate and key, for TLS")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    gc.enable()  # which the process that it was forked from has switched off
    server = Server(("127.0.0.1", arguments.port), handler)
    server.state = make_state(arguments.dir, arguments.bucket)
    scheme = "http"
    if arguments.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(arguments.certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        scheme = "https"
    print(f"{scheme}://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


def environment(**own: str) -> dict[str, str]:
    return os.environ | own
