"""Opens the database: check, make the tables, reserve space; and translates SQLite errors for the operator."""

import contextlib
import errno
import os
import sqlite3
from pathlib import Path
from typing import Final

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.system.files import ReservedSpace

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
    "CREATE TABLE padding (filler BLOB NOT NULL)",
)
SCHEMA_VERSION: Final = 1
"""The ``user_version`` of a database with these tables. 0: empty, or made by a podwatch that was cut off."""


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version of an open database (0: empty)."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def refuse_newer(connection: sqlite3.Connection, where: str) -> int:
    """The database's version. Raises HostError if a newer podwatch wrote it: guessing could lose data."""
    version = version_of(connection)
    refuse(version, where)
    return version


def refuse(version: int, where: str) -> None:
    """Raises HostError for a version that this podwatch does not know."""
    if version > SCHEMA_VERSION:
        raise HostError(
            f"the state database has schema {version}, this podwatch knows {SCHEMA_VERSION}",
            where=where,
            fix="use the newer podwatch again, or move the file away to start with an empty one",
        )


def make_tables(connection: sqlite3.Connection, where: str) -> None:
    """Make all tables of an empty database, or none."""
    if refuse_newer(connection, where):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not version_of(connection):
            for statement in TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


# -- reserved space --------------------------------------------------------------------------------------------------
# Reserved free pages, a preallocated WAL and a ballast file, because podwatch matters most when the disk is full.
# Measured: with free pages inside the database and a WAL that is already long enough, thousands of small writes
# succeed at 0 bytes free. SQLite deletes the WAL when the last connection closes, so a ballast file of the same size
# takes its place between two runs: it is deleted when the first write after opening finds no space.

PAGE: Final = 4096
RESERVED_PAGES: Final = 512
"""2 MiB: some 5,000 events. Rotation returns pages, so it lasts as long as the disk stays full."""
AUTOCHECKPOINT_PAGES: Final = 128
"""Far below the preallocated length, so that the WAL is wrapped and never needs to grow."""
BALLAST_BYTES: Final = (RESERVED_PAGES + AUTOCHECKPOINT_PAGES) * PAGE + 128 * 1024


def is_full(error: sqlite3.Error) -> bool:
    """Whether SQLite failed for lack of space. Some filesystems report a quota as "disk I/O error"."""
    name = getattr(error, "sqlite_errorname", "") or ""
    return name.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHM"))


def is_corrupt(error: sqlite3.Error) -> bool:
    name = getattr(error, "sqlite_errorname", "") or ""
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT"))


def free_pages(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def reserve(connection: sqlite3.Connection) -> None:
    """Grow the database's free list and the WAL to their reserved size. Raises sqlite3.Error if there is no space.

    The transaction passes through the WAL, which keeps its length afterwards (journal_size_limit is unlimited), and
    the checkpoint moves it into the database file, whose pages then stay on the free list.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("INSERT INTO padding (filler) VALUES (zeroblob(?))", (RESERVED_PAGES * PAGE,))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
    connection.execute("DELETE FROM padding")
    connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()


def ballast_of(database: Path) -> ReservedSpace:
    """Deleted when the disk is full."""
    return ReservedSpace(database.with_name(database.name + ".ballast"), BALLAST_BYTES)


# -- opening and errors ----------------------------------------------------------------------------------------------

KEEP_CORRUPT: Final = 3
BUSY_SECONDS: Final = 5.0
OWN: Final = "make it belong to podwatch's user, or set state_dir"


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


def prepare(path: Path, *, lenient: bool = True) -> sqlite3.Connection:
    """Open, check, make the tables, reserve space. Raises sqlite3.Error (the caller separates corruption from the
    rest).

    On a full disk the ballast is released, once, before that is an error, unless ``lenient`` is false.
    """
    try:
        return _prepare(path)
    except sqlite3.Error as error:
        if not lenient or not is_full(error):
            raise
        ballast_of(path).drop()
    return _prepare(path, lenient=True)


def _prepare(path: Path, *, lenient: bool = False) -> sqlite3.Connection:
    fresh = not path.exists()
    connection = connect(path)
    try:
        if fresh:
            path.chmod(0o600)
        refuse_newer(connection, str(path))
        connection.execute(f"PRAGMA page_size = {PAGE}")
        connection.execute("PRAGMA cache_size = -256")  # KiB instead of 2 MiB: a few hundred rows are ever read twice
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {AUTOCHECKPOINT_PAGES}").fetchone()
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
    """Create tables, then reserve space. ``lenient``: an existing database continues with the space it has."""
    complete = version_of(connection) == SCHEMA_VERSION
    make_tables(connection, str(path))
    wal = path.with_name(path.name + "-wal")
    enough = complete and free_pages(connection) >= RESERVED_PAGES // 2
    if enough and wal.exists() and wal.stat().st_size >= RESERVED_PAGES * PAGE:
        return
    try:
        reserve(connection)
    except sqlite3.Error as error:
        if not (lenient and complete and is_full(error)):
            raise


def open_checked(path: Path, *, lenient: bool = True) -> tuple[sqlite3.Connection, str]:
    """The database for writing, and why a damaged one was replaced (empty if it was not).

    Raises HostError, or PermissionDenied, as ``Journal.open`` does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except PermissionError as error:
        raise PermissionDenied("cannot create the state directory", where=str(path.parent), fix=OWN) from error
    except OSError as error:
        raise HostError(f"cannot create the state directory: {error.strerror}", where=str(path.parent)) from error
    refuse(version_in_header(path), str(path))
    try:
        return prepare(path, lenient=lenient), ""
    except sqlite3.Error as error:
        if not is_corrupt(error):
            raise host_error(error, path) from error
        rebuilt = f"the state database was unreadable ({error}); it was moved to {move_aside(path).name}"
        try:
            return prepare(path, lenient=lenient), rebuilt
        except sqlite3.Error as again:
            raise host_error(again, path) from again


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


def environmental(error: BaseException | None) -> bool:
    """Whether the cause is the disk, a lock or the file itself, and not the statement."""
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, OSError)
    return (getattr(error, "sqlite_errorname", "") or "").startswith(_ENVIRONMENT)


