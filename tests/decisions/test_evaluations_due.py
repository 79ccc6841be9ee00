"""Which checkpoints are evaluated, the table and the best: pure decisions."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.event import Event, EventName
from podwatch.domain.snapshot import Desired
from podwatch.hooks import evaluations_due
from podwatch.hooks.evaluations_due import MissingValue, Result, Rules, State, Target


def saved(step: int, number: int = 0, save_id: str = "") -> Event:
    fields: dict[str, str | int] = {"step": step, "save_id": save_id or f"s{step}"}
    return Event(EventName.CHECKPOINT_COMPLETE, 0.0, "", fields=fields, id=number)  # type: ignore[arg-type]


def due(rules: Rules, *events: Event, state: State | None = None) -> list[int]:
    """The steps that were due, in order, if each is evaluated at once."""
    state, found = state or State(), []
    for event in events:
        state = evaluations_due.on_event(state, event, rules)
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


@pytest.mark.parametrize("end_first", [False, True])
def test_a_save_that_became_complete_only_after_training_resumed_from_it_is_due(end_first: bool) -> None:
    """Seen: training ended just after its last save and was started once more from it: that checkpoint was never
    evaluated, and the one before it twice."""
    end = Event(EventName.TRAINER_FINISHED, 0.0, "")
    late = [end, saved(30)] if end_first else [saved(30), end]
    assert due(Rules(at_end=True), saved(20), start(30), *late)[-1] == 30
    assert due(Rules(every_saves=1, at_end=True), saved(20), start(30), saved(30), saved(30, save_id="x")) == [20, 30]
    state = evaluations_due.on_event(evaluations_due.on_event(State(), saved(20), Rules()), start(30), Rules())
    state = evaluations_due.requested(evaluations_due.on_event(state, at(saved(30), 100.0), Rules()), [Target(5, "s5")])
    assert evaluations_due.stop_for(state, state.waiting, 100.0, RUNNING) == (), "training has only just been started"


def test_steps_that_a_resume_went_back_are_due_again() -> None:
    back = Event(EventName.TRAINER_STARTING, 0.0, "", fields={"start_id": "x", "step": 10})
    assert due(Rules(every_steps=10), saved(10), saved(20), back, saved(20, save_id="again")) == [10, 20, 20]


def test_coalescing_keeps_the_newest_and_every_request() -> None:
    rules, one_by_one = Rules(every_saves=1), Rules(every_saves=1, coalesce=False)
    state = evaluations_due.requested(State(), [Target(2, "s2")])
    for step in (5, 10, 15):
        state = evaluations_due.on_event(state, saved(step), rules)
    assert [t.step for t in state.waiting] == [2, 15]
    state = State()
    for step in (5, 10):
        state = evaluations_due.on_event(state, saved(step), one_by_one)
    assert [t.step for t in state.waiting] == [5, 10]


def test_a_request_for_one_that_waits_is_one_evaluation() -> None:
    state = evaluations_due.on_event(State(), saved(5), Rules(every_saves=1))
    assert evaluations_due.requested(state, [Target(5, "s5"), Target(6, "")]).waiting == (
        *state.waiting,
        Target(6, "", "request"),
    )


def test_after_a_kill_it_runs_again_at_most_so_often() -> None:
    state = evaluations_due.started(evaluations_due.requested(State(), [Target(5, "s5")]), Target(5, "s5", "request"))
    for _ in range(evaluations_due.INTERRUPTED_AT_MOST - 1):
        state, lost = evaluations_due.resumed(state)
        assert (len(state.waiting), lost, state.running) == (1, (), ())
        state = evaluations_due.started(state, state.waiting[0])
    state, lost = evaluations_due.resumed(state)
    assert (state.waiting, [t.step for t in lost]) == ((), [5])


def row(step: int, ok: bool = True, wall: float = 0.0, **metrics: float) -> Result:
    return Result(step, f"s{step}", ok, wall, metrics=metrics)


def test_the_table_has_one_row_for_each_checkpoint_and_a_failure_replaces_no_result() -> None:
    table = evaluations_due.with_result((), row(10, acc=0.5))
    table = evaluations_due.with_result(table, row(5, ok=False))
    assert [r.step for r in table] == [5, 10]
    assert evaluations_due.with_result(table, row(10, ok=False, wall=2.0)) == table
    assert evaluations_due.with_result(table, row(10, wall=2.0, acc=0.6))[-1].metrics == {"acc": 0.6}
    assert evaluations_due.with_result(table, row(5, wall=2.0, acc=0.1))[0].ok


def test_the_best_by_its_direction_among_those_that_exist() -> None:
    table = (row(5, acc=0.5), row(10, acc=0.7), row(15, acc=0.7), row(20, ok=False, acc=0.9), row(25))
    assert evaluations_due.best(table, "acc", lower=False) == table[1]
    assert evaluations_due.best(table, "acc", lower=True) == table[0]
    assert evaluations_due.best(table, "acc", lower=False, there={(5, "s5"), (15, "s15")}) == table[2]
    assert evaluations_due.best(table, "loss", lower=True) is None


def test_numbers_by_their_path() -> None:
    text = '{"results": {"gsm8k": {"acc,none": 0.5, "alias": "x", "ok": true}}, "n": 3, "bad": NaN, "list": [1, 2]}'
    assert evaluations_due.flatten(json.loads(text)) == {"results.gsm8k.acc,none": 0.5, "n": 3.0}
    assert evaluations_due.flatten(0.5) == {}


@given(
    st.recursive(
        st.floats() | st.integers() | st.text() | st.none() | st.booleans(),
        lambda inner: st.dictionaries(st.text(), inner),
        max_leaves=30,
    )
)
def test_any_document_gives_finite_numbers(document: object) -> None:
    assert all(math.isfinite(v) for v in evaluations_due.flatten(document).values())


def test_placeholders_and_what_is_missing() -> None:
    command = ("python", "e.py", "{weights}", "--out={output}/r", "{other}", "{step}{step}")
    values = {"weights": "/w", "output": "/o", "step": "5", "checkpoint": "/c", "run_id": "r"}
    assert evaluations_due.fill(command, values, {}) == ("python", "e.py", "/w", "--out=/o/r", "{other}", "55")
    with pytest.raises(MissingValue, match="accelerate"):
        evaluations_due.fill(
            command, {**values, "weights": ""}, {"weights": evaluations_due.no_weights("hf", "accelerate merge", "")}
        )
    assert evaluations_due.fill(("x", "{checkpoint}"), {**values, "weights": ""}, {}) == ("x", "/c")


def test_what_is_kept_in_the_journal() -> None:
    state = evaluations_due.started(
        evaluations_due.on_event(State(), saved(5, 7), Rules(every_saves=1, coalesce=False)), Target(3)
    )
    assert evaluations_due.State.kept(json.loads(json.dumps(state.to_json()))) == state
    assert evaluations_due.State.kept({"waiting": [{"odd": 1}]}) is None
    assert evaluations_due.State.kept("x") is None
    table = (row(5, acc=0.5), row(6, ok=False))
    assert evaluations_due.results_from_list(json.loads(json.dumps([row.to_json() for row in table]))) == table
    assert evaluations_due.results_from_list([{"step": 1}, "x"]) == ()


# -- training stops for it -------------------------------------------------------------------------------------------

RUNNING, STOPPED, FINISHED = Desired.RUNNING, Desired.STOPPED, Desired.FINISHED


def at(event: Event, wall: float) -> Event:
    return replace(event, wall=wall)


def start(step: int | None = None) -> Event:
    fields: dict[str, str | int] = {"start_id": "x"} if step is None else {"start_id": "x", "step": step}
    return Event(EventName.TRAINER_STARTING, 0.0, "", fields=fields)  # type: ignore[arg-type]


def test_training_stops_only_just_after_a_save() -> None:
    state = evaluations_due.on_event(State(), at(saved(10), 100.0), Rules(every_saves=1))
    assert evaluations_due.stop_for(state, state.waiting, 100.0, RUNNING) == state.waiting
    assert evaluations_due.stop_for(state, state.waiting, 130.0, RUNNING) == state.waiting
    assert evaluations_due.stop_for(state, state.waiting, 131.0, RUNNING) == (), "it would repeat too many steps"
    assert evaluations_due.stop_for(state, state.waiting, 90.0, RUNNING) == (), (
        "the clock was set back: the age is unknown"
    )
    assert evaluations_due.stop_for(state, (), 100.0, RUNNING) == (), "its files are not here yet"


def test_a_request_waits_for_the_next_save_and_a_start_makes_no_save() -> None:
    state = evaluations_due.on_event(State(), at(saved(10), 100.0), Rules())
    state = evaluations_due.requested(state, [Target(5, "s5")])
    assert evaluations_due.stop_for(state, state.waiting, 500.0, RUNNING) == ()
    state = evaluations_due.on_event(state, at(saved(15), 500.0), Rules())
    assert [t.step for t in evaluations_due.stop_for(state, state.waiting, 505.0, RUNNING)] == [5]
    state = evaluations_due.on_event(state, start(15), Rules())
    assert evaluations_due.stop_for(state, state.waiting, 506.0, RUNNING) == (), "training has only just been started"
    state = evaluations_due.on_event(state, at(saved(20), 600.0), Rules())
    assert [t.step for t in evaluations_due.stop_for(state, state.waiting, 600.0, RUNNING)] == [5]


def test_a_checkpoint_that_is_reported_again_is_no_new_save() -> None:
    state = evaluations_due.on_event(State(), at(saved(10), 100.0), Rules(every_saves=1))
    state = evaluations_due.on_event(state, at(saved(10), 500.0), Rules(every_saves=1))
    assert evaluations_due.stop_for(state, state.waiting, 500.0, RUNNING) == ()


def test_without_training_nothing_has_to_stop() -> None:
    state = evaluations_due.on_event(State(), at(saved(10), 100.0), Rules(every_saves=1))
    state = evaluations_due.requested(state, [Target(5, "s5")])
    assert evaluations_due.stop_for(state, state.waiting, 9e9, FINISHED) == state.waiting
    assert [t.step for t in evaluations_due.stop_for(state, state.waiting, 9e9, STOPPED)] == [5], (
        "its operator wants this one"
    )


def test_what_is_here() -> None:
    state = evaluations_due.requested(State(), [Target(5, "s5"), Target(10, ""), Target(15, "old"), Target(20, "s20")])
    local = [(5, "s5"), (10, "s10"), (15, "new")]
    assert [t.step for t in evaluations_due.ready(state, local, ())] == [5, 10]
    assert [t.step for t in evaluations_due.ready(state, local, state.waiting[2:3])] == [5, 10, 15]
    assert evaluations_due.named(state.waiting[:2]) == "step 5, 10"
    assert evaluations_due.named([Target(n) for n in range(8)]) == "step 0, 1, 2, 3, 4, 5 and 2 more"


def test_a_stop_in_vain_counts_as_an_interruption() -> None:
    state = evaluations_due.requested(State(), [Target(5, "s5"), Target(10, "s10")])
    for _ in range(evaluations_due.INTERRUPTED_AT_MOST):
        state, lost = evaluations_due.resumed(state, state.waiting[:1])
    assert ([t.step for t in state.waiting], [t.step for t in lost]) == ([10], [5])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("save"), st.integers(0, 5)),
            st.tuples(st.just("start"), st.integers(0, 5)),
            st.tuples(st.just("request"), st.integers(0, 5)),
            st.tuples(st.just("look"), st.integers(0, 200)),
            st.tuples(st.just("kill"), st.integers(0, 2)),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_no_step_older_than_the_limit_is_repeated_and_no_target_is_lost(
    acts: list[tuple[str, int]], coalesce: bool
) -> None:
    """Whatever happens in whatever order: training stops only within the limit after a save that no start followed;
    every request ends evaluated, given up, or waiting; and none is begun more often than allowed."""
    rules, state, wall, saved_at = Rules(every_saves=2, coalesce=coalesce), State(), 1000.0, float("-inf")
    asked: set[int] = set()
    ended: set[int] = set()
    begun: dict[Target, int] = {}
    step = 0
    for act, number in acts:
        if act == "save":
            step, wall = step + 1, wall + 10.0
            state, saved_at = evaluations_due.on_event(state, at(saved(step), wall), rules), wall
        elif act == "start":
            state, saved_at = evaluations_due.on_event(state, start(step), rules), float("-inf")
        elif act == "request" and number:
            state = evaluations_due.requested(state, [Target(number, f"s{number}")])
            asked, ended = asked | {number}, ended - {number}
        elif act == "look":
            wall += number
            targets = evaluations_due.stop_for(state, state.waiting, wall, RUNNING)
            assert not targets or wall - saved_at <= evaluations_due.FRESH_SECONDS
            for target in targets:
                state = evaluations_due.started(state, target)
                state = replace(state, running=())
                ended.add(target.step)
        elif state.waiting:  # killed while the first ran, or before it began
            first = state.waiting[0]
            key = replace(first, interrupted=0)
            begun[key] = begun.get(key, 0) + 1
            assert first.interrupted < evaluations_due.INTERRUPTED_AT_MOST
            if number:
                state, lost = evaluations_due.resumed(evaluations_due.started(state, first))
            else:
                state, lost = evaluations_due.resumed(state, (first,))
            ended |= {t.step for t in lost}
        assert not state.running
        assert asked <= {t.step for t in state.waiting} | ended
        assert evaluations_due.State.kept(json.loads(json.dumps(state.to_json()))) == state


def test_the_checkpoint_that_training_resumed_from_is_no_new_save() -> None:
    """Seen: prime-rl writes the broadcast of that step again, so its save id changes. With every_saves = 1 each stop
    for an evaluation would cause the next one, and the best result would belong to no checkpoint that exists."""
    rules = Rules(every_saves=1)
    state = evaluations_due.on_event(State(), at(saved(10), 100.0), rules)
    state = replace(evaluations_due.started(state, state.waiting[0]), running=())
    state = evaluations_due.on_event(
        evaluations_due.requested(state, [Target(10, "s10"), Target(5, "s5")]), start(10), rules
    )
    state = evaluations_due.on_event(state, at(saved(10, save_id="again"), 110.0), rules)
    assert [(t.step, t.save_id) for t in state.waiting] == [(10, "again"), (5, "s5")]
    assert evaluations_due.stop_for(state, state.waiting, 110.0, RUNNING) == ()
    assert state.saves == 0
    state = evaluations_due.on_event(
        evaluations_due.on_event(state, start(10), rules), saved(10, save_id="third"), rules
    )
    assert evaluations_due.with_earlier([(10, "third"), (5, "s5")], state.again) == {
        (10, "third"), (10, "again"), (10, "s10"), (5, "s5"),
    }  # fmt: skip
    assert evaluations_due.with_earlier([(10, "other")], state.again) == {(10, "other")}
    assert due(rules, saved(15), state=replace(state, waiting=())) == [15]
    assert evaluations_due.State.kept(json.loads(json.dumps(state.to_json()))) == state
