"""Two pods on one store, real stores of both kinds: who publishes, what is repaired, what a woken pod may not do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.account_document import AccountTotals
from tests.drivers.lease import (
    MOST_PINS,
    Clock,
    Contender,
    Create,
    Heartbeat,
    HolderState,
    Instance,
    LeaseAction,
    NotHolding,
    Pod,
    Pointer,
    Put,
    RemoteError,
    Request,
    Superseded,
    TooLate,
    Writer,
    attempt_ended,
    identify,
    named_by_others,
    newest_pointer,
    pins_of,
    put_before,
    read_beat,
    read_pointer,
    this_pod,
)
from tests.sync.conftest import World

pytestmark = pytest.mark.slow


@dataclass
class Pods:
    first: Writer
    second: Writer
    clock: Clock


@pytest.fixture
def pods(world: World) -> Pods:
    clock = Clock()
    return Pods(Writer(world, clock), Writer(world.other("pod2", writer_id="writer-2"), clock), clock)


def standing_by(pods: Pods) -> tuple[Writer, Writer]:
    """A holder, and a second pod that has seen it live for ten minutes without leaving."""
    first, second = pods.first.hold(), pods.second
    first.publish(5)
    second.stands_by = True
    second.start()
    for _ in range(30):
        first.beat()
        assert second.look() is LeaseAction.WATCH
        assert second.claims.decision.why_not
        pods.clock.now += 20
    assert [("is alive" in text) for text in second.claims.told_held_elsewhere] == [True], "reported once"
    return first, second


def test_a_pod_that_stands_by_takes_over_when_the_other_one_falls_silent(pods: Pods) -> None:
    first, second = standing_by(pods)
    first.beat()
    began = pods.clock.now
    second.hold()
    assert pods.clock.now - began >= 300 + (0 if second.store.exclusive else 100)
    assert second.publish(10).order == (2, 2)
    with pytest.raises(Superseded):
        first.publish(10)


def test_a_pod_that_stands_by_takes_over_when_the_other_one_leaves(pods: Pods) -> None:
    first, second = standing_by(pods)
    first.beat(HolderState.RELEASED)
    began = pods.clock.now
    second.look()
    assert second.claims.decision.why_not == ""
    second.hold()
    assert pods.clock.now - began <= 101


def test_a_pod_that_stands_by_follows_a_third_one_that_takes_the_run_over(pods: Pods, world: World) -> None:
    """The claim of another pod counts as a heartbeat; and when that one leaves, its word counts, too."""
    _, second = standing_by(pods)
    third = Writer(world.other("pod3", writer_id="writer-3"), pods.clock, take_over=True)
    assert third.look() is not LeaseAction.WATCH
    third.hold()
    third.beat()
    assert second.look() is LeaseAction.WATCH
    assert second.claims.decision.holder == "host-writer-3"
    pods.clock.now += 20
    third.beat(HolderState.PREEMPTED)
    second.look()
    assert second.claims.decision.why_not == ""


def test_the_loser_publishes_nothing_more_and_readers_follow_the_generation(pods: Pods, world: World) -> None:
    first, second = pods.first.hold(), pods.second
    assert first.publish(5).order == (1, 1)
    assert second.look() is LeaseAction.WATCH
    first.beat()
    pods.clock.now += 20
    assert second.look() is LeaseAction.REFUSE, "it lives"
    second.start()
    began = pods.clock.now
    second.hold()
    assert pods.clock.now - began >= 300 + (0 if second.store.exclusive else 100)
    assert second.publish(10).order == (2, 2)
    with pytest.raises(Superseded):
        first.publish(15)
    assert first.claims.decision.stop
    pointer = read_pointer(first.store, world.keys)
    assert pointer is not None
    assert pointer.step == 10
    assert world.violations() == []


@pytest.mark.parametrize("ahead", [200.0, 4000.0])
def test_a_heartbeat_that_is_old_by_the_stores_clock_is_watched_for_less(pods: Pods, ahead: float) -> None:
    """``ahead``: the time since the heartbeat, which the pod that arrives sees by the store's clock; a store that shows
    no time is watched for five minutes."""
    first, second = pods.first.hold(), pods.second
    first.beat()
    second.clock = Clock(pods.clock.now, ahead)
    second.claims.use_clock(second.clock)
    shows_time = second.store.clock_skew is not None or not second.store.exclusive
    began = second.clock.now
    assert second.look() is LeaseAction.WATCH
    settles = 0 if second.store.exclusive else 100
    least, most = (90, 305 - min(ahead, 215)) if shows_time else (300, 305)
    second.hold()
    assert least <= second.clock.now - began - settles <= most + 20


def test_a_claim_without_a_heartbeat_makes_an_old_heartbeat_young(pods: Pods, world: World) -> None:
    """The heartbeat is that of a pod that died; the one that took over has written none yet."""
    first, second = pods.first.hold(), pods.second
    first.beat()
    stale = Clock(pods.clock.now, 4000.0)
    third = Writer(world.other("pod3", writer_id="writer-3"), pods.clock)
    third.hold()
    second.clock = stale
    second.claims.use_clock(stale)
    assert second.look() is LeaseAction.WATCH
    age = second.claims.heartbeat_age
    written = [item.uploaded_wall for item in second.store.list(world.keys.claims)]
    assert age is None or age <= time.time() + 4000 - max(written) + 2


def test_a_woken_pod_does_not_replay_what_it_was_about_to_do(pods: Pods, world: World) -> None:
    first = pods.first.hold()
    first.publish(5)
    kept = first.publish(6)
    first.had_begun_to_publish(replace(kept, seq=kept.seq + 1, step=7))
    first.had_begun_to_delete(5)
    second = pods.second.hold()
    second.publish(10)
    first.start()  # podwatch comes back on the pod that was away
    world.trains = True
    assert first.look() is LeaseAction.SUPERSEDED
    with pytest.raises(Superseded):
        first.recover()
    with pytest.raises(Superseded):
        first.delete_from_the_store(own_generation=1)
    assert first.unfinished() == 2, "still open, nothing done"
    assert first.store.stat(world.keys.manifest(5, "save5")) is not None
    pointer = read_pointer(first.store, world.keys)
    assert pointer is not None
    assert pointer.step == 10


def test_a_pointer_set_back_by_a_frozen_writer_is_repaired_at_the_next_heartbeat(pods: Pods, world: World) -> None:
    first = pods.first.hold()
    old = first.publish(5)
    second = pods.second.hold()
    assert second.publish(10).order == (2, 2)
    second.beat()
    first.store.put_bytes(world.keys.latest, replace(old, seq=2).to_bytes())  # what lay in a socket all the time
    if second.store.versioned:
        newest = newest_pointer(second.store, world.keys)
        assert newest is not None
        assert newest.step == 10, "a reader is not deceived meanwhile"
        assert named_by_others(second.store, world.keys, "writer-2") == {"save5"}
    pods.clock.now += 60
    seen = second.beat()
    assert seen is not None, "it took over from one that never said goodbye: it looks each time"
    repaired = second.repair(seen)
    assert repaired is not None
    assert (repaired.step, repaired.generation, repaired.seq) == (10, 2, 3)
    assert second.repair(repaired.to_bytes()) is None
    assert world.violations() == []


@pytest.mark.slow
def test_where_the_store_has_conditions_a_frozen_writer_cannot_set_the_pointer_back(s3: World) -> None:
    """It had confirmed its lease and read the pointer when it was frozen; its request leaves when it wakes."""
    clock = Clock()
    first = Writer(s3, clock).hold()
    first.publish(5)
    manifest, other = first.manifest(7), s3.other("pod2", writer_id="writer-2")

    class Frozen:
        """The store as the frozen pod reaches it: another pod publishes just before its request."""

        def __init__(self) -> None:
            self.published: Pointer | None = None

        def __getattr__(self, name: str) -> Any:
            return getattr(first.store, name)

        def replace(self, *arguments: Any) -> Any:
            if self.published is None:
                self.published = Writer(other, Clock(now=9000.0), take_over=True).hold().publish(10)
            return first.store.replace(*arguments)

    frozen = Frozen()
    first.publish_through(frozen)
    with pytest.raises((Superseded, RemoteError)):
        first.publish_manifest(manifest)
    assert frozen.published is not None
    assert read_pointer(first.store, s3.keys) == frozen.published
    assert first.unfinished() == 0, "settled as failed"
    with pytest.raises(Superseded):
        first.publish_manifest(manifest)


def test_a_pointer_read_before_a_publication_is_not_taken_for_one_set_back(pods: Pods, world: World) -> None:
    first = pods.first.hold()
    first.publish(5)
    seen = first.beat()
    assert seen is not None
    published = first.publish(10)  # while the repair waited for its turn
    assert first.repair(seen) is None
    assert read_pointer(first.store, world.keys) == published


def test_a_confirmation_that_is_too_old_lets_no_byte_leave(pods: Pods, world: World) -> None:
    first = pods.first.hold()
    _, until = first.perform(first.claims.confirm())
    pods.clock.now += 31
    with pytest.raises(TooLate):
        put_before(first.store, world.keys.latest, b"{}", until, pods.clock)
    assert first.store.get_bytes(world.keys.latest) is None


def test_a_new_boot_claims_anew_and_a_new_podwatch_does_not(pods: Pods, world: World) -> None:
    first = pods.first.hold()
    first.start()
    assert (first.look(), first.claims.generation) == (LeaseAction.HOLD, 1)
    first.start(boot="another")
    decision = first.claims
    first.look()
    assert decision.decision.why_not == "", "training does not wait"
    first.hold()
    assert first.claims.generation == 2
    names = [o.key for o in first.store.list(world.keys.claims)]
    assert len(names) == 2


def test_podwatch_restarted_before_its_claim_after_a_reboot_was_decided(pods: Pods, world: World) -> None:
    first = pods.first.hold()
    first.start(boot="another")
    first.look()
    assert first.claims.decision.why_not == "", "training does not wait"
    world.trains = True
    first.start(boot="another")
    for _ in range(6):
        first.look()
        assert not first.claims.decision.stop
        pods.clock.now += 30
    assert first.hold().claims.generation >= 2


def test_the_answer_to_a_claim_is_lost(pods: Pods, world: World) -> None:
    """The store has carried the request out; training begins without the answer."""
    first = pods.first.hold()
    first.start(boot="another")
    with pytest.raises(RemoteError):
        look_without_an_answer_to_the_claim(first)
    first.claims.unanswered()
    assert first.claims.decision.why_not == ""
    world.trains = True
    for _ in range(6):
        first.look()
        assert not first.claims.decision.stop
        pods.clock.now += 30
    assert first.hold().claims.generation >= 2


def look_without_an_answer_to_the_claim(pod: Writer) -> None:
    steps = pod.claims.look()
    request = next(steps)
    while True:
        answer = pod.perform(one(request))
        if isinstance(request, Put | Create):
            steps.throw(RemoteError("no answer", where="store"))
        request = steps.send(answer)


def one(request: Request) -> Generator[Request, Any, Any]:
    return (yield request)


def test_a_take_over_by_hand_keeps_its_trainer_and_is_good_once(pods: Pods, world: World) -> None:
    first = pods.first.hold()
    world.trains = True
    second = pods.second.hold()
    first.take_over = True
    first.start()
    first.look()
    assert not first.claims.decision.stop
    assert first.hold().claims.generation == 3
    first.start()  # told so again, with nothing to take over
    first.hold()
    second.take_over = True
    second.start()
    second.hold()
    pods.clock.now += 60
    with pytest.raises(Superseded):
        first.perform(first.claims.confirm(fresh=True))


def test_a_standby_that_saw_the_holder_does_not_train_when_one_look_fails(pods: Pods) -> None:
    first = pods.first.hold()
    pods.second.hold()
    first.start(boot="another")
    assert first.claims.unanswered().why_not == "", "nothing has answered yet: the last recorded holder trains on"
    assert first.look() is LeaseAction.WATCH
    decision = first.claims.unanswered()
    assert decision.act is LeaseAction.ASK
    assert decision.why_not


def test_claims_deleted_by_hand_are_made_again(pods: Pods, world: World) -> None:
    first = pods.first.hold()
    for item in list(first.store.list(world.keys.claims)):
        first.store.delete(item)
    pods.clock.now += 60
    try:
        first.perform(first.claims.confirm(fresh=True))
    except NotHolding:
        first.hold()
    assert first.claims.generation >= 1
    assert first.publish(5).generation == first.claims.generation


def test_two_that_claim_an_empty_store_at_once(pods: Pods) -> None:
    first, second = pods.first, pods.second
    first.look()
    second.look()
    for _ in range(3):
        pods.clock.now += 101
        first.look()
        first.beat()
        second.look()
    held = [w.claims.holding for w in (first, second)]
    assert held == [True, False]


def test_one_path_on_two_mounts_is_two_places(tmp_path: Path) -> None:
    """Two containers on one host: the same machine id, boot and path, separate state."""
    place = tmp_path / "out"
    place.mkdir()
    first, again = this_pod("writer-1", place), this_pod("writer-2", place)
    assert first.place == again.place, "the state was lost, the directory is the same"
    place.rename(tmp_path / "elsewhere")
    place.mkdir()  # another directory by the same name, as a second container sees it
    other = this_pod("writer-2", place)
    assert other.place != first.place
    assert not other.same_as(first)
    assert this_pod("w", tmp_path / "not there yet").place


def test_a_real_clock_and_a_goodbye(world: World) -> None:
    clock = Clock(time.monotonic())
    first = Writer(world, clock).hold()
    first.beat()
    first.beat(HolderState.PREEMPTED)
    second = Writer(world.other("pod2", writer_id="writer-2"), clock)
    second.look()
    assert second.claims.decision.why_not == "", "nobody is waited for"


def test_an_attempt_of_a_job_has_ended_only_where_its_process_is_seen_to_be_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(child.pid)
    assert identity is not None
    assert not attempt_ended(identity.text)
    child.communicate(b"\n")
    assert attempt_ended(identity.text), "reaped: it is gone"
    assert attempt_ended(replace(identity, pid=os.getpid()).text), "its pid belongs to a later process"
    assert not attempt_ended(replace(identity, boot_id="another-boot").text), "another machine, or before a reboot"
    assert not attempt_ended(replace(identity, pid_namespace=1).text), "another container: it cannot be seen"
    assert not attempt_ended("")
    assert not attempt_ended("x:0:1:1")


def test_the_next_attempt_of_a_job_and_the_state_directory_of_the_one_before(world: World) -> None:
    """The journal has the won claim of attempt 0: attempt 1 uses it only if attempt 0 has provably ended."""
    clock, ended = Clock(), set[str]()
    job = Pod(world.writer_id, "m", "b", "place", "n1", Instance("slurm", "77", "0"), "b:1:10:1")
    pod = Writer(world, clock)

    def attempt(me: Pod, training: bool) -> Contender:
        world.trains = training
        return pod.contender(me, ended.__contains__)

    def look(claims: Contender) -> LeaseAction:
        pod.perform(claims.look())
        return claims.decision.act

    first = attempt(job, False)
    look(first)
    clock.now += 200
    assert look(first) is LeaseAction.HOLD
    pod.perform(first.beat(HolderState.RUNNING, Heartbeat(), versioned=pod.store.versioned))
    assert look(attempt(job, True)) is LeaseAction.HOLD, "podwatch restarted within the attempt"
    again = replace(job, instance=replace(job.instance, attempt="1"), process="b:1:20:9")
    second = attempt(again, False)
    assert look(second) is LeaseAction.WATCH
    assert second.decision.why_not
    ended.add(job.process)
    third = attempt(again, False)
    pod.perform(third.look())
    assert third.decision.why_not == "", "it trains at once"
    assert third.decision.act in (LeaseAction.SETTLE, LeaseAction.HOLD)
    pod.perform(first.look())
    assert first.decision.act is LeaseAction.SUPERSEDED, "should it live after all, it ends"


def test_the_time_of_the_last_digest_is_handed_on_in_the_heartbeat(pods: Pods) -> None:
    first, second = pods.first.hold(), pods.second
    first.beat()
    assert first.claims.digest_wall is None
    sent = pods.clock.wall() - 10
    first.claims.note_digest(sent)
    first.beat(HolderState.RELEASED)
    second.hold()
    assert second.claims.digest_wall == pytest.approx(sent, abs=1)
    second.beat()
    second.start("another boot")
    second.look()
    assert second.claims.digest_wall == pytest.approx(sent, abs=1), "its own heartbeat names it too"


def test_what_is_pinned_is_handed_on_in_the_heartbeat(pods: Pods) -> None:
    first, second = pods.first.hold(), pods.second
    pinned = {40: "the best", 80: "before the change"}
    fields = Heartbeat(pins=pins_of(pinned))
    first.beat(HolderState.RELEASED, fields)
    first.start("another boot")
    first.look()
    assert first.claims.foreign_pins == {}, "its own are in its journal"
    second.hold()
    assert second.claims.foreign_pins == pinned
    second.claims.take_over_pins()
    second.beat()
    assert second.claims.foreign_pins == {}, "taken over once, although it read that heartbeat again"


def test_a_heartbeat_that_cannot_be_read_takes_nothing_back(pods: Pods) -> None:
    first, second = pods.first.hold(), pods.second
    first.beat(HolderState.RUNNING, Heartbeat(pins=pins_of({40: "the best"})))
    second.look()
    assert second.claims.foreign_pins == {40: "the best"}
    first.beat(HolderState.RELEASED, Heartbeat(pins=pins_of({-1: "none"})))
    second.look()
    assert second.claims.foreign_pins == {40: "the best"}


def test_what_the_run_costs_is_handed_on_in_the_heartbeat(pods: Pods) -> None:
    first, second = pods.first.hold(), pods.second
    first.beat(HolderState.RELEASED, Heartbeat(account=AccountTotals(failures=3)))
    first.start("another boot")
    first.look()
    assert first.claims.foreign_account is None, "its own is in its journal"
    second.hold()
    assert second.claims.foreign_account == AccountTotals(failures=3)
    assert second.claims.claimed == second.claims.generation > 0
    second.claims.take_over_account()
    second.beat(HolderState.RUNNING, Heartbeat())
    assert second.claims.foreign_account is None, "taken over once, although it read that heartbeat again"
    first.look()
    assert first.claims.foreign_account is None, "of another pod, and no account"


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda s: st.lists(s) | st.dictionaries(st.sampled_from(["step", "reason", "x"]), s),
        max_leaves=12,
    )
)
def test_a_heartbeat_with_strange_pins_is_read_as_they_are_or_not_at_all(strange: object) -> None:
    found = read_beat(json.dumps({"kind": "podwatch-heartbeat", "schema_version": 1, "pins": strange}).encode())
    assert found is not None
    assert [pin.step for pin in found.said.pins] == [] or isinstance(strange, list)
    assert all(type(step) is int and step >= 0 and isinstance(why, str) for step, why in found.said.pinned.items())


@given(st.dictionaries(st.integers(0, 10**6), st.text("abc", max_size=300), max_size=150))
def test_pins_are_read_as_written(pins: dict[int, str]) -> None:
    read = Heartbeat.from_bytes(Heartbeat(pins=pins_of(pins)).to_bytes()).pinned
    assert read == {step: pins[step][:200] for step in sorted(pins)[-MOST_PINS:]}


@pytest.mark.parametrize(
    "strange", ["2999-01-01T00:00:00Z", "soon", "", "2026-01-01", "9" * 300, "0001-01-01T00:00:00+00:00"]
)
def test_a_strange_time_of_a_digest_is_not_believed(pods: Pods, world: World, strange: str) -> None:
    first = pods.first.hold()
    first.beat(HolderState.RELEASED, Heartbeat(last_digest_at=strange))
    pods.second.hold()
    assert pods.second.claims.digest_wall is None
