"""The journal in memory: replaces a state database that cannot be used, until it can be used again.

It starts with everything that could still be read of the database (``known``), notes each row that changes since, and
writes those rows into the database when that can be written again: in order, in one transaction, once.

**The changes are kept in a file beside the database** (``<database>.standby``) wherever that can be written, so that
they survive a SIGKILL: the next podwatch starts with them, or writes them into the database. An intent is in that file
before its action happens, else the action is refused (promise 10). A token in the database shows which file was written
into it already, so a crash between the two neither loses an incident nor repeats an intent.
"""

import contextlib
import json
import secrets
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from podwatch.journal import open_database
from podwatch.system.files import atomic_write, fsync_dir, read_small

UNKNOWN_IDS: Final = 1_000_000_000
"""First id while those in the database are not known: above every id that it can hold. Rows get ordinary ids when they
are written into the database."""
EVENTS_KEPT: Final = 1_000
"""Events of the database that are read into memory, for display."""
CHANGED_EVENTS_KEPT: Final = 500
"""New events that are kept in the file: an incident must survive a SIGKILL, a long list of events need not."""
FILE_BYTES: Final = 32 << 20
SCHEMA: Final = 1
TOKENS: Final = "journal.returned"
"""Journal key: tokens of the last files that were written into this database."""
TOKENS_KEPT: Final = 16
IDENTITY: Final = "writer_id"
"""Journal key that identifies a database: random, made once for each run on a pod."""

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "events": ("id",),
    "intents": ("id",),
    "incidents": ("id",),
    "objects": ("step", "save_id", "path"),
    "published": ("step", "save_id"),
    "learned": ("key",),
    "pins": ("step",),
    "begun": ("step", "save_id", "path"),
    "begun_parts": ("upload", "number"),
}
"""Every table that is kept, in write order, with its primary key."""
NUMBERED: Final = ("events", "intents", "incidents")
"""Tables whose ids SQLite assigns."""

_TRIGGER: Final = (
    "CREATE TRIGGER {table}_{act} AFTER {act} ON {table} BEGIN"
    " INSERT OR IGNORE INTO changed (name, key) VALUES ('{table}', json_array({key})); END"
)

