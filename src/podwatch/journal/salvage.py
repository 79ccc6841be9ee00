"""Reads a state database from its files alone: nothing is opened for writing, locked, created or changed.

SQLite cannot do this: opening a database in WAL mode creates or recovers the shared memory file beside it, which a full
or read-only disk refuses, and ``immutable=1`` ignores the WAL, in which the newest writes are. So the committed frames
of the WAL are laid over the pages of the database in memory (https://www.sqlite.org/fileformat2.html, section 4).
"""

import errno
import os
import sqlite3
import stat
import struct
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 256 << 20
"""A journal is at most about 20 MiB; a larger file is not from podwatch."""
_MAGIC: Final = b"SQLite format 3\0"
_WAL_HEADER, _FRAME_HEADER = 32, 24


def read_database(path: Path) -> sqlite3.Connection | None:
    """The database as its last committed transaction left it, in memory. None where it does not exist or is empty.

    Blocks. Raises OSError where a file cannot be read, sqlite3.Error where it is damaged.
    """
    path = path.resolve()  # the WAL is beside the file that a link names
    main = _read(path)
    if not main:
        return None
    if main[:16] != _MAGIC or len(main) < 100:
        raise _damaged("the file is not an SQLite database")
    image = overlay(main, _read(path.with_name(path.name + "-wal")) or b"")
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        connection.deserialize(image)
        answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if answer != "ok":
            raise _damaged(str(answer))
    except BaseException:
        connection.close()
        raise
    return connection


def version_in_header(path: Path) -> int:
    """The schema version in the file's own header, without opening the database: opening would write to a database of a
    newer podwatch. 0 where there is none, or it cannot be read: opening it reports why."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        header = os.read(descriptor, 100)
    except OSError:
        return 0
    finally:
        os.close(descriptor)
    return int.from_bytes(header[60:64], "big") if header[:16] == _MAGIC and len(header) == 100 else 0


def overlay(main: bytes, wal: bytes) -> bytes:
    """The pages of ``main`` with the committed frames of ``wal`` over them, marked as not being in WAL mode."""
    image = bytearray(main)
    pages, size = committed(wal)
    page = len(next(iter(pages.values()))) if pages else 0
    if size:
        image = image.ljust(size * page, b"\0")[: size * page]
    for number, data in pages.items():
        if number <= size:
            image[(number - 1) * page : number * page] = data
    image[18:20] = b"\1\1"
    return bytes(image)


def committed(wal: bytes) -> tuple[dict[int, bytes], int]:
    """Page number -> content of every frame up to the last commit, and the database's size in pages after it."""
    if len(wal) < _WAL_HEADER:
        return {}, 0
    magic, _, page, _, salt1, salt2, check1, check2 = struct.unpack(">8I", wal[:_WAL_HEADER])
    if magic & ~1 != 0x377F0682 or not 512 <= page <= 65536:
        return {}, 0
    order = ">" if magic & 1 else "<"
    sums = _checksum(order, wal[:24], (0, 0))
    if sums != (check1, check2):
        return {}, 0
    found: dict[int, bytes] = {}
    pending: dict[int, bytes] = {}
    size = 0
    for at in range(_WAL_HEADER, len(wal) - _FRAME_HEADER - page + 1, _FRAME_HEADER + page):
        number, commit, one, two, check1, check2 = struct.unpack(">6I", wal[at : at + _FRAME_HEADER])
        if (one, two) != (salt1, salt2) or number == 0:
            break
        data = wal[at + _FRAME_HEADER : at + _FRAME_HEADER + page]
        sums = _checksum(order, data, _checksum(order, wal[at : at + 8], sums))
        if sums != (check1, check2):
            break
        pending[number] = data
        if commit:
            found.update(pending)
            pending.clear()
            size = commit
    return found, size


def _checksum(order: str, data: bytes, start: tuple[int, int]) -> tuple[int, int]:
    one, two = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for n in range(0, len(words), 2):
        one = (one + words[n] + two) & 0xFFFFFFFF
        two = (two + words[n + 1] + one) & 0xFFFFFFFF
    return one, two


def _read(path: Path) -> bytes | None:
    """None where it does not exist. Never blocks on a FIFO, never reads without a limit."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        chunks = []
        while chunk := os.read(descriptor, 1 << 20):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(descriptor)


def _damaged(why: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(why)
    error.sqlite_errorname = "SQLITE_CORRUPT"
    return error
