"""Layout "custom": leading zeros, single files, patterns that match nothing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.scan import scan_part
from podwatch.checkpoints.trainers import concerns, make_layout
from podwatch.config.settings import CustomLayoutSettings, Settings
from podwatch.domain.errors import ConfigurationError
from tests.support.checkpoints import torch_zip_bytes


def settings(out: Path, **custom: object) -> Settings:
    trainer = {"layout": "custom", "output_dir": str(out), "command": ["python", "t.py"], "resume_args": "none"}
    return Settings.model_validate({"run_id": "r", "trainer": trainer, "checkpoints": {"custom": custom}})


def whole(layout: Layout, step: int) -> bool:
    return layout.judge(step, [scan_part(p).found for p in layout.steps()[step]]).whole


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5, unique=True), st.integers(0, 8), st.booleans())
def test_padded_names_are_found_and_continued(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], width: int, file: bool
) -> None:
    """Every step is found under its number, a restore gets the name as the others have it, and what is ahead of a step
    is ahead by number, whatever the text says."""
    out = tmp_path_factory.mktemp("out")
    suffix = ".pt" if file else ""
    for step in steps:
        path = out / f"ckpt_{step:0{width}d}{suffix}"
        if not file:
            path.mkdir()
            path = path / "model.pt"
        path.write_bytes(torch_zip_bytes({"step": step}))
    layout = make_layout(settings(out, parts="ckpt_{step}" + suffix))
    assert set(layout.steps()) == set(steps)
    assert all(whole(layout, step) for step in steps)
    middle = sorted(steps)[len(steps) // 2]
    ahead = {f"ckpt_{step:0{width}d}{suffix}" for step in steps if step > middle}
    assert {p.name for p in layout.ahead_of(middle)} == ahead
    checkpoint = layout.resume_command(("t", "{checkpoint}"), middle, "none", {}).argv[1]
    assert checkpoint == str(out / f"ckpt_{middle:0{width}d}{suffix}")
    if not file and len(str(max(steps))) < width:
        assert layout.part_dir("checkpoint", 10**6 + 1).name == f"ckpt_{10**6 + 1:0{width}d}"


def test_a_width_is_used_where_nothing_is_there(tmp_path: Path) -> None:
    layout = make_layout(settings(tmp_path / "out", parts="c/ckpt_{step:06d}"))
    assert layout.part_dir("checkpoint", 10) == tmp_path / "out" / "c" / "ckpt_000010"


def test_a_truncated_single_file_is_not_whole(tmp_path: Path) -> None:
    data = torch_zip_bytes({"step": 5}, (b"x" * 4096,))
    (tmp_path / "ckpt_5.pt").write_bytes(data[:-100])
    (tmp_path / "ckpt_4.pt").write_bytes(data)
    (tmp_path / "ckpt_6.pt").symlink_to(tmp_path / "ckpt_4.pt")
    layout = make_layout(settings(tmp_path, parts="ckpt_{step}.pt"))
    assert set(layout.steps()) == {4, 5}
    assert (whole(layout, 4), whole(layout, 5)) == (True, False)
    assert layout.step_paths(4) == (tmp_path / "ckpt_4.pt",)


@pytest.mark.parametrize(
    ("names", "pattern", "found"),
    [
        (["ckpt_000010"], "checkpoints/step_{step}", "ckpt_000010"),
        (["checkpoints/ckpt_000010"], "checkpoints/step_{step}", "ckpt_000010"),
        (["ckpt_10.pt"], "ckpt_{step}", "ckpt_10.pt"),
        (["checkpoints/100"], "checkpoints/step_{step}", "100"),
        (["ckpt_10"], "ckpt_{step}", ""),
        (["logs"], "ckpt_{step}", ""),
        ([], "ckpt_{step}", ""),
    ],
)
def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path, names: list[str], pattern: str, found: str) -> None:
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    said = concerns(settings(tmp_path, parts=pattern, require=("*.pt",)))
    assert [c.what for c in said if found in c.what] if found else said == ()
    if found:
        assert "nothing matches the pattern" in said[0].what


@pytest.mark.parametrize(("rules", "certain"), [({}, 1), ({"require": ("*.pt",)}, 0), ({"last": "done"}, 0)])
def test_rules_by_which_anything_is_a_checkpoint_are_named(
    tmp_path: Path, rules: dict[str, object], certain: int
) -> None:
    (tmp_path / "ckpt_10.pt").touch()
    said = concerns(settings(tmp_path, parts="ckpt_{step}", **rules))
    assert [c.certain for c in said] == [True] * certain + [False], "and that the pattern matches nothing"


@pytest.mark.parametrize(
    "table",
    [
        {"require": [["model.pt"]]},  # written in the section itself, it would be ignored here
        {"parts": {"other": ["x_{step}"]}},
        {"log": {"errors": [{"meaning": "no memory"}]}},
        {"log": "train.log"},
        {"disk": ["checkpoints"]},
        {"hook": "prime-rl"},
        {"unheard": 1},
    ],
)
def test_a_table_that_cannot_be_used_is_refused_in_words(tmp_path: Path, table: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        make_layout(settings(tmp_path, parts="ckpt_{step}", last="done", table=table))


@pytest.mark.parametrize(("proves", "said"), [(True, False), (False, True)])
def test_a_tracker_that_proves_nothing_is_no_end(tmp_path: Path, proves: bool, said: bool) -> None:
    table = {"trackers": [{"file": "latest", "content": "{step}", "proves": proves}]}
    found = concerns(settings(tmp_path, parts="ckpt_{step}", table=table))
    assert any("names no file that a checkpoint must have" in one.what for one in found) == said


@pytest.mark.parametrize(
    "values",
    [
        {"step_line": "step"},
        {"step_line": "("},
        {"processes": {"trainer": ["("]}},
        {"processes": {"engine": ["x*"]}},
        {"processes": {"driver": ["x"]}},
        {"parts": "ckpt"},
        {"parts": "{step}/{step}"},
        {"parts": "{step}/{rank}"},
        {"parts": "../{step}"},
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CustomLayoutSettings.model_validate(values)
