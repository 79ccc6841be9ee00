"""Small values read out of torch files: what real trainers hang on their state must not hide them."""

from collections import OrderedDict
from pathlib import Path

from tests.drivers.checkpoints import values_in_torch_file
from tests.support.checkpoints import torch_zip_bytes


def test_values_beside_a_state_dict_with_metadata(tmp_path: Path) -> None:
    """``module.state_dict()`` is an OrderedDict with an attribute: Lightning and DeepSpeed save one beside the step."""
    state: OrderedDict[str, int] = OrderedDict(weight=1)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    file = tmp_path / "last.ckpt"
    file.write_bytes(torch_zip_bytes({"state_dict": state, "global_step": 15}))
    values = values_in_torch_file(file)
    assert values is not None
    assert values["global_step"] == 15
    assert values["state_dict.weight"] == 1


def test_top_level_values_are_found_behind_hundreds_of_deeper_ones(tmp_path: Path) -> None:
    file = tmp_path / "model_states.pt"
    many = {f"p{n}": {"step": n} for n in range(1000)}
    file.write_bytes(torch_zip_bytes({"optimizer": {"state": many}, "dp_world_size": 8}))
    values = values_in_torch_file(file)
    assert values is not None
    assert values["dp_world_size"] == 8
    assert len(values) <= 200
