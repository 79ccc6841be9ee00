"""The pure decision of the controller, one look at a time."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.errors import ExitCode, IntegrityError
from podwatch.domain.lease import Beat, Claim, Control, Heartbeat
from podwatch.domain.replacement import (
    Billed,
    Listing,
    Record,
    Rented,
    RentedState,
    Rules,
    generation_of,
    joined,
    label_of,
    parse_label,
    parse_listing,
    parse_record,
    parse_rules,
    record_document,
    store_tag,
)
from podwatch.policy.rented_machines import Facts, observed, spent
from podwatch.policy.replacement import MARK, Action, Decision, control_wanted, decide

NOW = 1_000_000.0
RULES = Rules(("vast",), 2.0, 100.0, 500.0, digest="d")
DEAD = Beat(Heartbeat(state="running", desired="running", host="old", step=40), age=400.0)


def machine(number: int, state: str = "running", *, id: str = "", price: float = 1.0, run: str = "r") -> Rented:  # noqa: A002
    return Rented(id or f"m{number}", label_of(run, number), RentedState(state), price)


def record(number: int, **changes: object) -> Record:
    made = Record(number, "vast", 2.0, NOW - 7200, "me", rules="d", settled=True)
    billed = (Billed("vast", f"m{number}", 1.0, NOW - 7200, seen=NOW - 60),)
    return replace(made, **{"billed": billed, "booted_at": NOW - 7000, "alive_at": NOW - 400, **changes})


def facts(*machines: Rented, **changes: object) -> Facts:
    base = Facts(NOW, "r", {"vast": Listing("me", machines)}, RULES, beat=DEAD)
    return replace(base, **changes)


def decided(found: Facts, *records: Record) -> Decision:
    return decide(observed(records, found), found)


def changed(beat: Beat, *, age: float | None = None, **fields: object) -> Beat:
    return replace(beat, said=replace(beat.said, **fields), age=beat.age if age is None else age)  # type: ignore[arg-type]


def of(number: int, age: float = 10.0, **changes: object) -> Beat:
    return changed(DEAD, age=age, instance=Instance(label=label_of("r", number)), **changes)


def test_a_dead_pod_without_a_machine_is_replaced() -> None:
    found = decided(facts())
    assert (found.action, found.provider, found.label, found.max_price) == (Action.CREATE, "vast", "podwatch:r:1", 2.0)
    assert "Pod old is silent since 400 s" in found.reason
    assert decided(facts(beat=changed(DEAD, age=100, state="preempted"))).action is Action.CREATE


@pytest.mark.parametrize(
    ("changes", "action", "words"),
    [
        ({"lists": {"vast": "list failed (429)"}}, Action.ALERT, "gave no valid list: list failed (429)"),
        ({"lists": {}}, Action.ALERT, "no command is configured"),
        ({"beat": None}, Action.ALERT, "no pod has ever sent a heartbeat"),
        ({"beat": changed(DEAD, state="")}, Action.ALERT, "the heartbeat cannot be read"),
        ({"beat": changed(DEAD, age=299)}, Action.WAIT, "it counts as dead after 1 s more"),
        ({"beat": changed(DEAD, age=20)}, Action.WAIT, "sent its heartbeat 20 s ago"),
        ({"claim_age": 30.0}, Action.WAIT, "A pod claimed the run 30 s ago"),
        ({"rules": None, "problem": "there is no controller.json"}, Action.ALERT, "there is no controller.json"),
        ({"control": None, "problem": "control.json is not valid JSON"}, Action.ALERT, "control.json is not"),
        ({"control": Control(desired="stopped")}, Action.WAIT, "orders this run to stop"),
        ({"control": Control(holder="my-own-pod")}, Action.WAIT, "gives this run to my-own-pod"),
        ({"rules": replace(RULES, paused=True, reason="quota")}, Action.WAIT, "pauses the controller (quota)"),
        ({"rules": replace(RULES, max_replacements_per_day=0)}, Action.ALERT, "highest number allowed"),
        ({"rules": replace(RULES, max_spend_total=1.0)}, Action.ALERT, "its total spend has no room"),
        ({"rules": replace(RULES, max_spend_per_day=1.0)}, Action.ALERT, "its spend per day has no room"),
        ({"beat": changed(DEAD, desired="stopped")}, Action.WAIT, "An operator has stopped training"),
        ({"end_code": 65}, Action.END, "must not run again"),
        ({"end_code": 0}, Action.END, "the run is finished"),
        ({"claims": (Claim(1, "theirs", NOW - 50),)}, Action.WAIT, "Another controller"),
    ],
)
def test_each_missing_condition_keeps_the_money(changes: dict, action: Action, words: str) -> None:
    found = decided(facts(**changes))
    assert found.action is action
    assert words.lower() in found.reason.lower()


def test_after_an_outage_of_the_store_a_silent_heartbeat_is_watched_before_it_counts() -> None:
    back = facts(watched=30.0)
    found = decided(back)
    assert (found.action, found.soon, found.next_look) == (Action.WAIT, True, 75.0)
    assert "counts as dead if its heartbeat stays unchanged for 210 s more" in found.reason
    assert found.prepare == 0
    assert decided(replace(back, watched=150.0)).prepare == 1
    assert decided(replace(back, watched=240.0)).action is Action.CREATE
    goodbye = replace(back, beat=changed(DEAD, state="preempted"))
    assert decided(goodbye).action is Action.CREATE


@pytest.mark.parametrize("booted", [True, False])
def test_after_an_outage_of_the_store_no_machine_is_given_up_at_once(booted: bool) -> None:
    there = record(3, alive_at=NOW - 2000) if booted else record(3, booted_at=None, alive_at=None)
    beat = of(3, 2000.0) if booted else changed(DEAD, age=9000.0)
    back = facts(machine(3), beat=beat, watched=0.0)
    [after] = observed((there,), back)
    found = decide((after,), back)
    assert (after.ended, found.action, found.soon) == ("", Action.WAIT, True)
    [after] = observed((after,), replace(back, watched=240.0))
    assert after.ended.startswith("no heartbeat")
    assert observed((after,), back) == (after,), "a verdict lasts for a controller that has just started"


@pytest.mark.parametrize("state", ["preempted", "running", "released"])
@pytest.mark.parametrize("booted", [True, False])
def test_a_single_look_of_a_schedule_is_followed_by_others_until_a_silent_machine_can_end(
    state: str, booted: bool
) -> None:
    """Looks that are ten minutes apart never watch the heartbeat for long enough: a machine that did not boot after the
    goodbye of the pod before was billed for ever."""
    there = record(3, alive_at=NOW - 2000) if booted else record(3, booted_at=None, alive_at=None)
    seen = facts(machine(3), beat=changed(DEAD, age=9000.0, state=state), watched=0.0)
    [after] = observed((there,), seen)
    found = decide((after,), seen)
    assert (found.action, found.soon, found.next_look) == (Action.WAIT, True, 75.0)
    assert decided(replace(seen, watched=240.0), there).action is Action.DESTROY
    blind = replace(seen, lists={**seen.lists, "other": "no answer"}, rules=replace(RULES, providers=("vast", "other")))
    found = decide((after,), blind)
    assert (found.action, found.soon, found.next_look) == (Action.ALERT, True, 75.0), "another provider is away"


def test_two_controllers_write_one_record_and_no_cost_is_lost() -> None:
    """Simulated months: a machine that had been destroyed came back for a minute, one controller saw it, and the other
    one's write, which followed from the record before, took its cost out of the books."""
    gone = record(3, billed=(Billed("vast", "m3", 1.0, NOW - 7200, NOW - 6000, seen=NOW - 6030),), ended="the cap")
    back = replace(gone, billed=(replace(gone.billed[0], until=None, seen=NOW - 5),))
    heard = replace(gone, alive_at=NOW - 60)
    both = joined(heard, back, gone)
    assert (both.billed, both.alive_at, both.ended) == (back.billed, NOW - 60, "the cap")
    assert joined(back, heard, gone) == both
    ended = replace(back, billed=(replace(back.billed[0], until=NOW),))
    assert joined(ended, back, gone).billed[0].until == joined(back, ended, gone).billed[0].until == NOW
    second = replace(gone, billed=(*gone.billed, Billed("vast", "m4", 2.0, NOW - 100, seen=NOW)))
    assert {one.id for one in joined(heard, second, gone).billed} == {"m3", "m4"}
    judged = replace(gone, ended="", ended_at=None)
    assert joined(judged, heard, gone).ended == joined(heard, judged, gone).ended == "", "the one that changed it"


