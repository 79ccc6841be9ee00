"""Which step is resumed from."""

from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.run import Lineage
from podwatch.judgement.choose import RemoteSave, choose

LINE = Lineage("b", parent="a", parent_step=20)


def local(step: int, state: Completeness = Completeness.COMPLETE) -> CheckpointSet:
    save_id = f"l{step}" if state is Completeness.COMPLETE else ""
    return CheckpointSet(step, "hf", state, (), 100, 3, float(step), save_id, "" if save_id else "no marker")


def remote(step: int, lineage: str = "b", seq: int | None = None) -> RemoteSave:
    return RemoteSave(step, f"r{step}", lineage, step if seq is None else seq)


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
    choice = choose([], [remote(40, "a", 4), remote(30, "b", 5)], lineage=None)
    assert choice.step == 30


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
