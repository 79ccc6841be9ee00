"""What the tests of resume and of failures ask and do, beyond tests/support/asking.py."""

import json
from typing import Any

from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

CUSTOM: dict[str, Any] = {
    "trainer__layout": "custom",
    "trainer__resume_args": ["--ckpt.resume-step", "{step}"],
    "checkpoints__settle_weak": "0.2s",
    "checkpoints__settle_tracker": "0.2s",
    "checkpoints.custom__parts": "checkpoints/step_{step}",
    "checkpoints.custom__require": ["trainer/__0_0.distcp"],
    "checkpoints.custom__last": "trainer/.metadata",
    "checkpoints.custom__step_line": r"SUCCESS Step (\d+)",
}
"""Settings for the fake trainer as an operator's own, of which podwatch knows only these rules."""


def steps_of(rig: Rig) -> list[int | None]:
    """What each start was told to resume from, in their order."""
    return [start["step"] for start in rig.starts]


def stands(rig: Rig, daemon: DaemonProcess, **orders: Any) -> int:
    """Make the trainer wait between two steps, and give it these orders for later; the step of its newest save, which
    podwatch has seen complete."""
    rig.order(wait=True, **orders)
    daemon.wait_for((rig.control / "waits").exists, 20, "the trainer waits between two steps")
    newest = rig.saved[-1]
    daemon.wait_for(lambda: newest_complete(daemon) == newest, 30, f"step {newest} is complete")
    return newest


def newest_complete(daemon: DaemonProcess) -> int | None:
    step: int | None = (daemon.status() or {}).get("checkpoints", {}).get("newest_complete_step")
    return step


def quarantines(daemon: DaemonProcess) -> dict[int, list[int]]:
    """Number -> steps in that quarantine, as `podwatch quarantine list` says it."""
    listed = daemon.command("quarantine", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    entries = json.loads(listed.stdout)["quarantines"]
    return {entry["id"]: [int(step) for step in entry.get("steps") or ()] for entry in entries}


def quarantine_of(daemon: DaemonProcess, step: int) -> int:
    """The number of the one quarantine that holds this step."""
    found = [number for number, steps in quarantines(daemon).items() if step in steps]
    assert len(found) == 1, quarantines(daemon)
    return found[0]
