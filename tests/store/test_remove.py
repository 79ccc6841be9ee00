"""Deletions in the store: in which order, what is looked at again just before, and what is never touched."""

from collections.abc import Callable

import pytest

from podwatch.domain.checkpoint import FileEntry
from podwatch.store.documents import SaveExports
from podwatch.store.interfaces import Permit
from podwatch.store.inventory import Inventory, take_inventory
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import LeaseUnsettled, StoreOutage, StoreRefused
from podwatch.store.publish import LeaseLost
from podwatch.store.remove import Removed, SaveRemover
from podwatch.store.retention import RetentionPlan, RetentionRules, plan
from tests.support.memory_objects import AUTHOR, KEYS, AlwaysHolds, MemoryObjects, intent_of, publisher, send

DAY = 86400.0
RULES = RetentionRules(keep_last=2, keep_every=0)


class World:
    """Four saves, two days apart, of which retention deletes the first two; a claim; and an unfinished upload."""

    def __init__(self) -> None:
        self.store, self.lease = MemoryObjects(), AlwaysHolds()
        self.store.put(KEYS.claim(1, "aa"), b"{}")
        self.publisher = publisher(self.store, self.lease)
        send(self.store, intent_of(9, "u9"))
        for step in (1, 2, 3, 4):
            self.store.wall += 2 * DAY
            self.publish(step)
        self.inventory = take_inventory(self.store, KEYS)
        self.plan = plan(self.inventory, RULES)
        assert [verdict.save.step for verdict in self.plan.deleted] == [1, 2]
        assert [one.step for one in self.plan.unfinished] == [9]
        self.deletions = list[str]()
        self.store.before = self.note

    def note(self, operation: str, key: str) -> None:
        if operation == "delete":
            self.deletions.append(key.removeprefix(KEYS.root))

    def publish(self, step: int) -> None:
        self.publisher.publish(*send(self.store, intent_of(step, f"s{step}")), AUTHOR)

    def carry_out(self, wanted: RetentionPlan | None = None, inventory: Inventory | None = None) -> Removed:
        remover = SaveRemover(self.store, KEYS, self.lease, self.lease)
        return remover.carry_out(wanted or self.plan, inventory or self.inventory)

    def names(self, step: int, save_id: str) -> list[str]:
        folder = KEYS.save(step, save_id)
        return [key.removeprefix(folder) for key in sorted(self.store.data) if key.startswith(folder)]

    def when_deleting(self, ending: str, act: Callable[[], object]) -> None:
        """``act`` just before the first deletion of such a name."""

        def before(operation: str, key: str) -> None:
            if operation == "delete" and key.endswith(ending):
                self.store.before = self.note
                act()
            self.note(operation, key)

        self.store.before = before


@pytest.fixture
def world() -> World:
    return World()


def test_the_manifest_goes_first_and_the_intent_last(world: World) -> None:
    removed = world.carry_out()
    assert [(step, save_id) for step, save_id, _ in removed.saves] == [(1, "s1"), (2, "s2"), (9, "u9")]
    assert (world.names(1, "s1"), world.names(2, "s2"), world.names(9, "u9")) == ([], [], [])
    first = [name for name in world.deletions if name.startswith("step_1/")]
    assert (first[0], first[-1]) == ("step_1/s1/manifest.json", "step_1/s1/intent.json")
    assert [name for name in world.deletions if name.startswith("step_9/")][-1] == "step_9/u9/intent.json"
    assert [save.step for save in take_inventory(world.store, KEYS).saves] == [3, 4]
    assert removed.warning == ""


def test_what_a_crash_leaves_is_an_upload_that_goes_a_day_later(world: World) -> None:
    def crash() -> None:
        raise StoreOutage("killed", where="here")

    world.when_deleting("piece-00001", crash)
    with pytest.raises(StoreOutage):
        world.carry_out()
    world.store.before = lambda _operation, _key: None
    inventory = take_inventory(world.store, KEYS)
    assert [save.step for save in inventory.saves] == [2, 3, 4]
    left = plan(inventory, RULES)
    assert (1, "s1") in {one.key for one in left.unfinished}
    world.carry_out(left, inventory)
    assert world.names(1, "s1") == []


def test_a_pointer_that_was_written_since_the_plan_ends_the_round(world: World) -> None:
    """It can name any of them."""
    world.publish(5)
    assert world.carry_out().saves == ()
    assert world.deletions == []


def test_pointers_are_listed_again_before_each_deletion(world: World) -> None:
    world.when_deleting("step_1/s1/intent.json", lambda: world.publish(5))
    assert [step for step, _, _ in world.carry_out().saves] == [1]
    assert "manifest.json" in world.names(2, "s2")
    assert "intent.json" in world.names(9, "u9")


def test_and_before_each_unfinished_upload(world: World) -> None:
    world.when_deleting("step_2/s2/intent.json", lambda: world.publish(5))
    assert [step for step, _, _ in world.carry_out().saves] == [1, 2]
    assert "intent.json" in world.names(9, "u9")


