"""Publishing over a real lease and a store in memory: what is written in which order, what ends it, and how old the
confirmation that this pod holds the run can be."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from podwatch.config.settings import SyncSettings
from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import Claim, Heartbeat, HolderState, LeaseAction, Pod
from podwatch.store.documents import RunPointer, SaveManifest
from podwatch.store.interfaces import Author
from podwatch.store.inventory import take_inventory
from podwatch.store.lease import Lease
from podwatch.store.lease_rules import CONFIRMED_SECONDS, LATE_SECONDS, LeaseTiming
from podwatch.store.objects.base import SMALL_SECONDS
from podwatch.store.objects.errors import LeaseUnsettled, StoreOutage
from podwatch.store.publish import LeaseLost, PiecesMissing, Publisher
from tests.support.memory_objects import AUTHOR, KEYS, MemoryObjects, intent_of, send

RIVAL = Pod("rival", "machine2", "boot2", "place2", "pod2")


@dataclass
class OwnPod:
    now: float = 0.0
    last: Claim | None = None
    claims: list[Claim] = field(default_factory=list)

    def boottime(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.7e9 + self.now

    def trainer_alive(self) -> bool:
        return True

    def last_claim(self) -> Claim | None:
        return self.last

    def claimed(self, claim: Claim) -> None:
        self.claims.append(claim)

    def job_ended(self, process: str) -> bool:
        return False


class World:
    """A pod that holds the run, its clock and its store."""

    def __init__(self) -> None:
        self.pod, self.store, self.writes = OwnPod(), MemoryObjects(), list[str]()
        self.store.boottime = self.pod.boottime
        self.lease = Lease(Pod("me", "machine", "boot", "place", "pod"), KEYS, self.pod, self.pod)
        self.lease.update(self.store)
        self.later(LeaseTiming().claim_wait)
        assert self.lease.update(self.store).act is LeaseAction.HOLD
        self.publisher = Publisher(self.store, KEYS, self.lease, self.pod)
        self.store.after = lambda key: self.writes.append(key.removeprefix(KEYS.root))

    def later(self, seconds: float) -> None:
        """The store's clock moves, too."""
        self.pod.now += seconds
        self.store.wall += seconds

    def pointers(self) -> list[RunPointer]:
        return [
            RunPointer.from_bytes(data) for key, (data, _) in sorted(self.store.data.items()) if "/pointers/" in key
        ]

    def lose(self, step: int, save_id: str, name: str) -> None:
        del self.store.data[KEYS.save(step, save_id) + name]

    def when_stored(self, ending: str, act: object) -> None:
        """``act`` just after the first object with such a name was stored."""

        def after(key: str) -> None:
            if key.endswith(ending):
                self.store.after = lambda _: None
                act()  # type: ignore[operator]

        self.store.after = after


@pytest.fixture
def world() -> World:
    return World()


# -- the lease


def test_the_claim_wait_is_longer_than_all_that_a_former_holder_can_still_do() -> None:
    """It confirms, begins a request within the time of that, and the store carries it out late."""
    assert LeaseTiming().claim_wait > CONFIRMED_SECONDS + SMALL_SECONDS + LATE_SECONDS
    assert SyncSettings().claim_wait == LeaseTiming().claim_wait


def test_a_pod_publishes_only_after_the_claim_wait() -> None:
    pod, store = OwnPod(), MemoryObjects()
    lease = Lease(Pod("me", "machine", "boot", "place", "pod"), KEYS, pod, pod)
    publisher = Publisher(store, KEYS, lease, pod)
    assert lease.update(store).act is LeaseAction.SETTLE
    pod.now += CONFIRMED_SECONDS + SMALL_SECONDS + LATE_SECONDS
    with pytest.raises(LeaseUnsettled):
        publisher.publish(*send(store, intent_of(5, "s1")), AUTHOR)
    assert not any("pointers" in key or "manifest" in key for key in store.data)


def test_a_claim_that_is_written_after_a_freeze_does_not_arrive(world: World) -> None:
    pod = OwnPod()
    store = MemoryObjects(boottime=pod.boottime)
    lease = Lease(Pod("me", "machine", "boot", "place", "pod"), KEYS, pod, pod)

    def freeze(operation: str, key: str) -> None:
        if operation == "put" and "/claims/" in key:
            pod.now += CONFIRMED_SECONDS + 1

    store.before = freeze
    with pytest.raises(LeaseUnsettled):
        lease.update(store)
    assert not any("/claims/" in key for key in store.data)


