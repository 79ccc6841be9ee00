"""The rhythm, the deadline and the bounds that all thread-based sensors share."""

import asyncio
import threading
import time
from collections.abc import Callable

from podwatch.domain.snapshot import Reading, SensorState, observed
from podwatch.sensors.base import PolledSensor
from podwatch.system.clock import SystemClock
from tests.sensors.waiting import until


def poller(look: Callable[[], int], *, poll: float = 0.01, deadline: float = 5.0) -> PolledSensor[int, int]:
    class Looked(PolledSensor[int, int]):
        name = "test"

        def prepare(self) -> Callable[[], int]:
            return look

        def absorb(self, result: int) -> Reading[int]:
            return observed(result, self._clock.monotonic())

    return Looked(SystemClock(), poll=poll, deadline=deadline)


async def test_an_exception_is_a_blind_reading_and_the_next_look_heals() -> None:
    healed = threading.Event()

    def look() -> int:
        if not healed.is_set():
            raise ValueError("nonsense from the driver")
        return 7

    sensor = poller(look)
    await sensor.start()
    await until(lambda: sensor.latest().state is SensorState.BLIND)
    assert "nonsense from the driver" in sensor.latest().detail
    healed.set()
    await until(lambda: sensor.latest().value == 7)
    await sensor.stop()


async def test_a_late_answer_is_thrown_away() -> None:
    gate = threading.Event()
    calls: list[int] = []

    def look() -> int:
        calls.append(1)
        if len(calls) == 1:
            gate.wait(10)
            return 1
        return 2

    sensor = poller(look, deadline=0.1)
    seen = set()
    await sensor.start()
    await until(lambda: sensor.latest().value == 2)
    sensor._deadline = 5.0  # from here on only the machine can be late
    gate.set()
    for _ in range(20):
        await asyncio.sleep(0.005)
        seen.add(sensor.latest().value)
    assert seen == {2}
    await until(lambda: sensor.stuck == 0)
    await sensor.stop()


async def test_a_sensor_nobody_turns_goes_blind_by_itself() -> None:
    sensor = poller(lambda: 1, poll=0.01, deadline=0.05)
    await sensor.start()
    await until(lambda: sensor.latest().ok)
    time.sleep(0.3)  # the loop itself stands still
    assert sensor.latest().state is SensorState.BLIND
    await until(lambda: sensor.latest().ok)
    await sensor.stop()


async def test_wake_looks_at_once() -> None:
    count = [0]

    def look() -> int:
        count[0] += 1
        return count[0]

    sensor = poller(look, poll=60.0)
    await sensor.start()
    await until(lambda: sensor.latest().value == 1)
    sensor.wake()
    await until(lambda: sensor.latest().value == 2)
    await sensor.stop()


async def test_stop_ends_whenever_it_comes() -> None:
    """Cancellations that meet an answer are swallowed by Python 3.11's wait_for: stop must end all the same."""
    for _ in range(60):
        sensor = poller(lambda: 1, poll=0.0)
        await sensor.start()
        await until(lambda sensor=sensor: sensor.latest().ok)
        await asyncio.wait_for(sensor.stop(), 60)