Row = dict[str, Any]
Merge = Callable[[str, Any, Any], Any]
"""(key, value in the database, value in memory) -> value to keep, for ``learned`` where the database was not known."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why the database cannot be used, and the fix. ``known``: its content could be read."""

    what: str
    where: str
    fix: str
    known: bool

    @property
    def text(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


@dataclass(frozen=True, slots=True)
class Change:
    """A row that was written (None: deleted) in memory."""

    table: str
    key: tuple[Any, ...]
    row: Row | None


@dataclass(frozen=True, slots=True)
class Kept:
    """Changes that are not in the database yet; ``before`` and ``identity`` as in ``Standby``."""

    changes: list[Change]
    token: str
    before: dict[str, int]
    identity: str | None


@dataclass(slots=True)
class Standby:
    """The database in memory. ``before`` are the highest ids of the real one, ``identity`` its id (None: not known).
    ``known``: this one has all the real one's content."""

    connection: sqlite3.Connection
    known: bool
    before: dict[str, int]
    identity: str | None
    token: str

    def changes(self, events: int | None = None) -> list[Change]:
        """Every row that differs from the initial content (of ``events`` only the newest), tables in order, ids
        ascending."""
        found = []
        for table, columns in KEYS.items():
            keys = self.connection.execute("SELECT key FROM changed WHERE name = ? ORDER BY number", (table,))
            rows = [tuple(json.loads(row[0])) for row in keys.fetchall()]
            if table in NUMBERED:
                rows.sort()
            if table == "events" and events is not None:
                rows = rows[-events:]
            where = " AND ".join(f"{column} = ?" for column in columns)
            for key in rows:
                found.append(Change(table, key, _one(self.connection, table, where, key)))
        return found


def begin(source: sqlite3.Connection | None, kept: Kept | None, merge: Merge, *, known: bool) -> Standby:
    """An in-memory database with the rows of ``source`` and then the changes that an earlier podwatch ``kept``.

    ``known``: ``source`` has all of the database's content (None: it is empty). Raises sqlite3.Error when ``source``
    cannot be read, or lacks a column that this podwatch needs.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA cache_size = -256")
        open_database.make_tables(connection, ":memory:")
        if source is not None:
            copy_rows(source, connection, events=EVENTS_KEPT)
        if kept is not None and kept.token in _tokens(connection):
            kept = None  # written into the database just before the crash that left the file
        before = {table: _sequence(connection, table) for table in NUMBERED}
        identity = identity_of(connection) if known else None
        _note_changes(connection)
        if not known:
            before, identity = (kept.before, kept.identity) if kept is not None else (before, None)
            for table in NUMBERED:
                _set_sequence(connection, table, UNKNOWN_IDS)
        if kept is not None:
            _take_up(connection, kept, merge, known=known, same=known and kept.identity == identity)
    except BaseException:
        connection.close()
        raise
    token = kept.token if kept is not None else secrets.token_hex(8)
    return Standby(connection, known, before, identity, token)


def _take_up(connection: sqlite3.Connection, kept: Kept, merge: Merge, *, known: bool, same: bool) -> None:
    for change in kept.changes:
        strange = change.table in NUMBERED and known and (not same or int(change.key[0]) > UNKNOWN_IDS)
        if strange and change.row is not None:
            _insert(connection, change.table, {**change.row, "id": None})
        elif change.table == "learned" and known and not same:
            _merge_learned(connection, change, merge)
        elif not strange:
            write_row(connection, change)


def copy_rows(source: sqlite3.Connection, target: sqlite3.Connection, *, events: int | None = None) -> None:
    """Every row that this podwatch understands (of ``events`` only the newest), and the ids that come next."""
    if not open_database.version_of(source):
        return  # its tables were never made
    for table in KEYS:
        names = ", ".join(columns_of(target, table))
        newest = f"ORDER BY id DESC LIMIT {events}" if table == "events" and events is not None else ""
        rows = source.execute(f"SELECT {names} FROM {table} {newest}").fetchall()  # noqa: S608 - names of our schema
        marks = ", ".join("?" for _ in columns_of(target, table))
        target.executemany(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", rows)  # noqa: S608
        if table in NUMBERED:
            _set_sequence(target, table, _sequence(source, table))


def write_into(standby: Standby, target: sqlite3.Connection, merge: Merge) -> dict[str, dict[int, int]]:
    """Write all changes, inside the caller's transaction. Returns the ids that changed, by table.

    A database without any row gets everything that is known. One that is not the database read at the start, or that
    could not be read then, keeps its content: rows get new ids, and ``merge`` decides about learned values.
    """
    if _empty(target) and standby.known:
        copy_rows(standby.connection, target)
        _note_token(target, standby.token)
        return {}
    kept = Kept(standby.changes(), standby.token, standby.before, standby.identity)
    return write_kept(kept, target, merge)


def write_kept(kept: Kept, target: sqlite3.Connection, merge: Merge) -> dict[str, dict[int, int]]:
    """The same for changes from a file. Does nothing where its token shows that they are in the database already."""
    if kept.token in _tokens(target):
        return {}
    same = kept.identity is not None and kept.identity == identity_of(target)
    renamed: dict[str, dict[int, int]] = {table: {} for table in NUMBERED}
    taken = {table: _sequence(target, table) for table in NUMBERED}
    for change in kept.changes:
        table = change.table
        if table in NUMBERED:
            number = int(change.key[0])
            real = same and number <= UNKNOWN_IDS
            if real and number <= kept.before[table]:
                if change.row is not None and table != "events":
                    write_row(target, change)
            elif change.row is not None:
                now = _insert(target, table, {**change.row, "id": number if real and number > taken[table] else None})
                if now != number:
                    renamed[table][number] = now
        elif table == "learned" and not same:
            _merge_learned(target, change, merge)
        else:
            write_row(target, change)
    _note_token(target, kept.token)
    return renamed


def write_row(target: sqlite3.Connection, change: Change) -> None:
    """Put the row in its place, or remove it."""
    if change.row is not None:
        _insert(target, change.table, change.row)
        return
    where = " AND ".join(f"{column} = ?" for column in KEYS[change.table])
    target.execute(f"DELETE FROM {change.table} WHERE {where}", change.key)  # noqa: S608 - names of our schema


def identity_of(connection: sqlite3.Connection) -> str:
    row = connection.execute("SELECT value FROM learned WHERE key = ?", (IDENTITY,)).fetchone()
    return "" if row is None else str(row[0])


def columns_of(connection: sqlite3.Connection, table: str) -> list[str]:
    return [str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")]


class StandbyFile:
    """The changes beside the database. Methods block and raise OSError."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(database.name + ".standby")

    def load(self) -> Kept | None:
        """None where there is none, or it cannot be parsed (then it is moved aside for the operator)."""
        try:
            raw = read_small(self.path, FILE_BYTES)
        except FileNotFoundError:
            return None
        try:
            document = json.loads(raw)
            changes = [Change(str(t), tuple(key), row) for t, key, row in document["changes"] if t in KEYS]
            before = {table: int(document["before"][table]) for table in NUMBERED}
            identity = document["identity"]
            return Kept(changes, str(document["token"]), before, None if identity is None else str(identity))
        except (ValueError, KeyError, TypeError):
            with contextlib.suppress(OSError):
                self.path.rename(self.path.with_name(self.path.name + ".corrupt"))
            return None

    def save(self, standby: Standby) -> None:
        """Durable when it returns."""
        document = {
            "schema_version": SCHEMA,
            "token": standby.token,
            "before": standby.before,
            "identity": standby.identity,
            "changes": [[c.table, c.key, c.row] for c in standby.changes(CHANGED_EVENTS_KEPT)],
        }
        atomic_write(self.path, json.dumps(document, separators=(",", ":")))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        fsync_dir(self.path.parent)


def _insert(target: sqlite3.Connection, table: str, row: Row) -> int:
    names = [name for name in columns_of(target, table) if name in row]
    marks = ", ".join("?" for _ in names)
    done = target.execute(
        f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})",  # noqa: S608 - names of our schema
        [row[name] for name in names],
    )
    return int(done.lastrowid or 0)


