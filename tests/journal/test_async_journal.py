"""The journal's thread: order, errors, cancellation, closing."""

import asyncio
import threading
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError
from podwatch.domain.event import Event, EventName
from podwatch.journal import AsyncJournal, Journal


def note(n: int) -> Event:
    return Event(EventName.PRUNED, float(n), f"number {n}")


async def test_calls_and_posts_keep_their_order(tmp_path: Path) -> None:
    journal = AsyncJournal(Journal.open(tmp_path / "j.sqlite"))
    for n in range(20):
        journal.post(Journal.add_event, note(n))
    last = await journal.run(Journal.add_event, note(20))
    assert last.id == 21
    await journal.run(Journal.record, "a", {"a": 1})
    assert [e.wall for e in journal.sync.events()] == [float(n) for n in range(21)]
    await journal.close()
    await journal.close()
    with pytest.raises(HostError, match="closed"):
        await journal.run(Journal.incidents)
    journal.post(Journal.add_event, note(1))
    assert journal.dropped == 1


async def test_errors_reach_the_caller_and_posts_are_counted(tmp_path: Path) -> None:
    def explode(_: Journal) -> None:
        raise HostError("bang")

    journal = AsyncJournal(Journal.open(tmp_path / "j.sqlite"))
    with pytest.raises(HostError, match="bang"):
        await journal.run(explode)
    journal.post(explode)
    assert await journal.run(Journal.incidents) == []
    assert journal.dropped == 1
    await journal.close()


async def test_a_cancelled_caller_does_not_break_the_thread(tmp_path: Path) -> None:
    gate = threading.Event()

    def wait(_: Journal) -> str:
        gate.wait(10)
        return "done"

    journal = AsyncJournal(Journal.open(tmp_path / "j.sqlite"))
    task = asyncio.create_task(journal.run(wait))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert await journal.run(Journal.incidents) == []
    await journal.close()


async def test_closing_writes_what_was_posted(tmp_path: Path) -> None:
    journal = AsyncJournal(Journal.open(tmp_path / "j.sqlite"))
    for n in range(50):
        journal.post(Journal.add_event, note(n))
    await journal.close()
    again = Journal.open(tmp_path / "j.sqlite")
    assert len(again.events()) == 50
    again.close()
