"""NeMo-RL: the rename, swaps over an existing step, half removed steps, the command that takes no step."""

import json
import os
import shutil
from pathlib import Path

from tests.drivers.checkpoints import Layout, SaveEnd, open_layout, recognised_as, resume_argv
from tests.support.checkpoints import safetensors_bytes
from tests.support.layout_checks import relative, verdict
from tests.support.layout_makers import nemo_rl as maker
from tests.support.layout_makers import run


def layout_at(out: Path, *command: str) -> Layout:
    return open_layout("nemo-rl", out, command)


def saved(out: Path, *steps: int) -> Layout:
    for step in steps:
        run(maker.operations(out, step))
    return layout_at(out)


def test_a_swap_over_an_existing_step(tmp_path: Path) -> None:
    """The old save stands until the first rename; between the two there is none; then the new one."""
    layout = saved(tmp_path, 10)
    old = verdict(layout, 10).save_token
    operations = maker.operations(tmp_path, 10)
    run(operations[:-3])
    assert verdict(layout, 10).save_token == old
    operations[-3]()
    assert layout.steps() == {}
    operations[-2]()
    assert verdict(layout, 10).whole
    assert verdict(layout, 10).save_token != old
    assert verdict(layout, 10).ends is SaveEnd.COMMIT


def test_a_half_removed_step(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "step_20/policy/optimizer")
    assert "files like checkpoint/policy/optimizer/.metadata" in verdict(layout, 20).reason
    shutil.rmtree(tmp_path / "step_10/policy/weights")
    assert "policy/weights/* is missing" in verdict(layout, 10).reason
    (tmp_path / "step_20/training_info.json").unlink()
    assert "training_info.json is missing" in verdict(layout, 20).reason


def test_weights_as_safetensors_and_a_value_model(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10, 20)
    for step in (10, 20):
        weights = tmp_path / f"step_{step}/policy/weights"
        shutil.rmtree(weights)
        (weights / "model").mkdir(parents=True)
        (weights / "model/shard-00001-model-00001-of-00001.safetensors").write_bytes(safetensors_bytes())
    assert verdict(layout, 20).whole
    shutil.copytree(tmp_path / "step_10/policy", tmp_path / "step_10/value")
    assert "files like checkpoint/value/optimizer/.metadata" in verdict(layout, 20).reason
    assert verdict(layout, 10).whole


def test_the_information_names_the_step(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10)
    info = tmp_path / "step_10/training_info.json"
    info.write_text(json.dumps({"total_steps": 9}))
    assert verdict(layout, 10).damaged
    info.write_text(json.dumps({"consumed_samples": 9}))
    assert verdict(layout, 10).whole


def test_before_a_start(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10, 20)
    for name in ("tmp_step_30", "tmp_step_5", "old_step_20"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp_step_40").symlink_to("/etc")
    assert set(layout.steps()) == {10, 20}
    assert relative(layout.ahead_of(10), tmp_path) == {"step_20", "tmp_step_30", "old_step_20"}
    assert {"step_10", "tmp_step_5"} <= relative(layout.ahead_of(None), tmp_path)
    assert layout.trackers(10) == ()
    assert layout.first_step_after(10) == 11
    assert layout.reshards


def test_no_step_is_passed(tmp_path: Path) -> None:
    """It takes the highest by itself: what is ahead is aside."""
    command = ("uv", "run", "examples/run_grpo.py", "--config", "c.yaml", "grpo.max_num_steps=300")
    layout = layout_at(tmp_path, *command)
    assert resume_argv(layout, command, 10) == command
    assert layout.target_step(command) == 300
    found = recognised_as("nemo-rl", tmp_path, command)
    assert found is not None
    assert not found.certain
    named = layout_at(tmp_path, *command, f"checkpointing.checkpoint_dir={tmp_path}/results")
    assert named.part_dir("checkpoint", 5) == tmp_path / "results" / "step_5"


def test_shards_of_two_saves(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10)
    shard = tmp_path / "step_10/policy/weights/__0_0.distcp"
    os.utime(shard, (shard.stat().st_mtime + 60,) * 2)
    assert "newer than .metadata" in verdict(layout, 10).reason
