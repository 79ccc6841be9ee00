"""Every layout against its trainer's write order: whole after the last operation and never before."""

import os
from pathlib import Path

import pytest

from tests.drivers.checkpoints import Inspection, InspectionOutcome, Layout, SaveEnd, one_reader, open_layout
from tests.drivers.checkpoints import judge as judge_listed
from tests.support.layout_checks import age
from tests.support.layout_makers import Operation, Script, run
from tests.support.layout_makers.core import MAKERS

pytestmark = pytest.mark.slow

NAMES = sorted(MAKERS)


def made(name: str, output_dir: Path, step: int) -> tuple[Layout, list[Operation]]:
    layout, maker = MAKERS[name]
    output_dir.mkdir(parents=True, exist_ok=True)
    return open_layout(layout, output_dir), maker(output_dir, step)


def judge(layout: Layout, step: int) -> Inspection:
    return judge_listed(layout, step) or Inspection(InspectionOutcome.NOT_COMPLETE, "no such step")


@pytest.mark.parametrize("name", NAMES)
def test_whole_after_the_last_operation_and_never_before(name: str, tmp_path: Path) -> None:
    layout, operations = made(name, tmp_path / "out", 10)
    with one_reader():
        for number, operation in enumerate(operations):
            verdict = judge(layout, 10)
            assert not verdict.whole, f"whole before operation {number} of {len(operations)}"
            operation()
        verdict = judge(layout, 10)
    assert verdict.whole, verdict.reason
    assert verdict.reason == ""
    assert verdict.ends is not SaveEnd.NONE


@pytest.mark.parametrize("name", NAMES)
def test_a_second_step_beside_a_whole_one(name: str, tmp_path: Path) -> None:
    """The tracker and the files of the step before must not speak for the new one."""
    layout, operations = made(name, tmp_path / "out", 10)
    run(operations)
    age(tmp_path / "out", 100)
    _, second = made(name, tmp_path / "out", 20)
    with one_reader():
        for number, operation in enumerate(second):
            assert not judge(layout, 20).whole, f"whole before operation {number} of {len(second)}"
            assert number % 5 or judge(layout, 10).whole or "empty or garbled" in judge(layout, 10).reason
            operation()
        assert judge(layout, 20).whole
        assert judge(layout, 10).whole


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_written_again_is_not_whole_in_between(name: str, tmp_path: Path) -> None:
    """After a rollback the old files, markers and tracker lie there while the new ones are written over them."""
    layout, operations = made(name, tmp_path / "out", 10)
    run(operations)
    age(tmp_path / "out", 100)
    _, again = made(name, tmp_path / "out", 10)
    if layout.name == "prime-rl":
        # Two processes write the halves: an orchestrator's new half beside the trainer's old one is whole.
        script = Script()
        script.dcp(layout.part_dir("trainer", 10))
        again = script.operations
    untouched = judge(layout, 10)
    assert untouched.whole, untouched.reason
    tracker_only = 4 if MAKERS[name][0] in ("verl", "megatron") else 0
    with one_reader():
        for number, operation in enumerate(again):
            operation()
            if number < len(again) - 1 - tracker_only:
                assert not judge(layout, 10).whole, f"whole after operation {number} of {len(again)}"
        assert judge(layout, 10).whole, judge(layout, 10).reason


@pytest.mark.parametrize("name", NAMES)
def test_every_file_of_a_set_counts(name: str, tmp_path: Path) -> None:
    """Cut off at any file in the middle: never whole. Removed: never whole, unless nobody needs it."""
    layout, operations = made(name, tmp_path / "out", 10)
    run(operations)
    spared = ("huggingface/", "transformer_config.json", "generation_config.json", "training_args.bin", "context/")
    spared += ("model/consolidated/", "config.json", "rng_state.pth", "common.pt")
    # One rank's part of the model, before podwatch has seen the checkpoint: its index says nothing of the model.
    spared += ("model/shard-",)
    with one_reader():
        for path in sorted(p for p in (tmp_path / "out").rglob("*") if p.is_file() and p.stat().st_size > 8):
            status = path.stat()
            data = path.read_bytes()
            inside = path.relative_to(tmp_path / "out").as_posix()
            if not path.name.endswith(".yaml"):
                path.write_bytes(data[: len(data) // 2])
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
                assert not judge(layout, 10).whole, f"{inside} is cut in half"
            path.unlink()
            if not any(word in inside for word in spared):
                assert not judge(layout, 10).whole, f"{inside} is gone"
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert judge(layout, 10).whole


@pytest.mark.parametrize("name", NAMES)
def test_a_restore_into_an_empty_directory_is_seen_again(name: str, tmp_path: Path) -> None:
    """``part_dir`` works where nothing lies yet; a set moved there, with its trackers, is the same step and whole."""
    layout, operations = made(name, tmp_path / "out", 10)
    run(operations)
    parts = [p for p in layout.steps()[10] if p.required]
    (tmp_path / "other").mkdir()
    empty = open_layout(layout.name, tmp_path / "other")
    empty.expect_parts([p.name for p in parts])
    for part in parts:
        target = empty.part_dir(part.name, 10)
        assert tmp_path / "other" in target.parents
        target.parent.mkdir(parents=True, exist_ok=True)
        part.path.rename(target)
    for tracker in empty.trackers(10):
        tracker.path.write_bytes(tracker.content or b"")
    assert set(empty.steps()) == {10}
    verdict = judge(empty, 10)
    assert verdict.whole, verdict.reason
    assert empty.step_paths(10)
    assert empty.ahead_of(10) == () or layout.name == "prime-rl"


@pytest.mark.parametrize("name", NAMES)
def test_foreign_names_and_links_are_no_steps(name: str, tmp_path: Path) -> None:
    layout, operations = made(name, tmp_path / "out", 10)
    run(operations)
    step_dir = layout.step_paths(10)[0]
    for other in (".bad", ".tmp", "-latest"):
        (step_dir.parent / f"{step_dir.name}{other}").mkdir()
    (step_dir.parent / step_dir.name.replace("10", "30")).symlink_to(step_dir.name)
    (step_dir.parent / step_dir.name.replace("10", "40")).write_text("a file")
    known = set(layout.steps())
    assert known == {10}
    assert layout.ahead_of(10) == () or layout.name == "prime-rl"
