"""The upload benchmarks are built from podwatch's own parts, which change: here they run once, small."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.measuring import ROOT, journaled


@pytest.fixture
def service() -> Iterator[str]:
    """The URL of the benchmarks' own service."""
    command = [sys.executable, "-m", "benchmarks.measuring.discard"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_sender_of_the_benchmarks_sends(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(journaled, "AHEAD", 0.1)
    checkpoint = tmp_path / "set"
    checkpoint.mkdir()
    paths = [checkpoint / "a", checkpoint / "b"]
    for path in paths:
        path.write_bytes(path.name.encode() * 100_000)
    sent = asyncio.run(journaled.send_journaled(service, str(tmp_path), paths, ahead=ahead))
    assert sent.seconds > 0
