"""The journal: one SQLite file that remembers events, incidents, learned values.

No decision about training depends on it: those stand in run.json. It may vanish; then history is gone and guarding
goes on. Every method is small, synchronous and thread-safe. What only *informs* is dropped and counted when it cannot
be written. ``record`` is for values without which an action must not happen: it raises HostError.

Where the database cannot be written or read, one in memory takes its place (``open_for_guard``): a copy of it, or an
empty one where it cannot be read. ``record`` is refused then. When the database can be used again, what happened
meanwhile moves there. What an empty one learned moves only where the database has nothing under that name, because
whoever learned it knew nothing of what was before.
"""

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from podwatch.domain.errors import HostError, InternalError
from podwatch.domain.event import Event, EventName, Incident
from podwatch.domain.finding import Severity
from podwatch.domain.run import FROM_STORE
from podwatch.domain.secrets import scrub
from podwatch.journal.open_database import connect, copy_in_memory, host_error, is_environmental, open_checked

MAX_EVENTS: Final = 50_000
"""About 15 MiB; months of an ordinary run."""
ROTATE_EVERY: Final = 256
"""Events between two rotations, so that trimming costs little."""

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
    """Why the database cannot be used, and the fix. ``blank``: it cannot be read either, so that this podwatch knows
    nothing of what was before."""

    what: str
    where: str
    fix: str
    blank: bool

    @property
    def text(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class Journal:
    """Use ``Journal.open``. ``rebuilt`` says why an unreadable database was replaced; empty if it was not.

    ``dropped`` counts records that were lost because the database failed. ``obstacle``: why a database in memory takes
    its place now (``open_for_guard``); None while none does.
    """

    obstacle: Obstacle | None = None
    _guards = False

    def __init__(self, path: Path, connection: sqlite3.Connection, wall: Wall, rebuilt: str = "") -> None:
        self.path = path
        self.rebuilt = rebuilt
        self.dropped = 0
        self._connection = connection
        self._wall = wall
        self._lock = threading.RLock()
        self._writes = 0
        self._closed = False

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path, *, wall: Wall = time.time, read_only: bool = False) -> "Journal":
        """Open or create the database at ``path``.

        A corrupt file is moved aside as ``<name>.corrupt-<n>`` and replaced by an empty one (``rebuilt``).
        ``read_only`` never changes anything: for commands that read while a daemon runs. Raises HostError when the
        directory cannot be used or a newer podwatch wrote the file, PermissionDenied when podwatch cannot read it.
        """
        if read_only:
            try:
                return cls(path, connect(path, read_only=True), wall)
            except sqlite3.Error as error:
                raise host_error(error, path) from error
        connection, rebuilt = open_checked(path)
        return cls(path, connection, wall, rebuilt)

    @classmethod
    def open_for_guard(cls, path: Path, *, wall: Wall = time.time) -> "Journal":
        """``open`` for the daemon, which must guard even without a database: never raises HostError.

        Where the database cannot be opened, written or read, at the start or later, one in memory takes its place, and
        no action can be recorded. ``return_to_disk`` ends that.
        """
        try:
            journal = cls.open(path, wall=wall)
        except HostError as error:
            return cls.in_memory(path, error.what, error.where, error.fix, wall=wall)
        journal._guards = True
        return journal

    @classmethod
    def in_memory(cls, path: Path, what: str, where: str, fix: str, *, wall: Wall = time.time) -> "Journal":
        """An empty journal in memory."""
        journal = cls(path, copy_in_memory(None, int(wall()))[0], wall)
        journal._guards, journal.obstacle = True, Obstacle(what, where, fix, blank=True)
        return journal

    def return_to_disk(self) -> None:
        """Use the database again, if it can be; what happened since then moves there. Raises HostError while it cannot.
        Blocks; others can use the journal until the last moment."""
        if self.obstacle is None:
            return
        connection, rebuilt = open_checked(self.path)
        try:
            connection.execute("BEGIN IMMEDIATE")
            with self._lock:
                if self._closed:
                    raise HostError("the journal was closed meanwhile", where=str(self.path))
                _move_rows(self._connection, connection, blank=self.obstacle.blank)
                connection.execute("COMMIT")
                old, self._connection = self._connection, connection
                self.obstacle, self.rebuilt = None, rebuilt
                old.close()
        except sqlite3.Error as error:
            connection.close()
            raise host_error(error, self.path) from error
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()

    # -- events -------------------------------------------------------------------------------------------------------

    def add_event(self, event: Event) -> Event:
        """Store it and return it with its id; 0 if it could not be stored, which was counted."""
        row = (event.wall, str(event.name), str(event.severity), event.message, _dump(dict(event.fields)))
        number = self._tell("INSERT INTO events (wall, name, severity, message, fields) VALUES (?, ?, ?, ?, ?)", row)
        self._rotate()
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
        self._write(_LEARN, (key, _dump(value)), on_disk=True)

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

    def _write(self, sql: str, arguments: tuple[object, ...], *, on_disk: bool = False) -> int:
        """One statement; returns the new row's id. Raises HostError. ``on_disk``: not in memory."""
        with self._lock:
            if on_disk and (why := self.obstacle) is not None:
                raise HostError(f"this cannot be recorded now: {why.what}", where=why.where, fix=why.fix)
            try:
                return int(self._connection.execute(sql, arguments).lastrowid or 0)
            except sqlite3.Error as error:
                if not self._stand_by(error) or on_disk:
                    raise host_error(error, self.path) from error
                return int(self._connection.execute(sql, arguments).lastrowid or 0)

    def _stand_by(self, error: sqlite3.Error) -> bool:
        """After the database failed, continue with one in memory; returns whether that was done."""
        if not self._guards or self.obstacle is not None or self._closed or not is_environmental(error):
            return False
        why, old = host_error(error, self.path), self._connection
        self._connection, copied = copy_in_memory(old, int(self._wall()))
        self.obstacle = Obstacle(why.what, why.where, why.fix, blank=not copied)
        with contextlib.suppress(sqlite3.Error):
            old.close()
        return True

    def _tell(self, sql: str, arguments: tuple[object, ...]) -> int:
        """``_write`` for records that may be lost: counted instead of raised, 0 instead of an id."""
        try:
            return self._write(sql, arguments)
        except HostError:
            self.dropped += 1
            return 0

    def _rotate(self) -> None:
        """Trim old rows. By their number: ids jump when an empty journal in memory moves to the disk."""
        self._writes += 1
        if self._writes % ROTATE_EVERY == 0:
            for table, most, which in (("events", MAX_EVENTS, "1"), ("incidents", 1_000, "closed_wall IS NOT NULL")):
                oldest = f"SELECT id FROM {table} ORDER BY id DESC LIMIT 1 OFFSET ?"  # noqa: S608 - of our schema
                self._tell(f"DELETE FROM {table} WHERE {which} AND id <= ({oldest})", (most,))  # noqa: S608


def _move_rows(source: sqlite3.Connection, target: sqlite3.Connection, *, blank: bool) -> None:
    """Copy what happened since ``source`` took the place of ``target``, with its ids. What a ``blank`` one learned
    counts less than what the target has, but for the W&B ids of the last fetch, which are what happened, too."""
    newest = target.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
    events = source.execute("SELECT * FROM events WHERE id > ?", newest).fetchall()
    target.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", events)
    incidents = source.execute("SELECT * FROM incidents").fetchall()
    target.executemany("INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", incidents)
    for key, value in source.execute("SELECT key, value FROM learned").fetchall():
        how = "IGNORE" if blank and key != FROM_STORE else "REPLACE"
        target.execute(f"INSERT OR {how} INTO learned VALUES (?, ?)", (key, value))  # noqa: S608 - one of two words


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _event(row: tuple[Any, ...]) -> Event | None:
    """None for a name that this version does not know (a newer podwatch wrote it)."""
    try:
        return Event(EventName(row[2]), row[1], row[4], Severity(row[3]), json.loads(row[5]), row[0])
    except ValueError:
        return None
