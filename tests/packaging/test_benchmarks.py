"""The benchmarks use podwatch's own parts, which change: what they are made of runs here once, small."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.measuring.discard import BUCKET
from benchmarks.measuring.journaled import send_journaled
from tests.support.b2server import B2Server


@pytest.mark.parametrize("ahead", [False, True])
def test_the_sender_of_the_upload_benchmarks_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    monkeypatch.setattr("benchmarks.measuring.journaled.AHEAD", 0.1)
    paths = []
    for name in ("a", "b"):
        (tmp_path / "set").mkdir(exist_ok=True)
        paths.append(tmp_path / "set" / name)
        paths[-1].write_bytes(name.encode() * 100_000)
    with B2Server(tmp_path / "store", BUCKET) as server:
        sent = asyncio.run(send_journaled(server.url, str(tmp_path), paths, ahead=ahead))
    assert sent.seconds > 0
