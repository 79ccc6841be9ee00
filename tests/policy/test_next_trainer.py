"""What ran beside our trainer is never its successor."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.process import ProcessIdentity
from podwatch.policy.other_trainers import SEEN_LATE, sift
from podwatch.trainer.rules import FoundTree, PodProcess, TreeAnswer, choose_trainer


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


@given(
    st.lists(seen, unique_by=lambda s: s.start_id),
    st.lists(seen, unique_by=lambda s: s.start_id),
    st.none() | st.floats(0, NOW),
    st.sets(st.sampled_from("abcdef")),
)
def test_the_choice_by_ties_differs_only_where_several_could_be_attached_to(
    candidates: list[Seen], pending: list[Seen], ended: float | None, ignored: set[str]
) -> None:
    """A candidate has a tie now, so it is ``of_run``; podwatch asks about several of them."""
    candidates = [Seen(s.start_id, s.age, of_run=True) for s in candidates]
    pending = [s for s in pending if s.start_id not in {c.start_id for c in candidates}]
    found = sift(candidates, pending, ended=ended, wall=NOW, ignored=ignored)

    def tree(one: Seen, answer: TreeAnswer) -> FoundTree:
        return FoundTree(process(one), answer, "because", trains=answer is TreeAnswer.ATTACH)

    def process(one: Seen) -> PodProcess:
        return PodProcess(ProcessIdentity(ord(one.start_id), round((NOW - one.age) * 100)), 1, "x", ("x",))

    trees = [tree(c, TreeAnswer.ATTACH) for c in candidates] + [tree(p, TreeAnswer.WAIT) for p in pending]
    none_of_ours = [process(one).identity for one in (*candidates, *pending) if one.start_id in ignored]
    chosen = choose_trainer(trees, ended=ended, ignored=none_of_ours)
    close = any(abs(NOW - s.age - ((ended or 0) - SEEN_LATE)) < 0.02 for s in (*candidates, *pending))
    if close:  # ticks are hundredths of a second
        return
    ids = {chr(t.top.pid) for t in chosen.waits_for}
    if len(found.successors) == 1 and not found.rivals:
        assert chosen.attach is not None
        assert chr(chosen.attach.top.pid) == found.successors[0].start_id
    else:
        assert chosen.attach is None
        assert ids == {s.start_id for s in (*found.successors, *found.rivals, *found.pending)}
