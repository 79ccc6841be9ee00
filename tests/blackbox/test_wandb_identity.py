"""A machine is gone with its disk. On a new one only the store knows in which W&B runs the figures go on."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.asking import confirmed, published, running
from tests.support.rig import Rig
from tests.support.store_layout import newest_pointer

pytestmark = pytest.mark.slow


def test_a_new_pod_goes_on_in_the_same_wandb_runs(rig: Rig, elsewhere: Path) -> None:
    for root, run in ((rig.output, "trn1"), (rig.output / "run_default", "orc1")):
        (root / "wandb" / f"run-20260106_101500-{run}").mkdir(parents=True)
        (root / "wandb" / "latest-run").symlink_to(f"run-20260106_101500-{run}")
    daemon = rig.daemon(sync__heartbeat="5s", sync__holder_patience="10s", sync__store=f"file://{elsewhere}").start()
    running(daemon, rig, step=5)
    published(daemon)
    assert "--trainer.wandb.id" not in rig.starts[0]["argv"], "a fresh start is a new W&B run"
    daemon.stop(signal.SIGKILL)
    daemon.end_training()
    ids = {"trainer": "trn1", "orchestrator": "orc1"}
    assert newest_pointer(elsewhere)["wandb"] == ids
    assert all(json.loads(m.read_text())["wandb"] == ids for m in elsewhere.rglob("manifest.json"))

    for gone in (rig.output.parent, rig.root / "state", rig.root / "runtime"):
        shutil.rmtree(gone)
    rig.output.parent.mkdir()
    for claim in elsewhere.rglob("heartbeat.json"):
        claim.unlink()  # how long a silent holder is waited for is another test's
    seen = len(daemon.events())
    daemon.start()
    confirmed(daemon, seen)
    again = rig.starts[1]
    assert again["step"] >= 5
    assert again["argv"][-4:] == ["--trainer.wandb.id", "trn1", "--orchestrator.wandb.id", "orc1"]
    record = json.loads((rig.output.parent / ".podwatch" / rig.output.name / "run.json").read_text())
    assert record["wandb"] == ids