@st.composite
def bills_of_a_machine(draw: st.DrawFn) -> Billed:
    """As looks write them: no end before the last sight."""
    seen = draw(st.none() | st.floats(NOW - 8000, NOW))
    until = draw(st.none() | st.floats(NOW - 8000 if seen is None else seen, NOW))
    number, price, since = draw(st.integers(1, 2)), draw(st.floats(0.1, 3.0)), draw(st.floats(NOW - 9000, NOW - 8000))
    return Billed("vast", f"m{number}", price, since, until, seen)


@given(
    bills=st.lists(
        st.lists(bills_of_a_machine(), max_size=2, unique_by=lambda one: one.id).map(tuple), min_size=3, max_size=3
    ),
)
def test_joining_is_the_same_from_both_sides_and_adds_nothing_twice(bills: list[tuple[Billed, ...]]) -> None:
    base, ours, theirs = (record(1, billed=some) for some in bills)

    def known(found: Record) -> dict[str, Billed]:
        return {one.id: one for one in found.billed}

    both = joined(ours, theirs, base)
    assert known(both) == known(joined(theirs, ours, base))
    assert known(both).keys() == known(ours).keys() | known(theirs).keys()
    assert joined(both, theirs, base).billed == both.billed
    for name, one in known(both).items():
        sides = [found[name] for found in (known(ours), known(theirs)) if name in found]
        assert one.price_per_hour == max(side.price_per_hour for side in sides)
        assert one.until is None or one.until in [side.until for side in sides]
        if len(sides) == 1:
            assert one.since == sides[0].since


