"""The promise behind everything: a run that was killed and healed ends in the same weights as one that was not."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.asking import published
from tests.support.daemon import DaemonProcess
from tests.support.nvml import GIB, NoCompiler, NvmlWorld, build_nvml
from tests.support.ports import free_port

torch = pytest.importorskip("torch", reason="needs torch: run it with `make test-torch`")
pytestmark = pytest.mark.timeout(600)

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-rl"
STEPS, INTERVAL = 60, 10


def command(output: Path, variant: str, port: int) -> list[str]:
    return [
        sys.executable, str(EXAMPLE / "rl.py"), "--output-dir", str(output), "--layout", variant, "--port", str(port),
        "--max-steps", str(STEPS), "--ckpt", "--ckpt.interval", str(INTERVAL), "--step-time", "0.15",
        "--save-time", "0.7",
    ]  # fmt: skip


EVALUATE = """
import json, os, sys
from pathlib import Path
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
checkpoint, output, log = map(Path, sys.argv[1:])
whole = output / "whole.pt"
dcp_to_torch_save(next(checkpoint.rglob(".metadata")).parent, whole)

def total(found):
    if isinstance(found, torch.Tensor):
        return float(found.double().sum())
    return sum(total(value) for value in found.values()) if isinstance(found, dict) else 0.0

(output / "results.json").write_text(json.dumps({"sum": total(torch.load(whole, weights_only=False))}))
with log.open("a") as out:
    out.write(f"{checkpoint} {os.environ.get('CUDA_VISIBLE_DEVICES')}" + chr(10))
"""


def evaluation(directory: Path, **settings: object) -> str:
    """An ``[evaluation]`` section: loads the whole checkpoint with torch."""
    script = directory / "evaluate.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(EVALUATE)
    words = [sys.executable, str(script), "{checkpoint}", "{output}", str(directory / "evaluated")]
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    return f"[evaluation]\ncommand = {json.dumps(words)}\n{lines}\n"


def config(directory: Path, output: Path, variant: str, port: int, store: Path) -> str:
    return f"""
