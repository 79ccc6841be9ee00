"""What a person does beside podwatch: starts by hand, stops after the next save. And a run that ends unseen."""

import contextlib
import json
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.asking import messages, running, status
from tests.support.rig import Rig, alive

pytestmark = pytest.mark.usefixtures("attaching")


def log_is_journaled(rig: Rig) -> bool:
    """Whether a podwatch that starts now would know where to read on."""
    (path,) = (rig.root / "state").glob("*/journal.sqlite")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT value FROM learned WHERE key = 'logs.read'").fetchall()
    return any(json.loads(value).get("files") for (value,) in rows)


@pytest.mark.slow
def test_a_stop_that_comes_while_podwatch_starts_is_kept(rig: Rig) -> None:
    """The driver hangs, so the first look takes seconds; the wish must outlast what begins after it."""
    rig.world.hang_all()
    daemon = rig.daemon(gpu__deadline="8s").start()
    daemon.wait_for(daemon.status, 20, "an answer")
    assert not messages(daemon, "daemon-started"), "it is to be asked before it has begun"
    told = daemon.command("stop-training")
    assert told.returncode == 0, told.stderr
    daemon.wait_event("daemon-started", 20)
    rig.world.hang_all(False)
    wanted = status(daemon)["daemon"]["desired"]
    assert wanted == "stopped"
    daemon.wait_for(lambda: status(daemon)["training"]["state"] == "stopped", 20, "stopped")
    assert rig.trainer_pid == 0
    daemon.stop()
    daemon.start()
    daemon.wait_for(lambda: (daemon.status() or {}).get("training", {}).get("state") == "stopped", 20, "still stopped")
    assert rig.trainer_pid == 0


@pytest.mark.slow
def test_a_start_by_hand_is_guarded_though_training_was_stopped(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 30)
    seen = len(daemon.events())
    rig.trainer_flags = ["--ckpt.resume-step", str(rig.saved[-1])]
    rig.start_by_hand()
    daemon.wait_event("trainer-attached", 60, after=seen)
    now = status(daemon)  # the last look at the processes may be older than this
    assert now["training"]["alive"], now["training"]
    assert now["training"]["supervision"] == "attach"
    assert not [r for r in now["reasons"] if r["severity"] == "critical"], now["reasons"]
    pid = rig.trainer_pid
    daemon.wait_event("desired-changed", 10, after=seen, desired="running")
    found = daemon.wait_for(
        lambda: status(daemon)["training"] if status(daemon)["training"]["pid"] else None, 20, "pid"
    )
    assert (found["pid"], found["supervision"]) == (pid, "attach")
    busy = daemon.command("start")
    assert (busy.returncode, f"pid {pid}" in busy.stderr) == (75, True), busy.stderr
    assert len(rig.starts) == 2
    rig.never_two()


@pytest.mark.slow
def test_stop_after_the_next_save_outlives_podwatch(rig: Rig) -> None:
    daemon = rig.daemon().start()
    pid = running(daemon, rig, step=5)
    rig.order(wait=True)  # no further save before we let it go on, however slow this machine is
    daemon.wait_for((rig.control / "waits").exists, 20, "the trainer stands between two steps")
    newest = rig.saved[-1]
    daemon.wait_for(lambda: status(daemon)["checkpoints"]["newest_complete_step"] == newest, 30, "a set")
    assert daemon.command("stop-training", "--after-save").returncode == 0
    daemon.stop(signal.SIGKILL)
    assert alive(pid)
    seen = len(daemon.events())
    daemon.start()
    daemon.wait_event("daemon-started", 60, after=seen)

    def to_stop() -> bool:  # the headline: training runs; after half a minute on a slow machine, that it makes no step
        headline = " ".join(daemon.command("status").stdout.partition("\n\n")[0].split())
        return headline.startswith(("TRAINING IS RUNNING", "NO STEP")) and "STOPS it after its next save" in headline

    daemon.wait_for(to_stop, 20, "the trainer is seen, and will be stopped")
    rig.obey()
    daemon.wait_event("trainer-stopped", 90, after=seen)
    assert max(rig.saved) > newest
    daemon.wait_for(lambda: status(daemon)["training"]["state"] == "stopped", 20, "stopped")
    assert len(rig.starts) == 1


