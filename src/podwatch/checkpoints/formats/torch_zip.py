"""``torch.save`` files: .pt, .pth, .bin, .ckpt.

The central directory is written at the very end, so any truncation or zero-filled tail fails to open. CRCs are never
checked here: that would read the whole file, and files saved without CRC are valid.
"""

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from podwatch.system.files import opened

_ZIP = b"PK\x03\x04"
_END = b"PK\x05\x06"
_END64 = b"PK\x06\x06"
_MOST_ENTRIES = 300_000
"""One entry per tensor; reading more would need hundreds of megabytes."""
_ENDS = 98
"""Bytes of the end records that torch writes: end record, locator and short end record."""
_LEAST = 26
"""Bytes of a header signature and an end record."""
LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f920")
"""First bytes of the pre-1.6 format: it has no trailer, so only a stable size shows that it is complete."""


def check(path: Path) -> str:
    """Empty if sound, else the problem. The caller handles OSError (vanished, permission)."""
    with opened(path) as file:
        head = file.read(len(LEGACY_MAGIC))
        size = file.seek(0, os.SEEK_END)
        if head == LEGACY_MAGIC:
            return "" if size > 64 else "truncated legacy file"
        if head[:4] != _ZIP:
            return "is empty" if size == 0 else "is not a torch file (no zip signature)"
        return _check_zip(file)


def is_legacy(path: Path) -> bool:
    """True for the old format, whose truncation cannot be seen from the file alone."""
    with opened(path) as file:
        return file.read(len(LEGACY_MAGIC)) == LEGACY_MAGIC


def _entries(file: BinaryIO) -> int:
    """The number of entries in its end records; 0 if they are not where torch puts them."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _ENDS))
    tail = file.read()
    if len(tail) == _ENDS and tail.startswith(_END64):
        return int.from_bytes(tail[32:40], "little")
    return int.from_bytes(tail[-12:-10], "little") if tail[-22:].startswith(_END) else 0


def _check_zip(file: BinaryIO) -> str:
    if _entries(file) > _MOST_ENTRIES:
        return f"claims more than {_MOST_ENTRIES} entries: not written by torch"
    try:
        with zipfile.ZipFile(file) as archive:
            entries, directory = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, zipfile.LargeZipFile, ValueError, NotImplementedError, OverflowError):
        return "truncated or damaged: no readable zip directory at its end"
    if not any(e.filename.endswith("/data.pkl") for e in entries):
        return "has no data.pkl"
    position = 0
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            return f"entry {entry.filename!r} is compressed: not written by torch"
        if entry.header_offset < position:
            return f"entry {entry.filename!r} overlaps the one before"
        position = entry.header_offset + 30 + len(entry.orig_filename) + entry.file_size
    if position > directory:
        return "its entries run into its directory"
    if os.fstat(file.fileno()).st_size < directory:
        return "truncated"
    return ""


def bad_records(fd: int, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Offsets of those ranges (offset, length), ascending, that are not complete ``torch.save`` archives. Finds
    preallocated and zero-filled ranges inside DCP shards. One read for the end of a record and the head of the next:
    there are thousands."""
    bad = []
    known, head = -1, b""
    for offset, length in spans:
        if length < _LEAST:
            bad.append(offset)
            continue
        if known != offset:
            head = os.pread(fd, 4, offset)
        known = offset + length
        end = os.pread(fd, 26, known - 22)
        if head != _ZIP or not end.startswith(_END):
            bad.append(offset)
        head = end[22:]
    return bad
