"""Directories of the run that another user replaced, with a real daemon: nothing is changed, nothing hangs, the trainer
is still adopted and watched, and everything continues after the repair (promise 9)."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.asking import confirmed, reasons, running, wait_reason
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.root
E = 61_018


def repaired(daemon: DaemonProcess) -> None:
    daemon.wait_for(lambda: "directory-replaced" not in reasons(daemon), 30, "the finding is gone")


def forged(hidden: Path, run: str) -> None:
    """As podwatch's own directory, of another user's, with a FIFO as the copy of run.json."""
    (hidden / run / "quarantine" / "1").mkdir(parents=True)
    os.mkfifo(hidden / run / "run.json")
    for directory, _, names in os.walk(hidden):
        for path in (Path(directory), *(Path(directory) / n for n in names)):
            os.chown(path, E, E)


@pytest.mark.slow
def test_a_forged_directory_of_ours_stops_every_change_and_no_adoption(rig: Rig) -> None:
    daemon = rig.daemon().start()
    confirmed(daemon)
    trainer = rig.trainer_pid
    daemon.stop()
    hidden = rig.output.parent / ".podwatch"
    hidden.rename(hidden.with_name("kept"))
    forged(hidden, rig.output.name)
    daemon.start()
    reason = wait_reason(daemon, "directory-replaced")
    assert reason["severity"] == "critical"
    assert str(hidden) in reason["summary"]
    assert f"user {E}" in reason["summary"]
    daemon.wait_event("trainer-adopted", 30)
    assert rig.trainer_pid == trainer
    rig.kill("trainer")
    wait_reason(daemon, "trainer-exited")
    assert len(rig.starts) == 1, "nothing is started while that directory is another user's"
    listed = daemon.command("quarantine", "list")
    assert listed.returncode != 0
    assert str(hidden) in listed.stderr
    assert sorted(p.name for p in (hidden / rig.output.name).iterdir()) == ["quarantine", "run.json"], (
        "as it was forged"
    )
    shutil.rmtree(hidden)
    hidden.with_name("kept").rename(hidden)
    repaired(daemon)
    daemon.wait_for(lambda: len(rig.starts) == 2 and rig.trainer_pid, 60, "training is started again")
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_for(lambda: not rig.trainer_pid, 30, "training is stopped")


def test_nothing_starts_in_an_output_directory_that_was_replaced(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    rig.order(wait=True)  # between two steps: it would end where it finds no directory to write to
    daemon.wait_for((rig.control / "waits").exists, 20, "training waits")
    kept = rig.output.with_name("kept")
    other = rig.root / "other"
    other.mkdir()
    os.chown(other, E, E)
    rig.output.rename(kept)
    other.rename(rig.output)
    reason = wait_reason(daemon, "directory-replaced")
    assert str(rig.output) in reason["summary"]
    rig.kill("trainer")
    rig.obey()
    wait_reason(daemon, "trainer-exited")
    assert len(rig.starts) == 1
    pruned = daemon.command("prune")
    assert pruned.returncode != 0
    assert "replaced" in pruned.stderr
    shutil.rmtree(rig.output)
    kept.rename(rig.output)
    repaired(daemon)
    daemon.wait_for(lambda: len(rig.starts) == 2, 60, "training is started again")
