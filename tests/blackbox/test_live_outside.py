"""What a living pod shows and leaves, against ``tests/blackbox/contract.toml``: its metrics, its documents in the
store, and the names of its files."""

import json
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from tests.support import contract
from tests.support.asking import published, running
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig


def test_metrics_documents_and_names_of_a_living_pod(rig: Rig, elsewhere: Path) -> None:
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", sync__claim_wait="0.3s").start()
    running(daemon, rig, step=8)
    published(daemon)
    rig.kill("engine")
    daemon.wait_event("incident-closed", 60)
    for arguments in ("events", "incidents", "incidents 1", "checkpoints", "store ls", "quarantine list", "config show",
                      "restart --dry-run", "prune --dry-run", "runs list", f"runs check {rig.run_id}",
                      f"runs show {rig.run_id}"):  # fmt: skip
        done = daemon.command(*arguments.split(), "--json")
        verdicts = (0, 1, 2) if arguments.startswith("runs check") else (0, 1)  # a store that lags on a busy machine
        assert done.returncode in verdicts, (arguments, done.stderr)
    contract.check_metrics(_get(daemon, "/metrics"))
    _documents(elsewhere, daemon)
    _names(rig, elsewhere)


def _get(daemon: DaemonProcess, path: str) -> str:
    endpoint = json.loads(next(daemon.runtime.glob("*/endpoint.json")).read_text())
    with urllib.request.urlopen(endpoint["http_url"] + path, timeout=10) as answer:
        return str(answer.read().decode())


def _documents(store: Path, daemon: DaemonProcess) -> None:
    kinds = {"heartbeat.json": "heartbeat", "latest.json": "pointer", "manifest.json": "manifest", "claims/*": "claim",
             "bootstrap.json": "bootstrap"}  # fmt: skip
    for pattern, name in kinds.items():
        found = [path for path in store.rglob(pattern) if path.is_file() and ".podwatch-store" not in path.parts]
        assert found, pattern
        for path in found:
            contract.check(name, json.loads(path.read_text()))
    for path in daemon.runtime.glob("*/endpoint.json"):
        contract.check("endpoint", json.loads(path.read_text()))


def _names(rig: Rig, store: Path) -> None:
    root = store / rig.run_id / "podwatch"
    contract.check_names("store", [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()])
    state = rig.root / "state" / rig.run_id
    beside = rig.output.parent / ".podwatch" / rig.output.name
    contract.check_names("files", _listed("state", state.iterdir()))
    contract.check_names("files", _listed("runtime", (rig.root / "runtime" / rig.run_id).iterdir()))
    contract.check_names("files", _listed("beside", beside.iterdir()))
    contract.check_names("files", _listed("user", (beside / "user").iterdir()))
    contract.check_names("files", _listed("incident", (state / "incidents" / "1").iterdir()))


def _listed(place: str, paths: Iterable[Path]) -> list[str]:
    return [f"{place}/{path.name}{'/' if path.is_dir() else ''}" for path in paths]
