"""Telling is joined to the daemon so that nothing of it can hurt the daemon."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podwatch.app.backup.run_side import WandbIds
from podwatch.app.build import Store
from podwatch.app.notifications import all_urls, channels_of, make_notifying, read_urls
from podwatch.app.store_jobs import StoreJobs
from podwatch.checkpoints.trainers import make_layout
from podwatch.config.settings import Settings
from podwatch.domain.event import Event, EventName, Topic
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import Snapshot
from podwatch.journal import AsyncJournal, Journal
from podwatch.report import alerts
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock
from tests.report import views

GAVE_UP = Event(EventName.GAVE_UP, 1.7e9, "gave up: five restarts in two hours", Severity.CRITICAL)


def settings(root: Path, **notify: Any) -> Settings:
    trainer = {"layout": "hf", "output_dir": root / "out"}
    return Settings.model_validate({"run_id": "r1", "state_dir": root, "trainer": trainer, "notify": notify})


async def test_nobody_is_told_where_nobody_is_named(tmp_path: Path) -> None:
    journal = AsyncJournal(Journal.open(tmp_path / "j.sqlite"))
    assert await make_notifying(settings(tmp_path), SystemClock(), journal, Worker("x"), print) is None
    await journal.close()


async def test_a_mistake_in_telling_is_a_finding_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, complaints = AsyncJournal(Journal.open(tmp_path / "j.sqlite")), list[str]()
    out = tmp_path / "told"
    made = settings(tmp_path, command=["/bin/sh", "-c", f"cat >> {out}"], urls_file=tmp_path / "missing")
    telling = await make_notifying(made, SystemClock(), journal, Worker("x"), complaints.append)
    assert telling is not None
    assert "cannot read the file of URLs" in complaints[0], "the others are told nevertheless"
    telling.event(GAVE_UP, lambda: None)
    await telling.close(10.0)
    assert json.loads(out.read_text())["key"] == "gave-up"

    again = await make_notifying(made, SystemClock(), journal, Worker("x"), complaints.append)
    assert again is not None
    again.event(GAVE_UP, lambda: None)
    await again.close(1.0)
    assert len(out.read_text().splitlines()) == 1, "the journal knows that it was told"

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(alerts, "on_turn", broken)
    monkeypatch.setattr(alerts, "on_event", broken)
    again.turn((Finding(FindingKind.HANG, Severity.CRITICAL, "x", 0.0),), Snapshot(at=1.0, wall=1.0))
    again.event(GAVE_UP, lambda: None)
    (finding,) = again.findings(0.0)
    assert (finding.kind, finding.severity, "a mistake" in finding.summary) == (
        FindingKind.NOTIFY_FAILING, Severity.WARNING, True,
    )  # fmt: skip
    await journal.close()


async def test_one_digest_a_day_also_across_restarts_of_podwatch(tmp_path: Path) -> None:
    """Each podwatch below is a new one with the same journal. The first look only remembers when it was."""
    journal, out = AsyncJournal(Journal.open(tmp_path / "j.sqlite")), tmp_path / "told"
    made = settings(tmp_path, command=["/bin/sh", "-c", f"cat >> {out}"], digest="24h")
    view = views.healthy()

    async def looks(hours: float, *, times: int = 1) -> int:
        clock = Shifted(hours * 3600)
        telling = await make_notifying(made, clock, journal, Worker("x"), print)
        assert telling is not None
        for _ in range(times):
            await telling.digest(view)
        await telling.close(30.0)
        assert telling.findings(0.0) == ()
        return len(out.read_text().splitlines()) if out.exists() else 0

    assert await looks(0, times=3) == 0
    assert await looks(23.9) == 0
    assert await looks(24.1, times=3) == 1
    assert await looks(24.2) == 1
    assert await looks(12) == 1, "the clock was set back"
    assert await looks(48.2) == 2
    assert json.loads(out.read_text().splitlines()[-1])["topic"] == "digest"
    await journal.close()


class Run:
    """The heartbeat that the pods of a run share; ``speaks``: this pod holds the run."""

    def __init__(self) -> None:
        self.digest_wall: float | None = None
        self.speaks, self.answers = True, True

    def sends_digests(self, *, known: bool) -> bool:
        return self.speaks or (known and not self.answers)

    async def keep_digest(self, wall: float) -> None:
        self.digest_wall = max(wall, self.digest_wall or wall)


async def test_the_digest_survives_the_pod_and_comes_once_in_its_time_across_pods(tmp_path: Path) -> None:
    out, run, view = tmp_path / "told", Run(), views.healthy()

    async def looks(pod: str, hours: float, *, times: int = 1, speaks: bool = True) -> int:
        run.speaks = speaks
        journal = AsyncJournal(Journal.open(tmp_path / f"{pod}.sqlite"))
        made = settings(tmp_path, command=["/bin/sh", "-c", f"cat >> {out}"], digest="24h")
        telling = await make_notifying(made, Shifted(hours * 3600), journal, Worker("x"), print)
        assert telling is not None
        for _ in range(times):
            await telling.digest(view, run)
        await telling.close(30.0)
        assert telling.findings(0.0) == ()
        await journal.close()
        return len(out.read_text().splitlines()) if out.exists() else 0

    assert await looks("a", 0) == 0, "the period begins"
    assert await looks("b", 10, times=2) == 0
    assert await looks("c", 20) == 0
    assert await looks("d", 24.1, times=3) == 1, "no pod has lived for a day"
    assert await looks("e", 24.2) == 1
    assert await looks("a", 24.3) == 1, "the first pod returns: its own last one is a day ago"
    assert await looks("standby", 49, speaks=False) == 1
    assert await looks("e", 49) == 2
    assert await looks("a", 49.1) == 2
    run.answers = False
    assert await looks("a", 80, speaks=False) == 3, "an outage of the store does not silence the pod that trains"
    assert await looks("new", 80, speaks=False) == 3, "one that knows nothing waits for the store"


class Shifted(SystemClock):
    """This machine's clock, ``seconds`` later by the wall."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return super().wall() + self._seconds


