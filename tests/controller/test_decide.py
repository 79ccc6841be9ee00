"""The controller's money rules, one look at a time: what is created, what is destroyed, and what a machine costs.

Each case differs from one that acts by one fact only, so that a rule that is left out is seen.
"""

from dataclasses import replace
from typing import Any

import pytest

from podwatch.controller.configuration import ControllerConfiguration, ProviderConfiguration
from podwatch.controller.decide import MARK, Action, Decision, control_wanted, decide
from podwatch.controller.machines import Listing, Rented, RentedState, label_of, number_of
from podwatch.controller.observe import CAP, LOOK_MARGIN_SECONDS, PRICE, Facts, observe
from podwatch.controller.records import MachineRecord, spent
from podwatch.controller.run_view import RunSeen
from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.lease import Beat, Control, Heartbeat

TAG = "sabcdefg"
NOW = 1.8e9
HOUR = 3600.0
CAPS = ControllerConfiguration(
    run_id="run", store="b2://bucket", provider=ProviderConfiguration(command=("x",)), max_price_per_hour=2.0,
    max_spend_per_day=100.0, max_spend_total=1000.0, max_machines_per_day=3, digest="first",
)  # fmt: skip


def beat(state: str, age: float, number: int = 0, **fields: Any) -> Beat:
    label = label_of("run", number, TAG) if number else ""
    said = Heartbeat(writer_id="p", host="p", state=state, instance=Instance("", "", "", "", label))
    return Beat(replace(said, **fields), "mark", age)


def rented(number: int = 1, name: str = "m1", state: RentedState = RentedState.RUNNING, price: float = 1.0) -> Rented:
    return Rented(name, label_of("run", number, TAG), state, price, None, "")


def look(*instances: Rented, caps: dict[str, Any] | None = None, **fields: Any) -> Facts:
    """A look at a run whose pod said goodbye; ``fields``: of Facts, or of what the store says."""
    seen = {"beat": beat("preempted", 400.0), "watched": 1000.0}
    own = {name: fields.pop(name) for name in ("now", "listing", "skip") if name in fields}
    allowed, listing = CAPS.model_copy(update=caps or {}), Listing("me", instances)
    return replace(Facts(NOW, allowed, TAG, listing, RunSeen(**seen | fields)), **own)


def trained(number: int, hours_ago: float, *, hours: float = 1.0, price: float = 1.0, **fields: Any) -> MachineRecord:
    """A machine that trained for ``hours`` and has ended."""
    since = NOW - hours_ago * HOUR
    made = MachineRecord(number, 2.0, since, f"old{number}", price, since + hours * HOUR, since)
    own = {"account": "me", "configuration": "first", "booted_at": since + 60, "alive_at": since + 1000}
    return replace(made, **{**own, **fields})


def living(since: float = NOW - HOUR, *, price: float = 1.0, **fields: Any) -> MachineRecord:
    made = MachineRecord(1, 2.0, since, "m1", price, seen=NOW - 30, account="me", configuration="first")
    return replace(made, **{"booted_at": since + 60, "alive_at": NOW - 60, **fields})


def decided(machines: tuple[MachineRecord, ...], facts: Facts) -> tuple[tuple[MachineRecord, ...], Decision]:
    seen = observe(machines, facts)
    return seen, decide(seen, facts)


# -- the creation ----------------------------------------------------------------------------------------------------

BAD = {"booted_at": None, "alive_at": None, "boot_failure": True}
TRAINS = beat("running", 9.0, 1)
DUE = living(price=3.0, ended=PRICE, ended_at=NOW - 910.0)
"""It costs more than was allowed, and had its time for a last save."""
OWN = {"account": "me", "configuration": "first"}
ASKED = MachineRecord(1, 2.0, NOW - 590, "", 2.0, missing=NOW - 580, **OWN)
FAILED = tuple(MachineRecord(n, 2.0, NOW - 60, failed="no offer", **OWN) for n in (2, 3))
REFUSED = {
    now: MachineRecord(1, 2.0, NOW - 7200, configuration="first" if now else "before", failed="no", refused=True)
    for now in (True, False)
}
"""By whether controller.toml is still the one of the refusal."""


