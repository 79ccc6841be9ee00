"""The simulated run behaves like prime-rl where it matters. Real processes, at eight times the speed."""

import http.client
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.trainers import make_layout
from podwatch.config.loading import load_settings
from podwatch.config.settings import Settings
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import InferenceSample
from podwatch.sensors.inference import probe
from podwatch.simulation.pod import Pod, Shape
from podwatch.simulation.run_files import SimulatedGpus
from podwatch.system.clock import SystemClock
from tests.support import forking
from tests.support.known_trainers import ROLES

pytestmark = pytest.mark.slow

SHAPE = Shape(
    speed=8.0,
    step_seconds=0.2,
    load_seconds=0.4,
    death_seconds=64.0,  # 8 s: a 503 that passes too quickly is never seen
    interval=2,
    shard_bytes=100_000,
    weights_bytes=20_000,
    capacity_bytes=60_000_000,
    max_steps=100_000,
)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


class Run:
    """One `rl` process in a pod."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.settings: Settings = load_settings(pod.config, environ={}, search=False).settings
        self.layout = make_layout(self.settings)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> "subprocess.Popen[bytes]":
        self.process = subprocess.Popen(
            [*self.settings.trainer.command, *flags],
            cwd=self.pod.root,
            env={**os.environ, **self.settings.trainer.env},
            stdout=(self.pod.root / "rl.out").open("wb"),
            stderr=subprocess.STDOUT,
        )
        return self.process

    def step(self) -> int:
        return max(map(int, re.findall(r"SUCCESS +Step (\d+) \|", _log(self, "trainer"))), default=-1)

    def text(self) -> str:
        return (self.pod.root / "rl.out").read_text()

    def whole(self) -> list[int]:
        catalogue = Catalogue(self.layout, SystemClock(), settle=0.0, settle_weak=0.0)
        catalogue.rescan()  # a set counts from its second look on
        return [found.step for found in catalogue.rescan() if found.complete]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    pod = Pod(tmp_path / "pod", SHAPE)
    pod.root.mkdir()
    pod.create()
    made = Run(pod)
    try:
        yield made
    finally:
        pod.destroy()
        if made.process is not None:
            made.process.wait()
    assert pod.processes() == []
    assert not pod.root.exists()


def test_training_makes_whole_checkpoints(run: Run) -> None:
    run.start("--max-steps", "8")
    assert run.process is not None
    assert run.process.wait(120) == 0, run.text()
    assert set(run.whole()) >= {2, 4, 6}
    assert "\x1b[32m" in run.text()
    assert "RL trainer finished!" in run.text()


def test_the_launcher_ignores_an_engine_that_dies(run: Run) -> None:
    process = run.start()
    gpus = SimulatedGpus(run.pod.gpus)
    until(lambda: run.step() >= 3)
    port = run.settings.inference.urls[0]
    until(lambda: isinstance(s := probe(port, 2.0), InferenceSample) and s.health == "ok" and s.generation_tokens_total)
    assert [int((gpu.memory_used_bytes or 0) > 0) for gpu in gpus.read()] == [1, 1]
    engine = run.pod.engine_pid()
    assert engine is not None
    name = Path(f"/proc/{engine}/comm").read_text().strip()
    command = Path(f"/proc/{engine}/cmdline").read_bytes().decode().split("\0")
    assert ROLES.classify(name, command) is ProcessRole.ENGINE
    os.kill(engine, signal.SIGKILL)
    until(lambda: _health(port) == 503)
    assert gpus.read()[0].memory_used_bytes == 0
    until(lambda: _health(port) is None)
    until(lambda: "Application shutdown complete." in _log(run, "inference"))
    until(lambda: "Rollout failed" in _log(run, "orchestrator"))
    assert process.poll() is None, "prime-rl's launcher takes no notice of an exit code 0"
    assert (gpus.read()[1].memory_used_bytes or 0) > 0
    stuck = run.step()
    time.sleep(0.5)
    assert run.step() <= stuck + 1


def test_every_process_has_a_role(run: Run) -> None:
    run.start()
    until(lambda: run.step() >= 1)
    roles = set()
    for pid in run.pod.processes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        roles.add(ROLES.classify(Path(f"/proc/{pid}/comm").read_text().strip(), command))
    assert roles == {
        ProcessRole.LAUNCHER,
        ProcessRole.INFERENCE,
        ProcessRole.ENGINE,
        ProcessRole.ORCHESTRATOR,
        ProcessRole.TRAINER,
    }


def test_a_trainer_that_fails_ends_the_run_with_1(run: Run) -> None:
    process = run.start("--ckpt.resume-step", "4")
    assert process.wait(60) == 1
    assert "process failed with exit code 1" in run.text()  # trainer or orchestrator, whoever is first


def test_an_unknown_flag_is_refused(run: Run) -> None:
    assert run.start("--ckpt.save-async").wait(60) == 1
    assert "unrecognized arguments: --ckpt.save-async" in run.text()


def test_a_resume_goes_on_after_its_step_once_podwatch_has_cleaned_up(run: Run) -> None:
    process = run.start()
    until(lambda: 4 in run.whole() and run.step() >= 7)
    _kill_all(run)
    process.wait()
    for path in run.layout.ahead_of(4):
        until(lambda path=path: _remove(path))
    resume = run.layout.resume_command(run.settings.trainer.command, 4, run.settings.trainer.resume_args, {})
    run.start(*resume.argv[len(run.settings.trainer.command) :])
    until(lambda: "Resuming training from checkpoint step 4" in run.text())
    until(lambda: run.step() >= 8)
    first = min(int(line.split("Step ")[1].split(" ")[0]) for line in run.text().splitlines() if "| Loss" in line)
    assert first == run.layout.first_step_after(4)


def test_faults_are_used_up(run: Run) -> None:
    run.start()
    until(lambda: run.step() >= 2)
    run.pod.order_fault("hang")
    until(lambda: not (run.pod.faults / "hang").exists())
    gpus = SimulatedGpus(run.pod.gpus)
    until(lambda: gpus.read()[1].utilization_percent == 0.0)
    assert (gpus.read()[1].memory_used_bytes or 0) > 0
    stuck = run.step()
    time.sleep(0.5)
    assert run.step() == stuck


def _kill_all(run: Run) -> None:
    for pid in run.pod.processes():
        forking.kill(pid)
    until(lambda: not [pid for pid in run.pod.processes() if run.process is None or pid != run.process.pid])


def _remove(path: Path) -> bool:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _log(run: Run, role: str) -> str:
    path = run.pod.output_dir / "logs" / f"{role}.log"
    return path.read_text() if path.exists() else ""


def _health(url: str) -> int | None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()