def test_a_late_heartbeat_of_a_pod_that_lost_the_run_ends_no_machine() -> None:
    late = facts(machine(3), beat=of(2, 10.0), outdated=True)
    assert decided(late, record(3)).action is Action.WAIT
    assert decided(replace(late, outdated=False), record(3)).action is Action.DESTROY


@pytest.mark.parametrize("state", ["pending", "running", "unknown"])
def test_nothing_is_created_beside_a_living_machine(state: str) -> None:
    found = decided(facts(machine(3, state)), record(3))
    assert found.action is Action.WAIT
    assert "silent since 400 s" in found.reason


def test_a_stopped_machine_of_a_silent_pod_is_replaced_first_and_destroyed_once_the_new_one_trains() -> None:
    assert decided(facts(machine(3, "stopped")), record(3)).action is Action.CREATE
    new = record(4, booted_at=NOW - 5)
    found = decided(facts(machine(3, "stopped"), machine(4), beat=of(4)), record(3), new)
    assert (found.action, found.id) == (Action.DESTROY, "m3")


@pytest.mark.parametrize(
    "label", ["podwatch:r-2:3", "podwatch:r:3x", "podwatch:r:03", "podwatch:r", "r", "podwatch:R:3"]
)
def test_a_label_counts_only_in_full(label: str) -> None:
    assert generation_of(label, "r") is None
    strange = replace(machine(3), label=label)
    assert decided(facts(strange)).action is Action.CREATE
    finished = decided(facts(strange, end_code=0))
    assert finished.action is Action.END


def test_a_silent_machine_is_given_up_after_its_time_and_then_replaced() -> None:
    silent = changed(of(3), age=901.0)
    found = decided(facts(machine(3), beat=silent), record(3, alive_at=NOW - 901))
    assert (found.action, found.id) == (Action.DESTROY, "m3")
    assert "no heartbeat from it for 900 s" in found.reason
    assert decided(facts(beat=silent), record(3, alive_at=NOW - 901)).action is Action.CREATE


@pytest.mark.parametrize("silent", [900.0, 7200.0])
def test_a_machine_that_control_json_silenced_is_kept_for_an_hour(silent: float) -> None:
    """It sends no heartbeat because it was told to stand aside, perhaps for a name that no pod has."""
    rules, limit = replace(RULES, silent_seconds=silent), max(3600.0, silent)
    told = facts(machine(3), control=Control(holder="typo"), rules=rules)
    early, late = (replace(told, beat=of(3, limit + after)) for after in (-1.0, 1.0))
    assert decided(early, record(3)).action is Action.WAIT
    assert decided(late, record(3)).action is Action.DESTROY
    assert decided(replace(early, beat=of(3, limit - 1.0, state="restarting"))).action is not Action.DESTROY
    taken = replace(told, beat=changed(DEAD, age=10.0, host="typo"))
    assert decided(taken, record(3)).action is Action.DESTROY


def test_what_is_finished_is_destroyed_once_its_checkpoint_is_stored() -> None:
    waiting = of(3, desired="finished", unstored_step=50)
    end = facts(machine(3), beat=waiting, end_code=0)
    records = observed((record(3),), end)
    assert decide(records, end).action is Action.WAIT
    later = replace(end, now=NOW + 899)
    assert decide(observed(records, later), later).action is Action.WAIT
    over = replace(end, now=NOW + 901)
    assert decide(observed(records, over), over).action is Action.DESTROY
    stored = replace(end, beat=changed(waiting, unstored_step=None))
    assert decide(observed(records, stored), stored).action is Action.DESTROY
    gone = replace(stored, lists={"vast": Listing("me")})
    ended = observed(records, gone)
    assert decide(ended, gone).action is Action.WAIT  # one list can be wrong
    later = replace(gone, now=NOW + 601, beat=changed(waiting, unstored_step=None, age=611.0))
    assert decide(observed(ended, later), later).action is Action.END


