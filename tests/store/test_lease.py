"""One pod's side of the lease: what it records of itself, and what it takes for a sign of life."""

from dataclasses import dataclass, field, replace

import pytest

from podwatch.domain.lease import Claim, Heartbeat, HolderState, LeaseAction, Pod
from podwatch.store.documents import RunPointer
from podwatch.store.lease import Lease
from podwatch.store.lease_rules import CONFIRMED_SECONDS
from podwatch.store.objects.errors import LeaseUnsettled
from tests.support.memory_objects import KEYS, MemoryObjects

CLAIM_WAIT = 150.0


@dataclass
class OwnPod:
    """A pod whose clock a test sets. ``recorded``: the claims that it wrote down."""

    now: float = 0.0
    training: bool = False
    recorded: list[Claim] = field(default_factory=list)

    def boottime(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.7e9 + self.now

    def trainer_alive(self) -> bool:
        return self.training

    def last_claim(self) -> Claim | None:
        return None

    def claimed(self, claim: Claim) -> None:
        self.recorded.append(claim)

    def job_ended(self, process: str) -> bool:
        return False


class World:
    """A store, and two pods on one clock. ``first`` holds the run once ``holds`` was called."""

    def __init__(self) -> None:
        self.pod, self.other = OwnPod(), OwnPod()
        self.store = MemoryObjects(boottime=self.pod.boottime)
        self.first = Lease(Pod("a", "m1", "b1", "p", "pod-a"), KEYS, self.pod, self.pod)
        self.second = Lease(Pod("b", "m2", "b2", "p", "pod-b"), KEYS, self.pod, self.other, stands_by=True)

    def later(self, seconds: float) -> None:
        self.pod.now += seconds
        self.store.wall += seconds

    def holds(self) -> None:
        self.first.update(self.store)
        self.later(CLAIM_WAIT + 1)
        assert self.first.update(self.store).act is LeaseAction.HOLD
        self.first.beat(self.store, HolderState.RUNNING, Heartbeat())


@pytest.fixture
def world() -> World:
    return World()


def test_a_claim_on_which_training_begins_at_once_is_recorded_before_it_does(world: World) -> None:
    assert world.first.update(world.store).at_once
    assert [claim.generation for claim in world.pod.recorded] == [1]


def test_a_claim_that_waited_is_recorded_when_it_has_won(world: World) -> None:
    world.holds()
    for _ in range(40):
        world.later(10.0)
        if world.second.update(world.store).act is LeaseAction.SETTLE:
            break
    assert (world.second.decision.at_once, world.other.recorded) == (False, [])
    world.later(CLAIM_WAIT + 1)
    assert world.second.update(world.store).act is LeaseAction.HOLD
    assert [claim.generation for claim in world.other.recorded] == [2]


def test_a_holder_notices_at_its_next_heartbeat_that_another_pod_took_the_run_over(world: World) -> None:
    """And leaves the heartbeat of that pod as it is."""
    world.holds()
    world.later(60.0)
    world.first.beat(world.store, HolderState.RUNNING, Heartbeat())
    taker = Lease(Pod("b", "m2", "b2", "p", "pod-b"), KEYS, world.pod, world.other, take_over=True)
    assert taker.update(world.store).act is LeaseAction.SETTLE
    taker.beat(world.store, HolderState.RUNNING, Heartbeat())
    written = world.store.data[KEYS.heartbeat][0]
    world.later(60.0)
    assert world.first.beat(world.store, HolderState.RUNNING, Heartbeat()).act is LeaseAction.SUPERSEDED
    assert world.store.data[KEYS.heartbeat][0] == written


def test_a_heartbeat_of_its_own_generation_makes_a_holder_list_the_claims(world: World) -> None:
    """The store showed the claim that came first too late."""
    world.holds()
    world.later(60.0)
    world.first.beat(world.store, HolderState.RUNNING, Heartbeat())
    now, world.store.wall = world.store.wall, 1.0
    world.store.put(KEYS.claim(1, "earlier"), b"{}")
    world.store.wall = now
    other = Heartbeat().signed(Pod("b", "m2", "b2", "p", "pod-b"), Claim(1, "earlier"), HolderState.RUNNING, "")
    world.store.put(KEYS.heartbeat, other.to_bytes())
    world.later(60.0)
    assert world.first.beat(world.store, HolderState.RUNNING, Heartbeat()).act is LeaseAction.SUPERSEDED


def test_a_new_claim_is_as_much_life_as_a_heartbeat(world: World) -> None:
    """A pod that took the run over meanwhile has not written a heartbeat yet."""
    world.holds()
    for _ in range(28):
        world.later(10.0)
        assert world.second.update(world.store).act is LeaseAction.WATCH
    world.store.put(KEYS.claim(2, "third"), b"{}")
    for _ in range(5):
        world.later(10.0)
        assert world.second.update(world.store).act is LeaseAction.WATCH


def test_a_store_that_does_not_answer_leaves_the_holder_and_stops_a_watcher(world: World) -> None:
    world.holds()
    world.later(10.0)
    world.second.update(world.store)
    assert world.first.unanswered().act is LeaseAction.HOLD
    assert world.second.unanswered().act is LeaseAction.ASK
    assert "cannot read the store" in world.second.decision.why_not


def test_where_all_claims_were_deleted_a_pointer_shows_the_highest_generation(world: World) -> None:
    pointer = RunPointer("run", 6, 1, None, "somebody", 1.7e9)
    world.store.put(KEYS.pointer(6, 1, "aa"), pointer.to_bytes())
    contradicting = replace(pointer, generation=5)
    world.store.put(KEYS.pointer(9, 1, "bb"), contradicting.to_bytes())
    world.first.update(world.store)
    assert (world.first.decision.act, world.first.decision.generation) == (LeaseAction.WATCH, 6)


def test_a_pod_that_lost_the_run_does_not_get_it_back_when_the_other_claim_goes(world: World) -> None:
    world.holds()
    world.store.put(KEYS.claim(2, "other"), b"{}")
    world.later(60.0)
    assert world.first.update(world.store).act is LeaseAction.SUPERSEDED
    del world.store.data[KEYS.claim(2, "other")]
    world.later(60.0)
    assert world.first.update(world.store).act is LeaseAction.SUPERSEDED


def test_a_heartbeat_that_is_written_after_a_freeze_does_not_arrive(world: World) -> None:
    world.holds()
    written = world.store.data[KEYS.heartbeat]
    world.later(10.0)

    def freeze(operation: str, key: str) -> None:
        if (operation, key) == ("put", KEYS.heartbeat):
            world.pod.now += CONFIRMED_SECONDS + 1

    world.store.before = freeze
    with pytest.raises(LeaseUnsettled):
        world.first.beat(world.store, HolderState.RUNNING, Heartbeat())
    assert world.store.data[KEYS.heartbeat] == written
