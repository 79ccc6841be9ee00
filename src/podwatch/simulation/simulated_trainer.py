"""The simulated trainer: makes steps, broadcasts and checkpoints in prime-rl's order. Standard library only."""

import os
import shutil
import time
from pathlib import Path

from podwatch.simulation.run_files import (
    RunConfig,
    hold,
    load,
    save,
    say,
    take_fault,
    tensor_bytes,
    write_safetensors,
)

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
            size = load(config.trainer_checkpoint(start))
        except (OSError, ValueError) as error:
            say("ERROR", f"CheckpointException: {error}")
            return 1
        time.sleep(config.load_seconds)  # 47 GB take minutes: long enough for the memory to be seen on the GPU
        say("INFO", f"Loaded {size} bytes")
        _broadcast(config, start)
    for step in range(start + 1, config.max_steps + 1):
        began = time.monotonic()
        _wait_for(config.rollout(step))
        if take_fault(config, "hang") is not None:
            _hang(config)
        hold(config.gpus, TRAINER_GPU, os.getpid(), TRAINER_MEMORY, 95.0)
        time.sleep(config.step_seconds)
        hold(config.gpus, TRAINER_GPU, os.getpid(), TRAINER_MEMORY, 20.0)
        _broadcast(config, step)
        if step % config.interval == 0:
            _save(config, step)
        say(
            "SUCCESS",
            f"Step {step} | Time: {time.monotonic() - began:.2f}s | Loss: {1 / (step + 1):.4f} | Entropy: 0.3",
        )
    if config.max_steps % config.interval:
        _save(config, config.max_steps)
    say("SUCCESS", "RL trainer finished!")
    return 0


def _save(config: RunConfig, step: int) -> None:
    say("INFO", f"Saving checkpoint at step {step}")
    save(config.trainer_checkpoint(step), ranks=config.ranks, bytes_per_rank=config.shard_bytes, seed=step)


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


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def _hang(config: RunConfig) -> None:
    """A deadlock as in prime-rl #1713: no step, GPU at 0 %, memory still held."""
    hold(config.gpus, TRAINER_GPU, os.getpid(), TRAINER_MEMORY, 0.0)
    while True:
        time.sleep(3600)