def test_a_claim_of_another_pod_is_noticed_at_the_next_publication(world: World) -> None:
    world.publisher.publish(*send(world.store, intent_of(5, "s1")), AUTHOR)
    world.store.put(KEYS.claim(2, "aa"), b"{}")
    world.later(CONFIRMED_SECONDS)
    before = dict(world.store.data)
    sent = send(world.store, intent_of(6, "s2"))
    with pytest.raises(LeaseLost):
        world.publisher.publish(*sent, AUTHOR)
    new = world.store.data.keys() - before.keys()
    assert not any("pointers" in key or "manifest" in key for key in new)
    assert world.lease.decision.act is LeaseAction.SUPERSEDED
    world.store.data.pop(KEYS.claim(2, "aa"))
    assert world.lease.update(world.store).act is LeaseAction.SUPERSEDED, "for the rest of this life"
    with pytest.raises(LeaseLost):
        world.publisher.publish(*sent, AUTHOR)


def test_a_heartbeat_of_another_pod_is_noticed_at_the_next_heartbeat(world: World) -> None:
    world.lease.beat(world.store, HolderState.RUNNING, Heartbeat())
    rival = Claim(2, "aa", writer_id="rival")
    world.store.put(KEYS.claim(2, "aa"), b"{}")
    world.store.put(
        KEYS.heartbeat, Heartbeat().signed(RIVAL, rival, HolderState.RUNNING, "2026-01-01T00:00:00Z").to_bytes()
    )
    world.later(60.0)
    theirs = world.store.data[KEYS.heartbeat]
    assert world.lease.beat(world.store, HolderState.RUNNING, Heartbeat()).act is LeaseAction.SUPERSEDED
    assert world.store.data[KEYS.heartbeat] == theirs, "it does not replace the holder's heartbeat"
    assert not world.lease.may_upload


def test_a_pod_that_was_frozen_looks_at_the_claims_before_it_writes_a_heartbeat(world: World) -> None:
    """The holder since then has not written one yet."""
    world.lease.beat(world.store, HolderState.RUNNING, Heartbeat())
    world.store.put(KEYS.claim(2, "aa"), b"{}")
    world.later(130.0)
    assert world.lease.beat(world.store, HolderState.RUNNING, Heartbeat()).act is LeaseAction.SUPERSEDED


def test_a_confirmation_is_valid_for_thirty_seconds(world: World) -> None:
    world.later(CONFIRMED_SECONDS)
    listings = list[str]()
    world.store.before = lambda operation, key: listings.append(key) if operation == "list" else None
    began = world.pod.now
    assert world.lease.confirm(world.store).until == began + CONFIRMED_SECONDS
    assert listings.count(KEYS.claims) == 1
    world.later(10.0)
    assert world.lease.confirm(world.store).until == began + CONFIRMED_SECONDS, "not longer for being used"
    assert listings.count(KEYS.claims) == 1
    world.later(10.0)
    assert world.lease.confirm(world.store).until == began + 20.0 + CONFIRMED_SECONDS
    assert listings.count(KEYS.claims) == 2


def test_a_claim_that_was_deleted_is_made_again_and_waits_again(world: World) -> None:
    (key,) = (key for key in world.store.data if "/claims/" in key)
    del world.store.data[key]
    world.later(CONFIRMED_SECONDS)
    with pytest.raises(LeaseUnsettled):
        world.publisher.publish(*send(world.store, intent_of(5, "s1")), AUTHOR)
    assert world.lease.decision.act is LeaseAction.SETTLE
    assert world.pointers() == []


# -- publishing


def test_in_which_order(world: World) -> None:
    intent = intent_of(5, "s1")
    world.publisher.begin(intent)
    world.publisher.publish(*send(world.store, intent), AUTHOR)
    own = [name for name in world.writes if name.startswith("step_5/s1/")]
    assert (own[0], own[-1]) == ("step_5/s1/intent.json", "step_5/s1/manifest.json")
    last = [name.partition("/")[0] for name in world.writes[-3:]]
    assert last == ["step_5", "pointers", "latest.json"]


@pytest.mark.parametrize("name", ["w/model.piece-00001", "w/sub/state", "intent.json"])
def test_nothing_is_published_while_an_object_is_missing(world: World, name: str) -> None:
    sent = send(world.store, intent_of(5, "s1"))
    world.lose(5, "s1", name)
    with pytest.raises(PiecesMissing) as error:
        world.publisher.publish(*sent, AUTHOR)
    assert error.value.names == (name,)
    assert world.pointers() == []
    assert KEYS.save(5, "s1") + "manifest.json" not in world.store.data


