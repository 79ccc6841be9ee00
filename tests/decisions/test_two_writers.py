"""Which saves a second trainer may have mixed, and whose save confirms a start."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.second_writer import ALONE, SPANS_KEPT, Beside, Span, follow, made_by_us, why_held
from podwatch.domain.checkpoint import CheckpointSet, Completeness, newest_complete, newest_whole
from podwatch.domain.run import Lineage
from podwatch.domain.snapshot import ProgressSample, ProgressSource, Snapshot, observed
from podwatch.recovery.choose import choose
from podwatch.recovery.confirm_resume import ConfirmationState
from podwatch.recovery.context import Attempt


def saved(step: int, began: float, changed: float, held: str = "") -> CheckpointSet:
    return CheckpointSet(
        step, "prime-rl", Completeness.COMPLETE, (), 1, 1, changed, f"s{step}", began_wall=began, held=held
    )


# -- spans


looks = st.lists(st.tuples(st.floats(1.0, 60.0), st.booleans(), st.floats(0.0, 200.0)), max_size=40)


@given(looks)
def test_a_span_covers_every_moment_in_which_the_other_was_seen(seen: list[tuple[float, bool, float]]) -> None:
    """From its start to the first look that does not see it; and no moment twice."""
    now, spans = 1000.0, ()
    moments = []
    for passed, there, age in seen:
        now += passed
        spans = follow(spans, now - age if there else None, "pid 7", now)
        moments += [(now, there, now - age)]
    if len(spans) == SPANS_KEPT:
        return
    for at, there, since in moments:
        met = [s for s in spans if s.meets(at, at)]
        assert met or not there
        if there:
            assert any(s.start <= since for s in met)
    assert all(s.end is not None for s in spans[:-1])
    assert (spans[-1].end is None if spans else False) == bool(moments and moments[-1][1])


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.floats(0, 100) | st.none())
def test_a_set_is_held_exactly_if_its_writing_met_the_other(
    a: float, b: float, start: float, end: float | None
) -> None:
    began, changed = sorted((a + 1.0, b + 1.0))
    if end is not None and end < start:
        start, end = end, start
    apart = changed < start or (end is not None and began > end)
    assert bool(why_held(saved(1, began, changed), [Span(start, end, "pid 7")])) is not apart


def test_a_held_set_is_chosen_only_by_its_number() -> None:
    sets = [saved(10, 1, 2), saved(20, 3, 4, held="written while a second trainer was running (pid 7)")]
    line = Lineage("l1")
    chosen = choose(sets, lineage=line)
    assert (chosen.step, chosen.source) == (10, "local")
    assert "held back" in dict(chosen.rejected)[20]
    assert choose(sets, lineage=line, wanted=20).step == 20
    only = choose(sets[1:], lineage=line)
    assert (only.step, only.source) == (None, "none"), "no silent fresh start"


def test_a_held_set_is_never_the_newest_that_counts_and_stays_on_the_disk() -> None:
    sets = (saved(10, 1, 2), saved(20, 3, 4, held="x"))
    newest, whole = newest_complete(sets), newest_whole(sets)
    assert newest is not None
    assert whole is not None
    assert (newest.step, whole.step) == (10, 20)


# -- whose save


def sign(source: ProgressSource, at: float, step: int = 6, *, own: bool = False) -> ProgressSample:
    return ProgressSample(source, "trainer", at, step, own=own)


SAVE, LINE = ProgressSource.CHECKPOINT, ProgressSource.STEP_LINE


def test_a_save_is_ours_once_a_later_look_found_nobody_else() -> None:
    sample = sign(SAVE, 100.0)
    assert made_by_us(sample, ALONE) is True
    assert made_by_us(sample, Beside(99.0)) is None
    assert made_by_us(sample, Beside(101.0)) is True
    assert made_by_us(sample, Beside(101.0, (Span(50.0, None, "pid 7"),))) is False
    assert made_by_us(sample, Beside(101.0, (Span(50.0, 99.0, "pid 7"),))) is True
    assert made_by_us(sign(LINE, 100.0, own=True), Beside(0.0, (Span(50.0, None, "pid 7"),))) is True


def snapshot(at: float, *samples: ProgressSample) -> Snapshot:
    return Snapshot(at, at, progress=observed(samples, at))


def state_of(attempt: Attempt, at: float) -> ConfirmationState:
    return attempt.confirmation(at, 600.0).state


def test_the_save_of_another_confirms_nothing_and_accuses_nobody() -> None:
    attempt = Attempt("s1", 0.0, resumed_from=20, first_step=20)
    beside = Beside(9.0, (Span(-100.0, None, "pid 7"),))
    theirs = [sign(SAVE, 10.0, 25), sign(SAVE, 20.0, 5), sign(LINE, 20.0, 6)]
    assert not attempt.see(snapshot(21.0, *theirs), {}, (), beside)
    assert not attempt.see(snapshot(22.0, *theirs), {}, (), replace(beside, looked_at=30.0))
    assert (attempt.made_step, attempt.last_step, state_of(attempt, 40.0)) == (False, None, ConfirmationState.PENDING)
    # It ends, and what is saved after that is ours.
    beside = Beside(50.0, (Span(-100.0, 50.0, "pid 7"),))
    assert not attempt.see(snapshot(52.0, sign(SAVE, 51.0, 25)), {}, (), beside), "nobody has looked since"
    assert attempt.see(snapshot(61.0, sign(SAVE, 51.0, 25)), {}, (), replace(beside, looked_at=60.0))
    assert state_of(attempt, 61.0) is ConfirmationState.CONFIRMED


def test_our_own_log_confirms_beside_another() -> None:
    attempt = Attempt("s1", 0.0, resumed_from=20, first_step=20)
    beside = Beside(5.0, (Span(-100.0, None, "pid 7"),))
    assert attempt.see(snapshot(11.0, sign(SAVE, 9.0, 40), sign(LINE, 10.0, 21, own=True)), {}, (), beside)
    assert attempt.last_step == 21
    assert state_of(attempt, 11.0) is ConfirmationState.CONFIRMED


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(0, 40)), max_size=20), st.floats(0.0, 100.0))
def test_no_order_of_looks_makes_anothers_save_ours(samples: list[tuple[float, int]], gone: float) -> None:
    attempt = Attempt("s1", 0.0, resumed_from=20, first_step=20)
    at = 0.0
    for passed, step in samples:
        at += passed
        spans = (Span(-1.0, gone if at > gone else None, "pid 7"),)
        attempt.see(snapshot(at, sign(SAVE, at, step)), {}, (), Beside(at - 1.0, spans))
    assert all(sample.at > gone for sample in attempt.samples)
