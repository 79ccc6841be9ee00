"""ProcessSensor over a handle on real processes, and the rules of required exits over looks as data."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.process import TICKS_PER_SECOND, ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import Reading, SensorState, Supervision, TrainerSample, observed, unobserved
from podwatch.sensors.processes import MIN_SIGHTINGS, REPLACEMENT_WINDOW, ProcessSensor, RequiredExits
from podwatch.system.clock import SystemClock
from podwatch.trainer.base import StopReport
from podwatch.trainer.process_roles import RolePatterns
from tests.sensors.waiting import until
from tests.support.examples import examples


def process(pid: int, role: ProcessRole, parent: int = 1, *, state: str = "S") -> ProcessSample:
    return ProcessSample(ProcessIdentity(pid, pid * 10), parent, role.value, role.value, role, state)


LAUNCHER = process(10, ProcessRole.LAUNCHER)
SERVER = process(20, ProcessRole.INFERENCE, 10)
ENGINE = process(21, ProcessRole.ENGINE, 20)
WORKER = process(22, ProcessRole.ENGINE, 21)
ORCHESTRATOR = process(30, ProcessRole.ORCHESTRATOR, 10)
TRAINER = process(40, ProcessRole.TRAINER, 10)
ALL = (LAUNCHER, SERVER, ENGINE, WORKER, ORCHESTRATOR, TRAINER)


def without(*gone: ProcessSample) -> tuple[ProcessSample, ...]:
    return tuple(p for p in ALL if p not in gone)


class Looks:
    """A look every two seconds."""

    def __init__(self) -> None:
        self.exits = RequiredExits()
        self.now = 100.0

    def look(self, *tree: ProcessSample, times: int = 1) -> list[int]:
        """PIDs of the exits after ``times`` looks at ``tree``."""
        found: list[int] = []
        for _ in range(times):
            self.now += 2.0
            found = [e.identity.pid for e in self.exits.look(tree, self.now, self.now + 1e9)]
        return found


def test_all_alive_is_no_exit() -> None:
    assert Looks().look(*ALL, times=10) == []


def test_a_server_that_ends_is_reported_after_the_window_with_the_time_it_went() -> None:
    looks = Looks()
    looks.look(*ALL, times=3)
    gone_at = looks.now + 2
    assert looks.look(*without(SERVER, ENGINE, WORKER)) == []
    assert looks.look(*without(SERVER, ENGINE, WORKER), times=2) == []
    assert looks.now - gone_at < REPLACEMENT_WINDOW
    assert looks.look(*without(SERVER, ENGINE, WORKER)) == [20, 21, 22]
    first = looks.exits.so_far[0]
    assert (first.role, first.seen_gone_at, first.status.known) == (ProcessRole.INFERENCE, gone_at, False)
    assert first.status.at_wall == gone_at + 1e9
    assert looks.look(*without(SERVER, ENGINE, WORKER), times=5) == [20, 21, 22]  # said once, and kept


def test_when_it_was_seen_last_is_kept_where_the_tree_could_not_be_read_for_a_while() -> None:
    looks = Looks()
    looks.look(*ALL, times=3)
    seen_at = looks.now
    looks.now += 60.0
    looks.look(*without(SERVER, ENGINE, WORKER), times=5)
    assert {(e.last_seen_at, e.seen_gone_at) for e in looks.exits.so_far} == {(seen_at, seen_at + 62.0)}


def test_how_long_it_had_lived_counts_from_its_own_start() -> None:
    """podwatch may have been started long after it."""
    exits, born = RequiredExits(), ENGINE.identity.start_ticks / TICKS_PER_SECOND
    for now in range(0, 20, 2):
        exits.look((LAUNCHER, ENGINE) if now < 6 else (LAUNCHER,), float(now), 0.0, boottime=born + 3600.0 + now)
    assert [gone.seen_for for gone in exits.so_far] == [3606.0]


def test_exits_keep_their_order() -> None:
    looks = Looks()
    looks.look(*ALL, times=3)
    looks.look(*without(ENGINE, WORKER))
    assert looks.look(*without(ENGINE, WORKER, SERVER, ORCHESTRATOR), times=5) == [21, 22, 20, 30]


def test_a_launcher_is_not_a_required_child_and_a_trainer_is() -> None:
    looks = Looks()
    looks.look(*ALL, times=3)
    assert looks.look(*without(LAUNCHER), times=6) == []
    assert looks.look(*without(TRAINER, LAUNCHER), times=6) == [40]


def test_how_it_ended_is_told_where_somebody_knows() -> None:
    exits, tree = RequiredExits(), (LAUNCHER, ENGINE, SERVER)
    ended = {(ENGINE.identity.pid, ENGINE.identity.start_ticks): ExitStatus(signal=9, at_wall=5.0)}
    for now in range(0, 20, 2):
        exits.look(tree if now < 6 else (LAUNCHER,), float(now), 0.0, ended)
    assert {gone.role: gone.status.describe() for gone in exits.so_far} == {
        ProcessRole.ENGINE: "signal 9",
        ProcessRole.INFERENCE: "unknown exit status",
    }


def test_a_replacement_in_time_cancels() -> None:
    looks = Looks()
    looks.look(*ALL, times=3)
    looks.look(*without(SERVER, ENGINE, WORKER))
    fresh = (
        process(50, ProcessRole.INFERENCE, 10),
        process(51, ProcessRole.ENGINE, 50),
        process(52, ProcessRole.ENGINE, 51),
    )
    assert looks.look(*without(SERVER, ENGINE, WORKER), *fresh, times=6) == []
    assert looks.look(*without(SERVER, ENGINE, WORKER), times=5) == [50, 51, 52]  # and is itself required from then on


def test_a_replacement_too_late_does_not() -> None:
    looks = Looks()
    looks.look(*ALL, times=3)
    looks.look(*without(ORCHESTRATOR), times=4)
    assert looks.look(*without(ORCHESTRATOR), process(50, ProcessRole.ORCHESTRATOR, 10), times=3) == [30]


def test_one_new_server_does_not_make_up_for_two() -> None:
    looks = Looks()
    other = process(60, ProcessRole.INFERENCE, 10)
    looks.look(LAUNCHER, SERVER, other, times=3)
    looks.look(LAUNCHER)
    assert len(looks.look(LAUNCHER, process(61, ProcessRole.INFERENCE, 10), times=5)) == 1


def test_two_servers_started_together_do_not_replace_each_other() -> None:
    looks = Looks()
    other = process(60, ProcessRole.INFERENCE, 10)
    looks.look(LAUNCHER, SERVER, other, times=2)
    assert looks.look(LAUNCHER, other, times=5) == [20]


def test_a_helper_of_the_same_role_is_its_parents_business() -> None:
    looks = Looks()
    looks.look(*ALL, times=3)
    assert looks.look(*without(WORKER), times=6) == []


def test_a_zombie_is_gone() -> None:
    looks = Looks()
    looks.look(*ALL, times=3)
    assert looks.look(*without(SERVER), replace(SERVER, state="Z"), times=5) == [20]


def test_a_fork_caught_before_it_execs_is_not_required() -> None:
    looks = Looks()
    fork = process(70, ProcessRole.ORCHESTRATOR, 40)
    looks.look(*ALL, times=3)
    looks.look(*ALL, fork)
    assert looks.look(*ALL, times=5) == []
    looks.look(*ALL, fork)
    looks.look(*ALL, replace(fork, role=ProcessRole.OTHER), times=3)
    assert looks.look(*ALL, times=5) == []


def test_a_pid_used_again_is_another_process() -> None:
    looks = Looks()
    looks.look(LAUNCHER, ORCHESTRATOR, times=3)
    reused = replace(process(30, ProcessRole.OTHER, 10), identity=ProcessIdentity(30, 999))
    assert looks.look(LAUNCHER, reused, times=5) == [30]


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.sets(st.sampled_from(ALL)), max_size=25))
def test_nothing_alive_is_ever_reported_and_nothing_twice(history: list[set[ProcessSample]]) -> None:
    looks = Looks()
    sightings: dict[ProcessIdentity, int] = {}
    for tree in history:
        for p in tree:
            sightings[p.identity] = sightings.get(p.identity, 0) + 1
        before = set(looks.exits.so_far)
        looks.look(*tree)
        for gone in set(looks.exits.so_far) - before:
            assert gone.identity not in {p.identity for p in tree}
            assert sightings[gone.identity] >= MIN_SIGHTINGS
        assert before <= set(looks.exits.so_far)


class RealHandle:
    """A launcher with children, as real processes; roles by the last argument."""

    supervision = Supervision.SUPERVISED

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
        assert value(sensor).required_exits == ()  # the launcher went too: that is the finding


async def test_a_required_child_that_ends_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.sensors.processes.REPLACEMENT_WINDOW", 0.2)
    async with watching(ProcessRole.INFERENCE, ProcessRole.TRAINER) as (sensor, handle):
        await seen_alive(sensor, 3)
        child = handle.child(0)
        child.kill()
        await until(lambda: value(sensor).required_exits)
        (gone,) = value(sensor).required_exits
        assert (gone.identity.pid, gone.role, gone.name) == (child.pid, ProcessRole.INFERENCE, "sleep")
        assert value(sensor).alive
        sensor.watch(None)
        assert value(sensor).required_exits == ()


async def test_roles_by_the_operators_own_patterns_make_an_end_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the titles of these processes says what they are for."""
    monkeypatch.setattr("podwatch.sensors.processes.REPLACEMENT_WINDOW", 0.2)
    patterns = RolePatterns({ProcessRole.INFERENCE: ["^sleep$"]})
    handle = RealHandle("start-1", ProcessRole.OTHER, ProcessRole.OTHER)
    sensor = ProcessSensor(SystemClock(), 0.02, deadline=0.5, roles=patterns)
    await sensor.start()
    try:
        sensor.watch(handle)
        await seen_alive(sensor, 3)
        child = handle.child(0)
        child.kill()
        await until(lambda: value(sensor).required_exits)
        (gone,) = value(sensor).required_exits
        assert (gone.identity.pid, gone.role) == (child.pid, ProcessRole.INFERENCE)
    finally:
        await sensor.stop()
        handle.kill()


