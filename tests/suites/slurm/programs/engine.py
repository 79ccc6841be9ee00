"""An inference server with its engine, as vLLM's: the server's exit code is 0, whatever happened to the engine.

``LOCK`` is held as long as the engine lives: its GPU memory is what the test shows for it. The file ``ORDER`` ends the
engine by SIGKILL. Standard library only.
"""

import fcntl
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

LOCK, ORDER = Path(sys.argv[1]), Path(sys.argv[2])
DEATH_SECONDS = 0.5


class Handler(BaseHTTPRequestHandler):
    dead = False

    def do_GET(self) -> None:
        found = self.path == "/health"
        self.send_response(503 if found and Handler.dead else 200 if found else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Requests are not worth a line."""


def engine() -> NoReturn:
    Path("/proc/self/comm").write_text("VLLM::EngineCore")
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    while not ORDER.exists():
        time.sleep(0.05)
    ORDER.unlink()
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)


def main() -> int:
    if (pid := os.fork()) == 0:
        engine()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    Path("/proc/self/comm").write_text("VLLM::APIServer")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.waitpid(pid, 0)
    Handler.dead = True
    time.sleep(DEATH_SECONDS)
    server.server_close()
    return 0


sys.exit(main())
