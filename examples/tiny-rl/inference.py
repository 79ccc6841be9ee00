"""The inference server: an API process in front of the engine core, which dies like vLLM.

When the engine core dies, the server answers 503 for a moment and then returns normally, exit code 0, exactly as vLLM
does (vLLM ``entrypoints/launcher.py``), so that the launcher does not notice.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Engine:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.lock = threading.Lock()
        self.ready = False
        self.running = 0
        self.tokens = 0

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def wait_ready(self) -> None:
        self.ready = bool(self.process.stdout.readline())

    def ask(self, request: dict) -> dict:
        if not self.ready:  # only wait_ready may read the engine's first line
            raise RuntimeError("the engine is starting")
        with self.lock:
            self.running += 1
            try:
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline()
                if not line:
                    raise RuntimeError("EngineDeadError")
                answer = json.loads(line)
                self.tokens += answer.get("tokens", 0)
                return answer
            finally:
                self.running -= 1


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"

    def _send(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            alive = self.engine.ready and not self.engine.dead
            self._send(200 if alive else 503, b"")
        elif self.path == "/metrics":
            text = (
                "# TYPE vllm:num_requests_running gauge\n"
                f'vllm:num_requests_running{{engine="0"}} {self.engine.running}\n'
                "# TYPE vllm:generation_tokens_total counter\n"
                f'vllm:generation_tokens_total{{engine="0"}} {self.engine.tokens}\n'
            )
            self._send(200, text.encode())
        else:
            self._send(404, b"")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self._send(200, json.dumps(self.engine.ask(request)).encode(), "application/json")
        except (OSError, RuntimeError) as error:
            self._send(500, str(error).encode())

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    engine = Engine()
    Handler.engine = engine
    server = Server(("127.0.0.1", args.port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    engine.wait_ready()
    while not engine.dead:
        time.sleep(0.1)
    print("EngineDeadError: the engine core is gone", flush=True)
    time.sleep(0.5)
    server.shutdown()


if __name__ == "__main__":
    main()
