"""A pod dies in the middle of a save, and no hand is involved: `podwatch controller`, with the RunPod command of the
examples, rents another one, which continues the run; the weights are those of a run that nothing interrupted; in the
end nothing runs and nothing is billed.

The provider is a local RunPod whose pods are containers. Needs root and torch: `make test-torch`. The controller waits
as it always does, so this takes ten minutes, and runs only with PODWATCH_LONG_TESTS=1, as `make nightly` sets it.
"""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.suites.container.images import MISSING, REPO, own_root
from tests.suites.container.test_bare_pod import (
    ENV_FILE,
    INTERVAL,
    LONG,
    OUTPUT,
    PODWATCH,
    RUN,
    SCRIPT,
    Pod,
    command,
    configuration,
    until,
    wheels,
)
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.clouds import RunPodCloud
from tests.support.ports import free_port

__all__ = ["wheels"]  # a fixture
WITHOUT = "" if find_spec("torch") else "needs torch: run it with `make test-torch`"
SHORT = "" if LONG else "ten minutes: set PODWATCH_LONG_TESTS=1"
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(WITHOUT or MISSING or SHORT), reason=WITHOUT or MISSING or SHORT),
]
DEAD_SECONDS = 300
GPU = "NVIDIA GeForce RTX 4090"


class ContainerCloud(RunPodCloud):
    """A pod is a container that runs its start command; deleting it kills it. ``billed`` is every pod ever made."""

    def __init__(self, stack: ExitStack, wheels: Path, logs: Path) -> None:
        super().__init__()
        self._stack, self._wheels, self._logs = stack, wheels, logs
        self.pods: dict[str, Pod] = {}
        self.billed: list[str] = []

    def boot(self, number: str, environment: dict[str, str], command: str) -> Pod:
        pod = Pod(self._stack.enter_context(own_root()), self._wheels, self._logs / f"{number}.log", environment)
        self._stack.callback(pod.close)
        self.pods[number] = pod
        pod.boot(command)
        return pod

    def serve(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, object]:
        before = set(self.instances)
        for number, pod in self.pods.items():
            if number in self.instances:
                running = pod.outer.poll() is None
                self.instances[number] |= {"status": "RUNNING" if running else "EXITED", "cost": 0.88 * running}
        answer = super().serve(method, path, query, body)
        for number in self.instances.keys() - before:
            self.billed.append(number)
            self.boot(number, body["env"], body["args"])
        for number in before - self.instances.keys():
            self.pods[number].destroy()
        return answer


