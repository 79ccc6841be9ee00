"""Space to write on a full disk: reserved free pages, a preallocated WAL, and a ballast file.

podwatch matters most at the moment when the disk is full. Measured: with free pages inside the database and a WAL that
is already long enough, thousands of small writes succeed at 0 bytes free. SQLite deletes the WAL when the last
connection closes, so a ballast file of the same size takes its place between two runs: it is deleted when the first
write after opening finds no space.
"""

import os
import sqlite3
from pathlib import Path
from typing import Final

PAGE: Final = 4096
RESERVED_PAGES: Final = 512
"""2 MiB: some 5,000 events and intents. Rotation returns pages, so it lasts as long as the disk stays full."""
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


class Ballast:
    """A file of real blocks beside the database, deleted when the disk is full."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(database.name + ".ballast")

    def drop(self) -> bool:
        """Free the space. False if there was nothing to free."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True

    def restore(self) -> None:
        """Allocate it again if the disk has the space; too little space is no error."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return
        try:
            if os.fstat(descriptor).st_blocks * 512 < BALLAST_BYTES:
                os.posix_fallocate(descriptor, 0, BALLAST_BYTES)
        except OSError:
            self.drop()
        finally:
            os.close(descriptor)
