"""The demo itself, with the real daemon: it must succeed, tell what happened, and leave nothing behind."""

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from podwatch.simulation.demo import SCENARIOS, Result, run
from podwatch.simulation.pod import MARKER
from podwatch.simulation.verify import Screen

pytestmark = pytest.mark.slow


def left_behind() -> list[str]:
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "podwatch-demo-" in line]
    return mounts + [str(path) for path in Path(tempfile.gettempdir()).glob("podwatch-demo-*")]


def pids_of(root: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARKER}={root}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.timeout(600)
def test_a_silent_death_is_healed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = io.StringIO()
    code = run("silent-death", screen=Screen(out))
    text = out.getvalue()
    assert code == 0, text
    for words in (
        "FAULT: SIGKILL to VLLM::EngineCore",
        "died silently",
        "verified byte by byte",
        "complete checkpoint",
    ):
        assert words in text
    assert "\x1b" not in text
    assert left_behind() == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_clean_up(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "podwatch", "demo"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        line = ""
        while "training started" not in line:
            line = process.stdout.readline()
            assert line, "the demo ended before training started"
        root = next(tmp_path.glob("podwatch-demo-*"))
        deadline = time.monotonic() + 60
        while len(pids_of(root)) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        process.stdout.read()
    assert process.wait(60) == 130
    assert pids_of(root) == []
    assert list(tmp_path.iterdir()) == []
    assert str(root) not in Path("/proc/mounts").read_text()


def test_the_command_offers_every_scenario() -> None:
    from podwatch.cli import demo

    assert set(demo.SCENARIOS) == set(SCENARIOS)


def test_one_failed_line_fails_the_demo() -> None:
    result = Result()
    assert not result.ok
    result.add("a", True, "")
    assert result.ok
    result.add("b", False, "")
    assert not result.ok
