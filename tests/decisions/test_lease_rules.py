"""Which pod trains and publishes: one row for each rule."""

from dataclasses import replace

import pytest

from podwatch.domain.lease import Beat, Claim, Control, Heartbeat, Pod
from podwatch.domain.lease import LeaseAction as A
from podwatch.store.lease_rules import HeartbeatWatch, LeaseTiming, LeaseView, OwnClaim, decide, is_same_pod, winner

ME = Pod("me", "machine", "boot", "place", "here")
OTHER = Pod("other", "machine2", "boot2", "place", "there")
TIMING = LeaseTiming()
THEIRS, MINE = Claim(3, "theirs", 100.0), Claim(4, "mine", 200.0)
NEW = LeaseView(ME, answers=True)
WATCHING = replace(NEW, claims=(THEIRS,), other_holder=OTHER)


def beat(pod: Pod, claim: Claim, state: str = "running") -> Beat:
    said = replace(Heartbeat(generation=claim.generation, claim=claim.nonce, state=state), writer_id=pod.writer_id)
    return Beat(replace(said, machine_id=pod.machine_id, boot_id=pod.boot_id, host=pod.host), "mark")


SILENT = HeartbeatWatch(300.0, False, "mark")
OLD = HeartbeatWatch(90.0, False, "mark", 4e5)
ALIVE = HeartbeatWatch(0.0, True, "mark")
HOLDING = replace(NEW, claims=(MINE,), own=OwnClaim(MINE, won=True))
LATER = Claim(5, "later", 300.0)
LOST = replace(HOLDING, claims=(MINE, LATER), other_holder=OTHER)
SECOND = replace(NEW, claims=(MINE, Claim(4, "a", 199.0)), other_holder=OTHER)
ROWS = {
    "nobody has it: claim and train at once": (NEW, A.CLAIM, 1, False, False),
    "another holds it": (WATCHING, A.WATCH, 3, True, False),
    "it is silent": (replace(WATCHING, watch=SILENT), A.CLAIM, 4, True, False),
    "it was old already": (replace(WATCHING, watch=OLD), A.CLAIM, 4, True, False),
    "old, and not watched": (replace(WATCHING, watch=replace(OLD, unchanged=80.0)), A.WATCH, 3, True, False),
    "it lives, and this pod leaves": (replace(WATCHING, watch=ALIVE), A.REFUSE, 3, True, False),
    "it lives, and this pod stands by": (replace(WATCHING, watch=ALIVE, stands_by=True), A.WATCH, 3, True, False),
    "it lives, and this pod trains": (replace(WATCHING, watch=ALIVE, training=True), A.SUPERSEDED, 3, True, True),
    "it said that it leaves": (replace(WATCHING, beat=beat(OTHER, THEIRS, "released")), A.CLAIM, 4, False, False),
    "one before it said that": (
        replace(WATCHING, beat=beat(OTHER, Claim(2, "old"), "released")), A.WATCH, 3, True, False,
    ),
    "an earlier life of this pod": (replace(WATCHING, other_holder=ME), A.CLAIM, 4, False, False),
    "before a reboot": (replace(WATCHING, other_holder=replace(ME, boot_id="b0")), A.WATCH, 3, True, False),
    "taken over": (replace(WATCHING, take_over=True), A.CLAIM, 4, False, False),
    "a claim that settles": (replace(HOLDING, own=OwnClaim(MINE, waited=149.0)), A.SETTLE, 4, True, False),
    "one that trains meanwhile": (
        replace(HOLDING, own=OwnClaim(MINE, at_once=True, waited=1.0)), A.SETTLE, 4, False, False,
    ),
    "a claim that has waited": (replace(HOLDING, own=OwnClaim(MINE, waited=150.0)), A.HOLD, 4, False, False),
    "the holder": (HOLDING, A.HOLD, 4, False, False),
    "superseded": (LOST, A.SUPERSEDED, 5, True, True),
    "superseded, and the other claim is gone": (replace(HOLDING, lost=True), A.SUPERSEDED, 4, True, True),
    "superseded before this life, and it trains": (
        replace(WATCHING, last=Claim(2, "x"), training=True), A.SUPERSEDED, 3, True, True,
    ),
    "its claim was deleted": (replace(HOLDING, claims=()), A.CLAIM, 5, False, False),
    "its claim was deleted, and an older one is left": (
        replace(HOLDING, claims=(THEIRS,), other_holder=OTHER), A.CLAIM, 5, False, False,
    ),
    "a later claim of an earlier life of this pod": (replace(LOST, other_holder=ME), A.CLAIM, 6, False, False),
    "another took it over and left, and this pod trains": (
        replace(WATCHING, last=Claim(2, "x"), training=True, beat=beat(OTHER, THEIRS, "released")),
        A.CLAIM, 4, False, False,
    ),
    "it left, and a newer pod has published": (
        replace(NEW, beat=beat(OTHER, THEIRS, "released"), pointed=5), A.WATCH, 5, True, False,
    ),
    "control.json stops training on the holder": (
        replace(HOLDING, control=Control("stopped", "by hand")), A.HOLD, 4, True, True,
    ),
    "a pointer of a higher generation": (replace(HOLDING, pointed=9), A.SUPERSEDED, 9, True, True),
    "second in its generation": (
        replace(SECOND, own=OwnClaim(MINE)), A.WATCH, 4, True, False,
    ),
    "second, and it trains already": (
        replace(SECOND, own=OwnClaim(MINE, at_once=True), training=True),
        A.SUPERSEDED, 4, True, True,
    ),
    "no answer, a new pod": (LeaseView(ME), A.ASK, 0, True, False),
    "no answer, the last holder": (LeaseView(ME, last=MINE), A.ASK, 0, False, False),
    "no answer, but another was seen": (
        replace(WATCHING, answers=False, last=Claim(2, "x")), A.ASK, 0, True, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_each_rule(name: str) -> None:
    view, act, generation, waits, stops = ROWS[name]
    decision = decide(view, TIMING)
    assert (decision.act, decision.generation, bool(decision.why_not), decision.stop) == (act, generation, waits, stops)
    assert decision.publish is (act is A.HOLD)


def test_the_stores_time_orders_claims_and_then_their_names() -> None:
    claims = [Claim(2, "b", 5.0), Claim(2, "c", 4.0), Claim(2, "a", 5.0), Claim(1, "z", 1.0)]
    assert winner(claims) == claims[1]
    assert winner([claims[0], claims[2]]) == claims[2]


def test_of_a_job_only_its_ended_attempt_is_the_same_pod() -> None:
    job = replace(ME, process="p2")
    before = replace(ME, process="p1")
    assert not is_same_pod(job, before)
    assert is_same_pod(job, before, job_ended=True)
    assert not is_same_pod(replace(ME, machine_id=""), replace(ME, machine_id=""))


def test_time_in_which_nothing_was_seen_counts_for_no_silence() -> None:
    watch = HeartbeatWatch().after(beat(OTHER, THEIRS), -1.0).after(beat(OTHER, THEIRS), 20.0)
    assert watch.unchanged == 20.0
    assert watch.after(beat(OTHER, THEIRS), 500.0).unchanged == 20.0
    assert watch.after(None, 20.0).changed
