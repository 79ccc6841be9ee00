"""Which save in the store a run is restored from: what pointers say, and what a step back or a branch left behind."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.store.documents import RunPointer, SaveManifest
from podwatch.store.inventory import Inventory, Stored
from podwatch.store.pointers import PointerSeen
from podwatch.store.restore.choose import candidates, passed_over, was_started_afresh


def save(
    step: int, seq: int, *, generation: int = 1, problem: str = "", start: str = "", begun: int | None = None
) -> Stored:
    head = ("run", step, f"s{step}-{generation}-{seq}", "w", generation, 0.0, "hf", 1, ())
    manifest = SaveManifest(*head, seq=seq, lineage="l", start_id=start, from_step=begun)
    digest = f"sha256:{step + 1000 * seq + 10**6 * generation:064}"
    return Stored(step, head[2], "l", generation, seq, problem=problem, manifest=manifest, hash=digest)


def pointer(to: Stored | None, seq: int, *, generation: int = 1) -> PointerSeen:
    names = {} if to is None else {"save_id": to.save_id, "manifest_hash": to.hash}
    found = RunPointer("run", generation, seq, None if to is None else to.step, "w", 0.0, **names)
    return PointerSeen("key", generation, seq, "n", 0.0, found)


def inventory(*saves: Stored, pointers: tuple[PointerSeen, ...] = (), problems: tuple[str, ...] = ()) -> Inventory:
    ordered = tuple(sorted(saves, key=lambda s: (s.order, s.key)))
    return Inventory(ordered, pointers=tuple(sorted(pointers, key=lambda p: p.order, reverse=True)), problems=problems)


def steps(found: Inventory, step: int | None = None) -> list[int]:
    return [s.step for s in candidates(found, step)]


ONE, TWO, THREE = save(10, 1), save(20, 2), save(30, 3)


def test_the_named_one_and_then_the_older_ones() -> None:
    assert steps(inventory(ONE, TWO, THREE, pointers=(pointer(THREE, 3), pointer(TWO, 2)))) == [30, 20, 10]
    assert steps(inventory()) == []


def test_what_a_step_back_left_behind_is_no_candidate() -> None:
    """Also where what it went back to is damaged: the next older one, not what was left."""
    assert steps(inventory(ONE, TWO, THREE, pointers=(pointer(TWO, 4), pointer(THREE, 3)))) == [20, 10]
    broken = replace(TWO, problem="an object is missing")
    found = inventory(ONE, broken, THREE, pointers=(pointer(TWO, 4), pointer(THREE, 3)))
    assert [s.step for s in candidates(found) if not s.problem] == [10]
    assert passed_over(found) == ("step 20: an object is missing",)
    lost = inventory(ONE, THREE, pointers=(pointer(TWO, 4), pointer(THREE, 3)))
    assert [(s.step, bool(s.problem)) for s in candidates(lost)] == [(20, True), (10, False)]


def test_a_fresh_start_leaves_everything() -> None:
    found = inventory(ONE, TWO, pointers=(pointer(None, 3), pointer(TWO, 2)))
    assert (steps(found), was_started_afresh(found)) == ([], True)
    assert steps(found, 20) == [20], "a step that somebody names is there all the same"
    after = inventory(ONE, TWO, save(5, 4), pointers=(pointer(save(5, 4), 4), pointer(None, 3)))
    assert was_started_afresh(after) is False
    assert steps(after)[0] == 5


def test_what_a_branch_left_behind_is_no_candidate() -> None:
    old = [save(10, 1, start="a", begun=0), save(20, 2, start="a", begun=0), save(30, 3, start="a", begun=0)]
    new = [save(15, 4, start="b", begun=10), save(18, 5, start="b", begun=10)]
    assert steps(inventory(*old, *new, pointers=(pointer(new[1], 5),))) == [18, 15, 10]


def test_a_manifest_that_was_exchanged_is_not_used() -> None:
    """The pointer names the bytes of the manifest, not only its name."""
    other = replace(THREE, hash="sha256:" + "f" * 64)
    found = inventory(TWO, other, pointers=(pointer(THREE, 3), pointer(TWO, 2)))
    assert [s.step for s in candidates(found) if not s.problem] == [20]
    assert "not the one that was published" in passed_over(found)[0]
    assert [s.step for s in candidates(found, 30) if not s.problem] == [], "not by its step either"


def test_without_a_pointer_the_order_of_publication_counts() -> None:
    """A copy of a bucket without its pointers."""
    assert steps(inventory(save(40, 1, generation=1), save(30, 1, generation=2))) == [30, 40]


def test_a_pointer_that_cannot_be_read_is_passed_over_and_said() -> None:
    broken = PointerSeen("key", 9, 9, "n", 0.0, None, "not JSON")
    found = inventory(ONE, TWO, pointers=(broken, pointer(TWO, 2)), problems=("key: not JSON",))
    assert steps(found) == [20, 10]
    assert passed_over(found) == ("key: not JSON",)


def test_of_several_saves_of_a_step_the_named_one_is_first() -> None:
    first, second = save(20, 2), save(20, 5)
    found = inventory(first, second, pointers=(pointer(first, 6),))
    assert [s.key for s in candidates(found, 20)] == [first.key, second.key]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=12),
    st.lists(st.one_of(st.none(), st.integers(0, 11)), max_size=6),
)
def test_never_newer_than_what_the_highest_pointer_names(
    drawn: list[tuple[int, bool]], targets: list[int | None]
) -> None:
    saves = [save(step, n, problem="" if sound else "damaged") for n, (step, sound) in enumerate(drawn, 1)]
    named = [None if t is None else saves[t % len(saves)] for t in targets]
    pointers = tuple(pointer(to, 100 + n) for n, to in enumerate(named))
    found = candidates(inventory(*saves, pointers=pointers))
    assert len({s.key for s in found}) == len(found)
    if named:
        top = named[-1]
        assert top is not None or found == ()
        assert top is None or (found[0].key == top.key and all(s.order <= top.order for s in found))


@pytest.mark.parametrize("step", [0, 20])
def test_a_step_that_is_not_there(step: int) -> None:
    assert steps(inventory(ONE, pointers=(pointer(ONE, 1),)), step) == []
