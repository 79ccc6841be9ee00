"""The checkpoints in the store, as `podwatch checkpoints` lists them."""

from podwatch.cli.checkpoints import table
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.reporting.json_documents import stored_documents


def test_a_new_pod_lists_what_only_the_store_knows() -> None:
    known = PublishedSave(40, "d", "line", 1, 4, "", "", "", 0, 2_000_000, 1_800_000_000.0)
    found = stored_documents([known], {(40, "d"), (30, "c"), (20, "b")}, {(30, "c")})
    assert [(r.step, r.size_bytes, r.here) for r in found] == [
        (20, None, False),
        (30, None, True),
        (40, 2_000_000, False),
    ]
    assert stored_documents([known], None, ()) == found[2:]
    shown = table([], 1_800_000_060.0, remote=[one.to_json() for one in found])
    assert [line.split() for line in shown[-2:]] == [["20", "?", "?"], ["40", "2", "MB", "60", "s", "ago"]]
