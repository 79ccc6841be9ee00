"""Random schedules of pods that upload, publish, retain, die, freeze, lose their state and come back, on a store that
delays, fails, carries requests out after their timeout, and lists what was there before.

Each takes a fifth of a second. PODWATCH_SCHEDULES=10000 plays as many.
"""

import os

import pytest

from tests.support.store_pods import Tale, run

MANY = int(os.environ.get("PODWATCH_SCHEDULES", "30"))


def played(seeds: range, pods: int) -> list[Tale]:
    found = [run(seed, pods=pods) for seed in seeds]
    for tale in found:
        assert tale.problems == [], f"seed {tale.seed}, {pods} pods"
    return found


@pytest.mark.parametrize(("pods", "count"), [(2, MANY * 2 // 3), (3, MANY // 3)])
@pytest.mark.timeout(7200)
def test_the_newest_pointer_never_lies_and_nothing_that_counts_is_deleted(pods: int, count: int) -> None:
    tales = played(range(count), pods)
    for what in ("published", "removed", "swept", "resent", "repointed", "kills", "reused"):
        assert sum(getattr(tale, what) for tale in tales), f"{what}: nothing was put to the test"
