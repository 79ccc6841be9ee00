"""When podwatch may say that nothing of a run was ever stored."""

from dataclasses import replace

import pytest

from podwatch.app.backup_findings import saves_of_run
from podwatch.app.lost_saves import safekeeping
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import FindingKind
from podwatch.domain.lease import Decision, LeaseAction
from podwatch.domain.stored_checkpoint import StoredCheckpoint

EMPTY = StoreFacts(store_url="b2://bucket", ok=True, listed=True, lease=Decision(LeaseAction.HOLD))


@pytest.mark.parametrize(
    ("state", "nothing"),
    [
        (EMPTY, True),
        (replace(EMPTY, ok=None, listed=False), False),
        (replace(EMPTY, ok=False, listed=False, error="the key is not valid"), True),
        (replace(EMPTY, last_step=5), False),
        (replace(EMPTY, checkpoints=(StoredCheckpoint(5, "x"),)), False),
        (replace(EMPTY, lease=Decision(LeaseAction.SUPERSEDED)), False),
        (replace(EMPTY, store_url=""), False),
        (None, False),
    ],
    ids=["empty", "not asked", "refused", "published", "stored", "another pod's", "no store", "no syncer"],
)
def test_nothing_is_stored_only_where_that_is_known(state: StoreFacts | None, nothing: bool) -> None:
    assert saves_of_run(state, (), 7).nothing_stored is nothing


def test_what_is_not_of_this_run_does_not_count() -> None:
    def rejected(*steps: int) -> bool:
        sets = tuple(
            replace(
                CheckpointSet(step, "custom", Completeness.DAMAGED, (), 10, 1, float(step), reason="x is empty"),
                ours=step != 10,
            )
            for step in steps
        )
        kept = saves_of_run(None, sets, None)
        return [f.kind for f in safekeeping((), kept, at=9.0)] == [FindingKind.NOT_COMPLETE]

    assert rejected(5, 10, 15)
    assert not rejected(5, 10)
