"""An operator goes back by hand, with real processes and a store: status, uploads, pointer and restart follow."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_by_hand import start_by_hand
from tests.support.asking import published, reasons, running, status
from tests.support.rig import Rig


def pointer(store: Path) -> dict[str, Any]:
    (path,) = store.rglob("latest.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.mark.parametrize("restarted", [True, False])
def test_everything_follows_the_operators_new_line(rig: Rig, elsewhere: Path, restarted: bool) -> None:
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", sync__upload_gap="0s").start()
    running(daemon, rig, step=30)
    published(daemon)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 30)
    published(daemon)
    old, base = pointer(elsewhere), 15
    seen = len(daemon.events())

    rig.order(wait=True)  # at its first step: nothing is saved before we have looked
    rig.trainer_flags = ["--ckpt.resume-step", str(base)]
    start_by_hand(rig)
    opened = daemon.wait_event("lineage-opened", 60, after=seen)
    whole = int(opened["newest"])
    assert opened["step"] == base
    assert whole >= 30
    assert status(daemon)["checkpoints"]["newest_complete_step"] == base
    reason = daemon.wait_for(lambda: reasons(daemon).get("earlier-branch"), 20, "what is kept is said")
    assert f"the operator took training back from step {whole} to step {base} at" in reason["summary"]
    assert f"podwatch keeps step {whole} until" in reason["summary"]
    refused = daemon.command("sync", "--step", str(whole))
    assert refused.returncode == 75, refused.stderr

    if restarted:
        seen_before = len(daemon.events())
        daemon.stop()  # a restart of podwatch in between keeps all of it
        daemon.start()
        daemon.wait_event("trainer-attached", 60, after=seen_before)
        assert not [e for e in daemon.events()[seen_before:] if e["podwatch_event"] == "lineage-opened"]
        assert status(daemon)["checkpoints"]["newest_complete_step"] == base
    rig.obey()

    def followed() -> dict[str, Any] | None:
        now = pointer(elsewhere)
        return now if now["lineage"] == opened["lineage"] and now["step"] > base else None

    now = daemon.wait_for(followed, 60, "the pointer names a checkpoint of the new line")
    first = now["step"]
    assert now["seq"] > old["seq"]
    assert now["lineage"] != old["lineage"]
    daemon.wait_for(lambda: "podwatch keeps" not in reasons(daemon)["earlier-branch"]["summary"], 20, "a successor")
    assert f"from step {whole} to step {base}" in reasons(daemon)["earlier-branch"]["summary"]

    seen = len(daemon.events())
    assert daemon.command("restart").returncode == 0
    daemon.wait_event("trainer-confirmed", 60, after=seen)
    resumed = rig.starts[-1]["step"]
    assert resumed is not None
    assert first <= resumed
    rig.never_two()
