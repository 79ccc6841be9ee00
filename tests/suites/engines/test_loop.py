"""loop.sh, run for real: which codes it repeats, and what a signal does. A stand-in for podwatch ends as it is told to;
tests/suites/engines/test_commands.py runs podwatch itself."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.engines.stand_in import StandIn

LOOP = Path(__file__).parents[3] / "examples" / "engines" / "loop.sh"


class Loop:
    def __init__(self, directory: Path) -> None:
        self.podwatch = StandIn(directory)
        self._process: subprocess.Popen[str] | None = None

    def start(self, codes: str, pause: str = "0", *arguments: str) -> None:
        self.podwatch.ends_with(codes)
        self._process = subprocess.Popen(
            ["sh", str(LOOP), *arguments],
            env={"PATH": f"{self.podwatch.bin}:{os.environ['PATH']}", "PAUSE": pause},
            start_new_session=True, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    @property
    def process(self) -> "subprocess.Popen[str]":
        assert self._process is not None
        return self._process

    def end(self) -> int:
        output, _ = self.process.communicate(timeout=60)
        assert output in ("", "Killed\n"), "nothing but podwatch speaks, apart from sh on a kill"
        return self.process.returncode

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("codes", "starts", "code"),
    [("0", 1, 0), ("65", 1, 65), ("78", 1, 78), ("69", 1, 69), ("86 86 0", 3, 0), ("KILL 86 65", 3, 65)],
)
def test_only_86_and_a_kill_are_repeated(loop: Loop, codes: str, starts: int, code: int) -> None:
    loop.start(codes, "0", "--run-id", "a run", "--", "train")
    assert loop.end() == code
    assert loop.podwatch.starts == ["run --job --run-id a run -- train"] * starts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_podwatch_and_then_the_loop(loop: Loop, number: signal.Signals) -> None:
    """To the shell alone, as `kill` does; podwatch's goodbye is waited for, and nothing is started after it."""
    loop.start("wait 0")
    loop.podwatch.wait_started()
    time.sleep(0.3)  # the shell waits
    loop.process.send_signal(number)
    time.sleep(0.5)
    loop.process.send_signal(number)  # again, during the goodbye
    assert loop.end() == 86
    assert len(loop.podwatch.starts) == 1
    assert set(loop.podwatch.signals) == {"SIGTERM"}


def test_ctrl_c_reaches_both_once_each_and_ends_both(loop: Loop) -> None:
    """A terminal signals the whole group; a background job of sh ignores SIGINT unless it takes it itself."""
    loop.start("wait 0")
    loop.podwatch.wait_started()
    time.sleep(0.3)
    os.killpg(loop.process.pid, signal.SIGINT)
    assert loop.end() == 86
    assert len(loop.podwatch.starts) == 1


def test_a_signal_between_two_runs_ends_the_loop(loop: Loop) -> None:
    loop.start("86 0", pause="60")
    loop.podwatch.wait_started()
    time.sleep(1)
    began = time.monotonic()
    loop.process.send_signal(signal.SIGTERM)
    assert loop.end() == 86  # its output ends with its sleep
    assert time.monotonic() - began < 20
    assert len(loop.podwatch.starts) == 1
