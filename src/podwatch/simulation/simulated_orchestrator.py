"""The simulated orchestrator: requests rollouts, one step ahead of the trainer. Standard library only."""

import http.client
import json
import os
import time

from podwatch.simulation.run_files import (
    INDEX,
    RunConfig,
    newest_stable,
    say,
)


def orchestrate(config: RunConfig) -> int:
    """Send one batch per step. A failing rollout is retried without limit, as in prime-rl."""
    _wait_for_health(config)
    start = 1
    if config.resume_step is not None:
        progress = config.orchestrator_checkpoint(config.resume_step) / INDEX
        if not progress.is_file():
            say("ERROR", f"FileNotFoundError: {progress}")
            return 1
        start = config.resume_step + 1
    for step in range(start, config.max_steps + 1):
        _wait_for_policy(config, step, start)
        for _ in range(4):  # requests per step
            _generate(config)
        if step % config.interval == 0:
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
    temporary = directory / f"{INDEX}.tmp"
    temporary.write_text(json.dumps({"step": step, "total_tokens": step * 1000, "total_samples": step * 64}))
    temporary.replace(directory / INDEX)


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