def test_a_pod_that_is_gone_is_replaced_within_the_caps() -> None:
    _, decision = decided((trained(1, 3.0),), look())
    assert (decision.action, decision.number, decision.max_price) == (Action.CREATE, 2, 2.0)


@pytest.mark.parametrize(
    ("machines", "facts", "word"),
    [
        ((trained(1, 3.0),), look(caps={"max_spend_total": 2.2}), "cap of its total"),
        ((trained(1, 3.0),), look(caps={"max_spend_total": 50.0, "spent_before": 48.0}), "cap of its total"),
        ((trained(1, 3.0),), look(caps={"max_spend_per_day": 2.2}), "cap of its day"),
        ((trained(1, 1.0),), look(caps={"max_spend_per_hour": 2.2}), "cap of its hour"),
        ((trained(1, 9), trained(2, 6), trained(3, 3)), look(), "3 machines were requested within 24 h"),
        (tuple(trained(n, 40.0 - n, **BAD) for n in (1, 2, 3)), look(), "3 machines in a row failed"),
        ((trained(1, 2.0), trained(2, 0.01, hours=0.005, **BAD)), look(), "requests for a machine failed"),
        ((replace(trained(1, 3.0), adopted=True),), look(), "the records lack machine 1"),
        ((trained(1, 3.0),), look(number=2), "the records lack machine 2"),
        ((), look(settles_in=30.0), "decided in 30 s"),
        ((), look(other="elsewhere"), "Another controller"),
        ((), look(trouble="away"), "The store says nothing"),
        ((), look(caps={"paused": True}), "pauses"),
        ((), look(listing="garbage"), "no valid list"),
        ((), look(beat=None), "no pod has ever"),
        ((), look(beat=beat("running", 250.0)), "sent its heartbeat"),
        ((), look(beat=beat("running", 400.0), watched=100.0), "is silent"),
        ((), look(beat=beat("preempted", 400.0, desired="stopped")), "An operator has stopped"),
        ((), look(claim_age=20.0), "claimed the run"),
        ((), look(rented(4, state=RentedState.UNKNOWN)), "the records lack machine 4"),
        ((living(),), look(rented(state=RentedState.UNKNOWN), beat=beat("running", 9.0, 1)), "trains"),
        ((living(),), look(beat=beat("running", 9.0, 1)), "is not in the provider's list now"),
        ((living(account="other"),), look(rented()), "answers for account me, not other"),
        ((DUE,), look(rented(price=3.0), skip=frozenset({"m1"}), beat=TRAINS), "destroy it yourself"),
        ((living(),), look(rented(), end_code=0, beat=TRAINS), "The run has ended"),
        ((), look(control=None, control_problem="control.json is garbage"), "control.json is garbage"),
        ((), look(control=Control("stopped", "by hand")), "orders this run to stop"),
        ((ASKED,), look(beat=beat("running", 400.0)), "It is not known whether the request"),
        ((), look(beat=Beat(Heartbeat(), "mark", 400.0)), "the heartbeat cannot be read"),
        ((), look(beat=beat("preempted", 400.0, outcome="stopped")), "An operator has stopped"),
        ((), look(beat=beat("preempted", 9.0), claim_age=200.0, outdated=True), "claimed the run"),
        ((trained(1, 3.0),), look(caps={"max_spend_total": 2.99}), "cap of its total"),
        ((trained(1, 3.0), *FAILED), look(), "The last 2 requests for a machine failed"),
        ((trained(1, 3.0), *(replace(FAILED[0], number=n) for n in range(2, 12))), look(now=NOW + 3470), "failed"),
        ((REFUSED[True],), look(), "The provider refused"),
    ],
)
def test_what_creates_nothing(machines: tuple[MachineRecord, ...], facts: Facts, word: str) -> None:
    _, decision = decided(machines, facts)
    assert decision.action in (Action.WAIT, Action.ALERT)
    assert word in decision.reason


