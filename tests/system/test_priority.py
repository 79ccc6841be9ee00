"""What the kernel gives to a process of ours."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.system.child import autogroup_of, give
from tests.support.busy import without_nice_right

THREADS = "import threading, sys\nfor _ in range(3): threading.Thread(target=sys.stdin.read).start()\nprint(flush=True)"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Four threads, in a session of its own."""
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-S", "-c", THREADS], stdin=pipe, stdout=pipe, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.kill()
    child.communicate()


def nices(pid: int) -> list[int]:
    return [os.getpriority(os.PRIO_PROCESS, int(t.name)) for t in Path(f"/proc/{pid}/task").iterdir()]


def test_all_threads_get_it(process: subprocess.Popen[bytes]) -> None:
    assert give(process.pid, 19).nice
    assert nices(process.pid) == [19] * 4
    assert autogroup_of(process.pid) in (19, None)


@pytest.mark.root
def test_without_the_right_the_autogroup_rises_and_the_nice_value_does_not(process: subprocess.Popen[bytes]) -> None:
    give(process.pid, 19)
    time.sleep(0.15)  # the kernel takes one change in 0.1 s
    with without_nice_right():
        given = give(process.pid, 0)
    assert given.autogroup
    assert not given.nice
    assert nices(process.pid) == [19] * 4
    assert autogroup_of(process.pid) in (0, None)


def test_one_that_has_ended_takes_nothing(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert not give(process.pid, 10).nice
    assert autogroup_of(process.pid) is None
