from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from podwatch.config.settings import HookEvent
from podwatch.domain.event import Event, EventName
from podwatch.hooks.occasions import (
    AT_LEAST_ONCE,
    INTERRUPTED_AT_MOST,
    SOURCES,
    Occasion,
    kinds_of,
    next_of,
    occasion_of,
)

EVERY = get_args(HookEvent)
OCCASIONS = st.lists(st.sampled_from(("checkpoint", "incident", "published")), max_size=12).map(
    lambda kinds: tuple(Occasion(kind, f"{kind}:{n}", float(n), n + 1) for n, kind in enumerate(kinds))
)


def event(name: EventName, **fields: str | int | bool | None) -> Event:
    return Event(name, 1_700_000_000.25, "said", fields=fields, id=7)


def test_every_setting_has_an_event_and_every_event_a_setting() -> None:
    examples = {
        "incident": event(EventName.INCIDENT_OPENED, incident=1),
        "restarted": event(EventName.INCIDENT_CLOSED, resumed_step=5),
        "preempted": event(EventName.DAEMON_STOPPING, preempted=True),
    }
    found: set[str] = set()
    for name in SOURCES:
        one = next((e for e in examples.values() if e.name is name), event(name))
        found |= {*kinds_of(one), *kinds_of(one, milestone=True)}
    assert found == set(EVERY) - {"check"}, "that is no event: `podwatch check` runs these"
    assert found > AT_LEAST_ONCE


def test_events_that_only_look_like_an_occasion() -> None:
    for one in (
        event(EventName.INCIDENT_OPENED),
        event(EventName.INCIDENT_CLOSED, resumed_step=None),
        event(EventName.DAEMON_STOPPING, preempted=False),
        event(EventName.HOOK_DONE, step=5),
    ):
        assert occasion_of(one, EVERY) is None


def test_the_id_stays_when_an_event_is_reported_again() -> None:
    first = occasion_of(event(EventName.CHECKPOINT_COMPLETE, step=5, save_id="abc"), ("checkpoint",))
    again = occasion_of(
        Event(EventName.CHECKPOINT_COMPLETE, 2e9, "found", fields={"step": 5, "save_id": "abc"}, id=90),
        ("checkpoint",),
    )
    assert first is not None
    assert again is not None
    assert first.id == again.id == "checkpoint:5:abc"
    assert first.step == 5


def test_a_milestone_is_the_more_specific_name() -> None:
    one = event(EventName.PUBLISHED, step=5, generation=1, seq=10)
    for wanted, milestone, kind in (
        (("published", "milestone"), True, "milestone"),
        (("published", "milestone"), False, "published"),
        (("published",), True, "published"),
        (("milestone",), False, None),
    ):
        found = occasion_of(one, wanted, milestone=milestone)
        assert (found.kind if found else None) == kind


@given(OCCASIONS)
def test_without_coalescing_each_runs_once_in_order(pending: tuple[Occasion, ...]) -> None:
    ran, left = [], pending
    while left:
        one, left = next_of(left, coalesce=False)
        assert one is not None
        ran.append(one)
    assert tuple(ran) == pending
    assert next_of((), coalesce=False) == next_of((), coalesce=True) == (None, ())


@given(OCCASIONS)
def test_coalescing_runs_the_newest_of_each_kind_and_counts_the_others(pending: tuple[Occasion, ...]) -> None:
    ran, left = [], pending
    while left:
        one, left = next_of(left, coalesce=True)
        assert one is not None
        ran.append(one)
    newest = {p.kind: p.id for p in pending}
    assert {one.kind: one.id for one in ran} == newest
    assert len(ran) + sum(one.skipped for one in ran) == len(pending)
    assert [one.event_id for one in ran] == sorted(one.event_id for one in ran)


def test_an_occasion_survives_the_journal() -> None:
    one = occasion_of(event(EventName.PUBLISHED, step=5, generation=1, seq=10), ("published",))
    assert one is not None
    assert Occasion.kept(one.to_json()) == one
    for broken in (None, 1, {}, {"kind": 1, "id": "x", "wall": 1.0}):
        assert Occasion.kept(broken) is None


def test_an_interrupted_run_is_repeated_only_where_that_is_promised_and_not_for_ever() -> None:
    for kind in EVERY:
        assert Occasion(kind, "x", 1.0).again is (kind in AT_LEAST_ONCE)
    assert not Occasion("checkpoint", "x", 1.0, interrupted=INTERRUPTED_AT_MOST).again
