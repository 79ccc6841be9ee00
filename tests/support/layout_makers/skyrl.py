"""Policy and critic by FSDP on two ranks, data.pt, trainer_state.pt, the tracker."""

from pathlib import Path

from tests.support.checkpoints import torch_zip_bytes
from tests.support.layout_makers._writing import Operation, dcp, mkdir, write, write_json

KINDS = ("model", "optim", "extra_state")


def fsdp(directory: Path, ranks: int = 2) -> list[Operation]:
    done = mkdir(directory)
    for rank in range(ranks):
        for kind in KINDS:
            done += write(directory / f"{kind}_world_size_{ranks}_rank_{rank}.pt", torch_zip_bytes({"r": rank}))
    done += write_json(directory / "huggingface" / "config.json", {"model_type": "qwen3"})
    return done + write_json(directory / "fsdp_config.json", {"fsdp_strategy": "fsdp2", "world_size": ranks})


def megatron(directory: Path, ranks: int = 2) -> list[Operation]:
    done = dcp(directory, ranks)
    done += write_json(directory / "metadata.json", {"sharded_backend": "torch_dist"})
    return done + write_json(directory / "huggingface" / "config.json", {"model_type": "qwen3"})


def late(output_dir: Path, step: int) -> list[Operation]:
    directory = output_dir / f"global_step_{step}"
    done = write(directory / "data.pt", torch_zip_bytes({"position": step}))
    done += write(directory / "trainer_state.pt", torch_zip_bytes({"global_step": step, "config": {"a": 1}}))
    return done + write(output_dir / "latest_ckpt_global_step.txt", str(step).encode())


def operations(output_dir: Path, step: int, *, critic: bool = True, ranks: int = 2) -> list[Operation]:
    directory = output_dir / f"global_step_{step}"
    done = fsdp(directory / "policy", ranks)
    if critic:
        done += fsdp(directory / "critic", ranks)
    return done + late(output_dir, step)


def asynchronous(output_dir: Path, step: int) -> list[Operation]:
    """The fully asynchronous trainer: its own state after the tracker."""
    path = output_dir / f"global_step_{step}" / "fully_async_state.pt"
    return operations(output_dir, step, critic=False) + write(path, torch_zip_bytes({"epoch": 0}))
