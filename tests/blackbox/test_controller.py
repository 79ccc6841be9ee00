"""`podwatch controller` and a bucket that pods can write: whoever forges its caps makes it rent no machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import provider_commands

CAPS = {"providers": ["vast"], "max_price_per_hour": 100_000, "max_spend_per_day": 10**6, "max_spend_total": 10**6}
HEARTBEAT = {
    "schema_version": 1, "kind": "podwatch-heartbeat", "state": "preempted", "desired": "running", "host": "old",
    "step": 40,
}  # fmt: skip


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


@pytest.mark.xfail(strict=True, reason="issue 42")
def test_a_record_in_one_bucket_destroys_no_machine_of_another(tmp_path: Path) -> None:
    """The provider's only machine has the label of a run of the same name in another store. Today a record in this
    store, which pods can write, names that label, and the machine is destroyed."""
    documents = tmp_path / "store" / "run-7" / "podwatch"
    (documents / "controller" / "pods").mkdir(parents=True)
    (documents / "controller.json").write_text(json.dumps(CAPS))
    (documents / "heartbeat.json").write_text(json.dumps(HEARTBEAT))
    label, state, hours = "podwatch:run-7:1:sabcdefg", tmp_path / "provider.json", 3600
    machine = {"label": label, "state": "running", "price": 1.0}
    state.write_text(json.dumps({"account": "me", "machines": {"m1": machine}}))
    since = time.time() - 3 * hours
    record = {
        "kind": "podwatch-controller-pod", "schema_version": 1, "run_id": "run-7", "generation": 1, "provider": "vast",
        "max_price": 1.0, "intended_at": since, "account": "me", "lease": 0, "rules": "", "settled": True,
        "unsure_at": None, "failed": "", "refused": False, "booted_at": None, "alive_at": None, "first_step": None,
        "last_step": None, "ended": "it is over its cap", "ended_at": since + hours, "boot_failure": False,
        "label": label, "billed": [{"provider": "vast", "id": "m1", "price_per_hour": 1.0, "since": since}],
    }  # fmt: skip
    (documents / "controller" / "pods" / "1.json").write_text(json.dumps(record))
    config = tmp_path / "podwatch.toml"
    command = [sys.executable, "-I", provider_commands.__file__, str(state)]
    config.write_text(
        f'run_id = "run-7"\n[trainer]\noutput_dir = "{tmp_path}/out"\n[sync]\nstore = "file://{tmp_path}/store"\n'
        f"[controller.providers.vast]\ncommand = {json.dumps(command)}\n"
    )
    config.chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-m", "podwatch", "-c", str(config), "controller", "--once", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = json.loads(state.read_text())
    assert [verb for verb, _ in found["calls"] if verb == "destroy"] == []
    assert list(found["machines"]) == ["m1"]
