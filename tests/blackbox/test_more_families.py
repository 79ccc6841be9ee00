"""The families that need no death of a process: what shares a GPU, what the driver says, what stands in logs and
metrics, and sensors that hang. Real processes, a real daemon that observes, the NVML stand-in.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.rig import Rig
from tests.support.served_pod import ENGINES, QUICK, ServedPod

pytestmark = pytest.mark.slow


def append(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_the_engine_of_a_shared_gpu_takes_its_share_with_it(rig: Rig) -> None:
    pod = ServedPod(rig, shared=True, **QUICK)
    pod.memory(0, 50)  # somebody freed a cache: the engine's processes and answers say that it lives
    time.sleep(1.0)
    assert not pod.critical()
    pod.memory(0, 60)
    time.sleep(3.0)  # that is its level again
    os.kill(pod.pid("engine0"), signal.SIGKILL)
    pod.memory(0, 8)  # the trainer's part stays
    pod.found("silent-death", "engine process")


def test_a_server_that_nobody_configured_is_found_and_its_end_agrees(rig: Rig) -> None:
    pod = ServedPod(rig, **(QUICK | {"inference__urls": []}))
    name = f"inference:http://127.0.0.1:{pod.port}"
    pod.daemon.wait_for(lambda: name in pod.armed, 40, "the server was found by its socket")
    pod.server(refuse=True)
    pod.engines(0)
    pod.found("silent-death", "health)")


def test_what_kills_nothing_is_told_and_over_when_it_is_over(rig: Rig) -> None:
    pod = ServedPod(rig, trainer__nofile=1024, resources__files_above=0.002, **QUICK)
    for _ in range(3):  # a weight update: memory falls and comes back
        pod.engines(0)
        time.sleep(0.2)
        pod.engines(60)
        time.sleep(0.5)
        assert not pod.critical()

    (pod.control / "hold").touch()
    pod.server(flat=True)
    pod.daemon.wait_for(pod.no_tokens_any_more, 20, "the last tokens are seen before the GPUs fall idle")
    for index in range(ENGINES + 1):
        pod.world.set_load(index, utilization=0)
    pod.found("hang", "gpu utilisation")
    (pod.control / "hold").unlink()
    pod.server()
    for index in range(ENGINES + 1):
        pod.world.set_load(index, utilization=80)
    pod.well()

    append(rig.output / "logs" / "trainer.log", "RuntimeError: CUDA error: an illegal memory access was encountered")
    pod.warned("log-rule", "cuda-error")
    append(
        rig.output / "metrics.jsonl",
        *(json.dumps({"step": step, "entropy/all/mean": 0.01, "reward/all/mean": 0.5}) for step in range(1, 9)),
    )
    pod.warned("training-health", "entropy", 30)
    pod.warned("files-low", "of 1024 files open", 60)

    pod.world.set_mig(1)
    pod.warned("gpu-mig", "GPU 1")
    pod.world.set_mig(1, on=False)
    pod.world.lost(2)
    pod.warned("gpu-lost", "2")
    pod.world.lost(2, on=False)
    pod.daemon.wait_for(lambda: "gpu-lost" not in pod.critical(), 15, "the GPU is back")
    pod.world.xid(3, 79)
    pod.warned("gpu-fault", "XID 79", 40)
    pod.world.hang_all()
    pod.warned("sensor-blind", "gpus", 60)
    assert "silent-death" not in pod.critical()
    pod.world.hang_all(False)
