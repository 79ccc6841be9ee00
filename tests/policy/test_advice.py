"""Advice: the best interval against a simulation of failures, and silence where the numbers do not support it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.event import Event, EventName
from podwatch.policy.advice import Measured, advise, best_interval, disk, lost_share, save_interval, uplink, upload_rate

GB = 10**9
RUN = Measured(
    save_seconds=60.0,
    saves=8,
    gap_seconds=7200.0,
    step_seconds=240.0,
    failures=4,
    training_seconds=4 * 18_000.0,
    save_bytes=47 * GB,
    upload_rate=50e6,
    uploads=5,
    room_bytes=200 * GB,
)


def simulated_loss(interval: float, save: float, between: float, rounds: int) -> float:
    """Share of time that is no useful training, with failures at random."""
    chance = random.Random(1)
    useful = total = 0.0
    for _ in range(rounds):
        left = chance.expovariate(1 / between)
        total += left
        useful += int(left // (interval + save)) * interval
    return 1 - useful / total


@pytest.mark.parametrize(("save", "between"), [(60.0, 18_000.0), (300.0, 7_200.0), (20.0, 90_000.0)])
def test_no_other_interval_loses_less(save: float, between: float) -> None:
    best = best_interval(save, between)
    loss = simulated_loss(best, save, between, 20_000)
    for factor in (0.5, 0.7, 1.5, 2.0):
        assert simulated_loss(best * factor, save, between, 20_000) > loss - 0.001


@given(st.floats(1, 5000), st.floats(60, 1e6))
def test_the_interval_is_positive_and_near_the_least(save: float, between: float) -> None:
    best = best_interval(save, between)
    assert best > 0
    if save < between / 10:
        assert lost_share(best, save, between) <= min(lost_share(best * f, save, between) for f in (0.4, 2.5))


def test_the_save_interval_in_whole_steps_with_its_assumptions() -> None:
    text = save_interval(RUN)
    assert "a save every 24 min (6 steps) instead of every 2 h would lose 8% of the time instead of 21%" in text
    assert "4 failures in 20 h of training, a save takes 60 s" in text
    assert "assumes that training waits for a save" in text


@pytest.mark.parametrize(
    "changes", [{"failures": 2}, {"saves": 2}, {"save_seconds": None}, {"gap_seconds": None}, {"gap_seconds": 1500.0}]
)
def test_no_advice_that_the_numbers_do_not_support(changes: dict[str, float | None]) -> None:
    assert save_interval(replace(RUN, **changes)) == ""  # type: ignore[arg-type]


def test_uplink_and_disk_against_the_size_of_a_save() -> None:
    assert uplink(RUN) == ""
    text = uplink(replace(RUN, upload_rate=5e6))
    assert "47 GB took 2 h 37 min (5 MB/s, 5 uploads), a save comes every 2 h; with a save every 4 h each" in text
    assert uplink(replace(RUN, upload_rate=5e6, uploads=2)) == ""
    assert disk(RUN) == ""
    assert disk(replace(RUN, room_bytes=100 * GB)).startswith(
        "the disk has room for 2 checkpoints of 47 GB; with 41 GB more"
    )
    assert advise(Measured()) == []


def test_the_rate_of_whole_uploads_only() -> None:
    def event(name: EventName, wall: float, **fields: int) -> Event:
        return Event(name, wall, "", fields=fields)

    events = [
        event(EventName.UPLOAD_STARTED, 0, step=1, bytes=1000),
        event(EventName.PUBLISHED, 100, step=1, bytes=1000),
        event(EventName.UPLOAD_STARTED, 200, step=2, bytes=1000),
        event(EventName.DAEMON_STARTED, 900),
        event(EventName.UPLOAD_STARTED, 1000, step=2, bytes=100),
        event(EventName.PUBLISHED, 1010, step=2, bytes=1000),
        event(EventName.PUBLISHED, 1020, step=3, bytes=1000),
    ]
    assert upload_rate(events) == (10.0, 1)
    assert upload_rate([]) == (None, 0)
