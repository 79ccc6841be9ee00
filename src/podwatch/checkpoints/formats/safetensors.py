"""safetensors: the header must describe exactly the bytes that are there."""

import errno
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.system.files import opened, read_file

MAX_HEADER = 100_000_000
"""Bytes; the limit of the format's own reader."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Header:
    """``problem`` is empty when the file is sound; then ``names`` are its tensors."""

    problem: str = ""
    names: frozenset[str] = frozenset()


def read_header(path: Path) -> Header:
    """Check one file by its header. The caller handles OSError (vanished, permission)."""
    with opened(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        lead = file.read(8)
        if len(lead) < 8:
            return Header(f"truncated: {size} bytes is too short for a header")
        length = int.from_bytes(lead, "little")
        if length > MAX_HEADER or 8 + length > size:
            return Header(f"header of {length} bytes does not fit into {size} bytes (truncated or not safetensors)")
        raw = file.read(length)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return Header("header is not valid JSON")
    if not isinstance(document, dict):
        return Header("header is not a JSON object")
    document.pop("__metadata__", None)
    try:
        end = _check_tensors(document)
    except (KeyError, TypeError, ValueError) as error:
        return Header(f"header is inconsistent: {error}")
    if 8 + length + end != size:
        return Header(f"has {size} bytes, its header describes {8 + length + end}")
    return Header(names=frozenset(document))


def _check_tensors(document: dict[str, Any]) -> int:
    """Total bytes of all tensors. ValueError when spans overlap, leave gaps or contradict shape and dtype."""
    spans: list[tuple[int, int, str]] = []
    for name, tensor in document.items():
        start, end = tensor["data_offsets"]
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
            raise ValueError(f"bad offsets of {name!r}")
        count = 1
        for side in tensor["shape"]:
            if not isinstance(side, int) or side < 0:
                raise ValueError(f"bad shape of {name!r}")
            count *= side
        bits = _BITS.get(tensor["dtype"])
        if bits is not None and count * bits != 8 * (end - start):
            raise ValueError(f"{name!r} has {end - start} bytes for its shape and type")
        spans.append((start, end, name))
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            raise ValueError(f"gap or overlap before {name!r}")
        position = end
    return position


@dataclass(frozen=True, slots=True)
class Index:
    """``model.safetensors.index.json`` or ``pytorch_model.bin.index.json``: tensor name -> shard."""

    problem: str = ""
    shards: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


def read_index(path: Path) -> Index:
    """The shards that an index file lists; unsafe shard names are refused. The caller handles OSError."""
    try:
        raw = read_file(path, MAX_HEADER)
    except OSError as error:
        if error.errno == errno.EFBIG:
            return Index("is too large for an index")
        raise
    try:
        mapping = json.loads(raw)["weight_map"]
        shards, names = frozenset(mapping.values()), frozenset(mapping)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Index("is not a readable index")
    if not shards or not all(isinstance(s, str) and s and "/" not in s and s != ".." for s in shards):
        return Index("lists no shards, or unsafe names")
    return Index("", shards, names)
