"""What may still be done while podwatch's own files cannot be used, and what one podwatch per run means then."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.app import state_check
from podwatch.app.paths_and_run_lock import RunLock
from podwatch.app.state_check import StateCheck, open_journal
from podwatch.disk.remove import Remover
from podwatch.domain.errors import Busy, HostError
from podwatch.domain.event import Event
from podwatch.domain.run import Mutation, MutationGuard
from podwatch.domain.snapshot import Desired
from podwatch.journal import Journal
from podwatch.recovery.run_file import RunFile
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from tests.support.mounts import small_mount

EVERYTHING = set(Mutation)


class Stand:
    """A daemon's own files, and what watches over them."""

    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.state.mkdir(exist_ok=True)
        self.workspace = Workspace(root / "work" / "outputs")
        self.file = RunFile(self.state, self.workspace, "r", SystemClock())
        self.journal = Journal.open_for_guard(self.state / "journal.sqlite")
        self.left: list[int] = []
        self.events: list[Event] = []
        self.check = StateCheck(
            self.file, self.journal, self.workspace, SystemClock(), exits=self, emit=self.events.append
        )
        self.guard = MutationGuard(self.check.blocked_reason)

    def leave(self, code: int) -> None:
        self.left.append(code)

    async def begin(self) -> None:
        try:
            self.file.load()
            await self.file.edit(lambda run: run)
        except HostError:
            pass
        await self.check.try_again()

    def allowed(self) -> set[Mutation]:
        return {m for m in Mutation if not self.guard.blocked_reason(m)}

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.check.turn()
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.check.stop()
        self.journal.close()
        self.file.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_check, "RETRY_MIN", 0.02)
    monkeypatch.setattr(state_check, "RETRY_MAX", 0.05)


