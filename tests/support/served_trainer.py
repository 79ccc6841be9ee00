"""A trainer with an inference server and engine processes of its own, each of which fails when it is told to.

Standard library only. The server answers as vLLM does (``/health``, ``/metrics``, prime-rl's ``/liveness``, vLLM's
``/is_sleeping``) by ``<control>/server.json``, which is read at every request: ``{"health": 503}``; ``refuse``: it
stops listening and lives on; ``silent``: it accepts and never answers; ``flat``: requests run, no token comes;
``asleep``; ``exit``: it ends with code 0. Engines end by signal. The launcher makes a step every 0.1 s unless
``<control>/hold`` exists.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn


def named(name: str) -> None:
    Path("/proc/self/comm").write_text(name)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def engine(control: Path, number: int) -> NoReturn:
    named("VLLM::EngineCore" if number == 0 else f"VLLM::Worker_TP{number}")
    (control / f"engine{number}.pid").write_text(str(os.getpid()))
    while True:
        time.sleep(60)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    control: Path
    tokens = 0

    def order(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.control / "server.json").read_text())
        except (OSError, ValueError):
            return {}
        return found


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        order = self.server.order()
        if order.get("silent"):
            time.sleep(30)
        if not order.get("flat"):
            self.server.tokens += 100
        status, body = 200, ""
        if self.path == "/health":
            status = order.get("health", 200)
        elif self.path == "/is_sleeping":
            body = json.dumps({"is_sleeping": bool(order.get("asleep"))})
        elif self.path == "/metrics":
            body = f"vllm:num_requests_running 4.0\nvllm:generation_tokens_total {self.server.tokens}.0\n"
        elif self.path != "/liveness":
            status = 404
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Requests are not worth a line."""


def serve(control: Path, port: int) -> NoReturn:
    named("VLLM::APIServer")
    (control / "server.pid").write_text(str(os.getpid()))
    while True:
        server = Server(("127.0.0.1", port), Handler, bind_and_activate=False)
        server.allow_reuse_address = True
        server.control = control
        server.server_bind()
        server.server_activate()
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        while not (order := server.order()).get("refuse"):
            if order.get("exit"):
                os._exit(0)
            time.sleep(0.02)
        server.shutdown()
        server.server_close()
        while server.order().get("refuse"):
            time.sleep(0.02)


def main() -> int:
    control, port, engines = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for number in range(engines):
        if os.fork() == 0:
            engine(control, number)
    if os.fork() == 0:
        serve(control, port)
    step = 0
    while True:
        time.sleep(0.1)
        if (control / "hold").exists():
            continue
        step += 1
        print(f"{time.strftime('%H:%M:%S')} SUCCESS Step {step} | Time: 0.1s | Loss: 0.5", flush=True)


if __name__ == "__main__":
    sys.exit(main())