@pytest.mark.slow
def test_a_wait_for_the_end_of_training_ends_with_it_or_with_the_request(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    rig.order(wait=True)
    daemon.wait_for((rig.control / "waits").exists, 20, "the trainer stands between two steps")
    newest = rig.saved[-1]  # known before the request: else it is the next save that the stop waits for
    daemon.wait_for(lambda: status(daemon)["checkpoints"]["newest_complete_step"] == newest, 30, "a set")
    words = ("stop-training", "--after-save", "--wait")
    with ThreadPoolExecutor() as beside:
        waits = beside.submit(daemon.command, *words)
        daemon.wait_event("desired-changed", 30, desired="stopped")
        assert daemon.command("start").returncode == 0
        cancelled = waits.result(60)
        assert (cancelled.returncode, "cancelled" in cancelled.stderr) == (75, True), cancelled.stderr
        seen = len(daemon.events())
        waits = beside.submit(daemon.command, *words)
        daemon.wait_event("desired-changed", 30, after=seen, desired="stopped")
        rig.obey()
        done = waits.result(120)
    assert (done.returncode, done.stdout) == (0, "training is stopped\n"), done.stderr
    assert len(rig.starts) == 1


@pytest.mark.slow
def test_training_that_finishes_while_a_stop_waits_is_finished_and_its_engine_is_ended(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    rig.order(wait=True)
    daemon.wait_for((rig.control / "waits").exists, 20, "the trainer stands between two steps")
    newest = rig.saved[-1]  # known before the request: else it is the next save that the stop waits for
    daemon.wait_for(lambda: status(daemon)["checkpoints"]["newest_complete_step"] == newest, 30, "a set")
    engine = rig.engine_pid
    with ThreadPoolExecutor() as beside:
        waits = beside.submit(daemon.command, "stop-training", "--after-save", "--wait")
        daemon.wait_event("desired-changed", 30, desired="stopped")
        rig.order(say=["Orchestrator finished.", "RL trainer finished!"], exit=0)
        done = waits.result(120)
    assert (done.returncode, done.stdout) == (0, "training is finished\n"), done.stderr
    daemon.wait_event("trainer-finished", 10)
    assert engine
    assert not alive(engine)
    assert status(daemon)["daemon"]["desired"] == "finished"
    assert len(rig.starts) == 1


def test_training_that_finishes_after_podwatch_was_killed_while_a_stop_waited(rig: Rig) -> None:
    daemon = rig.daemon().start()
    pid = running(daemon, rig, step=5)
    daemon.wait_for(lambda: log_is_journaled(rig), 20, "how far the log is read goes to the journal")
    rig.order(wait=True)
    daemon.wait_for((rig.control / "waits").exists, 20, "the trainer stands between two steps")
    newest = rig.saved[-1]  # known before the request: else it is the next save that the stop waits for
    daemon.wait_for(lambda: status(daemon)["checkpoints"]["newest_complete_step"] == newest, 30, "a set")
    assert daemon.command("stop-training", "--after-save").returncode == 0
    daemon.stop(signal.SIGKILL)
    rig.order(finish=True)
    daemon.wait_for(lambda: not alive(pid), 30, "the trainer finished while nobody looked")
    seen = len(daemon.events())
    daemon.start()
    daemon.wait_event("trainer-finished", 60, after=seen)
    assert status(daemon)["training"]["state"] == "finished"
    assert len(rig.starts) == 1


@pytest.mark.slow
def test_a_run_that_finishes_while_no_podwatch_runs_is_not_started_again(rig: Rig) -> None:
    """Exit code 0 below a target nobody knows: only its own last words tell."""
    daemon = rig.daemon().start()
    pid = running(daemon, rig, step=5)
    daemon.wait_for(lambda: log_is_journaled(rig), 20, "how far the log is read goes to the journal")
    daemon.stop(signal.SIGKILL)
    rig.order(finish=True)
    daemon.wait_for(lambda: not alive(pid), 30, "the trainer finished while nobody looked")
    seen = len(daemon.events())
    daemon.start()
    daemon.wait_event("trainer-finished", 60, after=seen)
    assert len(rig.starts) == 1
    assert status(daemon)["training"]["state"] == "finished"
    assert not [e for e in daemon.events()[seen:] if e["podwatch_event"] == "incident-opened"]
