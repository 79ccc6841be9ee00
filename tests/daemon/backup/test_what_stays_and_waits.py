"""What a backup leaves in the store although it is old, and what it lists another day."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from podwatch.config.settings import Settings
from podwatch.daemon.backup.backup import Backup, StoreParts
from podwatch.daemon.backup.connection import StoreConnection
from podwatch.daemon.backup.removal import StoreRetention
from podwatch.daemon.backup.stock import Stock
from podwatch.store.budget import FREE_CALLS
from podwatch.store.inventory import Inventory, SaveKey, Stored
from podwatch.store.restore.thread import RestoreThread
from tests.support.clock import ManualClock

OLD, NEW = Stored(10, "a" * 16), Stored(20, "b" * 16)


class Pod:
    """A backup whose store is never opened: whoever asks it fails."""

    def __init__(self) -> None:
        clock, sync = ManualClock(), {"store": "b2://bucket"}
        settings = Settings.model_validate({"run_id": "r", "trainer": {"output_dir": "/out"}, "sync": sync})
        run = cast(Any, SimpleNamespace(observes=False, withheld=str, in_use=frozenset, last_claim=lambda: None))
        self.connection = StoreConnection(settings, clock, print)
        self.stock = Stock(self.connection.keys, cast(Any, None))
        self.stock.inventory = Inventory(saves=(OLD, NEW))
        lease, named = cast(Any, None), dict[SaveKey, float]()
        self.retention = StoreRetention(settings.sync, self.connection, run, self.stock, lease, named, clock)
        parts = StoreParts(
            self.connection, lease, lease, named, self.stock, cast(Any, None), cast(Any, None), self.retention
        )
        self.backup = Backup(settings, run, cast(Any, None), cast(Any, None), clock, parts)


@pytest.fixture
def pod() -> Pod:
    return Pod()


def test_what_is_fetched_stays_in_the_store(pod: Pod) -> None:
    assert pod.backup._live() == set()
    restorer = SimpleNamespace(fetching=None)
    pod.backup.restores.append(RestoreThread(cast(Any, restorer), "restore"))
    assert pod.backup._live() == set()
    restorer.fetching = OLD.key
    assert pod.backup._live() == {OLD.key}


def test_what_is_sent_and_what_the_pod_uses_stay_in_the_store(pod: Pod) -> None:
    """An upload that pauses for a day is no rubbish, and a resume may come back to what it began from."""
    saves = (SimpleNamespace(stored_key=(30, "c" * 16)),)
    pod.backup._sending = cast(Any, SimpleNamespace(saves=saves))
    assert pod.backup._live() == {(30, "c" * 16)}
    cast(Any, pod.backup._run).in_use = lambda: frozenset({10})
    assert pod.backup._live() == {(30, "c" * 16), OLD.key}


async def test_without_free_listings_old_saves_wait_and_the_status_says_so(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def call(work: Any) -> None:
        asked.append(work)
        raise OSError("the store was asked")

    monkeypatch.setattr(pod.connection, "call", call)
    pod.connection.count("an upload", {"C": FREE_CALLS})
    assert not await pod.retention.prune(())
    assert not await pod.backup._list_again()
    assert not asked
    assert "free listings of today" in " ".join(pod.backup._warnings())
    pod.connection.count("an upload", {"C": FREE_CALLS})  # all that it has made so far: nothing new
    cast(ManualClock, pod.retention.clock).advance(86400.0)
    with pytest.raises(OSError, match="was asked"):
        await pod.backup._list_again()
    assert not pod.connection.shortage
