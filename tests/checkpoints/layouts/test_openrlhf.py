"""OpenRLHF: two roles that must agree, critics that come and go, best tags, both command lines."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.drivers.checkpoints import ConfigurationError, Layout, SaveEnd, open_layout, recognised_as, resume_argv
from tests.support.layout_checks import relative, verdict
from tests.support.layout_makers import openrlhf as maker
from tests.support.layout_makers import run

GOLDEN = Path(__file__).parents[1] / "golden" / "openrlhf"


def layout_at(out: Path, *command: str) -> Layout:
    return open_layout("openrlhf", out, command)


def test_what_deepspeed_itself_wrote() -> None:
    for step in (5, 10):
        found = verdict(layout_at(GOLDEN), step)
        assert found.whole, found.reason
        assert found.world_size == 2


def test_roles_that_reached_different_steps(tmp_path: Path) -> None:
    run(maker.operations(tmp_path, 10))
    run(maker.role(tmp_path, "_actor", 20))
    run(maker.role(tmp_path, "_critic", 20)[:-2])
    layout = layout_at(tmp_path)
    assert verdict(layout, 10).whole
    found = verdict(layout, 20)
    assert not found.whole
    assert set(found.problems) == {"critic"}
    assert layout.pinned() == {20: "named by _actor/latest"}
    trackers = layout.trackers(10)
    assert {t.path for t in trackers} == {tmp_path / "_actor" / "latest", tmp_path / "_critic" / "latest"}
    assert {t.content for t in trackers} == {b"global_step10"}


def test_a_missing_role(tmp_path: Path) -> None:
    run(maker.operations(tmp_path, 10))
    run(maker.role(tmp_path, "_actor", 20))
    layout = layout_at(tmp_path)
    assert "critic:*model_states.pt is missing" in verdict(layout, 20).reason
    run(maker.role(tmp_path, "_critic", 30))
    assert "actor:*model_states.pt is missing" in verdict(layout, 30).reason


def test_without_a_critic(tmp_path: Path) -> None:
    """GRPO and its kin have none; with gae the command says there will be one before it is there."""
    run(maker.role(tmp_path, "_actor", 10))
    assert verdict(layout_at(tmp_path), 10).whole
    assert verdict(layout_at(tmp_path, "python", "--algo.advantage.estimator", "group_norm"), 10).whole
    assert not verdict(layout_at(tmp_path, *maker.COMMAND), 10).whole
    assert not verdict(layout_at(tmp_path, "python", "--critic_pretrain", "m"), 10).whole
    assert [t.path.parent.name for t in layout_at(tmp_path).trackers(10)] == ["_actor"]


def test_a_first_save_whose_critic_may_still_come(tmp_path: Path) -> None:
    """The actor's ``latest`` says nothing of the critic, which has made no directory yet: the long wait decides."""
    run(maker.role(tmp_path, "_actor", 10))
    assert verdict(layout_at(tmp_path), 10).ends is SaveEnd.NONE
    without = layout_at(tmp_path, "python", "--algo.advantage.estimator", "group_norm")
    assert verdict(without, 10).ends is SaveEnd.LAST


def test_the_states_name_the_step(tmp_path: Path) -> None:
    run(maker.operations(tmp_path, 10, global_step=7))
    found = verdict(layout_at(tmp_path), 10)
    assert found.damaged
    assert "contains step 7, not 10" in found.reason


def test_metric_files_and_best_tags(tmp_path: Path) -> None:
    for step in (10, 20):
        run(maker.operations(tmp_path, step))
    layout = layout_at(tmp_path)
    operations = maker.metric(tmp_path, 10)
    run(operations[:2])
    assert verdict(layout, 10).whole, "half a metric file is none of a load's business"
    run(operations[2:])
    assert verdict(layout, 10).whole
    assert json.loads((tmp_path / "_actor/global_step10/metric.json").read_text())["metric_value"] == 0.5
    for folder in ("_actor", "_critic"):
        (tmp_path / folder / "latest").write_text("best_global_step20")
        (tmp_path / folder / "best_global_step20").mkdir()
    (tmp_path / "global_step20_hf").mkdir()
    (tmp_path / "global_step10_hf").mkdir()
    assert verdict(layout, 20).whole, "a best save moves latest too"
    assert layout.pinned() == {}
    assert set(layout.steps()) == {10, 20}
    assert relative(layout.ahead_of(10), tmp_path) == {
        "_actor/global_step20",
        "_critic/global_step20",
        "_actor/best_global_step20",
        "_critic/best_global_step20",
        "global_step20_hf",
    }
    assert {"_actor/latest", "_critic/latest", "global_step10_hf"} <= relative(layout.ahead_of(None), tmp_path)
    assert relative(layout.step_paths(20), tmp_path) == {"_actor/global_step20", "_critic/global_step20"}


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (("python", "-m", "openrlhf.cli.train_ppo_ray", "--ckpt.path", "/o"), "--ckpt.load_enable"),
        (("python", "-m", "openrlhf.cli.train_ppo_ray", "--ckpt_path", "/o"), "--load_checkpoint"),
    ],
)
def test_the_command(tmp_path: Path, command: Sequence[str], flag: str) -> None:
    layout = layout_at(tmp_path, *command)
    assert resume_argv(layout, command, 20) == (*command, flag)
    assert resume_argv(layout, (*command, flag), 20) == (*command, flag)
    assert resume_argv(layout, (*command, flag), None) == command, "a fresh start must not look for states"
    assert layout.first_step_after(20) == 21


def test_a_version_that_does_not_show(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the OpenRLHF version"):
        resume_argv(layout_at(tmp_path), ("python", "-m", "openrlhf.cli.train_ppo_ray"), 20)


def test_recognised_by_the_command(tmp_path: Path) -> None:
    found = recognised_as("openrlhf", tmp_path, ("ray", "job", "submit", "--", *maker.COMMAND))
    plain = recognised_as("openrlhf", tmp_path, maker.COMMAND)
    assert plain is not None
    assert plain.certain
    assert found is None or found.layout == "openrlhf"
    with pytest.raises(ConfigurationError, match="no part 'checkpoint'"):
        layout_at(tmp_path).part_dir("checkpoint", 5)
    assert layout_at(tmp_path).part_dir("critic", 5) == tmp_path / "_critic" / "global_step5"
