"""Ctrl-C is one end, however slowly and in whatever order the roles of the run end; a real death is still found."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drivers.detection import (
    ATTACH_EXIT_WAIT_SECONDS,
    ATTACHED_ID,
    INTERRUPTED,
    TERMINAL_WAIT_SECONDS,
    ExitStatus,
    LogMatch,
    Policies,
    ProcessIdentity,
    ProcessRole,
    ProcessSample,
    Snapshot,
    Supervision,
    TrainerSample,
    acts,
    advance,
    ended_roles,
    initial,
    observed,
    operator_wait,
)
from tests.support.examples import examples
from tests.support.pods.deaths import ATTACHED, OWN, ROUTER, SHARED, TP, Fault, seconds, shape_for, strike
from tests.support.pods.healthy import Run
from tests.support.pods.interrupts import ENDING, interrupt
from tests.support.pods.shapes import Shape
from tests.support.pods.tree import ENGINE, LAUNCHER, ORCHESTRATOR, SERVER, TRAINER, process

LATE = 20.0
"""Seconds after the patience within which podwatch has acted: sensors look every 2 to 5 s, a child is missed for 13."""

offsets = st.fixed_dictionaries({role: st.floats(0.0, 60.0) for role in (*ENDING, ProcessRole.LAUNCHER)})
shapes = st.sampled_from([ATTACHED, *(replace(s, supervision=Supervision.ATTACH) for s in (OWN, ROUTER, TP, SHARED))])


def acted_after(shape: Shape, seed: int, ends: dict[ProcessRole, float], status: ExitStatus, logged: bool) -> float:
    """Seconds from the last end to the first act; fails if something is done before the interrupt."""
    fault = Fault("interrupt", "", interrupt(ends, status, logged=logged), seconds(0.0), shape=shape, after=1300.0)
    shape = shape_for(fault)
    policies = shape.policies()
    run = strike(Run(shape, seed), fault)
    state = initial(policies)
    for snapshot in run.world.snapshots(24.0):
        state, findings = advance(state, snapshot, policies)
        struck = run.world.struck_at
        if acting := [f for f in findings if acts(f)]:
            assert struck is not None, acting
            return snapshot.at - struck - max(ends.values())
        assert struck is None or snapshot.at < struck + 3600.0, "nothing was ever done"
    raise AssertionError("the day is over")


@settings(max_examples=examples(30))
@given(shape=shapes, seed=st.integers(0, 999), ends=offsets)
def test_an_attached_run_that_is_interrupted_is_left_to_its_operator(
    shape: Shape, seed: int, ends: dict[ProcessRole, float]
) -> None:
    took = acted_after(shape, seed, ends, ExitStatus(), logged=False)
    assert ATTACH_EXIT_WAIT_SECONDS - 2.0 <= took <= ATTACH_EXIT_WAIT_SECONDS + LATE


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 999), ends=offsets, code=st.sampled_from([1, 130, 143]))
def test_a_run_of_ours_whose_log_reports_the_interrupt(seed: int, ends: dict[ProcessRole, float], code: int) -> None:
    """``kill -INT`` of a launcher that ends its children and reports an exit code of its own."""
    took = acted_after(OWN, seed, ends, ExitStatus(code), logged=True)
    assert ATTACH_EXIT_WAIT_SECONDS - 2.0 <= took <= ATTACH_EXIT_WAIT_SECONDS + LATE


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 999), ends=offsets, number=st.sampled_from([1, 2, 3, 15]))
def test_a_run_of_ours_whose_launcher_ends_first(seed: int, ends: dict[ProcessRole, float], number: int) -> None:
    took = acted_after(OWN, seed, ends | {ProcessRole.LAUNCHER: 0.0}, ExitStatus(signal=number), logged=False)
    assert ATTACH_EXIT_WAIT_SECONDS - 2.0 <= took <= ATTACH_EXIT_WAIT_SECONDS + LATE


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 999), ends=offsets, other=st.sampled_from([ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER]))
def test_a_run_of_ours_in_which_another_role_ends_beside_the_engine(
    seed: int, ends: dict[ProcessRole, float], other: ProcessRole
) -> None:
    """Nothing is logged: the orchestrator that is gone too is what tells it from a silent death."""
    took = acted_after(OWN, seed, ends | {other: 0.0}, ExitStatus(signal=2), logged=False)
    assert ATTACH_EXIT_WAIT_SECONDS - 2.0 <= took <= ATTACH_EXIT_WAIT_SECONDS + LATE


@pytest.mark.parametrize("number", [4, 6, 7, 8, 9, 11])
def test_a_crash_of_ours_is_acted_upon_at_once(number: int) -> None:
    assert acted_after(OWN, number, {ProcessRole.LAUNCHER: 0.0}, ExitStatus(signal=number), logged=False) < 5.0


# -- the rule


def look(at: float, *, wall: float = 0.0, logs: tuple[LogMatch, ...] = ()) -> Snapshot:
    return Snapshot(at, wall or at, logs=observed(logs, at))


def sample(*, by_hand: bool = False, used: float | None = None) -> TrainerSample:
    start, how = (f"{ATTACHED_ID}10-1", Supervision.ATTACH) if by_hand else ("s1", Supervision.SUPERVISED)
    return TrainerSample(start, how, True, 0.0, ProcessIdentity(10, 1), terminal_used_wall=used)


def test_a_role_is_gone_when_its_last_process_is_and_back_when_one_is() -> None:
    tree = (LAUNCHER, SERVER, ENGINE, ORCHESTRATOR, TRAINER)
    fork = process(99, ProcessRole.ORCHESTRATOR)

    def after(*trees: tuple[ProcessSample, ...]) -> dict[str, float]:
        state = initial(Policies())
        for number, one in enumerate((tree, tree, *trees)):
            trainer = replace(sample(), descendants=one)
            at = 10.0 + 2.0 * number
            state, _ = advance(state, Snapshot(at, at, trainer=observed(trainer, at)), Policies())
        return ended_roles(state)

    assert after() == {}
    assert after((*tree, fork), tree) == {}, "a fork that ends is no end of a role"
    left = tree[:-1]
    assert after(left) == {"trainer": 14.0, "the trainer's CUDA contexts": 14.0}
    assert after(left, tree) == {}, "replaced"
    assert after(left, left) == after(left), "first missed, not last"


@pytest.mark.parametrize(
    ("used", "wait"),
    [
        (None, ATTACH_EXIT_WAIT_SECONDS),
        (50.0, ATTACH_EXIT_WAIT_SECONDS),
        (400.0, TERMINAL_WAIT_SECONDS),
        (1003.0, TERMINAL_WAIT_SECONDS),
    ],
)
def test_the_operator_of_an_attached_trainer_has_time(used: float | None, wait: float) -> None:
    trainer = sample(by_hand=True, used=used)
    for at in (1000.0, 1000.0 + wait - 0.5):
        found = operator_wait({}, look(at), trainer, 1000.0)
        assert found is not None
        assert found.seconds == pytest.approx(1000.0 + wait - at)
    assert operator_wait({}, look(1000.0 + wait), trainer, 1000.0) is None
    later = {"trainer": 1030.0}
    assert operator_wait(later, look(1000.0 + wait), trainer, 1000.0) is not None, "the last end counts"
    assert operator_wait(later, look(1030.0 + wait), trainer, 1000.0) is None


def test_an_engine_of_ours_that_goes_alone_waits_for_nobody() -> None:
    gone = {"engine": 1000.0, "inference": 1004.0}
    assert operator_wait(gone, look(1008.0), sample(), 1000.0) is None
    with_another = {"engine": 1000.0, "orchestrator": 1003.0}
    assert operator_wait(with_another, look(1008.0), sample(), 1000.0) is not None, "the whole run may be ending"
    long_ago = {"engine": 1000.0, "orchestrator": 930.0}
    assert operator_wait(long_ago, look(1008.0), sample(), 1000.0) is None


@pytest.mark.parametrize(("role", "last", "waits"), [("", 995.0, True), ("trainer", 1007.0, True),
                                                     ("inference", 1000.0, False), ("", 600.0, False)])  # fmt: skip
def test_an_interrupt_in_the_log(role: str, last: float, waits: bool) -> None:
    """vLLM passes SIGTERM around while it dies, and an old line says nothing about this end."""
    logs = (LogMatch(INTERRUPTED, role, 1, last, last, "KeyboardInterrupt"),)
    assert (operator_wait({}, look(1008.0, logs=logs), sample(), 1000.0) is not None) is waits
