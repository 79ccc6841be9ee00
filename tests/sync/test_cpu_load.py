"""What the kernel says of the cores, against work that this process really does."""

import time
from pathlib import Path

import pytest

from podwatch.sync import connections
from podwatch.sync.connections import busy_seconds


def test_work_is_busy_and_time_passes_on_all_cores() -> None:
    busy, total = busy_seconds()
    mine = time.process_time()
    while time.process_time() - mine < 0.3:
        pass
    more_busy, more_total = busy_seconds()
    assert more_busy - busy >= 0.1, "what we did ourselves, as far as the kernel's ticks tell it"
    spare = 0.05  # the kernel's iowait may step back (proc_stat(5)), and floats round
    assert more_busy - busy <= more_total - total + spare


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu 1 2 3\n", "intr 1 2 3 4 5 6 7 8\n", "cpu a b c d e f g h\n"])
def test_a_kernel_that_does_not_tell_is_no_error(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stat"
    monkeypatch.setattr(connections, "_STAT", path)
    assert busy_seconds() == (0.0, 0.0)
    path.write_text(text)
    assert busy_seconds() == (0.0, 0.0)
