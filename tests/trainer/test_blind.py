"""A podwatch that cannot look has not seen an end (promise 3)."""

import asyncio
import contextlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterator

import pytest

from podwatch.domain.snapshot import Supervision
from podwatch.sensors.processes import ProcessSensor
from podwatch.system.clock import SystemClock
from tests.support.pod import Pod


@contextlib.contextmanager
def out_of_descriptors() -> Iterator[Callable[[], None]]:
    """Yields what takes the ones that were given back meanwhile, by a look that was under way."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))

    def fill() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    try:
        fill()
        yield fill
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.01)


async def test_without_descriptors_of_our_own_a_trainer_has_not_ended(pod: Pod) -> None:
    launcher = pod.launcher()
    handle = await launcher.start(pod.script("exec sleep 300"))
    sensor = ProcessSensor(SystemClock(), poll=0.02)
    sensor.watch(handle)
    await sensor.start()
    try:
        await until(lambda: sensor.latest().ok)
        with out_of_descriptors() as fill:
            await until(lambda: fill() is None and not sensor.latest().ok)
            with pytest.raises(OSError, match="Too many open files"):
                await handle.exit_status()
            with pytest.raises(OSError, match="Too many open files"):
                await handle.tree()
            with pytest.raises(OSError, match="Too many open files"):
                await launcher.look()
            await until(lambda: not sensor.latest().ok)
            assert handle.supervision is Supervision.SUPERVISED
        await until(lambda: sensor.latest().ok)
        sample = sensor.latest().value
        assert sample is not None
        assert (sample.alive, sample.exit, sample.ends) == (True, None, ())
    finally:
        await sensor.stop()
        await handle.stop(grace=5.0, save_grace=5.0, saving=lambda: False)
        await handle.release()
        await launcher.close()


async def test_a_clock_that_was_set_since_the_start_does_not_make_it_older(pod: Pod) -> None:
    launcher = pod.launcher()
    handle = await launcher.start(pod.script("exec sleep 300"))
    path = pod.directory / "record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "started_wall": record["started_wall"] - 7200.0}))
    found = (await pod.launcher().look()).handle
    assert found is not None
    assert abs(found.started_wall - time.time()) < 30
    await handle.stop(grace=5.0, save_grace=5.0, saving=lambda: False)
    await handle.release()