async def seen_alive(sensor: ProcessSensor, count: int) -> None:
    """Whole in as many looks as make a process one whose end is told; on a busy machine a fixed pause is too short."""
    looks: set[float] = set()

    def enough() -> bool:
        reading = sensor.latest()
        if reading.value is not None and len(reading.value.descendants) == count:
            looks.add(reading.at)
        return len(looks) > MIN_SIGHTINGS

    await until(enough)


async def test_an_orchestrator_that_said_it_is_done_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.sensors.processes.REPLACEMENT_WINDOW", 0.1)
    done: set[ProcessRole] = set()
    handle = RealHandle("start-1", ProcessRole.ORCHESTRATOR)

    class Logs:
        finish_line_seen = True

        @property
        def finished_roles(self) -> frozenset[ProcessRole]:
            return frozenset(done)

        async def look_again(self) -> None:
            """They are never read."""

    sensor = ProcessSensor(SystemClock(), 0.02, logs=Logs())
    await sensor.start()
    try:
        sensor.watch(handle)
        await seen_alive(sensor, 2)
        assert value(sensor).finish_line
        handle.child(0).kill()
        await until(lambda: value(sensor).required_exits)
        done.add(ProcessRole.ORCHESTRATOR)
        await until(lambda: not value(sensor).required_exits)
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
