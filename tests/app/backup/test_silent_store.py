"""A call to the store that hangs is shown, and so is its end."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from podwatch.app.backup.connection import SILENT, SILENT_SECONDS, StoreConnection
from podwatch.config.settings import Settings
from podwatch.domain.event import Event, EventName
from podwatch.store.objects.base import Objects
from tests.support.clock import ManualClock


class Connected:
    def __init__(self, root: Path) -> None:
        self.clock, self.events = ManualClock(), list[Event]()
        settings = Settings.model_validate(
            {"run_id": "r", "trainer": {"output_dir": "/out"}, "sync": {"store": f"file://{root}"}}
        )
        self.connection = StoreConnection(settings, self.clock, self.events.append)

    def pass_seconds(self, seconds: float) -> None:
        for _ in range(int(seconds / 5)):
            self.clock.advance(5.0)
            self.connection.judge_silence()

    @property
    def names(self) -> list[EventName]:
        return [event.name for event in self.events]


@pytest.fixture
def connected(tmp_path: Path) -> Connected:
    return Connected(tmp_path / "store")


async def begun(connected: Connected, work: Any) -> "asyncio.Task[Any]":
    task = asyncio.create_task(connected.connection.call(work))
    while not connected.connection._worker.busy_seconds:
        await asyncio.sleep(0.001)
    return task


async def test_a_call_that_hangs_is_trouble_until_it_returns(connected: Connected) -> None:
    free = threading.Event()
    task = await begun(connected, lambda _store: free.wait(30))
    connected.pass_seconds(SILENT_SECONDS)
    assert connected.connection.works is not False
    connected.pass_seconds(10)
    assert connected.connection.works is False
    assert connected.connection.trouble is not None
    assert SILENT in connected.connection.trouble.error
    assert connected.names == [EventName.SYNC_FAILED]
    free.set()
    await task
    connected.pass_seconds(5)
    assert connected.connection.works is True
    assert connected.names == [EventName.SYNC_FAILED, EventName.STORE_RECOVERED]


async def test_long_work_that_the_store_answers_is_no_silence(connected: Connected) -> None:
    asked, free = threading.Semaphore(0), threading.Event()

    def work(store: Objects) -> None:
        while not free.is_set():
            asked.acquire()
            store.calls["C"] += 1

    task = await begun(connected, work)
    for answered in range(1, 10):
        asked.release()
        while (store := connected.connection._objects) is None or store.calls["C"] < answered:
            await asyncio.sleep(0.001)  # the store's thread opens the store before it works, so it can be None at first
        connected.pass_seconds(SILENT_SECONDS - 10)
    free.set()
    asked.release()
    await task
    assert not connected.events


async def test_an_idle_connection_is_not_silent(connected: Connected) -> None:
    await connected.connection.call(lambda _store: os.getpid())
    connected.pass_seconds(3 * SILENT_SECONDS)
    assert not connected.events
