"""The simulated processes of one run: inference server with its engine, orchestrator, trainer. Standard library only.

- The inference server behaves like vLLM: the engine holds the GPU memory; when it dies, ``/health`` answers 503 for a
  moment, then the server shuts down and RETURNS NORMALLY, so its exit code is 0 and the launcher does not notice.
- The orchestrator requests rollouts from the inference server, one step ahead of the trainer.
- The trainer makes steps, broadcasts and checkpoints in prime-rl's order.
"""

import ctypes
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from podwatch.simulation.run_files import (
    RunConfig,
    highest_step,
    hold,
    newest_stable,
    read_dcp,
    say,
    take_fault,
    tensor_bytes,
    write_dcp,
    write_safetensors,
    write_torch_zip,
)

# -- inference ---------------------------------------------------------------------------------------------------------

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
        " from podwatch.simulation.simulated_processes import engine_main; engine_main()"
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


# -- orchestrator ------------------------------------------------------------------------------------------------------

REQUESTS_PER_STEP = 4


def orchestrate(config: RunConfig) -> int:
    """Send one batch per step. A failing rollout is retried without limit, as in prime-rl."""
    _wait_for_health(config)
    first_step = 0 if config.layout == "A" else 1
    start = first_step
    if config.resume_step is not None:
        progress = config.orchestrator_checkpoint(config.resume_step) / "progress.pt"
        if not progress.is_file():
            say("ERROR", f"FileNotFoundError: {progress}")
            return 1
        start = config.resume_step + first_step
    last = config.max_steps + first_step
    for step in range(start, last):
        _wait_for_policy(config, step, start)
        if config.layout == "A" and step > 0 and step % config.interval == 0 and step != config.resume_step:
            _save_progress(config, step)
        for _ in range(REQUESTS_PER_STEP):
            _generate(config)
        if config.layout == "B" and step % config.interval == 0:
            _save_progress(config, step)
        target = config.rollout(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        temporary.write_bytes(os.urandom(4096))
        temporary.replace(target)
        say(
            "SUCCESS",
            f"Step {step} | Time: {config.step_seconds:.2f}s | Reward: {min(1.0, step / 100):.4f} | Async Level: 1",
        )
    say("SUCCESS", "Orchestrator finished.")
    return 0


def _save_progress(config: RunConfig, step: int) -> None:
    directory = config.orchestrator_checkpoint(step)
    directory.mkdir(parents=True, exist_ok=True)
    values = {"progress": {"step": step, "total_tokens": step * 1000, "total_samples": step * 64}}
    write_torch_zip(directory / "progress.pt", values, atomic=config.layout == "B")


def _wait_for_policy(config: RunConfig, step: int, start: int) -> None:
    """Wait until this is at most one step ahead of the trainer's published policy."""
    said = False
    while step - (newest_stable(config) or start) > 1:
        if not said:
            say("INFO", f"Orchestrator paused: waiting for trainer to publish checkpoint {step - 1}")
            said = True
        time.sleep(0.02)


def _wait_for_health(config: RunConfig) -> None:
    while True:
        try:
            if _ask(config, "GET", "/health") == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)


def _generate(config: RunConfig) -> None:
    pause = min(1.0, config.step_seconds)
    while True:
        try:
            if _ask(config, "POST", "/v1/completions", json.dumps({"max_tokens": 512})) == 200:
                return
            raise OSError("server error")
        except (OSError, http.client.HTTPException) as error:
            say("WARNING", f"Rollout failed: {type(error).__name__}: {error}")
            time.sleep(pause)


def _ask(config: RunConfig, method: str, path: str, body: str = "") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", config.port, timeout=10)
    try:
        connection.request(method, path, body or None)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


# -- trainer -----------------------------------------------------------------------------------------------------------

TRAINER_GPU = 1
TRAINER_MEMORY = 62 << 30


