"""What is told and when: once at the beginning, once at the end, reminders in between, never a flood."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from podwatch.config.settings import NotifySettings
from podwatch.domain.event import Change, Event, EventName, Notice, Topic
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.report.alerts import (
    SELF_REPAIRED,
    NoticeState,
    continued,
    kept,
    on_event,
    on_turn,
    topic_of,
)

DOCS = Path(__file__).parents[2] / "docs"

DISK = Finding(FindingKind.DISK_NO_ROOM, Severity.CRITICAL, "the next save needs 47 GB, 31 GB are free", 0.0, "prune")
LAG = Finding(FindingKind.SYNC_LAGGING, Severity.CRITICAL, "nothing new for 3 h", 0.0)
BLIND = Finding(FindingKind.SENSOR_BLIND, Severity.WARNING, "blind", 0.0, subject="gpu")
DEATH = Finding(
    FindingKind.SILENT_DEATH, Severity.CRITICAL, "GPU 0 is empty", 0.0, verdict=Verdict.RESTART, confirmed=True
)


@dataclass
class Night:
    """Seconds pass, and what is told is kept."""

    notify: NotifySettings = field(default_factory=NotifySettings)
    state: NoticeState = field(default_factory=NoticeState)
    at: float = 1000.0
    told: list[Notice] = field(default_factory=list)
    lowest: Severity = Severity.CRITICAL

    def lasts(self, seconds: float, *findings: Finding, step: float = 2.0) -> "Night":
        end = self.at + seconds
        while self.at < end:
            self.at += step
            self.state, notices = on_turn(
                self.state, findings, self.notify, at=self.at, wall=self.at + 1e9, lowest=self.lowest
            )
            self.told += notices
        return self

    def happens(self, name: EventName, severity: Severity = Severity.INFO, **fields: object) -> "Night":
        event = Event(name, self.at + 1e9, f"{name} happened", severity, fields)  # type: ignore[arg-type]
        self.state, notices = on_event(self.state, event, self.notify, at=self.at)
        self.told += notices
        return self

    def restarted(self) -> "Night":
        document = kept(self.state, at=self.at, wall=self.at).to_json()
        self.at += 5.0  # another process: monotonic moments of the old one mean nothing
        self.state = continued(document, at=self.at, wall=self.at)
        return self

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(str(n.change), n.key) for n in self.told]


def test_once_when_it_begins_and_once_when_it_is_over() -> None:
    night = Night().lasts(600, DISK)
    (notice,) = night.told
    assert (notice.topic, notice.change, notice.severity) == (Topic.NEEDS_OPERATOR, Change.OPENED, Severity.CRITICAL)
    assert "31 GB are free" in notice.text
    assert notice.do == "prune"
    night.lasts(600)
    assert night.said == [("opened", "disk-no-room"), ("closed", "disk-no-room")]
    assert "10 min" in night.told[-1].text


def test_what_shows_for_moments_is_not_told_and_what_comes_back_soon_was_not_over() -> None:
    assert Night().lasts(18, DISK).lasts(600).told == []
    night = Night().lasts(60, DISK)
    for _ in range(20):
        night.lasts(40).lasts(10, DISK)
    assert night.said == [("opened", "disk-no-room")]


def test_reminders_come_ever_more_rarely() -> None:
    night = Night().lasts(24 * 3600, LAG, step=60.0)
    reminded = [n.wall - night.told[0].wall for n in night.told if n.change is Change.REMINDER]
    assert [round(r / 3600) for r in reminded] == [1, 3, 7, 15]
    night = Night(NotifySettings(remind=0)).lasts(24 * 3600, LAG, step=60.0)
    assert night.said == [("opened", "sync-lagging")]


def test_a_warning_is_told_only_where_that_is_wanted_and_never_reminded_of() -> None:
    assert Night().lasts(600, BLIND).told == []
    night = Night(NotifySettings(min_severity="warning")).lasts(9000, BLIND, step=10)
    assert night.said == [("opened", "sensor-blind:gpu")]
    worse = Finding(BLIND.kind, Severity.CRITICAL, "still", 0.0, subject="gpu")
    assert night.lasts(60, worse).said[-1] == ("opened", "sensor-blind:gpu")
    assert night.told[-1].severity is Severity.CRITICAL


def test_a_healed_death_is_one_thing() -> None:
    night = (
        Night().lasts(4, DEATH).happens(EventName.INCIDENT_OPENED, Severity.CRITICAL, incident=1, kind="silent-death")
    )
    night.happens(EventName.INCIDENT_OPENED, Severity.WARNING)  # "no evidence could be kept"
    night.lasts(60, DEATH).lasts(120)
    night.happens(EventName.TRAINER_CONFIRMED, step=41)
    night.happens(EventName.INCIDENT_CLOSED, incident=1, resumed_step=40).lasts(600)
    assert night.said == [("opened", "incident"), ("closed", "incident")]
    assert night.told[0].topic is Topic.RESTARTS
    assert "silent-death" in night.told[0].title


def test_a_death_that_nobody_heals_is_told_as_what_it_is() -> None:
    assert Night().lasts(60, DEATH).said == [("opened", "silent-death")], "observe, or a pause"
    quiet = Night(NotifySettings(events=tuple({*NotifySettings().events} - {"restarts"})))
    quiet.lasts(4, DEATH).happens(EventName.INCIDENT_OPENED, incident=1, kind="silent-death").lasts(60, DEATH)
    assert quiet.said == [("opened", "silent-death")]


def test_giving_up_is_told_at_once_and_once() -> None:
    gave_up = Finding(FindingKind.GAVE_UP, Severity.CRITICAL, "gave up: five restarts in two hours", 0.0)
    night = Night().happens(EventName.GAVE_UP, Severity.CRITICAL).lasts(600, gave_up)
    assert night.said == [("opened", "gave-up")]
    assert night.lasts(4 * 3600, gave_up, step=30).said[1:] == [("reminder", "gave-up")] * 2
    assert night.lasts(100).said[-1] == ("closed", "gave-up")


def test_words_of_their_own() -> None:
    superseded = Finding(FindingKind.SUPERSEDED, Severity.CRITICAL, "taken over", 0.0)
    assert topic_of(superseded) is Topic.NEEDS_OPERATOR
    night = Night().happens(EventName.DAEMON_STOPPING).happens(EventName.DAEMON_STARTED)
    assert night.told == [], "an upgrade of podwatch wakes nobody"
    night.happens(EventName.DAEMON_STOPPING, preempted=True).happens(EventName.TRAINER_FINISHED)
    night.happens(EventName.DAEMON_STOPPING, Severity.CRITICAL)
    assert [n.topic for n in night.told] == [Topic.NEEDS_OPERATOR, Topic.FINISHED, Topic.NEEDS_OPERATOR]


def test_what_waits_for_the_operator_can_be_chosen_without_the_restarts() -> None:
    """The list that docs/notifications.md recommends for a night."""
    chosen = {Topic.GAVE_UP, Topic.NEEDS_OPERATOR}
    listed = ", ".join(f'"{topic}"' for topic in Topic if topic in chosen)
    assert f"`events = [{listed}]`" in " ".join((DOCS / "notifications.md").read_text().split())
    night = Night(NotifySettings(events=tuple(map(str, chosen))))
    night.lasts(4, DEATH).happens(EventName.INCIDENT_OPENED, incident=1, kind="silent-death").lasts(60)
    held = Finding(FindingKind.BLOCKED, Severity.CRITICAL, "GPU 0 is held by another program", 0.0)
    night.lasts(60, held)
    assert [(n.topic, n.key) for n in night.told] == [(Topic.NEEDS_OPERATOR, "blocked")]
    billed = Finding(FindingKind.POD_NOT_ENDED, Severity.CRITICAL, "still billed", 0.0)
    hang = Finding(FindingKind.HANG, Severity.CRITICAL, "no step for 3 h", 0.0)
    night = Night(NotifySettings(events=tuple(map(str, chosen)))).lasts(60, billed, hang)
    assert [n.key for n in night.told] == ["pod-not-ended", "hang"]
    night.happens(EventName.DAEMON_STOPPING, preempted=True).happens(EventName.DAEMON_STOPPING, Severity.CRITICAL)
    assert len(night.told) == 4
    repaired = replace(hang, verdict=Verdict.RESTART, confirmed=True)
    assert topic_of(repaired) is topic_of(replace(hang, severity=Severity.WARNING)) is Topic.FINDINGS


def test_warnings_wake_an_operator_only_where_a_line_asks_for_them() -> None:
    """Of every topic, as docs/notifications.md says."""
    full = Finding(FindingKind.DISK_HIGH, Severity.WARNING, "90 %", 0.0)
    refused = Finding(FindingKind.STORE_UNAVAILABLE, Severity.WARNING, "the store does not answer", 0.0)
    failing = Finding(FindingKind.EVALUATION_FAILING, Severity.WARNING, "3 failed", 0.0)
    assert Night().lasts(60, full, refused, failing).told == []
    asked = Night(lowest=Severity.WARNING).lasts(60, full, refused, failing)
    assert [n.usual for n in asked.told] == [False] * 3, "only the lines that ask for warnings"


def test_each_kind_of_finding_is_decided() -> None:
    """A critical finding wakes an operator who chose `events` as the page recommends, except where training starts
    again by itself."""
    runbook = re.findall(r"^### (\S+)\n\n\*([^;*]+)", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    critical = {FindingKind(name) for name, severities in runbook if "critical" in severities}
    assert len(critical) > 20
    assert (
        critical & SELF_REPAIRED
        == SELF_REPAIRED
        == {
            FindingKind.TRAINER_EXITED,
            FindingKind.REQUIRED_CHILD_EXITED,
            FindingKind.OUT_OF_MEMORY,
            FindingKind.NODE_FAILED,
        }
    ), "training starts again after these"


def test_a_restart_of_podwatch_tells_nothing_again() -> None:
    night = Night().lasts(60, DISK).restarted().lasts(30).lasts(600, DISK)
    assert night.said == [("opened", "disk-no-room")]
    night.restarted().lasts(300)
    assert len(night.told) == 1, "a podwatch that has just come needs time to see"
    assert night.lasts(300).said == [("opened", "disk-no-room"), ("closed", "disk-no-room")]


def test_a_flood_is_held_back_and_counted_and_the_worst_gets_through() -> None:
    night = Night(NotifySettings(per_hour=6))
    for _ in range(50):
        night.lasts(10).happens(EventName.TRAINER_FINISHED)
    assert len(night.told) == 3, "half of it is kept for what is critical"
    night.lasts(60, DISK)
    assert night.said[-1] == ("opened", "disk-no-room")
    assert night.told[-1].unsent == 47
    for _ in range(10):
        night.happens(EventName.INCIDENT_OPENED, Severity.CRITICAL, incident=1, kind="hang")
    assert len(night.told) == 5, "one place is kept for the end of the restart"
    night.happens(EventName.INCIDENT_CLOSED, incident=1, resumed_step=5)
    assert night.said[-1] == ("closed", "incident")
    night.lasts(120, DISK, LAG)
    assert "sync-lagging" not in {key for _, key in night.said}
    night.happens(EventName.DAEMON_STOPPING, preempted=True)
    assert night.told[-1].topic is Topic.NEEDS_OPERATOR
    night.lasts(3700, DISK, LAG, step=20)
    assert ("opened", "sync-lagging") in night.said, "told as soon as there is room"


FINDINGS = (DISK, LAG, DEATH, BLIND)
MOMENTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(FINDINGS), max_size=4, unique_by=lambda f: f.key),
        st.floats(1.0, 4000.0),
        st.sampled_from((None, EventName.INCIDENT_OPENED, EventName.INCIDENT_CLOSED, EventName.GAVE_UP,
                         EventName.TRAINER_FINISHED, EventName.TRAINER_CONFIRMED)),
        st.booleans(),
    ),
    max_size=40,
)  # fmt: skip


@given(MOMENTS, st.integers(2, 30), st.sampled_from((Severity.WARNING, Severity.CRITICAL)))
def test_any_night(moments: Sequence[tuple[Sequence[Finding], float, EventName | None, bool]], limit: int,
                   least: Severity) -> None:  # fmt: skip
    """Never more in an hour than was asked for; an end only after a beginning; every end once."""
    night = Night(NotifySettings(per_hour=limit, min_severity=str(least)), lowest=least)
    for findings, seconds, event, restart in moments:
        night.lasts(seconds, *findings, step=seconds / 2)
        if event is not None:
            night.happens(event, incident=1, kind="hang", resumed_step=5)
        if restart:
            night.restarted()
    times = sorted(n.wall for n in night.told)
    assert all(b - a >= 3599.0 for a, b in zip(times, times[limit:], strict=False))
    open_now: set[str] = set()
    for notice in night.told:
        if notice.change is Change.CLOSED and notice.key != "incident":
            assert notice.key in open_now
            open_now.discard(notice.key)
        elif notice.change is Change.REMINDER:
            assert notice.key in open_now
        elif notice.change is Change.OPENED and notice.key != "incident":
            assert notice.key not in open_now, "told twice"
            open_now.add(notice.key)


@given(st.recursive(st.none() | st.floats() | st.text(max_size=3), lambda x: st.lists(x, max_size=3) | st.dictionaries(
    st.sampled_from(("at", "wall", "told", "sent", "healing", "x")), x)))  # fmt: skip
def test_whatever_the_journal_holds(document: object) -> None:
    state = continued(document, at=10.0, wall=20.0)
    on_turn(state, FINDINGS, NotifySettings(), at=11.0, wall=21.0)


def test_an_operators_start_below_the_newest_checkpoint_is_told_once() -> None:
    night = Night().happens(EventName.LINEAGE_OPENED, Severity.WARNING, step=40, newest=90)
    (notice,) = night.lasts(3600).told
    assert (notice.topic, notice.change, notice.severity) == (Topic.RESTARTS, Change.HAPPENED, Severity.WARNING)
    assert notice.title == "an operator took training back to step 40"
    (notice,) = Night().happens(EventName.LINEAGE_OPENED, Severity.WARNING, step=None, newest=90).told
    assert notice.title == "an operator took training back to the beginning"


def test_saves_that_are_rejected_one_after_another_are_told_as_a_warning() -> None:
    rejected = Finding(FindingKind.NOT_COMPLETE, Severity.WARNING, "the newest 2 checkpoints are not complete", 0.0)
    night = Night().lasts(600, rejected, BLIND)
    (notice,) = night.told
    assert (notice.severity, notice.title) == (Severity.WARNING, "checkpoints-not-complete")
    night.lasts(600, replace(rejected, severity=Severity.CRITICAL))
    assert [n.severity for n in night.told] == [Severity.WARNING, Severity.CRITICAL]