@pytest.mark.parametrize(("body", "hashes"), [(b"short", False), (b"x" * 100, True)], ids=["size", "hash"])
def test_nor_while_one_is_different(world: World, body: bytes, hashes: bool) -> None:
    sent = send(world.store, intent_of(5, "s1"))
    world.store.hashes = hashes
    world.store.put(KEYS.save(5, "s1") + "w/model.piece-00000", body)
    with pytest.raises(PiecesMissing):
        world.publisher.publish(*sent, AUTHOR)
    assert world.pointers() == []


def test_nor_while_one_was_never_sent_by_this_pod(world: World) -> None:
    """An object of that name and size lies there: whose bytes it has is not known."""
    sent = send(world.store, intent_of(5, "s1"))
    del sent[1]["w/model.piece-00001"]
    with pytest.raises(PiecesMissing):
        world.publisher.publish(*sent, AUTHOR)
    assert world.pointers() == []


@pytest.mark.parametrize("ending", ["manifest.json", "intent.json"])
def test_no_pointer_is_written_once_the_confirmation_is_too_old(world: World, ending: str) -> None:
    """The pod is frozen in the middle; the next try confirms again and goes through."""
    sent = send(world.store, intent_of(5, "s1"))
    world.later(CONFIRMED_SECONDS)
    if ending == "manifest.json":
        world.when_stored(ending, lambda: world.later(CONFIRMED_SECONDS + 1))
    else:  # between the confirmation and the manifest

        def freeze(operation: str, key: str) -> None:
            if operation == "list" and "step_5" in key:
                world.later(CONFIRMED_SECONDS + 1)
                world.store.before = lambda _operation, _key: None

        world.store.before = freeze
    with pytest.raises(LeaseUnsettled):
        world.publisher.publish(*sent, AUTHOR)
    assert world.pointers() == []
    assert (KEYS.save(5, "s1") + "manifest.json" in world.store.data) is (ending == "manifest.json")
    saved = world.publisher.publish(*sent, AUTHOR)
    (pointer,) = world.pointers()
    assert pointer.manifest_hash == saved.hash


def test_a_save_can_be_stored_without_becoming_the_newest(world: World) -> None:
    world.publisher.publish(*send(world.store, intent_of(10, "s1")), AUTHOR)
    saved = world.publisher.publish(*send(world.store, intent_of(5, "s2")), AUTHOR, newest=False)
    assert (saved.seq, [pointer.step for pointer in world.pointers()]) == (0, [10])
    newest = take_inventory(world.store, KEYS).newest
    assert newest is not None
    assert newest.step == 10


def test_the_copy_for_people_may_fail(world: World) -> None:
    sent = send(world.store, intent_of(5, "s1"))

    def fail(operation: str, key: str) -> None:
        if operation == "put" and key == KEYS.latest:
            raise StoreOutage("away", where=key)

    world.store.before = fail
    world.publisher.publish(*sent, AUTHOR)
    assert [pointer.step for pointer in world.pointers()] == [5]


def test_a_pointer_whose_answer_was_lost_uses_its_number_up(world: World) -> None:
    """The store may carry the request out later."""

    def lost() -> None:
        raise StoreOutage("no answer", where="pointers")

    sent = send(world.store, intent_of(5, "s1"))
    late = dict[str, tuple[bytes, float]]()

    def fail(key: str) -> None:
        if "/pointers/" in key:
            world.store.after = lambda _: None
            late[key] = world.store.data.pop(key)
            lost()

    world.store.after = fail
    with pytest.raises(StoreOutage):
        world.publisher.publish(*sent, AUTHOR)
    first = world.publisher.publish(*sent, AUTHOR)
    second = world.publisher.publish(*send(world.store, intent_of(6, "s2")), AUTHOR)
    world.store.data.update(late)
    numbers = [pointer.seq for pointer in world.pointers()]
    assert len(numbers) == len(set(numbers)) == 3
    assert {pointer.manifest_hash for pointer in world.pointers()} == {first.hash, second.hash}
    newest = take_inventory(world.store, KEYS).newest
    assert newest is not None
    assert newest.key == second.key


