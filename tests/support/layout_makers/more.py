"""The makers of this package's trainers that are not in ``core``: name -> (layout, ``operations``)."""

from pathlib import Path

from tests.support.layout_makers import (
    Maker,
    Operation,
    accelerate,
    deepspeed,
    lightning,
    nemo_rl,
    open_instruct,
    openrlhf,
    orbax,
    runner,
    skyrl,
)


def _zero3(output_dir: Path, step: int) -> list[Operation]:
    return deepspeed.operations(output_dir, step, stage=3, mp=2)


def _accelerate_fsdp(output_dir: Path, step: int) -> list[Operation]:
    return accelerate.fsdp(output_dir / f"step_{step}", ranks=1)


def _accelerate_deepspeed(output_dir: Path, step: int) -> list[Operation]:
    return accelerate.deepspeed(output_dir / f"checkpoint-{step}")


def _epochs(output_dir: Path, step: int) -> list[Operation]:
    return open_instruct.operations(output_dir, step, "epoch_{step}")


def _skyrl_megatron(output_dir: Path, step: int) -> list[Operation]:
    return skyrl.megatron(output_dir / f"global_step_{step}" / "policy") + skyrl.late(output_dir, step)


def _orbax_named(output_dir: Path, step: int) -> list[Operation]:
    return orbax.operations(output_dir, step, "ckpt_{step:08d}", commit=False)


MAKERS: dict[str, tuple[str, Maker]] = {
    "accelerate": ("accelerate", accelerate.operations),
    "accelerate-fsdp": ("accelerate", _accelerate_fsdp),
    "accelerate-deepspeed": ("accelerate", _accelerate_deepspeed),
    "lightning": ("lightning", lightning.operations),
    "lightning-fsdp": ("lightning", lightning.fsdp),
    "lightning-deepspeed": ("lightning", lightning.deepspeed),
    "deepspeed": ("deepspeed", deepspeed.operations),
    "deepspeed-zero3": ("deepspeed", _zero3),
    "openrlhf": ("openrlhf", openrlhf.operations),
    "skyrl": ("skyrl", skyrl.operations),
    "skyrl-megatron": ("skyrl", _skyrl_megatron),
    "nemo-rl": ("nemo-rl", nemo_rl.operations),
    "orbax": ("orbax", orbax.operations),
    "orbax-named": ("orbax", _orbax_named),
    "orbax-commit-file": ("orbax", orbax.by_commit_file),
    "open-instruct": ("open-instruct", open_instruct.operations),
    "open-instruct-epochs": ("open-instruct", _epochs),
    "runner": ("runner", runner.operations),
}
NO_MARKER = frozenset({"accelerate", "accelerate-fsdp", "accelerate-deepspeed", "runner"})
"""Whole, but only after the long settle time."""
NOT_OVER_ITSELF = frozenset({"nemo-rl", "orbax", "orbax-named", "orbax-commit-file", "runner"})
"""Never saved over in place (a rename, a refusal), or nothing would show it: the runner has no order to go by."""
COMMANDS = {"openrlhf": openrlhf.COMMAND}
