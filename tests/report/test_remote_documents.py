"""The checkpoints in the store, as `podwatch checkpoints` lists them."""

from podwatch.cli.checkpoints import table
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.report.json_documents import inventory_document


def test_what_the_store_has_is_listed_with_its_size_and_age() -> None:
    known = (
        StoredCheckpoint(30, "c", "line", 1, 3, 1_000_000, 1_799_999_000.0, here="local"),
        StoredCheckpoint(40, "d", "line", 1, 4, 2_000_000, 1_800_000_000.0),
    )
    found = [inventory_document(save) for save in known]
    assert [(r.step, r.size_bytes, r.here) for r in found] == [(30, 1_000_000, True), (40, 2_000_000, False)]
    shown = table([], 1_800_000_060.0, remote=[one.to_json() for one in found])
    assert shown[-1].split() == ["40", "2", "MB", "60", "s", "ago"]
