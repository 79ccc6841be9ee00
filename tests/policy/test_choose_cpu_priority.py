"""When the upload's priority rises and falls: only with a need and a busy CPU, in steps, and ever more rarely."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.policy.choose_cpu_priority import (
    Change,
    Level,
    Look,
    Need,
    Standing,
    Timing,
    begin,
    ended,
    needs_of,
    slow_because_of_cpu,
    step,
)
from tests.support.examples import examples

T = Timing(look=3, settle=6, patience=60, patience_most=960, report=30)
BUSY = Look(at=0, left_bytes=1000, rate=1.0, usual_rate=1.0, cpu_wait=0.9)
"""Every core is busy, and nothing needs more."""


def run(standing: Standing, look: Look, seconds: float, start: float = 0.0) -> tuple[Standing, list[Change], float]:
    changes, at = [], start
    while at < start + seconds:
        at += T.look
        judged = step(standing, replace(look, at=at), T)
        standing = judged.standing
        if judged.change is not None:
            changes.append(judged.change)
    return standing, changes, at


@pytest.mark.parametrize(
    ("need", "look"),
    [
        (Need.SLOW, replace(BUSY, rate=0.4)),
        (Need.LATE, replace(BUSY, next_save_in=900.0)),
        (Need.NEWER, replace(BUSY, newer_waits=True)),
        (Need.RISK, replace(BUSY, steps_at_risk=20, steps_per_save=10)),
        (Need.DISK, replace(BUSY, disk_waits=True)),
        (Need.OVER, replace(BUSY, training_over=True)),
        (Need.FIRST, replace(BUSY, nothing_stored=True)),
    ],
)
def test_each_need_raises_it_where_the_cpu_is_busy_and_only_there(need: Need, look: Look) -> None:
    assert needs_of(look, T) == (need,)
    standing, changes, _ = run(Standing(), look, 60)
    most = Level.RAISED if need in (Need.SLOW, Need.FIRST) else Level.ORDINARY
    assert [c.level for c in changes] == [Level.RAISED, Level.ORDINARY][: int(most)]
    assert str(need) in standing.reason
    assert "90 %" in standing.reason
    for share in (0.0, 0.1, None):
        assert run(Standing(), replace(look, cpu_wait=share), 600)[1] == []


@pytest.mark.parametrize(
    "look",
    [
        BUSY,
        replace(BUSY, rate=0.6),
        replace(BUSY, next_save_in=1001.0),
        replace(BUSY, steps_at_risk=19, steps_per_save=10),
        replace(BUSY, rate=None, next_save_in=1.0),
        replace(BUSY, steps_at_risk=1000, steps_per_save=None),
    ],
)
def test_while_it_keeps_pace_it_stays_at_the_lowest(look: Look) -> None:
    assert run(Standing(), look, 600)[1] == []


def test_an_upload_that_stands_still_will_not_finish() -> None:
    assert needs_of(replace(BUSY, rate=0.0, usual_rate=None, next_save_in=900.0), T) == (Need.LATE,)
    assert needs_of(replace(BUSY, rate=0.0, usual_rate=None, next_save_in=900.0, left_bytes=0), T) == ()


def test_it_falls_in_steps_once_nothing_needs_it() -> None:
    standing, _, at = run(Standing(), replace(BUSY, newer_waits=True), 30)
    assert standing.level is Level.ORDINARY
    standing, changes, _ = run(standing, BUSY, 200, at)
    assert [(c.before, c.level) for c in changes] == [(2, 1), (1, 0)]
    assert standing.reason == ""


def test_what_ends_a_need_is_more_than_what_began_it() -> None:
    raised = Standing(level=Level.RAISED, changed_at=0.0, reason="x")
    assert run(raised, replace(BUSY, rate=0.7), 600)[1] == [], "0.7 of the line's rate is neither slow nor over it"
    late = replace(BUSY, next_save_in=1100.0)
    assert run(replace(raised, level=Level.ORDINARY), late, 600)[1] == []
    assert run(raised, late, 600)[1] == [], "what keeps a level does not raise it further"
    assert run(raised, replace(BUSY, rate=0.85), 600)[1] != []


def test_where_the_line_is_the_limit_it_falls_though_the_backup_is_behind() -> None:
    raised = Standing(level=Level.ORDINARY, changed_at=0.0, reason="x")
    _, changes, _ = run(raised, replace(BUSY, newer_waits=True, cpu_wait=0.01), 300)
    assert [c.level for c in changes] == [Level.RAISED, Level.LOWEST]


def test_a_need_that_comes_back_each_time_makes_it_more_patient() -> None:
    """A pod that is busy for ever, and an upload that keeps pace only while it is raised."""
    standing, at, lowered = Standing(), 0.0, []
    while at < 20_000:
        at += T.look
        look = replace(BUSY, at=at, rate=0.4 if standing.level is Level.LOWEST else 0.9)
        judged = step(standing, look, T)
        standing = judged.standing
        if judged.change is not None and judged.change.level is Level.LOWEST:
            lowered.append(at)
    gaps = [b - a for a, b in pairwise(lowered)]
    assert gaps[:4] == sorted(gaps[:4])
    assert gaps[3] > 4 * gaps[0]
    assert min(gaps[5:]) >= T.patience_most


def test_what_the_child_did_not_take_in_full_is_given_to_another_child_if_it_still_waits() -> None:
    standing, changes, at = run(Standing(), replace(BUSY, nothing_stored=True), 6)
    assert [c.replace for c in changes] == [False]
    calm = step(standing, replace(BUSY, at=at + 30, nothing_stored=True, partly=True, cpu_wait=0.1), T)
    assert calm.change is None, "its session's autogroup was enough"
    again = step(standing, replace(BUSY, at=at + 30, nothing_stored=True, partly=True), T)
    assert again.change is not None
    assert (again.change.level, again.change.replace) == (Level.RAISED, True)
    behind = step(standing, replace(BUSY, at=at + 30, newer_waits=True, partly=True), T)
    assert behind.change is not None
    assert (behind.change.level, behind.change.replace) == (Level.ORDINARY, True)


def test_the_time_between_uploads_is_calm() -> None:
    raised = Standing(level=Level.ORDINARY, changed_at=0.0, reason="x")
    over = ended(raised, 100.0)
    assert begin(over, 150.0, T).standing.level is Level.ORDINARY
    one = begin(over, 170.0, T)
    assert one.change is not None
    assert (one.standing.level, one.standing.reason) == (Level.RAISED, "x")
    two = begin(over, 1000.0, T)
    assert two.change is not None
    assert (two.change.before, two.standing.level, two.standing.reason) == (Level.ORDINARY, Level.LOWEST, "")
    assert begin(raised, 1000.0, T).standing.level is Level.ORDINARY, "another one waits: nothing was calm"


@given(st.integers(1, 100), st.floats(0.0, 30.0))
def test_many_short_uploads_rise_as_one_long_one_does(looks: int, between: float) -> None:
    """Each of them is shorter than ``settle``, or longer; another checkpoint waits all the time."""
    standing, at, took = Standing(), 0.0, 0.0
    behind = replace(BUSY, newer_waits=True)
    while took < 100 * T.look:
        standing = begin(standing, at, T).standing
        before = at
        standing, _, at = run(standing, behind, looks * T.look, at)
        took += at - before
        at += between
    assert standing.level is Level.ORDINARY


def test_it_is_reported_after_a_while_and_until_it_has_been_over_for_a_while() -> None:
    behind = replace(BUSY, newer_waits=True)
    standing, _, at = run(Standing(), behind, 30)
    assert not slow_because_of_cpu(standing, at, T)
    standing, _, at = run(standing, behind, 6, at)
    assert slow_because_of_cpu(standing, at, T)
    standing, _, at = run(standing, BUSY, 27, at)
    assert slow_because_of_cpu(standing, at, T)
    standing, _, at = run(standing, BUSY, 9, at)
    assert not slow_because_of_cpu(standing, at, T)
    standing, _, at = run(Standing(), replace(behind, cpu_wait=0.0), 90)
    assert not slow_because_of_cpu(standing, at, T), "the line is the cause"


looks = st.builds(
    Look,
    at=st.just(0.0),
    left_bytes=st.integers(0, 10**12),
    rate=st.none() | st.floats(0, 1e10),
    usual_rate=st.none() | st.floats(0, 1e10),
    cpu_wait=st.none() | st.floats(0, 1),
    next_save_in=st.none() | st.floats(0, 1e5),
    newer_waits=st.booleans(),
    nothing_stored=st.booleans(),
    steps_at_risk=st.none() | st.integers(0, 10**6),
    steps_per_save=st.none() | st.integers(0, 10**4),
    disk_waits=st.booleans(),
    partly=st.booleans(),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(looks, st.floats(0.1, 200)), max_size=60))
def test_every_change_is_one_step_with_its_cause(seen: list[tuple[Look, float]]) -> None:
    standing, at = Standing(), 0.0
    raised_at = float("-inf")
    for look, seconds in seen:
        at += seconds
        before = standing
        judged = step(before, replace(look, at=at), T)
        standing, change = judged.standing, judged.change
        assert (change is None) == (standing.level is before.level) or (change is not None and change.replace)
        if change is None:
            continue
        assert abs(change.level - change.before) <= 1
        assert change.reason
        if change.level > change.before or change.replace:
            assert look.cpu_wait is not None
            assert look.cpu_wait >= T.waits
            assert needs_of(look, T)
            assert at - raised_at >= T.settle
            raised_at = at
        else:
            assert standing.calm_since == at
            assert before.calm_since is None or at - before.calm_since >= T.patience
    assert T.patience <= (standing.patience or T.patience) <= T.patience_most
    quiet, _, _ = run(standing, Look(at=0.0, cpu_wait=0.0), 3 * T.patience_most, at)
    assert quiet.level is Level.LOWEST


@settings(max_examples=examples(30), deadline=None)
@given(looks, looks, st.floats(0, 1))
def test_changes_grow_rare_whatever_repeats(one: Look, other: Look, mix: float) -> None:
    """However two states of the pod alternate, an hour has few changes once patience has grown."""
    standing, at, changes = Standing(), 0.0, []
    turn = 0
    while at < 6 * T.patience_most:
        at += T.look
        turn += 1
        look = one if (turn * mix) % 1 < 0.5 else other
        judged = step(standing, replace(look, at=at, partly=False), T)
        standing = judged.standing
        if judged.change is not None:
            changes.append(at)
    assert len([c for c in changes if c > 3 * T.patience_most]) <= 12
