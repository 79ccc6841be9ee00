"""Who may move the pointer."""

from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.remote import Pointer
from podwatch.judgement.ownership import next_pointer


def pointer(generation: int, seq: int, writer: str) -> Pointer:
    return Pointer(generation, seq, "run", "line", None, writer, "2026-01-01T00:00:00Z")


def test_first_write_of_a_run() -> None:
    decision = next_pointer(None, writer_id="a", own_generation=None)
    assert (decision.ok, decision.generation, decision.seq) == (True, 1, 1)


def test_a_foreign_pointer_is_claimed_with_the_next_generation_and_seq_goes_on() -> None:
    decision = next_pointer(pointer(3, 17, "old"), writer_id="new", own_generation=None)
    assert (decision.ok, decision.generation, decision.seq) == (True, 4, 18)


def test_a_higher_or_equal_foreign_generation_supersedes() -> None:
    assert next_pointer(pointer(5, 1, "b"), writer_id="a", own_generation=4).superseded
    assert next_pointer(pointer(4, 1, "b"), writer_id="a", own_generation=4).superseded


def test_the_owner_repairs_a_late_write() -> None:
    decision = next_pointer(pointer(3, 40, "frozen"), writer_id="a", own_generation=4, own_seq=52)
    assert (decision.ok, decision.generation, decision.seq) == (True, 4, 53)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 5), st.integers(0, 50), st.sampled_from("ab"), st.none() | st.integers(1, 5), st.integers(0, 50))
def test_an_allowed_write_never_goes_back(
    generation: int, seq: int, writer: str, own: int | None, own_seq: int
) -> None:
    decision = next_pointer(pointer(generation, seq, writer), writer_id="a", own_generation=own, own_seq=own_seq)
    if decision.ok:
        assert (decision.generation, decision.seq) > (generation, seq)
        assert decision.seq > own_seq
        assert own is None or decision.generation >= own
    else:
        assert writer != "a"
