"""How a restore shows itself while it runs, on a terminal and elsewhere."""

import sys

import pytest

from podwatch.cli.progress import Progress
from podwatch.domain.errors import RemoteError
from tests.support.clock import ManualClock

GB = 10**9


def play(progress: Progress, clock: ManualClock) -> None:
    """47 GB at 1 GB/s, reported ten times a second."""
    with progress:
        for tenth in range(471):
            clock.now = 1_000.0 + tenth / 10
            progress.show(tenth * GB // 10, 47 * GB)
            if tenth == 200:
                progress.waiting(RemoteError("the store does not answer"), 5.0)


def test_a_terminal_has_one_line_that_is_rewritten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = ManualClock()
    play(Progress(clock, quiet=False), clock)
    said = capsys.readouterr()
    assert said.out == ""
    first, waiting, last, end = said.err.split("\n")
    assert first.startswith("\r\x1b[K0 B of 47 GB (0 %)")
    assert "the store does not answer" in waiting
    assert last.endswith("\r\x1b[K47 GB of 47 GB (100 %), 1 GB/s")
    assert end == ""
    assert 100 < said.err.count("\r") < 300, "five times a second, not ten"
    assert all(len(piece) < 80 for piece in said.err.replace("\n", "\r").split("\r"))


def test_a_log_has_a_line_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    play(Progress(clock, quiet=False), clock)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["30 GB of 47 GB (63 %), 1 GB/s, about 17 s left"]


def test_json_output_has_nothing_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    play(Progress(clock, quiet=True), clock)
    assert capsys.readouterr() == ("", "")
