"""A stray step directory in a real daemon's output: reported, never the newest, never published, never chosen."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import messages, published, reasons, running, status
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

STRAY = 99999999999999999


def sent(daemon: DaemonProcess, after: int = 0) -> set[int]:
    return {int(e["step"]) for e in daemon.events()[after:] if e["podwatch_event"] == "published"}


def plant(rig: Rig) -> None:
    """Every part of a whole checkpoint once more, as `cp -r` makes it."""
    last = rig.saved[-2]
    for found in sorted(rig.output.rglob(f"step_{last}")):
        if found.is_dir():
            shutil.copytree(found, found.with_name(f"step_{STRAY}"))


def test_a_stray_directory_is_reported_and_nothing_follows_it(rig: Rig, elsewhere: Path) -> None:
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", sync__upload_gap="0s").start()
    running(daemon, rig, step=15)
    published(daemon)
    plant(rig)

    def listed() -> dict[str, Any] | None:
        return next((s for s in status(daemon)["checkpoints"]["sets"] if s["step"] == STRAY), None)

    daemon.wait_for(lambda: (listed() or {}).get("completeness") == "complete", 30, "the stray one looks whole")
    reason = daemon.wait_for(lambda: reasons(daemon).get("implausible-step"), 20, "the finding")
    assert reason["severity"] == "warning"
    assert f"step {STRAY}" in reason["summary"]
    planted = max(n for n in rig.saved if n < STRAY)
    daemon.wait_for(lambda: max(sent(daemon)) > planted, 60, "what is saved after it is published")
    document = status(daemon)
    assert document["checkpoints"]["newest_complete_step"] < STRAY
    assert str(STRAY) not in str(document["training"])
    assert STRAY not in sent(daemon)

    seen = len(daemon.events())
    daemon.stop()
    daemon.start()
    daemon.wait_event("daemon-started", 60, after=seen)
    assert daemon.wait_for(lambda: reasons(daemon).get("implausible-step"), 20, "still known")

    seen = len(daemon.events())
    rig.kill("trainer")
    daemon.wait_event("trainer-confirmed", 60, after=seen)
    assert int(rig.starts[-1]["step"] or 0) < STRAY, rig.starts[-1]
    assert STRAY not in sent(daemon)
    said = [text for text in messages(daemon, "finding-raised") if str(STRAY) in text]
    assert len(said) <= 2, "once by each podwatch"
    assert not os.path.lexists(rig.output / "checkpoints" / f"step_{STRAY}"), "moved to quarantine by the start"
