"""Shared code of the simulated processes: configuration, prime-rl's two layouts, log lines, ordered faults.

Standard library only. prime-rl's rules: "A" is the layout up to v0.8.0 with ``run_default/`` and steps from 0, "B" the
later one with one tree and steps from 1.
"""

import os
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GREEN, RED, YELLOW, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
RESUME_FLAGS = ("--ckpt.resume-step", "--resume.step")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration, read from ``@ FILE`` and flags, as in each of prime-rl's processes."""

    output_dir: Path
    max_steps: int
    interval: int
    resume_step: int | None
    layout: str
    port: int
    gpus: Path
    faults: Path
    step_seconds: float
    load_seconds: float
    death_seconds: float
    ranks: int
    shard_bytes: int
    weights_bytes: int
    heartbeat_url: str
    keep_last: int

    @property
    def orchestrator_root(self) -> Path:
        return self.output_dir / "run_default" if self.layout == "A" else self.output_dir

    def trainer_checkpoint(self, step: int) -> Path:
        return self.output_dir / "checkpoints" / f"step_{step}" / "trainer"

    def orchestrator_checkpoint(self, step: int) -> Path:
        return self.orchestrator_root / "checkpoints" / f"step_{step}" / "orchestrator"

    def broadcast(self, step: int) -> Path:
        return self.orchestrator_root / "broadcasts" / f"step_{step}"

    def rollout(self, step: int) -> Path:
        name = "rollouts.bin" if self.layout == "A" else "rank_0.bin"
        return self.orchestrator_root / "rollouts" / f"step_{step}" / name

    def log(self, role: str) -> Path:
        return self.output_dir / "logs" / (f"{role}.stdout" if self.layout == "A" else f"{role}.log")


def load_run(argv: Sequence[str]) -> RunConfig:
    """Flags take precedence over the file. Raises SystemExit with prime-rl's message for unknown flags."""
    flags: dict[str, str] = {}
    files: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "@":
            files.append(words.pop(0))
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            takes = bool(words) and not words[0].startswith("--") and words[0] != "@"
            flags[name] = value if equals else (words.pop(0) if takes else "")
        else:
            raise SystemExit(f"error: unrecognized argument: {word}")
    table: dict[str, Any] = {}
    for name in files:
        with open(name, "rb") as file:  # noqa: PTH123 - the start-up time of these processes counts
            table |= tomllib.load(file)
    simulation, checkpoint = table["simulation"], table.get("ckpt", {})
    known = {"--output-dir", "--ckpt", "--ckpt.interval", "--ckpt.keep-last", "--max-steps", "--trainer.heartbeat.url"}
    unknown = set(flags) - known - set(RESUME_FLAGS)
    if unknown:
        raise SystemExit(f"error: unrecognized arguments: {' '.join(sorted(unknown))}")
    resume = next((flags[name] for name in RESUME_FLAGS if name in flags), None)
    return RunConfig(
        output_dir=Path(flags.get("--output-dir", table["output_dir"])),
        max_steps=int(flags.get("--max-steps", table["max_steps"])),
        interval=int(flags.get("--ckpt.interval", checkpoint.get("interval", 5))),
        resume_step=int(resume) if resume is not None else None,
        layout=simulation["layout"],
        port=simulation["port"],
        gpus=Path(simulation["gpus"]),
        faults=Path(simulation["faults"]),
        step_seconds=simulation["step_seconds"],
        load_seconds=simulation["load_seconds"],
        death_seconds=simulation["death_seconds"],
        ranks=simulation["ranks"],
        shard_bytes=simulation["shard_bytes"],
        weights_bytes=simulation["weights_bytes"],
        heartbeat_url=flags.get("--trainer.heartbeat.url", simulation.get("heartbeat_url", "")),
        keep_last=int(flags.get("--ckpt.keep-last", "0")),
    )


def say(level: str, text: str) -> None:
    """Print a line as prime-rl's logger does: time without a date, level padded to 7, colours always on."""
    colour = {"SUCCESS": GREEN, "ERROR": RED, "WARNING": YELLOW}.get(level, "")
    print(f"{colour}{time.strftime('%H:%M:%S')} {level:>7} {text}{PLAIN}", flush=True)


def highest_step(root: Path) -> int | None:
    """The highest step as prime-rl finds it: every name that starts with ``step_`` is parsed, and an invalid one raises
    ValueError."""
    try:
        return max((int(name.split("_")[-1]) for name in os.listdir(root) if name.startswith("step_")), default=None)  # noqa: PTH208
    except FileNotFoundError:
        return None


def newest_stable(config: RunConfig) -> int | None:
    """The newest policy that the trainer has finished publishing."""
    root = config.orchestrator_root / "broadcasts"
    steps = [int(path.parent.name.split("_")[-1]) for path in root.glob("step_*/STABLE")]
    return max(steps, default=None)


def take_fault(config: RunConfig, name: str) -> str | None:
    """Take a fault that was ordered by writing ``<faults>/<name>``; this removes it."""
    path = config.faults / name
    try:
        text = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return None
    return text
