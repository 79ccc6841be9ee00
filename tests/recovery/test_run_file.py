"""run.json: what was recorded is read again after any kill; what cannot be read decides nothing."""

import asyncio
import contextlib
import errno
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.errors import ConfigurationError, HostError, InternalError
from podwatch.domain.run import Pause, StartRecord
from podwatch.domain.run_state import RestartHistory, RunState, Stopping, WonClaim
from podwatch.domain.snapshot import Desired
from podwatch.domain.starts import StartedBy, TrainerStart
from podwatch.recovery import run_file
from podwatch.recovery.run_file import RESERVED_BYTES, Newer, RunFile, parse
from podwatch.system import files
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import RootReplaced
from tests.support import edit_rounds
from tests.support.examples import examples
from tests.support.killpoints import CALLS, KillPoints, build_killpoints
from tests.support.mounts import small_mount
from tests.support.nvml import NoCompiler

START = StartRecord("s1", 12.5, ("uv", "run", "rl"), "/app", "u", ("HOME",), (("c.toml", "ab" * 32),), ("uv", "rl"))
FULL: dict[str, Any] = {
    "starts": (
        TrainerStart("g", wall=1.5, by=StartedBy.GUARD, proved=False, branch="l1"),
        TrainerStart(
            "attached-7-9", 40, 1_800_000_000.5, StartedBy.OPERATOR, branch="l2", left_step=90, why="saved step 45"
        ),
        TrainerStart("s2", 90, 1_800_000_100.5, branch="s2", of="g", seen=False, counted=True, confirmed=True),
    ),
    "desired": Desired.STOPPED,
    "stop_above": -1,
    "last_start": START,
    "wandb": {"shared": "x1"},
    "stopping": Stopping("s1", "hang", 4711, 99, "boot"),
    "pause": Pause(3.0, None, "root", "driver"),
    "pins": {40: "best"},
    "refused": {60: "resumed wrongly"},
    "gpu_base": {0: 7},
    "history": RestartHistory(ever_worked=True, failed_loads=((40, 1),), streak_started_at=5.0),
    "claim": WonClaim(3, "n", "boot", "", ("k8s", "job")),
    "writer_id": "w" * 32,
    "executed": {"--fresh": "a1"},
}


def file_of(root: Path, run_id: str = "r", state: str = "state") -> RunFile:
    (root / state).mkdir(exist_ok=True)
    (root / "out").mkdir(exist_ok=True)
    return RunFile(root / state, Workspace(root / "out"), run_id, SystemClock())


def recorded(root: Path, **changes: Any) -> RunFile:
    file = file_of(root)
    file.load()
    file.edit_now(lambda run: replace(run, **changes))
    file.close()
    return file


def facts(state: RunState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in FULL}


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def copy_of(root: Path) -> Path:
    return Workspace(root / "out").run_copy


# -- the ordinary case


def test_what_is_recorded_is_read_by_the_next(tmp_path: Path) -> None:
    first = file_of(tmp_path)
    assert first.load() is None
    assert first.known
    state = first.edit_now(lambda run: replace(run, **FULL))
    assert state.counter == 1
    first.close()
    again = file_of(tmp_path)
    assert again.load() == again.current == state
    assert facts(again.current) == FULL
    mode = stat.S_IMODE(again.path.stat().st_mode)
    assert (mode, again.path.stat().st_size) == (0o600, RESERVED_BYTES)
    assert parse(copy_of(tmp_path).read_bytes()) == state


async def test_edits_take_place_one_after_the_other(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    file.load()

    def add(run: RunState) -> RunState:
        return replace(run, desired_wall=run.desired_wall + 1)

    await asyncio.gather(*(file.edit(add) for _ in range(40)))
    assert (file.current.desired_wall, file.current.counter) == (40, 40)
    assert parse(file.path.read_bytes()).desired_wall == 40
    file.close()


async def test_a_note_made_during_an_edit_is_kept_and_recorded_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path)
    file.load()
    writing, go_on = threading.Event(), threading.Event()
    real = file._write

    def slow(*arguments: Any) -> None:
        writing.set()
        assert go_on.wait(60)
        real(*arguments)

    monkeypatch.setattr(file, "_write", slow)
    edit = asyncio.create_task(file.edit(lambda run: replace(run, desired=Desired.STOPPED)))
    while not writing.is_set():
        await asyncio.sleep(0.001)
    file.note(lambda run: replace(run, yielded=True))
    assert file.current.yielded, "at once"
    go_on.set()
    await edit
    assert (file.current.desired, file.current.yielded) == (Desired.STOPPED, True)
    assert not parse(file.path.read_bytes()).yielded
    await file.edit(lambda run: run)
    assert parse(file.path.read_bytes()).yielded
    file.close()


