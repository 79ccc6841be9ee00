"""Names that only look like steps: asked once, and again when something in them changes."""

import os
from pathlib import Path

from podwatch.checkpoints.layouts import dcp
from podwatch.checkpoints.layouts.base import Site
from podwatch.checkpoints.layouts.step_dirs import Recalled, all_step_names
from tests.support.checkpoints import dcp_files

OLD = 1_700_000_000


class Counting:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, directory: Path) -> bool:
        self.asked.append(directory.name)
        return dcp._belongs(directory)


def foreign(root: Path, count: int) -> None:
    for number in range(count):
        inner = root / f"samples-{number}" / "model"
        inner.mkdir(parents=True)
        for path in (inner, inner.parent):
            os.utime(path, (OLD + number, OLD + number))


def test_only_what_changed_is_asked_again(tmp_path: Path) -> None:
    foreign(tmp_path, 60)
    asked = Counting()
    recalled = Recalled(asked)

    def look() -> set[int]:
        asked.asked.clear()
        return set(recalled.ours(tmp_path, all_step_names(tmp_path, dcp.STEP)))

    assert look() == set()
    assert len(asked.asked) == 60
    assert look() == set()
    assert len(asked.asked) == 16, "those that changed last, which may change again without showing it"

    # A shard below a directory that was there already: nothing touches the step's own directory.
    own = (tmp_path / "samples-7").stat().st_mtime_ns
    for name, data in dcp_files().items():
        (tmp_path / "samples-7" / "model" / name).write_bytes(data)
    assert (tmp_path / "samples-7").stat().st_mtime_ns == own
    assert look() == {7}
    assert look() == {7}
    assert "samples-7" not in asked.asked, "a yes holds"

    (tmp_path / "samples-8" / "__0_0.distcp").touch()
    assert look() == {7, 8}
    (tmp_path / "samples-8" / "__0_0.distcp").unlink()
    assert look() == {7, 8}, "a step that is being removed stays one until its directory is gone"


def test_many_directories_below_are_asked_each_time(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / "runs-3" / f"part{number}").mkdir(parents=True)
    asked = Counting()
    recalled = Recalled(asked)
    for _ in range(3):
        assert recalled.ours(tmp_path, {3: ["runs-3"]}) == {}
    assert len(asked.asked) == 3


def test_a_layout_keeps_nothing_of_its_steps(tmp_path: Path) -> None:
    for step in range(40):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "__0_0.distcp").touch()
    layout = dcp.KIND.make(Site(tmp_path))
    steps = layout.steps()
    assert list(steps) == list(range(40))
    assert [p.path for p in steps[3]] == [tmp_path / "step_3"]
    assert steps[3][0] is not steps[3][0]
    assert 40 not in steps