def test_boot_failures_end_the_attempts_until_the_file_is_edited() -> None:
    bad = [record(n, booted_at=None, alive_at=None, boot_failure=True, intended_at=NOW - 9000) for n in (1, 2, 3)]
    bad = [replace(r, billed=tuple(replace(b, until=NOW - 4000) for b in r.billed)) for r in bad]
    found = decided(facts(), *bad)
    assert found.action is Action.ALERT
    assert "3 machines in a row" in found.reason
    assert decided(facts(rules=replace(RULES, digest="edited")), *bad).action is Action.CREATE
    assert decided(facts(), *bad[:2]).action is Action.CREATE


def test_a_machine_that_never_sends_a_heartbeat_is_destroyed_and_counts() -> None:
    new = record(1, booted_at=None, alive_at=None, intended_at=NOW - 1800)
    new = replace(new, billed=(Billed("vast", "m1", 1.0, NOW - 1800),))
    found = facts(machine(1))
    after = observed((new,), found)
    assert after[0].boot_failure
    assert decide(after, found).action is Action.DESTROY
    early = replace(found, now=NOW - 60)
    assert decide(observed((new,), early), early).action is Action.WAIT


def test_an_unknown_outcome_is_watched_and_nothing_else_is_created() -> None:
    asked = Record(1, "vast", 2.0, NOW - 30, "me", rules="d", unsure_at=NOW - 20)
    found = decided(facts(), asked)
    assert (found.action, found.code) == (Action.WAIT, ExitCode.TRY_AGAIN)
    late = facts(now=NOW + 300)
    closed = observed((asked,), late)
    assert closed[0].settled
    assert closed[0].failed
    assert decide(closed, late).action is Action.CREATE
    blind = facts(lists={"vast": "no answer"}, now=NOW + 9000)
    assert not observed((asked,), blind)[0].settled
    came = observed((asked,), facts(machine(1)))
    assert [b.id for b in came[0].billed] == ["m1"]


def test_of_two_machines_with_one_label_the_one_that_trains_stays() -> None:
    one, two = machine(1, id="a"), machine(1, id="b")
    beat = changed(of(1), instance=Instance("vast", "b", label=label_of("r", 1)))
    found = decided(facts(one, two, beat=beat), record(1, billed=()))
    assert (found.action, found.id) == (Action.DESTROY, "a")
    assert "second machine" in found.reason


def test_a_zombie_that_comes_back_costs_again_and_is_destroyed() -> None:
    old = record(3, billed=(Billed("vast", "m3", 1.0, NOW - 7200, until=NOW - 3600, seen=NOW - 4000),))
    new = record(4)
    found = facts(machine(3), machine(4), beat=of(4))
    after = observed((old, new), found)
    assert after[0].billed[0].until is None
    assert spent(after, NOW) == pytest.approx(4.0)
    assert (decide(after, found).action, decide(after, found).id) == (Action.DESTROY, "m3")


def test_a_machine_whose_record_is_lost_gets_one_by_its_heartbeat() -> None:
    by_label, by_id = of(7), changed(DEAD, age=10.0, instance=Instance("vast", "m7"))
    for beat in (by_label, by_id):
        assert [r.generation for r in observed((), facts(machine(7), beat=beat))] == [7]
    zero_time = replace(machine(7), created_wall=-62_135_596_800.0)  # 0001-01-01, as Go prints no time
    assert spent(observed((), facts(zero_time, beat=by_label)), NOW) == 0.0
    ended = replace(machine(7, "ended"), created_wall=NOW - 9000)
    assert decided(facts(ended)).generation == 8


@pytest.mark.parametrize("change", [{}, {"end_code": 0}, {"beat": None}, {"beat": of(2, age=4000.0)}])
def test_a_machine_of_a_run_of_the_same_name_in_another_store_is_never_destroyed(change: dict) -> None:
    theirs = replace(machine(1), created_wall=NOW - 90_000)
    found = facts(theirs, **change)
    mine = record(2, billed=(replace(record(2).billed[0], until=NOW - 5000),))
    after = observed((mine,), found)
    assert [r.generation for r in after] == [2]
    done = decide(after, found)
    assert done.action is not Action.DESTROY
    assert done.action is not Action.CREATE
    if found.end_code is None:
        assert done.action is Action.ALERT
        assert "Machine m1 at vast has the label podwatch:r:1, but this store has no record of it" in done.reason


TAG, OTHER = store_tag("b2://one "), store_tag("b2://two ")


def tagged(number: int, tag: str = TAG, **changes: object) -> Rented:
    return replace(machine(number), label=label_of("r", number, tag), **changes)


