"""ProcessSensor over a handle on real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import MappingProxyType

import psutil

from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import Reading, SensorState, Supervision, TrainerSample, observed, unobserved
from podwatch.sensors.processes import ProcessSensor
from podwatch.system.clock import SystemClock
from podwatch.trainer.process_roles import RolePatterns
from podwatch.trainer.trainer_handle import StopReport
from tests.sensors.waiting import until


class RealHandle:
    """A launcher with children, as real processes; roles by the last argument."""

    supervision = Supervision.SUPERVISED
    ended, terminal_used = MappingProxyType[tuple[int, int], ExitStatus]({}), None

    def __init__(self, start_id: str, *roles: ProcessRole) -> None:
        self.start_id = start_id
        self.started_wall = time.time() - 50
        code = (
            "import subprocess, sys, time\n"
            "children = [subprocess.Popen(['sleep', '1000.' + number]) for number in sys.argv[1:]]\n"
            "time.sleep(1000)"
        )
        self._role_of = {str(n): role for n, role in enumerate(roles)}
        self.popen = subprocess.Popen([sys.executable, "-c", code, *self._role_of], start_new_session=True)
        self.launcher = ProcessIdentity(self.popen.pid, 1)
        self.denied = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls = 0

    def child(self, number: int) -> psutil.Process:
        """Waits until it runs its own program: just forked, it still has its parent's command line."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for process in psutil.Process(self.popen.pid).children():
                if process.cmdline()[-1:] == [f"1000.{number}"]:
                    return process
            time.sleep(0.01)
        raise AssertionError(f"child {number} does not run")

    async def exit_status(self) -> ExitStatus | None:
        code = self.popen.poll()
        if code is None:
            return None
        return ExitStatus(code=code) if code >= 0 else ExitStatus(signal=-code)

    async def tree(self, *, sweep: bool = False) -> Reading[tuple[ProcessSample, ...]]:
        self.calls += 1
        await self.gate.wait()
        now = time.monotonic()
        if self.denied:
            return unobserved(SensorState.DENIED, now, "/proc is mounted with hidepid: run podwatch as root")
        found = []
        try:
            root = psutil.Process(self.popen.pid)
            children = root.children()
        except psutil.NoSuchProcess:
            return observed((), now)
        for p in (root, *children):
            try:
                with p.oneshot():
                    role = self._role_of.get((p.cmdline() or ["x"])[-1].removeprefix("1000."), ProcessRole.OTHER)
                    letter = "Z" if p.status() == psutil.STATUS_ZOMBIE else "S"
                    role = ProcessRole.LAUNCHER if p.pid == root.pid else role
                    identity = ProcessIdentity(p.pid, int(p.create_time() * 100))
                    found.append(ProcessSample(identity, p.ppid(), p.name(), p.name(), role, letter))
            except psutil.NoSuchProcess:
                continue
        return observed(tuple(found), now)

    async def stop(
        self, *, grace: float, save_grace: float, saving: Callable[[], bool], max_kill_wait: float = 30.0
    ) -> StopReport:
        raise AssertionError("a sensor never stops anything")

    async def release(self) -> None:
        raise AssertionError("a sensor never releases anything")

    def kill(self) -> None:
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()


@asynccontextmanager
async def watching(*roles: ProcessRole) -> AsyncIterator[tuple[ProcessSensor, RealHandle]]:
    handle = RealHandle("start-1", *roles)
    sensor = ProcessSensor(SystemClock(), 0.02, deadline=0.5)
    await sensor.start()
    try:
        sensor.watch(handle)
        yield sensor, handle
    finally:
        await sensor.stop()
        handle.kill()


def value(sensor: ProcessSensor) -> TrainerSample:
    return sensor.latest().value or TrainerSample()


async def test_nothing_watched_is_a_good_reading() -> None:
    sensor = ProcessSensor(SystemClock(), 0.02)
    await sensor.start()
    await until(lambda: sensor.latest().ok)
    assert (value(sensor).supervision, value(sensor).alive) == (Supervision.NONE, False)
    await sensor.stop()


async def test_a_supervisor_that_ends_shows_in_the_next_look() -> None:
    async with watching(ProcessRole.TRAINER) as (sensor, handle):
        await until(lambda: sensor.latest().ok and value(sensor).supervision is Supervision.SUPERVISED)
        handle.supervision = Supervision.ATTACH
        await until(lambda: value(sensor).supervision is Supervision.ATTACH)
        assert value(sensor).supervisor_lost