async def test_everything_is_allowed_while_all_files_can_be_used(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    await stand.begin()
    assert stand.allowed() == EVERYTHING
    assert stand.check.findings() == ()
    assert stand.check.reserve.path.stat().st_blocks * 512 >= state_check.START_BYTES
    await stand.close()


async def test_run_json_that_cannot_be_written_blocks_all_until_it_can(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    spare = stand.state / "run.json.spare"
    spare.mkdir()
    await stand.begin()
    assert stand.allowed() == set()
    (finding,) = stand.check.findings()
    assert finding.severity == "critical"
    assert "does not restart training" in finding.summary
    assert "deletes nothing and publishes nothing" in finding.summary
    spare.rmdir()
    await stand.until(lambda: stand.allowed() == EVERYTHING)
    await stand.until(lambda: "state-recovered" in [str(e.name) for e in stand.events])
    assert stand.check.findings() == ()
    await stand.file.edit(lambda run: replace(run, desired=Desired.STOPPED))
    await stand.close()


async def test_a_copy_that_stays_behind_is_a_warning_until_it_is_written(tmp_path: Path) -> None:
    """It blocks nothing; but a pod that has only output_dir would continue with an older state."""
    stand = Stand(tmp_path)
    await stand.begin()
    copy = stand.workspace.run_copy
    await stand.until(copy.exists)
    copy.unlink()
    (copy / "in the way").mkdir(parents=True)
    await stand.file.edit(lambda run: replace(run, desired=Desired.STOPPED))
    await stand.until(stand.check.findings)
    (finding,) = stand.check.findings()
    assert (finding.severity, finding.subject) == ("warning", "copy")
    assert str(copy) in finding.summary
    assert stand.allowed() == EVERYTHING
    (copy / "in the way").rmdir()
    copy.rmdir()
    await stand.until(lambda: stand.check.findings() == () and copy.exists())
    await stand.close()


async def test_run_json_that_cannot_be_read_is_read_once_it_can(tmp_path: Path) -> None:
    first = Stand(tmp_path)
    await first.begin()
    await first.file.edit(lambda run: replace(run, desired=Desired.STOPPED))
    await first.close()
    newer = first.file.path.read_text()
    first.file.path.write_text(newer.replace('"schema_version": 1', '"schema_version": 9'))
    stand = Stand(tmp_path)
    await stand.begin()
    assert not stand.file.known
    assert stand.allowed() == set()
    assert "schema 9" in stand.check.findings()[0].summary
    stand.file.path.write_text(newer)
    await stand.until(lambda: stand.file.known)
    assert stand.file.current.desired is Desired.STOPPED
    await stand.until(lambda: stand.allowed() == EVERYTHING)
    await stand.close()


async def test_without_a_database_training_is_restarted_and_nothing_deleted(tmp_path: Path) -> None:
    database = tmp_path / "state" / "journal.sqlite"
    database.mkdir(parents=True)
    stand = Stand(tmp_path)
    await stand.begin()
    assert stand.allowed() == {Mutation.RESTART}
    (finding,) = stand.check.findings()
    assert "still restarts training" in finding.summary
    assert "deletes nothing and publishes nothing" in finding.summary
    with pytest.raises(HostError, match="cannot be recorded now"):
        stand.journal.record("hook:a", {})
    kept = stand.journal.open_incident("hang", "meanwhile")
    database.rmdir()
    await stand.until(lambda: stand.allowed() == EVERYTHING)
    assert stand.journal.incident(kept.id) == kept
    await stand.close()
    again = Journal.open(database)
    assert [i.summary for i in again.incidents()] == ["meanwhile"]
    again.close()


async def test_retention_removes_nothing_without_a_database(tmp_path: Path) -> None:
    (tmp_path / "state" / "journal.sqlite").mkdir(parents=True)
    stand = Stand(tmp_path)
    stand.workspace.output_dir.mkdir(parents=True)
    await stand.begin()
    workspace = stand.workspace.probe()
    (workspace.trash / "1.5.0").mkdir(parents=True)
    remover = Remover(workspace, SystemClock(), lambda event: None, stand.guard)
    assert remover.sweep_trash().problems
    assert (workspace.trash / "1.5.0").is_dir()
    await stand.close()


@pytest.mark.root
async def test_a_start_has_its_space_on_a_full_disk_or_does_not_happen(tmp_path: Path) -> None:
    with small_mount(tmp_path / "state", 24 << 20) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not allowed here")
        stand = Stand(tmp_path)
        await stand.begin()
        with (tmp_path / "state" / "filler").open("wb", buffering=0) as filler:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        filler.write(b"x" * size)
                except OSError:
                    pass
        await stand.check.try_again()
        assert Mutation.RESTART in stand.allowed(), "its space is reserved"
        assert stand.check.reserve.drop()
        spec = tmp_path / "state" / "spec"
        spec.write_bytes(b"x" * (state_check.START_BYTES - 4096))
        await stand.check.try_again()
        assert Mutation.RESTART not in stand.allowed(), "it was used, and there is no more"
        (tmp_path / "state" / "filler").unlink()
        await stand.until(lambda: Mutation.RESTART in stand.allowed())
        await stand.close()


async def test_a_directory_beside_output_dir_that_cannot_be_made_blocks_all_until_it_can(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    beside = tmp_path / "work" / ".podwatch"
    beside.parent.mkdir()
    beside.write_text("in the way")
    stand.check._missing = "it cannot be made"
    await stand.begin()
    assert stand.allowed() == set()
    beside.unlink()
    await stand.until(lambda: stand.allowed() == EVERYTHING)
    await stand.close()


async def test_another_podwatch_that_took_the_lock_meanwhile_is_left_alone(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    path = stand.state / "guard.lock"
    lock, other = RunLock(path), RunLock(path)
    stand.check._lock = lock
    other.take_state_lock()
    await stand.begin()
    assert stand.left == [75]
    assert stand.allowed() == set()
    other.release()
    await stand.close()


async def test_a_disk_that_hangs_is_waited_for_until_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_check, "OPEN_SECONDS", 0.2)
    answer = threading.Event()

    def hang(*_: object, **__: object) -> Journal:
        answer.wait()
        raise HostError("too late")

    monkeypatch.setattr(Journal, "open", hang)
    journal = await open_journal(tmp_path / "journal.sqlite", SystemClock())
    assert journal.obstacle is not None
    assert journal.obstacle.blank
    assert "has not answered" in journal.obstacle.what
    assert journal.open_incident("hang", "kept in memory").id > 0
    answer.set()
    journal.close()


def test_any_source_blocks_and_the_first_reason_is_given() -> None:
    guard = MutationGuard(lambda m: "", lambda m: "replaced" if m is Mutation.DELETE else "")
    assert guard.blocked_reason() == "replaced"
    assert guard.blocked_reason(Mutation.PUBLISH) == ""
    guard.add(lambda m: "later")
    assert guard.blocked_reason() == "replaced"
    assert guard.blocked_reason(Mutation.PUBLISH) == "later"


# -- one podwatch per run


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Workspace]:
    (tmp_path / "state").mkdir()
    return tmp_path / "state" / "guard.lock", Workspace(tmp_path / "work" / "out").probe()


@pytest.mark.parametrize("lacks", ["nothing", "state", "beside"])
def test_whichever_lock_the_first_could_take_the_second_meets_it(places: tuple[Path, Workspace], lacks: str) -> None:
    """Their state directories are the same one, or, where it lacks a lock, two."""
    state, workspace = places
    if lacks == "beside":
        (workspace.outside / "guard.lock").mkdir()
    own = state.with_name("another.lock") if lacks == "state" else state
    first, second = RunLock(state), RunLock(own)
    first.take_state_lock()
    first.take_output_lock(workspace)
    assert bool(first.problem) is (lacks == "beside")

    def take() -> None:
        second.take_state_lock()
        second.take_output_lock(Workspace(workspace.output_dir))

    with pytest.raises(Busy, match=f"process {os.getpid()}"):
        take()
    second.release()
    first.release()
    take()
    assert second.complete
    second.release()


def test_locks_end_with_their_holder(places: tuple[Path, Workspace]) -> None:
    state, workspace = places
    if (child := os.fork()) == 0:
        held = RunLock(state)
        held.take_state_lock()
        held.take_output_lock(workspace)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    again = RunLock(state)
    again.take_state_lock()
    again.take_output_lock(workspace)
    assert (again.complete, again.problem) == (True, "")
    again.release()


def test_a_lock_file_that_exists_is_taken_where_it_cannot_be_written(
    places: tuple[Path, Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = places
    state.write_text("")
    opened = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    first, second = RunLock(state), RunLock(state)
    first.take_state_lock()
    assert first.complete
    with pytest.raises(Busy):
        second.take_state_lock()
    first.release()
    second.take_state_lock()
    second.release()