@pytest.mark.parametrize(
    ("machines", "facts"),
    [
        ((trained(1, 30.0),), look(caps={"max_spend_per_day": 2.2})),
        ((trained(1, 30), trained(2, 6), trained(3, 3)), look()),
        (tuple(trained(n, 40.0 - n, **BAD) for n in (1, 2, 3)), look(caps={"digest": "edited"})),
        (tuple(trained(n, 40.0 - n, **(BAD if n != 2 else {})) for n in (1, 2, 3, 4)), look()),
        ((replace(trained(1, 3.0), adopted=True),), look(caps={"first_number": 2})),
        ((trained(1, 3.0),), look(beat=beat("running", 400.0))),
        ((trained(1, 3.0),), look(caps={"max_spend_total": 3.01})),
        ((), look(caps={"max_spend_per_hour": 2.1, "boot": 7200.0})),
        ((), look(beat=beat("preempted", 9.0))),
        ((), look(claim_age=350.0)),
        ((), look(control=Control("stopped", f"{MARK}a cap"))),
        ((living(),), look(rented(state=RentedState.STOPPED))),
        (tuple(replace(trained(n, 4.0 - n), failed="no offer") for n in (1, 2, 3)), look()),
        ((trained(1, 3.0), *FAILED), look(now=NOW + 61)),
        ((trained(1, 3.0), *(replace(FAILED[0], number=n) for n in range(2, 12))), look(now=NOW + 3590)),
        ((REFUSED[False],), look()),
    ],
)
def test_what_allows_the_next_one(machines: tuple[MachineRecord, ...], facts: Facts) -> None:
    assert decided(machines, facts)[1].action is Action.CREATE


def test_the_number_of_a_machine_is_above_every_claim_and_record() -> None:
    assert decided((trained(1, 3.0),), look(number=1, caps={"first_number": 9}))[1].number == 9
    assert decided((trained(4, 3.0),), look(number=4))[1].number == 5
    assert decided((), look(number=6, caps={"first_number": 7}))[1].number == 7
    assert decided((trained(9, 3.0),), look(number=11, caps={"first_number": 12}))[1].number == 12


@pytest.mark.parametrize(
    ("machines", "facts", "wanted"),
    [
        ((DUE,), look(), Control("stopped", f"{MARK}{PRICE}")),
        ((DUE,), look(control=Control("stopped", "by hand")), None),
        ((DUE,), look(control=None), None),
        ((DUE,), look(trouble="away"), None),
        ((DUE,), look(other="elsewhere"), None),
        ((living(ended="podwatch gave up there", ended_at=NOW),), look(), None),
        ((trained(1, 3.0, ended=CAP),), look(), None),
        ((trained(1, 3.0, ended=CAP),), look(control=Control("stopped", f"{MARK}x")), Control()),
        ((), look(control=Control("stopped", "by hand")), None),
    ],
)
def test_a_machine_that_ends_for_its_cost_is_told_to_save(
    machines: tuple[MachineRecord, ...], facts: Facts, wanted: Control | None
) -> None:
    assert control_wanted(machines, facts) == wanted


# -- what a machine costs --------------------------------------------------------------------------------------------


def seen_of(machine: MachineRecord, facts: Facts) -> MachineRecord:
    return observe((machine,), facts)[0]


def test_a_machine_costs_until_a_list_says_ended_or_lacks_it_after_its_destruction() -> None:
    machine = living()
    assert seen_of(machine, look(rented())).until is None
    assert seen_of(machine, look()).until is None, "a list can leave it out"
    assert seen_of(machine, look(rented(state=RentedState.STOPPED))).until is None
    assert seen_of(machine, look(rented(state=RentedState.ENDED))).until == NOW
    ended = replace(machine, until=NOW - 500)
    assert seen_of(ended, look(rented(state=RentedState.ENDED))).until == NOW - 500
    confirmed = replace(machine, destroyed=NOW - 60)
    assert seen_of(confirmed, look()).until == NOW
    assert seen_of(confirmed, look(listing="no answer")).until is None
    assert seen_of(confirmed, look(listing=Listing("other"))).until is None


def test_one_that_was_destroyed_and_is_back_costs_all_the_time_and_is_destroyed_again() -> None:
    machine = living(alive_at=NOW - 2000, ended="its heartbeat is silent", ended_at=NOW - 1000)
    ended = replace(machine, destroyed=NOW - 600, until=NOW - 500)
    seen, decision = decided((ended,), look(rented()))
    assert (seen[0].until, seen[0].destroyed) == (None, None)
    assert spent(seen, NOW) == pytest.approx(1.0)
    assert decision.action is not Action.CREATE
    _, decision = decided(seen, look(rented(), beat=beat("running", 1000.0, 1)))
    assert (decision.action, decision.id) == (Action.DESTROY, "m1")


