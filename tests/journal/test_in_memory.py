"""The journal without its database: one in memory takes its place until the database can be used again."""

import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError
from podwatch.domain.event import Event, EventName
from podwatch.domain.run import FROM_STORE
from podwatch.journal import Journal
from podwatch.journal.open_database import SCHEMA_VERSION


def note(number: int) -> Event:
    return Event(EventName.PRUNED, float(number), f"number {number}")


def before(path: Path) -> int:
    """A database of an earlier podwatch; returns its highest event id."""
    journal = Journal.open(path)
    journal.learn("known", "database")
    highest = [journal.add_event(note(n)).id for n in range(5)][-1]
    journal.close()
    return highest


def directory(path: Path) -> Callable[[], object]:
    away = path.with_name("away")
    path.rename(away)
    path.mkdir()

    def back() -> None:
        path.rmdir()
        away.rename(path)

    return back


def newer(path: Path) -> Callable[[], object]:
    def version(number: int) -> None:
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA user_version = {number}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()

    version(SCHEMA_VERSION + 1)
    return lambda: version(SCHEMA_VERSION)


def locked(path: Path) -> Callable[[], object]:
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    return holder.close


@pytest.mark.parametrize("obstacle", [directory, newer])
def test_at_the_start(tmp_path: Path, obstacle: Callable[[Path], Callable[[], object]]) -> None:
    path = tmp_path / "state" / "journal.sqlite"
    highest = before(path)
    remove = obstacle(path)
    journal = Journal.open_for_guard(path)
    assert journal.obstacle is not None
    assert journal.obstacle.blank
    seen = journal.add_event(note(10))
    assert seen.id > highest, "whoever reads on from an id misses nothing"
    incident = journal.open_incident("hang", "meanwhile")
    journal.learn("known", "memory")
    journal.learn("new", 1)
    with pytest.raises(HostError):
        journal.return_to_disk()
    assert journal.events() == [seen]
    remove()
    journal.return_to_disk()
    assert journal.obstacle is None
    assert [e.message for e in journal.events()] == [f"number {n}" for n in (0, 1, 2, 3, 4, 10)]
    later = journal.add_event(note(11))
    assert later.id > seen.id
    assert journal.events(after_id=seen.id) == [later]
    assert journal.incident(incident.id) == incident
    assert (journal.learned("known"), journal.learned("new")) == ("database", 1)
    journal.close()
    again = Journal.open_for_guard(path)
    assert again.obstacle is None
    assert len(again.events()) == 7
    again.close()


def test_no_action_is_recorded_in_memory(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").mkdir()
    journal = Journal.open_for_guard(tmp_path / "journal.sqlite")
    with pytest.raises(HostError, match="cannot be recorded now"):
        journal.record("hook:a", {})
    assert journal.learned("hook:a") is None
    journal.close()


def test_a_database_that_is_damaged_while_it_is_used_gives_way_to_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal.open_for_guard(path)
    journal.add_event(note(1))
    journal._connection.close()  # as any error of the file
    journal._connection = sqlite3.connect(path.with_name("other"), isolation_level=None, check_same_thread=False)
    path.with_name("other").write_bytes(b"no database" * 1000)
    assert journal.events() == []
    assert journal.obstacle is not None
    assert journal.obstacle.blank
    assert journal.add_event(note(2)).id > 0
    journal.return_to_disk()
    assert [e.message for e in journal.events()] == ["number 1", "number 2"]
    journal.close()


def test_a_database_that_cannot_be_written_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal.open_for_guard(path)
    first = journal.add_event(note(1))
    journal.learn("known", 1)
    journal._connection.execute("PRAGMA query_only = 1")
    second = journal.add_event(note(2))
    assert second.id == first.id + 1
    assert journal.obstacle is not None
    assert not journal.obstacle.blank
    assert journal.events() == [first, second]
    journal.learn("known", 2)
    with pytest.raises(HostError):
        journal.record("hook:a", {})
    journal.return_to_disk()
    assert journal.obstacle is None, "that connection could only read; a new one can write"
    assert journal.add_event(note(3)).id == second.id + 1
    assert journal.learned("known") == 2, "whoever learned it knew what was before"
    journal.close()


def test_a_database_that_another_process_locks_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podwatch.journal.open_database.BUSY_SECONDS", 0.5)
    path = tmp_path / "journal.sqlite"
    journal = Journal.open_for_guard(path)
    journal.add_event(note(1))
    unlock = locked(path)
    began = time.monotonic()
    for number in range(2, 20):
        journal.add_event(note(number))
    assert time.monotonic() - began < 5.0
    assert journal.obstacle is not None
    assert not journal.obstacle.blank
    with pytest.raises(HostError, match="locked"):
        journal.return_to_disk()
    unlock()
    journal.return_to_disk()
    assert journal.obstacle is None
    assert [e.message for e in journal.events()] == [f"number {n}" for n in range(1, 20)]
    journal.close()


def test_nothing_is_changed_in_a_database_of_a_newer_podwatch(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    before(path)
    remove = newer(path)
    picture = {p.name: (p.read_bytes(), stat.S_IMODE(p.stat().st_mode)) for p in tmp_path.iterdir()}
    journal = Journal.open_for_guard(path)
    journal.add_event(note(1))
    with pytest.raises(HostError, match="schema"):
        journal.return_to_disk()
    journal.close()
    assert picture == {p.name: (p.read_bytes(), stat.S_IMODE(p.stat().st_mode)) for p in tmp_path.iterdir()}
    remove()


def test_rows_are_trimmed_by_their_number_not_by_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids jump when a journal in memory moves to the disk."""
    monkeypatch.setattr("podwatch.journal.journal.MAX_EVENTS", 4)
    monkeypatch.setattr("podwatch.journal.journal.ROTATE_EVERY", 1)
    journal = Journal.open(tmp_path / "journal.sqlite")
    for number in range(3):
        journal.add_event(note(number))
    journal._connection.execute("UPDATE sqlite_sequence SET seq = 1700000000 WHERE name = 'events'")
    for number in range(3, 5):
        journal.add_event(note(number))
    assert [e.message for e in journal.events()] == [f"number {n}" for n in (1, 2, 3, 4)]
    journal.close()


def test_the_ids_of_the_last_fetch_are_known_after_the_return(tmp_path: Path) -> None:
    path = tmp_path / "state" / "journal.sqlite"
    before(path)
    remove = directory(path)
    journal = Journal.open_for_guard(path)
    journal.learn(FROM_STORE, {"shared": "of the fetch"})
    remove()
    journal.return_to_disk()
    assert journal.learned(FROM_STORE) == {"shared": "of the fetch"}
    journal.close()


def damage(journal: Journal, path: Path) -> None:
    """As if the file were found damaged at the next access."""
    journal._connection.close()
    path.with_name("other").write_bytes(b"no database" * 1000)
    journal._connection = sqlite3.connect(path.with_name("other"), isolation_level=None, check_same_thread=False)


def test_an_action_is_never_recorded_in_memory_by_a_second_try(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal.open_for_guard(path)
    damage(journal, path)
    with pytest.raises(HostError):
        journal.record("hook:a", {"step": 1})
    assert journal.obstacle is not None
    assert journal.learned("hook:a") is None
    journal.close()
