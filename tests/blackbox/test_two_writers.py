"""A second trainer started by hand beside ours, in the same output_dir: two writers mix checkpoints."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import looks, published, reasons, running, status
from tests.support.daemon import DaemonProcess
from tests.support.rig import TRAINER, Rig, alive, end_all

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("attaching")]

SECRET = "s3cr3t-s3cr3t-s3cr3t"


def start_second(rig: Rig, name: str = "second", *, waits: bool = False) -> None:
    """From a shell that is gone, with our output_dir. It has locks and orders of its own. ``waits``: it makes no step
    before it is seen: no real trainer saves in its first seconds."""
    control = rig.root / name
    control.mkdir()
    if waits:
        (control / "orders.json").write_text(json.dumps({"wait": True}))
    step = rig.saved[-1]
    argv = [sys.executable, "-S", str(TRAINER), "--output-dir", str(rig.output), "--control", str(control)]
    argv += ["--ckpt.resume-step", str(step), "--trainer.wandb.id", f"WANDB_API_KEY={SECRET}"]
    script = f"setsid {shlex.join(argv)} > {rig.root}/{name}.log 2>&1 < /dev/null &"
    subprocess.run(["sh", "-c", script], check=True, cwd=rig.output.parent)


def second_pid(rig: Rig, name: str = "second") -> int:
    try:
        return int((rig.root / name / "trainer.pid").read_text())
    except (OSError, ValueError):
        return 0


def sets(daemon: DaemonProcess) -> dict[int, dict[str, Any]]:
    return {found["step"]: found for found in status(daemon)["checkpoints"]["sets"]}


def sent(daemon: DaemonProcess, after: int) -> set[int]:
    return {int(e["step"]) for e in daemon.events()[after:] if e["podwatch_event"] == "published"}


def in_store(daemon: DaemonProcess) -> set[int]:
    listed = daemon.command("store", "ls", "--json")
    return {found["step"] for found in json.loads(listed.stdout)["saves"] if not found["problem"]}


def held(daemon: DaemonProcess) -> list[int]:
    return sorted(step for step, found in sets(daemon).items() if found["held_back"])


def two_writers(daemon: DaemonProcess, subject: str) -> dict[str, Any] | None:
    """The finding about who writes, or about the saves that are held back: both can stand beside each other."""
    found = [r for r in status(daemon)["reasons"] if (r["kind"], r["subject"]) == ("two-writers", subject)]
    return found[0] if found else None


def test_two_writers_are_told_and_nothing_of_that_time_is_published(rig: Rig, elsewhere: Path) -> None:
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", sync__upload_gap="0s").start()
    ours = running(daemon, rig, step=10)
    published(daemon)
    rig.order(wait=True)  # ours stands between two steps while the second one starts
    daemon.wait_for((rig.control / "waits").exists, 20, "ours waits")
    before = set(rig.saved[:-1])  # of the last one the second trainer writes a part anew: it resumes there
    daemon.wait_for(lambda: rig.saved[-1] in sent(daemon, 0), 30, "everything of ours is in the store")
    alone = len(daemon.events())
    start_second(rig, waits=True)
    daemon.wait_for(lambda: second_pid(rig), 20, "the second one runs")
    theirs = second_pid(rig)

    def told() -> dict[str, Any] | None:
        found = two_writers(daemon, "writers")
        return found if found and found["severity"] == "critical" else None

    reason = daemon.wait_for(told, 10, "two writers")
    assert f"pid {ours} " in reason["summary"]
    assert f"pid {theirs} " in reason["summary"]
    assert SECRET not in str(status(daemon))
    rig.obey()
    (rig.root / "second" / "orders.json").unlink()

    daemon.wait_for(lambda: len(held(daemon)) >= 3, 30, "saves that are held back")
    assert not before & set(held(daemon)), "what was complete before the second one started is good"
    assert not set(held(daemon)) & sent(daemon, alone)
    says = daemon.command("checkpoints").stdout
    assert "held back: written while a second trainer was running" in says

    end_all(lambda: [p for p in (second_pid(rig),) if p and alive(p)])
    daemon.wait_for(lambda: not told(), 20, "only one is left")
    daemon.wait_for(
        lambda: max(sent(daemon, alone), default=0) > max(held(daemon)), 60, "later saves of ours are published"
    )
    kept = held(daemon)
    assert not set(kept) & sent(daemon, alone)
    reason = daemon.wait_for(lambda: two_writers(daemon, "held"), 10, "what is held is said")
    assert f"podwatch sync --step {kept[-1]}" in reason["suggestion"]

    seen = len(daemon.events())
    daemon.stop()
    daemon.start()
    daemon.wait_event("daemon-started", 60, after=seen)
    assert held(daemon) == kept, "a restart of podwatch forgets nothing"
    done = daemon.command("sync", "--step", str(kept[-1]), "--wait")
    assert done.returncode == 0, done.stderr
    assert f"step {kept[-1]} is in the store" in done.stdout
    assert kept[-1] in in_store(daemon)
    assert kept[-1] not in sent(daemon, alone), "a newer one stays the one to resume from"
    assert kept[-1] not in held(daemon)
    assert len(rig.starts) == 1


def test_two_that_remain_when_ours_is_stopped_are_still_two_writers(rig: Rig) -> None:
    daemon = rig.daemon().start()
    ours = running(daemon, rig, step=10)
    names = ("second", "third")
    for name in names:
        start_second(rig, name)
    daemon.wait_for(lambda: all(second_pid(rig, name) for name in names), 20, "both run")
    pids = [second_pid(rig, name) for name in names]

    def summary() -> str:
        found = two_writers(daemon, "writers")
        return found["summary"] if found and found["severity"] == "critical" else ""

    try:
        daemon.wait_for(lambda: all(f"pid {pid} " in summary() for pid in pids), 30, "both are named")
        assert daemon.command("stop-training", "--wait").returncode == 0
        looks(daemon, 3)
        assert all(f"pid {pid} " in summary() for pid in pids)
        assert f"pid {ours} " not in summary()
        end_all(lambda: [pid for pid in pids[1:] if alive(pid)])
        daemon.wait_for(lambda: not summary(), 30, "only one is left")
    finally:
        end_all(lambda: [pid for pid in pids if alive(pid)])


def test_what_was_held_back_stays_so_where_podwatch_began_without_its_database(rig: Rig, elsewhere: Path) -> None:
    """Their records say it."""
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", sync__upload_gap="0s").start()
    running(daemon, rig, step=10)
    published(daemon)
    start_second(rig)
    daemon.wait_for(lambda: len(held(daemon)) >= 2, 60, "saves that are held back")
    assert daemon.command("stop-training", "--wait").returncode == 0
    end_all(lambda: [p for p in (second_pid(rig), rig.trainer_pid) if p and alive(p)])
    kept, seen = held(daemon), len(daemon.events())
    daemon.stop()
    database = rig.root / "state" / rig.run_id / "journal.sqlite"
    away = database.rename(database.with_name("away"))
    database.mkdir()
    daemon.start()
    daemon.wait_for(lambda: "state-unavailable" in reasons(daemon), 60, "it begins without its database")
    database.rmdir()
    away.rename(database)
    daemon.wait_event("state-recovered", 90, after=seen)
    looks(daemon, 3)
    assert set(kept) <= set(held(daemon)), "a save that only settled after the stop can be one more"