def test_a_save_that_was_pinned_since_stays(world: World) -> None:
    world.store.put(KEYS.save(1, "s1") + "pinned", b"\n")
    assert [step for step, _, _ in world.carry_out().saves] == [2, 9]
    assert "manifest.json" in world.names(1, "s1")


def test_exports_go_with_their_save_and_foreign_objects_stay(world: World) -> None:
    folder = KEYS.save(1, "s1")
    files = (FileEntry("model.safetensors", "hf", 3, 1),)
    world.store.put(folder + "exports.json", SaveExports("run", 1, "s1", 1.7e9, files).to_bytes())
    for name in ("hf/model.safetensors", "hf/notes.txt", "w/other"):
        world.store.put(folder + name, b"abc")
    world.carry_out()
    assert world.names(1, "s1") == ["hf/notes.txt", "w/other"]


def test_exports_that_cannot_be_read_name_nothing(world: World) -> None:
    folder = KEYS.save(1, "s1")
    world.store.put(folder + "exports.json", b'{"files": "all"}')
    world.store.put(folder + "hf/model.safetensors", b"abc")
    world.carry_out()
    assert world.names(1, "s1") == ["hf/model.safetensors"]


@pytest.mark.parametrize("name", ["manifest.json", "w/model.piece-00000"])
def test_an_upload_that_went_on_since_the_plan_stays(world: World, name: str) -> None:
    """A pod that was away has continued it, or finished it."""
    world.store.wall += 1.0
    world.store.put(KEYS.save(9, "u9") + name, b"x" * 100)
    assert [step for step, _, _ in world.carry_out().saves] == [1, 2]
    assert "intent.json" in world.names(9, "u9")


def test_old_pointers_and_temporary_objects_go(world: World) -> None:
    world.store.put(KEYS.tmp + "clock", b"x")
    world.store.wall += 2 * DAY
    world.publish(5)
    world.store.before = world.note
    inventory = take_inventory(world.store, KEYS)
    wanted = plan(inventory, RetentionRules(keep_last=9, keep_every=0, keep_pointers=1))
    world.carry_out(wanted, inventory)
    left = take_inventory(world.store, KEYS)
    assert ([seen.seq for seen in left.pointers], left.tmp) == ([5], ())
    assert left.newest is not None


# -- ownership


class Confirms(AlwaysHolds):
    """Each confirmation is valid for 30 s of a clock that moves with each object that is deleted; the run is lost after
    ``most`` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.now, self.most, self.asked = 0.0, most, 0

    def boottime(self) -> float:
        return self.now

    def confirm(self, store: Objects) -> Permit:
        self.asked += 1
        if self.asked > self.most:
            raise LeaseLost("another pod holds the run")
        return Permit(1, self.now + 30.0)


def slow(world: World, most: int, seconds: float) -> Confirms:
    world.lease = lease = Confirms(most)
    world.store.boottime = lease.boottime

    def before(operation: str, key: str) -> None:
        world.note(operation, key)
        if operation == "delete" and key in world.store.data:
            lease.now += seconds

    world.store.before = before
    return lease


def test_a_pod_that_lost_the_run_deletes_nothing(world: World) -> None:
    slow(world, 0, 0.0)
    with pytest.raises(LeaseLost):
        world.carry_out()
    assert world.deletions == []


def test_ownership_is_confirmed_before_each_save(world: World) -> None:
    slow(world, 1, 0.0)
    with pytest.raises(LeaseLost):
        world.carry_out()
    assert world.names(1, "s1") == []
    assert "manifest.json" in world.names(2, "s2")


def test_what_takes_longer_than_a_confirmation_is_confirmed_again(world: World) -> None:
    lease = slow(world, 99, 7.0)
    world.carry_out()
    assert (world.names(1, "s1"), world.names(2, "s2")) == ([], [])
    assert lease.asked > 3


def test_nothing_is_deleted_by_an_old_confirmation(world: World) -> None:
    """The run is lost while the objects of the first save are deleted: what is left of it is an unfinished upload."""
    slow(world, 1, 31.0)
    with pytest.raises((LeaseLost, LeaseUnsettled)):
        world.carry_out()
    assert "manifest.json" in world.names(2, "s2")
    assert "intent.json" in world.names(1, "s1")


# -- a store that refuses


def test_a_key_that_cannot_delete_is_a_warning(world: World) -> None:
    def refuse() -> None:
        raise StoreRefused("permission", "this key cannot delete", where="here", fix="another key")

    world.when_deleting("step_2/s2/manifest.json", refuse)
    removed = world.carry_out()
    assert [step for step, _, _ in removed.saves] == [1]
    assert "cannot delete" in removed.warning


def test_a_pointer_that_cannot_be_read_is_a_warning(world: World) -> None:
    world.store.put(KEYS.pointer(1, 9, "f0"), b"{")
    inventory = take_inventory(world.store, KEYS)
    removed = world.carry_out(plan(inventory, RULES), inventory)
    assert [step for step, _, _ in removed.saves] == [9]
    assert "cannot be read" in removed.warning
