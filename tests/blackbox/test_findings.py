"""Findings that a real pod shows with real processes, the NVML stand-in, a store or a file: each kind once.

Those that need a false /proc or minutes of a fault (memory-low, shm-low, inodes-low, clock-wrong, gpu-throttled,
evaluation-waiting, no-second-signal) are pure tests of the detection.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import published, running, wait_reason
from tests.support.b2server import B2Server
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


def with_tables(daemon: DaemonProcess, text: str) -> DaemonProcess:
    daemon.config.write_text(daemon.config.read_text() + text)
    return daemon


def test_a_full_disk_an_own_log_rule_a_bad_metric_and_a_sleeping_engine(rig: Rig) -> None:
    """A disk is above any limit of one thousandth. None of them touches training."""
    metrics = rig.root / "metrics.jsonl"
    rig.order(say=["worker 3: my own trouble"])
    daemon = with_tables(
        rig.daemon(
            disk__prune_above=0.001, disk__prune_to=0.0005, inference__sleep="yes",
            training__metrics_file=str(metrics), training__entropy_below=0.5,
        ),
        '[[log_rules]]\nname = "own-trouble"\npattern = "my own (trouble)"\ncount = 2\nwithin = "10m"\n'
        'critical = true\nsays = "the workers have trouble"\nfix = "call me"\n',
    ).start()  # fmt: skip
    running(daemon, rig, step=5)
    with metrics.open("w") as out:
        for step in range(6):
            out.write(json.dumps({"step": step, "entropy": 0.01, "entropy/mean": 0.01}) + "\n")
    assert wait_reason(daemon, "disk-high", 60)["severity"] == "warning"
    found = wait_reason(daemon, "log-rule", 60)
    assert found["severity"] == "critical"
    assert "own-trouble" in json.dumps(found)
    assert wait_reason(daemon, "training-health", 60)["severity"] == "warning"
    assert wait_reason(daemon, "memory-may-fall", 60)["severity"] == "info"
    assert len(rig.starts) == 1
    assert rig.trainer_pid
    assert max(rig.saved) >= 5, "the newest complete checkpoint stays on a disk that is too full"


def test_a_store_that_is_too_slow(rig: Rig, tmp_path: Path) -> None:
    rig.trainer_flags = ["--size", "3000000"]
    with B2Server(tmp_path / "b2") as server:
        server.pace(rate=20_000)
        daemon = rig.daemon(server.environment(), sync__store=f"b2://{server.bucket}", sync__max_lag="3s").start()
        running(daemon, rig, step=5)
        assert wait_reason(daemon, "sync-lagging", 60)["severity"] == "critical"
        server.pace()
        published(daemon, 60)
        assert server.violations() == []


def test_a_machine_that_its_own_command_does_not_end(rig: Rig, elsewhere: Path) -> None:
    rig.trainer_flags = ["--max-steps", "6"]
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", end_pod__command=["false"], end_pod__tries=1).start()
    daemon.wait_event("run-ended", 120)
    assert wait_reason(daemon, "pod-not-ended", 60)["severity"] == "critical"
    assert daemon.command("status").returncode == 2


def test_evaluations_that_fail(rig: Rig) -> None:
    evaluation: dict[str, Any] = {"command": ["false"], "cwd": "/", "reserve": "1MB", "every_saves": 1}
    daemon = rig.daemon(**{f"evaluation__{key}": value for key, value in evaluation.items()}).start()
    running(daemon, rig, step=10)
    assert wait_reason(daemon, "evaluation-failing", 60)["severity"] == "warning"
    assert rig.trainer_pid, "training goes on"