async def test_a_severity_before_a_url(tmp_path: Path) -> None:
    urls = ("warning https://a.example/key123", "https://b.example")
    whole = settings(tmp_path, command=["/bin/true"], urls=urls)
    made = whole.notify
    channels = channels_of(whole, all_urls(made))
    assert [channel.least for channel in channels] == [None, Severity.WARNING, None]  # type: ignore[attr-defined]
    assert [channel.name for channel in channels[1:]] == ["https://a.example/...", "https://b.example/..."]
    assert "key123" not in scrub("posted to https://a.example/key123")
    asked = [channel.least for channel in channels]  # type: ignore[attr-defined]
    assert alerts.lowest_of(asked, Severity(made.min_severity)) is Severity.WARNING


def test_the_topic_findings_includes_what_blocks_training(tmp_path: Path) -> None:
    """``findings`` includes what needs the operator."""
    chosen = [settings(tmp_path, events=events).notify.topics for events in (("findings",), ("restarts",))]
    assert chosen == [{Topic.FINDINGS, Topic.NEEDS_OPERATOR}, {Topic.RESTARTS}]


def test_a_line_of_the_file_with_a_remark(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.write_text("# mine\n\ncritical ntfy://topic   # the phone\nslack://a/b/c/#training\n")
    file.chmod(0o600)
    assert read_urls(file) == ("critical ntfy://topic", "slack://a/b/c/#training")


@pytest.mark.parametrize(("elsewhere", "sends"), [(False, True), (True, False)])
def test_of_several_nodes_only_the_one_that_uploads_sends_digests(tmp_path: Path, elsewhere: bool, sends: bool) -> None:
    store = Store(None, None, "", WandbIds(make_layout(settings(tmp_path))), elsewhere=elsewhere)
    jobs = StoreJobs(SimpleNamespace(store=store, backup=None), None, None)
    assert jobs.sends_digests(known=False) is sends