def _one(connection: sqlite3.Connection, table: str, where: str, key: tuple[Any, ...]) -> Row | None:
    names = columns_of(connection, table)
    found = connection.execute(f"SELECT {', '.join(names)} FROM {table} WHERE {where}", key).fetchone()  # noqa: S608
    return None if found is None else dict(zip(names, found, strict=True))


def _note_changes(connection: sqlite3.Connection) -> None:
    connection.execute(
        "CREATE TABLE changed (number INTEGER PRIMARY KEY, name TEXT NOT NULL, key TEXT NOT NULL, UNIQUE (name, key))"
    )
    for table, columns in KEYS.items():
        for act, which in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
            key = ", ".join(f"{which}.{column}" for column in columns)
            connection.execute(_TRIGGER.format(table=table, act=act, key=key))


def _merge_learned(target: sqlite3.Connection, change: Change, merge: Merge) -> None:
    key = str(change.key[0])
    found = target.execute("SELECT value FROM learned WHERE key = ?", (key,)).fetchone()
    ours = json.loads(change.row["value"]) if change.row is not None else None
    kept = ours if found is None else merge(key, json.loads(found[0]), ours)
    value = json.dumps(kept, separators=(",", ":"), default=str)
    target.execute("INSERT OR REPLACE INTO learned (key, value) VALUES (?, ?)", (key, value))


def _empty(connection: sqlite3.Connection) -> bool:
    return all(
        connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is None  # noqa: S608 - names of our schema
        for table in KEYS
    )


def _tokens(connection: sqlite3.Connection) -> list[str]:
    row = connection.execute("SELECT value FROM learned WHERE key = ?", (TOKENS,)).fetchone()
    try:
        found = json.loads(row[0]) if row is not None else []
    except ValueError:
        found = []
    return [str(token) for token in found] if isinstance(found, list) else []


def _note_token(connection: sqlite3.Connection, token: str) -> None:
    tokens = [*(t for t in _tokens(connection) if t != token), token][-TOKENS_KEPT:]
    connection.execute("INSERT OR REPLACE INTO learned (key, value) VALUES (?, ?)", (TOKENS, json.dumps(tokens)))


def _sequence(connection: sqlite3.Connection, table: str) -> int:
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    return 0 if row is None else int(row[0])


def _set_sequence(connection: sqlite3.Connection, table: str, value: int) -> None:
    connection.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
    connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, value))
