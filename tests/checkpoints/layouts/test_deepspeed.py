"""DeepSpeed alone: what ``latest`` says and does not say, ranks, mixed saves, the command."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.drivers.checkpoints import (
    ConfigurationError,
    Layout,
    SaveEnd,
    configured_layout,
    open_layout,
    recognised_as,
    resume_argv,
)
from tests.support.checkpoints import torch_zip_bytes
from tests.support.layout_checks import relative, verdict
from tests.support.layout_makers import deepspeed as maker
from tests.support.layout_makers import run
from tests.support.layout_makers._zero import tag_operations

GOLDEN = Path(__file__).parents[1] / "golden"


def layout_at(out: Path, *command: str) -> Layout:
    return open_layout("deepspeed", out, command)


def saved(out: Path, *steps: int) -> Layout:
    for step in steps:
        run(maker.operations(out, step))
    return layout_at(out)


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed-zero3"])
def test_what_deepspeed_itself_wrote(name: str) -> None:
    layout = layout_at(GOLDEN / name)
    found = verdict(layout, max(layout.steps()))
    assert found.whole, found.reason
    assert found.world_size == 2


def test_latest_before_the_last_rank(tmp_path: Path) -> None:
    """Rank 0 writes ``latest`` before the barrier: the others' shards may still be missing or half written."""
    layout = saved(tmp_path, 10)
    shard = tmp_path / "global_step10" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = shard.read_bytes()
    shard.write_bytes(data[:100])
    assert verdict(layout, 10).damaged
    shard.unlink()
    assert "the optimizer states of rank 1 (model-parallel 0) are missing" in verdict(layout, 10).reason
    shard.write_bytes(data)
    os.utime(shard, (shard.stat().st_mtime + 60,) * 2)
    assert verdict(layout, 10).whole, "a late rank is not a save over this one"
    model = tmp_path / "global_step10" / "mp_rank_00_model_states.pt"
    os.utime(model, (model.stat().st_mtime + 60,) * 2)
    assert "newer than latest" in verdict(layout, 10).reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "empty or garbled"),
        ("global_st", "empty or garbled"),
        ("global_step5", "latest names step 5"),
        (None, "missing"),
    ],
)
def test_latest_does_not_name_it_yet(tmp_path: Path, said: str | None, reason: str) -> None:
    run(tag_operations(tmp_path / "global_step10"))
    if said is not None:
        (tmp_path / "latest").write_text(said)
    found = verdict(layout_at(tmp_path), 10)
    assert not found.whole
    assert reason in found.reason
    assert tmp_path / "latest" in found.rests_on


def test_a_tag_of_the_users_own_is_no_marker(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10)
    (tmp_path / "latest").write_text("final")
    found = verdict(layout, 10)
    assert (found.whole, found.ends) == (True, SaveEnd.NONE)
    assert layout.pinned() == {}


def test_ranks_that_cannot_be_counted_need_the_long_wait(tmp_path: Path) -> None:
    run(maker.operations(tmp_path, 10))
    model = tmp_path / "global_step10" / "mp_rank_00_model_states.pt"
    model.write_bytes(torch_zip_bytes({"module": {}}))
    os.utime(model, (1, 1))
    found = verdict(layout_at(tmp_path), 10)
    assert (found.whole, found.ends, found.world_size) == (True, SaveEnd.NONE, None)


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 3, "mp": 2}, {"mp": 4}, {"ranks": 8}])
def test_stages_and_model_parallel(tmp_path: Path, options: dict[str, int]) -> None:
    run(maker.operations(tmp_path, 10, **options))
    layout = layout_at(tmp_path)
    assert verdict(layout, 10).whole
    for path in sorted((tmp_path / "global_step10").iterdir()):
        data, times = path.read_bytes(), (path.stat().st_mtime,) * 2
        path.unlink()
        assert not verdict(layout, 10).whole, path.name
        path.write_bytes(data)
        os.utime(path, times)


