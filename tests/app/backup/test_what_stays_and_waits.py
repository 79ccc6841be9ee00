"""What a backup leaves in the store although it is old, and what it lists another day."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from podwatch.app.backup.backup import Backup
from podwatch.app.backup.connection import StoreConnection
from podwatch.config.settings import Settings
from podwatch.store.budget import FREE_CALLS
from podwatch.store.inventory import Inventory, Stored
from podwatch.store.restore.thread import RestoreThread
from tests.support.clock import ManualClock

OLD, NEW = Stored(10, "a" * 16), Stored(20, "b" * 16)


class Pod:
    """A backup whose store is never opened: whoever asks it fails."""

    def __init__(self) -> None:
        clock, sync = ManualClock(), {"store": "b2://bucket"}
        settings = Settings.model_validate({"run_id": "r", "trainer": {"output_dir": "/out"}, "sync": sync})
        side = {"observes": False, "withheld": str, "in_use": frozenset, "last_claim": lambda: None, "identity": ()}
        run, catalogue = cast(Any, SimpleNamespace(**side)), cast(Any, SimpleNamespace(records=None, sets=()))
        self.connection = StoreConnection(settings, clock, print)
        self.clock, nothing = clock, cast(Any, None)
        self.backup = Backup(settings, run, catalogue, nothing, clock, self.connection, nothing, nothing)
        self.backup._stored.inventory = Inventory(saves=(OLD, NEW))


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
    pod.backup._queue = cast(Any, SimpleNamespace(saves=saves))
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
    assert not await pod.backup._stored.prune(())
    assert not await pod.backup._list_again()
    assert not asked
    assert "free listings of today" in " ".join(pod.backup._warnings())
    pod.connection.count("an upload", {"C": FREE_CALLS})  # all that it has made so far: nothing new
    pod.clock.advance(86400.0)
    with pytest.raises(OSError, match="was asked"):
        await pod.backup._list_again()
    assert not pod.connection.shortage
