"""What the kernel gives to a process of ours, and how long it waits for a CPU."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.system.child import autogroup_of, cpu_waits, give, waited_share
from tests.support.busy import busy_cores, without_nice_right

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
    assert cpu_waits(process.pid) is None
    assert autogroup_of(process.pid) is None


def test_waits_for_a_cpu_are_seen() -> None:
    """A process that counts on a core beside two others, at the lowest priority."""
    with busy_cores():
        loop = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True)
        try:
            give(loop.pid, 19)
            before, began, share = cpu_waits(loop.pid), time.monotonic(), 0.0
            while before is None or share < 0.5:
                time.sleep(0.2)
                now, at = cpu_waits(loop.pid), time.monotonic()
                assert now is not None
                if before is not None:
                    share = waited_share(before, now, at - began)
                before, began = now, at
        finally:
            loop.kill()
            loop.wait()


def test_a_process_that_sleeps_waits_for_nothing(process: subprocess.Popen[bytes]) -> None:
    before = cpu_waits(process.pid)
    assert before is not None
    assert len(before) == 4
    time.sleep(0.1)
    after = cpu_waits(process.pid)
    assert after is not None
    assert waited_share(before, after, 10.0) < 0.2


def test_the_share_is_of_the_time_and_at_most_all_of_it() -> None:
    assert waited_share({1: 0, 2: 10**9}, {1: 10**9, 2: 2 * 10**9}, 10.0) == pytest.approx(0.2)
    assert waited_share({}, {1: 10**10, 2: 10**10}, 1.0) == 1.0
    assert waited_share({1: 10**9}, {2: 0}, 1.0) == 0.0
    assert waited_share({1: 1}, {1: 5}, 0.0) == 0.0


def test_this_process_is_read_like_any_other() -> None:
    waits = cpu_waits(os.getpid())
    assert waits is not None
    assert threading.get_native_id() in waits
