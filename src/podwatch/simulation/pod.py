"""A whole pod in a temporary directory: a small quota, two GPUs, a prime-rl-like run, a store, and the real podwatch.

Everything in it is real (processes, signals, files, HTTP) except the GPUs, which are files.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podwatch.config.explain import to_toml
from podwatch.config.test_times import VARIABLE
from podwatch.domain.errors import HostError
from podwatch.simulation.run_files import LAYOUT, RESUME_FLAG, held
from podwatch.simulation.simulated_rl import launch_command, write_programs
from podwatch.system.endpoint import fetch_status, read_endpoint

# -- pod -------------------------------------------------------------------------------------------------------------

MARKER = "SIMULATED_POD"
"""Environment variable of every process of a pod. Not PODWATCH_*: podwatch removes those from training."""
INFERENCE_GPU, TRAINER_GPU = 0, 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and durations. Seconds are for ``speed`` 1."""

    speed: float = 1.0
    step_seconds: float = 0.35
    load_seconds: float = 1.0
    death_seconds: float = 1.0
    """Seconds for which a server answers 503 after its engine died, before it ends."""
    interval: int = 5
    ranks: int = 2
    shard_bytes: int = 8_000_000
    weights_bytes: int = 3_000_000
    capacity_bytes: int = 168_000_000
    max_steps: int = 5000
    hold: float = 2.0
    hang_floor: float = 5.0

    def seconds(self, value: float) -> float:
        return value / self.speed


