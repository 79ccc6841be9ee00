"""The account over restarts of podwatch: kept in the real journal, continued by the next one."""

import asyncio
from pathlib import Path

import pytest

from podwatch.daemon.keep_time_ledger import Accountant
from podwatch.daemon.notifications import EventBus
from podwatch.domain.event import EventName
from podwatch.journal import AsyncJournal, Journal
from podwatch.policy.cost_totals import Price
from podwatch.policy.time_ledger import LEDGER_KEY, Use, from_dict, look
from podwatch.reporting.daemon_view import DaemonView
from tests.reporting import views
from tests.support.clock import ManualClock


class Watching:
    """One podwatch: journal, bus and accountant."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.clock = clock
        self.journal = AsyncJournal(Journal.open(path))
        self.bus = EventBus(self.journal, clock)
        self.accountant = Accountant(self.journal, clock, self.bus, counted=True)

    def look(self, step: int) -> None:
        """As a look of the daemon, without its view."""
        self.accountant.ledger = look(self.accountant.ledger, self.clock.wall(), step=step)
        self.accountant._keep()

    def seconds(self, use: Use) -> float:
        account = self.accountant.account(target=None, price=Price())
        assert account is not None
        return round(account.seconds[use], 3)


async def begun(path: Path, clock: ManualClock) -> Watching:
    podwatch = Watching(path, clock)
    await podwatch.accountant.load()
    return podwatch


async def trained(podwatch: Watching, seconds: float) -> None:
    podwatch.bus.say(EventName.TRAINER_STARTING, "", start_id="a", step=None)
    podwatch.clock.advance(40)
    podwatch.bus.say(EventName.TRAINER_CONFIRMED, "", step=1)
    podwatch.clock.advance(seconds)


@pytest.mark.parametrize("jump", [0.0, 7200.0, -7200.0])
async def test_a_killed_podwatch_loses_nothing_of_a_trainer_that_lives_on(tmp_path: Path, jump: float) -> None:
    path, clock = tmp_path / "journal.sqlite", ManualClock()
    first = await begun(path, clock)
    await trained(first, 300)
    first.look(10)
    clock.advance(50)  # seen by nobody: it is killed now
    await first.journal.close()
    clock.advance(1000)
    clock.offset += jump  # while no podwatch runs, in the same boot
    second = await begun(path, clock)
    clock.advance(5)
    second.bus.say(EventName.TRAINER_ADOPTED, "", start_id="a", alive=True, ended_at=None)
    clock.advance(10)
    assert second.seconds(Use.TRAINING) == 300 + 50 + 1000 + 5 + 10
    assert second.seconds(Use.RESTARTING) == 40
    assert second.seconds(Use.UNKNOWN) == 0
    await second.journal.close()


async def test_events_after_the_last_look_are_taken_up(tmp_path: Path) -> None:
    """A kill between the record of an event and that of the ledger."""
    path, clock = tmp_path / "journal.sqlite", ManualClock()
    first = await begun(path, clock)
    await trained(first, 300)
    first.look(10)
    first.accountant._keep = lambda: None  # type: ignore[method-assign]
    clock.advance(20)
    first.bus.say(EventName.TRAINER_STOPPING, "", start_id="a", step=12)
    await first.journal.close()
    clock.advance(100)
    second = await begun(path, clock)
    assert second.accountant.ledger.position == 12
    second.bus.say(EventName.TRAINER_STARTING, "", start_id="b", step=10)
    assert (second.seconds(Use.TRAINING), second.seconds(Use.UNKNOWN)) == (320, 100)
    assert second.accountant.ledger.causes["operator"].steps == 2
    await second.journal.close()


async def test_a_clock_that_is_set_while_podwatch_runs_changes_no_duration(tmp_path: Path) -> None:
    clock = ManualClock()
    podwatch = await begun(tmp_path / "journal.sqlite", clock)
    await trained(podwatch, 100)
    clock.offset -= 86_400
    clock.advance(100)
    podwatch.bus.say(EventName.PUBLISHED, "")
    clock.offset += 40 * 86_400
    clock.advance(100)
    podwatch.bus.say(EventName.PUBLISHED, "")
    events = await podwatch.journal.run(Journal.events)
    assert [e.fields["seconds"] for e in events if e.name is EventName.CLOCK_CHANGED] == [-86_400, 40 * 86_400]
    assert podwatch.seconds(Use.TRAINING) == 300
    clock.offset += 0.4  # slewed, not set
    podwatch.bus.say(EventName.PUBLISHED, "")
    assert len([e for e in await podwatch.journal.run(Journal.events) if e.name is EventName.CLOCK_CHANGED]) == 2
    await podwatch.journal.close()


async def test_another_database_does_not_continue_the_events_of_the_old_one(tmp_path: Path) -> None:
    path, clock = tmp_path / "journal.sqlite", ManualClock()
    first = await begun(path, clock)
    await trained(first, 300)
    first.look(10)
    await asyncio.sleep(0)
    kept = await first.journal.run(Journal.learned, LEDGER_KEY)
    await first.journal.close()
    for name in tmp_path.iterdir():
        name.unlink()
    rebuilt = AsyncJournal(Journal.open(path))
    for _ in range(10):
        await rebuilt.run(Journal.learn, LEDGER_KEY, kept)  # the ledger survived, the events did not
    await rebuilt.close()
    second = await begun(path, clock)
    assert second.seconds(Use.TRAINING) == 300
    await second.journal.close()


async def test_a_rebuilt_journal_begins_a_new_account(tmp_path: Path) -> None:
    path, clock = tmp_path / "journal.sqlite", ManualClock()
    first = await begun(path, clock)
    await trained(first, 300)
    await first.journal.close()
    path.write_bytes(b"not a database" * 100)
    second = await begun(path, clock)
    clock.advance(5)
    second.bus.say(EventName.TRAINER_ADOPTED, "", start_id="a", alive=True, ended_at=None)
    clock.advance(10)
    assert (second.seconds(Use.TRAINING), second.seconds(Use.UNKNOWN)) == (15, 0)
    await second.journal.close()


async def test_what_no_event_says_comes_from_what_the_daemon_shows(tmp_path: Path) -> None:
    clock = ManualClock()
    podwatch = await begun(tmp_path / "journal.sqlite", clock)
    clock.advance(30)
    view: DaemonView = views.healthy()
    podwatch.accountant.look(view)
    assert (podwatch.seconds(Use.TRAINING), podwatch.accountant.ledger.position) == (30, 85)
    await podwatch.journal.run(Journal.events)
    kept = await podwatch.journal.run(Journal.learned, LEDGER_KEY)
    assert from_dict(kept["ledger"]) == podwatch.accountant.ledger
    await podwatch.journal.close()