async def test_a_living_tree_then_its_end() -> None:
    async with watching(ProcessRole.INFERENCE, ProcessRole.TRAINER) as (sensor, handle):
        assert sensor.latest().state is SensorState.PENDING
        roles = {ProcessRole.LAUNCHER, ProcessRole.INFERENCE, ProcessRole.TRAINER}
        await until(lambda: {p.role for p in value(sensor).descendants} == roles)  # none for a moment, during its exec
        sample = value(sensor)
        assert (sample.start_id, sample.alive, sample.exit) == ("start-1", True, None)
        assert len(sample.descendants) == 3
        assert abs(time.monotonic() - 50 - sample.started_at) < 5
        handle.kill()
        await until(lambda: not value(sensor).alive and sensor.latest().ok)
        assert value(sensor).exit == ExitStatus(signal=9)


async def test_a_child_that_ends_is_missing_from_the_tree_and_the_start_is_forgotten_with_it() -> None:
    async with watching(ProcessRole.INFERENCE, ProcessRole.TRAINER) as (sensor, handle):
        await until(lambda: sensor.latest().ok and len(value(sensor).descendants) == 3)
        child = handle.child(0)
        child.kill()
        await until(lambda: child.pid not in {p.identity.pid for p in value(sensor).descendants if p.state not in "ZX"})
        assert value(sensor).alive
        sensor.watch(None)
        assert value(sensor) == TrainerSample()


async def test_roles_by_the_operators_own_patterns() -> None:
    """Nothing in the titles of these processes says what they are for."""
    patterns = RolePatterns({ProcessRole.INFERENCE: ["^sleep$"]})
    handle = RealHandle("start-1", ProcessRole.OTHER, ProcessRole.OTHER)
    sensor = ProcessSensor(SystemClock(), 0.02, deadline=0.5, roles=patterns)
    await sensor.start()
    try:
        sensor.watch(handle)
        child = handle.child(0).pid
        await until(
            lambda: (
                (child, ProcessRole.INFERENCE)
                in {(p.identity.pid, p.role) for p in value(sensor).descendants if sensor.latest().ok}
            )
        )
    finally:
        await sensor.stop()
        handle.kill()


async def test_what_the_logs_say_of_the_end_is_read_before_an_end_is_shown() -> None:
    done: set[ProcessRole] = set()
    handle = RealHandle("start-1", ProcessRole.ORCHESTRATOR)

    class Logs:
        finish_line_seen = True

        @property
        def finished_roles(self) -> frozenset[ProcessRole]:
            return frozenset(done)

        async def look_again(self) -> None:
            done.add(ProcessRole.ORCHESTRATOR)

    sensor = ProcessSensor(SystemClock(), 0.02, logs=Logs())
    await sensor.start()
    try:
        sensor.watch(handle)
        await until(lambda: sensor.latest().ok and len(value(sensor).descendants) == 2)
        assert value(sensor).finish_line
        assert value(sensor).finished == frozenset()
        handle.child(0).kill()
        await until(lambda: len([p for p in value(sensor).descendants if p.state not in "ZX"]) == 1)
        assert value(sensor).finished == {ProcessRole.ORCHESTRATOR}, "not one reading that misses it comes before"
    finally:
        await sensor.stop()
        handle.kill()


async def test_a_tree_that_does_not_answer_is_blind_and_is_not_asked_again_meanwhile() -> None:
    async with watching(ProcessRole.TRAINER) as (sensor, handle):
        await until(lambda: sensor.latest().ok)
        handle.gate.clear()
        asked = handle.calls
        await until(lambda: handle.calls > asked)
        await until(lambda: sensor.latest().state is SensorState.BLIND)
        calls = handle.calls
        await asyncio.sleep(0.2)
        assert handle.calls == calls
        handle.gate.set()
        await until(lambda: sensor.latest().ok)


async def test_refused_is_denied_but_a_known_exit_still_counts() -> None:
    async with watching(ProcessRole.TRAINER) as (sensor, handle):
        handle.denied = True
        await until(lambda: sensor.latest().state is SensorState.DENIED)
        assert "run podwatch as root" in sensor.latest().detail
        handle.kill()
        await until(lambda: sensor.latest().ok)
        assert value(sensor).exit == ExitStatus(signal=9)


async def test_watching_another_start_forgets_the_first() -> None:
    async with watching(ProcessRole.TRAINER) as (sensor, handle):
        await until(lambda: sensor.latest().ok)
        handle.gate.clear()
        await asyncio.sleep(0.05)
        other = RealHandle("start-2", ProcessRole.TRAINER)
        try:
            sensor.watch(other)
            handle.gate.set()
            await until(lambda: sensor.latest().ok)
            assert value(sensor).start_id == "start-2"
            assert other.launcher.pid in {p.identity.pid for p in value(sensor).descendants}
        finally:
            other.kill()
