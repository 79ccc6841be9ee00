"""Writes checkpoint files as torch does, without torch: standard library only, because the simulated trainer must start
quickly.

The tensor data is arbitrary; everything else (archive, index, offsets, save id, order of writing) is as in real files,
so that structural checks give the same results.
"""

import io
import json
import os
import pickle
import random
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20


def tensor_bytes(seed: int, size: int) -> bytes:
    """``size`` bytes that differ by seed: one random block, repeated."""
    block = random.Random(seed).randbytes(min(_BLOCK, max(1, size)))
    return (block * (size // len(block) + 1))[:size]


def write_torch_zip(path: Path, values: Mapping[str, Any], *, atomic: bool = True) -> None:
    """Write a ``torch.save`` file with plain values (``progress.pt``). ``atomic``: temporary name, then rename."""
    target = path.with_name(f"{path.name}.tmp") if atomic else path
    with target.open("wb") as file:
        file.write(_archive(_dumps(dict(values)), None))
        file.flush()
        os.fsync(file.fileno())
    if atomic:
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
