"""The journal keeps what it was told, over restarts, threads, damage and version changes."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError, InternalError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.secrets import MASK, register
from podwatch.journal import Journal
from podwatch.journal import journal as journal_module
from podwatch.journal.open_database import SCHEMA_VERSION


def event(n: int, wall: float = 100.0) -> Event:
    return Event(EventName.PRUNED, wall, f"event {n}", Severity.WARNING, {"step": n, "ok": True, "none": None})


def test_everything_survives_reopening(tmp_path: Path) -> None:
    path = tmp_path / "state" / "journal.sqlite"
    journal = Journal.open(path, wall=lambda: 42.0)
    stored = journal.add_event(event(1))
    journal.record("end-pod", {"tries": 2, "names": ["a"]})
    incident = journal.open_incident("silent-death", "engine died", '{"gpu": 0}')
    journal.update_incident(incident.id, resumed_step=10, lost_steps=2)
    journal.learn("gpu_base", {"0": 5})
    journal.close()
    journal.close()

    again = Journal.open(path)
    assert again.rebuilt == ""
    assert again.events() == [stored]
    assert stored.id > 0
    assert again.learned("end-pod") == {"tries": 2, "names": ["a"]}
    current = again.current_incident()
    assert current is not None
    assert (current.resumed_step, current.lost_steps, current.evidence) == (10, 2, '{"gpu": 0}')
    assert again.learned("gpu_base") == {"0": 5}
    assert again.learned("absent", 7) == 7
    again.close()


def test_an_unknown_incident_field_is_our_bug(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j.sqlite")
    incident = journal.open_incident("hang", "x")
    with pytest.raises(InternalError):
        journal.update_incident(incident.id, colour="red")
    journal.update_incident(incident.id, closed_wall=9.0, resolution="restarted")
    assert journal.current_incident() is None
    assert journal.incidents()[0].resolution == "restarted"
    journal.close()


def test_events_are_bounded_and_page_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_EVENTS", 20)
    monkeypatch.setattr(journal_module, "ROTATE_EVERY", 10)
    journal = Journal.open(tmp_path / "j.sqlite")
    for n in range(100):
        journal.add_event(event(n, wall=float(n)))
    events = journal.events()
    assert 20 <= len(events) <= 30
    assert events[-1].fields["step"] == 99
    assert [e.fields["step"] for e in journal.events(after_id=events[-3].id)] == [98, 99]
    assert [e.fields["step"] for e in journal.events(limit=2)] == [98, 99]
    assert [e.fields["step"] for e in journal.events(since_wall=98.0)] == [98, 99]
    journal.close()


@pytest.mark.parametrize("damage", ["garbage", "middle", "header"])
def test_a_corrupt_database_is_moved_aside_and_rebuilt(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal.open(path)
    for n in range(200):
        journal.add_event(event(n))
    journal.close()
    if damage == "garbage":
        path.write_bytes(b"this is not a database at all" * 200)
    elif damage == "header":
        with path.open("r+b") as file:
            file.write(b"\0" * 16)
    else:
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(4096 * 20))
    again = Journal.open(path)
    assert "j.sqlite.corrupt-1" in again.rebuilt
    assert (tmp_path / "j.sqlite.corrupt-1").exists()
    assert again.events() == []
    assert again.add_event(event(1)).id > 0
    again.close()


def test_only_a_few_corrupt_copies_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    for _ in range(6):
        path.write_bytes(b"garbage" * 1000)
        Journal.open(path).close()
    assert sorted(p.name for p in tmp_path.glob("*.corrupt-*")) == [f"j.sqlite.corrupt-{n}" for n in (4, 5, 6)]


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    Journal.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(HostError, match=f"schema {SCHEMA_VERSION + 1}.*newer podwatch"):
            Journal.open(path, read_only=read_only)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.corrupt-*"))


def test_a_database_whose_making_was_cut_off_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL").fetchone()
    connection.close()
    journal = Journal.open(path)
    assert journal.add_event(event(1)).id == 1
    journal.close()


def test_an_impossible_place_is_a_clear_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("x")
    with pytest.raises(HostError, match="cannot create the state directory"):
        Journal.open(blocker / "state" / "j.sqlite")
    (tmp_path / "dir.sqlite").mkdir()
    with pytest.raises(HostError, match=r"dir\.sqlite"):
        Journal.open(tmp_path / "dir.sqlite")


def test_reading_beside_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    writer = Journal.open(path)
    writer.add_event(event(1))
    reader = Journal.open(path, read_only=True)
    assert len(reader.events()) == 1
    writer.add_event(event(2))
    assert len(reader.events()) == 2
    assert reader.add_event(event(3)).id == 0
    with pytest.raises(HostError):
        reader.record("end-pod", {})
    reader.close()
    writer.close()
    with pytest.raises(HostError, match="cannot be opened"):
        Journal.open(tmp_path / "absent.sqlite", read_only=True)


def test_many_threads_share_one_journal(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j.sqlite")

    def work(base: int) -> None:
        for n in range(25):
            journal.add_event(event(base + n))

    threads = [threading.Thread(target=work, args=(base,)) for base in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(journal.events()) == 100
    assert journal.dropped == 0
    journal.close()


CHILD = """
import sys
from pathlib import Path
from podwatch.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
n = 0
while True:
    n += 1
    journal.record(str(n), n)
    print(n, flush=True)
"""


def test_a_record_is_durable_once_it_returned(tmp_path: Path) -> None:
    """SIGKILL the writer at a random moment: every value it reported is there, and the file is sound."""
    path = tmp_path / "j.sqlite"
    for round_number in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.02 * (round_number + 1))
        child.send_signal(signal.SIGKILL)
        reported = [int(line) for line in child.stdout.read().split("\n") if line.strip()]
        child.stdout.close()
        child.wait()
        journal = Journal.open(path)
        assert journal.rebuilt == ""
        assert all(journal.learned(str(n)) == n for n in range(1, max(reported, default=1) + 1))
        journal.close()
        path.unlink()


def test_no_secret_reaches_the_disk_and_none_of_an_older_journal_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal.open(path)
    register("planted-value-1")
    told = "planted-value-1 WANDB_API_KEY=planted2"
    journal.add_event(Event(EventName.PRUNED, 1.0, told, fields={"why": told}))
    incident = journal.open_incident("hang", told, f'[{{"value": "{told}"}}]')
    assert journal.update_incident(incident.id, resolution=told, closed_wall=2.0).resolution.count(MASK) == 2
    assert not any(b"planted" in file.read_bytes() for file in tmp_path.iterdir())
    # As versions before wrote them.
    with sqlite3.connect(path) as older:
        older.execute("UPDATE events SET message = ?, fields = ?", (told, f'{{"why": "{told}"}}'))
        older.execute("UPDATE incidents SET summary = ?, evidence = ?, resolution = ?", (told, told, told))
    older.close()
    assert "planted" not in repr([journal.events(), journal.incidents()])
    journal.close()
