"""The simulated inference server and its engine. Standard library only.

It behaves like vLLM: the engine holds the GPU memory; when it dies, ``/health`` answers 503 for a moment, then the
server shuts down and RETURNS NORMALLY, so its exit code is 0 and the launcher does not notice.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from podwatch.simulation.run_files import (
    RunConfig,
    hold,
    say,
)

ENGINE_GPU = 0
ENGINE_MEMORY = 70 << 30
ENGINE_TITLE = "VLLM::EngineCore"
_PR_SET_NAME = 15


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64
    config: RunConfig
    engine_dead = False
    running = 0
    tokens = 0
    requests = 0
    lock: threading.Lock
    engine: "subprocess.Popen[bytes]"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(503 if self.server.engine_dead else 200, "")
        elif self.path == "/metrics":
            self._answer(200, _metrics(self.server))
        else:
            self._answer(404, "")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server = self.server
        with server.lock:
            server.running += 1
        hold(server.config.gpus, ENGINE_GPU, _engine_pid(server), ENGINE_MEMORY, 90.0)
        time.sleep(server.config.step_seconds / 10)
        with server.lock:
            server.running -= 1
            idle = server.running == 0
            if not server.engine_dead:
                server.tokens += 512
                server.requests += 1
        if idle and not server.engine_dead:
            hold(server.config.gpus, ENGINE_GPU, _engine_pid(server), ENGINE_MEMORY, 0.0)
        self._answer(500 if server.engine_dead else 200, "")

    def _answer(self, status: int, body: str) -> None:
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Do not log requests."""


def serve(config: RunConfig) -> int:
    """Run the API server. Returns 0, whatever happened to the engine."""
    engine = _start_engine(config)
    server = _Server(("127.0.0.1", config.port), _Handler, bind_and_activate=False)
    server.config, server.lock = config, threading.Lock()
    server.engine = engine

    def stop(_number: int, _frame: object) -> None:
        engine.terminate()

    signal.signal(signal.SIGTERM, stop)
    time.sleep(config.load_seconds)
    hold(config.gpus, ENGINE_GPU, engine.pid, ENGINE_MEMORY, 0.0)
    server.server_bind()
    server.server_activate()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    say("INFO", f"Uvicorn running on http://127.0.0.1:{config.port}")
    engine.wait()
    server.engine_dead = True
    say("ERROR", "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.")
    time.sleep(config.death_seconds)
    server.shutdown()
    server.server_close()
    say("INFO", "Application shutdown complete.")
    return 0


def engine_main() -> None:
    """Run the engine, which only stays alive. The server allocates its memory in its name once it is loaded."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ENGINE_TITLE[:15].encode(), 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        time.sleep(3600)


def _start_engine(config: RunConfig) -> "subprocess.Popen[bytes]":
    """Start it with vLLM's process title as argv[0]; PYTHONHOME because Python searches its library beside argv[0]."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        " from podwatch.simulation.simulated_inference_server import engine_main; engine_main()"
    )
    source = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
    return subprocess.Popen(
        [ENGINE_TITLE, "-S", "-c", code, source], executable=sys.executable, env=environment, stdin=subprocess.DEVNULL
    )


def _engine_pid(server: _Server) -> int:
    return server.engine.pid


def _metrics(server: _Server) -> str:
    label = '{engine="0",model_name="simulated"}'
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {float(server.running)}\n"
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{label} 0.0\n"
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{label} {0.1 * server.running}\n"
        f"# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{label} {float(server.tokens)}\n"
        f"# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{label} {float(server.tokens // 4)}\n"
        f"# TYPE vllm:request_success_total counter\nvllm:request_success_total{label} {float(server.requests)}\n"
    )
