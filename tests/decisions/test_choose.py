"""Which step is resumed from."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs, PartState
from podwatch.domain.run import Lineage
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.recovery.choose import awaited, choose, unanswered

LINE = Lineage("b", parent="a", parent_step=20)


def local(step: int, state: Completeness = Completeness.COMPLETE) -> CheckpointSet:
    save_id = f"l{step}" if state is Completeness.COMPLETE else ""
    return CheckpointSet(step, "hf", state, (), 100, 3, float(step), save_id, "" if save_id else "no marker")


def remote(step: int, lineage: str = "b", seq: int | None = None, problem: str = "") -> StoredCheckpoint:
    return StoredCheckpoint(step, f"r{step}", lineage, 1, step if seq is None else seq, problem=problem)


def test_newest_complete_and_the_half_written_one_is_named() -> None:
    choice = choose([local(10), local(15), local(20, Completeness.INCOMPLETE)], lineage=LINE)
    assert (choice.step, choice.source, choice.save_id) == (15, "local", "l15")
    assert choice.rejected == ((20, "incomplete: no marker"),)


def test_local_wins_at_the_same_step_and_the_store_when_newer() -> None:
    assert choose([local(30)], [remote(30)], lineage=LINE).source == "local"
    choice = choose([local(25)], [remote(30)], lineage=LINE)
    assert (choice.step, choice.source, choice.save_id) == (30, "store", "r30")


def test_a_line_that_was_left_is_not_followed_beyond_where_it_was_left() -> None:
    choice = choose([], [remote(20, "a"), remote(40, "a"), remote(50, "x")], lineage=LINE)
    assert choice.step == 20
    assert [step for step, _ in choice.rejected] == [50, 40]


def test_without_a_record_the_line_of_the_newest_seq_is_followed() -> None:
    choice = choose([], [remote(30, "b", 5), remote(40, "a", 4)], lineage=None)
    assert choice.step == 30


def test_what_is_damaged_in_the_store_is_passed_over_and_never_a_reason_for_a_fresh_start() -> None:
    assert choose([], [remote(40, problem="damaged"), remote(30)], lineage=None).step == 30
    assert choose([local(20)], [remote(40, problem="damaged")], lineage=LINE).step == 20
    choice = choose([], [remote(40, problem="a file is missing")], lineage=None)
    assert (choice.source, choice.rejected) == ("none", ((40, "in the store: a file is missing"),))
    assert choose([], [remote(40, problem="a file is missing")], lineage=LINE, wanted=40).source == "none"


def test_sets_of_nobody_knows_whom_are_never_taken_and_never_thrown_over() -> None:
    choice = choose([local(10)], lineage=LINE, adopted=False)
    assert choice.source == "none"
    assert "--adopt-existing" in choice.reason


def test_refused_steps_lead_to_an_older_one_or_to_a_person_never_to_a_silent_fresh_start() -> None:
    assert choose([local(10), local(15)], lineage=LINE, refused={15: "failed to load twice"}).step == 10
    assert choose([local(15)], lineage=LINE, refused={15: "failed to load twice"}).source == "none"
    assert choose([local(15)], lineage=LINE, below=15).source == "none"
    assert choose([local(10), local(15)], [remote(12)], lineage=LINE, below=15).step == 12


def test_nothing_at_all_is_a_fresh_start() -> None:
    assert choose([], lineage=LINE).source == "fresh"
    assert choose([local(5, Completeness.INCOMPLETE)], lineage=LINE).source == "fresh"


def test_a_step_asked_for_must_be_there_and_whole() -> None:
    assert choose([local(10), local(15)], lineage=LINE, wanted=10).step == 10
    missing = choose([local(10)], lineage=LINE, wanted=11)
    assert (missing.source, missing.step) == ("none", None)
    broken = choose([local(10, Completeness.DAMAGED)], lineage=LINE, wanted=10)
    assert broken.source == "none"
    assert "no marker" in broken.reason
    forced = choose([local(10)], lineage=LINE, wanted=10, refused={10: "resumed wrong"})
    assert forced.step == 10
    assert "resumed wrong" in forced.reason


def settling(step: int, seconds: float = 9.0) -> CheckpointSet:
    reason = "all files present: complete after 15 s without a change"
    return CheckpointSet(step, "hf", Completeness.WRITING, (), 100, 3, float(step), "", reason, seconds)


def cut_off(step: int, size: int = 100) -> CheckpointSet:
    part = PartState("checkpoint", f"/out/checkpoint-{step}", True, False, size)
    return CheckpointSet(step, "hf", Completeness.INCOMPLETE, (part,), size, 3, float(step), "", "no marker")


def unreadable(step: int) -> CheckpointSet:
    return CheckpointSet(step, "hf", Completeness.WRITING, (), 100, 3, float(step), "", "cannot be read", unclear=True)


def damaged(step: int) -> CheckpointSet:
    return CheckpointSet(step, "hf", Completeness.DAMAGED, (), 100, 3, float(step), "", "cut off", unclear=True)


def test_a_whole_set_that_settles_is_awaited_and_never_started_over() -> None:
    """Seen: trainer killed 9 s after its only save; podwatch moved it to quarantine and started from step 0."""
    assert awaited([settling(60)]) == settling(60)
    assert choose([settling(60)], lineage=LINE).source == "none"
    assert awaited([local(40), settling(60)]) == settling(60)
    assert awaited([local(60), settling(40)]) is None, "the newest is complete already"
    assert awaited([local(40), settling(60)], below=60) is None
    assert awaited([local(40), settling(60)], refused={60: "failed to load twice"}) is None
    assert awaited([local(40), settling(60)], wanted=40) is None
    assert awaited([local(60), settling(40)], wanted=40) == settling(40)


@pytest.mark.parametrize("unclear", [unreadable, damaged])
def test_what_cannot_be_read_or_is_broken_is_an_operators_decision(unclear: Callable[[int], CheckpointSet]) -> None:
    assert choose([unclear(20)], lineage=LINE).source == "none"
    assert choose([local(10), unclear(20)], lineage=LINE).step == 10
    assert choose([unclear(20)], [remote(15)], lineage=LINE).step == 15


def test_the_newest_that_no_inspection_could_judge_is_asked_about() -> None:
    def unknown(step: int) -> CheckpointSet:
        return replace(unreadable(step), unanswered=1)

    assert unanswered([local(10), unknown(20)]) == unknown(20)
    assert unanswered([unknown(20)]) == unknown(20)
    assert unanswered([local(30), unknown(20)]) is None, "a newer one is complete"
    assert unanswered([local(10), unreadable(20)]) is None, "it was not inspected"
    assert unanswered([local(10), unknown(20)], below=20) is None
    assert unanswered([local(10), unknown(20)], refused={20: "resumed at the wrong step"}) is None
    assert unanswered([local(10), replace(unknown(20), held_as=HeldAs.IMPLAUSIBLE)]) is None


def test_several_saves_of_which_none_is_complete_are_not_understood() -> None:
    """A layout that changed, or another one than was thought: each would be thrown away by a fresh start."""
    assert choose([cut_off(5)], lineage=LINE).source == "fresh", "one kill cuts off one save"
    assert choose([cut_off(5), cut_off(10)], lineage=LINE).source == "none"
    assert choose([cut_off(5), cut_off(10, size=0)], lineage=LINE).source == "fresh", "an empty directory is no save"
    assert choose([local(2), cut_off(5), cut_off(10)], lineage=LINE).step == 2


SETS = st.lists(
    st.builds(lambda step, make: make(step), st.integers(0, 30), st.sampled_from([local, settling, cut_off, damaged])),
    max_size=6,
    unique_by=lambda s: s.step,
)


@given(sets=SETS)
def test_the_newest_whole_set_is_chosen_or_awaited(sets: list[CheckpointSet]) -> None:
    """Whole: complete, or complete as soon as it has settled. Nothing whole is ever passed over for an older one."""
    whole = [s for s in sets if s.complete or s.settles_in is not None]
    waits = awaited(sets)
    choice = choose(sets, lineage=LINE)
    if not whole:
        assert waits is None
        assert choice.source in ("fresh", "none")
        return
    newest = max(s.step for s in whole)
    assert (waits.step if waits is not None else choice.step) == newest
    assert choice.source != "fresh"
