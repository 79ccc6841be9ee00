"""An engine that dies before the daemon's eyes: the verdict does not wait for the window of the memory."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podwatch.simulation.pod import Pod, Shape

pytestmark = pytest.mark.slow

HOLD = 600.0
"""Seconds: ten times as long as this test waits for the verdict."""


@pytest.fixture
def pod() -> Iterator[Pod]:
    with tempfile.TemporaryDirectory() as directory:
        made = Pod(Path(directory) / "pod", Shape(hold=HOLD, death_seconds=4.0), run_id=f"seen-{os.getpid()}")
        made.create()
        made.start_daemon()
        yield made
        made.destroy()


def lines(pod: Pod) -> list[dict[str, Any]]:
    found = []
    for line in pod.log.read_text(errors="replace").splitlines():
        if line.startswith("{") and line.endswith("}"):
            found.append(json.loads(line))
    return found


def wait_for(pod: Pod, what: str, check: Callable[[], Any], seconds: float = 90.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s\n{pod.log.read_text()[-4000:]}"
        time.sleep(0.1)
    return found


def age(pid: int) -> float:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def test_an_engine_that_is_seen_to_end_is_a_death_before_hold_is_over(pod: Pod) -> None:
    def armed() -> bool:
        return "silent-death:gpu0" in ((pod.status() or {}).get("daemon", {}).get("armed", ()))

    wait_for(pod, "armed", armed)
    engine = pod.engine_pid()
    assert engine is not None
    wait_for(pod, "an engine that can be missed", lambda: age(engine) > 35.0)
    os.kill(engine, signal.SIGKILL)
    opened = wait_for(
        pod, "verdict", lambda: [e for e in lines(pod) if e.get("podwatch_event") == "incident-opened"], HOLD / 10
    )
    assert opened[0]["kind"] == "silent-death"
    wait_for(pod, "another engine", lambda: (pod.engine_pid() or engine) != engine)
    bundles = [path for path in pod.state.rglob("incidents/**/*") if path.is_file()]
    assert any(b"engine seen to end" in path.read_bytes() for path in bundles), bundles
