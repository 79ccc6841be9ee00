"""The heartbeat in the store follows what happens, not only the clock."""

import json
from pathlib import Path

import pytest

from tests.support.asking import running
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


def test_the_heartbeat_follows_a_start_at_once(rig: Rig, elsewhere: Path) -> None:
    """With 100 s between two regular heartbeats only a transition can say that training runs."""
    store = f"file://{elsewhere}"
    daemon = rig.daemon(sync__heartbeat="100s", sync__holder_patience="1000s", sync__store=store).start()
    running(daemon, rig, step=2)

    def told() -> bool:
        found = [json.loads(path.read_text()) for path in elsewhere.rglob("heartbeat.json")]
        return any(f["step"] is not None and f["phase"] == "running" for f in found)

    daemon.wait_for(told, 20, "a heartbeat with a step")
