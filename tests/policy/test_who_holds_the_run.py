"""Who may train and publish: the decision of one pod, and the numbers of a pointer."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import (
    Beat,
    Claim,
    ClaimDocument,
    Control,
    Heartbeat,
    HolderState,
    LeaseAction,
    Pod,
    claim_document,
    claimant,
    parse_claim_name,
    read_beat,
    read_control,
)
from podwatch.domain.manifest import Pointer
from podwatch.policy.who_holds_the_run import (
    CLAIM_WAIT_SECONDS,
    CONFIRMED_SECONDS,
    MOST_BETWEEN,
    PATIENCE_SECONDS,
    PUT_SECONDS,
    REFUSAL_SECONDS,
    REFUSALS,
    Known,
    Own,
    Timing,
    Watch,
    decide,
    locked_out,
    next_pointer,
    watched,
    winner,
)
from tests.support.examples import examples

ME = Pod("me", "m1", "b1", "p1", "pod-1")
OTHER = Pod("other", "m2", "b2", "p1", "pod-2")
TIMING = Timing()


def beat(generation: int, nonce: str, pod: Pod = OTHER, state: str = "running", mark: str = "x") -> Beat:
    said = Heartbeat().signed(pod, Claim(generation, nonce), HolderState.RUNNING, "")
    return Beat(replace(said, state=state), mark)


HELD = Known(ME, answers=True, claims=(Claim(3, "n3", 10.0, "f", "other"),), floor=3, beat=beat(3, "n3"), rival=OTHER)
MINE = Known(
    ME, answers=True, claims=(Claim(4, "mine", 20.0, "g", "me"),), floor=3, own=Own(Claim(4, "mine"), "b1", won=True)
)


def test_the_waits_are_what_the_design_asks_for() -> None:
    assert CONFIRMED_SECONDS <= 60
    assert CLAIM_WAIT_SECONDS > PUT_SECONDS + 30
    assert CLAIM_WAIT_SECONDS > CONFIRMED_SECONDS + PUT_SECONDS, "a living former holder's last write is over by then"
    assert PATIENCE_SECONDS == 300


def test_an_empty_store_is_claimed_and_trained_on_at_once() -> None:
    decision = decide(Known(ME, answers=True), TIMING)
    assert (decision.act, decision.generation, decision.why_not, decision.stop) == (LeaseAction.CLAIM, 1, "", False)
    assert decision.at_once


def test_a_foreign_holder_is_watched_then_claimed_but_trained_on_only_once_that_is_decided() -> None:
    watching = decide(replace(HELD, watch=Watch(200.0, False, "x")), TIMING)
    assert (watching.act, watching.stop, watching.holder) == (LeaseAction.WATCH, False, "pod-2")
    assert "pod-2" in watching.why_not
    claim = decide(replace(HELD, watch=Watch(300.0, False, "x")), TIMING)
    assert (claim.act, claim.generation, claim.at_once) == (LeaseAction.CLAIM, 4, False)
    assert claim.why_not
    settling = replace(MINE, own=Own(Claim(4, "mine"), "b1", waited=99.0))
    assert decide(settling, TIMING).act is LeaseAction.SETTLE
    assert decide(settling, TIMING).why_not
    won = decide(replace(MINE, own=Own(Claim(4, "mine"), "b1", waited=101.0)), TIMING)
    assert (won.act, won.why_not, won.publish) == (LeaseAction.HOLD, "", True)
    late = decide(replace(MINE, own=Own(Claim(4, "mine"), "b1", waited=101.0, took=91.0)), TIMING)
    assert (late.act, late.generation) == (LeaseAction.CLAIM, 5), "rivals may have decided before it was to be seen"


@pytest.mark.parametrize(
    ("age", "unchanged", "left"),
    [(None, 0.0, 300.0), (0.0, 100.0, 200.0), (100.0, 20.0, 180.0), (250.0, 0.0, 90.0), (9999.0, 80.0, 10.0)],
)
def test_a_heartbeat_that_was_old_already_is_watched_for_less_but_never_not_at_all(
    age: float | None, unchanged: float, left: float
) -> None:
    decision = decide(replace(HELD, watch=Watch(unchanged, False, "x", age)), TIMING)
    assert (decision.act, decision.trains_in) == (LeaseAction.WATCH, left + TIMING.claim_wait)
    over = decide(replace(HELD, watch=Watch(unchanged + left, False, "x", age)), TIMING)
    assert over.act is LeaseAction.CLAIM
    assert Watch(0.0, False, "x", age).left(Timing(2.0)) == 2.0, "a shorter patience is not extended"


def test_a_living_foreign_holder_is_refused_and_a_word_of_a_person_overrides() -> None:
    alive = replace(HELD, watch=Watch(0.0, True, "y"))
    refused = decide(alive, TIMING)
    assert (refused.act, refused.stop) == (LeaseAction.REFUSE, False)
    assert "pod-2" in refused.why_not
    taken = decide(replace(alive, take_over=True), TIMING)
    assert (taken.act, taken.generation, taken.why_not) == (LeaseAction.CLAIM, 4, "")


def test_a_pod_that_stands_by_waits_while_another_one_lives_and_takes_over_after_a_new_silence() -> None:
    """A job must not leave: its engine has rented the machine until the job's own verdict."""
    standby = replace(HELD, stands_by=True)
    alive = decide(replace(standby, watch=Watch(0.0, True, "y")), TIMING)
    assert (alive.act, alive.stop, alive.holder, alive.trains_in) == (LeaseAction.WATCH, False, "pod-2", None)
    assert "is alive" in alive.why_not
    assert alive.wait == TIMING.poll
    waiting = decide(replace(standby, watch=Watch(299.0, True, "y")), TIMING)
    assert (waiting.act, waiting.why_not != "") == (LeaseAction.WATCH, True)
    silent = decide(replace(standby, watch=Watch(300.0, True, "y")), TIMING)
    assert (silent.act, silent.generation, silent.at_once) == (LeaseAction.CLAIM, 4, False)
    left = decide(replace(standby, watch=Watch(0.0, True, "y"), beat=beat(3, "n3", state="released")), TIMING)
    assert (left.act, left.at_once, left.why_not) == (LeaseAction.CLAIM, True, "")
    trains = decide(replace(standby, watch=Watch(0.0, True, "y"), training=True), TIMING)
    assert (trains.act, trains.stop) == (LeaseAction.SUPERSEDED, True), "a trainer that runs here still has to stop"


