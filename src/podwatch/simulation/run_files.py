"""Files of a simulated run: configuration, prime-rl's directories, checkpoints, ordered faults, log lines, and the
memory of simulated GPUs. Standard library only, because the simulated processes must start quickly.

prime-rl's rules since v0.8.0: one tree, steps from 1. Its checkpoints are safetensors files with an index that is
written last, which podwatch knows from a table of its own (``LAYOUT``).
"""

import json
import random
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.snapshot import GpuSample, GpuState

GREEN, RED, YELLOW, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
RESUME_FLAG = "--ckpt.resume-step"
INDEX = "index.json"
LAYOUT = {
    "parts": {
        "trainer": ["checkpoints/step_{step}/trainer"],
        "orchestrator": ["checkpoints/step_{step}/orchestrator"],
    },
    "require": ["*.json"],
    "last": {f"*{INDEX}": ["*"]},
    "also_ahead": ["rollouts/step_{step}", "broadcasts/step_{step}"],
    "table": {"first_step_after": 1},
    "step_line": r"Step (\d+) \| .*Loss",
    "processes": {
        "trainer": ["bin/torchrun"],
        "orchestrator": ["bin/orchestrator"],
        "inference": ["bin/inference"],
        "engine": ["VLLM::EngineCore"],
    },
}
"""The simulated trainer, as ``[checkpoints.custom]`` describes it."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration, read from ``@ FILE`` and flags, as in each of prime-rl's processes."""

    output_dir: Path
    max_steps: int
    interval: int
    resume_step: int | None
    port: int
    gpus: Path
    faults: Path
    step_seconds: float
    load_seconds: float
    death_seconds: float
    ranks: int
    shard_bytes: int
    weights_bytes: int

    def trainer_checkpoint(self, step: int) -> Path:
        return self.output_dir / "checkpoints" / f"step_{step}" / "trainer"

    def orchestrator_checkpoint(self, step: int) -> Path:
        return self.output_dir / "checkpoints" / f"step_{step}" / "orchestrator"

    def broadcast(self, step: int) -> Path:
        return self.output_dir / "broadcasts" / f"step_{step}"

    def rollout(self, step: int) -> Path:
        return self.output_dir / "rollouts" / f"step_{step}" / "rank_0.bin"

    def log(self, role: str) -> Path:
        return self.output_dir / "logs" / f"{role}.log"


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
    known = {"--output-dir", "--ckpt", "--ckpt.interval", "--max-steps"}
    unknown = set(flags) - known - {RESUME_FLAG}
    if unknown:
        raise SystemExit(f"error: unrecognized arguments: {' '.join(sorted(unknown))}")
    resume = flags.get(RESUME_FLAG)
    return RunConfig(
        output_dir=Path(flags.get("--output-dir", table["output_dir"])),
        max_steps=int(flags.get("--max-steps", table["max_steps"])),
        interval=int(flags.get("--ckpt.interval", checkpoint.get("interval", 5))),
        resume_step=int(resume) if resume is not None else None,
        port=simulation["port"],
        gpus=Path(simulation["gpus"]),
        faults=Path(simulation["faults"]),
        step_seconds=simulation["step_seconds"],
        load_seconds=simulation["load_seconds"],
        death_seconds=simulation["death_seconds"],
        ranks=simulation["ranks"],
        shard_bytes=simulation["shard_bytes"],
        weights_bytes=simulation["weights_bytes"],
    )


def say(level: str, text: str) -> None:
    """Print a line as prime-rl's logger does: time without a date, level padded to 7, colours always on."""
    colour = {"SUCCESS": GREEN, "ERROR": RED, "WARNING": YELLOW}.get(level, "")
    print(f"{colour}{time.strftime('%H:%M:%S')} {level:>7} {text}{PLAIN}", flush=True)


def newest_stable(config: RunConfig) -> int | None:
    """The newest policy that the trainer has finished publishing."""
    root = config.output_dir / "broadcasts"
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


_BLOCK = 1 << 20


