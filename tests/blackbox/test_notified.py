"""A whole night, told: what the owner hears of a death that is healed, and of a machine that is taken away."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.asking import kill_engine, leaves_within, running, says, wait_reason
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


def heard(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_death_a_broken_channel_and_a_preemption(rig: Rig, tmp_path: Path) -> None:
    told = tmp_path / "told"
    daemon = rig.daemon(
        notify__command=["/bin/sh", "-c", f"cat >> {told}"],
        notify__urls=["http://127.0.0.1:9/hook/T0K3N-4711"],
        recovery__preempt_grace="15s",
    ).start()
    running(daemon, rig, step=5)
    assert heard(told) == [], "nothing has happened that is worth a notice"
    kill_engine(rig)
    daemon.wait_event("incident-closed", 30)
    daemon.wait_for(lambda: len(heard(told)) >= 2, 10, "two notices")
    opened, closed = heard(told)
    assert (opened["change"], opened["topic"], opened["severity"]) == ("opened", "restarts", "critical")
    assert opened["title"].startswith(f"{rig.run_id}: restarting training: ")
    assert (closed["change"], closed["key"]) == ("closed", opened["key"])
    assert "training continues" in closed["title"]
    assert closed["cost"], "the account of the run is asked after the event was counted"
    assert closed["text"].endswith(f"Cost: {closed['cost']}\nDo: nothing")
    assert opened["do"].startswith("nothing")

    reason = wait_reason(daemon, "notify-failing", 30)
    assert (reason["severity"], "refused" in reason["summary"]) == ("warning", True), reason
    assert "http://127.0.0.1:9/..." in json.dumps(reason)
    assert "T0K3N-4711" not in daemon.log.read_text() + json.dumps(daemon.status())
    says(daemon, 1)  # a channel that is broken is a warning and nothing else

    leaves_within(daemon, 15, lambda: daemon.command("preempt"))
    assert daemon.process is not None
    assert daemon.process.returncode == 0
    assert heard(told)[-1]["topic"] == "needs-operator"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed here: make test-telling")
@pytest.mark.timeout(600)
def test_wandb_has_a_run_of_its_own_and_the_daemon_none_of_it(rig: Rig) -> None:
    daemon = rig.daemon({"WANDB_MODE": "offline"}, wandb__enabled=True, wandb__every="10s").start()
    running(daemon, rig, step=5)
    kill_engine(rig)
    daemon.wait_event("incident-closed", 30)
    state = rig.root / "state" / rig.run_id / "wandb"

    def written() -> Path | None:
        return next((p for p in state.rglob("*.wandb") if b"restarting training: " in p.read_bytes()), None)

    file = daemon.wait_for(written, 60, "the alert in the offline run")
    daemon.wait_for(lambda: b"podwatch/disk_free_bytes" in file.read_bytes(), 60, "a row of figures")
    assert daemon.process is not None
    mapped = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "site-packages/google" not in mapped, "its protobuf is the one part of W&B that has a shared library"
    assert not (rig.output / "wandb").exists()
    assert "notify-failing" not in {r["kind"] for r in (daemon.status() or {})["reasons"]}
    assert daemon.stop() == 0
    left = [
        p for p in processes.all_pids() if any("wandb" in word for word in processes.command(p) if str(state) in word)
    ]
    assert left == []
