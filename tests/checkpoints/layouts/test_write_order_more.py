"""The trainers of ``layout_makers.more`` against their write order: whole after the last operation and never before."""

import os
import shutil
from pathlib import Path

import pytest

from tests.drivers.checkpoints import Layout, SaveEnd, chosen, one_reader, open_layout, recognised
from tests.support.layout_checks import age, verdict, whole_prefixes
from tests.support.layout_makers import Operation, run
from tests.support.layout_makers.more import COMMANDS, MAKERS, NO_MARKER, NOT_OVER_ITSELF

pytestmark = pytest.mark.slow

NAMES = sorted(MAKERS)


def made(name: str, output_dir: Path, step: int) -> tuple[Layout, list[Operation]]:
    layout, maker = MAKERS[name]
    output_dir.mkdir(parents=True, exist_ok=True)
    return open_layout(layout, output_dir, COMMANDS.get(name, ())), maker(output_dir, step)


@pytest.mark.parametrize("name", NAMES)
def test_whole_after_the_last_operation_and_never_before(name: str, tmp_path: Path) -> None:
    """The first step, a second one beside it, and the first one saved again over itself: no tracker, marker or file of
    an earlier save speaks for a later one."""
    layout, operations = made(name, tmp_path / "out", 10)
    with one_reader():
        assert whole_prefixes(layout, 10, operations) == []
        found = verdict(layout, 10)
        assert found.reason == ""
        assert (found.ends is SaveEnd.NONE) == (name in NO_MARKER)
        age(tmp_path / "out", 100)
        _, second = made(name, tmp_path / "out", 20)
        assert whole_prefixes(layout, 20, second) == []
        found = verdict(layout, 10)
        assert found.whole, found.reason
        if name in NOT_OVER_ITSELF:
            return
        age(tmp_path / "out", 100)
        _, again = made(name, tmp_path / "out", 10)
        early = [
            n for i, n in enumerate(whole_prefixes(layout, 10, again), 1) if n != i
        ]  # 1, 2...: nothing changed yet
    # The last files are one in the parent (which names the step already), or a few that all saves end with.
    assert not early or early[0] >= len(again) - 6, early


@pytest.mark.parametrize("name", NAMES)
def test_every_file_of_a_set_counts(name: str, tmp_path: Path) -> None:
    """Cut in half or removed: never whole, unless nobody needs it (or nothing in the format could tell)."""
    layout, operations = made(name, tmp_path / "out", 10)
    run(operations)
    blind = ("/d/", "huggingface/", "commit_success.txt", "zero_to_fp32.py", "config.yaml", "sampler.bin", ".txt")
    spared = (*blind, "config.json", "scheduler.bin", "data.pt", "metadata.json", "manifest.ocdbt", "train_dataloader")
    spared += ("_METADATA", "tokenizer")
    with one_reader():
        for path in sorted(p for p in (tmp_path / "out").rglob("*") if p.is_file() and p.stat().st_size > 8):
            status, data = path.stat(), path.read_bytes()
            inside = path.relative_to(tmp_path / "out").as_posix()
            if not any(word in inside for word in blind):
                path.write_bytes(data[: len(data) // 2])
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
                assert not verdict(layout, 10).whole, f"{inside} is cut in half"
            path.unlink()
            if not any(word in inside for word in spared):
                assert not verdict(layout, 10).whole, f"{inside} is gone"
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        found = verdict(layout, 10)
    assert found.whole, found.reason


@pytest.mark.parametrize("name", NAMES)
def test_a_restore_into_an_empty_directory_is_seen_again(name: str, tmp_path: Path) -> None:
    layout, operations = made(name, tmp_path / "out", 10)
    run(operations)
    parts = [p for p in layout.steps()[10] if p.required]
    (tmp_path / "other").mkdir()
    empty = open_layout(layout.name, tmp_path / "other", COMMANDS.get(name, ()))
    empty.expect_parts([p.name for p in parts])
    for part in parts:
        target = empty.part_dir(part.name, 10)
        assert target == tmp_path / "other" or tmp_path / "other" in target.parents
        if part.name in empty.shared_parts:
            for entry in part.names:
                target.mkdir(parents=True, exist_ok=True)
                shutil.move(part.path / entry, target / entry)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            part.path.rename(target)
    for tracker in empty.trackers(10):
        if tracker.target is not None:
            tracker.path.symlink_to(tracker.target)
        else:
            tracker.path.write_bytes(tracker.content or b"")
    assert set(empty.steps()) == {10}
    found = verdict(empty, 10)
    assert found.whole, found.reason
    assert [p.name for p in empty.step_paths(10)] == [p.name for p in layout.step_paths(10)] or empty.step_paths(10)
    assert empty.ahead_of(10) == ()
    assert empty.ahead_of(9) == empty.step_paths(10)


@pytest.mark.parametrize("name", NAMES)
def test_foreign_names_and_links_are_no_steps(name: str, tmp_path: Path) -> None:
    layout, operations = made(name, tmp_path / "out", 10)
    run(operations)
    for place in layout.step_paths(10):
        for other in (".bad", ".tmp", "-latest"):
            (place.parent / f"{place.name}{other}").mkdir()
        (place.parent / place.name.replace("10", "30")).symlink_to(place.name)
        (place.parent / place.name.replace("10", "50")).symlink_to("/etc")
        if layout.name != "lightning":
            (place.parent / place.name.replace("10", "40")).write_text("a file")
    assert set(layout.steps()) == {10}
    assert layout.ahead_of(10) == ()
    assert verdict(layout, 10).whole


@pytest.mark.parametrize("name", NAMES)
def test_recognised_by_its_files_and_by_nobody_else(name: str, tmp_path: Path) -> None:
    for out in (tmp_path / "none", tmp_path):
        layout = open_layout(MAKERS[name][0], out)
        assert layout.steps() == {}
        assert (layout.step_paths(5), layout.ahead_of(None), layout.progress()) == ((), (), ())
        assert layout.pinned() == {}
        assert layout.watch_roots()
    for step in (10, 20):
        layout, operations = made(name, tmp_path, step)
        run(operations)
    assert [s.step for s in layout.progress()] == [20]
    found = recognised(tmp_path)
    assert [r.layout for r in found if r.certain] == [layout.name]
    assert chosen(tmp_path) == layout.name
