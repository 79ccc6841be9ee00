"""accelerate and open-instruct: what one save_state leaves, names of steps, the marker that each rank writes."""

import os
import shutil
from pathlib import Path

import pytest

from tests.drivers.checkpoints import (
    ConfigurationError,
    Layout,
    SaveEnd,
    open_layout,
    recognised_as,
    resume_argv,
)
from tests.support.checkpoints import torch_zip_bytes
from tests.support.layout_checks import relative, verdict, whole_prefixes
from tests.support.layout_makers import accelerate as maker
from tests.support.layout_makers import open_instruct as oi
from tests.support.layout_makers import run

GOLDEN = Path(__file__).parents[1] / "golden" / "accelerate"


def layout_at(out: Path, *command: str) -> Layout:
    return open_layout("accelerate", out, command)


def instruct_at(out: Path, *command: str) -> Layout:
    return open_layout("open-instruct", out, command)


def test_what_accelerate_itself_wrote() -> None:
    layout = layout_at(GOLDEN)
    assert set(layout.steps()) == {0, 1, 2}
    for step in layout.steps():
        found = verdict(layout, step)
        assert found.whole, found.reason
        assert found.ends is SaveEnd.NONE


def test_custom_objects_and_late_ranks_cannot_be_waited_for(tmp_path: Path) -> None:
    """They come after rank 0's random state and nothing tells of them: that is what the long wait is for."""
    layout = layout_at(tmp_path)
    directory = tmp_path / "checkpoints" / "checkpoint_3"
    operations = maker.state(directory, ranks=2, custom=2)
    early = whole_prefixes(layout, 3, operations)
    assert early == [len(operations) - 9, len(operations) - 6, len(operations) - 3]
    (directory / "custom_checkpoint_0.pkl").unlink()
    assert "custom_checkpoint_0.pkl is missing" in verdict(layout, 3).reason


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        ("model.safetensors", "*.bin or"),
        ("optimizer.bin", "optimizer*.bin or"),
        ("random_states_0.pkl", "random_states_0.pkl is missing"),
        ("random_states_1.pkl", ""),
    ],
)
def test_what_must_be_there(tmp_path: Path, gone: str, reason: str) -> None:
    directory = tmp_path / "step_500"
    run(maker.state(directory, ranks=2))
    (directory / gone).unlink()
    found = verdict(layout_at(tmp_path), 500)
    assert found.whole == (reason == "")
    assert reason in found.reason


