"""Long scenarios that ran beside the other tests of this folder (tests/support/long_scenarios.py)."""

from collections.abc import Callable

import pytest

from tests.support.long_scenarios import ROUNDS

Finish = Callable[[str], None]


@pytest.mark.meanwhile("no_network")
@pytest.mark.timeout(600)
def test_no_network(meanwhile: Finish) -> None:
    meanwhile("no_network")


@pytest.mark.meanwhile("frozen")
@pytest.mark.timeout(600)
def test_a_podwatch_that_stood_still(meanwhile: Finish) -> None:
    meanwhile("frozen")


@pytest.mark.meanwhile("crash")
@pytest.mark.timeout(120 + 20 * ROUNDS)
def test_crash_at_random_points_of_a_recovery(meanwhile: Finish) -> None:
    meanwhile("crash")