def test_a_tag_is_short_and_tells_stores_apart() -> None:
    tags = {store_tag(f"b2://bucket-{number} runs") for number in range(500)}
    assert len(tags) == 500
    assert all(parse_label(label_of("r", 7, tag), "r") == (7, tag) for tag in tags)
    assert store_tag("b2://one ") == TAG, "the same in each process"
    for wrong in ("podwatch:r:7:8", "podwatch:r:7:", f"podwatch:r:7:{TAG[:-1]}", f"podwatch:r:{TAG}:7", f"r:7:{TAG}"):
        assert parse_label(wrong, "r") is None


def test_a_new_machine_is_labelled_with_the_tag_of_its_store() -> None:
    found = decided(facts(tag=TAG, proves=True), record(3, billed=(), settled=True))
    assert found.label == label_of("r", found.generation, TAG)


def test_a_machine_of_another_store_is_neither_in_the_way_nor_destroyed() -> None:
    theirs = tagged(1, OTHER, created_wall=NOW - 90_000)
    found = facts(theirs, tag=TAG, proves=True)
    assert observed((), found) == ()
    assert decided(found).action is Action.CREATE
    assert decided(replace(found, end_code=0)).action is Action.END
    mine = record(1, label=label_of("r", 1, TAG), billed=(replace(record(1).billed[0], until=NOW - 5000),))
    assert observed((mine,), found) == (mine,), "the same number is no reason to take it for ours"


def test_a_machine_with_the_old_label_of_a_number_that_is_taken_is_not_destroyed_as_a_second_one() -> None:
    mine, theirs = tagged(1), machine(1, id="theirs")
    found = facts(mine, theirs, beat=changed(of(1), instance=Instance(label=mine.label)), tag=TAG, proves=True)
    done = decided(found, record(1, label=mine.label))
    assert done.action is Action.ALERT
    assert "Machine theirs at vast has the label podwatch:r:1, but this store has no record of it" in done.reason


@pytest.mark.parametrize("created", [NOW - 90_000, None])
def test_a_machine_of_this_store_whose_record_is_lost_is_billed_up_to_its_bound(created: float | None) -> None:
    lost = facts(tagged(7, created_wall=created), beat=changed(DEAD, age=9000.0), tag=TAG, proves=True)
    after = observed((), lost)
    assert [(r.generation, r.label_in("r"), bool(r.costs)) for r in after] == [(7, label_of("r", 7, TAG), True)]
    done = decide(after, lost)
    if created is None:
        assert done.action is Action.WAIT
        lost = replace(lost, now=NOW + 1801)
        after = observed(after, lost)
        done = decide(after, lost)
    assert (done.action, done.label) == (Action.DESTROY, label_of("r", 7, TAG))
    assert "no heartbeat within 1800 s" in done.reason


def test_a_store_that_another_can_be_mistaken_for_proves_nothing() -> None:
    lost = facts(tagged(7, created_wall=NOW - 90_000), beat=changed(DEAD, age=9000.0), tag=TAG, proves=False)
    assert observed((), lost) == ()
    assert decided(lost).action is Action.ALERT


@pytest.mark.parametrize("named", [Instance(label=label_of("r", 7, TAG)), Instance("vast", "m7"), Instance()])
def test_a_machine_that_trains_is_not_given_up_because_its_record_is_lost(named: Instance) -> None:
    beat = changed(DEAD, age=10.0, instance=named)
    found = facts(tagged(7, created_wall=NOW - 90_000), beat=beat, lease=4, tag=TAG, proves=True)
    done = decided(found)
    assert (done.action, done.reason) == (
        Action.WAIT,
        f"Machine m7 at vast ({label_of('r', 7, TAG)}) trains (step 40).",
    )


def test_a_price_that_falls_does_not_make_the_past_cheaper() -> None:
    """A stopped machine is listed with the price of its disk."""
    stopped = observed((record(3),), facts(machine(3, "stopped", price=0.01)))
    assert spent(stopped, NOW) == pytest.approx(2.0)
    assert spent(observed(stopped, facts(machine(3, price=1.5))), NOW) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "named", [Instance(label=label_of("r", 3)), Instance("vast", "m3"), Instance("x", "y", label="l")]
)
def test_a_machine_that_was_renamed_at_the_provider_costs_money_as_long_as_it_sends_heartbeats(named: Instance) -> None:
    """Its cost was forgotten, so that no cap held; and a run that finished ended without it."""
    label = label_of("r", 3)
    named = replace(named, label=label) if named.label else named
    seen = record(3)
    gone = facts(now=NOW + 30, beat=changed(DEAD, age=31.0, instance=named))
    after = observed((seen,), gone)
    assert not after[0].costs, "its last heartbeat can have been under way"
    sends = replace(
        gone, now=NOW + 3600, beat=changed(DEAD, age=10.0, instance=named), rules=replace(RULES, max_spend_total=4.0)
    )
    after = observed(after, sends)
    assert spent(after, NOW + 3600) == pytest.approx(3.0)
    found = decide(after, sends)
    assert (found.action, found.code) == (Action.ALERT, ExitCode.FAILED)
    assert f"the provider's list does not show it with the label {label}" in found.reason
    capped = observed(after, replace(sends, now=NOW + 7200))
    assert control_wanted(capped, replace(sends, now=NOW + 7200)) == Control(
        "stopped", reason=f"{MARK}the spend cap is reached"
    )
    finished = replace(sends, end_code=0, beat=changed(sends.beat or DEAD, state="released", desired="finished"))
    assert decide(observed(after, finished), finished).action is Action.ALERT
    back = replace(sends, lists={"vast": Listing("me", (machine(3),))})
    assert decide(observed(after, back), back).action is Action.WAIT
    silent = replace(sends, now=NOW + 4000, beat=changed(DEAD, age=410.0, instance=named))
    assert not observed(after, silent)[0].costs