@dataclass
class Pod:
    """Use ``create``, ``start_daemon``, then a fault, and always ``destroy``. ``root`` must be new and empty."""

    root: Path
    shape: Shape = field(default_factory=Shape)
    run_id: str = "demo"
    daemon: "subprocess.Popen[bytes] | None" = None

    @property
    def disk(self) -> Path:
        return self.root / "disk"

    @property
    def output_dir(self) -> Path:
        return self.disk / "outputs"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def runtime(self) -> Path:
        return self.root / "run"

    @property
    def gpus(self) -> Path:
        return self.root / "gpus"

    @property
    def faults(self) -> Path:
        return self.root / "faults"

    @property
    def config(self) -> Path:
        return self.root / "podwatch.toml"

    @property
    def times(self) -> Path:
        """The file of podwatch's own times, which are shorter here than on a real pod."""
        return self.root / "times.toml"

    @property
    def log(self) -> Path:
        return self.root / "podwatch.log"

    def create(self) -> None:
        """Create directories, programs and both configurations."""
        for directory in (self.disk, self.store, self.state, self.runtime, self.gpus, self.faults):
            directory.mkdir(parents=True, mode=0o755)
        write_programs(self.root / "bin")
        (self.root / "train.toml").write_text(_toml(self._trainer_config()))
        self.config.write_text("# The configuration of `podwatch demo`.\n" + _toml(self._podwatch_config()))
        self.config.chmod(0o644)
        self.times.write_text(_toml({"times": self._times()}))
        self.times.chmod(0o644)

    def start_daemon(self) -> None:
        """Start the real daemon with simulated GPUs, as a child in its own session. Its output goes to ``log``."""
        self.daemon = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "podwatch.simulation.daemon", "-c", str(self.config)),
                *("--gpus", str(self.gpus)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
            cwd=self.root,
            env=self.environment(),
            start_new_session=True,
        )

    def environment(self) -> dict[str, str]:
        """The environment by which podwatch commands find only this pod, without the caller's own configuration."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PODWATCH_", "B2_"))}
        source = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", ""))))
        own = {"PODWATCH_RUNTIME_DIR": str(self.runtime), VARIABLE: str(self.times)}
        return {**kept, **own, "PYTHONPATH": path}

    def status(self) -> dict[str, Any] | None:
        """The daemon's present status, by HTTP; None when it does not answer."""
        endpoint = read_endpoint(self.runtime / self.run_id)
        return fetch_status(endpoint.http_url) if endpoint is not None and endpoint.http_url else None

    def engine_pid(self) -> int | None:
        """The process that holds the inference GPU, once its model is loaded."""
        return next((holder.pid for holder in held(self.gpus, INFERENCE_GPU)), None)

    def order_fault(self, name: str, text: str = "") -> None:
        """Make the trainer fail at the next opportunity (``hang``)."""
        temporary = self.faults / f".{name}"
        temporary.write_text(text)
        temporary.replace(self.faults / name)

    def stop_daemon(self, timeout: float = 15.0) -> int | None:
        """Send SIGTERM to podwatch; training continues. Returns the exit code, None if podwatch had to be killed."""
        if self.daemon is None:
            return None
        if self.daemon.poll() is None:
            self.daemon.terminate()
        try:
            return self.daemon.wait(timeout)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()
            return None

    def processes(self) -> list[int]:
        """All living processes of this pod: with the marker in the environment, or the pod's path in the command."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                mine = f"{MARKER}={self.root}".encode() in (entry / "environ").read_bytes().split(b"\0")
                words = (entry / "cmdline").read_bytes().split(b"\0")
                mine = mine or any(word.startswith(f"{self.root}/".encode()) for word in words)
            except OSError:
                continue
            if mine:
                found.append(int(entry.name))
        return found

    def destroy(self, *, keep: bool = False) -> None:
        """End every process of the pod, and remove it all unless ``keep``. Can be called at any time."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if keep:
            return
        shutil.rmtree(self.root, ignore_errors=True)

    def _trainer_config(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "output_dir": str(self.output_dir),
            "max_steps": shape.max_steps,
            "ckpt": {"interval": shape.interval},
            "simulation": {
                "port": free_port(),
                "gpus": str(self.gpus),
                "faults": str(self.faults),
                "step_seconds": shape.seconds(shape.step_seconds),
                "load_seconds": shape.seconds(shape.load_seconds),
                "death_seconds": shape.seconds(shape.death_seconds),
                "ranks": shape.ranks,
                "shard_bytes": shape.shard_bytes,
                "weights_bytes": shape.weights_bytes,
            },
        }

    def _podwatch_config(self) -> dict[str, Any]:
        shape = self.shape
        port = _port_of(self.root / "train.toml")
        return {
            "run_id": self.run_id,
            "state_dir": str(self.state),
            "trainer": {
                "layout": "custom",
                "resume_args": [RESUME_FLAG, "{step}"],
                "output_dir": str(self.output_dir),
                "cwd": str(self.root),
                "command": [*launch_command(self.root / "bin"), "@", "train.toml", "--ckpt"],
                "env": {MARKER: str(self.root)},
                "stop_grace": shape.seconds(2.0),
                "save_grace": shape.seconds(4.0),
                "startup_patience": shape.seconds(30.0),
                "nofile": 1024,  # the simulated programs open few files, and a machine may not allow more
            },
            "gpu": {
                "inference": [INFERENCE_GPU],
                "trainer": [TRAINER_GPU],
                "hold": shape.seconds(shape.hold),
                "release_wait": shape.seconds(10.0),
            },
            "inference": {"urls": [f"http://127.0.0.1:{port}"]},
            "hang": {"floor": shape.seconds(shape.hang_floor)},
            "sync": {"store": f"file://{self.store}", "keep_last": 3, "keep_every": 0},
            "disk": {"capacity": shape.capacity_bytes},
            "checkpoints": {"custom": LAYOUT},
            "http": {"port": 0},
            "log": {"format": "json"},
        }

    def _times(self) -> dict[str, float]:
        shape = self.shape
        return {
            "gpu.poll": shape.seconds(0.25),
            "inference.poll": shape.seconds(0.5),
            "inference.timeout": 1.0,
            "checkpoints.rescan": shape.seconds(1.0),
            "checkpoints.settle": shape.seconds(0.4),
            "checkpoints.settle_tracker": shape.seconds(0.4),
            "checkpoints.settle_weak": 2.0,
            "hang.k": 2.0,
            "sync.sweep": shape.seconds(5.0),
            "sync.claim_wait": 1.0,  # no second pod can claim this run
            "recovery.backoff_min": shape.seconds(0.5),
            "recovery.backoff_max": shape.seconds(2.0),
            "recovery.calm": shape.seconds(60.0),
        }


def require_linux() -> None:
    """Raise HostError where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        raise HostError("the demo needs Linux", where="/proc", fix="run it in a Linux machine or container")


def _toml(table: dict[str, Any], prefix: str = "") -> str:
    """A nested mapping as TOML; ``trainer.env`` and the like are written inline."""
    lines = [f"{_name(key)} = {to_toml(value)}" for key, value in table.items() if not _is_section(key, value)]
    text = "\n".join(lines) + "\n"
    for key, value in table.items():
        if _is_section(key, value) and value:
            text += f"\n[{prefix}{key}]\n{_toml(value, f'{prefix}{key}.')}"
    return text


def _name(key: str) -> str:
    """A key of TOML; one with a dot in quotes."""
    return to_toml(key) if "." in key else key


def _is_section(key: str, value: object) -> bool:
    return isinstance(value, dict) and key != "env"


def _port_of(path: Path) -> int:
    import tomllib

    port: int = tomllib.loads(path.read_text())["simulation"]["port"]
    return port


# -- free ports ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port below the range that the kernel assigns automatically (32768 and above), so that no connection and no
    other server takes it, even while its server restarts."""
    while True:
        port = random.randrange(16384, 32768)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # the port is in use
            continue
