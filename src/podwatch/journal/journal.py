"""The journal: one SQLite file that remembers events, incidents, learned values.

No decision about training depends on it: those stand in run.json. It may vanish; then history is gone and guarding
goes on. Every method is small, synchronous and thread-safe. What only *informs* is dropped and counted when it cannot
be written. ``record`` is for values without which an action must not happen: it raises HostError.

Where the database cannot be read, one in memory takes its place (``open_for_guard``). It has what happened meanwhile
(events, incidents); ``record`` is refused. When the database can be used again, what happened moves there; of learned
values only those that it lacks, because whoever learned them knew nothing of the ones before.
"""

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from podwatch.domain.errors import HostError, InternalError
from podwatch.domain.event import Event, EventName, Incident
from podwatch.domain.finding import Severity
from podwatch.domain.run import FROM_STORE
from podwatch.domain.secrets import scrub
from podwatch.journal import open_database
from podwatch.journal.open_database import connect, environmental, host_error, obstacle_of, open_checked

MAX_EVENTS: Final = 50_000
"""About 15 MiB; months of an ordinary run."""
ROTATE_EVERY: Final = 256
"""Writes between two rotations, so that trimming costs little."""

_EVENTS_AFTER: Final = (
    "SELECT id, wall, name, severity, message, fields FROM events WHERE id > ? AND wall >= ? ORDER BY id LIMIT ?"
)
_EVENTS_NEWEST: Final = (
    "SELECT id, wall, name, severity, message, fields FROM events WHERE id > ? AND wall >= ? ORDER BY id DESC LIMIT ?"
)
_LEARN: Final = "INSERT OR REPLACE INTO learned (key, value) VALUES (?, ?)"
_INCIDENT_COLUMNS: Final = (
    "id, kind, opened_wall, summary, evidence, bundle, closed_wall, resolution, resumed_step, lost_steps"
)
_INCIDENT_CHANGES: Final = frozenset(
    {"summary", "evidence", "bundle", "closed_wall", "resolution", "resumed_step", "lost_steps"}
)
_CHANGE: Final = {
    "closed_wall": "COALESCE(closed_wall, ?)",
    "resumed_step": "COALESCE(?, resumed_step)",
    "lost_steps": "COALESCE(?, lost_steps)",
}


