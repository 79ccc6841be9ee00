"""A trainer that does not continue where it was told to, or where nobody can see whether it does."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import published, reasons, running, status, wait_reason
from tests.support.daemon import DaemonProcess
from tests.support.resuming import CUSTOM, quarantines, stands, steps_of
from tests.support.rig import Rig
from tests.support.store_layout import newest_pointer

pytestmark = pytest.mark.slow


def begins_wrong(rig: Rig, daemon: DaemonProcess, newest: int, below: int) -> str:
    """Training dies, and each start from now on begins so many steps below the one that it is told; at 0 if there are
    not so many. What podwatch makes of the next start."""
    seen = len(daemon.events())
    rig.order(begin=max(0, newest - below), step_seconds=0.3)
    rig.kill("trainer")

    def verdict() -> str:
        for event in daemon.events()[seen:]:
            if event["podwatch_event"] == "trainer-confirmed":
                return "confirmed"
            if event["podwatch_event"] == "finding-raised" and event["finding"] == "resumed-wrong":
                return f"resumed-wrong, {event['level']}"
        return ""

    return str(daemon.wait_for(verdict, 60, "podwatch has judged the start"))


@pytest.mark.parametrize("below", [1000, 7])
@pytest.mark.parametrize("rules", [pytest.param(CUSTOM, id="custom"), pytest.param({}, id="prime-rl")])
def test_it_is_critical_stops_that_trainer_and_keeps_what_it_would_have_overwritten(
    rig: Rig, rules: dict[str, Any], below: int
) -> None:
    """Markers of steps that were reached before do not hide where prime-rl begins."""
    daemon = rig.daemon(**rules).start()
    running(daemon, rig, step=20)
    newest = stands(rig, daemon)
    assert begins_wrong(rig, daemon, newest, below) == "resumed-wrong, critical"
    second = rig.starts[1]["pid"]
    daemon.wait_for(lambda: rig.trainer_pid != second, 60, "the trainer that began wrong is ended")
    kept = set(rig.saved) | {step for steps in quarantines(daemon).values() for step in steps}
    assert newest in kept, "it is never deleted"
    assert steps_of(rig)[1] == newest


@pytest.mark.parametrize("below", [1000, 7])
def test_it_never_steps_back_because_the_trainer_ignored_its_argument(rig: Rig, elsewhere: Path, below: int) -> None:
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", sync__upload_gap="0s", **CUSTOM).start()
    running(daemon, rig, step=20)
    newest = stands(rig, daemon)
    published(daemon, 60, step=newest)
    begins_wrong(rig, daemon, newest, below)
    moved = quarantines(daemon)  # at the resume: what the death left unfinished above that step
    assert newest not in {step for steps in moved.values() for step in steps}
    daemon.wait_for(lambda: len(rig.starts) > 2 or settled(daemon), 60, "what follows is decided")
    assert set(steps_of(rig)) == {None, newest}
    assert quarantines(daemon) == moved, "nothing is moved because of it"
    assert newest in rig.saved
    assert newest_pointer(elsewhere)["step"] == newest


def settled(daemon: DaemonProcess) -> bool:
    """It waits for a person."""
    return status(daemon)["recovery"]["phase"] in ("blocked", "gave-up", "stopped")


def test_a_start_whose_step_nobody_sees_is_unconfirmed_until_its_next_save(rig: Rig) -> None:
    rig.trainer_flags = ["--no-step-lines"]
    rules: dict[str, Any] = {**CUSTOM, "trainer__startup_patience": "2s"}
    daemon = rig.daemon(**rules).start()
    daemon.wait_for(lambda: rig.saved[-1:] >= [15], 60, "a few saves")
    newest = stands(rig, daemon)
    saved = rig.saved
    rig.kill("trainer")
    daemon.wait_for(lambda: len(rig.starts) == 2 and rig.trainer_pid, 60, "it starts again")
    assert steps_of(rig) == [None, newest]
    said = wait_reason(daemon, "resume-unconfirmed", 60)
    assert said["severity"] == "warning"
    assert rig.saved == saved
    rig.obey()
    daemon.wait_for(lambda: rig.saved[-1] > newest, 60, "its next save")
    daemon.wait_for(lambda: "resume-unconfirmed" not in reasons(daemon), 60, "the finding ends with the next save")
    assert len(rig.starts) == 2
