"""Maintenance and observing: everything is seen and said, and nothing is killed, started or removed."""

import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.asking import confirmed, kill_engine, messages, reasons, running, status, wait_reason
from tests.support.daemon import DaemonProcess
from tests.support.nvml import GIB
from tests.support.rig import Rig, alive

pytestmark = pytest.mark.slow


def get(daemon: DaemonProcess, path: str) -> str:
    with urllib.request.urlopen(status(daemon)["daemon"]["http_url"] + path, timeout=30) as answer:
        return str(answer.read().decode())


def first_lines(daemon: DaemonProcess) -> str:
    """The verdict, which may be several lines long."""
    return daemon.command("status").stdout.split("\n\n")[0].replace("\n", " ")


def used(daemon: DaemonProcess) -> int | None:
    """What GPU 0 holds; None while podwatch does not see it."""
    gpus = status(daemon)["gpus"]
    return int(gpus[0]["memory_used_bytes"]) if gpus else None


def test_a_pause_holds_through_a_restart_of_podwatch_and_what_was_found_is_done_after_it(rig: Rig) -> None:
    daemon = rig.daemon().start()
    pid = running(daemon, rig, step=20)
    daemon.wait_event("detector-armed", 20, detector="silent-death:gpu0")
    paused = daemon.command("pause", "--for", "2h", "--reason", "new driver")
    assert paused.returncode == 0, paused.stderr
    assert "paused until" in paused.stdout
    assert "(new driver)" in paused.stdout
    kill_engine(rig)
    daemon.wait_for(lambda: reasons(daemon).get("silent-death", {}).get("confirmed"), 30, "the finding is confirmed")
    would = daemon.wait_event("finding-raised", 10, kind="silent-death")
    assert would["event"].startswith("paused: would restart because ")

    daemon.wait_for(lambda: "PAUSED until" in first_lines(daemon), 20, "status says so")
    assert reasons(daemon)["paused"]["severity"] == "info"
    pause = status(daemon)["daemon"]["pause"]
    assert (pause["reason"], pause["held_by"]) == ("new driver", "")
    assert "podwatch_paused 1.0" in get(daemon, "/metrics")

    daemon.stop(signal.SIGKILL)
    seen = len(daemon.events())
    daemon.start()
    assert "paused until" in daemon.wait_event("daemon-started", 20, after=seen)["event"]
    assert status(daemon)["daemon"]["pause"]["reason"] == "new driver"
    wait_reason(daemon, "silent-death")
    assert rig.trainer_pid == pid
    assert not messages(daemon, "incident-opened")
    assert len(rig.starts) == 1

    done = daemon.command("unpause")
    assert (done.returncode, done.stdout.strip()) == (0, "podwatch acts again")
    daemon.wait_event("incident-closed", 30, after=seen)
    assert not alive(pid)
    assert len(rig.starts) == 2
    assert status(daemon)["daemon"]["pause"] is None
    assert "podwatch was not paused" in daemon.command("unpause").stdout

    assert daemon.stop() == 0
    replayed = daemon.command("replay")
    assert replayed.returncode == 0, replayed.stderr
    assert "WOULD RESTART: silent-death gpu0" in replayed.stdout, "the recording tells of the same death"


def test_a_restart_under_way_waits_between_stop_and_start(rig: Rig) -> None:
    daemon = rig.daemon(recovery__backoff_min="20s", recovery__backoff_max="20s").start()  # a slow `pause` takes 3
    running(daemon, rig, step=20)
    seen = len(daemon.events())
    rig.order(exit=1, once=True)
    daemon.wait_event("incident-opened", 20, after=seen)
    confirmed(daemon, seen)
    seen = len(daemon.events())
    rig.order(exit=1, once=True)
    daemon.wait_event("incident-opened", 20, after=seen)
    # The second failure in a row waits before it is tried again.
    daemon.wait_for(lambda: status(daemon)["recovery"]["phase"] == "backoff", 20, "stopped, and not yet started")
    assert daemon.command("pause").returncode == 0
    assert status(daemon)["recovery"]["phase"] == "paused"
    assert status(daemon)["recovery"]["next_try_at"] is None, "no try is announced"
    time.sleep(2.5)
    assert not rig.trainer_pid
    starts = len(rig.starts)
    assert starts == 2
    # What a person asks for is done all the same; what follows it is podwatch's own again.
    assert daemon.command("start").returncode == 0
    daemon.wait_for(lambda: rig.trainer_pid, 20, "the start that was asked for")
    assert len(rig.starts) == starts + 1
    daemon.wait_for(lambda: status(daemon)["recovery"]["phase"] in ("confirming", "running"), 20, "it is watched")
    rig.kill("trainer")
    wait_reason(daemon, "trainer-exited")
    time.sleep(0.5)
    assert len(rig.starts) == starts + 1
    assert daemon.command("unpause").returncode == 0
    daemon.wait_for(lambda: rig.trainer_pid, 30, "the start that was due")