def test_a_price_that_falls_makes_nothing_cheaper() -> None:
    assert seen_of(living(price=2.0), look(rented(price=0.5))).price_per_hour == 2.0
    assert seen_of(living(price=0.5), look(rented(price=2.0))).price_per_hour == 2.0


def test_a_request_without_an_answer_costs_the_highest_price_until_lists_have_shown_it_or_nothing() -> None:
    seen, decision = decided((ASKED,), look())
    assert (decision.action, bool(seen[0].costs)) == (Action.WAIT, True)
    assert spent(seen, NOW) == pytest.approx(2.0 * 590 / HOUR)
    (shown,) = observe((ASKED,), look(rented()))
    assert (shown.id, shown.price_per_hour) == ("m1", 1.0)
    failed = observe((ASKED,), look(now=NOW + 20))[0]
    assert (failed.costs, bool(failed.failed), spent((failed,), NOW)) == (False, True, 0.0)


def test_a_request_that_created_several_costs_for_each_and_each_is_destroyed() -> None:
    both = look(rented(), rented(1, "m2", price=0.5), end_code=0)
    for known in ((living(),), (ASKED,), (replace(ASKED, failed="no offer"),)):
        seen, decision = decided(known, both)
        assert {one.id for one in seen if one.costs} == {"m1", "m2"}
        assert sum(one.price_per_hour for one in seen if one.costs) == 1.5
        assert decision.action is Action.DESTROY


@pytest.mark.parametrize(("missing", "destroyed"), [(310.0, True), (290.0, False)])
def test_one_that_lists_have_lacked_for_5_minutes_is_destroyed_by_its_id(missing: float, destroyed: bool) -> None:
    machine = living()
    hidden = replace(machine, missing=NOW - missing)
    _, decision = decided((hidden,), look(beat=beat("running", 301.0, 1)))
    assert (decision.action is Action.DESTROY) == destroyed
    undecided = {"beat": beat("running", 400.0, 1), "watched": 100.0}
    no_list = [{"listing": found} for found in (Listing("other"), "no answer")]
    for fact in ({"beat": beat("running", 9.0, 1)}, {"trouble": "away"}, undecided, *no_list):
        assert decided((hidden,), look(**fact))[1].action is not Action.DESTROY


def test_what_is_confirmed_destroyed_is_destroyed_once_while_no_list_answers() -> None:
    confirmed = replace(DUE, destroyed=NOW - 60)
    seen, decision = decided((confirmed,), look(listing="no answer", beat=TRAINS))
    assert (bool(seen[0].costs), decision.action) == (True, Action.ALERT)


@pytest.mark.parametrize(
    ("machine", "sender", "own"),
    [
        (living(), Instance(label=label_of("run", 1, TAG)), True),
        (living(), Instance(id="m1"), True),
        (living(), Instance(id="m1", label=label_of("run", 2, TAG)), False),
        (living(), Instance(id="m2"), False),
        (ASKED, Instance(), False),
    ],
)
def test_a_heartbeat_comes_from_a_machine_by_its_label_else_by_the_id(
    machine: MachineRecord, sender: Instance, own: bool
) -> None:
    machine, said = replace(machine, booted_at=None), Heartbeat(writer_id="p", state="running", instance=sender)
    assert (observe((machine,), look(beat=Beat(said, "mark", 9.0)))[0].booted_at is not None) == own


# -- what is destroyed -----------------------------------------------------------------------------------------------


def ended_by(machine: MachineRecord, facts: Facts) -> str:
    return observe((machine,), facts)[0].ended


