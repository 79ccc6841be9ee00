"""The journal: one SQLite file with all that must survive podwatch itself (promise 10).

Every method is small, synchronous and thread-safe. What records *acts* (intents, uploads, pins) raises HostError when
it cannot be written, because an act without a record must not happen. What only *tells* (events, incidents, what was
learned) is dropped and counted instead: a full disk must not stop the guard.
"""

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from podwatch.domain.errors import HostError, InternalError, PermissionDenied
from podwatch.domain.event import Event, EventName, Incident
from podwatch.domain.finding import Severity
from podwatch.domain.intent import Intent, IntentKind, IntentState
from podwatch.domain.secrets import scrub
from podwatch.journal import room, schema
from podwatch.journal.opening import OWN, connect, host_error, move_aside, prepare
from podwatch.journal.records import BegunUpload, PublishedSave, UploadedObject

MAX_EVENTS: Final = 50_000
"""About 15 MiB; months of an ordinary run."""
MAX_SETTLED_INTENTS: Final = 5_000
MAX_INCIDENTS: Final = 1_000
ROTATE_EVERY: Final = 256
"""Writes between two rotations, so that trimming costs nothing that shows."""

_EVENTS_AFTER: Final = (
    "SELECT id, wall, name, severity, message, fields FROM events WHERE id > ? AND wall >= ? ORDER BY id LIMIT ?"
)
_EVENTS_NEWEST: Final = (
    "SELECT id, wall, name, severity, message, fields FROM events WHERE id > ? AND wall >= ? ORDER BY id DESC LIMIT ?"
)
_INCIDENT_COLUMNS: Final = (
    "id, kind, opened_wall, summary, evidence, bundle, closed_wall, resolution, resumed_step, lost_steps"
)
_INCIDENT_CHANGES: Final = frozenset(
    {"summary", "evidence", "bundle", "closed_wall", "resolution", "resumed_step", "lost_steps"}
)


