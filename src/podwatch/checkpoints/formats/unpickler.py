"""Read the few values podwatch needs from a pickle without importing or running anything the pickle names.

A damaged pickle can ask for giant allocations: only a child that limits its memory and its CPU time may call this.
"""

from __future__ import annotations

import gc
import io
import os
import zipfile
from _pickle import Unpickler
from typing import Any

MAX_PICKLE_BYTES = 64 * 1024 * 1024
"""134,400 records are 19 MB; a file of more than 64 MB is not a checkpoint index."""
MAX_VALUES = 200


class Plain:
    """Replaces the most frequent classes of a DCP index: no ``__setstate__``, so that the state update runs at C
    speed."""


class Dropped:
    """Replaces the tensor descriptions of a DCP index, which are most of it: a C function drops the state before it
    becomes an object."""

    __slots__ = ()
    __setstate__ = id


class Inert:
    """Replaces every other class or function: accepts any call, does nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def __new__(cls, *_args: object, **_kwargs: object) -> Inert:
        return object.__new__(cls)

    def __call__(self, *_args: object, **_kwargs: object) -> Inert:
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


class Ordered(dict):  # type: ignore[type-arg]
    """Replaces OrderedDict. Unlike a plain dict it can have the attributes that torch sets on one: every
    ``module.state_dict()`` has ``_metadata``."""


def _tuple(*values: Any) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _integer(*values: Any) -> Any:
    return values[0] if values else 0


_HOT = frozenset({"Metadata", "StorageMeta", "_StorageInfo"})
_DROPPED = frozenset(
    {
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
    }
)


class StubUnpickler(Unpickler):
    """``find_class`` imports nothing, whatever the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return _tuple
        if name == "_MEM_FORMAT_ENCODING":
            return _integer
        if (module, name) == ("collections", "OrderedDict"):
            return Ordered
        if module.startswith("torch.distributed.checkpoint"):
            if name in _HOT:
                return Plain
            if name in _DROPPED:
                return Dropped
        return Inert

    def persistent_load(self, _pid: Any) -> Any:
        return None


def load(data: bytes) -> Any:
    """The object tree of ``data``, made of plain values and stubs. Damaged data can raise any exception."""
    was_on = gc.isenabled()
    gc.disable()  # ten times faster: the index is millions of small objects and none of them is garbage
    try:
        return StubUnpickler(io.BytesIO(data)).load()
    finally:
        if was_on:
            gc.enable()


def dcp_index(data: bytes) -> dict[str, Any]:
    """``{"need": {file: bytes}, "save_id": str, "plain": bool, "keys": [...], "records": {...}}``.

    ``need`` is max(offset + length) per file, ``records`` are ``{file: [offset, length, offset, length, ...]}``,
    ``keys`` the top-level names of what was saved, ``plain`` says that records are stored as torch wrote them. Raises
    ValueError for a pickle that is not a DCP index.
    """
    root = load(data)
    storage = getattr(root, "storage_data", None)
    if not isinstance(storage, dict):
        raise ValueError("no storage_data: not a DCP index")
    need: dict[str, int] = {}
    records: dict[str, list[int]] = {}
    plain = True
    for info in storage.values():
        fields: dict[str, Any] = getattr(info, "__dict__", _NOTHING)
        path: Any = fields.get("relative_path")
        offset: Any = fields.get("offset")
        length: Any = fields.get("length")
        if type(path) is not str or not _natural(offset) or not _natural(length):
            raise ValueError("storage_data has an entry without file, offset or length")
        if fields.get("transform_descriptors"):
            plain = False
        end = offset + length
        if path not in need:
            need[path], records[path] = end, []
        elif end > need[path]:
            need[path] = end
        records[path] += offset, length
    meta = getattr(root, "storage_meta", None)
    save_id = getattr(meta, "save_id", None)
    state = getattr(root, "state_dict_metadata", None)
    keys = sorted({str(k).split(".", 1)[0] for k in state}) if isinstance(state, dict) else []
    return {
        "need": need,
        "save_id": save_id if isinstance(save_id, str) else "",
        "plain": plain,
        "keys": keys[:50],
        "records": records,
    }


def zip_values(file: io.BufferedReader) -> dict[str, Any]:
    """Numbers, texts and booleans in a torch zip's ``data.pkl``, as ``{"a.b": value}``; tensors are left out. Also the
    length of lists and dicts at the top, as ``{"a#": 2}``, to show whether they are empty."""
    with zipfile.ZipFile(file) as archive:
        entry = next((i for i in archive.infolist() if i.filename.endswith("/data.pkl")), None)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size > MAX_PICKLE_BYTES:
            raise ValueError("no readable data.pkl")
        file.seek(entry.header_offset)  # read by offset: files written without CRC fail ZipFile.read
        header = file.read(30)
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), os.SEEK_CUR)
        root = load(file.read(entry.file_size))
    return _collected(root)


def _collected(root: Any) -> dict[str, Any]:
    """Collect level by level, so that values at the top are found however deep the tree is."""
    found: dict[str, Any] = {}
    level: list[tuple[str, Any]] = [("", root)]
    for depth in range(5):
        below: list[tuple[str, Any]] = []
        for name, node in level:
            if isinstance(node, bool | int | float | str):
                if len(found) < MAX_VALUES and not (isinstance(node, str) and len(node) > 200):
                    found[name] = node
                continue
            if depth == 1 and isinstance(node, list | tuple | dict) and len(found) < MAX_VALUES:
                found[f"{name}#"] = len(node)
            children = node if isinstance(node, dict) else getattr(node, "__dict__", None)
            if isinstance(children, dict):
                below.extend(
                    (f"{name}.{key}" if name else str(key), value)
                    for key, value in children.items()
                    if isinstance(key, str | int)
                )
        level = below
    return found


def _natural(value: Any) -> bool:
    return type(value) is int and value >= 0


_NOTHING: dict[str, Any] = {}