def test_a_heartbeat_that_cannot_be_read_ends_no_machine() -> None:
    broken = facts(machine(3), beat=Beat(age=10.0))
    newer = replace(record(4), billed=(), failed="no offer", booted_at=None, alive_at=None)
    assert decided(broken, record(3), newer).action is not Action.DESTROY


def test_a_machine_with_a_new_record_may_cost_what_controller_json_allows() -> None:
    found = facts(
        tagged(7), beat=changed(DEAD, age=10.0, instance=Instance(label=label_of("r", 7, TAG))), tag=TAG, proves=True
    )
    dearer = replace(found, lists={"vast": Listing("me", (tagged(7, price_per_hour=1.9),))})
    after = observed(observed((), found), dearer)
    assert decide(after, dearer).action is Action.WAIT
    above = replace(found, lists={"vast": Listing("me", (tagged(7, price_per_hour=2.1),))})
    assert decide(observed(after, above), above).action is Action.DESTROY


def test_another_account_is_no_evidence() -> None:
    found = decided(facts(lists={"vast": Listing("someone-else")}), record(3))
    assert found.action is Action.ALERT
    assert "answers for account someone-else, not me" in found.reason


def test_the_caps_end_a_machine_in_time_and_control_json_stops_its_training() -> None:
    capped = replace(RULES, max_spend_total=2.4)  # 2.00 spent, 0.50 for its last checkpoint
    found = facts(machine(3), beat=of(3), rules=capped)
    after = observed((record(3),), found)
    assert decide(after, found).action is Action.WAIT
    wanted = control_wanted(after, found)
    assert wanted is not None
    assert (wanted.desired, wanted.reason) == ("stopped", f"{MARK}the spend cap is reached")
    told = replace(found, now=NOW + 120, control=wanted)
    assert decide(observed(after, told), told).action is Action.DESTROY
    raised = replace(told, rules=RULES)
    assert control_wanted(observed(after, raised), raised) == Control()


def test_the_caps_hold_while_controller_json_cannot_be_read() -> None:
    capped = replace(RULES, max_spend_total=2.4)
    found = facts(machine(3), beat=of(3), rules=None, kept=capped, problem="controller.json is not valid JSON")
    after = observed((record(3),), found)
    assert after[0].ended == "the spend cap is reached"
    assert observed((record(3),), replace(found, kept=None))[0].ended == ""
    dead = replace(facts(rules=None, kept=RULES), problem="controller.json is not valid JSON")
    assert decided(dead).action is Action.ALERT, "nothing is created by it"


def test_the_new_machine_is_named_until_it_sends_a_heartbeat() -> None:
    new = record(
        4, booted_at=None, alive_at=None, intended_at=NOW - 100, billed=(Billed("vast", "m4", 1.0, NOW - 100),)
    )
    found = facts(machine(4))
    assert control_wanted(observed((new,), found), found) == Control(holder="podwatch:r:4")
    booted = facts(machine(4), beat=of(4), control=Control(holder="podwatch:r:4"))
    assert control_wanted(observed((new,), booted), booted) == Control()
    people = replace(found, control=Control(holder="my-own-pod", reason="test"))
    assert control_wanted(observed((new,), people), people) is None
    stopped = replace(found, control=Control("stopped", reason="data"))
    assert control_wanted(observed((new,), stopped), stopped) == Control("stopped", "podwatch:r:4", "data")


