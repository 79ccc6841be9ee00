"""Training that begins again below, later than its start; and training whose steps nobody sees."""

import json
from typing import Any

import pytest

from tests.support.asking import reasons, running
from tests.support.resuming import CUSTOM, stands, steps_of
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


def in_a_loop(rig: Rig) -> list[str]:
    """A command that starts training again and again by itself, with the arguments of its own start."""
    engine = rig.control / "engine.pid"
    again = f'while :; do "$@"; kill -9 $(cat {engine}); sleep 0.2; done'
    return ["sh", "-c", again, "sh", *rig.command()]


def test_a_loop_in_the_command_that_begins_at_0_again_is_a_finding(rig: Rig) -> None:
    """Training steps from 0, and what it saves takes the place of later steps. The loop brings a new engine within
    ``hold``: to podwatch nothing has died."""
    daemon = rig.daemon(trainer__command=in_a_loop(rig), gpu__hold="8s").start()
    running(daemon, rig, step=20)
    rig.order(exit=1, once=True)
    daemon.wait_for(lambda: len(rig.starts) >= 2, 60, "the loop starts it again")
    rig.order(step_seconds=0.5)  # slower than the sensors
    daemon.wait_for(lambda: lines(rig).count("SUCCESS Step 10 ") >= 2, 60, "it passes steps that it had passed")
    assert not steps_of(rig)[1], "it begins at 0"
    said = daemon.wait_for(lambda: reasons(daemon).get("going-backwards"), 10, "going-backwards")
    assert said["severity"] == "critical"
    assert "sh (process" in said["summary"], "it names what restarted it"


def lines(rig: Rig) -> str:
    return "".join(path.read_text(errors="replace") for path in rig.root.rglob("train.log*"))


def test_a_trainer_that_is_killed_is_not_out_of_memory(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    seen = len(daemon.events())
    rig.kill("trainer")
    opened = daemon.wait_event("incident-opened", 60, after=seen)
    assert opened["kind"] == "trainer-exited"
    daemon.wait_event("incident-closed", 60, after=seen)
    assert [e for e in daemon.events()[seen:] if e.get("finding") == "out-of-memory"] == []


def test_a_trainer_without_visible_steps_that_saves_has_worked(rig: Rig) -> None:
    """It saves at each start and dies: what podwatch cannot see is unknown, and no reason to give up."""
    rig.trainer_flags = ["--no-step-lines", "--step-seconds", "0.2"]
    rules: dict[str, Any] = {**CUSTOM, "trainer__startup_patience": "2s"}
    daemon = rig.daemon(recovery__retry_after_give_up="1h", **rules).start()
    for number in range(1, 4):
        daemon.wait_for(lambda n=number: len(rig.starts) == n and rig.trainer_pid, 60, "it starts")
        before = max(rig.saved, default=0)
        daemon.wait_for(lambda b=before: max(rig.saved, default=0) >= b + 10, 60, "it saves twice")
        newest = stands(rig, daemon)
        (rig.control / "waits").unlink()
        rig.kill("trainer")
        rig.obey()
        daemon.wait_for(lambda n=number: len(rig.starts) > n or "gave-up" in reasons(daemon), 60, "what follows")
        assert "gave-up" not in reasons(daemon)
        assert steps_of(rig)[-1] == newest


def test_steps_that_nobody_saw_are_not_counted_as_lost(rig: Rig) -> None:
    rig.trainer_flags = ["--no-step-lines", "--step-seconds", "0.2"]
    daemon = rig.daemon(**CUSTOM).start()
    daemon.wait_for(lambda: rig.saved[-1:] >= [10], 60, "it saves")
    stands(rig, daemon)
    rig.kill("trainer")
    daemon.wait_event("incident-opened", 60)
    rig.obey()
    daemon.wait_event("incident-closed", 60)
    listed = daemon.command("incidents", "--json")
    assert listed.returncode == 0, listed.stderr
    (incident,) = json.loads(listed.stdout)["incidents"]
    assert incident["lost_steps"] is None