@pytest.mark.parametrize("state", [HolderState.PREEMPTED, HolderState.RELEASED])
def test_who_has_left_is_not_waited_for(state: HolderState) -> None:
    gone = decide(replace(HELD, beat=beat(3, "n3", state=state)), TIMING)
    assert (gone.act, gone.at_once, gone.why_not) == (LeaseAction.CLAIM, True, "")
    stale = decide(replace(HELD, beat=beat(2, "n2", state=state)), TIMING)
    assert stale.act is LeaseAction.WATCH, "the word of a holder before this one"


def test_this_pod_skips_the_watch_after_a_restart_and_after_a_reboot() -> None:
    recorded = replace(MINE, own=Own(Claim(4, "mine"), "b1", won=True, recorded=True))
    assert decide(recorded, TIMING).act is LeaseAction.HOLD, "podwatch restarted: the same claim"
    rebooted = replace(recorded, me=replace(ME, boot_id="b9"))
    assert (decide(rebooted, TIMING).act, decide(rebooted, TIMING).at_once) == (LeaseAction.CLAIM, True)
    state_lost = replace(HELD, rival=replace(ME, writer_id="of the lost state"))
    assert (decide(state_lost, TIMING).act, decide(state_lost, TIMING).at_once) == (LeaseAction.CLAIM, True)


def test_a_copied_state_on_another_machine_is_another_pod() -> None:
    copied = replace(HELD, rival=replace(ME, machine_id="m7"))
    assert decide(copied, TIMING).act is LeaseAction.WATCH
    other_place = replace(HELD, rival=Pod("w", "m1", "b1", "p2"))
    assert decide(other_place, TIMING).act is LeaseAction.WATCH, "two containers of one image on one host"


JOB = Instance("slurm", "77", "1")
FIRST = Pod("me", "m1", "b1", "p1", "pod-1", replace(JOB, attempt="0"), "b1:9:100:5")
SECOND = replace(FIRST, instance=JOB, process="b1:9:200:7")


