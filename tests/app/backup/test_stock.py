"""Which save of the store training has left, and where the pointer goes back to. Pure."""

from dataclasses import replace
from typing import Any

import pytest

from podwatch.app.backup.stock import departed_from, is_behind_lineage, newest_of_lineage
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.run_state import RunState
from podwatch.store.documents import RunPointer, SaveManifest
from podwatch.store.inventory import Inventory, Stored
from podwatch.store.pointers import PointerSeen
from tests.support.starts import branched, guarded

HASH = "sha256:" + "0" * 64
FILE = FileEntry("model", "w", 1, 1, hashes=("sha1:" + "0" * 40,))


def stored(step: int, lineage: str, **changes: Any) -> Stored:
    manifest = SaveManifest("run", step, f"s{step}", "me", 1, 1.0, "custom", 100, (FILE,), seq=step, lineage=lineage)
    return replace(Stored.of(manifest, HASH, 0.0, ()), **changes)


def pointer(lineage: str) -> PointerSeen:
    document = RunPointer("run", 1, 1, 40, "me", 1.0, lineage=lineage, save_id="s40", manifest_hash=HASH)
    return PointerSeen("pointers/1", 1, 1, "aa", 1.0, document)


OLD = Inventory(tuple(stored(step, "old") for step in (10, 20, 30, 40)), pointers=(pointer("old"),))
BACK = RunState("run", starts=branched(guarded("old"), "new", 25))
"""It stepped back to 25, which the store lacks."""


def test_the_pointer_goes_back_to_the_last_save_that_training_continued_from() -> None:
    found = departed_from(OLD, BACK)
    assert found is not None
    assert found.step == 20, "30 and 40 were left"


def test_only_to_a_whole_one_of_the_own_ancestry() -> None:
    broken = replace(OLD, saves=(OLD.saves[0], replace(OLD.saves[1], problem="damaged"), stored(22, "stranger")))
    found = departed_from(broken, BACK)
    assert found is not None
    assert found.step == 10
    older = replace(BACK, starts=branched(branched(guarded("first"), "old", 5), "new", 25))
    assert departed_from(Inventory((stored(4, "first"), stored(8, "first"))), older) == stored(4, "first")


def test_after_a_fresh_start_there_is_none() -> None:
    assert departed_from(OLD, replace(BACK, starts=branched(guarded("old"), "new", None))) is None


@pytest.mark.parametrize(
    ("run", "named", "behind"),
    [(BACK, "old", True), (BACK, "new", False), (RunState("run", starts=guarded("new")), "old", False)],
)
def test_the_pointer_is_behind_once_training_has_left_what_it_names(run: RunState, named: str, behind: bool) -> None:
    inventory = replace(OLD, pointers=(pointer(named),))
    assert is_behind_lineage(inventory, run) is behind
    assert not is_behind_lineage(replace(OLD, pointers=()), BACK)


def test_the_newest_of_a_lineage_is_whole() -> None:
    assert newest_of_lineage(OLD, "old") == 40
    assert (
        newest_of_lineage(replace(OLD, saves=(*OLD.saves[:2], replace(OLD.saves[3], problem="damaged"))), "old") == 20
    )
    assert newest_of_lineage(OLD, "new") == -1
