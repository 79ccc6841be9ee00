"""The journal's tables, and the migration of an older database.

``user_version`` counts the migrations that were applied. A migration is never edited after a release: add another.
"""

import sqlite3
from typing import Final

from podwatch.domain.errors import HostError

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        """CREATE TABLE events (
            id INTEGER PRIMARY KEY AUTOINCREMENT, wall REAL NOT NULL, name TEXT NOT NULL, severity TEXT NOT NULL,
            message TEXT NOT NULL, fields TEXT NOT NULL)""",
        "CREATE INDEX events_wall ON events (wall)",
        """CREATE TABLE intents (
            id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, wall REAL NOT NULL, data TEXT NOT NULL,
            state TEXT NOT NULL, note TEXT NOT NULL DEFAULT '', settled_wall REAL)""",
        "CREATE INDEX intents_state ON intents (state, kind)",
        """CREATE TABLE incidents (
            id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, opened_wall REAL NOT NULL, summary TEXT NOT NULL,
            evidence TEXT NOT NULL DEFAULT '', bundle TEXT NOT NULL DEFAULT '', closed_wall REAL,
            resolution TEXT NOT NULL DEFAULT '', resumed_step INTEGER, lost_steps INTEGER)""",
        """CREATE TABLE objects (
            step INTEGER NOT NULL, save_id TEXT NOT NULL, path TEXT NOT NULL, document TEXT NOT NULL,
            PRIMARY KEY (step, save_id, path)) WITHOUT ROWID""",
        """CREATE TABLE published (
            step INTEGER NOT NULL, save_id TEXT NOT NULL, generation INTEGER NOT NULL, seq INTEGER NOT NULL,
            wall REAL NOT NULL, document TEXT NOT NULL, PRIMARY KEY (step, save_id)) WITHOUT ROWID""",
        "CREATE TABLE learned (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE pins (step INTEGER PRIMARY KEY, reason TEXT NOT NULL, wall REAL NOT NULL)",
        "CREATE TABLE padding (filler BLOB NOT NULL)",
    ),
    (
        """CREATE TABLE begun (
            step INTEGER NOT NULL, save_id TEXT NOT NULL, path TEXT NOT NULL, document TEXT NOT NULL,
            PRIMARY KEY (step, save_id, path)) WITHOUT ROWID""",
        """CREATE TABLE begun_parts (
            upload TEXT NOT NULL, number INTEGER NOT NULL, sha1 TEXT NOT NULL,
            PRIMARY KEY (upload, number)) WITHOUT ROWID""",
    ),
)
SCHEMA_VERSION: Final = len(MIGRATIONS)


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


def migrate(connection: sqlite3.Connection, where: str) -> None:
    """Bring the database to SCHEMA_VERSION, each migration whole or not at all."""
    version = refuse_newer(connection, where)
    for number in range(version, SCHEMA_VERSION):
        connection.execute("BEGIN IMMEDIATE")
        try:
            if version_of(connection) <= number:
                for statement in MIGRATIONS[number]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
