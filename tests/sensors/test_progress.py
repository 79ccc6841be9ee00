"""Progress from real files and real pings, across starts."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from podwatch.checkpoints.shapes import StepSeen
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import ProgressSample, ProgressSource, SensorState
from podwatch.sensors.log_tail import Sources
from podwatch.sensors.progress import PingInbox, ProgressSensor
from podwatch.system.clock import SystemClock
from tests.sensors.waiting import until
from tests.support.known_trainers import step_reader

FINISH = ("RL trainer finished!", "Orchestrator finished.")


class Jumping(SystemClock):
    """A wall clock that a test sets back or forth."""

    def __init__(self) -> None:
        self.offset = 0.0

    def wall(self) -> float:
        return time.time() + self.offset


def markers(output: Path) -> Callable[[], tuple[StepSeen, ...]]:
    """As prime-rl's layout does it: the highest broadcasts/step_N/STABLE, and the one written last."""

    def seen() -> tuple[StepSeen, ...]:
        found = [
            StepSeen("trainer", int(p.parent.name[5:]), p.stat().st_mtime)
            for p in output.glob("broadcasts/step_*/STABLE")
        ]
        if not found:
            return ()
        highest, last = max(found, key=lambda s: s.step), max(found, key=lambda s: s.wall)
        return (highest, last) if last.wall > highest.wall else (highest,)

    return seen


def mark(output: Path, step: int, wall: float | None = None) -> None:
    path = output / "broadcasts" / f"step_{step}" / "STABLE"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    if wall is not None:
        os.utime(path, (wall, wall))


def log(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(line + "\n" for line in lines))


def step_line(step: int, what: str = "Loss 0.1") -> str:
    return f"\x1b[1m12:00:00 SUCCESS\x1b[0m Step {step} | {what} |"


async def mark_start(sensor: ProgressSensor, wall: float) -> bool:
    """Returns once the end of each log is known, so that not even the first line after it is lost."""
    sensor.begin_start(wall)
    await sensor.look_again()
    return sensor.latest().ok


class Pod:
    def __init__(self, output: Path, clock: SystemClock) -> None:
        self.output = output
        self.supervisor_log = output.parent / "supervisor.log"
        self.clock = clock
        self.inbox = PingInbox(clock)
        self.sensor = ProgressSensor(
            clock, markers(output), logs=Sources(output, ("logs/**/*.log",), (self.supervisor_log,)), inbox=self.inbox,
            steps=step_reader, finish_lines=FINISH, poll=0.02,
        )  # fmt: skip

    def sample(self, source: ProgressSource, role: str = "trainer") -> ProgressSample | None:
        return next((s for s in self.sensor.latest().value or () if (s.source, s.role) == (source, role)), None)

    def step(self, source: ProgressSource, role: str = "trainer") -> int | None:
        sample = self.sample(source, role)
        return sample.step if sample is not None else None

    async def looks(self) -> None:
        """Two whole looks from now."""
        for _ in range(2):
            before = self.sensor.latest().at
            await until(lambda before=before: self.sensor.latest().at > before)


@asynccontextmanager
async def pod(tmp_path: Path, clock: SystemClock | None = None) -> AsyncIterator[Pod]:
    output = tmp_path / "out"
    output.mkdir(exist_ok=True)
    pod = Pod(output, clock or SystemClock())
    await pod.sensor.start()
    try:
        yield pod
    finally:
        await pod.sensor.stop()


async def test_every_source_is_heard(tmp_path: Path) -> None:
    async with pod(tmp_path) as p:
        assert await mark_start(p.sensor, p.clock.wall())
        before = p.clock.monotonic()
        mark(p.output, 5)
        log(p.output / "logs" / "trainer" / "rank_0.log", step_line(6))
        log(p.output / "logs" / "orchestrator.log", step_line(8, "Reward 0.5"))
        assert p.inbox.ping("trainer")
        await until(lambda: len(p.sensor.latest().value or ()) == 4)
        assert {(s.source, s.role, s.step) for s in p.sensor.latest().value} == {
            (ProgressSource.MARKER, "trainer", 5),
            (ProgressSource.STEP_LINE, "trainer", 6),
            (ProgressSource.STEP_LINE, "orchestrator", 8),
            (ProgressSource.HEARTBEAT, "trainer", None),
        }
        assert all(before - 0.1 <= s.at <= p.clock.monotonic() for s in p.sensor.latest().value)