def train(config: RunConfig) -> int:
    """Run to ``max_steps``. Exit code 1 when a checkpoint does not load, as in prime-rl."""
    say("INFO", "Starting RL trainer")
    hold(config.gpus, TRAINER_GPU, os.getpid(), TRAINER_MEMORY, 10.0)
    start = 0
    if config.resume_step is not None:
        start = config.resume_step
        say("INFO", f"Resuming training from checkpoint step {start}")
        try:
            size = read_dcp(config.trainer_checkpoint(start))
        except (OSError, ValueError) as error:
            say("ERROR", f"CheckpointException: {error}")
            return 1
        time.sleep(config.load_seconds)  # 47 GB take minutes: long enough for the memory to be seen on the GPU
        say("INFO", f"Loaded {size} bytes")
        if _told_to_fail(config, start):
            say("ERROR", f"RuntimeError: Error(s) in loading state_dict at step {start}: size mismatch")
            return 1
    # prime-rl up to v0.4.0 takes the rollouts at the highest orchestrator checkpoint, whatever it resumes from
    # (with a later one left behind it waits for a batch that never comes).
    shift = 0
    if config.layout == "A":
        shift = max(0, (highest_step(config.orchestrator_root / "checkpoints") or start) - start)
    if config.layout == "B" and config.resume_step is not None:
        _broadcast(config, start)
    first = start if config.layout == "A" else start + 1
    last = config.max_steps if config.layout == "A" else config.max_steps + 1
    for step in range(first, last):
        if config.layout == "A" and step > 0:
            _broadcast(config, step)
            if step % config.interval == 0 and step != config.resume_step:
                _save(config, step)
        began = time.monotonic()
        _wait_for(config.rollout(step + shift))
        if take_fault(config, "hang") is not None:
            _hang(config)
        hold(config.gpus, TRAINER_GPU, os.getpid(), TRAINER_MEMORY, 95.0)
        time.sleep(config.step_seconds)
        hold(config.gpus, TRAINER_GPU, os.getpid(), TRAINER_MEMORY, 20.0)
        if config.layout == "B":
            _broadcast(config, step)
            if step % config.interval == 0:
                _save(config, step)
        say(
            "SUCCESS",
            f"Step {step} | Time: {time.monotonic() - began:.2f}s | Loss: {1 / (step + 1):.4f} | Entropy: 0.3",
        )
        _ping(config.heartbeat_url)
    if config.max_steps % config.interval:
        _save(config, config.max_steps)
    say("SUCCESS", "RL trainer finished!")
    return 0


def _save(config: RunConfig, step: int) -> None:
    say("INFO", f"Saving checkpoint at step {step}")
    write_dcp(config.trainer_checkpoint(step), ranks=config.ranks, bytes_per_rank=config.shard_bytes, seed=step)
    if config.keep_last:
        _keep_last(config)
    if config.layout == "A":
        weights = config.output_dir / "weights" / f"step_{step}"
        _write_weights(config, weights, step)


def _write_weights(config: RunConfig, directory: Path, step: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", {"w": tensor_bytes(step + 7, config.weights_bytes)})
    (directory / "config.json").write_text('{"model_type": "qwen3"}\n')
    (directory / "STABLE").touch()


def _broadcast(config: RunConfig, step: int) -> None:
    directory = config.broadcast(step)
    (directory / "STABLE").unlink(missing_ok=True)
    _write_weights(config, directory, step)
    # Broadcasts at checkpoint steps stay forever, the others are removed when the next ones exist.
    for old in directory.parent.glob("step_*"):
        number = int(old.name.split("_")[-1])
        if number < step - 1 and number % config.interval:
            shutil.rmtree(old, ignore_errors=True)


def _keep_last(config: RunConfig) -> None:
    steps = sorted(int(path.name.split("_")[-1]) for path in (config.output_dir / "checkpoints").glob("step_*"))
    for step in steps[: -config.keep_last]:
        shutil.rmtree(config.output_dir / "checkpoints" / f"step_{step}", ignore_errors=True)


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def _hang(config: RunConfig) -> None:
    """A deadlock as in prime-rl #1713: no step, GPU at 0 %, memory still held."""
    hold(config.gpus, TRAINER_GPU, os.getpid(), TRAINER_MEMORY, 0.0)
    while True:
        time.sleep(3600)


def _told_to_fail(config: RunConfig, step: int) -> bool:
    """Whether to fail now: the fault ``crash-after-load`` contains ``<step> <times>``; ``newest`` is the first loaded
    step."""
    text = take_fault(config, "crash-after-load")
    if text is None:
        return False
    wanted, times = text.split()
    wanted = str(step) if wanted == "newest" else wanted
    if wanted != str(step):
        (config.faults / "crash-after-load").write_text(text)
        return False
    if int(times) > 1:
        (config.faults / "crash-after-load").write_text(f"{wanted} {int(times) - 1}")
    return True


def _ping(url: str) -> None:
    if not url:
        return
    try:
        with urllib.request.urlopen(url, timeout=1):  # noqa: S310 - the configured heartbeat address
            pass
    except OSError:
        pass
