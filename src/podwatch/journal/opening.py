"""Opening the database: check, migrate, reserve room; and what an SQLite error means to a person."""

import sqlite3
from pathlib import Path
from typing import Final

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.journal import room, schema

KEEP_CORRUPT: Final = 3
BUSY_SECONDS: Final = 5.0
OWN: Final = "make it belong to the user podwatch runs as, or set state_dir"


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    target = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    try:
        connection = sqlite3.connect(
            target, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise host_error(error, path) from error
    try:
        connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        connection.close()
        if read_only:
            raise host_error(error, path) from error
        raise
    return connection


def prepare(path: Path) -> sqlite3.Connection:
    """Open, check, migrate, reserve room. Raises sqlite3.Error (the caller tells corruption from the rest).

    On a full disk the ballast is given up, once, before that is an error.
    """
    try:
        return _prepare(path)
    except sqlite3.Error as error:
        if not room.is_full(error):
            raise
        room.Ballast(path).drop()
    return _prepare(path, lenient=True)


def _prepare(path: Path, *, lenient: bool = False) -> sqlite3.Connection:
    fresh = not path.exists()
    connection = connect(path)
    try:
        if fresh:
            path.chmod(0o600)
        schema.refuse_newer(connection, str(path))
        connection.execute(f"PRAGMA page_size = {room.PAGE}")
        connection.execute("PRAGMA cache_size = -256")  # KiB instead of 2 MiB: a few hundred rows are ever read twice
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {room.AUTOCHECKPOINT_PAGES}").fetchone()
        answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if answer != "ok":
            corrupt = sqlite3.DatabaseError(str(answer))
            corrupt.sqlite_errorname = "SQLITE_CORRUPT"
            raise corrupt
        _furnish(connection, path, lenient=lenient)
    except BaseException:
        connection.close()
        raise
    return connection


def _furnish(connection: sqlite3.Connection, path: Path, *, lenient: bool) -> None:
    """Tables, then room. ``lenient``: an existing database goes on with whatever room it has."""
    complete = schema.version_of(connection) == schema.SCHEMA_VERSION
    schema.migrate(connection, str(path))
    wal = path.with_name(path.name + "-wal")
    enough = complete and room.free_pages(connection) >= room.RESERVED_PAGES // 2
    if enough and wal.exists() and wal.stat().st_size >= room.RESERVED_PAGES * room.PAGE:
        return
    try:
        room.reserve(connection)
    except sqlite3.Error as error:
        if not (lenient and complete and room.is_full(error)):
            raise


def move_aside(path: Path) -> Path:
    """Rename the database and its companions; keep the newest few such copies."""
    taken = [p.name.rpartition("-")[2] for p in path.parent.glob(f"{path.name}.corrupt-*")]
    number = 1 + max((int(n) for n in taken if n.isdecimal()), default=0)
    target = path.with_name(f"{path.name}.corrupt-{number}")
    path.rename(target)
    for suffix in ("-wal", "-shm"):
        companion = path.with_name(path.name + suffix)
        if companion.exists():
            companion.rename(target.with_name(target.name + suffix))
    if number > KEEP_CORRUPT:
        for suffix in ("", "-wal", "-shm"):
            path.with_name(f"{path.name}.corrupt-{number - KEEP_CORRUPT}{suffix}").unlink(missing_ok=True)
    return target


def host_error(error: sqlite3.Error, path: Path) -> HostError:
    where = str(path)
    name = getattr(error, "sqlite_errorname", "") or ""
    if room.is_full(error):
        return HostError("no space left to write the state database", where=where, fix="free some space on its disk")
    if room.is_corrupt(error):
        return HostError(
            f"the state database is damaged: {error}",
            where=where,
            fix="restart podwatch: it moves the file aside and builds a new one; training is not touched",
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return PermissionDenied("the state database cannot be written", where=where, fix=OWN)
    if name.startswith("SQLITE_CANTOPEN"):
        return HostError("the state database cannot be opened", where=where, fix=OWN)
    return HostError(f"the state database failed: {error}", where=where, fix="check the disk it lies on")