def tensor_bytes(seed: int, size: int) -> bytes:
    """``size`` bytes that differ by seed: one random block, repeated."""
    block = random.Random(seed).randbytes(min(_BLOCK, max(1, size)))
    return (block * (size // len(block) + 1))[:size]


def write_safetensors(path: Path, tensors: Mapping[str, bytes]) -> None:
    """Write a ``.safetensors`` file of U8 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [position, position + len(content)]}
        position += len(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for content in tensors.values():
            file.write(content)


def save(directory: Path, *, ranks: int, bytes_per_rank: int, seed: int) -> None:
    """Write one checkpoint: a shard for each rank, then ``index.json`` with their sizes, by a rename."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    for rank in range(ranks):
        path = directory / f"rank_{rank}.safetensors"
        write_safetensors(path, {"state": tensor_bytes(seed * 1000 + rank, bytes_per_rank)})
        sizes[path.name] = path.stat().st_size
    temporary = directory / "index.json.tmp"
    temporary.write_text(json.dumps({"seed": seed, "sizes": sizes}))
    temporary.replace(directory / INDEX)


def load(directory: Path) -> int:
    """Load a checkpoint as the trainer does at a resume: read every byte. Raises OSError or ValueError when it cannot
    be loaded. Returns the bytes read."""
    total = 0
    for name, size in json.loads((directory / INDEX).read_text())["sizes"].items():
        content = (directory / name).read_bytes()
        if len(content) != size:
            raise ValueError(f"{name} is not a whole shard")
        total += len(content)
    return total


# -- memory held by a process ----------------------------------------------------------------------------------------
# A file ``<dir>/<gpu>/<pid>`` that counts while that process lives. Standard library only: the simulated processes
# import it.


@dataclass(frozen=True, slots=True)
class Held:
    pid: int
    memory_bytes: int
    utilization_percent: float


def hold(directory: Path, gpu: int, pid: int, memory_bytes: int, utilization_percent: float = 0.0) -> None:
    """Allocate or change the held memory; the file is replaced atomically, so a reader never sees half a line."""
    folder = directory / str(gpu)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{pid}"
    temporary.write_text(f"{memory_bytes} {utilization_percent} {start_ticks(pid) or 0}\n")
    temporary.replace(folder / str(pid))


def held(directory: Path, gpu: int) -> tuple[Held, ...]:
    """The memory that living processes hold on one GPU. A zombie holds none: the driver frees memory when a process
    ends."""
    found = []
    try:
        entries = sorted(directory.joinpath(str(gpu)).iterdir())
    except FileNotFoundError:
        return ()
    for entry in entries:
        if not entry.name.isdigit():
            continue
        try:
            memory, utilization, ticks = entry.read_text().split()
            holder = Held(int(entry.name), int(memory), float(utilization))
            alive = start_ticks(holder.pid) == int(ticks)
        except (FileNotFoundError, ValueError):
            continue
        if alive:
            found.append(holder)
    return tuple(found)


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when the process is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


# -- reader ----------------------------------------------------------------------------------------------------------

GIB = 1 << 30
TOTAL_BYTES = 80 * GIB


class SimulatedGpus:
    """``count`` GPUs below ``directory``. Their memory and utilization are the sums of what living processes hold
    there.

    A file ``<gpu>/lost`` makes a device fall off the bus.
    """

    def __init__(self, directory: Path, count: int = 2, total_bytes: int = TOTAL_BYTES) -> None:
        self._directory = directory
        self._count = count
        self._total = total_bytes

    def read(self) -> tuple[GpuSample, ...]:
        return tuple(self._sample(index) for index in range(self._count))

    def close(self) -> None:
        """Nothing to do: no file is kept open."""

    def _sample(self, index: int) -> GpuSample:
        name, uuid = "Simulated H100", f"GPU-simulated-{index}"
        if (self._directory / str(index) / "lost").exists():
            return GpuSample(index, uuid, name, GpuState.LOST, detail="simulated: fell off the bus")
        holders = held(self._directory, index)
        memory = sum(holder.memory_bytes for holder in holders)
        use = min(100.0, sum(holder.utilization_percent for holder in holders))
        return GpuSample(
            index,
            uuid,
            name,
            memory_used_bytes=min(memory, self._total),
            memory_total_bytes=self._total,
            utilization_percent=use,
            temperature_celsius=35.0 + use / 4,
        )
