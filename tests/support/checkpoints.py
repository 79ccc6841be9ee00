"""Real checkpoint files without torch: byte layouts as torch 2.13 and safetensors write them.

Every ``*_operations`` function is a generator that does one file operation per step, in the trainer's own order, so
that a test can stop a save anywhere: ``take(prime_rl_operations(...), 7)`` is a trainer killed after operation 7.
"""

import contextlib
import io
import json
import os
import pickle
import struct
import time
import types
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar


class ManualClock:
    """A clock that a test moves. ``wall`` starts at the real time, because files carry real times."""

    def __init__(self) -> None:
        self._began = time.time()
        self.passed = 0.0

    def advance(self, seconds: float) -> None:
        self.passed += seconds

    def monotonic(self) -> float:
        return 1000.0 + self.passed

    def boottime(self) -> float:
        return self.monotonic()

    def wall(self) -> float:
        return self._began + self.passed

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


# -- single files ---------------------------------------------------------------------------------------------------


def torch_zip_bytes(value: Any, storages: tuple[bytes, ...] = (), name: str = "archive") -> bytes:
    """What ``torch.save(value)`` writes: a stored zip with data.pkl, storages, version, in torch's order."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{name}/data.pkl", pickle.dumps(value, protocol=2))
        archive.writestr(f"{name}/.format_version", b"1")
        archive.writestr(f"{name}/.storage_alignment", b"64")
        archive.writestr(f"{name}/byteorder", b"little")
        for number, data in enumerate(storages):
            archive.writestr(f"{name}/data/{number}", data)
        archive.writestr(f"{name}/version", b"3\n")
        archive.writestr(f"{name}/.data/serialization_id", b"0" * 40)
    return out.getvalue()


def safetensors_bytes(
    tensors: dict[str, int] | None = None, fill: bytes = b"\x01", offsets: dict[str, int] | None = None
) -> bytes:
    """``tensors``: name -> number of float32 values. ``offsets``: of a DCP shard, name -> where its part begins."""
    tensors = tensors or {"w": 64}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if offsets is not None:
        notes = {name: {"saved_offsets": [begin]} for name, begin in offsets.items()}
        header["__metadata__"] |= {"DCP_SHARDING_INFO": json.dumps(notes), "DCP_VERSION": "1.0"}
    position = 0
    for name, count in tensors.items():
        header[name] = {"dtype": "F32", "shape": [count], "data_offsets": [position, position + 4 * count]}
        position += 4 * count
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + fill * position


class _Pickler(pickle._Pickler):
    """Pickles classes by the names they claim, without importing what they claim to come from."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        self.save(obj.__module__)
        self.save(name or obj.__qualname__)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    dispatch: ClassVar[dict[type, Any]] = {
        **pickle._Pickler.dispatch,
        type: save_global,
        types.FunctionType: save_global,
    }


def _named(module: str, name: str) -> type:
    return type(name, (), {"__module__": module, "__qualname__": name})


_META = "torch.distributed.checkpoint.metadata"
_Metadata = _named(_META, "Metadata")
_Index = _named(_META, "MetadataIndex")
_Tensor = _named(_META, "TensorStorageMetadata")
_Chunk = _named(_META, "ChunkStorageMetadata")
_Bytes = _named(_META, "BytesStorageMetadata")
_StorageMeta = _named(_META, "StorageMeta")
_Info = _named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_Size = _named("torch", "Size")


class _SizeValue:
    """Pickles as ``torch.Size((n, ...))``, which is what torch does."""

    def __init__(self, *sides: int) -> None:
        self.sides = sides

    def __reduce__(self) -> Any:
        return (_Size, (self.sides,))


def _make(cls: type, **state: Any) -> Any:
    made = cls()
    made.__dict__.update(state)
    return made


