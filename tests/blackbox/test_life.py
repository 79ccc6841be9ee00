"""What a daemon lives through, and what training notices of it: nothing, unless it needs help."""

import contextlib
import json
import os
import signal
import sqlite3
import time

import pytest

from tests.support.asking import kill_engine, messages, reasons, running, says
from tests.support.rig import Rig, alive


def test_an_engine_that_dies_silently_is_healed_from_the_newest_checkpoint(rig: Rig) -> None:
    daemon = rig.daemon().start()
    before = running(daemon, rig, step=20)  # an engine that lived for a moment only is none that can be missed
    kill_engine(rig)
    opened = daemon.wait_event("incident-opened", 20)
    newest = rig.saved[-1]
    assert opened["kind"] in ("silent-death", "required-child-exited"), opened  # whichever is seen first
    closed = daemon.wait_event("incident-closed", 30)
    assert newest - 5 <= closed["resumed_step"] > 0, (closed, rig.saved)
    assert rig.starts[1]["step"] == closed["resumed_step"]
    assert not alive(before)
    assert rig.trainer_pid == rig.starts[1]["pid"]
    says(daemon, 1)  # NOT BACKED UP is a warning, and nothing else is wrong


def test_training_outlives_its_podwatch_and_the_next_one_takes_it_over(rig: Rig) -> None:
    daemon = rig.daemon().start()
    pid = running(daemon, rig, step=5)
    daemon.wait_for(lambda: written_down(rig), 20, "a checkpoint was announced")
    daemon.stop(signal.SIGKILL)

    announced = written_down(rig)  # its last words may be in the log only: the kill came before the journal
    seen = len(daemon.events())
    daemon.start()
    adopted = daemon.wait_event("trainer-adopted", 20, after=seen)
    assert (adopted["pid"], rig.trainer_pid) == (pid, pid)
    assert "took over" in daemon.wait_event("daemon-started", 20, after=seen)["event"]
    new = daemon.wait_event("checkpoint-complete", 20, after=seen)  # training saves all the time
    assert new["step"] not in announced, "what the podwatch before announced is not announced again"

    assert daemon.stop() == 0
    farewell = messages(daemon, "daemon-stopping")[-1]
    assert "training continues UNGUARDED" in farewell
    assert "stop-training" in farewell
    assert rig.trainer_pid == pid

    rig.order(exit=3, once=True)
    daemon.wait_for(lambda: not alive(pid), 20, "the trainer ended while nobody looked")
    seen = len(daemon.events())
    daemon.start()
    assert "(exit code 3)" in daemon.wait_event("daemon-started", 20, after=seen)["event"]
    assert daemon.wait_event("incident-closed", 30, after=seen)["resumed_step"] >= 5
    assert len(rig.starts) == 2


def written_down(rig: Rig) -> set[int]:
    """The steps that the journal holds as announced."""
    path = rig.root / "state" / rig.run_id / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT value FROM learned WHERE key = ?", ("checkpoints.announced",)).fetchall()
    return {int(step) for (kept,) in rows for step in json.loads(kept)}


@pytest.mark.slow
def test_a_supervisor_that_is_killed_is_reported_and_training_is_guarded_on(rig: Rig) -> None:
    daemon = rig.daemon().start()
    trainer = running(daemon, rig, step=5)
    (record,) = rig.root.glob("state/*/supervisor/record.json")
    os.kill(json.loads(record.read_text())["supervisor"], signal.SIGKILL)
    raised = daemon.wait_event("finding-raised", 20, finding="supervisor-lost")
    assert raised["level"] == "warning"
    assert "which continues" in raised["event"]
    assert "its supervisor has ended" in " ".join(says(daemon, 1).split())
    assert (rig.trainer_pid, len(rig.starts)) == (trainer, 1)

    seen = len(daemon.events())
    daemon.stop(signal.SIGKILL)
    daemon.start()
    daemon.wait_event("finding-raised", 20, after=seen, finding="supervisor-lost")
    rig.kill("trainer")
    daemon.wait_event("incident-closed", 30, after=seen)
    daemon.wait_event("finding-cleared", 20, after=seen, finding="supervisor-lost")
    assert len(rig.starts) == 2
    assert "supervisor-lost" not in reasons(daemon), "the next start has a supervisor of its own"


@pytest.mark.slow
def test_what_a_person_wants_is_kept_through_a_restart_of_podwatch(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=10)
    stopped = daemon.command("stop-training")
    assert stopped.returncode == 0, stopped.stderr
    daemon.wait_event("trainer-stopped", 20)
    assert not rig.trainer_pid
    assert not rig.engine_pid
    assert daemon.stop() == 0

    seen = len(daemon.events())
    daemon.start()
    assert "stays stopped until" in daemon.wait_event("daemon-started", 20, after=seen)["event"]
    time.sleep(0.5)
    assert len(rig.starts) == 1, "a stop by a person is not undone by a restart of podwatch"

    newest = max(rig.saved)
    started = daemon.command("start")
    assert started.returncode == 0, started.stderr
    running(daemon, rig, after=seen)
    assert rig.starts[1]["step"] == newest
    busy = daemon.command("start")
    assert (busy.returncode, "running already" in busy.stderr) == (75, True), busy.stderr

    seen = len(daemon.events())
    wrong = daemon.command("restart", "--step", "7")
    assert wrong.returncode == 64, wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1
    again = daemon.command("restart", "--step", "5")
    assert again.returncode == 0, again.stderr
    running(daemon, rig, after=seen)
    assert rig.starts[2]["step"] == 5
    assert not messages(daemon, "incident-opened"), "what a person asked for is no incident"