def test_a_controller_replaces_the_pod(tmp_path: Path, wheels: Path) -> None:
    reference = tmp_path / "reference"
    subprocess.run(command(reference, free_port()), check=True, cwd=tmp_path, capture_output=True, timeout=600)
    with ExitStack() as stack:
        server = stack.enter_context(B2Server(tmp_path / "b2"))
        key = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": server.url}
        cloud = stack.enter_context(ContainerCloud(stack, wheels, tmp_path))
        assert isinstance(cloud, ContainerCloud)
        cloud.stock(GPU, 0.88)

        first = Pod(stack.enter_context(own_root()), wheels, tmp_path / "a.log", key)  # the operator's own
        stack.callback(first.close)
        first.write(SCRIPT, f'exec {" ".join(command(OUTPUT, free_port()))} --seed "$SEED_TOKEN" "$@"\n')
        first.file(SCRIPT).chmod(0o644)
        first.write(ENV_FILE, "SEED_TOKEN=1\n")
        first.file("/etc/podwatch").mkdir()
        first.configure(configuration().partition("[notify]")[0])
        first.boot(f"exec {PODWATCH} run")
        controller = _controller(stack, tmp_path, key, cloud)
        checkpoint = first.file(f"{OUTPUT}/checkpoints/step_{INTERVAL}/trainer/.metadata")
        first.wait(checkpoint.exists, 300, "pod A has saved a checkpoint")
        trainer = first.find("tiny-rl/trainer.py")
        first.signal("STOP", trainer)  # however slow this machine is: the next save comes after the upload
        stored = ("podwatch/latest.json", "podwatch/config/bootstrap.json")
        first.wait(lambda: all(server.versions(name) for name in stored), 300, "pod A has stored a checkpoint")
        first.signal("CONT", trainer)
        first.wait(first.saving, 60, "pod A is in the middle of a save")
        assert cloud.billed == [], "a living pod is not replaced"
        first.destroy()
        died = time.monotonic()

        requested = until(lambda: cloud.pods or controller.poll() is not None, DEAD_SECONDS + 240, "pod B is requested")
        assert cloud.pods, (tmp_path / "controller.log").read_text()
        (second,) = cloud.pods.values()
        second.wait(second.file(f"{OUTPUT}/logs/trainer.log").exists, 300, "training runs on pod B")
        trains = time.monotonic() - died
        second.wait(second.file(f"{OUTPUT}/final.pt").exists, 600, "the run is finished")
        got = second.file(f"{OUTPUT}/final.pt").read_bytes()
        (tmp_path / "final.pt").write_bytes(got)
        resumed = set(re.findall(r"Resumed from \S+/(step_\d+)", second.read(f"{OUTPUT}/logs/trainer.log")))
        assert controller.wait(1500) == 0, (tmp_path / "controller.log").read_text()
        ended = time.monotonic() - died

        assert cloud.billed == ["pod00001"], "one pod, never another"
        assert cloud.instances == {}, "nothing is billed"
        assert all(pod.outer.poll() is not None for pod in cloud.pods.values()), "nothing runs"
        assert cloud.count("POST /v2/pods") == 1
        assert server.violations() == []
    import torch

    want, have = (torch.load(path, weights_only=True) for path in (reference / "final.pt", tmp_path / "final.pt"))
    assert want.keys() == have.keys()
    assert all(torch.equal(want[name], have[name]) for name in want)
    (step,) = resumed
    assert int(step[5:]) >= INTERVAL
    print(
        f"\npod lost -> another one requested {requested:.0f} s -> training {trains:.0f} s (from {step}) -> finished,"
        f" stored, destroyed {ended:.0f} s; a pod counts as dead after {DEAD_SECONDS} s. Weights are bit-identical."
    )


def _controller(
    stack: ExitStack, directory: Path, key: dict[str, str], cloud: ContainerCloud
) -> "subprocess.Popen[bytes]":
    """The controller, which knows nothing but the store, its configuration and the provider command."""
    passed = [*(f"{name}=POD_{name}" for name in key), "SEED_TOKEN"]
    (directory / "runpod.toml").write_text(
        f'gpus = ["{GPU}"]\nimage = "trainer"\npass = {json.dumps(passed)}\n'
        f'arguments = "exec {PODWATCH} bootstrap b2://{BUCKET} {RUN} --trust"\n'
    )
    own = {
        "RUNPOD_API_KEY": cloud.KEY,
        "RUNPOD_API_URL": f"{cloud.url}/v2",
        "RUNPOD_CONFIG": str(directory / "runpod.toml"),
        "SEED_TOKEN": "1",
    } | {f"POD_{name}": value for name, value in key.items()}
    (directory / "runpod.env").write_text("".join(f"{name}={value}\n" for name, value in own.items()))
    (directory / "runpod.env").chmod(0o600)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PODWATCH_")}
    (directory / "controller.toml").write_text(
        f'run_id = "{RUN}"\nstore = "b2://{BUCKET}"\nrecords = "{directory}/records.json"\nmax_price_per_hour = 2.5\n'
        f'max_spend_per_day = 40\nmax_spend_total = 300\n[provider]\nenv_file = "{directory}/runpod.env"\n'
        f'command = ["{sys.executable}", "{REPO}/examples/providers/runpod.py"]\n'
    )
    (directory / "controller.toml").chmod(0o600)
    with (directory / "controller.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "podwatch", "-c", str(directory / "controller.toml"), "controller", "--loop"],
            cwd=REPO, env={**plain, **key}, stdout=log, stderr=log,
        )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process
