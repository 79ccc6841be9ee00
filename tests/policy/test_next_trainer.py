"""What ran beside our trainer is never its successor."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from podwatch.policy.other_trainers import SEEN_LATE, sift


@dataclass(frozen=True)
class Seen:
    start_id: str
    age: float
    of_run: bool = False


NOW = 10_000.0


def test_nothing_ran_beside_a_trainer_that_there_never_was() -> None:
    old = Seen("a", 9_000.0, of_run=True)
    found = sift([old], [Seen("b", 9_000.0)], ended=None, wall=NOW)
    assert (found.successors, found.rivals) == ((old,), ())
    assert [s.start_id for s in found.pending] == ["b"]


def test_older_than_the_end_is_beside_and_younger_is_a_successor() -> None:
    ended = NOW - 100.0
    quick = Seen("quick", 100.0 + SEEN_LATE - 1)
    old, rival = Seen("old", 100.0 + SEEN_LATE), Seen("rival", 5_000.0, of_run=True)
    found = sift([quick, old, rival], [Seen("monitor", 5_000.0, of_run=True), Seen("new", 20.0)], ended=ended, wall=NOW)
    assert found.successors == (quick,)
    assert found.rivals == (rival,), "it works in output_dir: nothing is started beside it"
    assert [s.start_id for s in found.pending] == ["new"]


seen = st.builds(Seen, st.sampled_from("abcdef"), st.floats(0, 1e6), st.booleans())


@given(
    st.lists(seen, unique_by=lambda s: s.start_id), st.lists(seen, unique_by=lambda s: s.start_id),
    st.none() | st.floats(0, NOW), st.sets(st.sampled_from("abcdef")),
)  # fmt: skip
def test_each_is_in_one_place_and_what_works_in_output_dir_is_never_forgotten(
    candidates: list[Seen], pending: list[Seen], ended: float | None, ignored: set[str]
) -> None:
    found = sift(candidates, pending, ended=ended, wall=NOW, ignored=ignored)
    kept = [*found.successors, *found.rivals]
    assert len(set(kept)) == len(kept)
    assert all(s.start_id not in ignored for s in (*kept, *found.pending))
    for candidate in candidates:
        if candidate.of_run and candidate.start_id not in ignored:
            assert candidate in kept
    if ended is not None:
        assert all(NOW - s.age > ended - SEEN_LATE for s in (*found.successors, *found.pending))