def test_the_next_provider_follows_one_that_fails() -> None:
    rules = replace(RULES, providers=("vast", "runpod"))
    lists = {"vast": Listing("me"), "runpod": Listing("you")}
    failed = replace(record(1), billed=(), failed="no offer", intended_at=NOW - 100)
    found = decided(facts(rules=rules, lists=lists), failed)
    assert (found.action, found.provider) == (Action.CREATE, "runpod")
    soon = decided(facts(rules=rules, lists=lists), replace(failed, intended_at=NOW - 30))
    assert soon.action is Action.WAIT
    refused = [replace(failed, refused=True), replace(failed, generation=2, provider="runpod", refused=True)]
    assert decided(facts(rules=rules, lists=lists, now=NOW + 999), *refused).action is Action.ALERT


def test_a_claim_is_made_while_the_heartbeat_is_only_late() -> None:
    late = decided(facts(beat=changed(DEAD, age=200)))
    assert (late.action, late.prepare) == (Action.WAIT, 1)
    assert decided(facts(beat=changed(DEAD, age=200), claims=(Claim(1, "x", NOW - 9),))).prepare == 0
    mine = Claim(1, "x", NOW - 100)
    assert decided(facts(claims=(mine,), own=mine, own_age=100.0)).generation == 1
    assert decided(facts(claims=(mine,), own=mine, own_age=301.0)).generation == 2
    assert decided(facts(claims=(replace(mine, uploaded_wall=NOW - 901),))).generation == 2


# -- parsing ---------------------------------------------------------------------------------------------------------

