"""Which checkpoints are evaluated, the table, the best and a regression: pure decisions."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.event import Event, EventName
from podwatch.policy import evaluation as policy
from podwatch.policy.evaluation import MissingValue, Result, Rules, State, Target


def saved(step: int, number: int = 0, save_id: str = "") -> Event:
    fields: dict[str, str | int] = {"step": step, "save_id": save_id or f"s{step}"}
    return Event(EventName.CHECKPOINT_COMPLETE, 0.0, "", fields=fields, id=number)  # type: ignore[arg-type]


def due(rules: Rules, *events: Event, state: State | None = None) -> list[int]:
    """The steps that were due, in order, if each is evaluated at once."""
    state, found = state or State(), []
    for event in events:
        state = policy.on_event(state, event, rules)
        found += [t.step for t in state.waiting]
        state = replace(state, waiting=())
    return found


def test_every_nth_save_and_the_first_save_of_each_n_steps() -> None:
    saves = [saved(step) for step in range(4, 41, 4)]
    assert due(Rules(every_saves=3), *saves) == [12, 24, 36]
    assert due(Rules(every_steps=10), *saves) == [12, 20, 32, 40]
    assert due(Rules(), *saves) == []


def test_a_checkpoint_that_is_reported_again_counts_once() -> None:
    assert due(Rules(every_saves=2), saved(5), saved(5), saved(10)) == [10]


def test_the_last_one_at_the_end_also_if_its_save_ends_after_training() -> None:
    end, start = (
        Event(EventName.TRAINER_FINISHED, 0.0, ""),
        Event(EventName.TRAINER_STARTING, 0.0, "", fields={"start_id": "x"}),
    )
    rules = Rules(at_end=True)
    assert due(rules, saved(5), end) == [5]
    assert due(rules, saved(5), end, saved(10)) == [5, 10]
    assert due(rules, saved(5), end, start, saved(10)) == [5]


def test_milestones_are_published_checkpoints_that_the_store_keeps() -> None:
    event = Event(EventName.PUBLISHED, 0.0, "", fields={"step": 50, "generation": 1, "seq": 5})
    assert policy.on_event(State(), event, Rules(milestones=True)).waiting == ()
    (target,) = policy.on_event(State(), event, Rules(milestones=True), milestone=True).waiting
    assert (target.step, target.why) == (50, "milestone")
    assert policy.on_event(State(), event, Rules(), milestone=True).waiting == ()


def test_steps_that_a_resume_went_back_are_due_again() -> None:
    back = Event(EventName.TRAINER_STARTING, 0.0, "", fields={"start_id": "x", "step": 10})
    assert due(Rules(every_steps=10), saved(10), saved(20), back, saved(20, save_id="again")) == [10, 20, 20]


def test_coalescing_keeps_the_newest_and_every_request() -> None:
    rules, one_by_one = Rules(every_saves=1), Rules(every_saves=1, coalesce=False)
    state = policy.requested(State(), [Target(2, "s2")])
    for step in (5, 10, 15):
        state = policy.on_event(state, saved(step), rules)
    assert [t.step for t in state.waiting] == [2, 15]
    state = State()
    for step in (5, 10):
        state = policy.on_event(state, saved(step), one_by_one)
    assert [t.step for t in state.waiting] == [5, 10]


def test_a_request_for_one_that_waits_is_one_evaluation() -> None:
    state = policy.on_event(State(), saved(5), Rules(every_saves=1))
    assert policy.requested(state, [Target(5, "s5"), Target(6, "")]).waiting == (
        *state.waiting,
        Target(6, "", "request"),
    )


def test_after_a_kill_it_runs_again_at_most_so_often() -> None:
    state = policy.started(policy.requested(State(), [Target(5, "s5")]), Target(5, "s5", "request"))
    for _ in range(policy.INTERRUPTED_AT_MOST - 1):
        state, lost = policy.resumed(state)
        assert (len(state.waiting), lost, state.running) == (1, (), ())
        state = policy.started(state, state.waiting[0])
    state, lost = policy.resumed(state)
    assert (state.waiting, [t.step for t in lost]) == ((), [5])


def row(step: int, ok: bool = True, wall: float = 0.0, **metrics: float) -> Result:
    return Result(step, f"s{step}", ok, wall, metrics=metrics)


def test_the_table_has_one_row_for_each_checkpoint_and_a_failure_replaces_no_result() -> None:
    table = policy.with_result((), row(10, acc=0.5))
    table = policy.with_result(table, row(5, ok=False))
    assert [r.step for r in table] == [5, 10]
    assert policy.with_result(table, row(10, ok=False, wall=2.0)) == table
    assert policy.with_result(table, row(10, wall=2.0, acc=0.6))[-1].metrics == {"acc": 0.6}
    assert policy.with_result(table, row(5, wall=2.0, acc=0.1))[0].ok


def test_the_best_by_its_direction_among_those_that_exist() -> None:
    table = (row(5, acc=0.5), row(10, acc=0.7), row(15, acc=0.7), row(20, ok=False, acc=0.9), row(25))
    assert policy.best(table, "acc", lower=False) == table[1]
    assert policy.best(table, "acc", lower=True) == table[0]
    assert policy.best(table, "acc", lower=False, there={(5, "s5"), (15, "s15")}) == table[2]
    assert policy.best(table, "loss", lower=True) is None


@pytest.mark.parametrize(
    ("value", "lower", "worse"), [(0.66, False, True), (0.68, False, False), (0.9, False, False), (0.75, True, True)]
)
def test_a_regression_is_worse_than_the_best_before_by_more_than_the_tolerance(
    value: float, lower: bool, worse: bool
) -> None:
    table = (row(5, acc=0.7), row(30, acc=9.9 if not lower else -9.9))
    found = policy.regression(table, row(20, acc=value), "acc", lower=lower, tolerance=0.05)
    assert (found is not None) == worse
    assert found is None or found[0].step == 5


def test_a_regression_from_zero_and_a_failed_evaluation() -> None:
    table = (row(5, loss=0.0),)
    assert policy.regression(table, row(9, loss=0.1), "loss", lower=True, tolerance=0.05) == (table[0], math.inf)
    assert policy.regression(table, row(9, loss=0.0), "loss", lower=True, tolerance=0.05) is None
    assert policy.regression(table, row(9, ok=False), "loss", lower=True, tolerance=0.05) is None


def test_numbers_by_their_path() -> None:
    text = '{"results": {"gsm8k": {"acc,none": 0.5, "alias": "x", "ok": true}}, "n": 3, "bad": NaN, "list": [1, 2]}'
    assert policy.flatten(json.loads(text)) == {"results.gsm8k.acc,none": 0.5, "n": 3.0}
    assert policy.flatten(0.5) == {}


@given(
    st.recursive(
        st.floats() | st.integers() | st.text() | st.none() | st.booleans(),
        lambda inner: st.dictionaries(st.text(), inner),
        max_leaves=30,
    )
)
def test_any_document_gives_finite_numbers(document: object) -> None:
    assert all(math.isfinite(v) for v in policy.flatten(document).values())


def test_placeholders_and_what_is_missing() -> None:
    command = ("python", "e.py", "{weights}", "--out={output}/r", "{other}", "{step}{step}")
    values = {"weights": "/w", "output": "/o", "step": "5", "checkpoint": "/c", "run_id": "r"}
    assert policy.fill(command, values, {}) == ("python", "e.py", "/w", "--out=/o/r", "{other}", "55")
    with pytest.raises(MissingValue, match="accelerate"):
        policy.fill(command, {**values, "weights": ""}, {"weights": policy.no_weights("hf", "accelerate merge", "")})
    assert policy.fill(("x", "{checkpoint}"), {**values, "weights": ""}, {}) == ("x", "/c")


def test_what_is_kept_in_the_journal() -> None:
    state = policy.started(policy.on_event(State(), saved(5, 7), Rules(every_saves=1, coalesce=False)), Target(3))
    assert policy.state_from_dict(json.loads(json.dumps(policy.state_to_dict(state)))) == state
    assert policy.state_from_dict({"waiting": [{"odd": 1}]}) is None
    assert policy.state_from_dict("x") is None
    table = (row(5, acc=0.5), row(6, ok=False))
    assert policy.results_from_list(json.loads(json.dumps(policy.results_to_list(table)))) == table
    assert policy.results_from_list([{"step": 1}, "x"]) == ()
