"""Ends of real processes: told the moment they come, with the exit status where the kernel or the supervisor knows
it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.domain.process import ExitStatus, ProcessRole, ProcessSample
from podwatch.sensors.processes import STATUS_SECONDS, Ends
from podwatch.system.clock import SystemClock
from podwatch.system.procfs import exit_of, identify
from tests.sensors.waiting import until
from tests.support.clock import ManualClock

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
sys.stdin.readline()
child.wait()
print("reaped", flush=True)
sys.stdin.readline()
"""
"""The child's parent is not this test, as the parent of an engine is not podwatch; it reaps it when it is told."""


class Grandchild:
    def __init__(self, code: str) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = int(self.read())
        identity = identify(self.pid)
        assert identity is not None
        self.sample = ProcessSample(identity, self.parent.pid, "VLLM::EngineCor", "", ProcessRole.ENGINE)

    def read(self) -> str:
        assert self.parent.stdout is not None
        return self.parent.stdout.readline()

    def reap(self) -> None:
        assert self.parent.stdin is not None
        self.parent.stdin.write("\n")
        self.parent.stdin.flush()
        assert self.read() == "reaped\n"

    def close(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.parent.kill()
        self.parent.communicate()


@pytest.fixture
def engine() -> Iterator[Grandchild]:
    made = Grandchild("import time; time.sleep(1000)")
    yield made
    made.close()


def tells_exits() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0)
    fd = os.pidfd_open(child)
    os.waitpid(child, 0)
    try:
        return exit_of(fd) is not None
    finally:
        os.close(fd)


class Told:
    def __init__(self, roles: list[ProcessRole] | None = None) -> None:
        self.roles = [] if roles is None else roles

    def on_end(self, role: ProcessRole) -> None:
        self.roles.append(role)


async def test_an_end_is_told_at_once_and_before_any_look(engine: Grandchild) -> None:
    told: list[ProcessRole] = []
    ends = Ends(SystemClock(), Told(told))
    ends.look([engine.sample], {})
    await asyncio.sleep(0)
    assert told == []
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: told)
    assert told == [ProcessRole.ENGINE]
    await asyncio.sleep(0.01)
    assert told == [ProcessRole.ENGINE], "once"
    ends.clear()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_how_it_ended_is_known_once_its_parent_reaped_it(engine: Grandchild, number: signal.Signals) -> None:
    if not tells_exits():
        pytest.skip("this kernel is older than 6.15 and keeps exit statuses to the parents")
    ends = Ends(SystemClock(), Told())
    ends.look([engine.sample], {})
    os.kill(engine.pid, number)
    ends.look([], {})
    assert ends.known == ()
    engine.reap()
    ends.look([], {})
    (end,) = ends.known
    assert (end.identity, end.role) == (engine.sample.identity, ProcessRole.ENGINE)
    assert (end.status.signal, end.status.code) == (int(number), None)
    ends.look([], {})
    assert len(ends.known) == 1
    ends.clear()
    assert ends.known == ()


async def test_an_exit_code(tmp_path: Path) -> None:
    if not tells_exits():
        pytest.skip("this kernel is older than 6.15 and keeps exit statuses to the parents")
    order = tmp_path / "end"
    engine = Grandchild(
        f"import os, sys, time\nwhile not os.path.exists({str(order)!r}): time.sleep(0.01)\nsys.exit(3)"
    )
    ends = Ends(SystemClock(), Told())
    try:
        ends.look([engine.sample], {})
        order.touch()
        engine.reap()
        ends.look([], {})
        assert [(end.status.code, end.status.signal) for end in ends.known] == [(3, None)]
    finally:
        ends.clear()
        engine.close()


async def test_what_the_supervisor_reaped_is_known_from_it(engine: Grandchild) -> None:
    ends = Ends(SystemClock(), Told())
    ends.look([engine.sample], {})
    status = ExitStatus(signal=15)
    identity = engine.sample.identity
    ends.look([], {(identity.pid, identity.start_ticks): status})
    assert [end.status for end in ends.known] == [status]
    ends.clear()


async def test_no_descriptor_stays_open(engine: Grandchild) -> None:
    def open_now() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    clock = ManualClock()
    ends = Ends(clock, Told())
    before = open_now()
    ends.look([engine.sample], {})
    assert open_now() == before + 1
    ends.look([], {})
    assert open_now() == before + 1, "its status may still come"
    clock.advance(STATUS_SECONDS + 1.0)
    ends.look([], {})
    assert open_now() == before
    ends.look([engine.sample], {})
    ends.clear()
    assert open_now() == before


async def test_other_processes_are_not_followed() -> None:
    identity = identify(os.getpid())
    assert identity is not None
    ends = Ends(SystemClock(), Told())
    before = len(list(Path("/proc/self/fd").iterdir()))
    ends.look([ProcessSample(identity, 1, "x", "x", ProcessRole.OTHER)], {})
    assert len(list(Path("/proc/self/fd").iterdir())) == before