def test_an_attempt_of_a_job_is_not_the_one_before_it_by_machine_boot_and_state() -> None:
    """Slurm starts a job again beside its own old tree: measured for 85 s, with the same state directory."""
    held = replace(HELD, me=SECOND, rival=FIRST, beat=beat(3, "n3", FIRST))
    assert decide(held, TIMING).act is LeaseAction.WATCH
    alive = replace(held, watch=Watch(0.0, True, "y"))
    assert decide(alive, TIMING).act is LeaseAction.REFUSE
    unproved = replace(held, watch=Watch(100.0, False, "x"))
    assert decide(unproved, TIMING).why_not


def test_an_attempt_whose_earlier_one_has_provably_ended_does_not_wait() -> None:
    held = replace(HELD, me=SECOND, rival=FIRST, beat=beat(3, "n3", FIRST), holder_ended=True)
    decision = decide(held, TIMING)
    assert (decision.act, decision.at_once, decision.why_not) == (LeaseAction.CLAIM, True, "")
    other_job = replace(held, me=replace(SECOND, instance=replace(JOB, id="78")))
    assert decide(other_job, TIMING).act is LeaseAction.WATCH, "an ended process of another job proves nothing here"
    no_job = replace(held, me=ME)
    assert decide(no_job, TIMING).act is LeaseAction.WATCH, "a podwatch beside the job is not its next attempt"


def test_the_living_attempt_is_superseded_by_the_next_one_and_never_takes_its_claim_for_its_own() -> None:
    higher = (Claim(5, "n5", 30.0, "h", "me"),)
    own = Own(Claim(4, "mine"), "b1", FIRST.process, won=True)
    old = replace(MINE, me=FIRST, own=own, claims=MINE.claims + higher, rival=SECOND, training=True)
    assert decide(old, TIMING).act is LeaseAction.SUPERSEDED
    undecided = replace(old, own=replace(own, won=False, at_once=True))
    assert decide(undecided, TIMING).act is LeaseAction.SUPERSEDED
    silent = replace(old, answers=False, own=None, trained=False)
    assert decide(silent, TIMING).why_not, "without a store, an attempt without a claim waits"


def test_a_restarted_podwatch_of_the_same_attempt_goes_on_at_once_and_the_next_attempt_claims_anew() -> None:
    recorded = Own(Claim(4, "mine"), "b1", FIRST.process, won=True, recorded=True)
    same = replace(MINE, me=FIRST, own=recorded)
    assert decide(same, TIMING).act is LeaseAction.HOLD
    again = decide(replace(same, me=SECOND), TIMING)  # the protocol keeps the record only where the first has ended
    assert (again.act, again.generation, again.at_once) == (LeaseAction.CLAIM, 5, True)


def test_superseded_is_for_good_and_stops_what_runs() -> None:
    higher = (Claim(5, "n5", 30.0, "h", "other"),)
    lost = decide(replace(MINE, claims=MINE.claims + higher, rival=OTHER), TIMING)
    assert (lost.act, lost.stop, lost.publish) == (LeaseAction.SUPERSEDED, True, False)
    assert "pod-2" in lost.why_not
    back = decide(replace(MINE, lost=True), TIMING)
    assert back.act is LeaseAction.SUPERSEDED, "also where the other claim has vanished"


def test_a_podwatch_that_comes_back_to_its_trainer_after_the_run_was_taken_over() -> None:
    own = Own(Claim(2, "old"), "b1", won=True, recorded=True)
    known = replace(HELD, own=own, training=True)
    assert decide(known, TIMING).act is LeaseAction.SUPERSEDED
    assert decide(replace(known, training=False), TIMING).act is LeaseAction.WATCH, "nothing runs: like any other pod"
    left = replace(known, beat=beat(3, "n3", state="released"))
    assert decide(left, TIMING).act is LeaseAction.CLAIM, "the other one has left"


