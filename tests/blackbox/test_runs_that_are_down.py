"""`podwatch runs check` of a run whose training is down, or rests, by the heartbeat of its pod."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest


def beats(directory: Path, **fields: object) -> None:
    """A heartbeat that was written just now."""
    documents = directory / "run-7" / "podwatch"
    documents.mkdir(parents=True)
    beat = {
        "kind": "podwatch-heartbeat", "schema_version": 1, "run_id": "run-7", "state": "holding", "host": "pod-a",
        "desired": "running", "overall": "warning", "reason": "waits", "written_wall": time.time(), **fields,
    }  # fmt: skip
    (documents / "heartbeat.json").write_text(json.dumps(beat))


def check(tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    words = ["runs", "check", "--store", f"file://{tmp_path}/store", "run-7", "--json"]
    return subprocess.run(
        [sys.executable, "-m", "podwatch", *words], capture_output=True, text=True, timeout=240, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )  # fmt: skip


@pytest.mark.parametrize("phase", ["blocked", "backoff", "gave-up"])
def test_a_run_that_is_down_is_critical_whatever_podwatch_waits_for(tmp_path: Path, phase: str) -> None:
    beats(tmp_path / "store", phase=phase)
    done = check(tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["level"], run["heartbeat"]["phase"]) == ("critical", phase)
    assert "no step yet" not in run["summary"]


@pytest.mark.parametrize("phase", ["running", "starting", "confirming", "attached", "paused", "evaluating"])
def test_a_run_that_is_up_or_rests_is_no_more_than_its_pod_says(tmp_path: Path, phase: str) -> None:
    beats(tmp_path / "store", phase=phase)
    done = check(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
