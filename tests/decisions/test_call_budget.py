"""Billed calls of a day, as B2 counts them: one for each thousand names of a listing."""

from collections.abc import Iterator

from podwatch.store.budget import FREE_CALLS, RESERVED_CALLS, CallBudget
from podwatch.store.inventory import DocumentCache, take_inventory
from podwatch.store.remove import SaveRemover
from podwatch.store.retention import RetentionRules, plan
from tests.support.memory_objects import (
    AUTHOR,
    KEYS,
    AlwaysHolds,
    MemoryItem,
    MemoryObjects,
    intent_of,
    publisher,
    send,
)

MIDNIGHT = 1.7e9 // 86400 * 86400
TENFOLD = 100
"""Real objects for each object of this test: its 4 pieces are then a save of 47 GB in pieces of 128 MiB."""


class BilledObjects(MemoryObjects):
    def list(self, prefix: str) -> Iterator[MemoryItem]:
        items = list(super().list(prefix))
        many = sum(TENFOLD if "/w/" in item.key else 1 for item in items)
        self.calls["C"] += max(1, -(-many // 1000))
        return iter(items)


def test_a_day_with_a_save_every_35_minutes_stays_within_the_free_calls() -> None:
    """After a month of milestones, whose names every look at the inventory lists."""
    store, budget, rules = BilledObjects(), CallBudget.of_store("b2://bucket"), RetentionRules(keep_every=1)
    store.calls = {"C": 0}
    one, cache, step = publisher(store), DocumentCache(), 0
    for day in range(3):
        retained = 0
        for minute in range(0, 1440, 1 if day == 0 else 35):
            step += 10 if day == 0 else 1
            if day == 0 and minute >= 200:
                break
            store.wall = MIDNIGHT + day * 86400 + minute * 60.0
            save = intent_of(step, f"s{step}")
            one.publish(*send(store, save), AUTHOR)
            budget.count("main", store.calls, store.wall)
            names = sum(TENFOLD if "/w/" in key else 1 for key in store.data)
            if day and budget.allows(3 * names, store.wall):
                inventory = take_inventory(store, KEYS, cache)
                SaveRemover(store, KEYS, AlwaysHolds(), AlwaysHolds()).carry_out(plan(inventory, rules), inventory)
                retained += 1
            budget.count("main", store.calls, store.wall)
        if day:
            assert 0 < budget.spent(store.wall) <= FREE_CALLS
            assert retained >= 5, "retention waits for another day, and is not given up"
    assert store.calls["C"] > 0


def test_publications_have_their_share_of_each_day() -> None:
    noon = MIDNIGHT + 43200
    budget = CallBudget()
    budget.count("a", {"C": FREE_CALLS - RESERVED_CALLS // 2 - 1}, noon)
    assert budget.allows(1000, noon)
    assert not budget.allows(1001, noon)
    assert budget.allows(2000, noon + 40000), "later in the day less is kept back"
    budget.count("a", {"C": FREE_CALLS}, noon)
    budget.count("b", {"C": 10}, noon)
    assert budget.spent(noon) == FREE_CALLS + 10
    assert not budget.allows(0, MIDNIGHT + 86399)
    assert "billed" in budget.shortage(noon)
    assert budget.allows(0, MIDNIGHT + 86400), "another day"
    assert budget.shortage(MIDNIGHT + 86400) == ""
    other = CallBudget.of_store("s3://bucket")
    other.count("a", {"C": 10**6}, noon)
    assert other.allows(10**9, noon)
    assert other.shortage(noon) == ""
