"""Opens the database: checks it and makes its tables; and translates SQLite's errors for the operator."""

import os
import sqlite3
from pathlib import Path
from typing import Final

from podwatch.domain.errors import HostError, PermissionDenied

# -- tables ------------------------------------------------------------------------------------------------------------

TABLES: Final = (
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT, wall REAL NOT NULL, name TEXT NOT NULL, severity TEXT NOT NULL,
        message TEXT NOT NULL, fields TEXT NOT NULL)""",
    "CREATE INDEX events_wall ON events (wall)",
    """CREATE TABLE incidents (
        id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, opened_wall REAL NOT NULL, summary TEXT NOT NULL,
        evidence TEXT NOT NULL DEFAULT '', bundle TEXT NOT NULL DEFAULT '', closed_wall REAL,
        resolution TEXT NOT NULL DEFAULT '', resumed_step INTEGER, lost_steps INTEGER)""",
    "CREATE TABLE learned (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
SCHEMA_VERSION: Final = 1
"""The ``user_version`` of a database with these tables. 0: empty, or made by a podwatch that was cut off."""


def known_version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version of an open database; 0: empty. Raises HostError if a newer podwatch wrote it: guessing could
    lose data."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise HostError(
            f"the state database has schema {version}, this podwatch knows {SCHEMA_VERSION}",
            where=str(path),
            fix="use the newer podwatch again, or move the file away to start with an empty one",
        )
    return version


def make_tables(connection: sqlite3.Connection) -> None:
    """Make all tables of an empty database, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in (*TABLES, f"PRAGMA user_version = {SCHEMA_VERSION}", "COMMIT"):
            connection.execute(statement)
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


# -- opening ---------------------------------------------------------------------------------------------------------

KEEP_CORRUPT: Final = 3
BUSY_SECONDS: Final = 5.0


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """The database as it is. Raises HostError where it cannot be opened or is a newer podwatch's, sqlite3.Error where
    it cannot be read."""
    target = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    try:
        connection = sqlite3.connect(
            target, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise host_error(error, path) from error
    try:
        known_version(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def open_checked(path: Path) -> tuple[sqlite3.Connection, str]:
    """The database for writing, and why a damaged one was replaced (empty if it was not). Raises HostError, or
    PermissionDenied."""
    rebuilt = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            return _prepare(path), rebuilt
        except sqlite3.Error as error:
            if not is_corrupt(error):
                raise
            rebuilt = f"the state database was unreadable ({error}); it was moved to {move_aside(path).name}"
        return _prepare(path), rebuilt
    except sqlite3.Error as error:
        raise host_error(error, path) from error
    except PermissionError as error:
        where = str(error.filename or path)
        raise PermissionDenied("cannot create the state directory or its database", where=where, fix=_OWN) from error
    except OSError as error:
        where = str(error.filename or path)
        raise HostError(
            f"cannot create the state directory or its database: {error.strerror}", where=where, fix=_DISK
        ) from error


def _prepare(path: Path) -> sqlite3.Connection:
    fresh = not path.exists()
    connection = connect(path)
    try:
        if fresh:
            path.chmod(0o600)
        connection.execute("PRAGMA cache_size = -256")  # KiB instead of 2 MiB: a few hundred rows are ever read twice
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA synchronous = FULL")
        answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if answer != "ok":
            corrupt = sqlite3.DatabaseError(str(answer))
            corrupt.sqlite_errorname = "SQLITE_CORRUPT"
            raise corrupt
        if not known_version(connection, path):
            make_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def copy_in_memory(source: sqlite3.Connection | None, first_id: int) -> tuple[sqlite3.Connection, bool]:
    """A database in memory with all of ``source``, and True; an empty one, and False, where that cannot be read.

    The ids of an empty one begin at ``first_id``, the epoch second: above every id that the real one has given, so that
    whoever reads on from an id misses nothing and repeats nothing when the rows move there."""
    connection = _memory()
    if source is not None:
        try:
            source.backup(connection)
            known_version(connection, Path(":memory:"))
        except (sqlite3.Error, HostError):
            connection.close()
            connection = _memory()
        else:
            return connection, True
    make_tables(connection)
    for table in ("events", "incidents"):
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, first_id))
    return connection, False


def _memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


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


# -- errors ------------------------------------------------------------------------------------------------------------

_DISK: Final = "check the disk that it is on"
_OWN: Final = "make it belong to podwatch's user, or set state_dir"
_MOUNT: Final = "remount it writable (a disk with errors is remounted read-only: see dmesg), or set state_dir"
_CORRUPT: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT")
_DENIED: Final = ("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")
_KNOWN: Final = (
    # some file systems report a quota as "disk I/O error"
    (("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHM"), "no space left to write the state database",
     "free some space on its disk"),
    (_CORRUPT, "the state database is damaged",
     "restart podwatch: it moves the file aside and creates a new one; training continues"),
    (_DENIED, "the state database cannot be written", _OWN),
    (("SQLITE_CANTOPEN",), "the state database cannot be opened", _OWN),
    (("SQLITE_BUSY", "SQLITE_LOCKED"), "another process has locked the state database",
     "end that process (a sqlite3 shell or a backup tool)"),
    (("SQLITE_IOERR", "SQLITE_PROTOCOL", "SQLITE_NOLFS"), "the state database failed", _DISK),
)  # fmt: skip


def _name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "") or ""


def is_corrupt(error: sqlite3.Error) -> bool:
    return _name(error).startswith(_CORRUPT)


def is_environmental(error: sqlite3.Error) -> bool:
    """Whether the cause is the disk, a lock or the file itself, and not the statement."""
    return any(_name(error).startswith(names) for names, _, _ in _KNOWN)


def host_error(error: sqlite3.Error, path: Path) -> HostError:
    """What is wrong with the database and what the operator does, in words."""
    if _name(error).startswith((*_DENIED, "SQLITE_CANTOPEN")) and _is_read_only(path):
        return HostError("the file system of the state database is read-only", where=str(path), fix=_MOUNT)
    for names, what, fix in _KNOWN:
        if _name(error).startswith(names):
            kind = PermissionDenied if names is _DENIED else HostError
            return kind(what, where=str(path), fix=fix)
    return HostError(f"the state database failed: {error}", where=str(path), fix=_DISK)


def _is_read_only(path: Path) -> bool:
    """Whether the file system of the nearest directory that exists is mounted read-only."""
    for place in (path, *path.parents):
        try:
            return bool(os.statvfs(place).f_flag & os.ST_RDONLY)
        except OSError:
            continue
    return False
