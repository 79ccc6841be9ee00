"""A pointer of a generation that no pod has claimed is forged: it supersedes nobody, and nobody restores it."""

from dataclasses import dataclass, field

import pytest

from podwatch.domain.lease import Claim, LeaseAction, Pod
from podwatch.store.documents import RunPointer
from podwatch.store.inventory import take_inventory
from podwatch.store.lease import Lease
from podwatch.store.publish import LeaseLost, Publisher
from podwatch.store.remove import SaveRemover
from podwatch.store.retention import RetentionRules, plan
from tests.support.memory_objects import AUTHOR, KEYS, MemoryObjects, intent_of, send

FORGED = 7


@dataclass
class Here:
    """A pod, and a clock that a test sets."""

    now: float = 0.0
    claims: list[Claim] = field(default_factory=list)

    def boottime(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.7e9 + self.now

    def trainer_alive(self) -> bool:
        return True

    def last_claim(self) -> Claim | None:
        return None

    def claimed(self, claim: Claim) -> None:
        self.claims.append(claim)

    def job_ended(self, process: str) -> bool:
        return False


class World:
    def __init__(self) -> None:
        self.pod, self.store = Here(), MemoryObjects()
        me = Pod("me", "machine", "boot", "place", "pod")
        self.lease = Lease(me, KEYS, self.pod, self.pod)
        self.lease.update(self.store)
        self.pod.now += 200
        assert self.lease.update(self.store).act is LeaseAction.HOLD
        self.publisher = Publisher(self.store, KEYS, self.lease, self.pod)

    def forge(self, generation: int = FORGED) -> str:
        pointer = RunPointer("run", generation, 1, None, "somebody", 1.7e9)
        key = KEYS.pointer(generation, 1, "f0f0")
        self.store.put(key, pointer.to_bytes())
        return key


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("many", [1, 9])
def test_it_supersedes_nobody(world: World, many: int) -> None:
    for number in range(many):
        world.forge(FORGED + number)
    world.pod.now += 60
    saved = world.publisher.publish(*send(world.store, intent_of(5, "s1")), AUTHOR)
    assert world.lease.update(world.store).act is LeaseAction.HOLD
    assert world.lease.generation == 1
    newest = take_inventory(world.store, KEYS).newest
    assert newest is not None
    assert newest.key == saved.key


def test_the_next_pod_claims_above_what_was_claimed(world: World) -> None:
    world.forge()
    other = Lease(Pod("other", "m2", "b2", "p2", "pod2"), KEYS, world.pod, Here(), take_over=True)
    other.update(world.store)
    assert other.decision.generation == 2


def test_one_of_a_generation_that_a_pod_has_claimed_supersedes(world: World) -> None:
    world.store.put(KEYS.claim(FORGED, "aa"), b"{}")
    world.forge()
    world.pod.now += 60
    with pytest.raises(LeaseLost):
        world.publisher.publish(*send(world.store, intent_of(5, "s1")), AUTHOR)


def test_retention_goes_on_beside_it(world: World) -> None:
    for step in range(1, 6):
        world.store.wall += 86400.0 * 2
        world.pod.now += 60
        world.publisher.publish(*send(world.store, intent_of(step, f"s{step}")), AUTHOR)
    forged = world.forge()
    inventory = take_inventory(world.store, KEYS)
    wanted = plan(inventory, RetentionRules(keep_last=2, keep_every=0), named=())
    assert [verdict.save.step for verdict in wanted.deleted] == [1, 2, 3]
    removed = SaveRemover(world.store, KEYS, world.lease, world.pod).carry_out(wanted, inventory)
    assert [step for step, _, _ in removed.saves] == [1, 2, 3]
    assert forged in world.store.data
