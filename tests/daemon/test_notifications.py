"""Telling is joined to the daemon so that nothing of it can hurt the daemon."""

import json
from pathlib import Path
from typing import Any

import pytest

from podwatch.config.settings import Settings
from podwatch.daemon.notifications import make_notifying
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.snapshot import Snapshot
from podwatch.journal import AsyncJournal, Journal
from podwatch.policy import alerts
from podwatch.system.clock import SystemClock
from podwatch.system.workers import Worker

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
    assert "cannot be read" in complaints[0], "the others are told nevertheless"
    telling.event(GAVE_UP)
    await telling.farewell(10.0)
    assert json.loads(out.read_text())["key"] == "gave-up"

    again = await make_notifying(made, SystemClock(), journal, Worker("x"), complaints.append)
    assert again is not None
    again.event(GAVE_UP)
    await again.farewell(1.0)
    assert len(out.read_text().splitlines()) == 1, "the journal knows that it was told"

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(alerts, "on_turn", broken)
    monkeypatch.setattr(alerts, "on_event", broken)
    again.turn((Finding(FindingKind.HANG, Severity.CRITICAL, "x", 0.0),), Snapshot(at=1.0, wall=1.0))
    again.event(GAVE_UP)
    (finding,) = again.findings()
    assert (finding.kind, finding.severity, "a mistake" in finding.summary) == (
        FindingKind.NOTIFY_FAILING, Severity.WARNING, True,
    )  # fmt: skip
    await journal.close()
