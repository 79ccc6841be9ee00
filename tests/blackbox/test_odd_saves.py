"""Saves that are not what they look like: fewer files than before, and a rule that requires nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import published, status
from tests.support.daemon import DaemonProcess
from tests.support.resuming import CUSTOM, newest_complete, steps_of
from tests.support.rig import Rig
from tests.support.store_layout import newest_pointer

pytestmark = pytest.mark.slow
NO_RULE = {name: value for name, value in CUSTOM.items() if name.rpartition("__")[2] not in ("require", "last")}
"""``custom`` as an operator writes it who knows only where the steps are."""


def with_store(rig: Rig, store: Path, **changes: Any) -> DaemonProcess:
    return rig.daemon(sync__store=f"file://{store}", sync__upload_gap="0s", **changes).start()


# -- fewer files ------------------------------------------------------------------------------------------------------


def test_a_second_save_that_agrees_makes_fewer_files_the_rule(rig: Rig, elsewhere: Path) -> None:
    rig.trainer_flags += ["--second-file-until", "15"]
    daemon = with_store(rig, elsewhere, **NO_RULE)
    daemon.wait_for(lambda: rig.saved[-1:] >= [40], 60, "several saves with fewer files")
    newest = waits(rig, daemon)
    daemon.wait_for(lambda: newest_complete(daemon) == newest, 10, "the newest is complete")
    published(daemon, 60, step=newest)


def test_a_single_save_with_fewer_files_is_passed_over_and_kept(rig: Rig, elsewhere: Path) -> None:
    """A file of the newest save is lost before podwatch can see it whole: its resume would fail."""
    rig.trainer_flags += ["--second-file-until", "20"]
    daemon = with_store(rig, elsewhere, **NO_RULE)
    rig.order(wait=True, at=21)
    daemon.wait_for(lambda: rig.saved[-1:] == [20], 60, "one save with fewer files")
    daemon.wait_for((rig.control / "waits").exists, 20, "the trainer waits between two steps")
    published(daemon, 60, step=15)
    daemon.wait_for(lambda: listed(daemon, 20)["completeness"] != "complete", 20, "it is seen, and not complete")
    rig.kill("trainer")
    daemon.wait_for(lambda: len(rig.starts) == 2, 60, "it starts again")
    assert steps_of(rig) == [None, 15]
    assert newest_pointer(elsewhere).get("step") == 15
    places = [*rig.output.rglob("step_20"), *(rig.root / "work").rglob("quarantine/*/*-step_20")]
    assert any(list(place.rglob(".metadata")) for place in places), "it is kept"


def waits(rig: Rig, daemon: DaemonProcess) -> int:
    """Make the trainer wait between two steps, whatever podwatch says of its saves; the newest step."""
    rig.order(wait=True)
    daemon.wait_for((rig.control / "waits").exists, 20, "the trainer waits between two steps")
    return rig.saved[-1]


def listed(daemon: DaemonProcess, step: int) -> dict[str, Any]:
    return next((s for s in status(daemon)["checkpoints"]["sets"] if s["step"] == step), {"completeness": "complete"})


# -- no rule ----------------------------------------------------------------------------------------------------------


def test_a_rule_that_requires_nothing_and_marks_no_end_is_refused_by_check(rig: Rig, elsewhere: Path) -> None:
    """A part of the first save could be stored as a checkpoint."""
    failed = []
    for rules in (CUSTOM, NO_RULE):
        checked = rig.daemon(sync__store=f"file://{elsewhere}", **rules).command("check", "--json")
        failed.append({one["name"] for one in json.loads(checked.stdout)["checks"] if one["level"] == "fail"})
    assert failed[1] > failed[0], failed
