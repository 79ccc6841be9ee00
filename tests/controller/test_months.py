"""The controller over simulated time: hours in the default suite, months by `make controller-months`."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drivers.controller import keep_no_money_for_late_looks, trust_the_first_look
from tests.support.controller_money import Bill, highest, overspent
from tests.support.controller_months import Kinds, Month, play

pytestmark = pytest.mark.slow

MONTHS = int(os.environ.get("PODWATCH_CONTROLLER_MONTHS") or 0)
SEED = int(os.environ.get("PODWATCH_CONTROLLER_SEED") or 0)
DAY = 86_400.0


@pytest.mark.parametrize("seed", range(SEED, SEED + (MONTHS or 1)))
def test_two_never_publish_and_no_machine_costs_beyond_its_bound(seed: int) -> None:
    # Of four months one is bound by no cap, one by the day's, one by the total, one by both.
    caps = {"max_spend_total": (2000.0, 400.0)[seed % 2], "max_spend_per_day": (60.0, 25.0)[seed // 2 % 2]}
    done = play(seed, hours=30 * 24.0, rules=caps) if MONTHS else play(seed, hours=8.0)
    assert done.problems == []
    assert sum(p.created for p in done.providers) > 0
    if MONTHS:
        print(f"\nseed {seed}: {done.summary()}")
        assert 0.015 < done.slow / done.requests < 0.025
        assert 0.0035 < done.failed / done.requests < 0.0065
        assert done.most_per_day() > 20.0, "the cap of a day was not put to the test"


@settings(max_examples=2)
@given(st.integers(1000, 2**32))
def test_any_schedule(seed: int) -> None:
    assert play(seed, hours=5.0, kinds=Kinds(faults=2.0, lifetime=3600.0)).problems == []


def test_a_small_budget_is_kept() -> None:
    rules = {"max_spend_total": 6.0}
    done = play(5, hours=14.0, rules=rules, finishes=False, kinds=Kinds(faults=0.0, every=60.0, deaths=("gone",)))
    assert done.problems == []
    assert 2.0 < done.cost() <= 6.0
    assert not done.rented()


def test_a_small_budget_of_a_day_is_kept_and_used_again_on_the_next() -> None:
    rules = {"max_spend_per_day": 6.0}
    done = play(7, hours=30.0, rules=rules, finishes=False, kinds=Kinds(faults=0.0, every=300.0, deaths=("gone",)))
    assert done.problems == []
    assert 4.0 < done.most_per_day() <= 6.0
    assert done.cost() > done.most_per_day()


# -- what the simulation finds ---------------------------------------------------------------------------------------


def test_spending_above_a_cap_is_found_to_the_second() -> None:
    two_hours = Bill(0.0, 7200.0, 2.0)
    assert overspent([two_hours], 4.0) == []
    assert overspent([two_hours], 3.0) == [(5400.0, 7200.0, 4.0)]
    later = Bill(DAY - 3600.0, DAY + 3600.0, 2.0)
    assert overspent([two_hours, later], 8.0) == []
    assert overspent([two_hours, later], 5.0, window=DAY) == [(DAY - 1800.0, DAY + 3600.0, 6.0)]
    assert highest([two_hours, later], DAY) == 6.0
    unseen = Bill(0.0, 7200.0, 2.0, excused=((5000.0, 7200.0),))
    assert overspent([unseen], 3.0) == []
    assert overspent([Bill(0.0, 7200.0, 2.0, excused=((5000.0, 7000.0),))], 3.0) == [(7000.0, 7200.0, 4.0)]
    zombie = Bill(0.0, 7200.0, 2.0, hidden=((1800.0, 9000.0),))
    assert overspent([zombie, Bill(0.0, 3600.0, 2.0)], 3.0) == [], "3 are known"
    assert overspent([zombie, Bill(0.0, 3600.0, 2.0)], 2.9) == [(3420.0, 7200.0, 3.0)]


def test_a_controller_that_keeps_no_money_for_late_looks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_no_money_for_late_looks(monkeypatch)
    kinds = Kinds(faults=0.0, every=60.0, deaths=("gone",))
    rules = {"max_spend_total": 4.0}
    done = (play(seed, hours=14.0, rules=rules, finishes=False, kinds=kinds) for seed in range(3))
    assert any("of max_spend_total 4.00" in problem for one in done for problem in one.problems)


def after_an_outage(seed: int) -> list[str]:
    month = Month(seed, exclusive=True, hours=2.0, kinds=Kinds(faults=0.0, lifetime=1e6), finishes=False)
    month.outages.append((3000.0, 4800.0))
    return month.play().problems


@pytest.mark.parametrize("seed", range(3))
def test_a_pod_that_an_outage_of_the_store_kept_silent_is_not_replaced(seed: int) -> None:
    assert after_an_outage(seed) == []


def test_a_controller_that_trusts_its_first_look_after_an_outage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trust_the_first_look(monkeypatch)
    assert any("although pod-1 trains" in problem for seed in range(3) for problem in after_an_outage(seed))