def dcp_files(
    size: int = 4096, ranks: int = 1, save_id: str = "", records: int = 3, keys: Sequence[str] = ()
) -> dict[str, bytes]:
    """Name -> content of a DCP directory; ``.metadata`` comes last. ``size``: about so many bytes per shard. ``keys``:
    names of what was saved, instead of made-up ones."""
    storage: dict[Any, Any] = {}
    state: dict[str, Any] = {}
    shards: dict[str, bytes] = {}
    for rank in range(ranks):
        name = f"__{rank}_0.distcp"
        body = b""
        for number in range(len(keys) or records):
            key = keys[number] if keys else f"app.model.layer{number}.rank{rank}"
            data = torch_zip_bytes({"n": number}, (os.urandom(max(1, size // records)),))
            index = _make(_Index, fqn=key, offset=_SizeValue(0), index=0)
            storage[index] = _make(
                _Info, relative_path=name, offset=len(body), length=len(data), transform_descriptors=None
            )
            chunk = _make(_Chunk, offsets=_SizeValue(0), sizes=_SizeValue(size))
            state[key] = _make(_Tensor, properties=None, size=_SizeValue(size), chunks=[chunk])
            body += data
        shards[name] = body
    if not keys:
        state["app.progress"] = _make(_Bytes)
    metadata = _make(
        _Metadata,
        state_dict_metadata=state,
        planner_data={},
        storage_data=storage,
        storage_meta=_make(
            _StorageMeta, checkpoint_id=None, save_id=save_id or str(uuid.uuid4()), load_id=None, modules=[]
        ),
        version="1.0.0",
    )
    out = io.BytesIO()
    _Pickler(out, 4).dump(metadata)
    return {**shards, ".metadata": out.getvalue()}


# -- operations -----------------------------------------------------------------------------------------------------


def take(operations: Iterator[str], count: int) -> list[str]:
    """Do the first ``count`` operations and stop there; returns their names."""
    done = []
    for name in operations:
        done.append(name)
        if len(done) >= count:
            break
    return done


def finish(operations: Iterator[str]) -> list[str]:
    return list(operations)


def _write(path: Path, data: bytes) -> Iterator[str]:
    """Open (and truncate), half of it, the rest: three moments at which a writer can die."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as file:
        yield f"open {path.name}"
        file.write(data[: len(data) // 2])
        yield f"half {path.name}"
        file.write(data[len(data) // 2 :])
    yield f"whole {path.name}"


def dcp_operations(directory: Path, size: int = 4096, ranks: int = 1, save_id: str = "") -> Iterator[str]:
    """``dcp.save``: shards, .metadata.tmp, remove the old .metadata, rename."""
    files = dcp_files(size, ranks, save_id)
    index = files.pop(".metadata")
    directory.mkdir(parents=True, exist_ok=True)
    yield f"mkdir {directory.name}"
    for name, data in files.items():
        yield from _write(directory / name, data)
    yield from _write(directory / ".metadata.tmp", index)
    if (directory / ".metadata").exists():
        (directory / ".metadata").unlink(missing_ok=True)
        yield "unlink .metadata"
    with contextlib.suppress(FileNotFoundError):  # a second trainer, which saves the same step, has just renamed it
        (directory / ".metadata.tmp").rename(directory / ".metadata")
    yield "rename .metadata"


def orchestrator_operations(directory: Path, step: int, variant: str) -> Iterator[str]:
    """A (early 2026): plain writes and the buffer after it. B: temporary file and rename."""
    data = torch_zip_bytes({"progress": {"step": step, "total_tokens": 10}}, name="progress")
    directory.mkdir(parents=True, exist_ok=True)
    yield f"mkdir {directory.name}"
    if variant == "A":
        yield from _write(directory / "progress.pt", data)
        yield from _write(directory / "buffer" / "rollout_buffer.jsonl", b'{"a": 1}\n')
        return
    yield from _write(directory / "progress.pt.k3x9_1ab.tmp", data)
    (directory / "progress.pt.k3x9_1ab.tmp").rename(directory / "progress.pt")
    yield "rename progress.pt"


def broadcast_operations(directory: Path, size: int = 4096) -> Iterator[str]:
    yield from _write(directory / "model.safetensors", safetensors_bytes({"w": size // 4}))
    yield from _write(directory / "config.json", b"{}")
    (directory / "STABLE").touch()
    yield "touch STABLE"


def prime_rl_operations(
    output_dir: Path,
    step: int,
    variant: str = "A",
    *,
    size: int = 4096,
    ranks: int = 1,
    weights: bool = False,
    checkpoint_dir: Path | None = None,
    save_id: str = "",
) -> Iterator[str]:
    """One step's save as prime-rl does it: orchestrator first, broadcast, the trainer's DCP, then (A) ``weights``."""
    own = output_dir / "run_default" if variant == "A" else output_dir
    trainer_root = checkpoint_dir or output_dir
    name = f"step_{step}"
    yield from orchestrator_operations(own / "checkpoints" / name / "orchestrator", step, variant)
    yield from broadcast_operations(own / "broadcasts" / name, size)
    yield from dcp_operations(trainer_root / "checkpoints" / name / "trainer", size, ranks, save_id)
    if weights:
        yield from _write(trainer_root / "weights" / name / "model.safetensors", safetensors_bytes())


def write_prime_rl_step(output_dir: Path, step: int, variant: str = "A", **options: Any) -> None:
    """A whole, sound save of one step."""
    finish(prime_rl_operations(output_dir, step, variant, **options))


def write_rollouts(output_dir: Path, step: int, variant: str = "A") -> None:
    """By-products of one step: never needed for a resume."""
    roots = (output_dir / "run_default", output_dir) if variant == "A" else (output_dir,)
    for root in roots:
        finish(_write(root / "rollouts" / f"step_{step}" / "rank_0.bin", b"r" * 100))


def hf_operations(output_dir: Path, step: int, *, max_steps: int = 100, shards: int = 1) -> Iterator[str]:
    """``Trainer._save_checkpoint`` on one rank: the state file comes last."""
    directory = output_dir / f"checkpoint-{step}"
    yield from _write(directory / "config.json", b"{}")
    if shards == 1:
        yield from _write(directory / "model.safetensors", safetensors_bytes())
    else:
        mapping = {}
        for number in range(1, shards + 1):
            file = f"model-{number:05}-of-{shards:05}.safetensors"
            mapping[f"w{number}"] = file
            yield from _write(directory / file, safetensors_bytes({f"w{number}": 32}))
        yield from _write(
            directory / "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": mapping}).encode()
        )
    yield from _write(directory / "optimizer.pt", torch_zip_bytes({"state": {}}, (b"o" * 512,)))
    yield from _write(directory / "scheduler.pt", torch_zip_bytes({"last_epoch": step}))
    yield from _write(directory / "rng_state.pth", torch_zip_bytes({"python": 1}))
    state = {"global_step": step, "max_steps": max_steps, "log_history": []}
    yield from _write(directory / "trainer_state.json", json.dumps(state).encode())


def write_hf_step(output_dir: Path, step: int, **options: Any) -> None:
    finish(hf_operations(output_dir, step, **options))
