"""An operator goes back by hand, with real processes and a store: status, uploads, pointer and restart follow."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import published, reasons, running, status
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig
from tests.support.store_layout import newest_pointer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("attaching")]


def marks(daemon: DaemonProcess) -> dict[int, tuple[str, bool]]:
    """Of each complete checkpoint: why it is held back, and whether it is the newest."""
    listed = daemon.command("checkpoints", "--json")
    assert listed.returncode == 0, listed.stderr
    sets = json.loads(listed.stdout)["sets"]
    whole = [s for s in sets if s["completeness"] == "complete"]
    return {s["step"]: (s["held_back"], "newest complete" in s["held_by"]) for s in whole}


@pytest.mark.parametrize(("restarted", "in_a_file"), [(True, False), (False, True)])
def test_everything_follows_the_operators_new_line(rig: Rig, elsewhere: Path, restarted: bool, in_a_file: bool) -> None:
    """The operator names the step in a flag, or in the TOML file that the command names."""
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", sync__upload_gap="0s").start()
    running(daemon, rig, step=30)
    published(daemon)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 30)
    published(daemon)
    old, base = newest_pointer(elsewhere), 15
    seen = len(daemon.events())

    rig.order(wait=True)  # at its first step: nothing is saved before we have looked
    rig.trainer_flags = ["--ckpt.resume-step", str(base)]
    if in_a_file:
        (rig.output.parent / "rl.toml").write_text(f"[ckpt]\nresume_step = {base}\n")
        rig.trainer_flags = ["@", "rl.toml"]
    rig.start_by_hand()
    opened = daemon.wait_event("lineage-opened", 60, after=seen)
    assert ("rl.toml, which its command names," if in_a_file else "its command") + " resumes" in opened["event"]
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
        asked = marks(daemon)
        daemon.stop()  # a restart of podwatch in between keeps all of it
        assert marks(daemon) == asked, "`podwatch checkpoints` says the same without a daemon"
        assert {step for step, (held, _) in asked.items() if held} == {s for s in asked if s > base}
        assert [step for step, (_, newest) in asked.items() if newest] == [base]
        daemon.start()
        daemon.wait_event("trainer-adopted", 60, after=seen_before)
        assert not [e for e in daemon.events()[seen_before:] if e["podwatch_event"] == "lineage-opened"]
        assert status(daemon)["checkpoints"]["newest_complete_step"] == base
    rig.obey()

    def followed() -> dict[str, Any] | None:
        now = newest_pointer(elsewhere)
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