GOOD = {
    "version": 1, "account": "a", "complete": True,
    "instances": [
        {"id": "1", "label": "x", "state": "running", "price_per_hour": 0.5, "created_at": None, "detail": ""},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [
        b"", b"null", b"[]", b"{}", b"429 Too Many Requests",
        *(json.dumps(GOOD | change).encode() for change in (
            {"complete": False}, {"complete": 1}, {"account": ""}, {"account": None}, {"version": 2}, {"version": True},
            {"more": 1}, {"instances": None}, {"instances": [{}]}, {"instances": GOOD["instances"] * 2},
            {"instances": [GOOD["instances"][0] | {"state": "paused"}]},
            {"instances": [GOOD["instances"][0] | {"price_per_hour": "0.5"}]},
            {"instances": [GOOD["instances"][0] | {"price_per_hour": -1}]},
            {"instances": [GOOD["instances"][0] | {"id": ""}]},
            {"instances": [GOOD["instances"][0] | {"created_at": "yesterday"}]},
            {"instances": [GOOD["instances"][0] | {"created_at": "2026-01-01T00:00:00"}]},
        )),
        json.dumps(GOOD).encode()[:-5],
    ],
)  # fmt: skip
def test_a_list_of_another_shape_is_never_an_empty_list(broken: bytes) -> None:
    with pytest.raises(IntegrityError):
        parse_listing(broken)


def test_good_documents_are_read() -> None:
    assert parse_listing(json.dumps(GOOD).encode()).instances[0].state is RentedState.RUNNING
    assert parse_listing(json.dumps(GOOD | {"instances": []}).encode()) == Listing("a")
    kept = record(3)
    assert parse_record(record_document(kept, "r"), "r") == kept
    for broken in (None, b"{}", record_document(kept, "other"), b"x"):
        with pytest.raises(IntegrityError):
            parse_record(broken, "r")


def test_controller_json_names_its_mistake() -> None:
    least = {"providers": ["vast"], "max_price_per_hour": 2, "max_spend_per_day": 10, "max_spend_total": 100}
    assert parse_rules(json.dumps(least).encode()).max_price_per_hour == 2.0
    for change, words in (
        ({"max_prize": 1}, "unknown field max_prize"),
        ({"providers": []}, "providers"),
        ({"max_spend_total": "100"}, "max_spend_total"),
        ({"max_spend_total": -1}, "max_spend_total"),
        ({"max_boot_failures": 1.5}, "max_boot_failures"),
        ({"paused": "no"}, "paused"),
        ({"boot_seconds": 1}, "boot_seconds"),
        ({"schema_version": 2}, "schema_version"),
    ):
        with pytest.raises(IntegrityError, match=words):
            parse_rules(json.dumps(least | change).encode())
    for broken in (None, b"", b"[]", b"{}"):
        with pytest.raises(IntegrityError):
            parse_rules(broken)
    twice = json.dumps(least)[:-1] + ', "max_spend_total": 9000}'
    with pytest.raises(IntegrityError, match="max_spend_total is there twice"):
        parse_rules(twice.encode())


# -- for every look --------------------------------------------------------------------------------------------------

tags = st.sampled_from(["", TAG, OTHER])
ages = st.sampled_from([0.0, 100.0, 200.0, 299.0, 301.0, 900.0, 1e5])
machines = st.lists(
    st.builds(
        lambda n, state, run, name, price, tag: Rented(name, label_of(run, n, tag), state, price),
        st.integers(1, 4), st.sampled_from(list(RentedState)), st.sampled_from(["r", "r", "r", "r-2"]),
        st.sampled_from(["m1", "m2", "m3", "m4", "z"]), st.sampled_from([0.5, 1.9, 3.0]), tags,
    ),
    max_size=4, unique_by=lambda one: one.id,
)  # fmt: skip
beats = st.none() | st.builds(
    lambda age, state, desired, outcome, unstored, label: changed(
        Beat(Heartbeat(host="h")), age=age, state=state, desired=desired, outcome=outcome, unstored_step=unstored,
        instance=Instance(label=label),
    ),
    ages, st.sampled_from(["running", "restarting", "preempted", "released", ""]),
    st.sampled_from(["running", "stopped", "finished"]), st.sampled_from(["", "gave-up", "stopped"]),
    st.none() | st.just(5), st.sampled_from(["", *(label_of("r", n, tag) for n in range(1, 5) for tag in ("", TAG))]),
)  # fmt: skip
lists = st.dictionaries(
    st.sampled_from(["vast", "runpod"]),
    st.one_of(st.just("failed"), st.builds(lambda m: Listing("me", tuple(m)), machines)),
)
records = st.lists(
    st.builds(
        lambda n, settled, until, booted, failure, tag: replace(
            record(n), label=label_of("r", n, tag) if tag else "", settled=settled, booted_at=booted,
            boot_failure=failure,
            billed=tuple(replace(b, until=until) for b in record(n).billed) if settled else (),
        ),
        st.integers(1, 4), st.booleans(), st.none() | st.just(NOW - 50), st.none() | st.just(NOW - 7000), st.booleans(),
        tags,
    ),
    max_size=4, unique_by=lambda one: one.generation,
).map(lambda found: tuple(sorted(found, key=lambda one: one.generation)))  # fmt: skip
looks = st.builds(
    lambda listed, beat, rules, control, end, watched, proves: Facts(
        NOW, "r", listed, rules, control, beat=beat, end_code=end, watched=watched, tag=TAG, proves=proves
    ),
    lists, beats,
    st.none() | st.builds(
        lambda names, paused, total: replace(RULES, providers=names, paused=paused, max_spend_total=total),
        st.sampled_from([("vast",), ("vast", "runpod")]), st.booleans(), st.sampled_from([1.0, 10.0, 500.0]),
    ),
    st.none() | st.sampled_from([Control(), Control("stopped"), Control(holder="p"), Control(holder="podwatch:r:2")]),
    st.sampled_from([None, None, None, 0, 65]), st.sampled_from([0.0, 239.0, 240.0]), st.booleans(),
)  # fmt: skip


@given(looks, records)
def test_what_never_happens_in_any_look(found: Facts, before: tuple[Record, ...]) -> None:
    after = observed(before, found)
    done = decide(after, found)
    assert observed(after, found) == after  # a look that is repeated changes nothing
    shown = {
        (provider, one.id): one
        for provider, listing in found.lists.items()
        if isinstance(listing, Listing)
        for one in listing.instances
    }
    if done.action is Action.CREATE:
        assert found.rules is not None
        assert not found.rules.paused
        assert found.beat is not None
        assert (found.beat.age > 300 and found.watched >= 240) or found.beat.said.state in ("preempted", "released")
        assert all(isinstance(found.lists.get(name), Listing) for name in found.rules.providers)
        alive = [o.label for o in shown.values() if o.state not in ("stopped", "ended")]
        labels = {r.label_in("r") for r in after}
        assert not any(label in labels or (parse_label(label, "r") or (0, OTHER))[1] != OTHER for label in alive)
        assert all(r.settled for r in after)
        assert found.end_code is None
        assert found.control is not None
        assert not found.control.stopped
        assert done.generation > max((r.generation for r in after), default=0)
        assert spent(after, NOW) + found.rules.max_price_per_hour / 2 <= found.rules.max_spend_total
    if done.action is Action.DESTROY:
        one = shown[done.provider, done.id]
        number = generation_of(one.label, "r")
        assert number is not None
        assert (one.label, one.state) == (done.label, one.state)
        assert one.state is not RentedState.ENDED
        same = [o for o in shown.values() if o.label == one.label and o.state is not RentedState.ENDED]
        its = next(r for r in after if r.generation == number)
        assert its.label_in("r") == one.label
        assert len(same) > 1 or its.ended
        if not any(r.label_in("r") == one.label for r in before):
            sender = found.beat.said.instance if found.beat is not None else Instance()
            assert sender.label == one.label or (found.proves and one.label.endswith(f":{TAG}"))
    if done.action is Action.END:
        assert not any(r.open for r in after)
        assert found.end_code is not None
