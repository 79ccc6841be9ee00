"""SkyRL: roles, ranks, the tracker, what the fully asynchronous trainer adds, both command lines."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.drivers.checkpoints import Layout, open_layout, recognised_as, resume_argv
from tests.support.checkpoints import torch_zip_bytes
from tests.support.layout_checks import relative, verdict, whole_prefixes
from tests.support.layout_makers import run
from tests.support.layout_makers import skyrl as maker

ASYNC = ("python", "-m", "examples.train.fully_async.main_fully_async")

TRACKER = "latest_ckpt_global_step.txt"


def layout_at(out: Path, *command: str) -> Layout:
    return open_layout("skyrl", out, command)


def saved(out: Path, *steps: int, critic: bool = True) -> Layout:
    for step in steps:
        run(maker.operations(out, step, critic=critic))
    return layout_at(out)


def test_world_size_and_mixed_ranks(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10)
    assert verdict(layout, 10).world_size == 2
    extra = tmp_path / "global_step_10/policy/model_world_size_4_rank_3.pt"
    extra.write_bytes(torch_zip_bytes({}))
    os.utime(extra, (1_700_000_000,) * 2)
    found = verdict(layout, 10)
    assert not found.whole
    assert "policy: files of 2 and 4 ranks are mixed" in found.faults


def test_a_critic_that_others_have(tmp_path: Path) -> None:
    layout = saved(tmp_path, 20, critic=False)
    assert verdict(layout, 20).whole
    run(maker.operations(tmp_path, 10))
    (tmp_path / TRACKER).write_text("20")
    assert "files like checkpoint/critic/extra_state_world_size_#_rank_#.pt" in verdict(layout, 20).reason


def test_data_is_not_demanded_but_must_be_sound(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10)
    data = tmp_path / "global_step_10/data.pt"
    data.write_bytes(data.read_bytes()[:40])
    assert verdict(layout, 10).damaged
    data.unlink()
    assert verdict(layout, 10).whole, "a failed save of it is only logged"


def test_the_state_names_the_step(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10)
    (tmp_path / "global_step_10").rename(tmp_path / "global_step_11")
    (tmp_path / TRACKER).write_text("11")
    assert "contains step 10, not 11" in verdict(layout, 11).reason


def test_the_fully_asynchronous_trainer_writes_after_the_tracker(tmp_path: Path) -> None:
    first = layout_at(tmp_path, *ASYNC)
    assert whole_prefixes(first, 10, maker.asynchronous(tmp_path, 10)) == []
    layout = layout_at(tmp_path)
    assert whole_prefixes(layout, 20, maker.asynchronous(tmp_path, 20)) == [], "the step before shows what is needed"
    own = tmp_path / "global_step_20/fully_async_state.pt"
    os.utime(own, (1_700_000_000,) * 2)
    assert "newer than fully_async_state.pt" in verdict(layout, 20).reason


def test_megatron_in_the_background(tmp_path: Path) -> None:
    directory = tmp_path / "global_step_10"
    run(maker.megatron(directory / "policy") + maker.late(tmp_path, 10))
    for path in (directory / "policy").iterdir():
        os.utime(path, (path.stat().st_mtime + 60,) * 2)
    assert not verdict(layout_at(tmp_path), 10).whole
    late = layout_at(tmp_path, "python", "trainer.policy.megatron_config.async_dist_ckpt_save=true")
    assert verdict(late, 10).whole
    assert verdict(late, 10).world_size is None
    (directory / "policy" / ".metadata").unlink()
    assert not verdict(late, 10).whole


@pytest.mark.parametrize("said", ["", "x"])
def test_a_garbled_tracker_is_never_step_zero(tmp_path: Path, said: str) -> None:
    layout = saved(tmp_path, 10, 20)
    (tmp_path / TRACKER).write_text(said)
    assert layout.pinned() == {}
    assert verdict(layout, 10).whole
    assert not verdict(layout, 20).whole


def test_before_a_start(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10, 20)
    assert list(layout.pinned()) == [20]
    (tracker,) = layout.trackers(10)
    assert (tracker.path, tracker.content) == (tmp_path / TRACKER, b"10")
    assert relative(layout.ahead_of(10), tmp_path) == {"global_step_20"}
    assert relative(layout.ahead_of(None), tmp_path) == {"global_step_10", "global_step_20", TRACKER}


@pytest.mark.parametrize(
    ("command", "given", "added"),
    [
        (
            ("python", "-m", "skyrl.train.entrypoints.main_base", "trainer.epochs=3"),
            ("trainer.resume_mode=latest", "trainer.resume_path=/old"),
            ("trainer.resume_mode=from_path", "trainer.resume_path=CKPT"),
        ),
        (("python", "-m", "skyrl.train.main_sft", "num_steps=90"), ("resume_from=latest",), ("resume_from=CKPT",)),
    ],
)
def test_the_command(tmp_path: Path, command: Sequence[str], given: Sequence[str], added: Sequence[str]) -> None:
    layout = layout_at(tmp_path, *command)
    checkpoint = str(tmp_path / "global_step_20")
    expected = tuple(a.replace("CKPT", checkpoint) for a in added)
    plain = tuple(a.replace("'", "") for a in resume_argv(layout, (*command, *given), 20))
    assert plain == (*command, *expected)
    assert resume_argv(layout, (*command, *given), None) == tuple(command)


def test_where_the_command_puts_it(tmp_path: Path) -> None:
    command = ("python", "-m", "skyrl.train.entrypoints.main_base", f"trainer.ckpt_path={tmp_path}/ckpts")
    layout = layout_at(tmp_path, *command)
    assert layout.part_dir("checkpoint", 5) == tmp_path / "ckpts" / "global_step_5"
    assert layout.target_step(("x", "trainer.max_training_steps=40")) == 40
    found = recognised_as("skyrl", tmp_path, command)
    assert found is not None
    assert found.certain
