"""Which start wrote a checkpoint, and whether it is on the line that is trained: the answer stays right when podwatch
is killed around a start, when its clock is set, and when its journal and its records are lost."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import confirmed, published, running, status, wait_reason
from tests.support.checkpoints import write_prime_rl_step
from tests.support.daemon import DaemonProcess
from tests.support.resuming import quarantine_of, stands, steps_of
from tests.support.rig import Rig
from tests.support.store_layout import newest_pointer

pytestmark = pytest.mark.slow

HOUR = 3600


def starts_of(rig: Rig) -> list[dict[str, Any]]:
    """Those of podwatch that were seen to run, as run.json lists them."""
    document = json.loads((rig.root / "state" / rig.run_id / "run.json").read_text())
    return [start for start in document["starts"] if start["by"] == "podwatch" and start.get("seen", True)]


def held(daemon: DaemonProcess) -> dict[int, bool]:
    """Of each complete checkpoint whether it is held back."""
    listed = daemon.command("checkpoints", "--json")
    assert listed.returncode == 0, listed.stderr
    sets = json.loads(listed.stdout)["sets"]
    return {s["step"]: bool(s["held_back"]) for s in sets if s["completeness"] == "complete"}


def stopped(daemon: DaemonProcess, rig: Rig) -> tuple[int, list[int]]:
    """Training has saved some steps and was stopped: a step in the middle, and those above it."""
    running(daemon, rig, step=20)
    stands(rig, daemon)
    assert daemon.command("stop-training", "--wait").returncode == 0
    daemon.wait_for(lambda: not rig.trainer_pid, 60, "training is stopped")
    return rig.saved[1], rig.saved[2:]


def resumes_from_the_newest(daemon: DaemonProcess, rig: Rig, base: int) -> None:
    """The start from ``base`` saves, dies, and is resumed from its own newest save."""
    rig.obey()
    daemon.wait_for(lambda: rig.saved[-1] >= base + 10, 60, "the new line saves")
    newest = stands(rig, daemon)
    assert not any(held(daemon).values())
    before = len(rig.starts)
    rig.kill("trainer")
    daemon.wait_for(lambda: len(rig.starts) > before and rig.trainer_pid, 60, "it is started again")
    assert steps_of(rig)[-1] == newest
    rig.never_two()


@pytest.mark.parametrize("at", ["asked", "quarantined", "trainer-starting", "trainer-started"])
def test_podwatch_is_killed_around_a_start_from_a_step_below(rig: Rig, elsewhere: Path, at: str) -> None:
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", sync__upload_gap="0s").start()
    base, above = stopped(daemon, rig)
    published(daemon, step=above[-1])
    seen = len(daemon.events())
    rig.order(wait=True)
    assert daemon.command("start", "--step", str(base)).returncode == 0
    if at != "asked":
        daemon.wait_event(at, 60, after=seen)
    daemon.stop(signal.SIGKILL)

    seen = len(daemon.events())
    daemon.start()
    daemon.wait_for(lambda: len(rig.starts) >= 2 and rig.trainer_pid, 60, "training is started")
    assert set(steps_of(rig)[1:]) == {base}
    resumes_from_the_newest(daemon, rig, base)
    first, *others = starts_of(rig)
    assert [start["from_step"] for start in (first, *others)] == steps_of(rig)
    assert {start["branch"] for start in others} == {others[-1]["branch"]} != {first["branch"]}
    branch = others[-1]["branch"]

    def followed() -> bool:
        pointer = newest_pointer(elsewhere)
        return bool(pointer["lineage"] == branch and pointer["step"] > base)

    daemon.wait_for(followed, 60, "the pointer names a checkpoint of the new line")


def returned(daemon: DaemonProcess, rig: Rig) -> tuple[int, list[int]]:
    """Training was started from a step below, stopped, and what it left was moved back: that step, and what it left."""
    base, above = stopped(daemon, rig)
    rig.order(wait=True)
    assert daemon.command("start", "--step", str(base)).returncode == 0
    daemon.wait_for(lambda: len(rig.starts) == 2 and rig.trainer_pid, 60, "it starts")
    assert daemon.command("stop-training", "--wait").returncode == 0
    daemon.wait_for(lambda: not rig.trainer_pid, 60, "it is stopped")
    number = quarantine_of(daemon, above[-1])
    daemon.wait_for(lambda: daemon.command("quarantine", "return", str(number)).returncode == 0, 30, "it is returned")
    return base, above


def without_records(rig: Rig) -> None:
    for records in rig.root.rglob("records"):
        shutil.rmtree(records)


def without_journal(rig: Rig) -> None:
    for path in (rig.root / "state" / rig.run_id).glob("journal.sqlite*"):
        path.unlink()


def without_run_file(rig: Rig) -> None:
    (rig.root / "state" / rig.run_id / "run.json").unlink()


LOSSES: dict[str, tuple[Callable[[Rig], None], ...]] = {
    "journal": (without_journal,),
    "records": (without_records,),
    "run.json, of which there is a copy": (without_run_file,),
    "all three": (without_journal, without_records, without_run_file),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_was_left_stays_left_whatever_is_lost(rig: Rig, loss: str) -> None:
    daemon = rig.daemon().start()
    base, above = returned(daemon, rig)
    answer = {step: step in above for step in rig.saved}
    daemon.wait_for(lambda: held(daemon) == answer, 60, "what the start has left is held back")
    daemon.stop(signal.SIGKILL)
    for lose in LOSSES[loss]:
        lose(rig)
    daemon.start()
    daemon.wait_for(lambda: status(daemon)["recovery"]["phase"] == "stopped", 60, "it stays stopped")
    daemon.wait_for(lambda: held(daemon) == answer, 60, "the same is held back")
    assert daemon.command("start").returncode == 0
    daemon.wait_for(lambda: len(rig.starts) == 3 and rig.trainer_pid, 60, "it starts")
    assert steps_of(rig)[-1] == base
    resumes_from_the_newest(daemon, rig, base)


SET_TIME = """import pathlib, time
clock = pathlib.Path(__file__).with_name("clock")
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + int(clock.read_text())
time.time_ns = lambda: real_ns() + int(clock.read_text()) * 10**9
clock.with_name("is-read").touch()
"""


class SetClock:
    """The time of day of a daemon, which its interpreter reads here; the files have the kernel's. (libfaketime also
    changes what monotonic sleeps wait for: set back, they fail.)"""

    def __init__(self, rig: Rig) -> None:
        self._directory = rig.root / "clock-of-the-daemon"
        self._directory.mkdir()
        (self._directory / "sitecustomize.py").write_text(SET_TIME)
        self.set(0)

    def set(self, seconds: int) -> None:
        unfinished = self._directory / "new"
        unfinished.write_text(str(seconds))
        unfinished.replace(self._directory / "clock")

    @property
    def is_read(self) -> bool:
        return (self._directory / "is-read").exists()

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self._directory)}


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
@pytest.mark.parametrize("when", ["before the start", "after the start"])
def test_a_clock_that_is_set_around_a_start_gives_no_save_to_another_one(rig: Rig, seconds: int, when: str) -> None:
    clock = SetClock(rig)
    daemon = rig.daemon(clock.environment()).start()
    base, _ = stopped(daemon, rig)
    if when == "before the start":
        clock.set(seconds)
    seen = len(daemon.events())
    rig.order(wait=True)
    assert daemon.command("start", "--step", str(base)).returncode == 0
    daemon.wait_for(lambda: len(rig.starts) == 2 and rig.trainer_pid, 60, "it starts")
    if when == "after the start":
        clock.set(seconds)
    rig.obey()
    confirmed(daemon, after=seen)
    resumes_from_the_newest(daemon, rig, base)
    assert clock.is_read
    walls = [start["wall"] for start in starts_of(rig)]
    assert walls == sorted(walls), "by the files' clock, which was not set"


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
def test_by_a_clock_that_is_wrong_no_save_of_another_run_is_this_ones(rig: Rig, seconds: int) -> None:
    """It was there half an hour before podwatch: neither resumed from nor called this run's, whatever time it is."""
    write_prime_rl_step(rig.output, 5)
    before = rig.output.stat().st_mtime - HOUR / 2
    for path in rig.output.rglob("*"):
        os.utime(path, (before, before))
    clock = SetClock(rig)
    clock.set(seconds)
    daemon = rig.daemon(clock.environment()).start()
    wait_reason(daemon, "foreign-checkpoints", 60)
    assert clock.is_read, "by this daemon"
    assert not rig.starts
