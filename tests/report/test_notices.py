"""What a phone shows: each notice as a golden text (rewrite them with PODWATCH_GOLDEN=1)."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from podwatch.config.settings import NotifySettings
from podwatch.detection.merge import cost
from podwatch.domain.event import Change, Event, EventName, Incident, Notice
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.report import digest
from podwatch.report.alerts import NoticeState, body, channel_of, cost_of, digest_due, lowest_of, on_event, on_turn
from podwatch.report.deliver_notices import document_of
from podwatch.report.run_cost import Price, Spent, account
from podwatch.report.status import build_status
from tests.report import views

GOLDEN = Path(__file__).parent / "golden"
WALL = views.WALL
NO_ROOM = Finding(
    FindingKind.DISK_NO_ROOM,
    Severity.CRITICAL,
    "The next save needs 52 GB, 31 GB are free, and podwatch may delete nothing more. Training stops at that save",
    0.0,
    "free 21 GB on /app/outputs, or set disk.prune_to lower",
)


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class Night:
    """Events and findings of a night, with the account of the run."""

    def __init__(self, price: Price) -> None:
        self.price, self.state, self.notify = price, NoticeState(), NotifySettings()
        self.lowest = Severity.CRITICAL
        self.incidents: list[Incident] = []
        self.notices: list[Notice] = []

    def happens(self, after: float, name: EventName, message: str, severity: Severity, **fields: Any) -> None:
        event = Event(name, WALL + after, message, severity, fields)
        spent = Spent(WALL - 10_800, 10_800.0 + after, step_seconds=240.0)
        now = account(spent, self.incidents, event.wall, price=self.price)
        self.state, notices = on_event(self.state, event, self.notify, at=1000.0 + after, account=now)
        self.notices += notices

    def lasts(self, begin: int, end: int, *findings: Finding) -> None:
        for second in range(begin, end, 20):
            self.state, notices = on_turn(
                self.state, findings, self.notify, at=1000.0 + second, wall=WALL + second, lowest=self.lowest
            )
            self.notices += notices

    def death(self) -> None:
        summary = views.dead_recovering().findings[0].summary
        self.incidents = [Incident(1, "silent-death", WALL, summary, lost_steps=3)]
        self.happens(
            14, EventName.INCIDENT_OPENED, summary, Severity.CRITICAL,
            incident=1, kind="silent-death", began=WALL, gave_up=False, lost_steps=3, lost_seconds=730.0,
        )  # fmt: skip

    def healed(self) -> None:
        self.happens(40, EventName.TRAINER_STARTING, "starting", Severity.INFO, start_id="b", step=85)
        text = f"Training continues at step 86 (resumed from step 85){cost(3, 730.0, 374.0)}"
        self.happens(374, EventName.TRAINER_CONFIRMED, text, Severity.INFO, step=86)


def nights(price: Price) -> dict[str, Notice]:
    healed, given_up, full, ended = (Night(price) for _ in range(4))
    healed.death()
    healed.healed()
    given_up.death()
    given_up.happens(
        400, EventName.GAVE_UP,
        views.gave_up().findings[0].summary,
        Severity.CRITICAL,
    )  # fmt: skip
    full.lasts(0, 7300, NO_ROOM)
    full.lasts(7300, 7600)
    ended.happens(
        0, EventName.LINEAGE_OPENED, "An operator started training from step 40, below the newest checkpoint 85",
        Severity.WARNING, step=40,
    )  # fmt: skip
    ended.happens(
        60, EventName.DAEMON_STOPPING, "The machine shuts down in 30 s. podwatch stores step 85 and stops training",
        Severity.CRITICAL, preempted=True,
    )  # fmt: skip
    ended.happens(90, EventName.TRAINER_FINISHED, "Training reached step 200 of 200", Severity.INFO)
    names = {
        "incident-opened": healed.notices[0],
        "incident-closed": healed.notices[1],
        "gave-up": given_up.notices[1],
        "condition-opened": full.notices[0],
        "condition-reminder": full.notices[1],
        "condition-resolved": full.notices[-1],
        "operator-went-back": ended.notices[0],
        "preempted": ended.notices[1],
        "finished": ended.notices[2],
    }
    assert full.notices[-1].change is Change.CLOSED
    return names


def digests() -> dict[str, Notice]:
    shown = {"good-night": views.healthy(), "bad-night": views.gave_up(), "not-backed-up": views.not_backed_up()}
    return {f"digest-{name}": digest.notice(build_status(view), WALL) for name, view in shown.items()}


PRICED = nights(Price(4.2, "EUR")) | digests()


@pytest.mark.parametrize("name", PRICED)
def test_golden(name: str) -> None:
    notice = PRICED[name]
    document = document_of(notice, run_id="bs4-qwen3-8b", host="pod-7f2c")
    text = f"{document['title']}\n\n{document['text']}\n"
    path = GOLDEN / f"notice-{name}.txt"
    if os.environ.get("PODWATCH_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", PRICED)
def test_every_notice_says_what_to_do(name: str) -> None:
    assert "\nDo: " in body(PRICED[name])


@pytest.mark.parametrize("name", PRICED)
def test_no_notice_names_its_fix_twice(name: str) -> None:
    notice = PRICED[name]
    assert body(notice).count(notice.do) == 1


def test_money_is_named_only_where_the_price_is_known() -> None:
    priced, unpriced = PRICED["incident-closed"], nights(Price())["incident-closed"]
    assert "EUR" in priced.cost
    assert priced.cost.startswith(unpriced.cost.partition(" (")[0])
    assert "(" not in unpriced.cost
    assert "3 steps to train again" in unpriced.cost


def test_the_cost_of_several_failures_is_that_of_this_one_and_of_all() -> None:
    spent = views.spent(failures=3)
    assert cost_of(1, spent).count("; ") == 1
    assert "3 failures of this run" in cost_of(1, spent)
    assert cost_of(99, spent) == cost_of(1, spent).partition("; ")[2]
    assert cost_of(1, None) == ""


def test_a_finding_without_a_suggestion_never_says_that_there_is_nothing_to_do() -> None:
    night = Night(Price())
    night.lasts(0, 60, Finding(FindingKind.SYNC_LAGGING, Severity.CRITICAL, "nothing new for 3 h", 0.0))
    assert night.notices[0].do == "see sync-lagging in docs/runbook.md"


# -- channels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("https://a/b", (None, "https://a/b")),
        ("critical https://a/b", (Severity.CRITICAL, "https://a/b")),
        ("info   ntfy://topic", (Severity.INFO, "ntfy://topic")),
        ("loud https://a/b", (None, "loud https://a/b")),
        ("warning", (None, "warning")),
    ],
)
def test_the_severity_before_a_url(entry: str, expected: tuple[Severity | None, str]) -> None:
    assert channel_of(entry) == expected


def test_a_channel_that_asks_for_warnings_makes_them_without_sending_them_to_the_others() -> None:
    blind = Finding(FindingKind.SENSOR_BLIND, Severity.WARNING, "blind", 0.0, "look")
    for least, seen in (((None,), []), ((None, Severity.WARNING), [False]), ((Severity.INFO,), [False])):
        night = Night(Price())
        night.lowest = lowest_of(least, Severity.CRITICAL)
        night.lasts(0, 60, blind)
        assert [notice.usual for notice in night.notices] == seen
    assert lowest_of([Severity.CRITICAL], Severity.WARNING) is Severity.WARNING


# -- digests ---------------------------------------------------------------------------------------------------------


def test_a_digest_is_due_once_in_its_time_whatever_the_clock_does() -> None:
    day = 86_400.0
    assert not digest_due(None, WALL, day), "the first look only remembers"
    assert not digest_due(WALL, WALL + day - 1, day)
    assert digest_due(WALL, WALL + day, day)
    assert digest_due(WALL, WALL + 30 * day, day), "one, after any time without podwatch"
    assert not digest_due(WALL, WALL - 5 * day, day), "a clock that was set back"
    assert not digest_due(WALL, WALL + day, 0.0), "off"


def test_the_time_of_the_last_digest_survives_a_restart_and_other_versions() -> None:
    kept = digest.LastDigest(WALL)
    assert digest.LastDigest.kept({**kept.to_json(), "new": 1}) == kept
    assert [digest.LastDigest.kept(broken) for broken in (None, {}, [], {"wall": "x"})] == [None] * 4
