"""Files of a simulated run: configuration, prime-rl's directories, checkpoints, ordered faults, log lines, and the
memory of simulated GPUs. Standard library only, because the simulated processes must start quickly.

prime-rl's rules since v0.8.0: one tree, steps from 1. Checkpoints are written as torch does, without torch: the tensor
data is arbitrary; archive, index, offsets, save id and order of writing are as in real files, so that structural checks
give the same results.
"""

import io
import json
import os
import pickle
import random
import time
import tomllib
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.snapshot import GpuSample, GpuState

GREEN, RED, YELLOW, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
RESUME_FLAGS = ("--ckpt.resume-step", "--resume.step")


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
    unknown = set(flags) - known - set(RESUME_FLAGS)
    if unknown:
        raise SystemExit(f"error: unrecognized arguments: {' '.join(sorted(unknown))}")
    resume = next((flags[name] for name in RESUME_FLAGS if name in flags), None)
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


def write_torch_zip(path: Path, values: Mapping[str, Any]) -> None:
    """Write a ``torch.save`` file with plain values (``progress.pt``): a temporary name, then a rename."""
    target = path.with_name(f"{path.name}.tmp")
    with target.open("wb") as file:
        file.write(_archive(_dumps(dict(values)), None))
        file.flush()
        os.fsync(file.fileno())
    target.replace(path)


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


def write_dcp(directory: Path, *, ranks: int, bytes_per_rank: int, seed: int, tensors: int = 4) -> str:
    """Write one torch.distributed.checkpoint save, in its order: every shard fsynced, ``.metadata.tmp``, the old
    ``.metadata`` removed, rename. Returns the save id."""
    directory.mkdir(parents=True, exist_ok=True)
    save_id = str(uuid.uuid4())
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for rank in range(ranks):
        name = f"__{rank}_0.distcp"
        offset = 0
        with (directory / name).open("wb") as file:
            for number in range(tensors):
                size = max(64, bytes_per_rank // tensors)
                group = "model" if number % 2 == 0 else "optimizer"
                key = f"{group}.layer{number}.rank{rank}"
                content = tensor_bytes(seed * 1000 + rank * 10 + number, size)
                record = _archive(_dumps(_Rebuilt(size)), content)
                file.write(record)
                storage[_make(_MetadataIndex, fqn=key, offset=_Size((0,)), index=0)] = _make(
                    _StorageInfo, relative_path=name, offset=offset, length=len(record), transform_descriptors=None
                )
                chunk = _make(_ChunkStorageMetadata, offsets=_Size((0,)), sizes=_Size((size,)))
                state[key] = _make(_TensorStorageMetadata, properties=None, size=_Size((size,)), chunks=[chunk])
                offset += len(record)
            file.flush()
            os.fsync(file.fileno())
    meta = _make(_StorageMeta, checkpoint_id=str(directory), save_id=save_id, load_id=None, modules=[])
    index = _make(
        _Metadata, state_dict_metadata=state, planner_data=None, storage_data=storage, storage_meta=meta, version=None
    )
    temporary = directory / ".metadata.tmp"
    with temporary.open("wb") as file:
        file.write(_dumps(index))
        file.flush()
        os.fsync(file.fileno())
    (directory / ".metadata").unlink(missing_ok=True)
    temporary.replace(directory / ".metadata")
    return save_id


def read_dcp(directory: Path) -> int:
    """Load a checkpoint as the trainer does at a resume: read every byte. Raises OSError or ValueError when it
    cannot be loaded. Returns the bytes read."""
    if not (directory / ".metadata").is_file():
        raise ValueError(f"Checkpoint not found at {directory}: no .metadata")
    total = 0
    for path in sorted(directory.glob("__*.distcp")):
        content = path.read_bytes()
        if content[:4] != b"PK\x03\x04" or content[-22:-18] != b"PK\x05\x06":
            raise ValueError(f"{path.name} is not a whole checkpoint shard")
        total += len(content)
    return total


class _Named:
    """Pickles as a class or function of torch, without importing it."""

    torch_module = ""
    torch_name = ""


def _torch(module: str, name: str) -> Any:
    return type(f"_{name}", (_Named,), {"torch_module": module, "torch_name": name})


_DCP = "torch.distributed.checkpoint.metadata"
_Metadata = _torch(_DCP, "Metadata")
_MetadataIndex = _torch(_DCP, "MetadataIndex")
_TensorStorageMetadata = _torch(_DCP, "TensorStorageMetadata")
_ChunkStorageMetadata = _torch(_DCP, "ChunkStorageMetadata")
_StorageMeta = _torch(_DCP, "StorageMeta")
_StorageInfo = _torch("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SizeClass = _torch("torch", "Size")
_RebuildTensor = _torch("torch._utils", "_rebuild_tensor_v2")
_OrderedDict = _torch("collections", "OrderedDict")
_ByteStorage = _torch("torch", "ByteStorage")


def _make(kind: Any, **attributes: Any) -> Any:
    made = kind()
    made.__dict__.update(attributes)
    return made


class _Size(tuple[int, ...]):
    """``torch.Size``."""

    def __reduce__(self) -> Any:
        return _SizeClass, (tuple(self),)


class _Storage:
    def __init__(self, size: int) -> None:
        self.size = size


class _Rebuilt:
    """A one-dimensional uint8 tensor."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __reduce__(self) -> Any:
        arguments = (_Storage(self.size), 0, (self.size,), (1,), False, _Call(_OrderedDict))
        return _RebuildTensor, arguments


class _Call:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return self.function, ()


_PYTHON_PICKLER: Any = pickle._Pickler  # type: ignore[attr-defined,unused-ignore]
"""Python's own pickler, because its methods can be overridden; the C one must import the classes."""


class _Pickler(_PYTHON_PICKLER):  # type: ignore[misc]
    """Writes the names of torch's classes without importing them."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, _Named):
            self.save(obj.torch_module)
            self.save(obj.torch_name)
            self.write(pickle.STACK_GLOBAL)
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", _ByteStorage, "0", "cpu", obj.size) if isinstance(obj, _Storage) else None


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(value)
    return buffer.getvalue()


def _archive(pickled: bytes, storage: bytes | None) -> bytes:
    """A torch zip: stored entries, ``data.pkl`` first, no archive comment."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        if storage is not None:
            archive.writestr("archive/data/0", storage)
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


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
