"""The two-pod protocol over random schedules on a simulated store: frozen writers, late writes, outages, both at once.

The figures beside what is promised: ``python benchmarks/two_pods.py``.
"""

import os

import pytest

from tests.support.two_pods import run, run_requeues

pytestmark = pytest.mark.slow

SCHEDULES, PER_TEST = int(os.environ.get("PODWATCH_SCHEDULES", "1000")), 250
KNOWING_SECONDS = 240.0
"""A heartbeat and its neighbour, a request that hangs until its timeout, and the trainer's end."""
REPAIR_SECONDS = 300.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, SCHEDULES, PER_TEST))
def test_random_schedules(first: int) -> None:
    taken, back = 0, 0
    for seed in range(first, first + PER_TEST):
        outcome = run(seed, exclusive=seed % 4 == 0)
        assert outcome.problems == [], seed
        assert all(seconds <= KNOWING_SECONDS for seconds in outcome.knowing), (seed, outcome.knowing)
        for why, seconds in outcome.set_back:
            assert why == "frozen in the middle of a request", (seed, why)
            assert seconds <= REPAIR_SECONDS, (seed, seconds)
        taken += outcome.takeovers
        back += len(outcome.set_back)
    assert taken, "nothing was put to the test"


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 250), marks=pytest.mark.slow)], ids=("few", "all"))
def test_a_job_requeued_beside_its_own_old_tree_never_trains_beside_it(seeds: range) -> None:
    beside = 0
    for seed in seeds:
        outcome, world = run_requeues(seed, exclusive=seed % 4 == 0)
        assert outcome.problems == [], seed
        assert outcome.twice == [], (seed, outcome.twice)
        beside += world.refused_beside_a_living_one
    assert beside, "no attempt met its own old tree"


@pytest.mark.slow
def test_nor_for_long_where_the_old_tree_was_frozen_or_cut_off() -> None:
    taken, back = 0, 0
    for seed in range(250):
        outcome, _ = run_requeues(seed, exclusive=seed % 4 == 0, reachable=False)
        assert outcome.problems == [], seed
        assert all(seconds <= KNOWING_SECONDS for seconds in outcome.knowing), (seed, outcome.knowing)
        for why, seconds in outcome.set_back:
            assert why == "frozen in the middle of a request", (seed, why)
            assert seconds <= REPAIR_SECONDS, (seed, seconds)
        taken += outcome.takeovers
        back += len(outcome.twice)
    assert taken, "no attempt took over"
    assert back, "no attempt was frozen or cut off"
