"""Random schedules of what looks like the death of an engine and is none, at random moments of random runs; and of real
deaths, which are found before ``hold`` is over."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drivers.detection import (
    PROVEN_SECONDS,
    SEEN_TO_END,
    ExitStatus,
    Health,
    Policies,
    ProcessEnd,
    ProcessRole,
    Supervision,
    acts,
    advance,
    confirming,
    initial,
    judging,
)
from tests.support.pods.deaths import OWN, ROUTER, TP, engine_dies, server_exits
from tests.support.pods.healthy import ROLES, Run
from tests.support.pods.shapes import Shape
from tests.support.pods.world import Piece

pytestmark = pytest.mark.slow

HOLD = 600.0
BEFORE = 700.0
"""Seconds of healthy life before; a run is loaded and armed by then."""
QUICK = {
    "person": 0.0, "reload": 0.0, "evaluation": 0.0, "slow_step": 0.0, "tool_bound": 0.0, "long_update": 0.0,
    "step_seconds": 60.0, "load": (20.0, 60.0), "compile": (5.0, 20.0), "save": (20.0, 40.0), "long_save": 0.0,
}  # fmt: skip
kept = st.sampled_from([replace(shape, **QUICK) for shape in (OWN, ROUTER, TP)])  # type: ignore[arg-type]
attached = kept.map(lambda shape: replace(shape, supervision=Supervision.ATTACH))
moments = st.floats(0.0, 200.0)
seeds = st.integers(0, 9999)


def first_act(
    shape: Shape, seed: int, moment: float, piece: Callable[[Run], Piece], policies: Policies, *, pidfds: bool,
    after: float,
) -> tuple[float, str] | None:  # fmt: skip
    """Seconds from the beginning of ``piece`` to the first act, and its evidence; None: nothing was done until
    ``after`` seconds after its end. Fails if something is done before."""
    run = Run(shape, seed)
    world = run.world
    world.pidfds = pidfds
    ended: list[float] = []

    def begin() -> Piece:
        yield moment
        while run.phase in ("down", "load"):
            yield 1.0
        yield 5.0
        world.drop("life")
        world.saving = False
        world.struck_at = world.now
        yield from piece(run)
        ended.append(world.now)

    world.add(begin(), "piece", BEFORE)
    state = initial(policies)
    for snapshot in world.snapshots(24.0):
        state, findings = advance(state, snapshot, policies)
        world.confirming = confirming(state, snapshot, policies)
        acting = [f for f in findings if acts(f)]
        if acting:
            assert world.struck_at is not None, acting
            return snapshot.at - world.struck_at, " ".join(e.signal for e in acting[0].evidence)
        if ended and snapshot.at > ended[0] + after:
            return None
    raise AssertionError("the day is over")


@settings(max_examples=30)
@given(
    shape=kept,
    seed=seeds,
    moment=moments,
    pidfds=st.booleans(),
    how=st.sampled_from(["launcher_signalled", "group_signalled", "launcher_killed"]),
)
def test_a_run_of_ours_that_is_signalled(shape: Shape, seed: int, moment: float, pidfds: bool, how: str) -> None:
    piece: Callable[[Run], Piece] = lambda run: getattr(run, how)()  # noqa: E731
    assert first_act(shape, seed, moment, piece, shape.policies(), pidfds=pidfds, after=60.0) is None


@settings(max_examples=20)
@given(shape=attached, seed=seeds, moment=moments, pidfds=st.booleans())
def test_ctrl_c_in_the_terminal_of_an_attached_run(shape: Shape, seed: int, moment: float, pidfds: bool) -> None:
    assert first_act(shape, seed, moment, Run.ctrl_c, shape.policies(), pidfds=pidfds, after=60.0) is None


@settings(max_examples=20)
@given(shape=kept, seed=seeds, moment=moments, pidfds=st.booleans())
def test_an_engine_or_a_server_that_is_replaced(shape: Shape, seed: int, moment: float, pidfds: bool) -> None:
    assert first_act(shape, seed, moment, Run.reload, shape.policies(), pidfds=pidfds, after=60.0) is None


@settings(max_examples=30)
@given(
    shape=kept,
    seed=seeds,
    moment=moments,
    pidfds=st.booleans(),
    offsets=st.fixed_dictionaries({role: st.floats(0.0, 60.0) for role in ROLES}),
    health=st.sampled_from([Health.REFUSED, Health.UNHEALTHY, Health.TIMEOUT]),
    known=st.sampled_from([ExitStatus(0), ExitStatus(signal=2), ExitStatus(signal=15), ExitStatus(130)]),
)
def test_roles_that_end_in_any_order_without_a_word_where_the_kernel_tells_how(
    shape: Shape, seed: int, moment: float, pidfds: bool, offsets: dict[ProcessRole, float], health: Health,
    known: ExitStatus,
) -> None:  # fmt: skip
    """Nothing is logged. ``hold`` is long, so only the verdict that needs no window could act; the engine's own exit
    status (0 or a signal) tells that it was asked to end."""

    def piece(run: Run) -> Piece:
        w = run.world
        run.phase = "down"
        began = w.now
        for role, offset in sorted(offsets.items(), key=lambda item: item[1]):
            if (rest := offset - (w.now - began)) > 0.0:
                yield rest
            if role is ProcessRole.ENGINE:
                gone = next(p for p in w.processes if p.role is role)
                w.told = (*w.told, ProcessEnd(gone.identity, role, known, w.now))
            run.role_ends(role)
            for server in run.servers:
                server.health = Health.REFUSED if role is ProcessRole.INFERENCE else health

    policies = judging(shape.policies(), gpu__hold=HOLD)
    assert first_act(shape, seed, moment, piece, policies, pidfds=pidfds, after=5.0) is None


@settings(max_examples=30)
@given(shape=kept, seed=seeds, moment=moments, dies=st.sampled_from([engine_dies, server_exits]))
def test_a_real_death_does_not_wait_for_the_window(
    shape: Shape, seed: int, moment: float, dies: Callable[[Run], Piece]
) -> None:
    policies = judging(shape.policies(), gpu__hold=HOLD)
    found = first_act(shape, seed, moment, dies, policies, pidfds=True, after=HOLD)
    assert found is not None
    took, evidence = found
    assert SEEN_TO_END in evidence
    assert PROVEN_SECONDS <= took <= 5.0


@pytest.mark.parametrize("seed", range(3))
def test_without_descriptors_of_processes_it_is_found_at_the_next_looks(seed: int) -> None:
    policies = judging(OWN.policies(), gpu__hold=HOLD)
    shape: Shape = replace(OWN, **QUICK)  # type: ignore[arg-type]
    found = first_act(shape, seed, 10.0, engine_dies, policies, pidfds=False, after=HOLD)
    assert found is not None
    assert SEEN_TO_END in found[1]
    assert found[0] <= 10.0
