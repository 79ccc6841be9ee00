"""The guard stays whatever becomes of its own state: it senses, reports and adopts; what
it cannot know it neither deletes nor publishes."""

import contextlib
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import kill_engine, reasons, running, says, would_miss_the_engine
from tests.support.daemon import DaemonProcess
from tests.support.mounts import small_mount
from tests.support.rig import Rig, alive, end_all

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("attaching")]

KIND = "state-unavailable"


def database(rig: Rig) -> Path:
    return rig.root / "state" / rig.run_id / "journal.sqlite"


def run_json(rig: Rig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((rig.root / "state" / rig.run_id / "run.json").read_text())
    return found


def livez(daemon: DaemonProcess) -> int:
    url = json.loads(next(daemon.runtime.glob("*/endpoint.json")).read_text())["http_url"]
    with urllib.request.urlopen(url + "/livez", timeout=10) as answer:
        return int(answer.status)


def guards(daemon: DaemonProcess, what: str, *, publishes: bool | None = False) -> dict[str, Any]:
    """It lives, answers, and says critically why, with the fix. It ``publishes`` where nothing is unknown to it (None:
    either)."""
    found: dict[str, Any] = daemon.wait_for(lambda: reasons(daemon).get(KIND), 30, f"the finding: {what}")
    assert found["severity"] == "critical"
    assert what in found["summary"], found
    assert publishes is None or ("publishes nothing" in found["summary"]) is not publishes
    assert found["suggestion"]
    assert livez(daemon) == 200
    shown = says(daemon, 2)
    assert what in shown, shown
    return found


def returned(daemon: DaemonProcess, after: int = 0) -> None:
    daemon.wait_event("state-recovered", 60, after=after)
    daemon.wait_for(lambda: KIND not in reasons(daemon), 30, "the finding is gone")


def kill_known_engine(daemon: DaemonProcess, rig: Rig) -> None:
    """Nothing that an earlier podwatch learned can be read: this one has to have seen the engine for a while itself."""
    daemon.wait_for(lambda: would_miss_the_engine(daemon), 60, "it has seen the engine")
    kill_engine(rig)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process holds the database, as a sqlite3 shell or a backup tool does."""
    code = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60);"
        " c.execute('BEGIN EXCLUSIVE'); print('held', flush=True); sys.stdin.read()"
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


NEWER = 10_000
"""The version of a database that no podwatch of today wrote."""


@contextlib.contextmanager
def newer(path: Path) -> Iterator[None]:
    def set_version(version: int) -> None:
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()

    with contextlib.closing(sqlite3.connect(path)) as connection:
        (known,) = connection.execute("PRAGMA user_version").fetchone()
    set_version(NEWER)
    before = path.read_bytes()
    try:
        yield
    finally:
        assert path.read_bytes() == before, "a database of a newer podwatch was changed"
        set_version(known)


@contextlib.contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Not even its content is known: the name is taken by something that is no file."""
    away = path.with_name("away")
    away.mkdir()
    for file in path.parent.glob("journal.sqlite*"):
        file.rename(away / file.name)
    path.mkdir()
    try:
        yield
    finally:
        path.rmdir()
        for file in away.iterdir():
            file.rename(path.parent / file.name)


OBSTACLES: dict[str, tuple[Callable[[Path], contextlib.AbstractContextManager[None]], str]] = {
    "locked": (locked, "another process has locked the state database"),
    "newer": (newer, f"has schema {NEWER}"),
    "unreadable": (unreadable, "the state database cannot be opened"),
}


@pytest.mark.parametrize(
    ("name", "cut"), [*((name, "trainer-stopping") for name in OBSTACLES), ("unreadable", "trainer-stopped")]
)
def test_it_adopts_restarts_and_returns_to_disk(rig: Rig, elsewhere: Path, name: str, cut: str) -> None:
    obstacle, says_what = OBSTACLES[name]
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", disk__prune_above=0.0001, disk__prune_to=0.00001).start()
    pid = running(daemon, rig, step=20)
    daemon.wait_event("published", 60)
    daemon.stop(signal.SIGKILL)
    stored = sorted(p.name for p in (elsewhere).rglob("step_*"))
    seen = len(daemon.events())
    with obstacle(database(rig)):
        here = set(rig.saved)
        daemon.start()
        adopted = daemon.wait_event("trainer-adopted", 40, after=seen)
        assert (adopted["pid"], rig.trainer_pid) == (pid, pid)
        guards(daemon, says_what, publishes=name == "locked")
        assert says(daemon, 2)
        kill_known_engine(daemon, rig)
        closed = daemon.wait_event("incident-closed", 90, after=seen)
        assert closed["resumed_step"] in rig.saved
        assert len(rig.starts) == 2
        assert not alive(pid)
        # Killed in the middle of the next restart: run.json has the stop, done or not.
        killed = len(daemon.events())
        kill_engine(rig)
        daemon.wait_event(cut, 90, after=killed)
        daemon.stop(signal.SIGKILL)
        daemon.start()
        daemon.wait_for(lambda: len(rig.starts) >= 3, 90, "the restart is finished by the next podwatch")
        daemon.wait_event("trainer-confirmed", 60, after=killed)
        if name == "locked":  # it can be read: nothing is unknown
            daemon.wait_event("published", 90, after=seen)
        else:
            assert here <= set(rig.saved), "a checkpoint was deleted"
            assert sorted(p.name for p in elsewhere.rglob("step_*")) == stored, "something was published"
            events = {e["podwatch_event"] for e in daemon.events()[seen:]}
            assert not events & {"pruned", "published", "upload-started", "remote-pruned"}, events
        guards(daemon, says_what, publishes=name == "locked")  # what was over before it was said needs no event
        back = len(daemon.events())
    returned(daemon, back)
    if name != "locked":
        daemon.wait_event("published", 90, after=back)
    assert daemon.stop() == 0
    rig.never_two()
    assert len(rig.starts) == 3
    assert run_json(rig)["stopping"] is None


# -- what befalls a state disk


@pytest.fixture
def small_state(rig: Rig) -> Iterator[Path]:
    """The state directory on a disk of its own."""
    with small_mount(rig.root / "state", 24 << 20) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not allowed here")
        yield rig.root / "state"


def fill(directory: Path) -> None:
    with (directory / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


@contextlib.contextmanager
def kept_full(directory: Path) -> Iterator[None]:
    """Whatever becomes free is taken at once, as by a trainer that logs without an end."""
    ended = threading.Event()

    def take() -> None:
        while not ended.wait(0.1):
            fill(directory)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        (directory / "filler").unlink()


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def test_a_full_disk_at_the_first_start_is_guarded_and_used_once_there_is_room(rig: Rig, small_state: Path) -> None:
    fill(small_state)
    daemon = rig.daemon().start()
    found = guards(daemon, "no space left")
    assert "does not restart training" in found["summary"]
    assert "free some space" in found["suggestion"]
    assert not rig.starts, "the supervisor's record cannot be written"
    (small_state / "filler").unlink()
    returned(daemon)
    running(daemon, rig, step=5)
    assert daemon.stop() == 0


def test_in_the_background_on_a_full_disk(rig: Rig, small_state: Path) -> None:
    fill(small_state)
    daemon = rig.daemon()
    begun = daemon.command("run", "--detach")
    try:
        assert begun.returncode == 0, begun.stderr
        guards(daemon, "no space left")
        (small_state / "filler").unlink()
        daemon.wait_for(lambda: rig.starts, 60, "training is started once that can be recorded")
    finally:
        end_all(rig.members)


def test_a_disk_that_fills_up_while_podwatch_runs_is_left_and_used_again(rig: Rig, small_state: Path) -> None:
    daemon = rig.daemon(record__enabled=False).start()
    running(daemon, rig, step=20)
    with kept_full(small_state):
        with daemon.standing_still():
            fill(small_state)
        found = guards(daemon, "no space left", publishes=True)
        assert "still restarts training" in found["summary"], "a start has its reserved space"
        kill_engine(rig)
        daemon.wait_event("trainer-stopped", 90)
    returned(daemon)
    daemon.wait_for(lambda: len(rig.starts) >= 2 and rig.trainer_pid, 120, "training is started again")
    assert daemon.stop() == 0


def test_a_read_only_disk_is_guarded_by_what_it_holds(rig: Rig, small_state: Path) -> None:
    daemon = rig.daemon().start()
    pid = running(daemon, rig, step=5)
    daemon.stop(signal.SIGKILL)
    seen = len(daemon.events())
    mount("--bind", str(small_state), str(small_state))  # what is open already can be written: only new files cannot
    mount("-o", "remount,ro,bind", str(small_state))
    daemon.start()
    adopted = daemon.wait_event("trainer-adopted", 40, after=seen)
    assert adopted["pid"] == pid
    # Whether SQLite can read the database there depends on what the killed podwatch left of its log.
    found = guards(daemon, "is read-only", publishes=None)
    assert "remount it" in found["suggestion"]
    second = daemon.command("run")
    assert second.returncode == 75, (second.returncode, second.stderr)
    mount("-o", "remount,rw,bind", str(small_state))
    returned(daemon, seen)
    assert rig.trainer_pid == pid
    assert daemon.stop() == 0
    subprocess.run(["umount", "-l", str(small_state)], check=True)


@pytest.mark.parametrize("what", ["a file", "a link to nowhere"])
def test_a_state_directory_that_cannot_be_made(rig: Rig, what: str) -> None:
    state = rig.root / "state"
    if what == "a file":
        state.write_text("not a directory")
    else:
        state.symlink_to("/proc/nowhere/at/all")
    daemon = rig.daemon().start()
    guards(daemon, "state directory")
    assert not rig.starts
    state.unlink()
    returned(daemon)
    running(daemon, rig, step=5)
    assert daemon.stop() == 0


def test_an_output_directory_that_podwatch_cannot_write_beside_is_no_reason_to_leave(rig: Rig) -> None:
    beside = rig.output.parent / ".podwatch"
    beside.write_text("in the way")
    daemon = rig.daemon().start()
    found = daemon.wait_for(lambda: reasons(daemon).get(KIND), 30, "the finding")
    assert "directory beside the output directory" in found["summary"]
    assert livez(daemon) == 200
    assert not rig.starts
    beside.unlink()
    running(daemon, rig, step=5)
    daemon.wait_for(lambda: KIND not in reasons(daemon), 30, "the finding is gone")
    assert daemon.stop() == 0


# -- without rights

WITHOUT_RIGHTS = (
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search",
    "--inh-caps=-dac_override,-dac_read_search",
)
"""Root like any other user: a file without permissions cannot be read. (Another user could not run the interpreter of
a machine where that belongs to root alone.)"""


@pytest.mark.parametrize("closed", ["database", "directory"])
def test_what_it_has_no_right_to(rig: Rig, closed: str) -> None:
    probe = [*WITHOUT_RIGHTS, sys.executable, "-c", ""]
    if shutil.which("setpriv") is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("setpriv cannot take rights away here")
    daemon = rig.daemon()
    daemon.wrapper = WITHOUT_RIGHTS
    daemon.start()
    pid = running(daemon, rig, step=20)
    daemon.stop(signal.SIGKILL)
    seen = len(daemon.events())
    shut = database(rig).parent if closed == "directory" else database(rig)
    mode = shut.stat().st_mode & 0o777
    shut.chmod(0)
    daemon.start()
    assert daemon.wait_event("trainer-adopted", 40, after=seen)["pid"] == pid
    found = guards(daemon, "cannot be opened" if closed == "database" else "cannot create")
    kill_known_engine(daemon, rig)
    if closed == "database":
        daemon.wait_event("incident-closed", 90, after=seen)
        assert len(rig.starts) == 2
    else:
        assert "does not restart training" in found["summary"]
        daemon.wait_for(lambda: {"silent-death", "trainer-exited"} & set(reasons(daemon)), 60, "the death is seen")
        assert len(rig.starts) == 1
    shut.chmod(mode)
    returned(daemon, seen)
    daemon.wait_for(lambda: len(rig.starts) == 2, 90, "it is restarted once that can be recorded")
    adopted = [e for e in daemon.events()[seen:] if e["podwatch_event"] == "trainer-adopted" and e["pid"] == pid]
    assert len(adopted) == 1, "its own files came back: the trainer was watched all the time"
    assert daemon.stop() == 0


def test_an_unread_database_is_no_reason_for_a_fresh_start(rig: Rig) -> None:
    """Without its database a run looks new: with nothing to resume from, podwatch waits until it can read it."""
    daemon = rig.daemon().start()
    pid = running(daemon, rig)
    daemon.stop(signal.SIGKILL)
    rig.order(exit=3, once=True)
    daemon.wait_for(lambda: not alive(pid), 30, "the trainer ended while nobody looked")
    for directory in (rig.output / "checkpoints", rig.output / "run_default" / "checkpoints"):
        shutil.rmtree(directory, ignore_errors=True)
    seen = len(daemon.events())
    with unreadable(database(rig)):
        daemon.start()
        guards(daemon, "cannot be opened")
        blocked = daemon.wait_event("recovery-blocked", 60, after=seen)
        assert "podwatch does not start fresh" in blocked["event"]
        assert len(rig.starts) == 1
    returned(daemon, seen)
    daemon.wait_for(lambda: len(rig.starts) == 2, 60, "with its database it is known that nothing is lost")
    assert daemon.stop() == 0
