"""Read the few values podwatch needs from a pickle without importing or running anything the pickle names.

Two lives: imported as a module by its tests, and run as a script by ``isolated.py``:
``python -I -S unpickler.py``, one request
``(dcp|records|values) FILE`` per line of its input. A damaged pickle can ask for giant allocations
(facts/checkpoints.md section 2.3), so the script limits its own memory and CPU time and answers with one line of JSON,
never a traceback.
Standard library only, and no import of podwatch: in the child there is none.
"""

import gc
import io
import json
import os
import pickle
import resource
import sys
import zipfile
from typing import Any

MAX_PICKLE_BYTES = 64 * 1024 * 1024
"""134,400 records are 19 MB; anything beyond 64 MB is not a checkpoint index."""
MAX_MEMORY_BYTES = 1536 * 1024 * 1024
"""Fourteen times the pickle's size was measured (260 MB for 19 MB); this leaves half as much again."""
MAX_CPU_SECONDS = 30
MAX_VALUES = 200


class Plain:
    """Stands for the hot classes of a DCP index: no ``__setstate__``, so that the state update runs at C speed."""


class Inert:
    """Stands for every other class or function: takes anything, does nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def __new__(cls, *_args: object, **_kwargs: object) -> "Inert":
        return object.__new__(cls)

    def __call__(self, *_args: object, **_kwargs: object) -> "Inert":
        return self

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update({k: v for k, v in state.items() if isinstance(k, str)})

    def __setitem__(self, _key: object, _value: object) -> None:
        pass

    def append(self, _value: object) -> None:
        pass

    def extend(self, _values: object) -> None:
        pass

    def add(self, _value: object) -> None:
        pass


def _tuple(*values: Any) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _integer(*values: Any) -> Any:
    return values[0] if values else 0


_HOT = frozenset(
    {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "StorageMeta",
        "BytesStorageMetadata",
        "_StorageInfo",
    }
)


class StubUnpickler(pickle.Unpickler):
    """``find_class`` imports nothing, whatever the pickle names (facts/checkpoints.md section 2.3)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return _tuple
        if name == "_MEM_FORMAT_ENCODING":
            return _integer
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if name in _HOT and module.startswith("torch.distributed.checkpoint"):
            return Plain
        return Inert

    def persistent_load(self, _pid: Any) -> Any:
        return None


def load(data: bytes) -> Any:
    """The object tree of ``data`` made of plain values and stubs. Raises whatever the damage provokes."""
    was_on = gc.isenabled()
    gc.disable()  # ten times faster: the index is millions of small objects and none of them is garbage
    try:
        return StubUnpickler(io.BytesIO(data)).load()
    finally:
        if was_on:
            gc.enable()


def dcp_index(data: bytes, *, with_records: bool = False) -> dict[str, Any]:
    """``{"need": {file: bytes}, "save_id": str, "plain": bool, "keys": [...]}``, on request with ``"records"``.

    ``need`` is max(offset + length) per file, ``records`` are ``{file: [[offset, length], ...]}``, ``keys`` the
    top-level names of what was saved, ``plain`` says that records are stored as torch wrote them. Raises ValueError
    for a pickle that is not a DCP index.
    """
    root = load(data)
    storage = getattr(root, "storage_data", None)
    if not isinstance(storage, dict):
        raise ValueError("no storage_data: not a DCP index")
    records: dict[str, list[list[int]]] = {}
    plain = True
    for info in storage.values():
        path, offset, length = (getattr(info, n, None) for n in ("relative_path", "offset", "length"))
        if not isinstance(path, str) or not _natural(offset) or not _natural(length):
            raise ValueError("storage_data has an entry without file, offset or length")
        plain = plain and not getattr(info, "transform_descriptors", None)
        records.setdefault(path, []).append([offset, length])  # type: ignore[list-item]
    meta = getattr(root, "storage_meta", None)
    save_id = getattr(meta, "save_id", None)
    state = getattr(root, "state_dict_metadata", None)
    keys = sorted({str(k).split(".", 1)[0] for k in state}) if isinstance(state, dict) else []
    answer: dict[str, Any] = {
        "need": {path: max(o + n for o, n in spans) for path, spans in records.items()},
        "save_id": save_id if isinstance(save_id, str) else "",
        "plain": plain,
        "keys": keys[:50],
    }
    if with_records:
        answer["records"] = records
    return answer


def zip_values(path: str) -> dict[str, Any]:
    """Numbers, texts and booleans in a torch zip's ``data.pkl``, as ``{"a.b": value}``; tensors are left out."""
    with zipfile.ZipFile(path) as archive:
        entry = next((i for i in archive.infolist() if i.filename.endswith("/data.pkl")), None)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size > MAX_PICKLE_BYTES:
            raise ValueError("no readable data.pkl")
        with open(path, "rb") as file:  # noqa: PTH123 - read by offset: files written without CRC fail ZipFile.read
            file.seek(entry.header_offset)
            header = file.read(30)
            file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), os.SEEK_CUR)
            root = load(file.read(entry.file_size))
    found: dict[str, Any] = {}
    _collect(root, "", found, 0)
    return found


def _collect(node: Any, name: str, found: dict[str, Any], depth: int) -> None:
    if isinstance(node, bool | int | float | str):
        if len(found) < MAX_VALUES and not (isinstance(node, str) and len(node) > 200):
            found[name] = node
        return
    children = node if isinstance(node, dict) else getattr(node, "__dict__", None)
    if isinstance(children, dict) and depth < 4:
        for key, value in children.items():
            if isinstance(key, str | int):
                _collect(value, f"{name}.{key}" if name else str(key), found, depth + 1)


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def answer(mode: str, path: str) -> dict[str, Any]:
    """Describe one file. Nothing is raised."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs 5 ms of start-up here
            status = os.fstat(file.fileno())
            if mode != "values" and status.st_size > MAX_PICKLE_BYTES:
                raise ValueError(f"{status.st_size} bytes is too large for a checkpoint index")
            found = zip_values(path) if mode == "values" else dcp_index(file.read(), with_records=mode == "records")
        stamp = [status.st_ino, status.st_size, status.st_mtime_ns]
    except FileNotFoundError:
        return {"ok": False, "gone": True, "error": "vanished"}
    except OSError as error:
        return {"ok": False, "unreadable": True, "error": os.strerror(error.errno) if error.errno else "read error"}
    except MemoryError:
        return {"ok": False, "error": "asks for more memory than a checkpoint index can need"}
    except RecursionError:
        return {"ok": False, "error": "nested too deeply"}
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:200]}
    return {"ok": True, "stamp": stamp, "answer": found}


def main() -> None:
    """Limit this process, then answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        mode, path = json.loads(line)
        sys.stdout.write(json.dumps(answer(mode, path)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
