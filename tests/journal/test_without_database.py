"""The journal in memory: begun with what can be read, kept beside the database, written back once and in order."""

import contextlib
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.errors import HostError
from podwatch.domain.event import Event, EventName
from podwatch.domain.run import IntentKind, IntentState
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.journal import Journal
from podwatch.journal import open_database as opening_module
from podwatch.journal.open_database import SCHEMA_VERSION, read_database
from podwatch.journal.without_database import KEYS, UNKNOWN_IDS, StandbyFile
from tests.support.mounts import small_mount

pytestmark = pytest.mark.slow


def note(n: int) -> Event:
    return Event(EventName.PRUNED, float(n), f"number {n}")


def saved(step: int) -> PublishedSave:
    return PublishedSave(step, f"s{step}", "lin", 1, step, f"k{step}", "fid", "b" * 40, 10, 1000, 5.0)


def filled(path: Path) -> None:
    """A database with something of everything, closed."""
    journal = Journal.open(path)
    journal.learn("writer_id", "w" * 32)
    for n in range(3):
        journal.add_event(note(n))
    journal.settle(journal.open_intent(IntentKind.PUBLISH, {"n": 1}).id, IntentState.DONE)
    journal.open_intent(IntentKind.STOP, {"start_id": "s"})
    journal.open_incident("hang", "the first one")
    journal.note_published(saved(10))
    journal.pin(10, "milestone")
    journal.learn("recovery.memory", {"confirmed": "a"})
    journal.close()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process holds the database, as a sqlite3 shell or a backup tool does."""
    code = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN EXCLUSIVE');"
        " print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holder.kill()


def rows(path: Path) -> dict[str, list[Any]]:
    connection = sqlite3.connect(path)
    try:
        return {
            table: connection.execute(f"SELECT * FROM {table} ORDER BY {', '.join(keys)}").fetchall()
            for table, keys in KEYS.items()
        }
    finally:
        connection.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening_module, "BUSY_SECONDS", 0.05)


# -- reading without opening


@settings(max_examples=12)
@given(st.lists(st.sampled_from(["event", "intent", "learn", "checkpoint", "delete", "big"]), max_size=15))
def test_what_is_read_from_the_files_is_what_sqlite_reads(acts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "j.sqlite"
        journal = Journal.open(path)
        for n, act in enumerate(acts):
            if act == "event":
                journal.add_event(note(n))
            elif act == "intent":
                journal.open_intent(IntentKind.STOP, {"n": n})
            elif act == "learn":
                journal.learn(f"key{n % 3}", {"n": n})
            elif act == "delete":
                journal.forget_save(1, "s1")
            elif act == "big":
                journal.learn("big", "x" * 20_000 * (n % 4))
            else:
                journal._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        copy = Path(directory) / "copy"
        copy.mkdir()
        for file in Path(directory).glob("j.sqlite*"):
            if file.is_file():
                shutil.copy(file, copy / file.name)
        before = {f.name: f.read_bytes() for f in copy.iterdir()}
        found = read_database(copy / "j.sqlite")
        assert found is not None
        assert {f.name: f.read_bytes() for f in copy.iterdir()} == before
        for table, keys in KEYS.items():
            query = f"SELECT * FROM {table} ORDER BY {', '.join(keys)}"
            assert found.execute(query).fetchall() == journal._connection.execute(query).fetchall()
        found.close()
        journal.close()


def test_a_torn_last_transaction_is_left_out(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j.sqlite")
    journal._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    journal.pin(1, "whole")
    wal = tmp_path / "j.sqlite-wal"
    whole = wal.stat().st_size
    journal.pin(2, "torn")
    torn = wal.read_bytes()
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "j.sqlite", copy / "j.sqlite")
    for cut in range(whole, len(torn) + 1, 997):
        (copy / "j.sqlite-wal").write_bytes(torn[:cut] if cut < len(torn) - 997 else torn)
        found = read_database(copy / "j.sqlite")
        assert found is not None
        pins = found.execute("SELECT step FROM pins ORDER BY step").fetchall()
        assert pins == ([(1,)] if cut < len(torn) - 997 else [(1,), (2,)])
        found.close()
    journal.close()


# -- standing by


def test_a_locked_database_is_known_and_nothing_is_published_or_deleted(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    filled(path)
    before = rows(path)
    with locked(path):
        journal = Journal.open_for_guard(path)
        assert journal.obstacle is not None
        assert journal.obstacle.known
        assert "locked" in journal.obstacle.what
        assert journal.published() == [saved(10)]
        assert journal.pins() == {10: "milestone"}
        assert [i.kind for i in journal.open_intents()] == [IntentKind.STOP]
        for kind in set(IntentKind) - {IntentKind.STOP, IntentKind.START, IntentKind.QUARANTINE}:
            with pytest.raises(HostError, match=f"cannot {kind} now"):
                journal.open_intent(kind, {})
        with pytest.raises((HostError, sqlite3.Error)):
            journal.return_to_disk()
        incident = journal.open_incident("silent-death", "while it was locked")
        started = journal.open_intent(IntentKind.START, {"start_id": "new"})
        journal.add_event(note(77))
        journal.settle(2, IntentState.DONE, "it is gone")
        journal.update_incident(1, closed_wall=5.0)
    assert rows(path) == before
    journal.return_to_disk()
    assert journal.obstacle is None
    journal.settle(started.id, IntentState.DONE)
    journal.update_incident(incident.id, resolution="restarted")
    journal.close()
    again = Journal.open(path)
    assert [i.summary for i in again.incidents()] == ["while it was locked", "the first one"]
    assert again.incidents()[0].resolution == "restarted"
    assert again.incidents()[1].closed_wall == 5.0
    assert [(i.kind, i.state) for i in again.intents()] == [
        (IntentKind.START, IntentState.DONE),
        (IntentKind.STOP, IntentState.DONE),
        (IntentKind.PUBLISH, IntentState.DONE),
    ]
    assert [e.message for e in again.events()][-1] == "number 77"
    assert not StandbyFile(path).path.exists()
    again.close()


def test_a_newer_schema_is_read_and_its_files_are_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    filled(path)
    newer = sqlite3.connect(path)
    newer.execute("ALTER TABLE published ADD COLUMN more TEXT NOT NULL DEFAULT 'x'")
    newer.execute("CREATE TABLE later (n INTEGER)")
    newer.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    newer.commit()
    newer.execute("PRAGMA journal_mode = DELETE")
    newer.close()
    before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in tmp_path.iterdir()}
    journal = Journal.open_for_guard(path)
    assert journal.obstacle is not None
    assert journal.obstacle.known
    assert "use the newer podwatch" in journal.obstacle.fix
    assert journal.published() == [saved(10)]
    journal.open_incident("hang", "meanwhile")
    with pytest.raises(HostError):
        journal.return_to_disk()
    journal.close()
    after = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in tmp_path.iterdir() if f.suffix != ".standby"}
    assert after == before
    # The newer podwatch's own database stays as it is; what happened meanwhile waits for it, or for an empty one.
    path.rename(tmp_path / "away.sqlite")
    again = Journal.open_for_guard(path)
    assert again.obstacle is None
    assert [i.summary for i in again.incidents()] == ["meanwhile"]
    again.close()


def test_a_database_without_a_needed_column_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    filled(path)
    newer = sqlite3.connect(path)
    newer.execute("ALTER TABLE published DROP COLUMN seq")
    newer.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    newer.commit()
    newer.close()
    journal = Journal.open_for_guard(path)
    assert journal.obstacle is not None
    assert not journal.obstacle.known
    journal.close()


def test_what_was_not_known_stays_in_the_database_and_ids_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    filled(path)
    data = path.read_bytes()
    path.write_bytes(b"")
    path.unlink()
    path.mkdir()  # cannot be opened, nor read
    journal = Journal.open_for_guard(path)
    assert journal.obstacle is not None
    assert not journal.obstacle.known
    incident = journal.open_incident("hang", "unknown")
    assert incident.id > UNKNOWN_IDS
    intent = journal.open_intent(IntentKind.STOP, {"start_id": "t"})
    first = journal.add_event(note(50))
    journal.learn("writer_id", "another")
    journal.learn("only here", 1)
    path.rmdir()
    path.write_bytes(data)
    journal.return_to_disk()
    second = journal.add_event(note(51))
    journal.settle(intent.id, IntentState.DONE, "settled under its old id")
    journal.update_incident(incident.id, resolution="closed under its old id")
    assert [e.message for e in journal.events(after_id=first.id)] == ["number 51"]
    assert second.id == 5
    assert journal.learned("writer_id") == "w" * 32
    assert journal.learned("only here") == 1
    assert [i.id for i in journal.incidents()] == [2, 1]
    assert journal.incident(incident.id) == journal.incidents()[0]
    assert journal.incidents()[0].resolution == "closed under its old id"
    assert [(i.id, i.state) for i in journal.intents()] == [
        (3, IntentState.DONE), (2, IntentState.OPEN), (1, IntentState.DONE),
    ]  # fmt: skip
    journal.close()


def test_damage_that_cannot_be_moved_aside_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j.sqlite"
    filled(path)
    damaged = bytearray(path.read_bytes())
    damaged[0:16] = b"not a database!!"
    path.write_bytes(damaged)

    def refuse(path: Path) -> Path:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(opening_module, "move_aside", refuse)
    journal = Journal.open_for_guard(path)
    assert journal.obstacle is not None
    assert not journal.obstacle.known
    assert path.read_bytes() == damaged
    monkeypatch.undo()
    journal.return_to_disk()
    assert journal.obstacle is None
    assert "moved to" in journal.rebuilt
    journal.close()


def test_an_intent_that_cannot_be_kept_is_refused_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j.sqlite"
    filled(path)
    with locked(path):
        journal = Journal.open_for_guard(path)

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(StandbyFile, "save", refuse)
        with pytest.raises(HostError, match="cannot be recorded"):
            journal.open_intent(IntentKind.STOP, {"n": 1})
        assert [i.data for i in journal.open_intents()] == [{"start_id": "s"}]
        monkeypatch.undo()
        assert journal.open_intent(IntentKind.STOP, {"n": 2}).id > 0
    journal.close()


def test_the_daemons_journal_falls_into_memory_when_the_reserve_is_used_up_and_returns(tmp_path: Path) -> None:
    small = tmp_path / "small"
    with small_mount(small, 12 << 20) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not allowed here")
        journal = Journal.open_for_guard(small / "j.sqlite")
        assert journal.obstacle is None
        journal.learn("writer_id", "w")
        journal.note_published(saved(10))
        fill(small)
        padding = "x" * 200_000
        for n in range(200):
            if journal.obstacle is not None:
                break
            journal.add_event(Event(EventName.PRUNED, float(n), padding))
            fill(small)
        assert journal.obstacle is not None
        assert journal.obstacle.known
        assert journal.dropped == 0
        last = journal.events(limit=1)[0].id
        assert journal.published() == [saved(10)]
        incident = journal.open_incident("hang", "in memory")
        with pytest.raises((HostError, sqlite3.Error)):
            journal.return_to_disk()
        with pytest.raises(HostError):
            journal.open_intent(IntentKind.PRUNE, {})
        (small / "filler").unlink()
        journal.return_to_disk()
        assert journal.obstacle is None
        assert journal.add_event(note(1)).id == last + 1
        journal.close()
        again = Journal.open(small / "j.sqlite")
        assert [i.id for i in again.incidents()] == [incident.id]
        again.close()


def fill(directory: Path) -> None:
    with (directory / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


def test_what_one_podwatch_kept_the_next_one_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    filled(path)
    with locked(path):
        for n in range(3):
            journal = Journal.open_for_guard(path)
            assert journal.obstacle is not None
            assert len(journal.incidents()) == 1 + n
            journal.open_incident("hang", f"number {n}")
            journal.open_intent(IntentKind.START, {"start_id": str(n)})
            journal._closed = True  # killed
    journal = Journal.open_for_guard(path)
    assert journal.obstacle is None
    assert [i.summary for i in journal.incidents()] == ["number 2", "number 1", "number 0", "the first one"]
    assert [i.data.get("start_id") for i in journal.open_intents(IntentKind.START)] == ["0", "1", "2"]
    journal.close()