class Journal:
    """Use ``Journal.open``. ``rebuilt`` says why an unreadable database was replaced; empty if it was not.

    ``dropped`` counts what could not be told because the disk was full or the database failed.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, wall: Callable[[], float], rebuilt: str) -> None:
        self.path = path
        self.rebuilt = rebuilt
        self.dropped = 0
        self._connection = connection
        self._wall = wall
        self._lock = threading.RLock()
        self._writes = 0
        self._together = False
        self._closed = False
        self._read_only = False
        self._ballast = room.Ballast(path)

    # -- life ---------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path, *, wall: Callable[[], float] = time.time, read_only: bool = False) -> "Journal":
        """Open or create the database at ``path``.

        A corrupt file is moved aside as ``<name>.corrupt-<n>`` and an empty one takes its place (``rebuilt``).
        ``read_only`` never changes anything: for commands that look while a daemon runs. Raises HostError when the
        directory cannot be used or a newer podwatch wrote the file, PermissionDenied when we may not read it.
        """
        if read_only:
            journal = cls(path, connect(path, read_only=True), wall, "")
            journal._read_only = True
            try:
                schema.refuse_newer(journal._connection, str(path))
            except BaseException:
                journal._connection.close()
                raise
            return journal
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except PermissionError as error:
            raise PermissionDenied("may not create the state directory", where=str(path.parent), fix=OWN) from error
        except OSError as error:
            raise HostError(f"cannot create the state directory: {error.strerror}", where=str(path.parent)) from error
        rebuilt = ""
        try:
            connection = prepare(path)
        except sqlite3.Error as error:
            if not room.is_corrupt(error):
                raise host_error(error, path) from error
            rebuilt = f"the state database was unreadable ({error}); it was moved to {move_aside(path).name}"
            try:
                connection = prepare(path)
            except sqlite3.Error as again:
                raise host_error(again, path) from again
        journal = cls(path, connection, wall, rebuilt)
        journal._ballast.restore()
        return journal

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._read_only:
                self._ballast.restore()
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()

    # -- events -------------------------------------------------------------------------------------------------------

    def add_event(self, event: Event) -> Event:
        """Store it and return it with its id; id 0 means that it could not be stored (and was counted)."""
        row = (event.wall, str(event.name), str(event.severity), event.message, _dump(dict(event.fields)))
        number = self._tell("INSERT INTO events (wall, name, severity, message, fields) VALUES (?, ?, ?, ?, ?)", row)
        return replace(event, id=number)

    def events(self, *, after_id: int = 0, since_wall: float = 0.0, limit: int = 1000) -> list[Event]:
        """Oldest first. With ``after_id`` the next ones after it, else the newest ``limit`` of them."""
        rows = self._rows(_EVENTS_AFTER if after_id else _EVENTS_NEWEST, (after_id, since_wall, limit))
        found = [event for row in rows if (event := _event(row)) is not None]
        return found if after_id else found[::-1]

    # -- intents ------------------------------------------------------------------------------------------------------

    def open_intent(self, kind: IntentKind, data: Mapping[str, object]) -> Intent:
        """On disk when this returns. Raises HostError if it cannot be: then the act must not happen."""
        now = self._wall()
        number = self._write(
            "INSERT INTO intents (kind, wall, data, state) VALUES (?, ?, ?, ?)",
            (str(kind), now, _dump(dict(data)), str(IntentState.OPEN)),
        )
        return Intent(number, kind, now, dict(data))

    def amend_intent(self, intent_id: int, data: Mapping[str, object]) -> None:
        """Add to an open intent what became known while acting. Raises HostError."""
        with self._lock:
            rows = self._rows("SELECT data FROM intents WHERE id = ?", (intent_id,))
            known = json.loads(rows[0][0]) if rows else {}
            self._write("UPDATE intents SET data = ? WHERE id = ?", (_dump({**known, **data}), intent_id))

    def settle(self, intent_id: int, state: IntentState, note: str = "") -> None:
        """Idempotent. Raises HostError if it cannot be written; the intent then stays open and is looked at again."""
        self._write(
            "UPDATE intents SET state = ?, note = ?, settled_wall = ? WHERE id = ?",
            (str(state), scrub(note), self._wall(), intent_id),
        )

    def open_intents(self, kind: IntentKind | None = None) -> list[Intent]:
        """Oldest first."""
        rows = self._rows(
            "SELECT id, kind, wall, data, state, note FROM intents WHERE state = 'open' AND (? = '' OR kind = ?)"
            " ORDER BY id",
            (str(kind or ""), str(kind or "")),
        )
        return [intent for row in rows if (intent := _intent(row)) is not None]

    def intents(self, limit: int = 100) -> list[Intent]:
        """The newest ones, settled or not, newest first."""
        rows = self._rows("SELECT id, kind, wall, data, state, note FROM intents ORDER BY id DESC LIMIT ?", (limit,))
        return [intent for row in rows if (intent := _intent(row)) is not None]

    # -- incidents ----------------------------------------------------------------------------------------------------

    def open_incident(self, kind: str, summary: str, evidence: str = "") -> Incident:
        """``evidence`` is JSON. Id 0 means that it could not be stored."""
        made = Incident(id=0, kind=kind, opened_wall=self._wall(), summary=summary, evidence=evidence)
        number = self._tell(
            "INSERT INTO incidents (kind, opened_wall, summary, evidence) VALUES (?, ?, ?, ?)",
            (kind, made.opened_wall, made.summary, made.evidence),
        )
        return replace(made, id=number)

    def update_incident(self, incident_id: int, /, **changes: object) -> Incident:
        """Change any of summary, evidence, bundle, closed_wall, resolution, resumed_step, lost_steps."""
        unknown = set(changes) - _INCIDENT_CHANGES
        if unknown:
            raise InternalError(f"an incident has no field {sorted(unknown)[0]!r}", fix="report this as a bug")
        if changes and incident_id:
            changes = {name: scrub(value) if isinstance(value, str) else value for name, value in changes.items()}
            columns = ", ".join(f"{name} = ?" for name in changes)
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

    # -- uploads ------------------------------------------------------------------------------------------------------

    def save_object(self, step: int, save_id: str, obj: UploadedObject) -> None:
        """The file is in the store; what was noted of it on the way is no longer needed."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO objects (step, save_id, path, document) VALUES (?, ?, ?, ?)",
                (step, save_id, obj.path, _dump(asdict(obj))),
            )
            _forget_begun(connection, step, save_id, obj.path)

    def save_begun(self, step: int, save_id: str, begun: BegunUpload) -> None:
        """A large file's upload has begun in the store (again, if there was a record of an earlier one)."""
        with self._transaction() as connection:
            _forget_begun(connection, step, save_id, begun.path)
            connection.execute(
                "INSERT INTO begun (step, save_id, path, document) VALUES (?, ?, ?, ?)",
                (step, save_id, begun.path, _dump({**asdict(begun), "parts": []})),
            )

    def save_part(self, upload: str, number: int, sha1: str) -> None:
        self._write(
            "INSERT OR REPLACE INTO begun_parts (upload, number, sha1) VALUES (?, ?, ?)", (upload, number, sha1)
        )

    def together(self, writes: Sequence[Callable[["Journal"], object]]) -> None:
        """All of them durable when it returns, or none: one commit for what arrives faster than a disk settles it."""
        with self._transaction():
            self._together = True
            try:
                for write in writes:
                    write(self)
            finally:
                self._together = False

    def begun(self, step: int | None = None, save_id: str = "") -> dict[str, BegunUpload]:
        """By ``path``, of one save; with no step, of all saves, by upload id."""
        found: dict[str, BegunUpload] = {}
        query = "SELECT document FROM begun WHERE ? IS NULL OR (step = ? AND save_id = ?)"
        for row in self._rows(query, (step, step, save_id)):
            document = json.loads(row[0])
            parts = self._rows(
                "SELECT number, sha1 FROM begun_parts WHERE upload = ? ORDER BY number", (document["upload"],)
            )
            begun = BegunUpload(**{**document, "parts": tuple((int(n), str(h)) for n, h in parts)})
            found[begun.path if step is not None else begun.upload] = begun
        return found

    def objects(self, step: int, save_id: str) -> dict[str, UploadedObject]:
        """By ``path`` (``<part>/<path inside the part>``)."""
        rows = self._rows("SELECT document FROM objects WHERE step = ? AND save_id = ? ORDER BY path", (step, save_id))
        found = (json.loads(row[0]) for row in rows)
        return {doc["path"]: UploadedObject(**{**doc, "parts_sha1": tuple(doc["parts_sha1"])}) for doc in found}

    def note_published(self, saved: PublishedSave) -> None:
        """The save is whole in the store. Its object records are no longer needed for going on, but are kept until
        ``forget_save`` so that a republication need not hash again."""
        self._write(
            "INSERT OR REPLACE INTO published (step, save_id, generation, seq, wall, document)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (saved.step, saved.save_id, saved.generation, saved.seq, saved.wall, _dump(asdict(saved))),
        )

    def published(self) -> list[PublishedSave]:
        """Oldest first: by (generation, seq), never by step number alone."""
        rows = self._rows("SELECT document FROM published ORDER BY generation, seq, wall")
        return [PublishedSave(**json.loads(row[0])) for row in rows]

    def forget_save(self, step: int, save_id: str) -> None:
        """Both the publication and its objects: the save is gone from the store, or its files changed."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM objects WHERE step = ? AND save_id = ?", (step, save_id))
            _forget_begun(connection, step, save_id)
            connection.execute("DELETE FROM published WHERE step = ? AND save_id = ?", (step, save_id))

    # -- what was learned, pins ---------------------------------------------------------------------------------------

    def learn(self, key: str, value: object) -> None:
        """``value`` is anything JSON can hold."""
        self._tell("INSERT OR REPLACE INTO learned (key, value) VALUES (?, ?)", (key, _dump(value)))

    def learned(self, key: str, default: Any = None) -> Any:
        rows = self._rows("SELECT value FROM learned WHERE key = ?", (key,))
        return json.loads(rows[0][0]) if rows else default

    def pin(self, step: int, reason: str) -> None:
        """A pinned step is never removed."""
        self._write("INSERT OR REPLACE INTO pins (step, reason, wall) VALUES (?, ?, ?)", (step, reason, self._wall()))

    def unpin(self, step: int) -> None:
        self._write("DELETE FROM pins WHERE step = ?", (step,))

    def pins(self) -> dict[int, str]:
        return {int(row[0]): str(row[1]) for row in self._rows("SELECT step, reason FROM pins ORDER BY step")}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _rows(self, sql: str, arguments: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._connection.execute(sql, arguments).fetchall()
            except sqlite3.Error as error:
                raise host_error(error, self.path) from error

    def _write(self, sql: str, arguments: tuple[object, ...]) -> int:
        """One statement, durable when it returns; the new row's id. Raises HostError."""
        with self._transaction() as connection:
            return int(connection.execute(sql, arguments).lastrowid or 0)

    def _tell(self, sql: str, arguments: tuple[object, ...]) -> int:
        """The same for what may be lost: counted instead of raised, 0 instead of an id."""
        try:
            return self._write(sql, arguments)
        except HostError:
            self.dropped += 1
            return 0

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._together:
                yield self._connection
                return
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    if room.is_full(error):
                        # The next attempt may find the ballast's space; this one is lost or refused.
                        self._ballast.drop()
                    raise host_error(error, self.path) from error
                raise
            self._writes += 1
            if self._writes % ROTATE_EVERY == 0:
                self._rotate()

    def _rotate(self) -> None:
        """Trim old rows and take back reserved space. Failing here loses nothing."""
        try:
            self._connection.execute("DELETE FROM events WHERE id <= (SELECT MAX(id) FROM events) - ?", (MAX_EVENTS,))
            self._connection.execute(
                "DELETE FROM intents WHERE state != 'open' AND id <= (SELECT MAX(id) FROM intents) - ?",
                (MAX_SETTLED_INTENTS,),
            )
            self._connection.execute(
                "DELETE FROM incidents WHERE closed_wall IS NOT NULL AND id <= (SELECT MAX(id) FROM incidents) - ?",
                (MAX_INCIDENTS,),
            )
            if room.free_pages(self._connection) < room.RESERVED_PAGES // 2:
                room.reserve(self._connection)
        except sqlite3.Error:
            return


def _forget_begun(connection: sqlite3.Connection, step: int, save_id: str, path: str | None = None) -> None:
    which = "step = :step AND save_id = :save_id AND (:path IS NULL OR path = :path)"
    names = {"step": step, "save_id": save_id, "path": path}
    begun = f"SELECT json_extract(document, '$.upload') FROM begun WHERE {which}"  # noqa: S608 - a constant
    connection.execute(f"DELETE FROM begun_parts WHERE upload IN ({begun})", names)  # noqa: S608
    connection.execute(f"DELETE FROM begun WHERE {which}", names)  # noqa: S608


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _event(row: tuple[Any, ...]) -> Event | None:
    """None for a name this version does not know (a newer podwatch wrote it)."""
    try:
        return Event(EventName(row[2]), row[1], row[4], Severity(row[3]), json.loads(row[5]), row[0])
    except ValueError:
        return None


def _intent(row: tuple[Any, ...]) -> Intent | None:
    """None for a kind this version does not know: a newer podwatch opened it, and will find it again."""
    try:
        return Intent(row[0], IntentKind(row[1]), row[2], json.loads(row[3]), IntentState(row[4]), row[5])
    except ValueError:
        return None