def test_weights_that_a_hook_put_elsewhere(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-500"
    run(maker.state(directory))
    (directory / "transformer").mkdir()
    (directory / "model.safetensors").rename(directory / "transformer" / "diffusion_pytorch_model.safetensors")
    assert verdict(layout_at(tmp_path), 500).whole
    (directory / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    assert not verdict(layout_at(tmp_path), 500).whole


def test_split_weights_of_fsdp_without_dcp(tmp_path: Path) -> None:
    directory = tmp_path / "step_5"
    run(maker.state(directory, ranks=3))
    (directory / "model.safetensors").unlink()
    for rank in (0, 2):
        (directory / f"pytorch_model_fsdp_0_rank{rank}.bin").write_bytes(torch_zip_bytes({}))
    assert "rank1.bin is missing" in verdict(layout_at(tmp_path), 5).reason


def test_deepspeed_counts_ranks(tmp_path: Path) -> None:
    directory = tmp_path / "step_5"
    run(maker.deepspeed(directory, ranks=3))
    layout = layout_at(tmp_path)
    assert verdict(layout, 5).world_size == 3
    (directory / "random_states_2.pkl").unlink()
    assert "random state of rank 2 is missing" in verdict(layout, 5).reason


def test_damaged_random_state(tmp_path: Path) -> None:
    directory = tmp_path / "step_5"
    run(maker.state(directory))
    data = (directory / "random_states_0.pkl").read_bytes()
    (directory / "random_states_0.pkl").write_bytes(data[:-30])
    found = verdict(layout_at(tmp_path), 5)
    assert found.damaged
    assert "random_states_0.pkl truncated" in found.reason


def test_a_save_over_an_old_one(tmp_path: Path) -> None:
    directory = tmp_path / "step_5"
    run(maker.state(directory))
    os.utime(directory / "random_states_0.pkl", (1_700_000_000,) * 2)
    assert "newer than random_states_0.pkl" in verdict(layout_at(tmp_path), 5).reason


def test_automatic_names_hide_others(tmp_path: Path) -> None:
    run(maker.operations(tmp_path, 3))
    run(maker.state(tmp_path / "step_900"))
    layout = layout_at(tmp_path)
    assert set(layout.steps()) == {3}
    assert layout.part_dir("checkpoints", 4) == tmp_path / "checkpoints" / "checkpoint_4"
    assert layout.part_dir("state", 4) == tmp_path
    run(maker.operations(tmp_path, 4))
    assert relative(layout.ahead_of(3), tmp_path) == {"checkpoints/checkpoint_4"}
    with pytest.raises(ConfigurationError, match="no part 'model'"):
        layout.part_dir("model", 3)


def test_automatic_numbers_count_saves(tmp_path: Path) -> None:
    """``ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)``: a save's number, whatever the step."""
    layout = layout_at(tmp_path, "accelerate", "launch", "mine.py", "--checkpointing_steps", "500")
    assert not layout.counts_saves
    for number in (11, 12):
        run(maker.operations(tmp_path, number))
    assert set(layout.steps()) == {11, 12}
    assert layout.counts_saves
    assert verdict(layout, 12).whole
    assert resume_argv(layout, ("python", "mine.py", "--checkpointing_steps", "500"), 12)[-2:] == (
        "--resume_from_checkpoint", str(tmp_path / "checkpoints" / "checkpoint_12"),
    )  # fmt: skip
    assert layout_at(tmp_path).first_step_after(12) == 0, "step 1 of an epoch, or step 6001"
    shutil.rmtree(tmp_path / "checkpoints")
    run(maker.state(tmp_path / "step_6000"))
    assert (set(layout.steps()), layout.counts_saves, layout.first_step_after(6000)) == ({6000}, False, 6000)


def test_the_command(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    run(maker.state(tmp_path / "step_500"))
    command = ("accelerate", "launch", "run_clm_no_trainer.py", "--checkpointing_steps", "500")
    assert resume_argv(layout, command, 500)[-2:] == ("--resume_from_checkpoint", str(tmp_path / "step_500"))
    with pytest.raises(ConfigurationError, match="accelerate is a library"):
        resume_argv(layout, ("accelerate", "launch", "mine.py"), 500)


def instructed(out: Path, *steps: int) -> Layout:
    for step in steps:
        run(oi.operations(out, step))
    return instruct_at(out)


def test_completed_comes_early_from_the_first_rank(tmp_path: Path) -> None:
    layout = instructed(tmp_path, 10)
    assert verdict(layout, 10).ends is SaveEnd.LAST
    shard = tmp_path / "step_10/pytorch_model/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.utime(shard, (shard.stat().st_mtime + 60,) * 2)
    assert "newer than COMPLETED" in verdict(layout, 10).reason
    os.utime(tmp_path / "step_10/COMPLETED", (shard.stat().st_mtime + 1,) * 2)
    assert verdict(layout, 10).whole, "that rank has written it too"
    (tmp_path / "step_10/COMPLETED").write_text("COMP")
    assert "newer than COMPLETED" in verdict(layout, 10).reason


def test_steps_win_over_epochs(tmp_path: Path) -> None:
    run(oi.operations(tmp_path, 3, "epoch_{step}"))
    layout = instruct_at(tmp_path)
    assert set(layout.steps()) == {3}
    run(oi.operations(tmp_path, 10))
    assert set(layout.steps()) == {10}
    assert relative(layout.ahead_of(5), tmp_path) == {"step_10"}


def test_open_instruct_takes_no_step(tmp_path: Path) -> None:
    layout = instructed(tmp_path, 10, 20)
    command = ("python", "open_instruct/finetune.py", "--resume_from_checkpoint", "x", "--max_train_steps", "90")
    assert resume_argv(layout, command, 10) == ("python", "open_instruct/finetune.py", "--max_train_steps", "90")
    assert layout.target_step(command) == 90
    assert layout.first_step_after(10) == 11


def test_recognised_by_the_command(tmp_path: Path) -> None:
    for command in (("python", "-m", "open_instruct.finetune"), ("python", "open_instruct/dpo_tune_cache.py")):
        found = recognised_as("open-instruct", tmp_path, command)
        assert found is not None
        assert found.certain
    assert recognised_as("open-instruct", tmp_path, ("python", "finetune.py")) is None