async def test_a_cancelled_edit_is_done_or_not_and_the_next_one_sees_which(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    file.load()
    for number in range(30):
        edit = asyncio.create_task(file.edit(lambda run, n=number: replace(run, desired_wall=float(n))))
        await asyncio.sleep(0.0005 * (number % 5))
        edit.cancel()
        await asyncio.gather(edit, return_exceptions=True)
        await file.edit(lambda run: run)
        assert parse(file.path.read_bytes()).desired_wall == file.current.desired_wall
    file.close()


# -- what cannot be written


async def test_an_edit_that_cannot_be_recorded_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path)
    file.load()
    await file.edit(lambda run: replace(run, desired=Desired.FINISHED))
    before = file.current

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_file, "replace_in_reserved_space", no_space)
    with pytest.raises(HostError, match="No space left") as caught:
        await file.edit(lambda run: replace(run, desired=Desired.RUNNING))
    assert "free some space" in caught.value.fix
    assert "no space left" in file.problem
    assert file.current == before
    monkeypatch.undo()
    await file.edit(lambda run: run)
    assert file.problem == ""
    file.close()


@pytest.mark.parametrize("step", ["overwrite_at", "exchange_at"])
async def test_an_edit_that_was_given_up_never_happens_unless_the_disk_hangs_in_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Else a stop that was given up would be finished later, beside training that has recovered."""
    last = step == "exchange_at"
    file = file_of(tmp_path)
    file.load()
    await file.edit(lambda run: replace(run, desired_wall=1.0))
    monkeypatch.setattr(run_file, "WRITE_SECONDS", 1.5)
    answers = threading.Event()
    real = getattr(files, step)

    def hang(*arguments: Any) -> Any:
        assert answers.wait(60)
        return real(*arguments)

    monkeypatch.setattr(files, step, hang)
    with pytest.raises(HostError, match="does not answer") as caught:
        await file.edit(lambda run: replace(run, stopping=Stopping("s1")))
    assert ("not known yet" in str(caught.value)) == last
    assert file.problem
    file.note(lambda run: replace(run, yielded=True))
    with pytest.raises(HostError, match="does not answer"):
        await file.edit(lambda run: replace(run, desired=Desired.STOPPED))
    answers.set()
    monkeypatch.setattr(run_file, "WRITE_SECONDS", 60.0)
    async with asyncio.timeout(60):
        while file._worker.stuck:
            await asyncio.sleep(0.01)
    await file.edit(lambda run: run)
    assert (file.problem, file.current.desired_wall) == ("", 1.0)
    assert file.current.stopping == (Stopping("s1") if last else None)
    assert (file.current.desired, file.current.yielded) == (Desired.RUNNING, True), "what was noted meanwhile stays"
    assert parse(file.path.read_bytes()) == file.current
    file.close()


def test_a_version_that_is_not_durable_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names were exchanged, but the disk failed then: whoever asked hears that nothing changed."""
    file = recorded(tmp_path, desired=Desired.STOPPED)
    real = files.sync_descriptor

    def fails(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(files, "sync_descriptor", fails)
    with pytest.raises(HostError, match="Input/output error"):
        file.edit_now(lambda run: replace(run, desired=Desired.RUNNING))
    monkeypatch.undo()
    assert file.current.desired is Desired.STOPPED
    assert parse(file.path.read_bytes()).desired is Desired.STOPPED
    file.edit_now(lambda run: run)
    file.close()


def test_what_the_next_could_not_read_is_not_recorded(tmp_path: Path) -> None:
    file = recorded(tmp_path, desired=Desired.STOPPED)
    whole = file.path.read_bytes()
    for change in (
        {"below": -5},
        {"run_id": "x", "desired": "?"},
    ):
        with pytest.raises(InternalError):
            file.edit_now(lambda run, change=change: replace(run, **change))
    assert file.path.read_bytes() == whole
    assert file.current.desired is Desired.STOPPED


@pytest.mark.root
def test_every_edit_gets_through_on_a_full_disk(tmp_path: Path) -> None:
    with small_mount(tmp_path / "state", 2 << 20) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not allowed here")
        file = recorded(tmp_path, desired_wall=1.0)
        with (tmp_path / "state" / "filler").open("wb", buffering=0) as filler:
            for size in (1 << 16, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(b"x" * size)
        assert os.statvfs(tmp_path / "state").f_bavail == 0
        for number in range(100):
            file.edit_now(lambda run, n=number: replace(run, desired_wall=float(n), starts=(FULL["starts"] * 50)))
            assert parse(file.path.read_bytes()).desired_wall == number


def test_a_file_system_that_cannot_exchange_names_keeps_a_spare_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "exchange_at", lambda *_: False)
    file = file_of(tmp_path)
    file.load()
    for number in range(5):
        file.edit_now(lambda run, n=number: replace(run, desired_wall=float(n)))
        assert parse(file.path.read_bytes()).desired_wall == number
        assert (file.path.parent / "run.json.spare").stat().st_size == RESERVED_BYTES
    file.close()


# -- what cannot be read


@settings(deadline=None, max_examples=examples(40))
@given(st.binary(max_size=200) | st.integers(0, 1500))
def test_a_torn_file_gives_way_to_the_copy_and_stays_for_the_operator(
    tmp_path_factory: pytest.TempPathFactory, damage: bytes | int
) -> None:
    root = tmp_path_factory.mktemp("r")
    file = recorded(root, **FULL)
    whole = file.path.read_bytes().rstrip() + b"\n"
    file.path.write_bytes(damage if isinstance(damage, bytes) else whole[:damage])
    cut = file.path.read_bytes()
    again = file_of(root)
    found = again.load()
    assert found is not None
    if cut.strip() == whole.strip():
        assert again.news == []
        return
    assert (found.desired, found.pins, found.history) == (Desired.STOPPED, {40: "best"}, FULL["history"])
    assert again.path.with_name("run.json.corrupt-1").read_bytes() == cut
    assert len(again.news) == 1
    assert (again.known, again.problem) == (True, "")
    again.edit_now(lambda run: run)
    assert again.current.counter > file.current.counter


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "huge": lambda path: path.write_bytes(b" " * (2 << 20)),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "twice": lambda path: path.write_bytes(b'{"run_id": "a", "run_id": "b"}'),
    "number": lambda path: path.write_bytes(b"7"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("which", ["own", "copy"])
def test_what_is_no_run_json_never_blocks_and_decides_nothing(tmp_path: Path, odd: str, which: str) -> None:
    file = recorded(tmp_path, **FULL)
    path = file.path if which == "own" else copy_of(tmp_path)
    path.unlink()
    ODD[odd](path)
    again = file_of(tmp_path)
    found = again.load()
    assert found is not None
    assert found.desired is Desired.STOPPED, "the other one is read"
    assert (found.last_start is not None and found.last_start.argv != ()) == (which == "copy")
    assert len(again.news) == 1, again.news
    again.edit_now(lambda run: run)
    again.close()
    assert parse(again.path.read_bytes()).desired is Desired.STOPPED
    if odd != "directory":
        assert parse(copy_of(tmp_path).read_bytes()).desired is Desired.STOPPED


def test_a_look_moves_nothing(tmp_path: Path) -> None:
    file = recorded(tmp_path, **FULL)
    file.path.write_text("{torn")
    copy_of(tmp_path).write_text("{torn, too")
    assert file_of(tmp_path).load(looking=True) is None
    assert file.path.read_text() == "{torn"
    assert {p.name for p in file.path.parent.iterdir()} == {"run.json", "run.json.spare"}


@pytest.mark.parametrize("which", ["own", "copy"])
def test_one_of_a_newer_podwatch_stays_and_is_not_guessed_at(tmp_path: Path, which: str) -> None:
    file = recorded(tmp_path, **FULL)
    path = file.path if which == "own" else copy_of(tmp_path)
    rewrite(path, schema_version=99)
    if which == "copy":
        file.path.unlink()
    before = path.read_bytes()
    again = file_of(tmp_path)
    with pytest.raises(Newer, match="schema 99"):
        again.load()
    assert not again.known
    assert "schema 99" in again.problem
    assert path.read_bytes() == before


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    file = recorded(tmp_path, **FULL)
    rewrite(file.path, weather={"deep": [1, {"er": 2}]})
    again = file_of(tmp_path)
    found = again.load()
    assert found is not None
    assert facts(found) == FULL


# -- the copy


def test_a_lost_state_directory_is_continued_without_commands_users_and_the_claim(tmp_path: Path) -> None:
    """Two containers of one image have one machine id: a claim in the copy would let both publish."""
    recorded(tmp_path, **FULL)
    again = file_of(tmp_path, state="another")
    found = again.load()
    assert found is not None
    assert found.last_start == StartRecord("s1", 12.5, (), "")
    assert facts(replace(found, last_start=START)) == FULL | {
        "claim": None,
        "writer_id": "",
        "stopping": None,
        "gpu_base": {},
    }


def test_a_newer_copy_leaves_what_names_this_podwatch(tmp_path: Path) -> None:
    """A state directory that was restored from a backup, or another one that wrote to the same output_dir."""
    file = recorded(tmp_path, **FULL)
    old = file.path.read_bytes()
    recorded(tmp_path, desired=Desired.FINISHED, claim=WonClaim(9, "other"), writer_id="x" * 32)
    file.path.write_bytes(old)
    found = file_of(tmp_path).load()
    assert found is not None
    assert (found.desired, found.claim, found.writer_id) == (Desired.FINISHED, FULL["claim"], FULL["writer_id"])
    assert found.last_start == START, "the same start: its command is known"


@pytest.mark.parametrize("lost", [False, True])
def test_a_volume_that_hangs_delays_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """With a file of its own podwatch continues; without one it does not begin the run anew."""
    monkeypatch.setattr(run_file, "COPY_READ_SECONDS", 0.2)
    recorded(tmp_path, **FULL)
    answers = threading.Event()
    file = file_of(tmp_path, state="another" if lost else "state")
    tree = file._workspace.tree
    real = type(tree).read_ours

    def hang(self: Any, *arguments: Any) -> bytes:
        assert answers.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(type(tree), "read_ours", hang)
    if lost:
        with pytest.raises(HostError, match="does not answer"):
            file.load()
        assert not file.known
        assert file.problem
        answers.set()
        with contextlib.suppress(HostError):
            file.load()
    else:
        assert file.load() == file.current
        answers.set()
    assert file.known
    assert facts(file.current)["desired"] == FULL["desired"]


def test_a_reader_of_the_copy_that_fails_is_no_silent_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path, **FULL)
    file = file_of(tmp_path, state="another")

    def fail(*_arguments: Any) -> bytes:
        raise RuntimeError("a bug of the reader")

    monkeypatch.setattr(type(file._workspace.tree), "read_ours", fail)
    with pytest.raises(HostError, match="RuntimeError: a bug of the reader"):
        file.load()
    assert not file.known, "there may be a copy: the run does not begin anew"


def test_a_copy_that_cannot_be_written_is_said_and_written_later(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    copy = copy_of(tmp_path)
    copy.unlink()
    copy.mkdir()
    (copy / "in the way").touch()
    file = file_of(tmp_path)
    file.edit_now(lambda run: replace(run, desired=Desired.STOPPED))
    until(lambda: str(copy) in file.copy_problem)
    file.write_copy_again()
    until(lambda: bool(file.copy_problem))
    (copy / "in the way").unlink()
    copy.rmdir()
    file.write_copy_again()
    until(lambda: not file.copy_problem)
    until(copy.exists)
    assert parse(copy.read_bytes()) == file.current
    file.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_higher_counter_wins(tmp_path: Path) -> None:
    file = recorded(tmp_path, desired=Desired.STOPPED)
    old = file.path.read_bytes()
    file = recorded(tmp_path, desired=Desired.FINISHED)
    file.path.write_bytes(old)  # a state directory that was restored from a backup
    again = file_of(tmp_path)
    found = again.load()
    assert found is not None
    assert found.desired is Desired.FINISHED
    assert again.edit_now(lambda run: run).counter == file.current.counter + 1


def test_another_machine_s_claim_and_processes_are_void(tmp_path: Path) -> None:
    recorded(tmp_path, **FULL)
    copy = copy_of(tmp_path)
    rewrite(copy, written={**json.loads(copy.read_text())["written"], "machine": "another"})
    again = file_of(tmp_path, state="another")
    found = again.load()
    assert found is not None
    assert (found.claim, found.writer_id, found.stopping, found.pause, found.gpu_base) == (None, "", None, None, {})
    assert (found.desired, found.refused, found.pins, found.lineage.id) == (
        Desired.STOPPED,
        {60: "resumed wrongly"},
        {40: "best"},
        "s2",
    )


def test_a_directory_of_another_run_is_not_written_to(tmp_path: Path) -> None:
    other = RunFile(tmp_path, Workspace(tmp_path / "out"), "other", SystemClock())
    other.edit_now(lambda run: run)
    other.close()
    file = file_of(tmp_path)
    file.load()
    assert file.other_run == "other"
    with pytest.raises(ConfigurationError, match="belongs to run 'other'"):
        file.edit_now(lambda run: run)
    assert parse(copy_of(tmp_path).read_bytes()).run_id == "other"


@pytest.mark.root
@pytest.mark.parametrize("lost", [False, True])
def test_a_copy_that_another_user_wrote_is_not_read(tmp_path: Path, lost: bool) -> None:
    file = recorded(tmp_path, desired=Desired.STOPPED)
    copy = copy_of(tmp_path)
    rewrite(copy, counter=1_000_000, desired="running", pins={"1": "forged"})
    os.chown(copy, 54_321, 54_321)
    again = file_of(tmp_path, state="another" if lost else "state")
    if lost:
        with pytest.raises(RootReplaced):
            again.load()
        assert not again.known, "a run that is only not visible does not begin anew"
        return
    found = again.load()
    assert found is not None
    assert (found.desired, found.pins, found.counter) == (Desired.STOPPED, {}, file.current.counter)


def test_a_disk_that_hangs_delays_the_daemon_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path, **FULL)
    answers = threading.Event()
    real = run_file.read_small

    def hang(*arguments: Any) -> bytes:
        assert answers.wait(60)
        return real(*arguments)

    monkeypatch.setattr(run_file, "read_small", hang)
    file = file_of(tmp_path)
    file.load_within(0.2)
    assert not file.known
    assert "does not answer" in file.problem
    answers.set()
    file.edit_now(lambda run: run)
    assert (file.known, file.problem, file.current.desired) == (True, "", Desired.STOPPED)
    file.close()


# -- kills


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_killpoints(tmp_path_factory.mktemp("killpoints"))
    except NoCompiler as missing:
        pytest.skip(str(missing))


def edits(root: Path, points: KillPoints, first: int, last: int) -> list[int]:
    """Run the edits until the kill; returns those that were acknowledged."""
    arguments = [str(root / "state"), str(root / "out"), str(first), str(last)]
    done = subprocess.run(
        [sys.executable, edit_rounds.__file__, *arguments],
        env={**os.environ, **points.environment(), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -9), done.stderr
    return [int(line) for line in done.stdout.split()]


def kinds(root: Path, points: KillPoints) -> Iterator[tuple[str, str]]:
    """Every kind of call that an edit makes. Names of temporary files have a random part."""
    edits(root, points, 0, 3)
    yield from dict.fromkeys((call.call, re.sub(r"\.[0-9a-f]{8}\.tmp", ".*.tmp", call.path)) for call in points.trace())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_every_call_of_an_edit(tmp_path: Path, library: Path) -> None:
    """The next one reads the last acknowledged edit, or the one that was being made, of both files."""
    (tmp_path / "state").mkdir()
    (tmp_path / "out").mkdir()
    points = KillPoints(
        tmp_path / "kill",
        below=[tmp_path / "state", tmp_path / ".podwatch"],
        roles={"writer": "*edit_rounds.py*"},
        calls=(*CALLS, "write"),
        library=library,
    )
    found = list(kinds(tmp_path, points))
    assert {call for call, _ in found} >= {"open", "write", "truncate", "fsync", "rename"}
    number, fired = 3, 0
    for call, path in found:
        for when in ("before", "after"):
            points.kill(role="writer", at=1, when=when, call=call, path=path)  # type: ignore[arg-type]
            done = edits(tmp_path, points, number, number + 4)
            fired += points.fired
            file = file_of(tmp_path)
            state = file.load()
            last = done[-1] if done else number - 1
            where = f"{when} {call} {path}"
            assert state is not None, where
            assert state.desired_wall in (last, last + 1), where
            assert state.starts[0].branch == f"l{int(state.desired_wall)}", f"{where}: half of an edit"
            assert file.news == [], where
            assert not list((tmp_path / "state").glob("*.corrupt*")), where
            number = int(state.desired_wall) + 1
    assert fired >= 1.5 * len(found), "the kills do not reach the edits"  # a directory is made only once


def test_an_edit_replaces_nothing_that_could_not_be_read(tmp_path: Path) -> None:
    file = recorded(tmp_path, **FULL)
    rewrite(file.path, schema_version=99)
    before = file.path.read_bytes()
    again = file_of(tmp_path)
    for _ in range(2):
        with pytest.raises(Newer):
            again.edit_now(lambda run: run)
    assert file.path.read_bytes() == before
