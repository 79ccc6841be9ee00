"""`podwatch controller` and a bucket that pods can write: whoever forges its caps makes it rent no machine."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support import provider_commands

CAPS = {"providers": ["vast"], "max_price_per_hour": 100_000, "max_spend_per_day": 10**6, "max_spend_total": 10**6}
HEARTBEAT = {
    "schema_version": 1, "kind": "podwatch-heartbeat", "state": "preempted", "desired": "running", "host": "old",
    "step": 40,
}  # fmt: skip


def documents_in(tmp_path: Path) -> Path:
    """A store whose pod says that it is preempted, so a machine is requested at once."""
    documents = tmp_path / "store" / "run-7" / "podwatch"
    documents.mkdir(parents=True)
    (documents / "heartbeat.json").write_text(json.dumps(HEARTBEAT))
    return documents


def controller(tmp_path: Path, *, price: float = 2.0, mode: str = "--once") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", provider_commands.__file__, f"{tmp_path}/provider.json"]
    config = tmp_path / "controller.toml"
    config.write_text(
        f'run_id = "run-7"\nstore = "file://{tmp_path}/store"\nrecords = "{tmp_path}/records.json"\n'
        f"max_price_per_hour = {price}\nmax_spend_per_day = 40\nmax_spend_total = 300\n"
        f"[provider]\ncommand = {json.dumps(command)}\n"
    )
    config.chmod(0o600)
    times = tmp_path / "test-times.toml"
    times.write_text('[times]\n"controller.claim_wait" = "1s"\n')
    return subprocess.run(
        [sys.executable, "-m", "podwatch", "-c", str(config), "controller", mode, "--json"],
        capture_output=True, text=True, timeout=240, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PODWATCH_TEST_TIMES": str(times)},
    )  # fmt: skip


def calls(tmp_path: Path) -> list[list[object]]:
    found: list[list[object]] = json.loads((tmp_path / "provider.json").read_text())["calls"]
    return found


def test_a_forged_cap_rents_nothing(tmp_path: Path) -> None:
    """The controller's own price is the highest that is requested, whatever the store says."""
    (documents_in(tmp_path) / "controller.json").write_text(json.dumps(CAPS))
    done = controller(tmp_path)
    assert done.returncode in (0, 75), done.stdout + done.stderr
    asked = [request for verb, request in calls(tmp_path) if verb == "create"]
    assert {request["max_price_per_hour"] for request in asked} <= {2.0}  # type: ignore[index]
    assert len(asked) <= 1


def test_without_a_configuration_of_its_own_it_does_nothing(tmp_path: Path) -> None:
    (documents_in(tmp_path) / "controller.json").write_text(json.dumps(CAPS))
    done = subprocess.run(
        [sys.executable, "-m", "podwatch", "controller", f"file://{tmp_path}/store", "run-7", "--once"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, "controller.toml" in done.stderr) == (78, True), done.stderr


def test_a_dry_run_only_looks(tmp_path: Path) -> None:
    documents = documents_in(tmp_path)
    before = sorted(path.name for path in documents.rglob("*"))
    done = controller(tmp_path, mode="--dry-run")
    assert done.returncode in (0, 75), done.stdout + done.stderr
    look = json.loads(done.stdout)
    assert (look["action"], look["generation"], look["result"] is not None) == ("create", 1, True)
    assert [verb for verb, _ in calls(tmp_path)] == ["list"]
    assert sorted(path.name for path in documents.rglob("*")) == before
    assert list(tmp_path.glob("records.json*")) == []


def test_a_dry_run_beside_the_service(tmp_path: Path) -> None:
    documents_in(tmp_path)
    with (tmp_path / "records.json.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the service does
        done = controller(tmp_path, mode="--dry-run")
        assert (done.returncode, json.loads(done.stdout)["action"]) == (0, "create"), done.stdout + done.stderr
        assert controller(tmp_path).returncode == 75


def test_a_record_in_one_bucket_destroys_no_machine_of_another(tmp_path: Path) -> None:
    """The provider's only machine has the label of a run of the same name in another store, and a record in this store,
    which pods can write, names that label."""
    documents = documents_in(tmp_path)
    (documents / "controller" / "pods").mkdir(parents=True)
    (documents / "controller.json").write_text(json.dumps(CAPS))
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
    done = controller(tmp_path)
    assert done.stdout, done.stderr
    found = json.loads(state.read_text())
    assert [verb for verb, _ in found["calls"] if verb == "destroy"] == []
    assert found["machines"]["m1"] == machine
