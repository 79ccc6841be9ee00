"""``Accelerator.save_state`` with automatic naming on one rank: the random state comes last."""

from pathlib import Path

from tests.support.checkpoints import safetensors_bytes, torch_zip_bytes
from tests.support.layout_makers._writing import Operation, dcp, write
from tests.support.layout_makers._zero import tag_operations


def state(directory: Path, *, ranks: int = 1, custom: int = 0) -> list[Operation]:
    done = write(directory / "model.safetensors", safetensors_bytes())
    done += write(directory / "optimizer.bin", torch_zip_bytes({"state": {}}, (b"o" * 256,)))
    done += write(directory / "scheduler.bin", torch_zip_bytes({"last_epoch": 1}))
    done += write(directory / "sampler.bin", torch_zip_bytes({"epoch": 1}))
    return done + _late(directory, ranks, custom)


def _late(directory: Path, ranks: int, custom: int = 0) -> list[Operation]:
    done: list[Operation] = []
    for rank in range(ranks):
        done += write(directory / f"random_states_{rank}.pkl", torch_zip_bytes({"step": 0}))
    for number in range(custom):
        done += write(directory / f"custom_checkpoint_{number}.pkl", torch_zip_bytes({"n": number}))
    return done


def fsdp(directory: Path, *, ranks: int = 2) -> list[Operation]:
    done = dcp(directory / "pytorch_model_fsdp_0", ranks) + dcp(directory / "optimizer_0", ranks)
    done += write(directory / "scheduler.bin", torch_zip_bytes({"last_epoch": 1}))
    return done + _late(directory, ranks)


def deepspeed(directory: Path, *, ranks: int = 2) -> list[Operation]:
    done = tag_operations(directory / "pytorch_model", ranks=ranks)
    done += write(directory / "latest", b"pytorch_model")
    done += write(directory / "scheduler.bin", torch_zip_bytes({"last_epoch": 1}))
    return done + _late(directory, ranks)


def operations(output_dir: Path, step: int) -> list[Operation]:
    return state(output_dir / "checkpoints" / f"checkpoint_{step}")