@pytest.mark.parametrize("cap", ["max_spend_total", "max_spend_per_day"])
def test_a_cap_leaves_the_time_of_the_last_save(cap: str) -> None:
    """A machine at 1 per hour has cost 1; its last save and two looks may cost 0.5."""
    reserve = (CAPS.final_save + LOOK_MARGIN_SECONDS) / HOUR
    alive = {"beat": beat("running", 9.0, 1)}
    assert ended_by(living(), look(rented(), caps={cap: 1.0 + reserve + 0.01}, **alive)) == ""
    seen, decision = decided((living(),), look(rented(), caps={cap: 1.0 + reserve - 0.01}, **alive))
    assert (seen[0].ended, decision.action) == (CAP, Action.WAIT)
    assert decided(seen, look(rented(), caps={cap: 0.99}, **alive))[1].action is Action.DESTROY, "no money is left"


def test_money_is_reserved_for_every_machine_that_costs() -> None:
    """One has cost 1, the other 0.47, and the last save of each may cost 0.5."""
    machines = (living(), replace(living(NOW - 1700, booted_at=None), number=2, id="m2"))
    for cap, why in ((2.4, CAP), (2.5, "")):
        facts = look(rented(), rented(2, "m2"), caps={"max_spend_total": cap}, beat=beat("running", 9.0, 1))
        assert [one.ended for one in observe(machines, facts)] == [why, why]


SILENT = {"alive_at": NOW - 1000}
STALE = beat("running", 1000.0, 1)


@pytest.mark.parametrize(
    ("machine", "facts", "why"),
    [
        (living(**SILENT), look(rented(), beat=STALE), "its heartbeat is silent for 1000 s"),
        (living(**SILENT), look(rented(), beat=STALE, watched=100.0), ""),
        (living(**SILENT), look(rented(), trouble="away", beat=STALE), ""),
        (living(**SILENT), look(rented(), beat=beat("running", 9.0, 1)), ""),
        (living(**SILENT), look(rented(), beat=beat("restarting", 1000.0, 1)), ""),
        (living(alive_at=NOW - 3700), look(rented(), beat=beat("restarting", 3700.0, 1)), "silent for 3700 s"),
        (living(), look(rented(), beat=beat("released", 9.0, 1)), "podwatch has left it (released)"),
        (living(), look(rented(), beat=beat("released", 9.0, 1, outcome="gave-up")), "podwatch gave up there"),
        (living(), look(rented(), beat=beat("released", 9.0, 1, desired="stopped")), ""),
        (living(ended="podwatch gave up there", ended_at=NOW), look(rented(), trouble="away"), "gave up there"),
        (living(ended="podwatch gave up there", ended_at=NOW), look(rented(), beat=beat("running", 9.0, 1)), ""),
    ],
)
def test_why_a_machine_ends_by_what_the_store_says(machine: MachineRecord, facts: Facts, why: str) -> None:
    assert (why in ended_by(machine, facts)) if why else ended_by(machine, facts) == ""


def test_a_newer_machine_takes_over_once_it_runs_and_while_it_lives() -> None:
    second = replace(living(NOW - 60), number=2, id="m2")
    both = look(rented(), rented(2, "m2"), beat=beat("running", 9.0, 2))
    assert observe((living(), second), both)[0].ended == "a newer machine has taken the run over"
    over = replace(living(NOW - 600), number=2, id="m2", until=NOW - 60)
    assert not observe((living(), over), look(rented(), beat=beat("running", 9.0, 1)))[0].ended
    boots = replace(second, booted_at=None)
    assert not observe((living(), boots), look(rented(), rented(2, "m2"), beat=beat("running", 9.0, 1)))[0].ended


@pytest.mark.parametrize(("steps", "failure"), [((1, 2), False), ((1, 1), True), ((None, None), True)])
def test_a_machine_that_made_a_step_has_booted(steps: tuple[int | None, int | None], failure: bool) -> None:
    short = living(booted_at=NOW - 2000, alive_at=NOW - 1900, first_step=steps[0], last_step=steps[1])
    seen = observe((short,), look(rented(), beat=beat("running", 1900.0)))[0]
    assert (bool(seen.ended), seen.boot_failure) == (True, failure)
    assert not observe((FAILED[0],), look())[0].boot_failure, "a request that created nothing is none"


def test_a_machine_past_its_price_ends() -> None:
    alive = {"beat": beat("running", 9.0, 1)}
    assert ended_by(living(), look(rented(price=2.0), **alive)) == ""
    assert ended_by(living(), look(rented(price=2.1), **alive)) == PRICE


