"""What the trainer said while nobody listened, and just before it ended, is known before its end is judged."""

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import ProgressSource, Reading, SensorState, Supervision, observed
from podwatch.sensors import log_tail
from podwatch.sensors.log_tail import Sources
from podwatch.sensors.processes import ProcessSensor
from podwatch.sensors.progress import PingInbox, ProgressSensor
from podwatch.system.clock import SystemClock
from podwatch.system.procfs import identify
from tests.sensors.test_progress import FINISH, log, step_line
from tests.sensors.waiting import until
from tests.support.known_trainers import step_reader


class Podwatch:
    """One podwatch's view of one log; ``memory`` is what the journal keeps."""

    def __init__(self, root: Path, *, poll: float = 0.02, slow: threading.Event | None = None) -> None:
        self.log = root / "train.log"
        self.sensor = ProgressSensor(
            SystemClock(), lambda: (slow.wait(5), ())[1] if slow is not None else (), steps=step_reader,
            logs=Sources(root, ("logs/*.log",), (self.log,)), inbox=PingInbox(SystemClock()), finish_lines=FINISH,
            poll=poll,
        )  # fmt: skip

    @property
    def memory(self) -> object:
        return json.loads(json.dumps(self.sensor.remembered))

    def steps(self) -> list[int | None]:
        return [s.step for s in self.sensor.latest().value or () if s.source is ProgressSource.STEP_LINE]


@asynccontextmanager
async def watching(root: Path, memory: object = None, start_id: str = "s1") -> AsyncIterator[Podwatch]:
    podwatch = Podwatch(root)
    podwatch.sensor.recall(memory)
    await podwatch.sensor.start()
    podwatch.sensor.begin_start(time.time() - 60, start_id)
    try:
        await podwatch.sensor.look_again()
        yield podwatch
    finally:
        await podwatch.sensor.stop()


async def first_life(root: Path) -> object:
    async with watching(root) as podwatch:
        log(podwatch.log, "loading", step_line(4))
        await until(lambda: podwatch.steps() == [4])
        with podwatch.log.open("a") as file:
            file.write("RL trainer fini")
        await podwatch.sensor.look_again()
        return podwatch.memory


async def test_a_finish_line_of_the_time_between_is_found(tmp_path: Path) -> None:
    log(tmp_path / "train.log", *FINISH, "of an older start")
    memory = await first_life(tmp_path)
    log(tmp_path / "train.log", "shed!", step_line(5))
    log(tmp_path / "logs" / "orchestrator.log", "Orchestrator finished.")
    async with watching(tmp_path, memory) as podwatch:
        assert podwatch.sensor.finish_line_seen
        assert podwatch.steps() == [5], "no line is taken for news twice"
        memory = podwatch.memory
    async with watching(tmp_path, memory) as podwatch:
        assert podwatch.sensor.finish_line_seen, "what was seen before stays seen"
        assert podwatch.steps() == []


@pytest.mark.parametrize(
    "memory",
    [None, {}, {"start_id": "s1", "files": {"x": [1]}, "finished": 3}, {"start_id": "s1", "files": 7}, [], "nonsense"],
)
async def test_without_memory_everything_there_is_old(tmp_path: Path, memory: object) -> None:
    log(tmp_path / "train.log", *FINISH)
    async with watching(tmp_path, memory) as podwatch:
        assert not podwatch.sensor.finish_line_seen


async def test_the_memory_of_another_start_is_none(tmp_path: Path) -> None:
    memory = await first_life(tmp_path)
    log(tmp_path / "train.log", "shed!", *FINISH)
    async with watching(tmp_path, memory, "s2") as podwatch:
        assert not podwatch.sensor.finish_line_seen
        assert podwatch.sensor.remembered["start_id"] == "s2"


async def test_a_start_that_was_not_looked_at_yet_is_not_remembered(tmp_path: Path) -> None:
    """Its lines could not be told from those of the start before."""
    async with watching(tmp_path) as podwatch:
        podwatch.sensor.begin_start(time.time(), "s2")
        assert podwatch.sensor.remembered["start_id"] == "s1"
        assert podwatch.sensor.latest().state is SensorState.PENDING
        await podwatch.sensor.look_again()
        assert str(podwatch.sensor.remembered["start_id"]) == "s2"
        assert podwatch.sensor.latest().ok


async def test_only_the_end_of_a_long_absence_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "READ_PER_LOOK", 4096)
    memory = await first_life(tmp_path)
    log(tmp_path / "train.log", "", *(step_line(n) for n in range(500)), *FINISH)
    async with watching(tmp_path, memory) as podwatch:
        assert podwatch.sensor.finish_line_seen
        assert podwatch.steps() == [499]


async def test_a_look_that_was_under_way_takes_nothing_back(tmp_path: Path) -> None:
    """The first look begins before the start is told; it cuts the logs where they end now."""
    memory = await first_life(tmp_path)
    log(tmp_path / "train.log", "shed!", *FINISH)
    go = threading.Event()
    podwatch = Podwatch(tmp_path, slow=go)
    podwatch.sensor.recall(memory)
    await podwatch.sensor.start()
    await asyncio.sleep(0.05)
    podwatch.sensor.begin_start(time.time() - 60, "s1")
    go.set()
    try:
        await podwatch.sensor.look_again()
        assert podwatch.sensor.finish_line_seen
    finally:
        await podwatch.sensor.stop()


