"""Thousands of steps: the directory is not listed again for each of them, and a change in it is seen at once."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layouts import KINDS, dcp, hf, megatron, step_dirs, verl
from podwatch.checkpoints.layouts.base import Kind, Site
from podwatch.checkpoints.layouts.step_dirs import all_step_names
from podwatch.config.settings import CustomLayoutSettings
from podwatch.system.clock import SystemClock
from tests.support.checkpoints import dcp_files

PATTERN = re.compile(r"global_step_(\d+)")


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each listing of a directory of steps; times of changes need not be old."""
    found: list[Path] = []
    real = step_dirs._read_names
    monkeypatch.setattr(step_dirs, "_read_names", lambda root, pattern: found.append(root) or real(root, pattern))
    monkeypatch.setattr(step_dirs, "_RECENT_NS", -1)
    monkeypatch.setattr(step_dirs, "_LISTED", step_dirs._Listed())
    return found


def write_dcp(root: Path, steps: int) -> None:
    content = dcp_files(size=256, ranks=2)
    for step in range(steps):
        (root / f"step-{step}").mkdir(parents=True)
        for name, data in content.items():
            (root / f"step-{step}" / name).write_bytes(data)


def write_verl(root: Path, steps: int) -> None:
    for step in range(steps):
        (root / f"global_step_{step}" / "actor").mkdir(parents=True)
        (root / f"global_step_{step}" / "data.pt").write_bytes(b"x")


@pytest.mark.parametrize(("kind", "write"), [(dcp.KIND, write_dcp), (verl.KIND, write_verl)])
def test_the_first_look_lists_the_steps_a_few_times_not_once_for_each(
    tmp_path: Path, listed: list[Path], kind: Kind, write: Callable[[Path, int], None]
) -> None:
    write(tmp_path, 40)
    catalogue = Catalogue(kind.make(Site(tmp_path)), SystemClock(), settle=0.0, settle_weak=0.0)
    assert len(catalogue.rescan()) == 40
    assert len(listed) <= 4
    catalogue.rescan()
    assert len(listed) <= 8


@pytest.mark.parametrize("how", ["added", "removed", "renamed", "became a file", "time set back", "root replaced"])
def test_a_change_is_seen_at_once(tmp_path: Path, listed: list[Path], how: str) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        (root / f"global_step_{step}").mkdir(parents=True)
    (tmp_path / "link").symlink_to("checkpoints")
    for path in (root, tmp_path / "link"):
        assert sorted(all_step_names(path, PATTERN)) == [1, 2]
    before = root.stat()
    if how in ("added", "time set back"):
        (root / "global_step_3").mkdir()
    elif how == "removed":
        (root / "global_step_2").rmdir()
    elif how == "renamed":
        (root / "global_step_2").rename(root / "global_step_4")
    elif how == "became a file":
        (root / "global_step_2").rmdir()
        (root / "global_step_2").touch()
    else:
        root.rename(tmp_path / "old")
        (root / "global_step_9").mkdir(parents=True)
    if how == "time set back":
        os.utime(root, ns=(before.st_atime_ns, before.st_mtime_ns))
    wanted = {"added": [1, 2, 3], "time set back": [1, 2, 3], "renamed": [1, 4], "root replaced": [9]}.get(how, [1])
    for path in (root, tmp_path / "link"):
        assert sorted(all_step_names(path, PATTERN)) == wanted


def test_a_directory_that_changed_a_moment_ago_is_listed_again(tmp_path: Path) -> None:
    """Two changes within the resolution of its time look the same."""
    known = step_dirs._Listed()
    (tmp_path / "global_step_1").mkdir()
    known.names(tmp_path, PATTERN)
    assert not known._known


def test_siblings_that_were_deleted_since_the_last_look_are_replaced(tmp_path: Path) -> None:
    """A step is compared with others that are still there."""
    content = dcp_files(size=256, ranks=2)
    for step in range(30):
        for folder in ("model", "optimizer"):
            if step == 5 and folder == "optimizer":
                continue
            (tmp_path / f"step-{step}" / folder).mkdir(parents=True)
            for name, data in content.items():
                (tmp_path / f"step-{step}" / folder / name).write_bytes(data)
    layout = dcp.KIND.make(Site(tmp_path))
    catalogue = Catalogue(layout, SystemClock(), settle=0.0, settle_weak=0.0)
    catalogue.rescan()
    for step in range(10, 30):
        (tmp_path / f"step-{step}").rename(tmp_path / f"gone{step}x")
    for _ in range(2):
        found = {s.step: s for s in catalogue.rescan()}
    assert not found[5].complete
    assert "optimizer is missing" in found[5].reason


def test_digits_of_other_scripts_are_no_step(tmp_path: Path) -> None:
    """They are digits to ``int`` as well, so such a directory would take the place of the real one."""
    for digit in ("1\u0660", "\uff11\uff10", "1\u0966"):
        for name in (
            "checkpoint-{}",
            "step_{}",
            "global_step{}",
            "ckpt_{}",
            "iter_00000{}",
            "step-{}",
            "{}",
            "x-step={}",
        ):
            (tmp_path / name.format(digit)).mkdir()
            (tmp_path / f"{name.format(digit)}.pt").touch()
            (tmp_path / f"{name.format(digit)}.ckpt").touch()
    (tmp_path / "iter_00000000010").mkdir()  # one more name of step 10 that Megatron does not write
    for name in sorted(KINDS):
        layout = KINDS[name].make(Site(tmp_path, custom=CustomLayoutSettings(step_dir="ckpt_{step}")))
        assert layout.steps() == {}, name
        assert layout.ahead_of(5) == (), name
    for step in (step_dirs.STEP, hf.CHECKPOINT, megatron.STEP):
        assert step_dirs.step_names(tmp_path, step) == {}