async def test_only_what_is_newer_than_the_start_counts(tmp_path: Path) -> None:
    output = tmp_path / "out"
    mark(output, 80, wall=time.time() - 500)
    log(output / "logs" / "trainer.log", step_line(80), f"SUCCESS {FINISH[0]}", f"SUCCESS {FINISH[1]}")
    log(tmp_path / "supervisor.log", step_line(80))
    async with pod(tmp_path) as p:
        p.inbox.ping("trainer")
        assert await mark_start(p.sensor, p.clock.wall())
        await p.looks()
        assert p.sensor.latest().value == ()
        assert not p.sensor.finish_line_seen
        log(p.output / "logs" / "trainer.log", step_line(76))
        mark(p.output, 81)
        await until(lambda: p.step(ProgressSource.STEP_LINE) == 76 and p.step(ProgressSource.MARKER) == 81)


async def test_a_second_start_wipes_the_first(tmp_path: Path) -> None:
    async with pod(tmp_path) as p:
        await mark_start(p.sensor, p.clock.wall())
        log(p.supervisor_log, step_line(15))
        mark(p.output, 15)
        await until(lambda: p.step(ProgressSource.STEP_LINE) == 15 and p.step(ProgressSource.MARKER) == 15)
        log(p.supervisor_log, step_line(16))  # the last words of the first start, perhaps not read yet
        await mark_start(p.sensor, p.clock.wall() + 0.1)
        await p.looks()
        assert p.step(ProgressSource.STEP_LINE) is None
        assert p.step(ProgressSource.MARKER) is None
        (p.output / "broadcasts" / "step_15").rename(tmp_path / "quarantine")
        await asyncio.sleep(0.11)
        log(p.supervisor_log, step_line(11))
        mark(p.output, 11)
        await until(lambda: p.step(ProgressSource.STEP_LINE) == 11 and p.step(ProgressSource.MARKER) == 11)


async def test_setting_steps_aside_is_no_progress(tmp_path: Path) -> None:
    async with pod(tmp_path) as p:
        await mark_start(p.sensor, p.clock.wall())
        mark(p.output, 10)
        await until(lambda: p.step(ProgressSource.MARKER) == 10)
        mark(p.output, 15)
        await until(lambda: p.step(ProgressSource.MARKER) == 15)
        at = p.sample(ProgressSource.MARKER).at
        (p.output / "broadcasts" / "step_15").rename(tmp_path / "quarantine")
        await p.looks()
        assert p.sample(ProgressSource.MARKER).at == at


async def test_a_lower_marker_that_is_written_later_is_the_step_of_now(tmp_path: Path) -> None:
    """A trainer that begins again below writes the markers of lower steps again, beside higher ones."""
    async with pod(tmp_path) as p:
        for step in (2, 3, 4):
            mark(p.output, step, time.time() - 3600)
        assert await mark_start(p.sensor, p.clock.wall())
        for step in (20, 3, 4):
            await asyncio.sleep(0.02)  # the kernel's file times go on by ticks of 4 ms: what is later must be so there
            mark(p.output, step)
            await until(lambda step=step: p.step(ProgressSource.MARKER) == step)
        (p.output / "broadcasts/step_4/STABLE").unlink()
        await p.looks()
        assert p.step(ProgressSource.MARKER) == 4, "a marker that is gone is no step"


async def test_a_trainer_taken_over_shows_when_its_last_marker_came(tmp_path: Path) -> None:
    mark(tmp_path / "out", 40, wall=time.time() - 100)
    async with pod(tmp_path) as p:
        p.sensor.begin_start(p.clock.wall() - 3600)
        await until(lambda: p.step(ProgressSource.MARKER) == 40)
        assert abs(p.clock.monotonic() - 100 - p.sample(ProgressSource.MARKER).at) < 5


