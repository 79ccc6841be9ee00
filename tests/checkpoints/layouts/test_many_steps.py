"""Thousands of steps: the directory is not listed again for each of them, and a change in it is seen at once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of
from podwatch.config.settings import CustomLayoutSettings
from podwatch.system.clock import SystemClock
from tests.drivers.checkpoints import catalogue_of, open_layout
from tests.support.checkpoints import ManualClock, dcp_files


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


@pytest.mark.parametrize(("kind", "write"), [("dcp", write_dcp), ("verl", write_verl)])
def test_the_first_look_lists_the_steps_a_few_times_not_once_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, write: Callable[[Path, int], None]
) -> None:
    write(tmp_path, 40)
    listed: list[object] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(path), real(path))[1])
    catalogue = catalogue_of(open_layout(kind, tmp_path), SystemClock(), settle=0.0, settle_weak=0.0)
    assert len(catalogue.rescan()) == 40
    assert listed.count(tmp_path) <= 4
    catalogue.rescan()
    assert listed.count(tmp_path) <= 8


def test_an_empty_directory_is_believed_only_after_a_second_look(tmp_path: Path) -> None:
    """The first one reads it before anyone knows that its time counts."""
    write_dcp(tmp_path, 2)
    clock = ManualClock()
    catalogue = catalogue_of(open_layout("dcp", tmp_path), clock, settle=0.0, settle_weak=0.0)
    for number in range(4):
        os.utime(tmp_path, (1_600_000_000,) * 2)
        if number == 3:  # everything else is settled, and the directory is an old one
            (tmp_path / "step-2").mkdir()
            for path in (tmp_path, tmp_path / "step-2"):
                os.utime(path, (1_500_000_000,) * 2)
        catalogue.rescan()
        clock.advance(100)
    for name, data in dcp_files(size=256, ranks=2).items():
        (tmp_path / "step-2" / name).write_bytes(data)
    assert [s.step for s in catalogue.rescan()] == [0, 1, 2]


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
    layout = open_layout("dcp", tmp_path)
    catalogue = catalogue_of(layout, SystemClock(), settle=0.0, settle_weak=0.0)
    catalogue.rescan()
    for step in range(10, 30):
        (tmp_path / f"step-{step}").rename(tmp_path / f"gone{step}x")
    for _ in range(2):
        found = {s.step: s for s in catalogue.rescan()}
    assert not found[5].complete
    assert "optimizer" in found[5].reason


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
    for name in sorted(all_trainers()):
        layout = layout_of(all_trainers()[name], Site(tmp_path, custom=CustomLayoutSettings(parts="ckpt_{step}")))
        assert layout.steps() == {}, name
        assert layout.ahead_of(5) == (), name
