"""`podwatch controller` and a bucket that pods can write: whoever forges its caps makes it rent no machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import provider_commands

CAPS = {"providers": ["vast"], "max_price_per_hour": 100_000, "max_spend_per_day": 10**6, "max_spend_total": 10**6}
HEARTBEAT = {"kind": "podwatch-heartbeat", "state": "preempted", "desired": "running", "host": "old", "step": 40}


def test_a_forged_cap_rents_nothing(tmp_path: Path) -> None:
    """The pod says that it is preempted, so a machine would be requested at once."""
    documents = tmp_path / "store" / "run-7" / "podwatch"
    documents.mkdir(parents=True)
    (documents / "controller.json").write_text(json.dumps(CAPS))
    (documents / "heartbeat.json").write_text(json.dumps(HEARTBEAT))
    state = tmp_path / "provider.json"
    provider = f"vast={sys.executable} -I {provider_commands.__file__} {state}"
    done = subprocess.run(
        [sys.executable, "-m", "podwatch", "controller", f"file://{tmp_path}/store", "run-7", "--once", "--json",
         "--provider", provider],
        capture_output=True, text=True, timeout=120, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    last = json.loads(done.stdout[done.stdout.rindex('{\n  "schema_version"') :])  # one document for each look
    assert (last["action"], last["result"].partition(":")[0]) == ("create", "not created"), done.stdout
    calls = [verb for verb, _ in json.loads(state.read_text())["calls"]]
    assert set(calls) == {"list"}, "nothing but looked"