_ENVIRONMENT: Final = (
    "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH", "SQLITE_CANTOPEN", "SQLITE_BUSY",
    "SQLITE_LOCKED", "SQLITE_PROTOCOL", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_NOLFS",
)  # fmt: skip


def obstacle_of(error: HostError | OSError | sqlite3.Error, path: Path) -> tuple[str, str, str]:
    """Problem, place and fix, for a finding."""
    found = host_error(error, path) if isinstance(error, sqlite3.Error) else error
    if isinstance(found, OSError):
        place = str(found.filename or path)
        known = {errno.ENOSPC: _SPACE, errno.EDQUOT: _SPACE, errno.EROFS: _MOUNT, errno.EACCES: OWN, errno.EPERM: OWN}
        fix = known.get(found.errno or 0, "check the disk that it is on")
        return f"the state database cannot be opened: {found.strerror or found}", place, fix
    if _read_only(path):
        return "the file system of the state database is read-only", str(path), _MOUNT
    return found.what, found.where, found.fix or "check the disk that it is on"


_SPACE: Final = "free some space on its disk"
_MOUNT: Final = "remount it writable (a disk with errors is remounted read-only: see dmesg), or set state_dir"


def _read_only(path: Path) -> bool:
    while True:
        try:
            return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
        except OSError:
            if path == path.parent:
                return False
            path = path.parent


def lock_holders(path: Path) -> list[str]:
    """Other processes that hold a lock on the database or its companions, as ``process 12 (sqlite3)``. Best effort."""
    inodes = set()
    for name in (path.name, path.name + "-shm", path.name + "-wal"):
        with contextlib.suppress(OSError):
            inodes.add(str(path.with_name(name).stat().st_ino))
    found: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) < 6 or words[5].rpartition(":")[2] not in inodes or words[4] == str(os.getpid()):
                continue
            with contextlib.suppress(OSError):
                text = f"process {words[4]} ({Path('/proc', words[4], 'comm').read_text().strip()})"
                if text not in found:
                    found.append(text)
    return found


def host_error(error: sqlite3.Error, path: Path) -> HostError:
    where = str(path)
    name = getattr(error, "sqlite_errorname", "") or ""
    if is_full(error):
        return HostError("no space left to write the state database", where=where, fix="free some space on its disk")
    if is_corrupt(error):
        return HostError(
            f"the state database is damaged: {error}",
            where=where,
            fix="restart podwatch: it moves the file aside and creates a new one; training continues",
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return PermissionDenied("the state database cannot be written", where=where, fix=OWN)
    if name.startswith("SQLITE_CANTOPEN"):
        return HostError("the state database cannot be opened", where=where, fix=OWN)
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return HostError(
            "another process has locked the state database",
            where=where,
            fix=f"end that process ({' or '.join(lock_holders(path)) or 'a sqlite3 shell or a backup tool'})",
        )
    return HostError(f"the state database failed: {error}", where=where, fix="check the disk that it is on")


_MAGIC: Final = b"SQLite format 3\0"


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