def test_a_pause_whose_time_is_over_goes_on_while_others_hold_the_gpus(rig: Rig) -> None:
    daemon = rig.daemon(gpu__deadline="10s").start()  # who does not see the GPUs ends the pause
    running(daemon, rig, step=20)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_for(lambda: status(daemon)["training"]["state"] == "stopped", 20, "stopped")
    daemon.wait_for(lambda: not rig.trainer_pid and not rig.engine_pid, 10, "nothing left")
    daemon.wait_for(lambda: used(daemon) == 0, 10, "the cards show it")
    rig.world.set_memory(0, 30 * GIB)
    daemon.wait_for(lambda: used(daemon), 10, "others hold GPU 0")
    seen = len(daemon.events())
    assert daemon.command("pause", "--for", "1s").returncode == 0

    def goes_on() -> bool:
        return any("in use: gpu0 holds" in text for text in messages(daemon, "paused", seen))

    daemon.wait_for(goes_on, 20, "the pause expires, and continues")
    daemon.wait_for(lambda: reasons(daemon)["paused"]["severity"] == "warning", 10, "that is a warning")
    assert "gpu0 holds" in status(daemon)["daemon"]["pause"]["held_by"]
    rig.world.set_memory(0, 0)
    assert "has expired" in daemon.wait_event("unpaused", 20, after=seen)["event"]
    assert status(daemon)["daemon"]["pause"] is None
    for wrong in (("--for", "soon"), ("--for", "0s"), ("--for", "60d")):
        refused = daemon.command("pause", *wrong)
        assert refused.returncode == 64, (wrong, refused.stderr)
        assert len(refused.stderr.splitlines()) == 1


def test_observe_only_says_what_it_would_do(rig: Rig) -> None:
    daemon = rig.daemon().start()
    pid = running(daemon, rig, step=20)
    daemon.wait_event("detector-armed", 20, detector="silent-death:gpu0")
    daemon.stop()
    there = {p for p in rig.output.parent.rglob("*") if p.is_dir()}
    recorded = sum(p.stat().st_size for p in rig.root.glob("state/*/recording/*"))

    watching = rig.daemon(mode="observe", record__enabled=False, disk__prune_above="0.0001%", disk__prune_to="0.00001%")
    seen = len(watching.events())
    watching.start()
    watching.wait_event("trainer-adopted", 20, after=seen)
    assert status(watching)["daemon"]["mode"] == "observe"
    kill_engine(rig)
    would = watching.wait_event("finding-raised", 20, after=seen, kind="silent-death")
    assert would["event"].startswith("mode observe: would restart because ")
    time.sleep(1.0)
    assert rig.trainer_pid == pid
    rig.kill("trainer")
    watching.wait_event("finding-raised", 20, after=seen, kind="trainer-exited")
    time.sleep(1.0)
    assert not rig.trainer_pid
    assert len(rig.starts) == 1
    told = {e["podwatch_event"] for e in watching.events()[seen:]}
    assert not told & {
        "incident-opened", "trainer-stopping", "trainer-starting", "quarantined", "pruned", "desired-changed",
    }  # fmt: skip
    assert recorded == sum(p.stat().st_size for p in rig.root.glob("state/*/recording/*")) > 0
    assert there <= {p for p in rig.output.parent.rglob("*") if p.is_dir()}, "nothing was removed or renamed"


def test_a_stop_that_an_operator_asks_for_is_carried_out_in_mode_observe_too(rig: Rig) -> None:
    """Also after its save comes, and over a restart of podwatch; `start` cancels it before."""
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    daemon.stop()
    seen = len(daemon.events())
    watching = rig.daemon(mode="observe").start()
    watching.wait_event("trainer-adopted", 20, after=seen)
    rig.order(wait=True)
    watching.wait_for((rig.control / "waits").exists, 20, "the trainer stands between two steps")
    words = ("stop-training", "--after-save", "--wait")
    with ThreadPoolExecutor() as beside:
        waits = beside.submit(watching.command, *words)
        watching.wait_event("desired-changed", 30, after=seen, desired="stopped")
        started = watching.command("start")
        assert (started.returncode, "cancelled" in started.stdout) == (0, True), started
        cancelled = waits.result(60)
        assert (cancelled.returncode, "cancelled" in cancelled.stderr) == (75, True), cancelled.stderr
        seen = len(watching.events())
        waits = beside.submit(watching.command, *words)
        watching.wait_event("desired-changed", 30, after=seen, desired="stopped")
        assert watching.command("status").stdout, "the request before this one has its answer, too"
        watching.stop(signal.SIGKILL)
        watching.start()
        watching.wait_event("trainer-adopted", 30, after=seen)
        rig.obey()
        done = waits.result(120)
    assert (done.returncode, done.stdout) == (0, "training is stopped\n"), done.stderr
    assert len(rig.starts) == 1
