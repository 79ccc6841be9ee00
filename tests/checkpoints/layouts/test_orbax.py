"""Orbax: both ways to commit, old versions, names with prefix and zeros, damage that can be seen."""

import json
from pathlib import Path

import pytest

from tests.drivers.checkpoints import ConfigurationError, Layout, SaveEnd, open_layout, recognised_as, resume_argv
from tests.support.layout_checks import relative, verdict
from tests.support.layout_makers import orbax as maker
from tests.support.layout_makers import run

GOLDEN = Path(__file__).parents[1] / "golden" / "orbax"


def layout_at(out: Path) -> Layout:
    return open_layout("orbax", out)


def test_what_orbax_itself_wrote() -> None:
    for step in (10, 20):
        found = verdict(layout_at(GOLDEN), step)
        assert found.whole, found.reason
        assert found.ends is SaveEnd.COMMIT
        assert found.save_token


def test_names_with_prefix_and_zeros_stay_as_they_are(tmp_path: Path) -> None:
    run(maker.operations(tmp_path, 5, "ckpt_{step:06d}"))
    layout = layout_at(tmp_path)
    (part,) = layout.steps()[5]
    assert (part.path, part.names) == (tmp_path, ("ckpt_000005",))
    assert layout.part_dir("checkpoint", 7) == tmp_path
    assert relative(layout.step_paths(5), tmp_path) == {"ckpt_000005"}


def test_a_directory_of_someone_else_is_no_step(tmp_path: Path) -> None:
    for name in ("version_3", "7", "logs_2024"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("x")
    assert layout_at(tmp_path).steps() == {}


def test_a_missing_commit_file_counts_only_where_others_have_theirs(tmp_path: Path) -> None:
    run(maker.operations(tmp_path, 5))
    run(maker.operations(tmp_path, 6, commit=False))
    layout = layout_at(tmp_path)
    (tmp_path / "5/commit_success.txt").unlink()
    assert "commit_success.txt is missing" in verdict(layout, 5).reason
    assert verdict(layout, 6).whole
    metadata = tmp_path / "6/_CHECKPOINT_METADATA"
    metadata.write_text(json.dumps({"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": None}))
    assert "has no commit time" in verdict(layout, 6).reason
    metadata.write_text('{"init')
    assert not verdict(layout, 6).whole
    metadata.unlink()
    assert not verdict(layout, 6).whole


def test_an_item_that_is_not_finished(tmp_path: Path) -> None:
    run(maker.operations(tmp_path, 5))
    (tmp_path / "5/state").rename(tmp_path / "5/state.orbax-checkpoint-tmp")
    assert "state.orbax-checkpoint-tmp is not finished" in verdict(layout_at(tmp_path), 5).reason


@pytest.mark.parametrize("cut", [4, 11, 50])
def test_a_truncated_index(tmp_path: Path, cut: int) -> None:
    run(maker.operations(tmp_path, 5))
    manifest = tmp_path / "5/state/manifest.ocdbt"
    manifest.write_bytes(manifest.read_bytes()[:cut])
    assert verdict(layout_at(tmp_path), 5).damaged
    manifest.unlink()
    assert "manifest.ocdbt is missing" in verdict(layout_at(tmp_path), 5).reason


def test_before_a_start(tmp_path: Path) -> None:
    for step in (5, 10):
        run(maker.operations(tmp_path, step))
    run(maker.operations(tmp_path, 15)[:-1])
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    layout = layout_at(tmp_path)
    assert set(layout.steps()) == {5, 10}
    assert relative(layout.ahead_of(5), tmp_path) == {"10", "15.orbax-checkpoint-tmp"}
    assert "3.orbax-checkpoint-tmp" in relative(layout.ahead_of(None), tmp_path)
    assert layout.trackers(5) == ()
    assert layout.reshards


def test_a_program_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Orbax is a library"):
        resume_argv(layout_at(tmp_path), ("python", "train.py"), 5)


def test_recognised_by_an_unfinished_save(tmp_path: Path) -> None:
    run(maker.operations(tmp_path, 5)[:3])
    found = recognised_as("orbax", tmp_path)
    assert found is not None
    assert found.certain