@pytest.mark.parametrize(
    ("since", "said", "fields", "destroyed"),
    [
        (890.0, beat("running", 9.0, 1), {}, False),
        (910.0, beat("running", 9.0, 1), {}, True),
        (10.0, beat("running", 400.0, 1), {}, True),
        (10.0, beat("running", 400.0, 1), {"watched": 100.0}, False),
        (10.0, beat("released", 9.0, 1, unstored_step=3), {}, False),
        (10.0, beat("released", 9.0, 1), {}, True),
        (890.0, None, {"trouble": "away"}, False),
        (910.0, None, {"trouble": "away"}, True),
    ],
)
def test_an_ended_machine_has_the_time_of_its_last_save(
    since: float, said: Beat | None, fields: dict[str, Any], destroyed: bool
) -> None:
    machine = living(price=3.0, ended=PRICE, ended_at=NOW - since)
    _, decision = decided((machine,), look(rented(price=3.0), beat=said, **fields))
    assert (decision.action is Action.DESTROY) == destroyed


@pytest.mark.parametrize(
    ("listing", "destroyed"), [("no answer", True), (Listing("other", (rented(price=3.0),)), False)]
)
def test_a_list_that_cannot_be_read_protects_nothing_from_its_bound(listing: Listing | str, destroyed: bool) -> None:
    """The list of another account does."""
    machine = living(price=3.0, ended=PRICE, ended_at=NOW - 910.0)
    _, decision = decided((machine,), look(listing=listing, beat=beat("running", 9.0, 1)))
    assert (decision.action is Action.DESTROY, decision.id) == (destroyed, "m1" if destroyed else "")
    waits = living(price=3.0, ended=PRICE, ended_at=NOW - 890.0)
    assert decided((waits,), look(listing=listing, beat=beat("running", 9.0, 1)))[1].action is Action.ALERT
    at_a_cap = look(listing=listing, caps={"max_spend_total": 1.0}, beat=beat("running", 9.0, 1))
    assert (decided((living(),), at_a_cap)[1].action is Action.DESTROY) == destroyed, "no money is left"


@pytest.mark.parametrize(("age", "destroyed"), [(1790.0, False), (1810.0, True)])
def test_a_machine_that_never_boots_is_a_boot_failure(age: float, destroyed: bool) -> None:
    machine = living(NOW - age, booted_at=None, alive_at=None)
    seen, decision = decided((machine,), look(rented()))
    assert (decision.action is Action.DESTROY, seen[0].boot_failure) == (destroyed, destroyed)


def test_one_that_the_records_lack_is_bounded_as_any_other() -> None:
    made = replace(rented(7), created_at=NOW - HOUR)
    assert spent(observe((), look(made)), NOW) == pytest.approx(1.0), "since the provider's time"
    assert observe((), look(replace(made, created_at=NOW + HOUR)))[0].requested_at == NOW
    ended = observe((), look(replace(made, state=RentedState.ENDED)))[0]
    assert (ended.costs, spent((ended,), NOW)) == (False, pytest.approx(1.0))
    seen, decision = decided((), look(rented(7), caps={"max_spend_total": 0.1}))
    assert (seen[0].number, seen[0].adopted, bool(seen[0].costs)) == (7, True, True)
    assert (decision.action, decision.id) == (Action.DESTROY, "m1")


@pytest.mark.parametrize(
    "label",
    ["podwatch:run:1", "podwatch:run:1:sother22", "podwatch:other:1:sabcdefg", "podwatch:run:01:sabcdefg",
     "podwatch:run:0:sabcdefg", "podwatch:run:1:sabcdefg ", "xpodwatch:run:1:sabcdefg", "Podwatch:run:1:sabcdefg", ""],
)  # fmt: skip
def test_another_label_is_no_machine_of_this_run(label: str) -> None:
    assert number_of("podwatch:run:1:sabcdefg", "run", TAG) == 1
    assert number_of(label, "run", TAG) is None
    foreign = replace(rented(), label=label)
    seen, decision = decided((), look(foreign, caps={"max_spend_total": 3.0}, end_code=0))
    assert (seen, decision.action) == ((), Action.END)
