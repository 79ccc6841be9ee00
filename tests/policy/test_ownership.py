"""Which checkpoints belong to the run."""

import pytest

from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.policy.resume import Ownership


def found(step: int, changed: float) -> CheckpointSet:
    return CheckpointSet(step, "hf", Completeness.COMPLETE, (), 100, 3, changed, f"s{step}")


@pytest.mark.parametrize(
    ("ownership", "owned"),
    [
        (Ownership(100.0), False),
        (Ownership(50.0), True),
        (Ownership(100.0, started_from=20), True),
        (Ownership(100.0, started_from=19), False),
        (Ownership(100.0, fetched=frozenset({(20, "s20")})), True),
        (Ownership(100.0, fetched=frozenset({(20, "another")})), False),
        (Ownership(100.0, adopted=True), True),
    ],
)
def test_a_set_is_ours_by_time_start_store_or_adoption(ownership: Ownership, owned: bool) -> None:
    assert ownership.owns(found(20, changed=60.0)) is owned