def test_an_unrecorded_claim_of_this_very_pod_never_stops_its_own_trainer() -> None:
    """A reboot, a claim of generation 4 that trains at once, and podwatch restarted before that was decided; or the
    claim's answer was lost: the journal says 3."""
    own = Own(Claim(3, "old"), "b0", won=True, recorded=True)
    listed = (Claim(3, "old", 1.0, "e", "me"), Claim(4, "unknown", 2.0, "f", "me"))
    known = Known(ME, answers=True, claims=listed, floor=3, rival=ME, own=own, training=True)
    decision = decide(known, TIMING)
    assert (decision.act, decision.generation, decision.at_once, decision.stop) == (LeaseAction.CLAIM, 5, True, False)
    before = decide(replace(known, rival=replace(ME, boot_id="b7")), TIMING)
    assert before.act is LeaseAction.CLAIM, "of a boot between the recorded one and this"
    retried = replace(known, own=Own(Claim(4, "second"), "b1", at_once=True))
    assert decide(retried, TIMING).act is LeaseAction.CLAIM, (
        "given up, made again, and then the first arrived all the same"
    )
    copied = replace(known, own=replace(own, boot="b1"), rival=replace(ME, boot_id="b7"))
    assert decide(copied, TIMING).act is LeaseAction.SUPERSEDED, "another boot while this one lives is a copy"
    assert decide(replace(known, rival=replace(ME, machine_id="m7")), TIMING).act is LeaseAction.SUPERSEDED


def test_a_take_over_by_hand_keeps_the_trainer_that_lives_here() -> None:
    own = Own(Claim(2, "old"), "b1", won=True, recorded=True)
    taken = decide(replace(HELD, own=own, training=True, take_over=True), TIMING)
    assert (taken.act, taken.generation, taken.at_once, taken.stop) == (LeaseAction.CLAIM, 4, True, False)


def test_one_failed_look_does_not_let_a_standby_train_beside_a_holder_it_has_seen() -> None:
    seen = replace(HELD, answers=False, watch=Watch(100.0, False, "x"))
    recorded = Own(Claim(2, "old"), "b0", won=True, recorded=True)
    for known in (
        replace(seen, own=recorded),
        replace(seen, trained=True),
        replace(seen, own=Own(Claim(3, "late"), "b1", at_once=True)),
        replace(seen, claims=(), rival=None, trained=True),
    ):
        waiting = decide(known, TIMING)
        assert (waiting.act, waiting.stop) == (LeaseAction.ASK, False)
        assert waiting.why_not
        assert decide(replace(known, take_over=True), TIMING).why_not == ""
    left = replace(seen, own=recorded, beat=beat(3, "n3", state="released"))
    assert decide(left, TIMING).why_not == "", "it has left: nobody is waited for"
    made = replace(seen, own=Own(Claim(4, "mine"), "b1", at_once=True))
    assert decide(made, TIMING).why_not == "", "our claim came after it"
    ours = replace(seen, own=recorded, rival=replace(ME, boot_id="b0"))
    assert decide(ours, TIMING).why_not == "", "it was this pod"


def test_without_the_store_the_last_recorded_holder_trains_on_and_others_wait() -> None:
    away = Known(ME, answers=False)
    assert decide(away, TIMING).why_not
    holder = replace(away, own=Own(Claim(2, "x"), "b1", won=True, recorded=True))
    assert decide(holder, TIMING).why_not == ""
    assert not decide(holder, TIMING).publish
    assert decide(replace(away, trained=True), TIMING).why_not == "", "from before there were claims"
    assert decide(replace(away, take_over=True), TIMING).why_not == ""
    assert decide(replace(holder, lost=True), TIMING).stop


def test_only_a_pod_that_may_not_train_is_locked_out_by_a_confirmed_refusal() -> None:
    away = Known(ME, answers=False)
    waiting = decide(away, TIMING)
    assert locked_out(waiting, REFUSALS, REFUSAL_SECONDS, TIMING)
    assert not locked_out(waiting, REFUSALS - 1, 1e6, TIMING), "one answer, and a machine that slept"
    assert not locked_out(waiting, 1000, REFUSAL_SECONDS - 1, TIMING), "a key made a moment ago"
    holder = decide(replace(away, own=Own(Claim(2, "x"), "b1", won=True, recorded=True)), TIMING)
    assert not locked_out(holder, 1000, 1e6, TIMING), "the last recorded holder trains on"
    for known in (HELD, MINE, replace(HELD, watch=Watch(0.0, True, "y"), training=True), replace(away, take_over=True)):
        assert not locked_out(decide(known, TIMING), 1000, 1e6, TIMING)


