"""The 2025 runner: the whole set, the step inside, a symlink that is a hint only."""

import json
from pathlib import Path

import pytest

from tests.drivers.checkpoints import Layout, SaveEnd, open_layout, resume_argv
from tests.support.layout_checks import relative, verdict
from tests.support.layout_makers import run
from tests.support.layout_makers import runner as maker


def layout_at(out: Path, **options: Path) -> Layout:
    return open_layout("runner", out, **options)


def saved(out: Path, *steps: int) -> Layout:
    for step in steps:
        run(maker.operations(out, step))
        maker.link(out, step)
    return layout_at(out)


@pytest.mark.parametrize("gone", ["model/model.safetensors", "optimizer.pt", "scheduler.pt", "training_info.json"])
def test_each_piece_is_needed(tmp_path: Path, gone: str) -> None:
    layout = saved(tmp_path, 10)
    assert verdict(layout, 10).ends is SaveEnd.NONE
    (tmp_path / "training_state/step_10" / gone).unlink()
    assert not verdict(layout, 10).whole


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ('{"step": 9}', "contains step 9, not 10"),
        ('{"loss": 1}', "contains step None, not 10"),
        ("[10]", "contains step None, not 10"),
        ('{"st', "is not valid JSON"),
    ],
)
def test_the_step_inside(tmp_path: Path, info: str, reason: str) -> None:
    layout = saved(tmp_path, 10)
    (tmp_path / "training_state/step_10/training_info.json").write_text(info)
    assert reason in verdict(layout, 10).reason
    (tmp_path / "training_state/step_10/training_info.json").write_text(json.dumps({"global_step": 10}))
    assert verdict(layout, 10).whole


def test_a_preallocated_file_is_not_written_yet(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10)
    weights = tmp_path / "training_state/step_10/model/model.safetensors"
    header = weights.read_bytes()[:-256]
    with weights.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 256)
    big = tmp_path / "training_state/step_10/model/big.bin"
    with big.open("wb") as file:
        file.write(b"x")
        file.truncate(1 << 20)
    assert "never written" in verdict(layout, 10).reason


def test_the_link_is_repaired_pinned_and_never_followed(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10, 20)
    root = tmp_path / "training_state"
    assert layout.pinned() == {20: "named by training_state/step_latest"}
    assert set(layout.steps()) == {10, 20}
    (tracker,) = layout.trackers(10)
    assert (tracker.path, tracker.target, tracker.content) == (root / "step_latest", "step_10", None)
    assert relative(layout.ahead_of(10), root) == {"step_20"}
    assert relative(layout.ahead_of(None), root) == {"step_10", "step_20", "step_latest"}
    for target in ("step_99", "/etc", "../../other"):
        (root / "step_latest").unlink()
        (root / "step_latest").symlink_to(target)
        assert set(layout.steps()) == {10, 20}
        assert 10 not in layout.pinned()
        assert verdict(layout, 20).whole
    (root / "step_latest").unlink()
    assert layout.pinned() == {}
    assert layout.trackers(20)


def test_the_command(tmp_path: Path) -> None:
    layout = saved(tmp_path, 10)
    command = ("python", "run.py", "--from-step", "3")
    assert resume_argv(layout, command, 10) == ("python", "run.py", "--from-step", "10")
    assert resume_argv(layout, command, None) == ("python", "run.py")


def test_where_it_lies(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    for layout in (
        layout_at(tmp_path),
        layout_at(tmp_path / "training_state"),
        layout_at(tmp_path / "other", checkpoint_dir=tmp_path / "training_state"),
    ):
        assert set(layout.steps()) == {10}
        assert layout.part_dir("checkpoint", 20) == tmp_path / "training_state" / "step_20"
