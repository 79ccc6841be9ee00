"""Every document that a person or a program can ask of one living run: each is JSON of the published shape, and each
command ends with an exit code of the contract."""

import json
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import contract
from tests.support.asking import kill_engine, published, running
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


class Run:
    """One run that trains, has stored checkpoints and one incident behind it."""

    def __init__(self, rig: Rig, store: Path) -> None:
        self.rig, self.store = rig, store
        rig.trainer_flags = ["--ckpt.interval", "5"]
        self.daemon: DaemonProcess = rig.daemon(sync__store=f"file://{store}", sync__heartbeat="5s").start()
        running(self.daemon, rig, step=5)
        self.daemon.wait_event("detector-armed", 30, detector="silent-death:gpu0")
        kill_engine(rig)
        self.daemon.wait_event("incident-closed", 60)
        published(self.daemon, 60)
        rig.order(wait=True)  # what is read does not change any more, and nothing is sent between two tests
        self.daemon.wait_for((rig.control / "waits").exists, 60, "the trainer stands between two steps")
        newest = max(rig.saved)
        # The checkpoint of a resume changes once more, by what the trainer broadcasts at its start.
        self.daemon.wait_for(lambda: newest in self.published_steps(), 60, "podwatch has stored the last save")
        assert self.daemon.command("sync", "--wait").returncode == 0
        self.stored = self.published_steps()
        assert self.daemon.command("checkpoints", "pin", str(self.stored[-1])).returncode == 0

    def published_steps(self) -> list[int]:
        return [e["step"] for e in self.daemon.events() if e["podwatch_event"] == "published"]

    def get(self, path: str) -> tuple[int, bytes]:
        endpoint = json.loads(next(self.daemon.runtime.glob("*/endpoint.json")).read_text())
        try:
            with urllib.request.urlopen(endpoint["http_url"] + path, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Run]:
    store = Path(tempfile.mkdtemp(dir="/dev/shm"))
    rig = Rig(tmp_path_factory.mktemp("documents") / "pod", nvml_library)
    try:
        yield Run(rig, store)
        rig.close()
    finally:
        shutil.rmtree(store)


def allowed(command: str, code: int) -> bool:
    """Whether the contract has this exit code for the command."""
    entry = contract.contract().data["exit_codes"].get(str(code))
    if entry is None:
        return False
    of = entry["commands"]
    own = command.partition(" --")[0] in ("status", "runs check")
    return "all" in of or (command.partition(" --")[0] if own else "all but status and runs check") in of


SAY = {
    "status --json": (0, 1, 2),
    "checkpoints --json": (0,),
    "checkpoints verify --json": (0,),
    "events --json": (0,),
    "incidents --json": (0,),
    "incidents 1 --json": (0,),
    "runs list --json": (0,),
    "runs show {run} --json": (0,),
    "runs check --json": (0, 1, 2),
    "runs diff {run} {run} --json": (0,),
    "runs restore {run} --to {to}/runs --json": (0,),
    "restore --to {to}/own --json": (0,),
    "store ls --json": (0,),
    "store verify --json": (0,),
    "prune --dry-run --json": (0,),
    "clean --dry-run --json": (75,),
    "quarantine list --json": (0,),
    "restart --dry-run --json": (0, 1),
    "replay --json": (0,),
    "config show --json": (0,),
    "config validate --json": (0,),
    "check --json": (0, 1),
    "sync --wait --json": (0, 1),
    "pause --json": (0,),
}
"""Each reporting command, and the codes that it can end with beside this run."""


@pytest.mark.parametrize("line", SAY)
def test_a_command_prints_its_document(run: Run, tmp_path: Path, line: str) -> None:
    """``DaemonProcess.command`` holds the document to its schema and to the list of its fields; here it must exist."""
    words = line.format(run=run.rig.run_id, to=tmp_path).split()
    done = run.daemon.command(*words)
    assert done.returncode in SAY[line], done.stdout + done.stderr
    assert allowed(line, done.returncode)
    name = contract.printed_document(words)
    assert name is not None, "it is in contract.toml"
    documents = [json.loads(text) for text in (done.stdout.splitlines() if name == "event" else [done.stdout])]
    for document in documents:
        contract.check(name, document)
        assert isinstance(document, dict)
        fields = contract.contract().documents[name]
        assert "schema_version" in document or "schema_version" not in fields
    assert documents


@pytest.mark.parametrize(
    "line", ["status --json", "checkpoints --json", "restart --dry-run --json", "incidents --json"]
)
def test_without_a_daemon_a_command_says_so(tmp_path: Path, line: str) -> None:
    config = f'run_id = "r"\nstate_dir = "{tmp_path}/state"\n[trainer]\noutput_dir = "{tmp_path}/out"\nlayout = "dcp"\n'
    done = DaemonProcess(tmp_path / "own", config).command(*line.split())
    assert allowed(line, done.returncode), (done.returncode, done.stderr)
    assert done.stdout or done.stderr
    assert "Traceback" not in done.stderr
    if done.stdout:
        json.loads(done.stdout)


@pytest.mark.parametrize("line", ["no-such-command", "status --no-such-option", "restore --step words", "runs show"])
def test_a_wrong_word_ends_with_a_code_of_the_contract(run: Run, line: str) -> None:
    done = run.daemon.command(*line.split())
    assert done.returncode == (3 if line.startswith("status") else 64), done.stderr
    assert done.stdout == ""
    assert done.stderr


def test_what_http_says(run: Run) -> None:
    code, status = run.get("/status")
    assert code == 200
    contract.check_status(json.loads(status))
    code, metrics = run.get("/metrics")
    assert code == 200
    contract.check_metrics(metrics.decode())
    for path in ("/", "/livez", "/events", "/history"):
        assert run.get(path)[0] == 200, path
    for path in ("/readyz", "/healthz"):
        assert run.get(path)[0] in (200, 503), "not ready while it is paused"
    assert run.get("/no-such-page")[0] == 404
    events = json.loads(run.get("/events")[1])
    for event in events["events"] if isinstance(events, dict) else events:
        contract.check("event", event)


def test_every_metric_of_the_contract_that_this_run_can_have_is_there(run: Run) -> None:
    """Families are exposed from the first scrape on, so that a dashboard finds them before something happens. Those
    that are missing here need what this run does not have."""
    shown = {line.split()[2] for line in run.get("/metrics")[1].decode().splitlines() if line.startswith("# TYPE ")}
    listed = contract.contract().now(contract.contract().names("metrics"))
    assert not shown - listed
    assert len(listed - shown) < 20, sorted(listed - shown)


def test_what_lies_in_the_store(run: Run) -> None:
    root = run.store / run.rig.run_id / "podwatch"

    def read(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((root / name).read_text())
        return found

    pointer, heartbeat = read("latest.json"), read("heartbeat.json")
    contract.check("pointer", pointer)
    contract.check("heartbeat", heartbeat)
    assert pointer["run_id"] == run.rig.run_id
    assert pointer["step"] == run.stored[-1]
    for path in root.glob("step_*/*/manifest.json"):
        contract.check("manifest", json.loads(path.read_text()))
    for path in root.glob("claims/*"):
        contract.check("claim", json.loads(path.read_text()))
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    contract.check_names("store", names)
