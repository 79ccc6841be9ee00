"""Quiet times, and what this kernel can tell."""

from pathlib import Path

from podwatch.checkpoints.settle_time import SettleTimes, capabilities_of
from podwatch.checkpoints.table import SaveEnd


def test_windows_by_strength_and_doubled_where_changes_show_late() -> None:
    windows = SettleTimes(5.0, 15.0, 60.0)
    assert [windows.need(m, slow=False) for m in (SaveEnd.COMMIT, SaveEnd.LAST, SaveEnd.NONE)] == [5, 15, 60]
    assert [windows.need(m, slow=True) for m in (SaveEnd.COMMIT, SaveEnd.LAST, SaveEnd.NONE)] == [10, 30, 120]
    assert windows.longest(slow=True) == 120


def test_the_filesystem_is_that_of_the_nearest_directory(tmp_path: Path) -> None:
    found = capabilities_of(tmp_path)
    assert found.filesystem
    assert (found.slow, found.inotify) == (False, True)
    assert list(tmp_path.iterdir()) == []
    assert capabilities_of(tmp_path / "not" / "there") == found
