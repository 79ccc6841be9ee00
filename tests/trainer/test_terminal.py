"""When somebody last typed in the terminal a trainer was started in: on a real pseudo-terminal."""

import os
import pty
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.domain.process import ProcessIdentity
from podwatch.domain.snapshot import TrainerSample
from podwatch.sensors.processes import ProcessSensor
from podwatch.system import procfs
from podwatch.system.clock import SystemClock
from podwatch.system.procfs import identify
from podwatch.trainer.operator_terminal import Terminal, device_of, terminal_of
from tests.support.pod import Pod, eventually

LONG_AGO = 5000.0


class Person:
    """A shell's child on a terminal of its own, which was last used long ago."""

    def __init__(self) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execv("/bin/sh", ["sh", "-c", "while read line; do echo $line; done"])
        standard_input = Path(f"/proc/{self.pid}/fd/0")
        eventually(lambda: str(standard_input.readlink()).startswith("/dev/pts/"))
        eventually(lambda: procfs.command(self.pid)[:1] == ("sh",))
        self.path = str(standard_input.readlink())
        os.utime(self.path, (time.time() - LONG_AGO,) * 2)

    @property
    def identity(self) -> ProcessIdentity:
        found = identify(self.pid)
        assert found is not None
        return found

    def end(self) -> None:
        try:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
            os.close(self.master)
        except OSError:
            pass


@pytest.fixture
def person() -> Iterator[Person]:
    made = Person()
    yield made
    made.end()


def test_typing_shows_and_output_does_not(person: Person) -> None:
    terminal = terminal_of(person.pid)
    assert terminal is not None
    assert terminal.path == person.path
    used = terminal.used_wall()
    assert used is not None
    assert time.time() - used > LONG_AGO - 100
    fd = os.open(person.path, os.O_WRONLY | os.O_NOCTTY)
    os.write(fd, b"SUCCESS Step 80 | the trainer prints\n")
    os.close(fd)
    used = terminal.used_wall()
    assert used is not None
    assert time.time() - used > LONG_AGO - 100, "what the trainer prints is nobody who types"
    os.write(person.master, b"ls\n")
    eventually(lambda: time.time() - (terminal.used_wall() or 0.0) < 60)
    assert replace(terminal, device=0).used_wall() is None, "the path of another terminal"
    assert Terminal("/dev/pts/nothing", 1).used_wall() is None


def test_without_a_terminal_there_is_none() -> None:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(60)
    try:
        eventually(lambda: os.getsid(pid) == pid)
        assert terminal_of(pid) is None
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert terminal_of(2**22 + 1) is None


@pytest.mark.parametrize(("number", "major", "minor"), [(0x8803, 136, 3), (0x0401, 4, 1), (0x00108801, 136, 0x101)])
def test_the_number_in_proc_is_understood(number: int, major: int, minor: int) -> None:
    assert device_of(number) == os.makedev(major, minor)


async def test_it_reaches_judgement_and_is_remembered_when_the_terminal_is_gone(pod: Pod, person: Person) -> None:
    handle = await pod.launcher().attach(person.identity)
    sensor = ProcessSensor(SystemClock(), poll=0.02)
    sensor.watch(handle)
    await sensor.start()
    try:
        sample = await _sample(sensor, alive=True)
        assert sample.terminal_used_wall is not None
        assert time.time() - sample.terminal_used_wall > LONG_AGO - 100
        used = sample.terminal_used_wall
        person.end()
        sample = await _sample(sensor, alive=False)
        assert sample.terminal_used_wall is not None
        assert abs(sample.terminal_used_wall - used) < 1
    finally:
        await sensor.stop()


async def _sample(sensor: ProcessSensor, *, alive: bool) -> TrainerSample:
    clock = SystemClock()
    for _ in range(2000):
        sample = sensor.latest().value
        if sample is not None and sample.alive is alive:
            return sample
        await clock.sleep(0.01)
    raise AssertionError("no such sample")