def test_control_stops_every_pod_and_names_one() -> None:
    stopped = decide(replace(MINE, control=Control("stopped", reason="bad data")), TIMING)
    assert (stopped.act, stopped.stop, stopped.publish) == (LeaseAction.HOLD, True, True)
    assert "bad data" in stopped.why_not
    aside = decide(replace(MINE, control=Control(holder="pod-2")), TIMING)
    assert (aside.act, aside.stop, aside.publish) == (LeaseAction.ASIDE, True, False)
    assert decide(replace(MINE, control=Control(holder="pod-1")), TIMING).act is LeaseAction.HOLD
    given = decide(replace(HELD, control=Control(holder="pod-1"), watch=Watch(0.0, True, "y")), TIMING)
    assert (given.act, given.at_once) == (LeaseAction.CLAIM, False), "no watch, but the other one may still be stopping"


def test_the_first_claim_of_the_highest_generation_wins() -> None:
    early, late = Claim(2, "z", 5.0, "b"), Claim(2, "a", 5.1, "a")
    assert winner([late, early, Claim(1, "q", 0.0, "0")]) == early
    same = Claim(2, "y", 5.0, "a")
    assert winner([early, same]) == same, "by file id within one moment"
    assert winner([]) is None


claims = st.lists(
    st.builds(Claim, st.integers(1, 4), st.sampled_from(["mine", "x", "y"]), st.floats(0, 9), st.sampled_from("abc")),
    max_size=4,
)
pods = st.sampled_from([ME, OTHER, replace(ME, machine_id="m9"), Pod("w", "m1", "b1", "p1")])
beats = st.none() | st.builds(
    beat, st.integers(0, 4), st.sampled_from(["mine", "x", ""]), pods, st.sampled_from([*HolderState, ""]),
    st.sampled_from("uv"),
)  # fmt: skip
owns = st.none() | st.builds(
    Own, st.builds(Claim, st.integers(1, 4), st.just("mine")), st.sampled_from(["b1", "b0"]), st.booleans(),
    st.booleans(), st.floats(0, 400), st.floats(0, 200), st.booleans(),
)  # fmt: skip
knowns = st.builds(
    Known, st.just(ME), st.booleans(), claims.map(tuple), st.integers(0, 4), beats, st.none() | pods,
    st.builds(Watch, st.floats(0, 400), st.booleans(), st.just("u")), owns,
    st.builds(Control, st.sampled_from(["running", "stopped"]), st.sampled_from(["", "pod-1", "pod-2"])),
    st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip


@settings(deadline=None, max_examples=examples(500))
@given(knowns)
def test_whatever_is_known(known: Known) -> None:
    decision = decide(known, TIMING)
    first = winner(known.claims)
    top = max(first.generation if first else 0, known.floor)
    if decision.publish:
        assert decision.act is LeaseAction.HOLD
        assert known.own is not None
        assert first is not None
        assert first.nonce == known.own.claim.nonce
        assert first.generation == known.own.claim.generation == top
        assert known.own.won or known.own.waited >= TIMING.claim_wait or known.exclusive
    if decision.act is LeaseAction.CLAIM:
        assert known.answers
        assert decision.generation == top + 1
    if decision.stop:
        assert decision.why_not, "whoever is stopped is told why"
    if decision.act in (LeaseAction.SUPERSEDED, LeaseAction.ASIDE):
        assert decision.stop
    if decision.act is LeaseAction.SUPERSEDED:
        assert known.lost or not known.take_over
    if decision.act in (LeaseAction.WATCH, LeaseAction.REFUSE):
        assert decision.why_not
        assert not known.take_over
        assert not known.lost
    if decision.act in (LeaseAction.WATCH, LeaseAction.SETTLE, LeaseAction.ASK):
        assert decision.wait > 0
    if known.control.stopped:
        assert decision.stop
    assert decide(known, TIMING) == decision


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(st.tuples(st.sampled_from(["s", "s", "s", "t", None]), st.floats(-5, 500)), min_size=1, max_size=40))
def test_only_answered_looks_close_together_count_as_silence(looks: list[tuple[str | None, float]]) -> None:
    watch, total = Watch(), 0.0
    marks = [mark for mark, _ in looks]
    for number, (mark, gap) in enumerate(looks):
        watch = watched(watch, None if mark is None else beat(1, "n", mark=mark), gap)
        if number and 0 <= gap <= MOST_BETWEEN:
            total += gap
    assert watch.changed == (len(set(marks)) > 1), "once changed, the pod behind it has lived"
    assert 0 <= watch.unchanged <= total


