"""Saves that were there before: of training that podwatch found running, and of the start that a restart resumed."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.asking import looks, published, reasons, running
from tests.support.resuming import stands, steps_of
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("attaching")
def test_the_death_of_training_that_was_found_running_resumes_from_its_save(rig: Rig, elsewhere: Path) -> None:
    """It saved before podwatch's first look and not since: the save is this run's all the same."""
    rig.start_by_hand()
    rig.daemon().wait_for(lambda: len(rig.saved) >= 2, 60, "it saves before any podwatch is there")
    rig.order(wait=True)
    waits = rig.control / "waits"
    daemon = rig.daemon(sync__store=f"file://{elsewhere}")
    daemon.wait_for(waits.exists, 60, "it waits between two steps")
    newest = rig.saved[-1]
    daemon.start()
    daemon.wait_event("trainer-attached", 60)
    looks(daemon)
    assert "foreign-checkpoints" not in reasons(daemon)
    published(daemon, 60, step=newest)
    rig.kill("trainer")
    rig.obey()
    daemon.wait_for(lambda: len(rig.starts) == 2, 60, "it is started again")
    assert steps_of(rig)[-1] == newest
    assert "restart-blocked" not in reasons(daemon)


def test_the_save_that_a_start_resumed_is_stored_once(rig: Rig, elsewhere: Path) -> None:
    """What training writes for its rollout servers as it resumes does not make it another save."""
    daemon = rig.daemon(sync__store=f"file://{elsewhere}").start()
    running(daemon, rig, step=5)
    newest = stands(rig, daemon)
    published(daemon, 60, step=newest)
    assert daemon.command("restart").returncode == 0
    rig.obey()
    running(daemon, rig, step=newest + 10, after=len(daemon.events()) - 1)
    published(daemon, 60, step=stands(rig, daemon))
    stored = Counter(e["step"] for e in daemon.events() if e["podwatch_event"] == "published")
    assert stored[newest] == 1, stored