async def test_the_wall_clock_set_back_hides_no_progress(tmp_path: Path) -> None:
    clock = Jumping()
    async with pod(tmp_path, clock) as p:
        await mark_start(p.sensor, clock.wall())
        mark(p.output, 1)
        await until(lambda: p.step(ProgressSource.MARKER) == 1)
        clock.offset = -3600.0
        mark(p.output, 2, wall=clock.wall())
        await until(lambda: p.step(ProgressSource.MARKER) == 2)
        assert clock.monotonic() - p.sample(ProgressSource.MARKER).at < 5
        clock.offset = +3600.0
        mark(p.output, 3, wall=clock.wall() - 3590)  # written just before the clock was set
        await until(lambda: p.step(ProgressSource.MARKER) == 3)
        assert clock.monotonic() - p.sample(ProgressSource.MARKER).at < 5


async def test_a_log_that_lags_does_not_take_a_step_back(tmp_path: Path) -> None:
    async with pod(tmp_path) as p:
        await mark_start(p.sensor, p.clock.wall())
        log(p.supervisor_log, step_line(20), step_line(21))
        await until(lambda: p.step(ProgressSource.STEP_LINE) == 21)
        log(p.output / "logs" / "trainer.log", step_line(20))
        await p.looks()
        assert p.step(ProgressSource.STEP_LINE) == 21
        log(p.supervisor_log, step_line(3))  # but what the same log says later is the truth about it
        await until(lambda: p.step(ProgressSource.STEP_LINE) == 3)


async def test_finish_lines(tmp_path: Path) -> None:
    async with pod(tmp_path) as p:
        await mark_start(p.sensor, p.clock.wall())
        log(p.output / "logs" / "orchestrator.log", f"12:00:00 SUCCESS {FINISH[1]}")
        await until(lambda: p.sensor.finished_roles == {ProcessRole.ORCHESTRATOR})
        assert not p.sensor.finish_line_seen
        log(p.supervisor_log, f"\x1b[2m12:00:00\x1b[0m SUCCESS {FINISH[0]}")
        await until(lambda: p.sensor.finish_line_seen)
        await mark_start(p.sensor, p.clock.wall())
        assert not p.sensor.finish_line_seen


async def test_last_lines_come_from_the_supervisors_log_first(tmp_path: Path) -> None:
    log(tmp_path / "out" / "logs" / "trainer.log", "from the trainer's own log")
    async with pod(tmp_path) as p:
        await until(lambda: p.sensor.last_lines() == ("from the trainer's own log",))
        log(p.supervisor_log, *(f"\x1b[31mline {n}\x1b[0m" for n in range(100)), "[trainer0]: error: unknown argument")
        await until(lambda: len(p.sensor.last_lines(3)) == 3)
        await until(lambda: p.sensor.last_lines(2) == ("line 99", "[trainer0] error: unknown argument"))
        assert len(p.sensor.last_lines()) == 30
        await mark_start(p.sensor, p.clock.wall())
        assert len(p.sensor.last_lines()) == 30  # still there to be shown after the failed start


async def test_a_hung_file_system_is_blind_even_if_pings_come(tmp_path: Path) -> None:
    gate = threading.Event()
    clock = SystemClock()
    inbox = PingInbox(clock)

    def hung() -> tuple[StepSeen, ...]:
        gate.wait(30)
        return ()

    sensor = ProgressSensor(
        clock, hung, logs=Sources(tmp_path), inbox=inbox, steps=step_reader, poll=0.01, deadline=0.1
    )
    await sensor.start()
    inbox.ping("trainer")
    await until(lambda: sensor.latest().state is SensorState.BLIND)
    assert not await mark_start(sensor, clock.wall())
    gate.set()
    await until(lambda: sensor.latest().ok)
    await sensor.stop()


async def test_an_unreadable_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "supervisor.log").mkdir()
    async with pod(tmp_path) as p:
        await until(lambda: p.sensor.latest().ok)
        assert "supervisor.log: not a regular file" in p.sensor.latest().detail


def test_the_inbox_takes_no_odd_and_no_endless_roles() -> None:
    inbox = PingInbox(SystemClock())
    assert not any(inbox.ping(role) for role in ("", "../x", "a b", "x" * 33, "é", "a\n"))
    assert sum(inbox.ping(f"role{n}") for n in range(100)) == 16
    assert inbox.ping("role3")
    assert len(inbox.newest()) == 16