def test_experts_have_no_gap(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10)
    for expert in (0, 2):
        name = f"layer_3_expert_{expert}_mp_rank_00_model_states.pt"
        (tmp_path / "global_step10" / name).write_bytes(torch_zip_bytes({}))
    assert "expert 1 of layer 3 is missing" in verdict(layout, 10).reason


def test_before_a_start(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10, 20, 30)
    (tmp_path / "best").mkdir()
    assert layout.pinned() == {30: "named by latest"}
    assert relative(layout.ahead_of(20), tmp_path) == {"global_step30"}
    assert relative(layout.ahead_of(None), tmp_path) == {"global_step10", "global_step20", "global_step30", "latest"}
    (tracker,) = layout.trackers(20)
    assert (tracker.path, tracker.content, tracker.target) == (tmp_path / "latest", b"global_step20", None)
    assert layout.trackers(None) == ()
    assert layout.first_step_after(20) == 20
    assert not layout.reshards


def test_a_repaired_latest_does_not_hide_older_steps(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10, 20)
    (tmp_path / "latest").write_text("global_step10")
    os.utime(tmp_path / "latest", (2_000_000_000, 2_000_000_000))
    assert verdict(layout, 10).whole


@pytest.mark.parametrize(
    ("command", "added"),
    [
        (("python", "grpo_fast.py", "--checkpoint_state_dir", "/out"), ()),
        (("python", "-m", "openrlhf.cli.train_sft", "--ckpt.path", "/out"), ("--ckpt.load_enable",)),
        (("python", "-m", "openrlhf.cli.train_sft", "--ckpt_path", "/out"), ("--load_checkpoint",)),
    ],
)
def test_programs_that_are_known(tmp_path: Path, command: Sequence[str], added: Sequence[str]) -> None:
    assert resume_argv(layout_at(tmp_path, *command), command, 20) == (*command, *added)
    assert resume_argv(layout_at(tmp_path, *command), (*command, *added), None) == tuple(command)


def test_a_script_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="DeepSpeed is a library"):
        resume_argv(layout_at(tmp_path), ("deepspeed", "train.py"), 20)
    own = layout_at(tmp_path).resume_command(("deepspeed", "train.py"), 20, "none", {})
    assert own.argv == ("deepspeed", "train.py")
    assert own.environment["PODWATCH_CHECKPOINT"].endswith("global_step20")


def test_recognised_by_the_command(tmp_path: Path) -> None:
    found = recognised_as("deepspeed", tmp_path, ("torchrun", "-m", "openrlhf.cli.train_dpo"))
    assert found is not None
    assert found.certain
    assert recognised_as("deepspeed", tmp_path, ("deepspeed", "train.py")) is None


def test_the_configuration_makes_it(tmp_path: Path) -> None:
    layout = configured_layout("deepspeed", tmp_path, ("x",))
    assert layout.name == "deepspeed"
    with pytest.raises(ConfigurationError, match="no part 'actor'"):
        layout.part_dir("actor", 5)


@pytest.mark.parametrize("said", [None, "", "global"])
def test_a_kill_at_the_tracker_costs_the_newest_step_only(tmp_path: Path, said: str | None) -> None:
    layout = saved(tmp_path, 10, 20)
    (tmp_path / "latest").unlink()
    if said is not None:
        (tmp_path / "latest").write_text(said)
    assert verdict(layout, 10).whole
    assert verdict(layout, 10).ends is SaveEnd.NONE
    assert not verdict(layout, 20).whole


def test_without_zero_the_optimizer_is_inside_the_model_states(tmp_path: Path) -> None:
    values = {"optimizer": {"state": {}, "param_groups": []}, "dp_world_size": 2, "mp_world_size": 1}
    (tmp_path / "global_step10").mkdir()
    (tmp_path / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(torch_zip_bytes(values))
    (tmp_path / "latest").write_text("global_step10")
    found = verdict(layout_at(tmp_path), 10)
    assert found.whole, found.reason
    (tmp_path / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(torch_zip_bytes({"dp_world_size": 2}))
    assert "the optimizer states" in verdict(layout_at(tmp_path), 10).reason
