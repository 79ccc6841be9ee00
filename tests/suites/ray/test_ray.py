"""A real Ray tree as the trainer: found, ended and started again whole, and no other Ray on the machine is touched."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podwatch.system import procfs
from tests.suites.ray.driver import living
from tests.support.daemon import DaemonProcess
from tests.support.ports import free_port
from tests.support.rig import alive

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
RAY = PYTHON.with_name("ray")
DRIVER = Path(__file__).with_name("driver.py")
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DISABLE_IMPORT_WARNING": "1"}
SLOW = 180.0
"""Seconds for what takes five on an idle machine: Ray starts eight processes."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not RAY.exists(), reason="needs ray, which could not be installed: make test-ray"),
]


def head(temp_dir: Path, port: int) -> list[str]:
    """`ray start` of a head: it returns and leaves its processes to whoever adopts orphans. Ray refuses a port that
    lies in its range for workers; that of the default overlaps with ``free_port``."""
    return [
        str(RAY), "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2",
        "--include-dashboard=false", f"--object-store-memory={80 << 20}", f"--temp-dir={temp_dir}",
        "--disable-usage-stats", "--min-worker-port=11000", "--max-worker-port=15999",
    ]  # fmt: skip


class Clusters:
    """Temporary directories of Ray: short ones, because its sockets lie in them."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def directory(self) -> Path:
        self._made.append(Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp")))
        return self._made[-1]

    def close(self) -> None:
        for directory in self._made:
            for pid in living(str(directory)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    made = Clusters()
    yield made
    made.close()


@pytest.fixture(scope="module")
def foreign(clusters: Clusters) -> dict[int, int]:
    """Somebody else's cluster on the same machine: its processes with their start ticks."""
    directory = clusters.directory()
    environ = {**os.environ, **ENVIRONMENT}
    subprocess.run(head(directory, free_port()), env=environ, check=True, capture_output=True, timeout=SLOW)
    return {pid: ticks(pid) for pid, line in living(str(directory)).items() if "raylet" in line or "gcs_server" in line}


def ticks(pid: int) -> int:
    status = procfs.read_stat(pid)
    return status.start_ticks if status is not None and status.state not in "ZX" else 0


class RayRun:
    def __init__(self, root: Path, temp_dir: Path, *, port: int = 0) -> None:
        """``port``: the cluster is started by `trainer.start_before` on it, and the driver joins it."""
        self.temp_dir, self.control, self.output = temp_dir, root / "control", root / "work" / "outputs"
        self.control.mkdir(parents=True)
        self.output.parent.mkdir()
        command = [str(PYTHON), str(DRIVER), "--output-dir", str(self.output), "--control", str(self.control)]
        before = [head(temp_dir, port)] if port else []
        address = f'RAY_ADDRESS = "127.0.0.1:{port}"' if port else ""
        self.daemon = DaemonProcess(root, f"""
run_id = "ray-{os.getpid()}-{port}"
state_dir = "{root / "state"}"
[trainer]
layout = "prime-rl"
output_dir = "{self.output}"
cwd = "{self.output.parent}"
command = {json.dumps([*command, "--temp-dir", str(temp_dir)])}
start_before = {json.dumps(before)}
stop_grace = "5s"
[trainer.env]
{"".join(f'{name} = "{value}"' + chr(10) for name, value in ENVIRONMENT.items())}
{address}
[gpu]
poll = "0.5s"
[checkpoints]
rescan = "0.5s"
settle = "0.2s"
[recovery]
backoff_min = "0.2s"
backoff_max = "1s"
[disk]
prune_above = "99.5%"
prune_to = "99%"
[http]
port = 0
[log]
format = "json"
""")  # fmt: skip

    @property
    def starts(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.control / "starts.jsonl").read_text().splitlines()]
        except OSError:
            return []

    def trains(self, starts: int) -> dict[str, Any]:
        """Wait until so many starts were made and the last one has a checkpoint of its own."""
        self.daemon.wait_for(lambda: len(self.starts) >= starts, SLOW, f"start {starts}")
        first = self.starts[-1]["step"] or 0
        self.daemon.wait_for(lambda: self.whole() > first, SLOW, f"a checkpoint above {first}")
        return self.starts[-1]

    def whole(self) -> int:
        done = [e["step"] for e in self.daemon.events() if e["podwatch_event"] == "checkpoint-complete"]
        return max(done, default=0)


def killed_and_whole_again(run: RayRun, victim: int, starts: int, foreign: dict[int, int]) -> dict[str, Any]:
    """Kill one process; the next start finds nothing of the old tree, and goes on from a checkpoint."""
    old = run.starts[-1]
    was, newest = {int(pid): ticks(int(pid)) for pid in [old["driver"], *old["workers"], *old["ray"]]}, run.whole()
    os.kill(victim, signal.SIGKILL)
    new = run.trains(starts)
    left = {pid: began for pid, began in was.items() if began and ticks(pid) == began}
    assert not left, f"of the old tree there still live {left}"
    assert new["step"] >= newest
    assert set(new["workers"]).isdisjoint(old["workers"])
    assert all(ticks(pid) == began for pid, began in foreign.items()), "another Ray cluster was touched"
    return new


def process(start: dict[str, Any], name: str) -> int:
    return int(next(pid for pid, line in start["ray"].items() if f"/{name} " in line))


def ends_whole(run: RayRun, foreign: dict[int, int]) -> None:
    stopped = run.daemon.command("stop-training", timeout=SLOW)
    assert stopped.returncode == 0, stopped.stderr
    end = time.monotonic() + SLOW
    while living(str(run.temp_dir)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not living(str(run.temp_dir))
    assert all(ticks(pid) == began for pid, began in foreign.items()), "another Ray cluster was touched"
    run.daemon.stop()
    assert "Traceback" not in run.daemon.log.read_text(errors="replace"), run.daemon.tail(60)


def test_a_driver_that_brings_ray_up(tmp_path: Path, clusters: Clusters, foreign: dict[int, int]) -> None:
    assert len(foreign) == 2, foreign
    run = RayRun(tmp_path, clusters.directory())
    run.daemon.start()
    try:
        first = run.trains(1)
        assert first["before"] == {}
        second = killed_and_whole_again(run, first["workers"][1], 2, foreign)
        assert second["before"] == {}, "raylet, gcs_server and workers were gone before the new start"
        third = killed_and_whole_again(run, process(second, "raylet"), 3, foreign)
        assert third["before"] == {}
        fourth = killed_and_whole_again(run, third["driver"], 4, foreign)
        assert fourth["before"] == {}
        ends_whole(run, foreign)
    finally:
        run.daemon.end_training()


def test_a_cluster_started_before_training(tmp_path: Path, clusters: Clusters, foreign: dict[int, int]) -> None:
    """`ray start` leaves the tree; begun by `trainer.start_before` it stays this run's all the same."""
    run = RayRun(tmp_path, clusters.directory(), port=free_port())
    run.daemon.start()
    try:
        first = run.trains(1)
        raylet = process(first, "raylet")
        assert str(raylet) in first["before"], "the driver found the cluster that was started for it"
        second = killed_and_whole_again(run, first["driver"], 2, foreign)
        assert not alive(raylet)
        assert process(second, "raylet") != raylet, "a cluster of its own for the new start"
        third = killed_and_whole_again(run, process(second, "gcs_server"), 3, foreign)
        assert process(third, "raylet") != process(second, "raylet")
        ends_whole(run, foreign)
    finally:
        run.daemon.end_training()
