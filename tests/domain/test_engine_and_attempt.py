"""The engine's job and attempt, or the provider's machine, by the environment."""

import pytest

from podwatch.domain.engine_and_attempt import Instance, grace_seconds, instance
from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import Heartbeat

K8S = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-x7k"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Instance()),
        ({"HOSTNAME": "pod"}, Instance()),
        ({"SLURM_JOB_ID": "77"}, Instance("slurm", "77", "0")),
        (
            {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "n1"},
            Instance("slurm", "77", "2", "n1"),
        ),
        ({"DSTACK_RUN_ID": "r", "DSTACK_JOB_ID": "j"}, Instance("dstack", "r", "j")),
        ({"SKYPILOT_TASK_ID": "sky-1", "CONTAINER_ID": "9"}, Instance("skypilot", "sky-1")),
        ({"CONTAINER_ID": "123"}, Instance("vast", "123")),
        ({"CONTAINER_ID": "3f2a-docker"}, Instance()),
        ({"RUNPOD_POD_ID": "abc"}, Instance("runpod", "abc")),
        (K8S, Instance("kubernetes", "train-x7k")),
        (
            {**K8S, "KUBERNETES_JOB_NAME": "train", "KUBERNETES_POD_UID": "u1", "KUBERNETES_NODE_NAME": "gpu-3"},
            Instance("kubernetes", "train", "u1", "gpu-3"),
        ),
        ({**K8S, "SKYPILOT_TASK_ID": "sky-1"}, Instance("skypilot", "sky-1")),
        ({"SLURM_JOB_ID": "77\n"}, Instance()),
        ({"RUNPOD_POD_ID": "x" * 201}, Instance()),
    ],
)
def test_the_environment_names_the_instance(environ: dict[str, str], expected: Instance) -> None:
    assert instance(environ) == expected
    said = Heartbeat(instance=expected)
    assert Heartbeat.from_bytes(said.to_bytes()).instance == expected


def test_the_grace_is_the_engines() -> None:
    assert grace_seconds({"SLURM_JOB_ID": "1"}) == grace_seconds(K8S) == 30.0
    assert grace_seconds({}) == grace_seconds({"CONTAINER_ID": "1"}) == 10.0


@pytest.mark.parametrize("value", [[], "x", {"provider": 3}, {"id": "a\x00"}, {"attempt": ["1"]}, {"node": "a b"}])
def test_a_document_that_is_no_instance(value: object) -> None:
    said = Heartbeat(instance=Instance("slurm")).to_json()
    assert Heartbeat.from_json({**said, "instance": None}).instance == Instance()
    with pytest.raises(IntegrityError, match="instance"):
        Heartbeat.from_json({**said, "instance": value})