# -- documents --------------------------------------------------------------------------------------------------------


def test_documents_come_back_as_they_were_written() -> None:
    claim = Claim(7, "abc")
    assert ClaimDocument.from_bytes(claim_document(claim, ME, "now")).nonce == "abc"
    assert claimant(claim_document(claim, ME, "now")).same_as(ME)
    said = Heartbeat(step=3).signed(ME, claim, HolderState.RUNNING, "now")
    read = read_beat(said.to_bytes())
    assert read is not None
    assert read.said == said
    assert (read.said.host, read.said.generation, read.said.claim, read.said.state) == ("pod-1", 7, "abc", "running")
    assert parse_claim_name("7-abc") == (7, "abc")
    for name in ("7", "-abc", "7-../x", "7-a/b", "x-abc", "7-a\n"):
        assert parse_claim_name(name) is None


@settings(deadline=None)
@given(st.binary(max_size=60) | st.sampled_from([b"[]", b'{"writer_id": 3, "generation": "x"}', b'"' * 50]))
def test_a_heartbeat_of_nonsense_is_still_one(data: bytes) -> None:
    read = read_beat(data)
    assert read is not None
    assert read.mark
    assert read.said == Heartbeat()
    assert claimant(data) == Pod()


def test_what_a_person_may_write_into_control() -> None:
    assert read_control(None) == Control()
    assert read_control(b"{}") == Control()
    assert read_control(b'{"desired": "stopped", "reason": "why"}') == Control("stopped", "", "why")
    assert read_control(b'{"holder": "pod-9", "schema_version": 1, "kind": "podwatch-control"}').holder == "pod-9"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"desired = stopped", "JSON"),
        (b"[1]", "object"),
        (b'{"desierd": "stopped"}', "desierd"),
        (b'{"desired": "stop"}', "desired"),
        (b'{"desired": true}', "desired"),
        (b'{"holder": 7}', "holder"),
        (b'{"holder": "a\\u001b[2J"}', "holder"),
        (b'{"schema_version": 2}', "schema_version"),
    ],
)
def test_a_mistyped_wish_is_named_and_not_taken_for_none(text: bytes, named: str) -> None:
    with pytest.raises(IntegrityError, match=named):
        read_control(text)


# -- the pointer's numbers --------------------------------------------------------------------------------------------


def pointer(generation: int, seq: int, writer: str) -> Pointer:
    return Pointer(generation, seq, "run", "line", None, writer, "2026-01-01T00:00:00Z")


def test_the_owner_goes_on_counting_after_a_late_write() -> None:
    decision = next_pointer(pointer(3, 40, "frozen"), writer_id="a", generation=4, own_seq=52)
    assert (decision.ok, decision.generation, decision.seq) == (True, 4, 53)
    assert next_pointer(None, writer_id="a", generation=4, own_seq=0).seq == 1
    assert not next_pointer(pointer(5, 1, "a"), writer_id="a", generation=4).ok, "another boot of ours, or a copy"


@settings(deadline=None, max_examples=examples(200))
@given(st.integers(0, 5), st.integers(0, 50), st.sampled_from("ab"), st.integers(1, 5), st.integers(0, 50))
def test_an_allowed_write_never_goes_back(generation: int, seq: int, writer: str, own: int, own_seq: int) -> None:
    decision = next_pointer(pointer(generation, seq, writer), writer_id="a", generation=own, own_seq=own_seq)
    if decision.ok:
        assert (decision.generation, decision.seq) > (generation, seq)
        assert decision.seq > own_seq
        assert decision.generation == own
    else:
        assert (generation, writer) >= (own, "a")