class Handle:
    start_id, supervision, started_wall = "s1", Supervision.SUPERVISED, 0.0
    ended, terminal_used = MappingProxyType[tuple[int, int], ExitStatus]({}), None

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        found = identify(process.pid)
        assert found is not None
        self.launcher = found

    async def exit_status(self) -> ExitStatus | None:
        code = self.process.poll()
        return None if code is None else ExitStatus(code)

    async def tree(self, *, sweep: bool = False) -> Reading[tuple[ProcessSample, ...]]:
        return observed((), 0.0)


async def test_an_end_is_shown_with_the_words_that_came_before_it(tmp_path: Path) -> None:
    """The logs are looked at once an hour here: without asking them again, a finished run would be started again."""
    podwatch = Podwatch(tmp_path, poll=3600.0)
    sensor = ProcessSensor(SystemClock(), poll=0.02, logs=podwatch.sensor)
    await podwatch.sensor.start()
    podwatch.sensor.begin_start(time.time(), "s1")
    await podwatch.sensor.look_again()
    words = "".join(f"echo '{line}' >> {podwatch.log};" for line in FINISH)
    with subprocess.Popen(["sh", "-c", f"{words} sleep 0.1"]) as process:
        sensor.watch(Handle(process))  # type: ignore[arg-type]
        await sensor.start()
        try:
            await until(lambda: (sample := sensor.latest().value) is not None and sample.exit is not None)
            sample = sensor.latest().value
            assert sample is not None
            assert (sample.alive, sample.finish_line) == (False, True)
        finally:
            await sensor.stop()
            await podwatch.sensor.stop()


async def test_an_end_waits_for_logs_that_are_read_slowly(tmp_path: Path) -> None:
    """Seen on a busy machine: the exit was judged 3 s after it, and the finish line was read 1 s later."""
    go = threading.Event()
    go.set()
    podwatch = Podwatch(tmp_path, poll=3600.0, slow=go)
    sensor = ProcessSensor(SystemClock(), poll=0.02, logs=podwatch.sensor)
    await podwatch.sensor.start()
    podwatch.sensor.begin_start(time.time(), "s1")
    await podwatch.sensor.look_again()
    go.clear()  # each read takes 5 s now, and one is under way already when the trainer ends
    podwatch.sensor.wake()
    await asyncio.sleep(0.2)
    log(podwatch.log, *FINISH)
    with subprocess.Popen(["true"]) as process:
        handle = Handle(process)
    sensor.watch(handle)  # type: ignore[arg-type]
    await sensor.start()
    try:
        await until(lambda: (sample := sensor.latest().value) is not None and sample.exit is not None)
        sample = sensor.latest().value
        assert sample is not None
        assert sample.finish_line
    finally:
        go.set()
        await sensor.stop()
        await podwatch.sensor.stop()


async def test_the_end_of_one_process_is_shown_with_the_words_that_came_before_it(
    tmp_path: Path,
) -> None:
    """prime-rl's orchestrator says that it has finished, and goes, minutes before its trainer does."""
    podwatch = Podwatch(tmp_path, poll=3600.0)
    read = 0

    class Logs:
        finish_line_seen = False

        @property
        def finished_roles(self) -> frozenset[ProcessRole]:
            return podwatch.sensor.finished_roles

        async def look_again(self) -> None:
            nonlocal read
            read += 1
            await podwatch.sensor.look_again()

    sensor = ProcessSensor(SystemClock(), poll=0.02, logs=Logs())
    await podwatch.sensor.start()
    podwatch.sensor.begin_start(time.time(), "s1")
    await podwatch.sensor.look_again()
    with subprocess.Popen(["sleep", "60"]) as process:
        handle = Handle(process)
        launcher = ProcessSample(handle.launcher, 1, "rl", "rl", ProcessRole.LAUNCHER, "S")
        roles = {2: ProcessRole.ORCHESTRATOR, 3: ProcessRole.TRAINER}
        tree = [launcher, *(replace(launcher, identity=ProcessIdentity(n, n), role=r) for n, r in roles.items())]

        async def look() -> Reading[tuple[ProcessSample, ...]]:
            return observed(tuple(tree), 0.0)

        handle.tree = look  # type: ignore[method-assign]
        sensor.watch(handle)  # type: ignore[arg-type]
        await sensor.start()
        try:
            await until(lambda: (sample := sensor.latest().value) is not None and len(sample.descendants) == 3)
            log(podwatch.log, FINISH[1])
            del tree[1]
            await until(lambda: read > 0)
            del tree[1]  # and then the trainer without a word
            await until(lambda: (sample := sensor.latest().value) is not None and len(sample.descendants) == 1)
            sample = sensor.latest().value
            assert sample is not None
            assert sample.finished == {ProcessRole.ORCHESTRATOR}
            assert read == 2
        finally:
            process.kill()
            await sensor.stop()
            await podwatch.sensor.stop()
