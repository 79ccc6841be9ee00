"""A stray step directory is not believed, and a real checkpoint is never refused for longer than its step is unseen."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from podwatch.app.held_back_findings import believed_progress
from podwatch.checkpoints.held_back import HeldBack, implausible
from podwatch.checkpoints.records import CheckpointRecord, CheckpointRecords, RecordedFile, RecordSource
from podwatch.checkpoints.shapes import StepSeen
from podwatch.domain.checkpoint import NO_TRAINING, CheckpointSet, Completeness, HeldAs, newest_complete, newest_whole
from podwatch.domain.run import Lineage
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.recovery.choose import choose

STRAY = 99999999999999999
LINE = Lineage("b")


def saved(step: int, save_id: str = "") -> CheckpointSet:
    return CheckpointSet(step, "hf", Completeness.COMPLETE, (), 1, 1, float(step), save_id or f"s{step}")


def odd(
    *steps: int, shown: int | None = None, doubted: tuple[int, ...] = (), trusted: tuple[int, ...] = ()
) -> list[int]:
    return sorted(implausible([saved(n) for n in steps], shown, doubted=doubted, trusted=trusted))


def test_an_impossible_number_is_implausible_with_any_knowledge_or_none() -> None:
    assert odd(STRAY) == odd(100, STRAY) == odd(100, 105, STRAY, shown=107) == [STRAY]
    assert odd(STRAY, trusted=(STRAY,)) == []


def test_a_save_far_above_what_training_shows_is_held_until_it_shows_it() -> None:
    assert odd(100, 105, 110, 5000, shown=112) == [5000]
    assert odd(100, 105, 110, 5000, shown=5000) == []
    assert odd(100, 105, 110, 123, shown=112) == [123]
    assert odd(100, 105, 110, 122, shown=112) == [], "two save intervals above it"
    assert odd(100, 105, 110, 5000, 5005, 5010, shown=112) == [5000, 5005, 5010], "they do not prove each other"
    assert odd(100, 105, 110, 5000, shown=112, trusted=(5000,)) == []


def test_a_log_that_is_late_refuses_no_save() -> None:
    """A buffer of 8 KiB holds a hundred steps; a restart from below what it hides would lose them."""
    saves = range(100, 300, 5)
    assert odd(*saves, shown=100) == odd(*saves, shown=150) == []
    assert odd(*saves, 5000, shown=100) == [5000]
    assert odd(*saves, 306, shown=100) == [306]


def test_what_was_deleted_shows_how_far_training_was() -> None:
    """The best one is kept, and only the newest two of the others."""
    sets = [saved(100), saved(800), saved(900)]
    assert sorted(implausible(sets, 500)) == [800, 900]
    assert implausible(sets, 500, deleted=range(200, 800, 100)) == {}
    records = CheckpointRecords()
    for step in range(100, 800, 100):
        files = (RecordedFile("checkpoint", "model.pt", 1, 1),)
        records.note(CheckpointRecord(step, f"s{step}", "hf", "b", files, float(step)))
    records.keep_only([100])
    held = HeldBack()
    held.show(500)
    assert not any(s.held for s in held.mark(sets, records))


def test_a_first_save_at_step_zero_gives_no_interval() -> None:
    assert odd(0, 500, shown=499) == []


def test_a_copy_that_was_cut_off_is_no_progress_and_saves_that_are_never_complete_are() -> None:
    def cut(step: int) -> CheckpointSet:
        return replace(saved(step), completeness=Completeness.INCOMPLETE)

    def shown(*sets: CheckpointSet) -> int:
        (one,) = believed_progress((StepSeen("checkpoint", max(s.step for s in sets), 1.0),), sets)
        return one.step

    assert shown(saved(10), saved(20), saved(30), cut(99_999)) == 30
    assert shown(saved(10), saved(20), cut(30), cut(40), cut(50), cut(60)) == 60
    assert shown(cut(10), cut(20)) == 20
    assert shown(saved(10), cut(500)) == 500, "no interval is known"


def test_where_no_step_is_visible_nothing_is_held() -> None:
    assert odd(1000) == odd(20_251_122) == odd(100, 105, 110, 999_999) == []
    assert odd(30_000, shown=3) == odd(30_000, 31_000, shown=3) == [], "the log counts epochs"
    assert odd(5, shown=2) == [], "the first save"


def test_one_that_is_not_complete_is_not_judged_by_its_distance() -> None:
    writing = replace(saved(5000), completeness=Completeness.WRITING)
    assert implausible([saved(100), saved(105), writing], 106) == {}


def test_what_was_doubted_stays_doubted_until_training_shows_it() -> None:
    assert odd(490, 500, doubted=(500,)) == odd(490, 500, shown=491, doubted=(500,)) == [500]
    assert odd(490, 500, shown=500, doubted=(500,)) == []
    assert odd(490, 500, doubted=(500,), trusted=(500,)) == []


def test_it_is_neither_the_newest_nor_chosen_and_alone_it_is_asked_about() -> None:
    held = HeldBack()
    held.show(12)
    held.show(11)
    sets = held.mark([saved(5), saved(10), saved(STRAY)])
    assert [s.held_as for s in sets] == [None, None, HeldAs.IMPLAUSIBLE]
    for newest in (newest_complete(sets), newest_whole(sets)):
        assert newest is not None
        assert newest.step == 10
    assert choose(sets, lineage=LINE).step == 10
    alone = choose(held.mark([saved(STRAY)]), lineage=LINE)
    assert alone.source == "none", "never a fresh start over it"
    assert choose(held.mark([saved(STRAY)]), lineage=LINE, wanted=STRAY).step == STRAY
    assert choose([], [StoredCheckpoint(STRAY, "r", "b", 1, 1)], lineage=LINE).source == "none"
    assert choose([saved(5)], [StoredCheckpoint(STRAY, "r", "b", 1, 1)], lineage=LINE).step == 5
    assert not held.mark(sets[:2])[0].held


def test_a_record_says_what_an_earlier_podwatch_doubted_and_whom_the_operator_named() -> None:
    records, sets = CheckpointRecords(), [saved(n) for n in (100, 105, 500)]
    for one in sets:
        files = (RecordedFile("checkpoint", "model.pt", 1, 1),)
        records.note(CheckpointRecord(one.step, one.save_id, "hf", "b", files, float(one.step)))

    def held(shown: int | None = None) -> list[int]:
        found = HeldBack()
        if shown is not None:
            found.show(shown)
        return [s.step for s in found.mark(sets, records) if s.held_as is HeldAs.IMPLAUSIBLE]

    assert held() == []
    assert held(107) == [500]
    records.change((500, "s500"), doubted=True)
    assert held() == [500], "another podwatch, which knows no step of training yet"
    records.change((500, "s500"), released=True)
    assert held(107) == []
    records.note(replace(records.known[500], released=False, source=RecordSource.RESTORED))
    assert held(107) == [], "the store had it"


@given(
    st.integers(0, 100_000),  # where the run was when podwatch saw it first
    st.integers(1, 5000),  # save interval
    st.lists(st.integers(1, 300), min_size=1, max_size=8),  # saves that pass while podwatch is away
    st.integers(1, 5),  # checkpoints that the trainer keeps
    st.none() | st.integers(0, 200_000),  # how many steps its log is behind; None: it shows none
)
def test_what_training_saves_is_never_implausible(
    first: int, interval: int, absences: list[int], keep: int, behind: int | None
) -> None:
    step = first - first % interval
    on_disk: list[int] = []
    for away in absences:
        for _ in range(away):
            step += interval
            on_disk = [*on_disk, step][-keep:]
        assert odd(*on_disk) == [], "podwatch comes back: the log is not read yet"
        shown = None if behind is None else max(0, step + interval // 2 - behind)
        assert odd(*on_disk, shown=shown) == []
        step += interval
        assert odd(*on_disk, step, shown=shown) == [], "the log is one save behind, or more"


@given(st.integers(1, 5000), st.integers(1, 5), st.booleans(), st.integers(NO_TRAINING, 10**18))
def test_a_stray_changes_nothing_for_the_others(interval: int, keep: int, shows: bool, stray: int) -> None:
    on_disk = [saved(interval * (7 + n)) for n in range(keep)]
    held = HeldBack()
    if shows:
        held.show(on_disk[-1].step)
    marked = held.mark([*on_disk, saved(stray)])
    assert [s.step for s in marked if s.held] == [stray]
    assert choose(marked, lineage=LINE).step == on_disk[-1].step
