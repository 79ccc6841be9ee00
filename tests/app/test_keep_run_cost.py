"""The costs of a run over restarts of podwatch and over pods: kept in the real journal, continued by the next one."""

from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.app.event_bus import EventBus
from podwatch.app.keep_run_cost import Accountant
from podwatch.domain.account_document import AccountTotals
from podwatch.domain.event import EventName
from podwatch.domain.snapshot import Desired, ProgressSample, ProgressSource, observed
from podwatch.journal import AsyncJournal, Journal
from podwatch.report.json_documents import account_totals
from podwatch.report.run_cost import Price
from tests.report import views
from tests.support.clock import ManualClock

PRICE = Price(3.6, "EUR")


class Watching:
    """One podwatch: journal, bus and accountant."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.clock = clock
        self.journal = AsyncJournal(Journal.open(path))
        self.bus = EventBus(self.journal, clock)
        self.accountant = Accountant(self.journal, clock, self.bus, counted=True)

    def looks(self, step: int, seconds: float, **changes: object) -> None:
        """``seconds`` pass; then podwatch sees ``step``."""
        self.clock.advance(seconds)
        view = views.healthy()
        view = replace(view, learned=replace(view.learned, save_gaps=(600.0,)))
        sample = ProgressSample(ProgressSource.STEP_LINE, "trainer", self.clock.now, step)
        snapshot = replace(view.facts.pod, progress=observed((sample,), view.now))
        self.accountant.count(views.changed(view, snapshot=snapshot, **changes))  # type: ignore[arg-type]

    async def dies(self, *, down: float, lost_steps: int) -> None:
        incident = await self.journal.run(Journal.open_incident, "silent-death", "", "", self.clock.wall(), lost_steps)
        self.bus.say(
            EventName.INCIDENT_OPENED, "", incident=incident.id, kind="silent-death", began=self.clock.wall(),
            lost_steps=lost_steps,
        )  # fmt: skip
        self.clock.advance(down)
        changes = {"closed_wall": self.clock.wall(), "resumed_step": 1, "lost_steps": lost_steps}
        await self.journal.run(Journal.update_incident, incident.id, **changes)
        self.bus.say(EventName.INCIDENT_CLOSED, "", incident=incident.id, resumed_step=1, lost_steps=lost_steps)


async def begun(path: Path, clock: ManualClock) -> Watching:
    podwatch = Watching(path, clock)
    await podwatch.accountant.load()
    return podwatch


async def test_an_hour_with_one_failure(tmp_path: Path) -> None:
    podwatch = await begun(tmp_path / "journal.sqlite", ManualClock())
    for minute in range(50):
        podwatch.looks(minute, 60)
    assert podwatch.accountant.account(PRICE).goodput == 1.0
    await podwatch.dies(down=300, lost_steps=5)
    podwatch.looks(45, 300)
    found = podwatch.accountant.account(PRICE, target=55, step=45)
    assert (found.run.seconds, found.run.lost_seconds, found.run.so_far) == (3600.0, 600.0, 3.6)
    assert found.incidents[1].training == pytest.approx(300.0)
    assert found.finish is not None
    assert found.finish.low == pytest.approx(600.0)
    await podwatch.journal.close()


@pytest.mark.parametrize("rebooted", [False, True])
async def test_the_next_podwatch_continues(rebooted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "journal.sqlite", ManualClock()
    first = await begun(path, clock)
    first.looks(1, 600)
    await first.dies(down=60, lost_steps=2)
    first.looks(2, 0)
    await first.journal.close()
    clock.advance(400)
    if rebooted:
        monkeypatch.setattr("podwatch.app.keep_run_cost.boot_id", lambda: "another")
    second = await begun(path, clock)
    found = second.accountant.account(PRICE, 10.0)
    assert found.run.seconds == (660 if rebooted else 1060)
    assert found.run.lost_seconds == 60 + 20
    await second.journal.close()


async def test_training_that_no_step_confirms_costs_nothing_more(tmp_path: Path) -> None:
    path, clock = tmp_path / "journal.sqlite", ManualClock()
    podwatch = await begun(path, clock)
    incident = await podwatch.journal.run(Journal.open_incident, "silent-death", "", "", clock.wall())
    podwatch.bus.say(EventName.INCIDENT_OPENED, "", incident=incident.id, kind="silent-death", began=clock.wall())
    clock.advance(90)
    for seconds in (0, 3600):
        podwatch.looks(1, seconds)
        podwatch.bus.say(EventName.FINDING_RAISED, "", finding="resume-unconfirmed", subject="", confirmed=False)
        assert podwatch.accountant.account(PRICE).incidents[1].idle == 90
    podwatch.looks(1, 60)
    await podwatch.journal.close()
    again = await begun(path, clock)
    assert again.accountant.account(PRICE).incidents[1].idle == 90
    await again.journal.close()


async def test_a_pod_that_takes_over_adds_its_own(tmp_path: Path) -> None:
    clock = ManualClock()
    first, second = await begun(tmp_path / "a", clock), await begun(tmp_path / "b", clock)
    first.looks(1, 600)
    await first.dies(down=60, lost_steps=0)
    document = account_totals(first.accountant.account(PRICE, 10.0))
    second.accountant.take_over(document, 2)
    clock.advance(340)
    found = second.accountant.account(PRICE, 10.0).run
    assert (found.seconds, found.failures, found.lost_seconds, found.so_far) == (1000.0, 1, 60.0, 1.0)
    back = account_totals(second.accountant.account(PRICE, 10.0))
    first.accountant.take_over(back, 3)
    assert first.accountant.account(PRICE, 10.0).run.failures == 1, "its own are in the other pod's figures"
    second.accountant.take_over(AccountTotals(total_seconds=1.0), 4)
    assert second.accountant.account(PRICE, 10.0).run == found
    await first.journal.close()
    await second.journal.close()


async def test_a_run_that_is_finished_or_down(tmp_path: Path) -> None:
    podwatch = await begun(tmp_path / "journal.sqlite", ManualClock())
    podwatch.looks(1, 60)
    gave_up = views.gave_up()
    podwatch.clock.advance(600)
    podwatch.accountant.count(gave_up)
    assert podwatch.accountant.account(PRICE).causes["down"].idle == 600
    snapshot = replace(gave_up.facts.pod, desired=Desired.FINISHED)
    podwatch.accountant.count(
        views.changed(gave_up, snapshot=snapshot, desired=Desired.FINISHED, recovery=views.healthy().recovery)
    )
    podwatch.clock.advance(600)
    assert podwatch.accountant.account(PRICE).run.seconds == 660
    await podwatch.journal.close()


async def test_a_try_after_giving_up_does_not_count_the_time_since_then_twice(tmp_path: Path) -> None:
    path, clock = tmp_path / "journal.sqlite", ManualClock()
    podwatch = await begun(path, clock)
    podwatch.looks(100, 1000)
    incident = await podwatch.journal.run(Journal.open_incident, "silent-death", "", "", clock.wall(), 5)
    number = incident.id
    podwatch.bus.say(
        EventName.INCIDENT_OPENED, "", incident=number, kind="silent-death", began=clock.wall(), lost_steps=5
    )

    async def close(**steps: int | None) -> None:
        await podwatch.journal.run(Journal.update_incident, number, closed_wall=clock.wall(), **steps)
        podwatch.bus.say(EventName.INCIDENT_CLOSED, "", incident=number, **steps)

    podwatch.looks(100, 350, recovery=views.gave_up().recovery, findings=views.gave_up().findings)
    await close(resumed_step=None, lost_steps=None)
    clock.advance(3650)
    podwatch.accountant.count(views.gave_up())
    await close(resumed_step=95, lost_steps=6)
    found = podwatch.accountant.account(PRICE, 10.0)
    assert (found.run.seconds, found.run.steps_lost) == (5000.0, 6)
    assert found.run.lost_seconds == 350 + 3650 + 60
    await podwatch.journal.close()
    again = await begun(path, clock)
    assert again.accountant.account(PRICE, 10.0).run.lost_seconds == 350 + 3650 + 60
    await again.journal.close()


async def test_the_steps_of_an_open_incident_stay_known_over_a_restart(tmp_path: Path) -> None:
    path, clock = tmp_path / "journal.sqlite", ManualClock()
    podwatch = await begun(path, clock)
    podwatch.looks(100, 1000)
    await podwatch.journal.run(Journal.open_incident, "silent-death", "", "", clock.wall(), 5)
    await podwatch.journal.close()
    again = await begun(path, clock)
    assert again.accountant.account(PRICE, 10.0).incidents[1].training == 50.0
    await again.journal.close()


async def test_what_another_pod_writes_while_this_one_holds_the_run_replaces_nothing(tmp_path: Path) -> None:
    path, clock = tmp_path / "journal.sqlite", ManualClock()
    foreign = AccountTotals(1_767_225_600.0, 7.0, failures=9, lost_seconds=1.0)
    podwatch = await begun(path, clock)
    podwatch.accountant.take_over(None, 0)
    podwatch.accountant.take_over(None, 1)
    podwatch.looks(1, 600)
    podwatch.accountant.take_over(foreign, 1)
    assert podwatch.accountant.account(PRICE).run.seconds == 600
    podwatch.looks(1, 0)
    await podwatch.journal.close()
    again = await begun(path, clock)
    again.accountant.take_over(foreign, 1)
    assert again.accountant.account(PRICE).run.seconds == 600
    again.accountant.take_over(foreign, 3)
    assert again.accountant.account(PRICE).run.seconds == 7, "the run was another pod's meanwhile"
    await again.journal.close()


async def test_an_incident_that_is_open_when_the_run_is_taken_over_counts(tmp_path: Path) -> None:
    clock = ManualClock()
    podwatch = await begun(tmp_path / "journal.sqlite", clock)
    await podwatch.dies(down=60, lost_steps=2)
    incident = await podwatch.journal.run(Journal.open_incident, "silent-death", "", "", clock.wall(), 3)
    podwatch.bus.say(
        EventName.INCIDENT_OPENED, "", incident=incident.id, kind="silent-death", began=clock.wall(), lost_steps=3
    )
    earlier = AccountTotals(1_767_225_600.0, 9.0, failures=1, lost_seconds=1.0, steps_lost=2)
    podwatch.accountant.take_over(earlier, 2)
    clock.advance(40)
    found = podwatch.accountant.account(PRICE, 10.0).run
    assert (found.failures, found.steps_lost, found.lost_seconds) == (2, 5, 1 + 40 + 30)
    await podwatch.journal.close()