Wall = Callable[[], float]
"""Returns epoch seconds."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why the database cannot be used, and the fix. ``in_memory``: it cannot be read either, so that this podwatch
    knows nothing of what was before."""

    what: str
    where: str
    fix: str
    in_memory: bool

    @property
    def text(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class Journal:
    """Use ``Journal.open``. ``rebuilt`` says why an unreadable database was replaced; empty if it was not.

    ``dropped`` counts records that were lost because the disk was full or the database failed. ``obstacle``: why the
    database cannot be written or read now (``open_for_guard``); None while it can.
    """

    obstacle: Obstacle | None = None
    _guards = _only_reads = False

    def __init__(self, path: Path, connection: sqlite3.Connection, wall: Wall, rebuilt: str) -> None:
        self.path = path
        self.rebuilt = rebuilt
        self.dropped = 0
        self._connection = connection
        self._wall = wall
        self._lock = threading.RLock()
        self._writes = 0
        self._closed = False
        self._read_only = False
        self._ballast = open_database.ballast_of(path)

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path, *, wall: Wall = time.time, read_only: bool = False) -> "Journal":
        """Open or create the database at ``path``.

        A corrupt file is moved aside as ``<name>.corrupt-<n>`` and replaced by an empty one (``rebuilt``).
        ``read_only`` never changes anything: for commands that read while a daemon runs. Raises HostError when the
        directory cannot be used or a newer podwatch wrote the file, PermissionDenied when podwatch cannot read it.
        """
        if read_only:
            journal = cls(path, connect(path, read_only=True), wall, "")
            journal._read_only = True
            try:
                open_database.refuse_newer(journal._connection, str(path))
            except BaseException:
                journal._connection.close()
                raise
            return journal
        connection, rebuilt = open_checked(path)
        journal = cls(path, connection, wall, rebuilt)
        journal._ballast.restore()
        return journal

    @classmethod
    def open_for_guard(cls, path: Path, *, wall: Wall = time.time) -> "Journal":
        """``open`` for the daemon, which must guard even without a database: never raises HostError.

        Where the database cannot be opened or read, at the start or later, an empty one in memory takes its place, and
        no action can be recorded. ``return_to_disk`` ends that.
        """
        try:
            journal = cls.open(path, wall=wall)
        except (HostError, OSError, sqlite3.Error) as error:
            return cls.in_memory(path, *obstacle_of(error, path), wall=wall)
        journal._guards = True
        return journal

    @classmethod
    def in_memory(cls, path: Path, what: str, where: str, fix: str, *, wall: Wall = time.time) -> "Journal":
        """An empty journal in memory."""
        journal = cls(path, _empty_database(int(wall())), wall, "")
        journal._guards, journal.obstacle = True, Obstacle(what, where, fix, in_memory=True)
        return journal

    def return_to_disk(self) -> None:
        """Use the database again, if it can be; events and incidents since then move there. Raises HostError, OSError
        or sqlite3.Error while it cannot. Blocks; others can use the journal until the last moment."""
        if self.obstacle is None:
            return
        if not self.obstacle.in_memory:
            self.learn("journal.opened", True)  # a write that succeeds clears the obstacle
            if self._only_reads and os.access(self.path, os.W_OK):
                self._open_again()
            return
        connection, rebuilt = open_checked(self.path, lenient=False)
        try:
            connection.execute("BEGIN IMMEDIATE")
            with self._lock:
                if self._closed:
                    raise HostError("the journal was closed meanwhile", where=str(self.path))
                _move_rows(self._connection, connection)
                connection.execute("COMMIT")
                old, self._connection = self._connection, connection
                self.obstacle, self.rebuilt = None, rebuilt
                old.close()
        except BaseException:
            connection.close()
            raise
        self._ballast.restore()

    def _open_again(self) -> None:
        """SQLite goes on reading only, in this process, until its last connection to the file is closed."""
        with self._lock:
            if self._closed or self.obstacle is None:
                return
            self._connection.close()
            try:
                self._connection, rebuilt = open_checked(self.path, lenient=False)
            except (HostError, OSError, sqlite3.Error) as error:
                self._connection = _empty_database(int(self._wall()))
                self.obstacle = Obstacle(*obstacle_of(error, self.path), in_memory=True)
                return
            self.rebuilt = rebuilt or self.rebuilt
            self.learn("journal.opened", True)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._read_only and self.obstacle is None:
                self._ballast.restore()
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()

    # -- events -------------------------------------------------------------------------------------------------------

    def add_event(self, event: Event) -> Event:
        """Store it and return it with its id; id 0 means that it could not be stored (which was counted)."""
        row = (event.wall, str(event.name), str(event.severity), event.message, _dump(dict(event.fields)))
        number = self._tell("INSERT INTO events (wall, name, severity, message, fields) VALUES (?, ?, ?, ?, ?)", row)
        return replace(event, id=number)

    def events(self, *, after_id: int = 0, since_wall: float = 0.0, limit: int = 1000) -> list[Event]:
        """Oldest first. With ``after_id`` the next ones after it, else the newest ``limit`` of them."""
        rows = self._rows(_EVENTS_AFTER if after_id else _EVENTS_NEWEST, (after_id, since_wall, limit))
        found = [event for row in rows if (event := _event(row)) is not None]
        return found if after_id else found[::-1]

    # -- incidents ----------------------------------------------------------------------------------------------------

    def open_incident(
        self,
        kind: str,
        summary: str,
        evidence: str = "",
        opened_wall: float | None = None,
        lost_steps: int | None = None,
    ) -> Incident:
        """``evidence`` is JSON; ``opened_wall`` is when the failure began, in epoch seconds (None: now). Id 0 means
        that it could not be stored."""
        began = self._wall() if opened_wall is None else opened_wall
        made = Incident(id=0, kind=kind, opened_wall=began, summary=summary, evidence=evidence, lost_steps=lost_steps)
        number = self._tell(
            "INSERT INTO incidents (kind, opened_wall, summary, evidence, lost_steps) VALUES (?, ?, ?, ?, ?)",
            (kind, made.opened_wall, made.summary, made.evidence, lost_steps),
        )
        return replace(made, id=number)

    def update_incident(self, incident_id: int, /, **changes: object) -> Incident:
        """Change any of summary, evidence, bundle, closed_wall, resolution, resumed_step, lost_steps.

        One that is closed again keeps its first ``closed_wall``: the time since then is not its own. None removes no
        steps."""
        unknown = set(changes) - _INCIDENT_CHANGES
        if unknown:
            raise InternalError(f"an incident has no field {sorted(unknown)[0]!r}", fix="report this as a bug")
        if changes and incident_id:
            changes = {name: scrub(value) if isinstance(value, str) else value for name, value in changes.items()}
            columns = ", ".join(f"{name} = {_CHANGE.get(name, '?')}" for name in changes)
            self._tell(f"UPDATE incidents SET {columns} WHERE id = ?", (*changes.values(), incident_id))  # noqa: S608
        return self.incident(incident_id) or replace(
            Incident(id=incident_id, kind="unknown", opened_wall=self._wall(), summary=""),
            **changes,  # type: ignore[arg-type]  # names checked above
        )

    def incident(self, incident_id: int) -> Incident | None:
        rows = self._rows(f"SELECT {_INCIDENT_COLUMNS} FROM incidents WHERE id = ?", (incident_id,))  # noqa: S608
        return Incident(*rows[0]) if rows else None

    def incidents(self, limit: int = 50) -> list[Incident]:
        """Newest first."""
        rows = self._rows(f"SELECT {_INCIDENT_COLUMNS} FROM incidents ORDER BY id DESC LIMIT ?", (limit,))  # noqa: S608
        return [Incident(*row) for row in rows]

    def current_incident(self) -> Incident | None:
        """The newest one that is still open."""
        rows = self._rows(
            f"SELECT {_INCIDENT_COLUMNS} FROM incidents WHERE closed_wall IS NULL ORDER BY id DESC LIMIT 1"  # noqa: S608
        )
        return Incident(*rows[0]) if rows else None

    # -- learned values -----------------------------------------------------------------------------------------------

    def learn(self, key: str, value: object) -> None:
        """``value`` is anything JSON can hold."""
        self._tell(_LEARN, (key, _dump(value)))

    def record(self, key: str, value: object) -> None:
        """``learn``, on the disk when this returns. Raises HostError if it cannot be written there."""
        self._write(_LEARN, (key, _dump(value)), or_in_memory=False)

    def learned(self, key: str, default: Any = None) -> Any:
        rows = self._rows("SELECT value FROM learned WHERE key = ?", (key,))
        try:
            return json.loads(rows[0][0]) if rows else default
        except ValueError:  # a damaged page: what was learned can be learned again
            return default

    # -- inside -------------------------------------------------------------------------------------------------------

    def _rows(self, sql: str, arguments: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._connection.execute(sql, arguments).fetchall()
            except sqlite3.Error as error:
                if not self._stand_by(error):
                    raise host_error(error, self.path) from error
                return self._connection.execute(sql, arguments).fetchall()

    def _write(self, sql: str, arguments: tuple[object, ...], *, or_in_memory: bool = True) -> int:
        """One statement, durable when it returns; returns the new row's id. Raises HostError. ``or_in_memory``: it may
        be recorded in memory only, while the database cannot be read."""
        with self._lock:
            try:
                return self._insert(sql, arguments, or_in_memory)
            except HostError as error:
                if not self._helped(error):
                    raise
            return self._insert(sql, arguments, or_in_memory)  # there is space now, or an empty database

    def _helped(self, error: HostError) -> bool:
        """Whether a second try can succeed: reserved space was freed, or an empty database took over."""
        cause = error.__cause__
        full = isinstance(cause, sqlite3.Error) and open_database.is_full(cause)
        return self._in_memory or (full and self._ballast.drop())

    def _insert(self, sql: str, arguments: tuple[object, ...], or_in_memory: bool) -> int:
        with self._transaction(or_in_memory=or_in_memory) as connection:
            return int(connection.execute(sql, arguments).lastrowid or 0)

    @property
    def _in_memory(self) -> bool:
        return self.obstacle is not None and self.obstacle.in_memory

    def _stand_by(self, error: sqlite3.Error) -> bool:
        """After the database could not be read, continue with an empty one in memory; returns whether that was done."""
        if not self._guards or self._in_memory or self._closed or not environmental(error):
            return False
        old, self._connection = self._connection, _empty_database(int(self._wall()))
        self.obstacle = Obstacle(*obstacle_of(error, self.path), in_memory=True)
        with contextlib.suppress(sqlite3.Error):
            old.close()
        return True

    def _note_failure(self, error: sqlite3.Error) -> None:
        """A write failed. A database that can still be read stays in use."""
        if not self._guards or self._in_memory or not environmental(error):
            return
        if open_database.is_corrupt(error):
            self._stand_by(error)
        else:
            self.obstacle = Obstacle(*obstacle_of(error, self.path), in_memory=False)
            self._only_reads = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY
            self._wait_for_lock(0.0)  # else each record waits for whoever has locked the database

    def _wait_for_lock(self, seconds: float) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")

    def _tell(self, sql: str, arguments: tuple[object, ...]) -> int:
        """The same for records that may be lost: counted instead of raised, 0 instead of an id."""
        try:
            return self._write(sql, arguments)
        except HostError:
            self.dropped += 1
            return 0

    @contextlib.contextmanager
    def _transaction(self, *, or_in_memory: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if not or_in_memory and (why := self.obstacle) is not None and why.in_memory:
                raise HostError(f"this cannot be recorded now: {why.what}", where=why.where, fix=why.fix)
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    self._note_failure(error)
                    raise host_error(error, self.path) from error
                raise
            if self.obstacle is not None and not self.obstacle.in_memory:
                self.obstacle = None
                self._wait_for_lock(open_database.BUSY_SECONDS)
            self._writes += 1
            if self._writes % ROTATE_EVERY == 0:
                self._rotate()

    def _rotate(self) -> None:
        """Trim old rows and take back reserved space. A failure here loses nothing."""
        try:
            for table, most, which in (
                ("events", MAX_EVENTS, "1"),
                ("incidents", 1_000, "closed_wall IS NOT NULL"),
            ):
                oldest = f"SELECT id FROM {table} ORDER BY id DESC LIMIT 1 OFFSET ?"  # noqa: S608 - of our schema
                self._connection.execute(f"DELETE FROM {table} WHERE {which} AND id <= ({oldest})", (most,))  # noqa: S608
            if not self._in_memory and open_database.free_pages(self._connection) < open_database.RESERVED_PAGES // 2:
                open_database.reserve(self._connection)
        except sqlite3.Error:
            return


def _empty_database(first_id: int) -> sqlite3.Connection:
    """A database in memory. Its ids begin at ``first_id``, the epoch second: above every id that the real one has
    given, so that whoever reads on from an id misses nothing and repeats nothing when the rows move there."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA cache_size = -256")
    open_database.make_tables(connection, ":memory:")
    for table in ("events", "incidents"):
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, first_id))
    return connection


_MOVES: Final = {"events": "REPLACE", "incidents": "REPLACE", "learned": "IGNORE"}


def _move_rows(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy what happened, with its ids, and learned values that the target lacks. The W&B ids of the last fetch are
    what happened, too."""
    target.execute(
        "DELETE FROM learned WHERE key = ? AND ?",
        (FROM_STORE, bool(source.execute("SELECT 1 FROM learned WHERE key = ?", (FROM_STORE,)).fetchall())),
    )
    for table, how in _MOVES.items():
        rows = source.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608 - names of our schema
        if rows:
            marks = ", ".join("?" for _ in rows[0])
            target.executemany(f"INSERT OR {how} INTO {table} VALUES ({marks})", rows)  # noqa: S608


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _event(row: tuple[Any, ...]) -> Event | None:
    """None for a name that this version does not know (a newer podwatch wrote it)."""
    try:
        return Event(EventName(row[2]), row[1], row[4], Severity(row[3]), json.loads(row[5]), row[0])
    except ValueError:
        return None