def test_a_manifest_has_the_same_bytes_at_each_try_and_in_each_life(world: World) -> None:
    """A request of an earlier try can still arrive: it must not change what a pointer names."""
    sent = send(world.store, intent_of(5, "s1"))
    name = KEYS.save(5, "s1") + "manifest.json"
    world.publisher.publish(*sent, AUTHOR, newest=False)
    written = world.store.data[name][0]
    world.later(5.0)
    del world.store.data[name]
    world.publisher.publish(*sent, AUTHOR)
    assert world.store.data[name][0] == written
    world.later(5.0)
    again = Publisher(world.store, KEYS, world.lease, world.pod)
    saved = again.publish(*sent, AUTHOR)
    assert world.store.data[name][0] == written
    assert saved.hash == world.pointers()[-1].manifest_hash


def test_a_manifest_of_other_bytes_is_replaced_by_the_next_life(world: World) -> None:
    world.publisher.publish(*send(world.store, intent_of(5, "s1")), AUTHOR)
    world.later(5.0)
    sent = send(world.store, intent_of(5, "s1"), b"changed " * 40)
    saved = Publisher(world.store, KEYS, world.lease, world.pod).publish(*sent, AUTHOR)
    assert saved.manifest is not None
    assert saved.manifest.files == sent[0].hashed(sent[1])
    assert take_inventory(world.store, KEYS).newest is not None


def test_a_manifest_of_other_objects_is_replaced(world: World) -> None:
    sent = send(world.store, intent_of(5, "s1"))
    name = KEYS.save(5, "s1") + "manifest.json"
    world.store.put(name, json.dumps({"kind": "podwatch-manifest"}).encode())
    saved = world.publisher.publish(*sent, AUTHOR)
    assert SaveManifest.from_bytes(world.store.data[name][0]) == saved.manifest


def test_numbers_go_on_above_every_pointer_of_this_pod(world: World) -> None:
    for number in (1, 2):
        world.publisher.publish(*send(world.store, intent_of(number, f"s{number}")), AUTHOR)
    again = Publisher(world.store, KEYS, world.lease, world.pod)
    assert again.publish(*send(world.store, intent_of(3, "s3")), AUTHOR).seq == 3


def test_a_pointer_of_another_pod_in_this_generation_ends_it(world: World) -> None:
    """Two pods would have won the same generation: this one gives way."""
    other = RunPointer("run", 1, 9, None, "rival", 1.7e9)
    world.store.put(KEYS.pointer(1, 9, "f0"), other.to_bytes())
    with pytest.raises(LeaseLost):
        world.publisher.publish(*send(world.store, intent_of(5, "s1")), AUTHOR)
    assert len(world.pointers()) == 1


# -- repointing


def saves(world: World) -> Iterator[str]:
    for number in (1, 2):
        world.publisher.publish(*send(world.store, intent_of(number, f"s{number}")), AUTHOR)
        yield f"s{number}"


def test_after_a_step_back_the_pointer_names_an_earlier_save(world: World) -> None:
    list(saves(world))
    first = take_inventory(world.store, KEYS).saves[0]
    world.publisher.repoint(first, Author("run", "me", lineage="branch"))
    inventory = take_inventory(world.store, KEYS)
    assert (inventory.newest, inventory.pointers[0].order) == (first, (1, 3))
    assert inventory.latest is not None
    assert (inventory.latest.step, inventory.latest.lineage) == (1, "branch")
    assert first.key in world.publisher.named


def test_after_a_fresh_start_it_names_none(world: World) -> None:
    list(saves(world))
    world.publisher.repoint(None, AUTHOR)
    inventory = take_inventory(world.store, KEYS)
    assert (inventory.newest, inventory.latest and inventory.latest.step) == (None, None)


@pytest.mark.parametrize("name", ["manifest.json", "w/model.piece-00000"])
def test_no_pointer_names_a_save_that_is_not_whole_any_more(world: World, name: str) -> None:
    list(saves(world))
    first = take_inventory(world.store, KEYS).saves[0]
    world.lose(1, "s1", name)
    with pytest.raises(IntegrityError):
        world.publisher.repoint(first, AUTHOR)
    assert len(world.pointers()) == 2


def test_it_is_not_moved_by_a_pod_that_lost_the_run(world: World) -> None:
    list(saves(world))
    first = take_inventory(world.store, KEYS).saves[0]
    world.store.put(KEYS.claim(2, "aa"), b"{}")
    world.later(CONFIRMED_SECONDS)
    with pytest.raises(LeaseLost):
        world.publisher.repoint(first, AUTHOR)
    assert len(world.pointers()) == 2
