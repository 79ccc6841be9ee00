"""Opens the database: check, migrate, reserve space; and translates SQLite errors for the operator."""

import contextlib
import errno
import os
import sqlite3
from pathlib import Path
from typing import Final

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.journal import room, schema
from podwatch.journal.salvage import version_in_header

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


def prepare(path: Path, *, lenient: bool = True) -> sqlite3.Connection:
    """Open, check, migrate, reserve space. Raises sqlite3.Error (the caller separates corruption from the rest).

    On a full disk the ballast is released, once, before that is an error, unless ``lenient`` is false.
    """
    try:
        return _prepare(path)
    except sqlite3.Error as error:
        if not lenient or not room.is_full(error):
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
    """Create tables, then reserve space. ``lenient``: an existing database continues with the space it has."""
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
    schema.refuse(version_in_header(path), str(path))
    try:
        return prepare(path, lenient=lenient), ""
    except sqlite3.Error as error:
        if not room.is_corrupt(error):
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
    if room.is_full(error):
        return HostError("no space left to write the state database", where=where, fix="free some space on its disk")
    if room.is_corrupt(error):
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
