"""What the daemon keeps of a command line."""

from podwatch.detection.signals import summarise
from podwatch.domain.secrets import scrub
from podwatch.domain.thresholds import DetectionPolicy
from tests.support.pods.tree import ENGINE


def test_secrets_go_and_what_detectors_read_stays() -> None:
    from dataclasses import replace

    key = "sk-" + "a1" * 20
    command = f"vllm serve --api-key {key} --enable-sleep-mode --gpu-memory-utilization 0.4 HF_TOKEN=hf_{'b' * 30}"
    kept = scrub(command)
    assert key not in kept
    assert "hf_b" not in kept
    tree = summarise([replace(ENGINE, command=kept)], DetectionPolicy(inference_gpus=(0,)))
    assert tree == summarise([replace(ENGINE, command=command)], DetectionPolicy(inference_gpus=(0,)))
    assert tree.sleep_mode
    assert tree.memory_share == 0.4
