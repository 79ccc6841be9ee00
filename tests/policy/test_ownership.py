"""Which checkpoints belong to the run."""

from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.checkpoints.records import CheckpointRecord, CheckpointRecords, RecordSource
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.policy.resume import Ownership
from podwatch.recovery.own_checkpoints import OwnCheckpoints
from podwatch.recovery.run_file import RunFile
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace


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


def test_what_came_from_the_store_is_ours_by_its_record(tmp_path: Path) -> None:
    """Also after a loss of the database: its files are older than this run's first look."""
    file = RunFile(tmp_path, Workspace(tmp_path / "out"), "run", SystemClock())
    file.load()
    file.edit_now(lambda run: replace(run, first_seen_wall=100.0))
    records = CheckpointRecords()
    own = OwnCheckpoints(file, SystemClock(), records)
    assert not own.owns(found(20, changed=60.0))
    record = CheckpointRecord(20, "s20", "hf", "", (), 60.0)
    records.note(record)
    assert not own.owns(found(20, changed=60.0))
    records.note(replace(record, source=RecordSource.RESTORED))
    assert own.owns(found(20, changed=60.0))
    assert not own.owns(replace(found(20, changed=60.0), save_id="another"))
