"""The two-pod protocol over random schedules on a simulated store: frozen writers, late writes, outages, both at once.

The figures beside what is promised: ``python benchmarks/two_pods.py``.
"""

import os

import pytest

from tests.support.two_pods import run

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
