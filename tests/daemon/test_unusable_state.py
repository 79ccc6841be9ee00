"""What may still be done while podwatch's own state cannot be used, and what one podwatch per run means then."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podwatch.daemon import unusable_state
from podwatch.daemon.paths_and_run_lock import RunLock
from podwatch.daemon.unusable_state import Records, UnusableState, last_pause, merge_learned, open_journal
from podwatch.domain.errors import Busy, HostError
from podwatch.domain.event import Event
from podwatch.domain.run import IntentKind, Mutation, MutationGuard, Pause
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.journal import Journal
from podwatch.reporting.json_documents import pause_document
from podwatch.retention.remove_checkpoints import Remover
from podwatch.system.clock import SystemClock
from podwatch.system.files import atomic_write
from podwatch.system.own_directories import Workspace


def memory_journal(tmp_path: Path, *, known: bool) -> Journal:
    """In memory, because the database is one of a newer podwatch (``known``) or no file at all."""
    path = tmp_path / "state" / "journal.sqlite"
    if known:
        journal = Journal.open(path)
        journal.note_published(PublishedSave(10, "s", "lin", 1, 1, "k", "f", "b" * 40, 1, 1, 5.0))
        journal._connection.execute("PRAGMA user_version = 99")
        journal.close()
    else:
        path.mkdir(parents=True)
    journal = Journal.open_for_guard(path, merge=merge_learned)
    assert journal.obstacle is not None
    assert journal.obstacle.known is known
    return journal


class Stand:
    def __init__(self, tmp_path: Path, journal: Journal, *, store: bool = False) -> None:
        self.workspace = Workspace(tmp_path / "work" / "outputs")
        self.workspace.outside.mkdir(parents=True)
        self.keeper = tmp_path / "state" / "keeper"
        self.trained = False
        self.left: list[str] = []
        self.events: list[Event] = []
        self.footing = UnusableState(
            journal,
            SystemClock(),
            Records(self.keeper, self.workspace),
            store=store,
            emit=self.events.append,
            exits=self,
            run=self,
        )
        self.guard = MutationGuard(self.footing.blocked_reason)

    acting = False

    def leave(self, code: int) -> None:
        self.left.append(f"left with {code}")

    def restart(self) -> None:
        self.left.append("again")

    def allowed(self) -> set[Mutation]:
        return {m for m in Mutation if not self.guard.blocked_reason(m)}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_what_is_allowed_in_memory(tmp_path: Path, known: bool, store: bool, records: bool, trained: bool) -> None:
    journal = memory_journal(tmp_path, known=known)
    stand = Stand(tmp_path, journal, store=store)
    stand.trained = trained
    if not records:
        stand.keeper.parent.mkdir(exist_ok=True)
        stand.keeper.write_text("a file is in the way")
    assert stand.allowed() <= {Mutation.FRESH_START}, "nothing is tried yet"
    asyncio.run(stand.footing.prove())
    allowed = stand.allowed()
    assert not allowed & {Mutation.DELETE, Mutation.PUBLISH}
    assert (Mutation.RESTART in allowed) == (records and (known or not store or trained))
    assert (Mutation.FRESH_START in allowed) == known
    (finding,) = stand.footing.findings()
    assert finding.severity == "critical"
    assert finding.suggestion
    assert ("still restarts training" in finding.summary) == (Mutation.RESTART in allowed)
    journal.close()


def test_everything_is_allowed_with_a_database(tmp_path: Path) -> None:
    journal = Journal.open_for_guard(tmp_path / "state" / "journal.sqlite")
    stand = Stand(tmp_path, journal)
    assert stand.allowed() == set(Mutation)
    assert stand.footing.findings() == ()
    stand.footing.missing = "the run record cannot be written"
    assert stand.allowed() == set()
    journal.close()


def test_any_source_blocks_and_the_first_reason_is_given() -> None:
    guard = MutationGuard(lambda m: "", lambda m: "replaced" if m is Mutation.DELETE else "")
    assert guard.blocked_reason() == "replaced"
    assert guard.blocked_reason(Mutation.PUBLISH) == ""
    guard.add(lambda m: "later")
    assert guard.blocked_reason() == "replaced"
    assert guard.blocked_reason(Mutation.PUBLISH) == "later"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("known", [True, False])
async def test_it_returns_when_the_obstacle_is_gone(
    tmp_path: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unusable_state, "RETRY_MIN", 0.05)
    journal = memory_journal(tmp_path, known=known)
    stand = Stand(tmp_path, journal)
    journal.open_incident("hang", "meanwhile")
    stand.footing.turn()
    await until(stand.footing.findings)
    assert journal.obstacle is not None
    if known:
        journal.path.rename(journal.path.with_name("newer"))
    else:
        journal.path.rmdir()

    def turned() -> bool:
        stand.footing.turn()
        return journal.obstacle is None or bool(stand.left)

    await until(turned)
    assert stand.left == ([] if known else ["again"])
    await stand.footing.stop()
    journal.close()
    again = Journal.open_for_guard(journal.path)
    assert again.obstacle is None
    assert [i.summary for i in again.incidents()] == ["meanwhile"]
    assert again.recovered is not known
    assert len(again.published()) == known, "what was known is in the new database as well"
    again.close()


async def test_a_disk_that_hangs_is_waited_for_until_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unusable_state, "OPEN_SECONDS", 0.2)
    answer = threading.Event()

    def hang(*_: object, **__: object) -> Journal:
        answer.wait()
        raise HostError("too late")

    monkeypatch.setattr(Journal, "open", hang)
    journal, worker = await open_journal(tmp_path / "journal.sqlite", SystemClock())
    assert journal.obstacle is not None
    assert not journal.obstacle.known
    assert "has not answered" in journal.obstacle.what
    assert journal.open_incident("hang", "kept in memory").id > 0
    answer.set()
    worker.close()
    journal._closed = True


# -- what asks the guard


def test_retention_removes_nothing_without_a_journal(tmp_path: Path) -> None:
    journal = memory_journal(tmp_path, known=True)
    stand = Stand(tmp_path, journal)
    workspace = stand.workspace
    workspace.output_dir.mkdir()
    workspace = workspace.probe()
    (workspace.trash / "1.5.0").mkdir(parents=True)
    remover = Remover(workspace, journal, SystemClock(), lambda event: None, stand.guard)
    report = remover.sweep_trash()
    assert report.problems
    assert (workspace.trash / "1.5.0").is_dir()
    with pytest.raises(HostError):
        journal.open_intent(IntentKind.PRUNE, {})
    journal.close()


def test_a_pause_is_read_from_the_last_status_file(tmp_path: Path) -> None:
    pause = Pause(1_700_000_000.0, 1_700_003_600.0, "root", "driver update")
    atomic_write(tmp_path / "status.json", json.dumps({"daemon": {"pause": pause_document(pause)}}))
    assert Pause.from_dict(last_pause(tmp_path)) == pause
    endless = Pause(1_700_000_000.0, None, "root", "")
    atomic_write(tmp_path / "status.json", json.dumps({"daemon": {"pause": pause_document(endless)}}))
    assert Pause.from_dict(last_pause(tmp_path)) == endless
    for text in ("", "{}", '{"daemon": {"pause": null}}', "[1]"):
        atomic_write(tmp_path / "status.json", text)
        assert last_pause(tmp_path) is None


@pytest.mark.parametrize(
    ("key", "known", "ours", "kept"),
    [
        ("writer_id", "old", "new", "old"),
        ("pause", {"since": 1}, None, None),
        ("learned", {"a": 1}, {}, {"a": 1}),
        ("sync.seq", 7, 0, 7),
    ],
)
def test_what_the_database_holds_is_not_overwritten_unknowingly(key: str, known: Any, ours: Any, kept: Any) -> None:
    assert merge_learned(key, known, ours) == kept


def test_a_start_made_in_memory_is_not_made_again(tmp_path: Path) -> None:
    known = {"wanted": 40, "fresh": False, "confirmed": "a", "counted": "a", "refused": {"50": "wrong"}}
    ours = {"wanted": None, "confirmed": "b", "counted": "", "refused": {}, "next_try_wall": 9.0}
    kept = merge_learned("recovery.memory", known, ours)
    assert kept == {
        "wanted": None, "fresh": False, "confirmed": "b", "counted": "a", "refused": {"50": "wrong"},
        "next_try_wall": 9.0,
    }  # fmt: skip
    assert merge_learned("recovery.memory", known, {})["wanted"] == 40


# -- one podwatch per run


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "state").mkdir()
    (tmp_path / "runtime").mkdir()
    return tmp_path / "state" / "lock", tmp_path / "runtime"


def test_whichever_lock_the_first_could_take_the_second_meets_it(places: tuple[Path, Path]) -> None:
    state, runtime = places
    hidden = state.with_name("hidden")
    for first_lacks in ("nothing", "state", "runtime"):
        for second_lacks in ("nothing", "state", "runtime"):
            if {first_lacks, second_lacks} == {"state", "runtime"}:
                continue  # nothing in common: neither deletes, publishes or starts
            first, second = (
                RunLock(hidden / "no" if lacks == "state" else state, hidden / "no" if lacks == "runtime" else runtime)
                for lacks in (first_lacks, second_lacks)
            )
            hidden.write_text("a file in the way of both")
            try:
                first.acquire()
                with pytest.raises(Busy):
                    second.acquire()
                assert first.complete == (first_lacks != "state")
            finally:
                second.release()
                first.release()
                hidden.unlink()


def test_a_lock_file_that_exists_is_taken_where_it_cannot_be_written(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, runtime = places
    state.write_text("")
    opened = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    first, second = RunLock(state, runtime), RunLock(state, runtime)
    first.acquire()
    assert first.complete
    with pytest.raises(Busy):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
