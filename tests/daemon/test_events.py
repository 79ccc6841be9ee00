"""Open findings: raised once, cleared once, and as old as they are."""

from dataclasses import replace

from podwatch.daemon.notifications import OpenFindings
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Finding, FindingKind, Severity

UNAVAILABLE = Finding(FindingKind.STORE_UNAVAILABLE, Severity.WARNING, "the store cannot be used", 100.0)


def test_a_finding_that_stays_open_keeps_the_moment_at_which_it_was_raised() -> None:
    events: list[Event] = []
    bulletin = OpenFindings(events.append)
    for at in (100.0, 102.0, 104.0):
        bulletin.update((replace(UNAVAILABLE, since=at),), at)
    assert [f.since for f in bulletin.findings] == [100.0]
    assert [e.name for e in events] == [EventName.FINDING_RAISED]
    bulletin.update((), 106.0)
    bulletin.update((replace(UNAVAILABLE, since=108.0),), 108.0)
    assert [f.since for f in bulletin.findings] == [108.0], "raised again is a new one"


def test_a_source_that_knows_an_earlier_moment_is_believed() -> None:
    bulletin = OpenFindings(lambda _: None)
    bulletin.update((UNAVAILABLE,), 100.0)
    bulletin.update((replace(UNAVAILABLE, since=40.0),), 102.0)
    assert [f.since for f in bulletin.findings] == [40.0]


def test_what_is_collected_between_two_turns_keeps_its_moments_and_emits_nothing() -> None:
    told: list[Event] = []
    bulletin = OpenFindings(told.append)
    old = Finding(FindingKind.DISK_HIGH, Severity.WARNING, "90 %", 10.0)
    bulletin.update((old,), 0.0)
    told.clear()
    new = Finding(FindingKind.GAVE_UP, Severity.CRITICAL, "gave up", 30.0)
    found = bulletin.as_of_now((replace(old, since=30.0), new))
    assert [(f.kind, f.since) for f in found] == [(FindingKind.GAVE_UP, 30.0), (FindingKind.DISK_HIGH, 10.0)]
    assert told == []
    assert bulletin.findings == (old,)
