"""The trainer's own "latest" files: repaired by one rename, never outside the run, never half."""

import os
from pathlib import Path

import pytest

from podwatch.checkpoints.shapes import Tracker
from podwatch.checkpoints.trackers import repair_trackers
from podwatch.domain.errors import HostError
from podwatch.system.pinned_directories import PinnedTree
from tests.drivers.checkpoints import open_layout


def test_a_number_is_read_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "latest_checkpointed_iteration.txt"
    layout = open_layout("verl", tmp_path)

    def number(_path: Path) -> int | None:
        return next(iter(layout.pinned()), None)

    assert number(path) is None
    for text, expected in [("7", 7), ("7\n", 7), ("", None), ("07", None), ("7.5", None), ("x", None), ("7 8", None)]:
        path.write_text(text)
        assert number(path) == expected
    path.write_bytes(b"\xff\xfe")
    assert number(path) is None
    path.write_bytes(b"1" * 5000)
    assert number(path) is None
    path.unlink()
    os.mkfifo(path)
    assert number(path) is None


def test_written_only_where_it_says_something_else(tmp_path: Path) -> None:
    path = tmp_path / "latest.txt"
    wanted = Tracker(path, content=b"10")
    assert repair_trackers([wanted], PinnedTree([tmp_path])) == (path,)
    assert path.read_bytes() == b"10"
    before = path.stat()
    assert repair_trackers([wanted], PinnedTree([tmp_path])) == ()
    path.write_text("10\n")
    assert repair_trackers([wanted], PinnedTree([tmp_path])) == ()
    path.chmod(0o600)
    path.write_text("")
    assert repair_trackers([wanted], PinnedTree([tmp_path]), only_missing=True) == (path,)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_ino != before.st_ino
    path.write_text("20")
    assert repair_trackers([wanted], PinnedTree([tmp_path]), only_missing=True) == ()
    assert repair_trackers([wanted], PinnedTree([tmp_path])) == (path,)
    assert [p.name for p in tmp_path.iterdir()] == ["latest.txt"]


def test_a_link_is_replaced_by_a_rename_and_a_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / "step_latest"
    link.symlink_to("step_20")
    assert repair_trackers([Tracker(link, target="step_10")], PinnedTree([tmp_path])) == (link,)
    assert link.readlink() == Path("step_10")
    assert repair_trackers([Tracker(link, target="step_10")], PinnedTree([tmp_path])) == ()
    tracker = tmp_path / "latest.txt"
    tracker.symlink_to(victim)
    assert repair_trackers([Tracker(tracker, content=b"10")], PinnedTree([tmp_path])) == (tracker,)
    assert not tracker.is_symlink()
    assert victim.read_text() == "precious"


def test_nothing_outside_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "else").mkdir()
    (tmp_path / "run" / "leads-out").symlink_to(tmp_path / "else")
    for path in (tmp_path / "else" / "latest", tmp_path / "run" / "leads-out" / "latest"):
        with pytest.raises(HostError, match="outside"):
            repair_trackers([Tracker(path, content=b"1")], PinnedTree([tmp_path / "run"]))
    assert list((tmp_path / "else").iterdir()) == []
    assert (
        repair_trackers([Tracker(tmp_path / "run" / "no" / "latest", content=b"1")], PinnedTree([tmp_path / "run"]))
        == ()
    )
