"""DeepSpeed's files below one tag, as ZeRO 1 to 3 write them."""

from pathlib import Path
from typing import Any

from tests.support.checkpoints import torch_zip_bytes
from tests.support.layout_makers._writing import Operation, write


def tag_operations(directory: Path, *, ranks: int = 2, stage: int = 2, mp: int = 1, **state: Any) -> list[Operation]:
    """Model states, then every rank's optimizer shard; no ``latest``."""
    values = {"global_steps": 7, "dp_world_size": ranks, "mp_world_size": mp, **state}
    values |= {"ds_config": {"zero_optimization": {"stage": stage}}}
    model = torch_zip_bytes(values, (b"m" * 256,))
    done: list[Operation] = []
    for part in range(mp):
        if stage == 3:
            for rank in range(ranks):
                done += write(directory / f"zero_pp_rank_{rank}_mp_rank_{part:02d}_model_states.pt", model)
        else:
            done += write(directory / f"mp_rank_{part:02d}_model_states.pt", model)
    if stage:
        for part in range(mp):
            for rank in range(ranks):
                name = f"bf16_zero_pp_rank_{rank}_mp_rank_{part:02d}_optim_states.pt"
                done += write(directory / name, torch_zip_bytes({"optimizer_state_dict": {}}, (b"o" * 256,)))
    return done
