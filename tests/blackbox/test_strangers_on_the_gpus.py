"""What others run on the pod's GPUs: podwatch takes none of it for this run's training, and never signals it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.asking import running
from tests.support.daemon import DaemonProcess
from tests.support.own_dev import own_dev
from tests.support.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.usefixtures("attaching")]

HOLDS = """
import os, signal, sys, time
def note(number, frame):
    with open("signals", "a") as log:
        log.write(f"{number}\\n")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, note)
context = [open("/dev/nvidia-uvm"), open("/dev/nvidia0"), open("/dev/nvidia1")]
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[None]:
    with own_dev(tmp_path / "dev", ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")):
        yield


class Stranger:
    """A process of podwatch's own user, in a directory of its own, with a CUDA context on the run's GPUs."""

    def __init__(self, directory: Path, script: str, *arguments: str) -> None:
        directory.mkdir()
        self.signals = directory / "signals"
        path = directory / script
        path.write_text(HOLDS)
        self.process = subprocess.Popen(
            [sys.executable, "-S", script, *arguments],
            cwd=directory, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.pid = self.process.pid

    def untouched(self) -> bool:
        return self.process.poll() is None and not self.signals.exists()

    def end(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


def everything(daemon: DaemonProcess, rig: Rig) -> None:
    """Start, restart and stop training."""
    running(daemon, rig, step=5)
    seen = len(daemon.events())
    assert daemon.command("restart").returncode == 0
    daemon.wait_event("trainer-started", 60, after=seen)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 60, after=seen)
    assert not [event for event in daemon.events() if event["podwatch_event"] == "trainer-attached"]


def test_an_inference_server_of_others_is_no_trainer(rig: Rig, devices: None) -> None:
    """``vllm serve``: training starts beside it, as the memory that it holds is not missing here."""
    server = Stranger(rig.root / "theirs", "vllm", "serve", "Qwen/Qwen3-8B")
    try:
        daemon = rig.daemon().start()
        everything(daemon, rig)
        assert server.untouched()
    finally:
        server.end()


@pytest.mark.parametrize("script", ["experiment.py", "train.py"])
def test_an_experiment_of_others_is_no_trainer(rig: Rig, devices: None, script: str) -> None:
    """By its name it could be training, but nothing ties it to this run."""
    experiment = Stranger(rig.root / "theirs", script, "--output_dir", str(rig.root / "theirs"))
    try:
        daemon = rig.daemon().start()
        everything(daemon, rig)
        assert experiment.untouched()
    finally:
        experiment.end()
