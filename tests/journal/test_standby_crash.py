"""kill -9 at every point of a time in memory and of the return to disk: no incident is lost, no intent is doubled."""

import itertools
import os
import shutil
import signal
import sqlite3
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.run import IntentKind, IntentState
from podwatch.journal import Journal, open_database
from podwatch.journal.open_database import SCHEMA_VERSION
from tests.journal.test_without_database import filled

pytestmark = pytest.mark.slow


def run_round(path: Path, at: int, name: str, *, stay: bool) -> list[str]:
    """One podwatch in a process of its own, killed at point ``at`` (0: never); what it had reached. Unless it is to
    ``stay`` in memory, its database comes back and is used again."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            live(path, at, name, stay, write)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as said:
        lines = said.read().splitlines()
    assert status in (0, signal.SIGKILL), status
    return lines


def live(path: Path, at: int, name: str, stay: bool, out: int) -> None:
    reached = 0

    def point(*_: object) -> None:
        nonlocal reached
        reached += 1
        if reached == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(old: Callable[..., Any]) -> Callable[..., Any]:
        def new(*args: Any, **kwargs: Any) -> Any:
            point()
            done = old(*args, **kwargs)
            point()
            return done

        return new

    for called in ("fsync", "replace", "rename", "unlink"):
        setattr(os, called, wrapped(getattr(os, called)))
    connect = open_database.connect

    def traced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        made = connect(*args, **kwargs)
        made.set_trace_callback(point)
        return made

    open_database.connect = traced
    journal = Journal.open_for_guard(path)
    if journal.obstacle is not None:
        journal.open_incident("hang", name)
        os.write(out, f"incident {name}\n".encode())
        intent = journal.open_intent(IntentKind.START, {"start_id": name})
        os.write(out, f"intent {name}\n".encode())
        journal.settle(intent.id, IntentState.DONE)
        journal.update_incident(1, resolution=name)
        if not stay:
            Path(f"{path}.real").rename(path)
            journal.return_to_disk()
            assert journal.obstacle is None
    journal.close()
    os.write(out, b"end\n")


def prepare(directory: Path, known: bool) -> Path:
    """The database of this podwatch is in ``.real``; in its place is one of a newer podwatch, or nothing readable."""
    path = directory / "j.sqlite"
    filled(path)
    shutil.copy(path, directory / "j.sqlite.real")
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    if not known:
        connection.execute("DROP TABLE pins")
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    return path


@pytest.fixture
def memory() -> Iterator[Path]:
    """A disk whose fsync costs nothing: what a SIGKILL leaves is the same."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("known", [True, False])
def test_killed_at_every_point(memory: Path, known: bool) -> None:
    points = itertools.count(1)
    for at in points:
        directory = memory / str(at)
        directory.mkdir()
        path = prepare(directory, known)
        said = run_round(path, 0, "first", stay=True)
        said += run_round(path, at, "second", stay=False)
        real = directory / "j.sqlite.real"
        if real.exists():
            real.rename(path)
        check(path, said, at)
        shutil.rmtree(directory)
        if "end" in said[3:]:
            break
    assert at > 30, "the points were passed by"


def check(path: Path, said: list[str], at: int) -> None:
    for _ in range(2):  # and the next podwatch changes nothing more
        journal = Journal.open_for_guard(path)
        assert journal.obstacle is None
        summaries = sorted(i.summary for i in journal.incidents())
        starts = sorted(str(i.data["start_id"]) for i in journal.intents() if i.kind is IntentKind.START)
        for name in ("first", "second"):
            assert summaries.count(name) <= 1, (at, summaries)
            assert starts.count(name) <= 1, (at, starts)
            if f"incident {name}" in said:
                assert name in summaries, (at, said, summaries)
            if f"intent {name}" in said:
                assert name in starts, (at, said, starts)
        assert summaries.count("the first one") == 1
        assert len(journal.published()) == 1
        assert journal.pins() == {10: "milestone"}
        assert len([i for i in journal.intents() if i.kind is IntentKind.STOP]) == 1
        journal.close()
    assert not list(path.parent.glob("*.standby")), sorted(path.parent.iterdir())
