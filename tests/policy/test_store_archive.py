"""What an archive may remove: over random runs."""

from hypothesis import given
from hypothesis import strategies as st

from podwatch.policy.store_retention import (
    ALIVE_SECONDS,
    SUPERSEDED_SECONDS,
    Keep,
    StoredSave,
    plan_archive,
    sign_of_life,
    stale_artefacts,
)

NOW = 1_800_000_000.0
DAY = 86400.0


@st.composite
def runs(draw: st.DrawFn) -> list[StoredSave]:
    steps = draw(st.lists(st.integers(0, 200), min_size=1, max_size=12))
    named = draw(st.integers(0, len(steps) - 1))
    return [
        StoredSave(
            step, f"s{n}", draw(st.sampled_from(["a", "b"])), uploaded_wall=NOW - draw(st.floats(-DAY, 9 * DAY)),
            total_bytes=10, named=n == named,
            problem=draw(st.sampled_from(["", "", "", "garbled"])) if n != named else "",
        )
        for n, step in enumerate(steps)
    ]  # fmt: skip


@given(saves=runs(), keep=st.sampled_from(Keep), every=st.integers(0, 5), pins=st.sets(st.integers(0, 200), max_size=3))
def test_nothing_goes_that_must_stay(saves: list[StoredSave], keep: Keep, every: int, pins: set[int]) -> None:
    pointer_wall = max(s.uploaded_wall for s in saves)
    decisions = plan_archive(saves, keep, keep_every=every, pins=pins, pointer_wall=pointer_wall, now_wall=NOW)
    assert sorted(d.save.save_id for d in decisions) == sorted(s.save_id for s in saves)
    for decision in decisions:
        if decision.stays:
            continue
        save = decision.save
        assert not save.named
        assert save.step not in pins
        assert not save.problem
        newer = [s for s in saves if s.uploaded_wall >= save.uploaded_wall and s is not save]
        superseded = min((s.uploaded_wall for s in newer), default=pointer_wall)
        assert NOW - superseded >= SUPERSEDED_SECONDS
    if keep is Keep.LATEST and not pins and max(s.uploaded_wall for s in saves) < NOW - SUPERSEDED_SECONDS:
        assert all(d.save.named or d.save.problem for d in decisions if d.stays)


def run_of(steps: range, named: int) -> list[StoredSave]:
    return [aged(s, f"s{s}", "a", named=s == named) for s in steps]


def aged(step: int, save_id: str, lineage: str, *, named: bool = False) -> StoredSave:
    return StoredSave(step, save_id, lineage, uploaded_wall=NOW - 9 * DAY + step, total_bytes=10, named=named)


def left(saves: list[StoredSave], keep: Keep, every: int) -> list[int]:
    plan = plan_archive(saves, keep, keep_every=every, pins=(), pointer_wall=NOW - 5 * DAY, now_wall=NOW)
    return [d.save.step for d in plan if d.stays]


def test_milestones_are_one_in_so_many_saves() -> None:
    saves = run_of(range(5, 205, 5), 200)
    assert left(saves, Keep.LATEST, 10) == [200]
    assert left(saves, Keep.MILESTONES, 10) == [50, 100, 150, 200]
    thinned = [s for s in saves if s.step in (50, 100, 150, 190, 195, 200)]
    assert left(thinned, Keep.MILESTONES, 10) == [50, 100, 150, 200], "the same where the daemon was there before"
    assert left(saves, Keep.MILESTONES, 0) == [200]


def test_milestones_of_the_line_the_pointer_is_on() -> None:
    abandoned = [aged(s, f"x{s}", "old") for s in (100, 105)]
    saves = [*run_of(range(5, 55, 5), 999), *abandoned, *run_of(range(110, 155, 5), 150)]
    assert left(saves, Keep.MILESTONES, 10) == [50, 110, 150]


@given(walls=st.lists(st.floats(NOW - DAY, NOW + DAY), max_size=4))
def test_a_sign_of_life_is_young(walls: list[float]) -> None:
    age = sign_of_life(walls, NOW)
    assert (age is not None) == any(NOW - w < ALIVE_SECONDS for w in walls)
    assert age is None or age >= 0


@given(
    walls=st.lists(st.floats(NOW - 90 * DAY, NOW), max_size=20),
    most=st.integers(0, 10),
)
def test_artefacts_go_by_count_and_age(walls: list[float], most: int) -> None:
    objects = [(f"k{n}", wall) for n, wall in enumerate(walls)]
    gone = set(stale_artefacts({"logs": objects}, NOW, most={"logs": most}, seconds=30 * DAY))
    kept = [wall for key, wall in objects if key not in gone]
    assert len(kept) <= max(1, most)
    assert not walls or max(walls) in kept
    assert all(NOW - wall <= 30 * DAY or wall == max(walls) for wall in kept)
    if len(walls) <= most and all(NOW - w <= 30 * DAY for w in walls):
        assert not gone
