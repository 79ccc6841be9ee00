"""Which save of the store training has left, and where the pointer goes back to. Pure."""

from dataclasses import replace
from typing import Any

import pytest

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.run_state import RunState
from podwatch.store.documents import RunPointer, SaveManifest
from podwatch.store.inventory import Inventory, PointerDue, Stored, pointer_due
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
    assert pointer_due(OLD, BACK, None) == PointerDue(stored(20, "old")), "30 and 40 were left"


def test_only_to_a_whole_one_of_the_own_ancestry() -> None:
    broken = replace(OLD, saves=(OLD.saves[0], replace(OLD.saves[1], problem="damaged"), stored(22, "stranger")))
    assert pointer_due(broken, BACK, None) == PointerDue(stored(10, "old"))
    older = replace(BACK, starts=branched(branched(guarded("first"), "old", 5), "new", 25))
    first = replace(OLD, saves=(stored(4, "first"), stored(8, "first")))
    assert pointer_due(first, older, None) == PointerDue(stored(4, "first"))
    assert pointer_due(replace(OLD, saves=(stored(30, "old"),)), BACK, None) is None, "better than nothing"


def test_after_a_fresh_start_no_save_is_the_newest() -> None:
    assert pointer_due(OLD, replace(BACK, starts=branched(guarded("old"), "new", None)), None) == PointerDue(None)


@pytest.mark.parametrize(
    ("run", "named", "due"),
    [(BACK, "old", True), (BACK, "new", False), (RunState("run", starts=guarded("new")), "old", False)],
)
def test_it_is_due_once_training_has_left_what_it_names(run: RunState, named: str, due: bool) -> None:
    inventory = replace(OLD, pointers=(pointer(named),))
    assert (pointer_due(inventory, run, None) is not None) is due
    assert pointer_due(replace(OLD, pointers=()), BACK, None) is None


def test_a_save_whose_publication_was_interrupted_gets_its_pointer() -> None:
    run, new = RunState("run", starts=guarded("old")), stored(50, "old")
    ahead = OLD.with_save(new)
    assert pointer_due(ahead, run, new) == PointerDue(new, interrupted=True)
    assert pointer_due(ahead, run, stored(30, "old")) is None, "an older one, which no pointer names any more"
    assert pointer_due(ahead, run, replace(new, seq=0)) is None, "it was stored without becoming the newest"
    assert pointer_due(ahead, run, replace(new, lineage="other")) is None
    assert pointer_due(OLD, run, stored(40, "old")) is None, "a pointer names it"


def test_the_newest_of_a_lineage_is_whole() -> None:
    assert OLD.newest_of("old") == 40
    assert replace(OLD, saves=(*OLD.saves[:2], replace(OLD.saves[3], problem="damaged"))).newest_of("old") == 20
    assert OLD.newest_of("new") == -1