run_id = "tiny-{variant.lower()}"
state_dir = "{directory / "state"}"
[trainer]
layout = "prime-rl"
output_dir = "{output}"
cwd = "{directory}"
command = {json.dumps(command(output, variant, port))}
stop_grace = "5s"
[gpu]
inference = [0]
trainer = [1]
poll = "0.2s"
hold = "1s"
[inference]
urls = ["http://127.0.0.1:{port}"]
poll = "0.3s"
[checkpoints]
rescan = "0.5s"
settle = "0.5s"
[recovery]
backoff_min = "0.2s"
[sync]
store = "file://{store}"
part_size = "5MB"
[log]
format = "json"
"""


class Cards(threading.Thread):
    """Makes the two cards of the stand-in show what the processes on this CPU would hold on a GPU."""

    def __init__(self, world: NvmlWorld, port: int) -> None:
        super().__init__(daemon=True)
        self._world, self._port, self._ended = world, port, threading.Event()
        self.engine: int | None = None
        self.trainer: int | None = None

    def run(self) -> None:
        while not self._ended.wait(0.1):
            self.engine, self.trainer = self._find()
            self._world.set_memory(0, 60 * GIB if self.engine else 0)
            self._world.set_memory(1, 50 * GIB if self.trainer else 0)

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _find(self) -> tuple[int | None, int | None]:
        engine = trainer = None
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            try:
                if "inference.py" in line and f"--port={self._port}" in line:
                    engine = next((c.pid for c in process.children() if "engine.py" in " ".join(c.cmdline())), None)
                elif "trainer.py" in line and f"port={self._port}" in " ".join(process.parent().cmdline()).replace(
                    "--port ", "port="
                ):
                    trainer = process.pid
            except (psutil.Error, AttributeError):
                continue
        return engine, trainer


@pytest.fixture
def guarded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[DaemonProcess, Cards, Path, str]]:
    variant: str = request.param
    try:
        library = build_nvml(tmp_path / "nvml")
    except NoCompiler as missing:
        pytest.skip(str(missing))
    port = free_port()
    world = NvmlWorld(tmp_path / "world", devices=2)
    cards = Cards(world, port)
    cards.start()
    output, store = tmp_path / "guarded" / "outputs", Path("/dev/shm") / f"podwatch-torch-{port}"
    store.mkdir()
    daemon = DaemonProcess(
        tmp_path / "guarded", config(tmp_path / "guarded", output, variant, port, store), world.environment(library)
    )
    try:
        yield daemon, cards, output, variant
    finally:
        daemon.end_training()
        cards.stop()
        subprocess.run(["rm", "-rf", str(store)], check=True)


def step_of(daemon: DaemonProcess) -> int:
    status = daemon.status() or {}
    return int((status.get("training") or {}).get("step") or -1)


def same_weights(output: Path, reference: Path) -> None:
    want = torch.load(reference / "final.pt", weights_only=True)
    got = torch.load(output / "final.pt", weights_only=True)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("guarded", ["A"], indirect=True)
@pytest.mark.parametrize("gpus", ["stop-training", "none"])
def test_a_run_with_evaluations_ends_in_the_same_weights(
    guarded: tuple[DaemonProcess, Cards, Path, str], tmp_path: Path, gpus: str
) -> None:
    """Three cycles of stop, evaluate, resume; and evaluations on the CPU beside training."""
    daemon, _, output, variant = guarded
    reference = tmp_path / "reference"
    subprocess.run(command(reference, variant, free_port()), check=True, cwd=tmp_path, capture_output=True, timeout=240)
    extra = {"every_steps": 15, "timeout": "2m", "gpus": gpus}
    with (daemon.config.parent / "test-times.toml").open("a") as times:
        times.write(f'"evaluation.coalesce" = {json.dumps(gpus == "stop-training")}\n"evaluation.reserve" = "1MB"\n')
    daemon.config.write_text(daemon.config.read_text() + evaluation(tmp_path / "evaluation", **extra))
    daemon.start()
    finished = daemon.wait_event("trainer-finished", 400)
    assert finished
    for step in (20, 30, 50, 60):
        daemon.wait_event("evaluation-done", 120, step=step)
    events = daemon.events()
    stops = [e for e in events if e["podwatch_event"] == "trainer-stopping" and e.get("evaluation")]
    resumed = [e["step"] for e in events if e["podwatch_event"] == "trainer-started" and e["step"] is not None]
    assert resumed == ([20, 30, 50] if gpus == "stop-training" else [])
    assert len(stops) == len(resumed)
    assert not {e["podwatch_event"] for e in events} & {"incident-opened", "evaluation-failed", "gave-up"}
    same_weights(output, reference)
    assert (daemon.status() or {})["account"]["failures"] == 0


@pytest.mark.parametrize("guarded", ["A", "B"], indirect=True)
def test_interrupted_run_ends_in_the_same_weights(
    guarded: tuple[DaemonProcess, Cards, Path, str], tmp_path: Path
) -> None:
    daemon, cards, output, variant = guarded
    reference = tmp_path / "reference"
    subprocess.run(command(reference, variant, free_port()), check=True, cwd=tmp_path, capture_output=True, timeout=120)

    daemon.start()
    daemon.wait_for(lambda: step_of(daemon) >= INTERVAL + 3, 120, "training is well past its first checkpoint")
    daemon.wait_event("checkpoint-complete", 30, step=INTERVAL)
    assert cards.engine is not None
    psutil.Process(cards.engine).send_signal(signal.SIGKILL)  # silently: vLLM's server returns with 0
    death = daemon.wait_event("incident-opened", 60)
    assert death["kind"] in ("silent-death", "required-child-exited"), death  # whichever is seen first
    healed = daemon.wait_event("incident-closed", 90)
    assert healed["resumed_step"] >= INTERVAL
    assert healed["resumed_step"] % INTERVAL == 0

    seen = len(daemon.events())
    kill_in_the_middle_of_a_save(daemon, cards, output)
    daemon.wait_event("incident-opened", 60, after=seen)
    daemon.wait_event("incident-closed", 90, after=seen)

    daemon.wait_event("trainer-finished", 120)
    same_weights(output, reference)

    published(daemon, 60, step=STEPS)
    restored = daemon.command("restore", "--to", str(tmp_path / "restored"))
    assert restored.returncode == 0, restored.stderr
    names = sorted(p.name for p in (tmp_path / "restored").rglob("*") if p.is_file())
    assert {".metadata", "progress.pt"} <= set(names), names


def kill_in_the_middle_of_a_save(daemon: DaemonProcess, cards: Cards, output: Path) -> None:
    """SIGKILL the trainer while a checkpoint directory has shards and no ``.metadata`` yet."""

    def saving() -> bool:
        return any(
            (d / "trainer" / "__0_0.distcp").exists() and not (d / "trainer" / ".metadata").exists()
            for d in output.glob("checkpoints/step_*")
        )

    daemon.wait_for(saving, 60, "the trainer is in the middle of a save")
    assert cards.trainer is not None
    psutil.Process(cards.trainer).send_signal(signal.SIGKILL)


@pytest.mark.parametrize("guarded", ["A"], indirect=True)
def test_a_checkpoint_that_was_damaged_before_its_upload_is_neither_published_nor_resumed_from(
    guarded: tuple[DaemonProcess, Cards, Path, str], tmp_path: Path
) -> None:
    """The middle of its shard is overwritten once its index is there, size and times are as before, and training dies.
    Every inspection reads the records that the index names."""
    daemon, cards, output, variant = guarded
    reference = tmp_path / "reference"
    subprocess.run(command(reference, variant, free_port()), check=True, cwd=tmp_path, capture_output=True, timeout=120)
    daemon.start()
    damaged = output / "checkpoints" / f"step_{2 * INTERVAL}" / "trainer"
    daemon.wait_for((damaged / ".metadata").exists, 120, "the second checkpoint")
    for shard in damaged.glob("*.distcp"):
        found, size = shard.stat(), shard.stat().st_size
        with shard.open("r+b") as file:
            file.seek(size // 4)
            file.write(os.urandom(size // 2))
        os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert cards.trainer is not None
    psutil.Process(cards.trainer).send_signal(signal.SIGKILL)
    daemon.wait_event("trainer-finished", 300)
    same_weights(output, reference)
    events = [(e["podwatch_event"], e.get("step")) for e in daemon.events()]
    started = events.index(("trainer-started", INTERVAL))
    assert [step for name, step in events if name == "trainer-started"] == [None, INTERVAL]
    assert ("published", 2 * INTERVAL) not in events[:started], "the next save of this step is a good one"


def test_the_checks_agree_with_what_torch_really_writes(tmp_path: Path) -> None:
    """The example's files, judged by the rules that never import torch."""
    from podwatch.checkpoints.known_checkpoints import Catalogue
    from podwatch.system.clock import SystemClock
    from tests.drivers.checkpoints import prime_rl_layout

    output = tmp_path / "outputs"
    quick = [a for a in command(output, "A", free_port()) if a not in ("--save-time", "0.7", "--step-time", "0.15")]
    subprocess.run(quick, check=True, cwd=tmp_path, capture_output=True, timeout=120)
    catalogue = Catalogue(prime_rl_layout(output), SystemClock(), settle=0.0, settle_weak=0.0)
    catalogue.rescan()
    sets = catalogue.rescan()
    assert [s.step for s in sets if s.complete] == list(range(INTERVAL, STEPS + 1, INTERVAL))
    assert all(catalogue.verify(s.step) == () for s in sets)
    shard = next((output / "checkpoints" / f"step_{STEPS}" / "trainer").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    sets = catalogue.rescan()
    assert not next(s for s in sets if s.step == STEPS).complete
