"""Which saves may leave the store."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.config.settings import SyncSettings
from podwatch.policy.store_retention import plan_remote
from tests.support.examples import examples

HOUR = 3600.0


@dataclass(frozen=True)
class Saved:
    step: int
    save_id: str
    lineage: str
    generation: int
    seq: int
    wall: float


def saves(count: int, *, every: float = HOUR) -> list[Saved]:
    return [Saved(n * 5, f"s{n}", "line", 1, n, n * every) for n in range(1, count + 1)]


def removed(given: list[Saved], now: float, sync: SyncSettings | None = None, **kw: object) -> set[int]:
    plan = plan_remote(given, (), {}, sync or SyncSettings(), now, **kw)  # type: ignore[arg-type]
    return {r.step for r in plan}


def test_last_three_and_milestones_stay() -> None:
    gone = removed(saves(25), 1000 * HOUR)
    assert gone == {n * 5 for n in range(1, 23)} - {50, 100}


def test_nothing_goes_before_six_hours_after_its_successor() -> None:
    given = saves(10)
    # now is the time of the 10th save: the one superseded exactly 6 h ago is number 3 (successor: 4 h)
    assert removed(given, 10 * HOUR) == {5, 10, 15}


def test_a_clock_set_back_only_delays() -> None:
    assert removed(saves(10), -5 * HOUR) == set()


def test_pins_and_pointer_targets_stay() -> None:
    plan = plan_remote(saves(10), {"s2"}, {15: "good eval"}, SyncSettings(), 1000 * HOUR)
    assert {10, 15}.isdisjoint({r.step for r in plan})


def test_a_step_back_orders_by_seq_not_by_step() -> None:
    given = saves(6)
    given.append(Saved(10, "again", "line2", 1, 7, 7 * HOUR))
    plan = plan_remote(given, (), {}, SyncSettings(keep_last=1, keep_every=0), 1000 * HOUR)
    assert (10, "again") not in {(r.step, r.save_id) for r in plan}
    assert (30, "s6") in {(r.step, r.save_id) for r in plan}


def test_another_generation_waits_a_day() -> None:
    given = saves(10)
    assert removed(given, 12 * HOUR, own_generation=2) == set()
    assert removed(given, 40 * HOUR, own_generation=2)


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(1, 60), st.integers(0, 12), st.integers(1, 5), st.sets(st.integers(1, 60)))
def test_milestones_are_the_same_ones_whenever_it_runs(
    count: int, keep_every: int, keep_last: int, moves: set[int]
) -> None:
    """Pruning after every save, after some, or once at the end leaves the same saves; gaps in seq do not matter."""
    sync = SyncSettings(keep_last=keep_last, keep_every=keep_every)
    every = [s for s in saves(count) if s.seq not in moves]
    if not every:
        return
    alive: list[Saved] = []
    for save in every:
        alive.append(save)
        gone = removed(alive, 1e9, sync)
        alive = [s for s in alive if s.step not in gone]
    at_once = removed(every, 1e9, sync)
    assert alive == [s for s in every if s.step not in at_once]
    assert every[-1] in alive
