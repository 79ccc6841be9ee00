"""What is stored, published and removed is never decided by a database that was away meanwhile."""

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from podwatch.domain.errors import HostError
from podwatch.domain.run import IntentKind
from podwatch.journal import Journal
from podwatch.policy.store_retention import RemoteRemoval, plan_remote
from podwatch.stores.base import ObjectStore
from podwatch.sync.store_removal import Sweeper
from tests.sync.conftest import Run, Shifted, World, until

pytestmark = pytest.mark.slow


def lose(journal: Journal) -> None:
    """The database cannot be read any more, as podwatch notices now."""
    journal._guards = True
    other = journal.path.with_name("other")
    other.write_bytes(b"no database" * 1000)
    journal._connection.close()
    journal._connection = sqlite3.connect(other, isolation_level=None, check_same_thread=False)
    assert journal.published() == []
    assert journal.obstacle is not None


def withheld(journal: Journal) -> Callable[[], str]:
    return lambda: "" if journal.obstacle is None else journal.obstacle.text


async def test_what_is_stored_is_read_again_after_the_return(local: World, run: Run) -> None:
    local.withheld = withheld(local.journal)  # type: ignore[method-assign]
    syncer = await run(local)
    local.write_set(5, size=1000)
    local.scan()
    syncer.notify()
    await until(lambda: syncer.status().last_step == 5)
    known = syncer.status().stored
    lose(local.journal)
    syncer.session.note_stored(local.journal.published())  # whoever read it at this moment
    assert syncer.status().stored == frozenset()
    local.journal.return_to_disk()
    syncer.notify()
    await until(lambda: syncer.session.era == local.journal.era, seconds=10)
    await until(lambda: syncer.status().stored == known)
    local.write_set(10, size=1000)
    local.scan()
    syncer.notify()
    await until(lambda: syncer.status().last_step == 10)
    assert local.violations() == []


async def test_a_removal_that_was_decided_before_the_loss_is_refused(
    local: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.keep_last = 1
    local.__post_init__()
    syncer = await run(local)
    now = [0.0]
    syncer._clock.wall = lambda: now[0]  # type: ignore[method-assign]
    retention = "podwatch.sync.store_removal.plan_remote"

    def away_and_back(*given: Any, **more: Any) -> tuple[RemoteRemoval, ...]:
        found = plan_remote(*given, **more)
        if found:
            lose(local.journal)
            local.journal.return_to_disk()
        return found

    monkeypatch.setattr(retention, away_and_back)
    for step in (5, 10, 15):
        now[0] += 7 * 3600
        local.write_set(step, size=1000)
        local.scan()
        await syncer.sync_now()
    assert {s for s, _ in syncer.status().stored} == {5, 10, 15}
    assert local.journal.open_intents(IntentKind.REMOTE_DELETE) == []
    monkeypatch.undo()
    now[0] += 7 * 3600
    local.write_set(20, size=1000)
    local.scan()
    await syncer.sync_now()
    assert {s for s, _ in syncer.status().stored} == {15, 20}


async def test_nothing_is_swept_by_a_journal_in_memory(local: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows of no upload that was begun."""
    local.journal.close()
    local.journal = Journal.in_memory(local.journal.path, "away", "", "")
    store = local.store()
    upload = store.begin_large(f"{local.keys.root}/step_5/s/p/f", 100)
    removed: list[object] = []

    def cancel(self: ObjectStore, item: object) -> None:
        removed.append(item)

    monkeypatch.setattr(type(store), "cancel_large", cancel)
    sweeper = Sweeper(store, local.keys, local.journal, Shifted(30 * 86400.0))
    assert [item.identifier for item in sweeper.look()] == [upload.id]
    with pytest.raises(HostError, match="cannot clean up the store"):
        sweeper.carry_out()
    assert removed == []
    store.close()


async def test_an_unneeded_save_that_was_found_before_the_loss_stays(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database goes and comes back between the look at the store and the removal."""
    store = local.store()
    prefix = local.keys.save(3, "gone")
    store.put_bytes(f"{prefix}trainer/f", b"x")
    sweeper = Sweeper(store, local.keys, local.journal, Shifted(30 * 86400.0))
    assert [item.key for item in sweeper.look()] == [prefix]
    still_read = Journal.refuse_unread

    def away_and_back(journal: Journal, era: int, what: str) -> None:
        still_read(journal, era, what)
        if what.startswith("cannot clean up"):
            lose(journal)
            journal.return_to_disk()

    monkeypatch.setattr(Journal, "refuse_unread", away_and_back)
    with pytest.raises(HostError, match="opened again since"):
        sweeper.carry_out()
    assert [found.key for found in store.list(prefix)] == [f"{prefix}trainer/f"]
    assert local.journal.open_intents() == []
    store.close()


async def test_a_publication_whose_record_cannot_be_read_stops_no_later_one(local: World, run: Run) -> None:
    local.journal.open_intent(IntentKind.PUBLISH, {"act": "pointer", "step": 5.5, "pointer": "{"})
    syncer = await run(local)
    local.write_set(5, size=1000)
    local.scan()
    syncer.notify()
    await until(lambda: syncer.status().last_step == 5)
    assert local.journal.open_intents(IntentKind.PUBLISH) == []
    assert local.violations() == []
