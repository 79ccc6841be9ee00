"""The rhythm in which sensors poll together, and a wait that an event ends."""

import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st

from podwatch.system.clock import SystemClock, until_beat
from tests.support.clock import ManualClock


@given(
    now=st.floats(0, 1e7),
    period=st.floats(0.05, 600),
    share=st.floats(0, 0.05),
    took=st.lists(st.floats(0, 0.9), max_size=5),
)
def test_everyone_of_one_rhythm_polls_at_the_same_times(
    now: float, period: float, share: float, took: list[float]
) -> None:
    lag = share * period
    for part in (0.0, *took):
        now += part * period
        rest = until_beat(now, period, lag)
        assert period / 20 <= rest <= period * 1.05 + 1e-6
        now += rest
        off = (now - lag) / period
        assert abs(off - round(off)) < 1e-4, "on a beat, whenever it began"


def test_a_timer_that_fires_early_does_not_ring_twice() -> None:
    assert until_beat(99.9999, 2.0) > 1.9
    assert until_beat(100.0, 2.0) == 2.0


async def test_the_event_ends_the_wait_and_so_does_the_time() -> None:
    for clock in (SystemClock(), ManualClock()):
        event = asyncio.Event()
        waiting = asyncio.ensure_future(clock.wait(event, 60.0))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        event.set()
        await asyncio.wait_for(waiting, 60)
    began = time.monotonic()
    await SystemClock().wait(asyncio.Event(), 0.05)
    assert 0.04 < time.monotonic() - began < 5
    manual = ManualClock()
    waiting = asyncio.ensure_future(manual.wait(asyncio.Event(), 60.0))
    await asyncio.sleep(0.01)
    manual.advance(60.0)
    await asyncio.wait_for(waiting, 60)
