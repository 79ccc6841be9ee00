"""Names that only look like steps."""

from pathlib import Path

from tests.drivers.checkpoints import open_layout
from tests.support.checkpoints import dcp_files


def test_a_directory_becomes_a_step_with_its_first_shard_and_stays_one(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"samples-{number}" / "model").mkdir(parents=True)
    layout = open_layout("dcp", tmp_path)
    assert not layout.steps()
    for name, data in dcp_files().items():
        (tmp_path / "samples-7" / "model" / name).write_bytes(data)
    assert list(layout.steps()) == [7]
    (tmp_path / "samples-8" / "__0_0.distcp").touch()
    assert list(layout.steps()) == [7, 8]
    (tmp_path / "samples-8" / "__0_0.distcp").unlink()
    assert list(layout.steps()) == [7, 8], "a step that is being removed stays one until its directory is gone"


def test_each_directory_is_one_step(tmp_path: Path) -> None:
    for step in range(40):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "__0_0.distcp").touch()
    layout = open_layout("dcp", tmp_path)
    steps = layout.steps()
    assert list(steps) == list(range(40))
    assert [p.path for p in steps[3]] == [tmp_path / "step_3"]
    assert 40 not in steps
