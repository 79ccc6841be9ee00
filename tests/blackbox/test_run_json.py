"""run.json decides: whatever becomes of it, of its copy and of the database, training is guarded and stays in the state
that its operator wanted (promises 4, 5, 10)."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import reasons, running, status
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


def path_of(rig: Rig) -> Path:
    return rig.root / "state" / rig.run_id / "run.json"


def copy_of(rig: Rig) -> Path:
    return rig.output.parent / ".podwatch" / rig.output.name / "run.json"


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(read(path) | changes))


def stopped(daemon: DaemonProcess, rig: Rig) -> None:
    """An operator stopped training, and podwatch was killed after that."""
    running(daemon, rig, step=5)
    assert daemon.command("stop-training", "--wait").returncode == 0
    daemon.wait_for(lambda: not rig.trainer_pid, 60, "training is stopped")
    daemon.stop(signal.SIGKILL)


def stays_stopped(daemon: DaemonProcess, rig: Rig) -> None:
    daemon.wait_for(lambda: status(daemon)["recovery"]["phase"] == "stopped", 60, "it stays stopped")
    assert len(rig.starts) == 1
    assert daemon.command("start").returncode == 0
    daemon.wait_for(lambda: len(rig.starts) == 2 and rig.trainer_pid, 60, "until the operator starts it")


def huge(path: Path) -> None:
    path.write_bytes(b" " * (2 << 20))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:700]),
    "empty": lambda path: path.write_bytes(b""),
    "huge": huge,
    "fifo": fifo,
    "not ours": lambda path: path.write_text('{"kind": "something else", "schema_version": 1}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_its_file_says_no_more_its_copy_says(rig: Rig, damage: str) -> None:
    daemon = rig.daemon().start()
    stopped(daemon, rig)
    DAMAGE[damage](path_of(rig))
    seen = len(daemon.events())
    daemon.start()
    said = daemon.wait_event("state-rebuilt", 60, after=seen)
    assert "run.json" in said["event"]
    assert path_of(rig).with_name("run.json.corrupt-1").exists()
    stays_stopped(daemon, rig)
    assert read(path_of(rig))["desired"] == read(copy_of(rig))["desired"] == "running"
    assert len([e for e in daemon.events()[seen:] if e["podwatch_event"] == "state-rebuilt"]) == 1
    assert daemon.stop() == 0


def test_a_lost_state_directory_costs_history_only(rig: Rig) -> None:
    daemon = rig.daemon().start()
    stopped(daemon, rig)
    shutil.rmtree(rig.root / "state")
    daemon.start()
    stays_stopped(daemon, rig)
    assert daemon.stop() == 0


def test_a_copy_that_says_something_else_executes_nothing(rig: Rig) -> None:
    """As who can write it would forge it: a command, a user, and another state."""
    daemon = rig.daemon().start()
    stopped(daemon, rig)
    forged = {**read(copy_of(rig))["last_start"], "argv": ["touch", str(rig.root / "forged")], "user": "nobody"}
    shutil.rmtree(rig.root / "state")
    rewrite(copy_of(rig), last_start=forged, desired="running")
    seen = len(daemon.events())
    daemon.start()
    daemon.wait_event("trainer-confirmed", 90, after=seen)
    assert len(rig.starts) == 2
    assert not (rig.root / "forged").exists()
    assert daemon.stop() == 0


def test_one_of_a_newer_podwatch_is_watched_beside_and_not_touched(rig: Rig) -> None:
    daemon = rig.daemon().start()
    pid = running(daemon, rig, step=5)
    daemon.stop(signal.SIGKILL)
    whole = path_of(rig).read_bytes()
    rewrite(path_of(rig), schema_version=99)
    newer = path_of(rig).read_bytes()
    seen = len(daemon.events())
    daemon.start()
    daemon.wait_event("trainer-adopted", 60, after=seen)
    found = daemon.wait_for(lambda: reasons(daemon).get("state-unavailable"), 60, "the finding")
    assert "schema 99" in found["summary"]
    assert rig.trainer_pid == pid
    rig.kill("trainer")
    daemon.wait_for(lambda: "trainer-exited" in reasons(daemon), 60, "its end is seen")
    assert len(rig.starts) == 1
    assert path_of(rig).read_bytes() == newer
    path_of(rig).write_bytes(whole)
    daemon.wait_for(lambda: len(rig.starts) == 2 and rig.trainer_pid, 120, "it is restarted once it can be read")
    assert daemon.stop() == 0


def test_a_pause_and_pins_outlive_the_database(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    assert daemon.command("pause", "--reason", "driver").returncode == 0
    assert daemon.command("checkpoints", "pin", "5", "--reason", "best").returncode == 0
    daemon.stop(signal.SIGKILL)
    for path in path_of(rig).parent.glob("journal.sqlite*"):
        path.unlink()
    daemon.start()
    daemon.wait_for(lambda: "paused" in reasons(daemon), 60, "it is still paused")
    sets = json.loads(daemon.command("checkpoints", "--json").stdout)["sets"]
    assert [s["pinned"] for s in sets if s["step"] == 5] == ["best"]
    assert daemon.stop() == 0
    assert daemon.command("checkpoints", "unpin", "5").returncode == 0, "also without a daemon"
    assert read(path_of(rig))["pins"] == {}
    daemon.start()
    daemon.wait_for(lambda: daemon.command("unpause").returncode == 0, 60, "it acts again")
    assert daemon.stop() == 0


@pytest.mark.root
def test_stop_training_needs_nothing_beside_output_dir(rig: Rig) -> None:
    """Another user has put a directory of theirs in the place of podwatch's own."""
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    hidden = rig.output.parent / ".podwatch"
    kept = hidden.with_name("kept")
    hidden.rename(kept)
    hidden.mkdir()
    os.chown(hidden, 61_018, 61_018)
    daemon.wait_for(lambda: "directory-replaced" in reasons(daemon), 60, "it is noticed")
    done = daemon.command("stop-training", "--wait")
    assert done.returncode == 0, done.stderr
    daemon.wait_for(lambda: not rig.trainer_pid, 60, "training is stopped")
    hidden.rmdir()
    kept.rename(hidden)
    assert read(path_of(rig))["desired"] == "stopped"
    assert daemon.stop() == 0
