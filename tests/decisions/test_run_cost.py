"""What failures took, worked out by hand; what is unknown stays unknown; the figures of several pods are added up."""

from dataclasses import replace

import pytest

from podwatch.domain.event import Incident
from podwatch.report.run_cost import (
    WINDOW,
    Loss,
    Price,
    RunCost,
    Spent,
    Steps,
    account,
    both,
    loss_of,
    measured,
    step_seconds,
)

HOUR = 3600.0
PRICE = Price(6.0, "EUR")
SPENT = Spent(0.0, 10 * HOUR, step_seconds=60.0)
DEATH = Incident(1, "silent-death", HOUR, "", closed_wall=HOUR + 600, resumed_step=80, lost_steps=5)
HANG = Incident(2, "hang", 2 * HOUR, "", closed_wall=2 * HOUR + 1200, resumed_step=100, lost_steps=0)


def test_a_run_by_hand() -> None:
    found = account(SPENT, [DEATH, HANG], 10 * HOUR, price=PRICE, median=50.0, left=100)
    assert found.incidents == {1: Loss(1, 600.0, 300.0, 5), 2: Loss(1, 1200.0, 0.0, 0)}
    assert (found.run.failures, found.run.steps_lost, found.run.lost_seconds) == (2, 5, 2100.0)
    assert found.goodput == pytest.approx(1 - 2100 / 36_000)
    assert (found.run.so_far, found.run.lost) == (60.0, 3.5)
    assert found.finish is not None
    assert found.finish.low == 6000.0
    assert found.finish.high == pytest.approx(6000 / (1 - 2100 / 36_000))
    assert found.at_end == pytest.approx(70.0)


def test_an_open_incident_costs_more_each_second() -> None:
    death = replace(DEATH, closed_wall=None, resumed_step=None, lost_steps=None)
    assert loss_of(death, HOUR + 60, 60.0) == Loss(1, 60.0, None, None)
    assert loss_of(replace(death, lost_steps=5), HOUR + 60, 60.0) == Loss(1, 60.0, 300.0, 5)
    assert loss_of(death, HOUR + 90, 60.0).idle == 90
    assert loss_of(death, HOUR - 90, 60.0).idle == 0, "the clock was set back"


@pytest.mark.parametrize(("every", "per_save"), [(10, 120.0), (200, 600.0)])
def test_the_time_of_a_step_counts_saves_however_rare_they_are(every: int, per_save: float) -> None:
    """Steps of one minute, and a save after ``every`` steps. Before two saves nothing is said."""
    window: Steps = ()
    gap = every * 60.0 + per_save
    for step in range(10 * every):
        window = measured(window, step, step * 60.0 + step // every * per_save, gap)
        known = step_seconds(window, gap)
        assert (known is not None) == (step >= 2 * every)
        assert known is None or known == pytest.approx(gap / every, rel=per_save / gap)
    assert len(window) <= max(WINDOW, 2 * every + 1)
    assert step_seconds(window, None) is None


def test_no_end_is_named_before_a_step_is_measured_with_saves() -> None:
    found = account(replace(SPENT, step_seconds=None), [], 10 * HOUR, median=50.0, left=100)
    assert (found.goodput, found.finish, found.at_end) == (1.0, None, None)


def test_time_down_without_an_incident_is_lost_too() -> None:
    found = account(replace(SPENT, down=HOUR), [], 10 * HOUR)
    assert found.causes == {"down": Loss(0, HOUR)}
    assert (found.run.failures, found.goodput) == (0, 0.9)


def test_what_is_unknown_is_not_zero() -> None:
    no_steps = account(replace(SPENT, step_seconds=None), [DEATH], 10 * HOUR, price=PRICE, left=100)
    assert (no_steps.run.lost_seconds, no_steps.run.lost, no_steps.goodput, no_steps.finish) == (None,) * 4
    assert no_steps.run.so_far == 60.0
    assert no_steps.incidents[1].idle == 600
    counts_saves = account(SPENT, [replace(DEATH, lost_steps=None)], 10 * HOUR)
    assert (counts_saves.run.lost_seconds, counts_saves.goodput) == (None, None)
    assert (counts_saves.run.steps_lost, counts_saves.causes["silent-death"].steps) == (None, None)
    unconfirmed = replace(DEATH, closed_wall=None, resumed_step=None, lost_steps=None)
    fresh = replace(DEATH, resumed_step=None, lost_steps=None)
    for unknown in (unconfirmed, fresh):
        found = account(SPENT, [unknown, HANG], 10 * HOUR)
        assert (found.run.steps_lost, found.run.lost_seconds, found.goodput) == (None, None, None)
    no_price = account(SPENT, [DEATH], 10 * HOUR, left=100)
    assert (no_price.run.so_far, no_price.run.lost, no_price.at_end) == (None,) * 3
    assert no_price.goodput is not None
    assert account(SPENT, [], 0.0, left=0).finish is None
    assert account(replace(SPENT, seconds=0.0), [], 0.0).goodput is None


def test_several_pods_are_added_up() -> None:
    earlier = RunCost(-HOUR, 5 * HOUR, 3, 900.0, 7, 10.0, 0.5, "EUR")
    found = account(replace(SPENT, earlier=earlier, after=1), [DEATH, HANG], 10 * HOUR, price=PRICE)
    assert found.run == RunCost(-HOUR, 15 * HOUR, 4, 2100.0, 7, 70.0, 2.5, "EUR")
    assert set(found.incidents) == {2}, "the earlier pod's figures contain the first"
    other = both(replace(earlier, currency="USD"), found.run)
    assert (other.so_far, other.lost, other.seconds) == (None, None, 20 * HOUR)
    assert both(replace(earlier, so_far=None), found.run).so_far is None
    unknown = both(replace(earlier, failures=None, steps_lost=None), found.run)
    assert (unknown.failures, unknown.steps_lost) == (None, None)


def test_the_time_of_a_step_contains_saves() -> None:
    window = ()
    for step, at in ((10, 0.0), (10, 30.0), (11, 60.0), (13, 150.0), (14, 280.0)):
        window = measured(window, step, at, 100.0)
    assert step_seconds(window, 100.0) == 70.0
    assert step_seconds(measured(window, 12, 300.0, 100.0), 100.0) is None, "another start"
    for step in range(100, 300):
        window = measured(window, step, 60.0 * step, 100.0)
    assert len(window) == 60


def test_what_is_kept_survives_json() -> None:
    kept = replace(SPENT, earlier=RunCost(1.0, 2.0, lost_seconds=None), after=3)
    assert Spent.kept(kept.to_json()) == kept
    for broken in (None, {}, [], "x", {"since": "1"}, {**kept.to_json(), "after": -1}):
        assert Spent.kept(broken) is None
