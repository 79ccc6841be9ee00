"""The table of decisions: each row alone, each pair of neighbours, an answer for everything, and never back."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from podwatch.domain.checkpoint import Completeness
from podwatch.domain.facts import (
    NOT_MEASURED,
    NOT_SEARCHED,
    Facts,
    Inventory,
    NodesOfRun,
    PendingEvaluation,
    Trainer,
)
from podwatch.domain.finding import Finding, FindingKind, Verdict
from podwatch.domain.lease import LeaseAction
from podwatch.domain.process import TreeAnswer
from podwatch.domain.run import Pause
from podwatch.domain.run_state import RestartHistory, RunState, Stopping
from podwatch.domain.snapshot import Desired, SensorState, unobserved
from podwatch.domain.starts import StartedBy, TrainerStart
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.recovery.actions import (
    Attach,
    Clean,
    Count,
    Decision,
    DropStart,
    Evaluate,
    Fetch,
    Finish,
    Phase,
    RecordEnd,
    Start,
    Stop,
    WantStop,
)
from podwatch.recovery.decide import JUDGE_SECONDS, ROWS, Now, decide
from tests.support.deciding import (
    AT,
    DEAD,
    GUARD,
    LAST,
    OURS,
    OVER,
    WALL,
    Case,
    finding,
    held,
    leased,
    saved,
    searched,
    settling,
    tree,
)

STOPPED = {"desired": Desired.STOPPED, "desired_wall": WALL - 500}
FINISHED = {"desired": Desired.FINISHED, "desired_wall": WALL - 500}
PAUSED = {"pause": Pause(WALL - 5)}
STOPPING = {"stopping": Stopping("s1", "the engine died")}
RESTART = (finding(Verdict.RESTART),)
DUE = PendingEvaluation("step 40", due=True)
IDLE = PendingEvaluation("step 40", due=True, idle=True)
IN_STORE = StoredCheckpoint(45, "r45", "b", 1, 1)
SUPERSEDED = leased(LeaseAction.SUPERSEDED, "pod b has taken the run over", stop=True)

CASES: dict[str, Case] = {
    "another_supervisor_holds_the_run": Case({"search": searched(lock_holder="pid 9 holds the run lock")}),
    "a_stop_is_unfinished": Case({"trainer": OURS}, STOPPING),
    "podwatch_only_watches": Case({}, PAUSED),
    "the_run_belongs_elsewhere": Case({"trainer": OURS, "store": SUPERSEDED}),
    "training_is_not_wanted": Case({"trainer": OURS}, STOPPED),
    "an_evaluation_needs_the_gpus": Case({"trainer": OURS, "evaluation": DUE}),
    "a_finding_asks": Case({"trainer": OURS}, findings=RESTART),
    "our_trainer_lives": Case({"trainer": OURS}),
    "our_trainer_has_ended": Case({"trainer": DEAD}, findings=RESTART),
    "an_operator_started_a_trainer": Case({"search": searched(tree())}),
    "something_may_train_already": Case({"search": searched(tree(answer=TreeAnswer.WAIT, trains=False))}),
    "its_operator_may_start_it_again": Case({"trainer": DEAD}),
    "an_evaluation_runs": Case({"evaluation": IDLE}, {"evaluation": "step 40"}),
    "no_training_is_wanted": Case({}, STOPPED),
    "the_run_is_held_elsewhere": Case({"store": leased(LeaseAction.WATCH, "pod b may train this run")}),
    "the_next_try_is_not_due": Case({}, {"next_try_wall": WALL + 30}),
    "podwatch_starts_none": Case(settings={"trainer": {"supervise": "attach"}}),
    "the_gpus_are_held": Case({"held": held("gpu0 holds 3.0 GiB more than before training")}),
    "no_step_is_known_to_start_from": Case({"checkpoints": (saved(40), settling(45))}),
    "the_newest_is_in_the_store_only": Case({"inventory": Inventory((IN_STORE,))}, {"starts": (GUARD, OVER)}),
    "training_starts": Case(),
}


def test_each_row_has_a_case() -> None:
    assert list(CASES) == [row.__name__ for row in ROWS]


@pytest.mark.parametrize("row", CASES)
def test_a_row_answers_for_its_own_case(row: str) -> None:
    assert CASES[row].row == row


EXCLUDE_EACH_OTHER = {
    ("another_supervisor_holds_the_run", "a_stop_is_unfinished"),
    ("our_trainer_lives", "our_trainer_has_ended"),
}
"""Of each, one needs a trainer that lives, and the other none."""


def test_some_neighbours_cannot_both_answer() -> None:
    for pair in EXCLUDE_EACH_OTHER:
        assert sorted(CASES[row].now().ours is None for row in pair) == [False, True]


@pytest.mark.parametrize(("first", "second"), [pair for pair in pairwise(CASES) if pair not in EXCLUDE_EACH_OTHER])
def test_of_two_neighbours_the_first_wins(first: str, second: str) -> None:
    assert CASES[first].over(CASES[second]).row == first


# -- the rows ----------------------------------------------------------------------------------------------------------


def test_a_recorded_stop_is_finished_also_while_paused() -> None:
    case = Case({"trainer": OURS}, {**STOPPING, **PAUSED})
    assert case.decision.action == Stop("s1", "the engine died")
    assert Case({"trainer": OURS}, {"stopping": Stopping("another")}).decision.action is None


@pytest.mark.parametrize("more", [{}, FINISHED, STOPPED])
@pytest.mark.parametrize(
    "case", ["a_finding_asks", "our_trainer_has_ended", "training_starts", "the_run_belongs_elsewhere"]
)
def test_a_pause_prevents_everything_but_the_operators_own_request(case: str, more: dict[str, Any]) -> None:
    paused = Case({}, {**more, **PAUSED}).over(CASES[case])
    assert paused.decision.rests
    if CASES[case].facts.get("trainer") is None and not more:
        assert paused.decision.phase is Phase.PAUSED
        assert "would start training" in paused.decision.why
        assert "podwatch unpause" in paused.decision.fix
    asked = Case({}, {"requested": True}).over(paused)
    assert asked.decision.rests is Case({}, more).over(CASES[case]).decision.rests


def test_mode_observe_attaches_and_does_nothing_else() -> None:
    observing = Case(settings={"mode": "observe"})
    assert observing.decision.phase is Phase.OBSERVING
    assert observing.over(CASES["a_finding_asks"]).decision.rests
    assert isinstance(observing.over(CASES["an_operator_started_a_trainer"]).decision.action, Attach)


def test_what_cannot_be_recorded_is_not_done() -> None:
    unwritable = Case({"unwritable": "run.json cannot be written"}, {"requested": True})
    for case in CASES.values():
        decision = unwritable.over(case).decision
        if case.row in ("a_stop_is_unfinished",):
            continue
        assert decision.rests, case.row
    assert unwritable.decision.phase is Phase.BLOCKED


def test_a_trainer_that_an_operator_started_after_the_run_was_lost_is_theirs() -> None:
    lost = Case({"trainer": OURS, "store": SUPERSEDED})
    assert isinstance(lost.decision.action, Stop)
    theirs = Case({"trainer": replace(OURS, attached=True), "store": SUPERSEDED}, {"yielded": True})
    assert theirs.decision.rests


def test_a_stop_waits_for_the_save_that_was_asked_for() -> None:
    waits = Case({"trainer": OURS}, {**STOPPED, "stop_above": 40})
    assert (waits.decision.phase, waits.decision.rests) == (Phase.ENDING, True)
    assert isinstance(Case({"checkpoints": (saved(45),)}).over(waits).decision.action, Stop)
    none_comes = Case(findings=RESTART).over(waits)
    assert isinstance(none_comes.decision.action, Stop)
    last = Case({"checkpoints": (saved(45),), "last_step": 45}).over(waits)
    assert (last.decision.phase, last.decision.rests) == (Phase.ENDING, True)
    assert "ends on its own" in last.decision.why
    goes_on = Case({"checkpoints": (saved(45), saved(50)), "last_step": 45}).over(waits)
    assert isinstance(goes_on.decision.action, Stop)
    line = Case({"checkpoints": (saved(45),), "trainer": replace(OURS, finish_line=True)}).over(waits)
    assert line.decision.rests
    assert isinstance(Case({"trainer": OURS}, STOPPED).decision.action, Stop)


def test_training_that_finishes_before_it_is_stopped_is_finished() -> None:
    finished = (finding(Verdict.FINISH, FindingKind.FINISHED),)
    for trainer in (OURS, DEAD):
        for more in (STOPPED, FINISHED, {}):
            assert isinstance(Case({"trainer": trainer}, more, finished).decision.action, Finish)
    looks = Case({"trainer": replace(OURS, ended_wall=WALL - 2, ended_at=AT - 2)}, STOPPED)
    assert looks.decision.rests
    late = replace(OURS, ended_wall=WALL - 200, ended_at=AT - JUDGE_SECONDS)
    assert isinstance(Case({"trainer": late}, STOPPED).decision.action, Stop)


def test_training_stops_for_an_evaluation_only_where_it_can_start_again() -> None:
    due = CASES["an_evaluation_needs_the_gpus"]
    assert due.decision.action == Stop("s1", "to evaluate step 40", "step 40")
    unconfirmed = {"starts": (GUARD, LAST)}
    blind = unobserved(SensorState.BLIND, AT, "no answer")
    for case in (
        Case({"trainer": replace(OURS, attached=True)}),
        Case({}, unconfirmed),
        Case({"nodes": NodesOfRun()}),
        Case({"last_step": 40}),
        Case({"evaluation": PendingEvaluation("step 40")}),
        Case({"pod": replace(due.now().facts.pod, gpus=blind)}),
        Case(settings={"trainer": {"command": []}}),
    ):
        assert case.over(due).decision.rests
    assert due.over(Case(findings=RESTART)).row == "an_evaluation_needs_the_gpus"


def test_a_confirmed_finding_is_counted_and_stops_training() -> None:
    case = CASES["a_finding_asks"]
    assert case.decision.edit == Count("s1", RESTART[0])
    assert Case({"trainer": OURS}, findings=(replace(RESTART[0], confirmed=False),)).decision.rests
    without = Case(settings={"trainer": {"command": []}}).over(case)
    assert (without.decision.rests, without.decision.kind) == (True, FindingKind.UNGUARDED)


def test_unhealthy_training_stops_after_its_next_save_unless_the_operator_keeps_it() -> None:
    sick = Case({"trainer": OURS}, findings=(finding(Verdict.STOP, FindingKind.TRAINING_HEALTH),))
    assert sick.decision.edit == WantStop(sick.findings[0], 40)
    assert Case({"checkpoints": ()}).over(sick).decision.edit == WantStop(sick.findings[0], -1)
    full = Case({"trainer": OURS}, findings=(finding(Verdict.STOP, FindingKind.DISK_NO_ROOM),))
    assert full.decision.edit == WantStop(full.findings[0], None)
    assert Case({}, {"stop_cancelled_for": "s1"}).over(sick).decision.rests


@pytest.mark.parametrize(
    ("trainer", "run", "phase"),
    [
        (OURS, {}, Phase.RUNNING),
        (OURS, {"starts": (GUARD, LAST)}, Phase.CONFIRMING),
        (replace(OURS, unconfirmed=True), {"starts": (GUARD, LAST)}, Phase.RUNNING),
        (replace(OURS, attached=True), {}, Phase.ATTACHED),
        (Trainer("unknown", 8), {}, Phase.RUNNING),
    ],
)
def test_a_trainer_that_lives_is_watched(trainer: Trainer, run: dict[str, Any], phase: Phase) -> None:
    decision = Case({"trainer": trainer}, run).decision
    assert (decision.phase, decision.rests) == (phase, True)


def test_an_end_is_counted_only_if_nobody_wanted_it() -> None:
    assert Case({"trainer": DEAD}, findings=RESTART).decision.edit == Count("s1", RESTART[0])
    assert Case({"trainer": DEAD}, STOPPING, RESTART).decision.action == Stop("s1", "the engine died")
    assert isinstance(Case({"trainer": DEAD}, STOPPED, RESTART).decision.action, Stop)


def test_an_end_that_nothing_explains_is_counted_late() -> None:
    late = replace(DEAD, ended_at=AT - JUDGE_SECONDS)
    assert Case({"trainer": DEAD}).decision.rests
    assert isinstance(Case({"trainer": late}).decision.edit, Count)
    assert isinstance(Case({"trainer": late}, STOPPED).decision.action, Stop)
    waits = finding(Verdict.RESTART, confirmed=False, suggestion="podwatch restarts training in 90 s")
    assert Case({"trainer": late}, findings=(waits,)).decision.rests


def test_its_operator_has_time_to_start_an_attached_trainer_again() -> None:
    waits = finding(Verdict.RESTART, confirmed=False, suggestion="podwatch restarts training in 90 s")
    ended = Case({"trainer": replace(DEAD, attached=True)}, findings=(waits,))
    assert (ended.decision.rests, ended.decision.fix) == (True, waits.suggestion)
    loads = searched(tree(answer=TreeAnswer.WAIT, age=1.0, trains=False))
    again = Case({"search": loads}).over(ended)
    assert again.decision.edit == RecordEnd("s1", DEAD.ended_wall)
    assert isinstance(Case({"search": searched(tree(age=1.0))}).over(ended).decision.action, Attach)


def test_a_start_that_nothing_shows_did_not_happen() -> None:
    unseen = {"starts": (GUARD, replace(LAST, seen=False))}
    assert Case({}, unseen).decision.edit == DropStart("s1")
    assert Case({"acting": "start"}, unseen).decision.edit is None
    assert Case({"search": NOT_SEARCHED}, unseen).decision.rests
    assert Case({}, {"starts": (GUARD, LAST)}).decision.edit == RecordEnd("s1")


def test_a_trainer_of_the_operator_is_attached_to() -> None:
    one = CASES["an_operator_started_a_trainer"]
    assert one.decision.action == Attach(one.now().facts.search.value.trees[0])  # type: ignore[union-attr]
    assert Case(settings={"trainer": {"supervise": "start"}}).over(one).decision.kind is FindingKind.AMBIGUOUS_TRAINERS
    old = Case({"search": searched(tree(age=5000.0))})
    assert old.decision.kind is FindingKind.AMBIGUOUS_TRAINERS
    two = Case({"search": searched(tree(70), tree(71))})
    assert two.decision.kind is FindingKind.AMBIGUOUS_TRAINERS
    assert "podwatch start --attach PID" in two.decision.fix
    for asked in (two, Case({"search": searched(tree(71, TreeAnswer.ASK, trains=False))}, STOPPED)):
        named = Case({}, {"attach": tree(71).start_id}).over(asked).decision.action
        assert isinstance(named, Attach)
        assert named.tree.launcher.pid == 71
    assert isinstance(Case({}, {"ignored": (tree().start_id,)}).over(one).decision.action, Start)


def test_while_training_is_stopped_only_a_newer_trainer_is_attached_to() -> None:
    newer = Case({"search": searched(tree(age=10.0))}, {**STOPPED, "desired_wall": WALL - 50})
    assert isinstance(newer.decision.action, Attach)
    older = Case({"search": searched(tree(age=60.0))}, {**STOPPED, "desired_wall": WALL - 50})
    assert (older.decision.rests, older.decision.kind) == (True, FindingKind.UNGUARDED)
    two = Case({"search": searched(tree(70), tree(71))}, STOPPED)
    assert (two.decision.phase, two.decision.kind) == (Phase.STOPPED, FindingKind.AMBIGUOUS_TRAINERS)


def test_nothing_is_started_beside_what_may_train() -> None:
    waits = CASES["something_may_train_already"]
    assert waits.decision.rests
    assert "podwatch start --ignore 70" in waits.decision.fix
    late = Case(
        {"search": searched(tree(answer=TreeAnswer.WAIT, age=90.0))}, settings={"trainer": {"startup_patience": 60}}
    )
    assert "After 2 min podwatch still has not seen" in late.decision.why


def test_before_a_search_of_the_pod_nothing_starts() -> None:
    for search in (NOT_SEARCHED, searched(at=800.0)):
        assert Case({"search": search}).decision.rests


def test_an_evaluation_of_stopped_training_runs_and_then_training_starts() -> None:
    runs = CASES["an_evaluation_runs"]
    assert runs.decision.action == Evaluate("step 40")
    assert isinstance(Case({"evaluation": None}).over(runs).decision.action, Start)
    idle = Case({"evaluation": IDLE}, FINISHED)
    assert idle.decision.action == Evaluate("step 40")
    assert Case({"evaluation": PendingEvaluation("step 40")}, FINISHED).decision.rests
    assert Case({"store": SUPERSEDED}).over(runs).decision.rests


def test_a_clean_is_done_while_nothing_runs() -> None:
    assert isinstance(Case({}, {"clean": True}).decision.action, Clean)
    assert isinstance(Case({}, {**STOPPED, "clean": True}).decision.action, Clean)
    assert Case({"trainer": OURS}, {"clean": True}).decision.rests
    assert Case({"search": searched(tree(answer=TreeAnswer.WAIT))}, {"clean": True}).decision.rests
    assert Case({"search": searched(lock_holder="pid 9")}, {"clean": True}).decision.rests


def test_while_another_pod_may_train_this_one_waits() -> None:
    watching = CASES["the_run_is_held_elsewhere"]
    assert "--take-over" in watching.decision.fix
    takes_over = Case({"store": leased(LeaseAction.WATCH, "pod b", trains_in=60.0)})
    assert takes_over.decision.due_wall == WALL + 60
    asks = Case({"store": leased(LeaseAction.ASK, "the store has not answered", error="refused")})
    assert "podwatch start" in asks.decision.fix
    assert isinstance(Case({}, {"despite_store": True}).over(asks).decision.action, Start)
    assert watching.over(Case({}, {"despite_store": True})).decision.rests


def test_a_wait_for_the_next_try_ends_and_does_not_hide_a_question() -> None:
    backoff = CASES["the_next_try_is_not_due"]
    assert (backoff.decision.phase, backoff.decision.due_wall) == (Phase.BACKOFF, WALL + 30)
    assert isinstance(Case({}, {"next_try_wall": WALL - 1}).decision.action, Start)
    assert isinstance(Case({}, {"next_try_wall": WALL + 1e9}).decision.action, Start), "the clock was set back"
    gave_up = {"history": RestartHistory(gave_up_at=5.0)}
    assert Case({}, gave_up).decision.phase is Phase.GAVE_UP
    assert isinstance(Case({}, {**gave_up, "next_try_wall": WALL - 1}).decision.action, Start)
    leaves = Case({}, {**gave_up, "next_try_wall": WALL - 1}, settings={"recovery": {"on_give_up": "exit"}})
    assert leaves.decision.phase is Phase.GAVE_UP
    wrong = {"refused": {40: "it reported step 3"}, "next_try_wall": WALL + 30}
    assert "podwatch start --step 40" in Case({}, wrong).decision.fix


def test_a_start_needs_a_command_and_a_policy_that_allows_it() -> None:
    attach = CASES["podwatch_starts_none"]
    assert attach.decision.phase is Phase.IDLE
    counted = {"starts": (GUARD, replace(OVER, counted=True))}
    assert isinstance(Case({}, counted).over(attach).decision.action, Start)
    assert isinstance(Case({}, {"requested": True}).over(attach).decision.action, Start)
    assert Case(settings={"trainer": {"command": []}}).decision.kind is FindingKind.BLOCKED


def test_a_start_waits_for_the_gpus_and_names_what_holds_them() -> None:
    named = CASES["the_gpus_are_held"]
    assert (named.decision.phase, named.decision.kind) == (Phase.BLOCKED, FindingKind.BLOCKED)
    soon = Case({"free_since": AT - 60.0 + 1, "search": searched(at=AT), "held": held("gpu0", at=AT)})
    assert (soon.decision.phase, soon.decision.kind) == (Phase.STARTING, None)
    anybodys = Case(settings={"gpu": {"inference": []}})
    assert isinstance(anybodys.over(named).decision.action, Start)
    assert anybodys.over(Case({"held": held("port 8000 is in use")})).decision.rests
    assert isinstance(Case({"held": NOT_MEASURED}).decision.action, Start), "unobserved for longer than the wait"
    assert Case({"held": NOT_MEASURED, "free_since": AT - 5, "search": searched(at=AT)}).decision.rests


def test_a_wrong_resume_is_never_a_step_back() -> None:
    wrong = Case({"checkpoints": (saved(30), saved(40))}, {"refused": {40: "it reported step 3"}})
    assert (wrong.decision.rests, wrong.decision.kind) == (True, FindingKind.RESUMED_WRONG)
    assert isinstance(Case({}, {"wanted": 40}).over(wrong).decision.action, Start)
    assert isinstance(Case({}, {"refused": {}}).over(wrong).decision.action, Start)


@pytest.mark.parametrize(
    ("facts", "run", "asks"),
    [
        ({"inventory": None}, {}, False),
        ({"checkpoints": (saved(40), settling(45))}, {}, False),
        ({"checkpoints": (), "inventory": Inventory((), "timed out")}, {"last_start": None}, True),
        ({"checkpoints": (), "inventory": Inventory((), "timed out")}, {"wanted": 45}, True),
        ({"checkpoints": (saved(40, ours=False),)}, {}, True),
        ({"misfits": {40: "8 processes saved it"}}, {}, True),
        ({"checkpoints": (), "behind_links": frozenset({80})}, {}, True),
        ({"checkpoints": (), "doubt": "run.json cannot be read"}, {}, True),
        ({"checkpoints": (saved(40), saved(50, ours=False)), "doubt": "no run.json"}, {}, True),
        ({"unreadable": "Permission denied"}, {}, True),
        ({"question": ("no inspection gave an answer", "`podwatch start --step N`")}, {}, True),
        ({"checkpoints": (saved(40), saved(45, completeness=Completeness.WRITING, unanswered=3))}, {}, True),
        ({"checkpoints": (saved(40), saved(45, completeness=Completeness.WRITING, unanswered=1))}, {}, False),
    ],
)
def test_no_step_is_guessed(facts: dict[str, Any], run: dict[str, Any], asks: bool) -> None:
    case = Case(facts, run)
    assert case.row == "no_step_is_known_to_start_from"
    assert bool(case.decision.fix) is asks
    fresh = Case({}, {"fresh": True}).over(case).decision.action
    assert isinstance(fresh, Start)
    assert fresh.choice.source == "fresh"


def test_a_step_back_that_finds_nothing_uses_what_failed() -> None:
    case = Case({}, {"below": 40})
    assert isinstance(case.decision.action, Start)
    assert case.decision.action.choice.step == 40


def test_the_newest_is_fetched_where_only_the_store_has_it() -> None:
    fetch = CASES["the_newest_is_in_the_store_only"].decision.action
    assert isinstance(fetch, Fetch)
    assert (fetch.choice.step, fetch.choice.save_id) == (45, "r45")
    follows = Case({"nodes": NodesOfRun(follows=True, step=45)}).decision.action
    assert isinstance(follows, Start)
    assert follows.choice.step == 45


# -- an answer for everything -----------------------------------------------------------------------------------------

TREES = st.builds(
    tree,
    st.integers(70, 72),
    st.sampled_from(TreeAnswer),
    st.sampled_from([1.0, 60.0, 5000.0]),
    trains=st.booleans(),
)
SEARCHES = st.one_of(
    st.just(NOT_SEARCHED),
    st.builds(
        lambda trees, at, holder: searched(*trees, at=at, lock_holder=holder),
        st.lists(TREES, max_size=2, unique_by=lambda t: t.start_id),
        st.sampled_from([800.0, 950.0]),
        st.sampled_from(["", "", "", "pid 9 holds the run lock"]),
    ),
)
TRAINERS = st.one_of(
    st.none(),
    st.builds(
        Trainer,
        st.sampled_from(["s1", "unknown"]),
        st.just(41),
        lives=st.booleans(),
        attached=st.booleans(),
        ended_wall=st.sampled_from([None, WALL - 2]),
        ended_at=st.sampled_from([None, AT - 2, AT - 500]),
        finish_line=st.booleans(),
    ),
)
FINDINGS = st.lists(
    st.builds(
        finding,
        st.sampled_from(Verdict),
        st.sampled_from([FindingKind.TRAINER_EXITED, FindingKind.HANG, FindingKind.DISK_NO_ROOM]),
        confirmed=st.booleans(),
        suggestion=st.sampled_from(["", "podwatch restarts training in 90 s"]),
    ),
    max_size=2,
)
STORES = st.one_of(
    st.none(),
    st.builds(
        leased,
        st.sampled_from(LeaseAction),
        st.sampled_from(["", "pod b may train"]),
        stop=st.booleans(),
        trains_in=st.sampled_from([None, 60.0]),
    ),
)
CHECKPOINTS = st.lists(
    st.one_of(
        st.builds(saved, st.sampled_from([20, 40, 45]), ours=st.booleans()),
        st.builds(settling, st.sampled_from([30, 50])),
        st.builds(
            saved,
            st.sampled_from([60]),
            completeness=st.just(Completeness.WRITING),
            unanswered=st.sampled_from([0, 1, 3]),
        ),
    ),
    max_size=3,
    unique_by=lambda s: s.step,
).map(tuple)
STARTS = st.builds(
    lambda by, seen, ended, counted, confirmed: (
        GUARD,
        replace(LAST, by=by, seen=seen, ended=ended, counted=counted, confirmed=confirmed),
    ),
    st.sampled_from(StartedBy),
    st.booleans(),
    st.sampled_from([None, WALL - 100]),
    st.booleans(),
    st.booleans(),
)
RUNS = st.fixed_dictionaries(
    {
        "starts": st.one_of(STARTS, st.just((GUARD,)), st.just(())),
        "desired": st.sampled_from(Desired),
        "desired_wall": st.sampled_from([0.0, WALL - 50]),
        "stop_above": st.sampled_from([None, -1, 40]),
        "stopping": st.sampled_from([None, Stopping("s1", "because")]),
        "requested": st.booleans(),
        "despite_store": st.booleans(),
        "clean": st.booleans(),
        "attach": st.sampled_from(["", "", tree(71).start_id]),
        "evaluation": st.sampled_from(["", "step 40"]),
        "pause": st.sampled_from([None, Pause(WALL - 5)]),
        "yielded": st.booleans(),
        "wanted": st.sampled_from([None, None, 40, 99]),
        "fresh": st.booleans(),
        "below": st.sampled_from([None, None, 40]),
        "next_try_wall": st.sampled_from([None, None, WALL - 5, WALL + 30]),
        "history": st.sampled_from([RestartHistory(), RestartHistory(gave_up_at=5.0)]),
        "refused": st.sampled_from([{}, {}, {40: "it reported step 3"}]),
        "last_start": st.sampled_from([None, Case().now().run.last_start]),
    }
)
EVALUATIONS = st.one_of(st.none(), st.builds(PendingEvaluation, st.just("step 40"), st.booleans(), st.booleans()))
EVERYTHING = st.builds(
    Case,
    st.fixed_dictionaries(
        {
            "trainer": TRAINERS,
            "search": SEARCHES,
            "held": st.sampled_from([held(), held("gpu0"), held("port 80 is in use"), held(at=800.0), NOT_MEASURED]),
            "free_since": st.sampled_from([900.0, AT - 5]),
            "store": STORES,
            "checkpoints": CHECKPOINTS,
            "inventory": st.sampled_from([None, Inventory(), Inventory((IN_STORE,)), Inventory((), "timed out")]),
            "evaluation": st.one_of(
                st.none(), st.builds(PendingEvaluation, st.just("step 40"), st.booleans(), st.booleans())
            ),
            "nodes": st.sampled_from([None, None, NodesOfRun(), NodesOfRun(follows=True)]),
            "unwritable": st.sampled_from(["", "", "run.json cannot be written"]),
            "acting": st.sampled_from(["", "start"]),
            "misfits": st.sampled_from([{}, {40: "8 processes saved it"}]),
            "behind_links": st.sampled_from([frozenset[int](), frozenset({80})]),
            "doubt": st.sampled_from(["", "run.json cannot be read"]),
            "unreadable": st.sampled_from(["", "", "Permission denied"]),
            "last_step": st.sampled_from([None, 45]),
        }
    ),
    RUNS,
    FINDINGS.map(tuple),
    st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["act", "act", "observe"]),
            "trainer": st.sampled_from([{}, {"supervise": "attach"}, {"supervise": "start"}, {"command": []}]),
        }
    ),
)
NEEDS_AN_OPERATOR = frozenset({Phase.BLOCKED, Phase.GAVE_UP, Phase.PAUSED})


@given(EVERYTHING)
@hypothesis_settings(max_examples=200)
def test_there_is_always_one_decision(case: Case) -> None:
    decision, facts = case.decision, case.now().facts
    assert decision.why
    assert decision.action is None or decision.edit is None
    if isinstance(decision.action, Start | Fetch | Evaluate | Clean | Attach):
        assert facts.trainer is None or not facts.trainer.lives, "never two trainers"
    if isinstance(decision.action, Start | Fetch | Clean):
        now = case.now()
        assert now.search is not None
        assert not now.search.lock_holder
        assert all(
            t.start_id in facts.run.ignored or not t.trains for t in now.search.trees if t.answer is not TreeAnswer.OWN
        ) or (facts.run.desired is not Desired.RUNNING), "never beside what may train"
    if isinstance(decision.action, Start | Fetch):
        assert facts.run.desired is Desired.RUNNING
    if decision.rests and decision.phase in NEEDS_AN_OPERATOR and decision.kind is not None:
        assert (
            "podwatch" in decision.fix
            or "node" in decision.why
            or re.search("set |give |end |stop |make |move ", decision.fix)
        )


@given(EVERYTHING)
@hypothesis_settings(max_examples=200)
def test_a_podwatch_that_only_watches_acts_on_nothing(case: Case) -> None:
    decision, now = case.decision, case.now()
    run, action = now.run, decision.action
    finishes = isinstance(action, Stop) and run.stopping is not None and run.stopping.start_id == action.start_id
    held_back = run.pause is not None or now.settings.mode == "observe"
    asked = run.requested
    if not finishes and ((held_back and not asked) or now.facts.unwritable):
        assert action is None or isinstance(action, Attach)
        assert decision.edit is None


# -- never back -------------------------------------------------------------------------------------------------------


def effect(now: Now, decision: Decision) -> Facts:
    """The pod and run.json after what was decided. Nothing else happens meanwhile."""
    facts, run = now.facts, now.run
    gone = replace(facts, trainer=None, free_since=AT, search=searched(at=AT), held=held(at=AT))
    match decision.action or decision.edit:
        case Stop(_, _, evaluation):
            return replace(gone, run=recorded(run, facts, stopping=None, evaluation=evaluation))
        case Finish():
            run = recorded(run, facts, desired=Desired.FINISHED, stopping=None, requested=False)
            return replace(gone, run=run)
        case Start(choice):
            began = TrainerStart("s2", choice.step, WALL, branch="b")
            run = replace(run, starts=(*run.starts, began), wanted=None, fresh=False, requested=False, evaluation="")
            run = replace(run, next_try_wall=None, history=RestartHistory())
            return replace(facts, trainer=Trainer("s2", 99), run=run, evaluation=None)
        case Attach(found):
            began = TrainerStart(found.start_id, None, WALL, StartedBy.OPERATOR, proved=False, branch="b")
            run = recorded(run, facts, desired=Desired.RUNNING, requested=False, stopping=None, clean=False, attach="")
            run = replace(run, starts=(*run.starts, began), history=RestartHistory(), next_try_wall=None)
            trainer = Trainer(found.start_id, found.launcher.pid, attached=True)
            return replace(facts, trainer=trainer, run=run, search=searched(at=AT))
        case Fetch(choice):
            here = (*(s for s in facts.checkpoints if s.step != choice.step), saved(choice.step or 0))
            return replace(facts, checkpoints=here)
        case Evaluate():
            return replace(facts, evaluation=None, run=replace(run, evaluation=""))
        case Clean():
            return replace(facts, checkpoints=(), run=replace(run, clean=False, fresh=True))
        case RecordEnd() | DropStart():
            return replace(gone, run=recorded(run, facts, stopping=None))
        case Count(start_id, _):
            run = replace(run.with_start(start_id, counted=True), next_try_wall=WALL + 10)
            return replace(facts, run=replace(run, stopping=Stopping(start_id, "failed")))
        case WantStop(_, above):
            return replace(facts, run=replace(run, desired=Desired.STOPPED, stop_above=above))
    raise AssertionError(decision)


def recorded(run: RunState, facts: Facts, **changes: Any) -> RunState:
    ends = tuple(replace(s, ended=WALL) if s.trains and s.ended is None else s for s in run.starts)
    return replace(run, starts=ends, **changes)


def of_this_trainer(findings: tuple[Finding, ...], before: Facts, after: Facts) -> tuple[Finding, ...]:
    """Detection judges the trainer that is watched, and none while podwatch stops it."""
    same = (
        before.trainer is not None and after.trainer is not None and before.trainer.start_id == after.trainer.start_id
    )
    return findings if same and after.run.stopping is None else ()


@given(EVERYTHING)
@hypothesis_settings(max_examples=200, deadline=None)
def test_what_is_done_leads_on_and_never_back(case: Case) -> None:
    now = case.now()
    seen: list[tuple[str, str]] = []
    for _ in range(12):
        decision = decide(now.facts, now.findings, now.settings)
        if decision.rests:
            return
        step = (type(decision.action or decision.edit).__name__, str(decision.action or decision.edit))
        assert step not in seen, [*seen, step]
        seen.append(step)
        after = effect(now, decision)
        now = Now(after, of_this_trainer(tuple(now.findings), now.facts, after), now.settings)
    raise AssertionError(seen)
