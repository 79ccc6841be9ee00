"""When podwatch stops to try, by count and by time; what it says, and that it goes on guarding the checkpoints."""

import itertools
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import confirmed, published, reasons, running, says, status, wait_reason
from tests.support.daemon import DaemonProcess
from tests.support.resuming import newest_complete, stands, steps_of
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

HOUR = "1h"
FAULT = "RuntimeError: CUDA error: an illegal memory access was encountered"
"""What is no fault of the checkpoint: each restart resumes from the same one."""


def budget(restarts: int, seconds: str) -> dict[str, Any]:
    return {"recovery__budget_restarts": restarts, "recovery__budget_time": seconds}


def gave_up(daemon: DaemonProcess) -> list[float]:
    found = [event for event in daemon.events() if event["podwatch_event"] == "gave-up"]
    return [datetime.fromisoformat(event["timestamp"]).timestamp() for event in found]


def rests(daemon: DaemonProcess) -> None:
    daemon.wait_for(lambda: status(daemon)["recovery"]["phase"] == "gave-up", 60, "it rests")


def test_a_command_that_never_worked_is_given_up_after_two_attempts_and_its_last_lines_are_shown(rig: Rig) -> None:
    lines = [f"line {number} of a quarrel" for number in range(40)]
    rig.order(fail_load=[0], say=lines)
    daemon = rig.daemon(recovery__retry_after_give_up=HOUR).start()
    daemon.wait_event("gave-up", 60)
    said = wait_reason(daemon, "gave-up")
    assert said["severity"] == "critical"
    assert [line for line in lines if f"{line}\n" in said["suggestion"] + "\n"] == lines[-30:]
    assert len(rig.starts) == 2
    rests(daemon)
    says(daemon, 2)
    time.sleep(2.0)  # four of the longest pauses between attempts
    assert len(rig.starts) == 2


def test_a_count_that_is_used_up_waits_for_the_time(rig: Rig) -> None:
    daemon = rig.daemon(recovery__retry_after_give_up=HOUR, **budget(1, "6s")).start()
    running(daemon, rig, step=5)
    ordered = time.time()
    rig.order(exit=3, say=[FAULT])
    daemon.wait_event("gave-up", 120)
    (at,) = gave_up(daemon)
    assert at - ordered >= 6.0
    assert len(rig.starts) > 1, "the count alone does not suffice"
    rests(daemon)


def test_a_time_that_is_used_up_waits_for_the_count(rig: Rig) -> None:
    daemon = rig.daemon(recovery__retry_after_give_up=HOUR, **budget(4, "0s")).start()
    running(daemon, rig, step=5)
    rig.order(exit=3, say=[FAULT])
    daemon.wait_event("gave-up", 120)
    assert len(rig.starts) == 4, "each failed once"
    rests(daemon)


def test_a_calm_period_makes_the_count_begin_again(rig: Rig) -> None:
    daemon = rig.daemon(recovery__retry_after_give_up=HOUR, recovery__calm="1s", **budget(2, "0s")).start()
    for _ in range(3):
        seen = len(daemon.events())
        step = max(rig.saved, default=0)
        daemon.wait_for(lambda least=step + 30: max(rig.saved, default=0) >= least, 60, "many steps without a failure")
        rig.order(exit=3, once=True)
        daemon.wait_event("incident-opened", 60, after=seen)
        confirmed(daemon, after=seen)
    assert gave_up(daemon) == []
    rig.order(exit=3, say=[FAULT])
    daemon.wait_event("gave-up", 60)
    assert len(rig.starts) >= 4


@pytest.mark.parametrize("every", ["1s", "0s"])
def test_after_giving_up_it_tries_once_in_a_while_or_never(rig: Rig, every: str) -> None:
    daemon = rig.daemon(recovery__retry_after_give_up=every, **budget(2, "0s")).start()
    running(daemon, rig, step=5)
    newest = stands(rig, daemon)
    rig.order(exit=3, say=[FAULT])
    daemon.wait_event("gave-up", 60)
    starts = len(rig.starts)
    if every == "0s":
        rig.obey()
        time.sleep(3.0)  # six of the longest pauses between attempts
        assert len(rig.starts) == starts
        assert daemon.command("start").returncode == 0, "a person's start does not wait for it"
    else:
        daemon.wait_for(lambda: len(gave_up(daemon)) >= 3, 60, "two more attempts, each given up again")
        attempts = gave_up(daemon)
        assert all(later - earlier >= 0.9 for earlier, later in itertools.pairwise(attempts))
        rig.obey()
    daemon.wait_for(lambda: rig.saved[-1] > newest, 60, "it trains again")
    daemon.wait_for(lambda: "gave-up" not in reasons(daemon), 60, "and nothing says that podwatch gave up")
    assert set(steps_of(rig)) == {None, newest}


def test_after_giving_up_the_checkpoints_are_stored_and_kept_and_the_next_podwatch_tries_nothing(
    rig: Rig, elsewhere: Path
) -> None:
    store = {"sync__store": f"file://{elsewhere}", "sync__upload_gap": "0s"}
    daemon = rig.daemon(recovery__retry_after_give_up=HOUR, **budget(2, "0s"), **store).start()
    running(daemon, rig, step=10)
    rig.order(exit=3, say=[FAULT])
    daemon.wait_event("gave-up", 60)
    rests(daemon)
    newest, starts = rig.saved[-1], len(rig.starts)
    daemon.wait_for(lambda: newest_complete(daemon) == newest, 60, "the newest is complete")
    published(daemon, 60, step=newest)
    pruned = daemon.command("prune")
    assert pruned.returncode == 0, pruned.stderr
    assert newest in rig.saved
    daemon.stop()
    daemon.start()
    assert wait_reason(daemon, "gave-up", 60)["severity"] == "critical"
    rig.obey()
    time.sleep(2.0)  # four of the longest pauses between attempts
    assert len(rig.starts) == starts
    started = daemon.command("start")
    assert started.returncode == 0, started.stderr
    daemon.wait_for(lambda: rig.saved[-1] > newest, 60, "a person's start trains")
    published(daemon, 60, after=newest)
