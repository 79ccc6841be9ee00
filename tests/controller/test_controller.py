"""The controller over simulated time: it replaces a dead pod, and spends nothing that it must not."""

import json
import os
from pathlib import Path

import pytest

from podwatch.controller.configuration import parse_configuration
from podwatch.controller.decide import MARK
from podwatch.controller.machines import Listing, label_of
from podwatch.controller.provider import OutcomeUnknown
from podwatch.controller.run_view import ControllerClaim
from podwatch.domain.errors import Busy, ConfigurationError, ExitCode, HostError, IntegrityError
from podwatch.domain.lease import Claim, Control, Pod, claim_document
from tests.controller.simulated import KEYS, TAG, Machine, World, seeds

HOUR = 3600.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def actions(world: World) -> list[str]:
    return [str(look.action) for look in world.looks]


def test_a_dead_pod_is_replaced_once(world: World) -> None:
    world.advance(600)
    assert world.requests == 1
    (machine,) = world.living()
    assert machine.label == label_of("run", 1, TAG)
    world.advance(2 * HOUR)
    assert (world.requests, world.problems) == (1, [])
    machine.silent = True
    world.advance(2 * HOUR)
    assert (world.requests, [m.label for m in world.living()]) == (2, [label_of("run", 2, TAG)])
    assert world.destroyed == [machine.id]
    assert world.problems == []


def test_a_new_process_continues_with_the_records(world: World) -> None:
    world.advance(600)
    world.controller = world.started()
    world.advance(HOUR)
    assert (world.requests, world.problems) == (1, [])
    assert world.spent_in_records() == pytest.approx(world.cost(), rel=0.2)


# -- when nothing is created -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "code"),
    [({"unknown": 1.0}, ExitCode.UNAVAILABLE), ({"refuse": 1.0}, ExitCode.UNAVAILABLE)],
)
def test_without_a_list_or_an_offer(tmp_path: Path, faults: dict[str, float], code: ExitCode) -> None:
    world = World(tmp_path, sick=faults)
    world.advance(600)
    assert world.machines == []
    assert code in {look.code for look in world.looks}


def test_an_outage_of_the_store_is_no_death(world: World) -> None:
    world.advance(900)
    (machine,) = world.living()
    world.store.away = True
    world.advance(6 * HOUR)
    assert world.living() == [machine], "neither replaced nor destroyed"
    world.store.away = False
    world.advance(600)
    assert (world.living(), world.requests, world.problems) == ([machine], 1, [])


def test_a_revoked_key_is_no_death(world: World) -> None:
    world.advance(900)
    world.store.refused = True
    world.advance(3 * HOUR)
    assert (len(world.living()), world.requests) == (1, 1)
    assert world.looks[-1].code is ExitCode.UNAVAILABLE


def test_a_silent_pod_must_be_watched_while_the_store_answers(world: World) -> None:
    world.beat("user-pod")
    world.now += 1000.0
    world.look()
    assert world.requests == 0
    world.advance(200)
    assert world.requests == 0
    world.advance(300)
    assert world.requests == 1


@pytest.mark.parametrize(
    ("prepare", "word"),
    [
        (lambda w: w.store.data.pop(KEYS.heartbeat), "no pod has ever sent"),
        (lambda w: w.store.put(KEYS.heartbeat, b"{"), "cannot be read"),
        (lambda w: w.store.put(KEYS.control, Control("stopped", "me").to_bytes()), "orders this run to stop"),
        (lambda w: w.store.put(KEYS.control, b'{"desired": "maybe"}'), "control.json"),
        (lambda w: w.beat("user-pod", state="released", desired="stopped"), "operator has stopped"),
    ],
)
def test_what_people_order_and_what_cannot_be_known(world: World, prepare: object, word: str) -> None:
    prepare(world)  # type: ignore[operator]
    world.advance(HOUR)
    assert world.requests == 0
    assert any(word in look.reason for look in world.looks)


def test_a_pod_that_has_just_claimed_the_run(world: World) -> None:
    world.now += 900.0
    world.store.wall = world.wall()
    world.store.put(KEYS.claim(2, "n"), claim_document(Claim(2, "n"), Pod("w2"), "now"))
    world.advance(240)
    assert world.requests == 0
    assert "claimed the run" in world.looks[-1].reason
    world.advance(600)
    assert world.requests == 1


def test_a_machine_that_the_list_leaves_out_costs_on(world: World) -> None:
    world.advance(900)
    (machine,) = world.living()
    machine.listed = False
    world.advance(3 * HOUR)
    assert world.requests == 1, "its heartbeat shows that it lives"
    assert world.spent_in_records() == pytest.approx(world.cost(), rel=0.1)


def test_an_empty_list_is_no_proof_at_once(world: World) -> None:
    world.advance(900)
    (machine,) = world.living()
    machine.silent = machine.boots = True
    machine.listed = False
    world.advance(270)
    assert world.requests == 1
    world.advance(1200)
    assert world.requests == 2, "in the end it is gone"


def test_a_request_without_an_answer_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OutcomeUnknown("no answer")

    monkeypatch.setattr(world, "create", unknown)
    world.advance(400)
    monkeypatch.undo()
    assert any("not known whether" in look.reason for look in world.looks)
    assert world.requests == 0
    world.advance(1200)
    assert (world.requests, len(world.living())) == (1, 1)


def test_a_machine_that_no_list_ever_shows_is_destroyed_before_another_is_requested(tmp_path: Path) -> None:
    world = World(tmp_path, sick={"unlisted": 1.0})
    world.advance(900)
    (machine,) = world.living()
    assert not machine.listed
    machine.silent = True
    world.advance(2 * HOUR)
    assert (world.destroyed[0], world.problems) == (machine.id, [])
    assert world.requests == 2


def test_a_machine_whose_request_had_no_answer_appears_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(run_id: str, generation: int, label: str, *_: object) -> None:
        world.requests += 1
        made = world.rent(label)
        made.boots, made.shown_at = False, world.now + 590.0
        raise OutcomeUnknown("no answer")

    monkeypatch.setattr(world, "create", late)
    world.advance(1500)
    assert (world.requests, len(world.controller.records.machines)) == (1, 1)


def test_the_store_away_destroys_nothing_that_lists_leave_out(world: World) -> None:
    world.advance(900)
    (machine,) = world.living()
    machine.listed, world.store.away = False, True
    world.advance(2 * HOUR)
    assert (world.living(), world.requests) == ([machine], 1)


# -- money -----------------------------------------------------------------------------------------------------------


def test_a_total_cap_is_kept_and_training_saves_first(tmp_path: Path) -> None:
    world = World(tmp_path, caps={"max_spend_total": 8.0})
    world.advance(12 * HOUR)
    assert world.problems == []
    assert 3.0 < world.cost() <= 8.0
    assert world.living() == []
    assert (world.requests, world.looks[-1].action) == (1, "alert")
    assert "has no room for another" in world.looks[-1].reason
    assert any("is to end" in look.reason or look.result == "destroyed" for look in world.looks)


@pytest.mark.slow
def test_a_cap_of_a_day_is_kept_and_used_again(tmp_path: Path) -> None:
    world = World(tmp_path, caps={"max_spend_per_day": 5.0})
    world.advance(32 * HOUR)
    assert world.problems == []
    assert world.cost() > 5.0


def test_a_machine_past_its_price_saves_first(world: World) -> None:
    world.advance(900)
    (machine,) = world.living()
    machine.price = 5.0
    world.look()
    control = Control.from_bytes(world.store.data[KEYS.control][0])
    assert (control.stopped, control.reason.startswith(MARK)) == (True, True)
    assert world.living() == [machine], "it has time for its last save"
    world.advance(120)
    assert machine.until is not None
    world.advance(60)
    assert not Control.from_bytes(world.store.data[KEYS.control][0]).stopped


def test_a_machine_past_its_price_that_does_not_stop_is_bounded(world: World) -> None:
    world.advance(900)
    (machine,) = world.living()
    machine.price = 5.0
    world.look()
    world.store.away = True
    world.advance(1000)
    assert machine.until is not None


def test_caps_hold_for_a_machine_that_lists_leave_out(tmp_path: Path) -> None:
    world = World(tmp_path, caps={"max_spend_total": 6.0})
    world.advance(900)
    world.living()[0].listed = False
    world.advance(8 * HOUR)
    assert (world.problems, world.living()) == ([], [])


def test_caps_hold_while_the_store_is_away(tmp_path: Path) -> None:
    world = World(tmp_path, caps={"max_spend_total": 6.0})
    world.advance(900)
    world.store.away = True
    world.advance(8 * HOUR)
    assert (world.problems, world.living()) == ([], [])


def test_boot_failures_end_until_the_configuration_is_edited(tmp_path: Path) -> None:
    world = World(tmp_path, sick={"no_boot": 1.0})
    world.advance(6 * HOUR)
    assert (world.requests, world.problems) == (3, [])
    assert "failed to start training" in world.looks[-1].reason
    world.controller.caps = world.configuration = world.configuration.model_copy(update={"digest": "edited"})
    world.advance(3 * HOUR)
    assert world.requests > 3


def test_a_count_of_a_day(tmp_path: Path) -> None:
    world = World(tmp_path, caps={"max_machines_per_day": 2}, sick={"dies": 0.02})
    world.advance(6 * HOUR)
    assert world.requests == 2


def test_a_clock_that_goes_back_makes_nothing_cheaper(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.advance(2 * HOUR)
    before = world.spent_in_records()
    monkeypatch.setattr(world, "wall", lambda: 1.7e9)
    world.look()
    assert world.controller.records.newest_at > 1.75e9
    assert before > 0.5


# -- what pods can write ---------------------------------------------------------------------------------------------


def test_nothing_in_the_store_raises_a_cap_or_names_a_machine(world: World) -> None:
    """All that an earlier design read from there, forged."""
    other = world.rent("podwatch:run:1:sother22")
    untagged = world.rent("podwatch:run:1")
    rich = {"providers": ["vast"], "max_price_per_hour": 10**5, "max_spend_per_day": 10**6, "max_spend_total": 10**6}
    world.store.put(f"{KEYS.root}controller.json", json.dumps(rich).encode())
    world.beat("x", other, state="preempted", outcome="gave-up")
    world.advance(HOUR)
    assert world.destroyed == []
    assert {other.id, untagged.id} <= {m.id for m in world.living()}
    assert all(m.price <= 2.0 for m in world.machines)


def test_a_run_that_is_forged_as_finished_destroys_only_its_own(world: World) -> None:
    other = world.rent("podwatch:run:1:sother22")
    world.beat("x", other, state="released", desired="finished", outcome="finished")
    world.advance(HOUR)
    assert other.until is None
    assert world.requests == 0


def test_lost_records_create_nothing(world: World) -> None:
    world.advance(900)
    world.configuration.records_path.unlink()
    (machine,) = world.living()
    machine.until = world.now
    world.now += 1000.0  # its claim is old
    world.controller = world.started()
    world.advance(HOUR)
    assert world.requests == 1
    assert "the records lack machine 1" in world.looks[-1].reason
    world.configuration = world.configuration.model_copy(update={"first_number": 2, "spent_before": 1.0})
    world.controller = world.started()
    world.advance(HOUR)
    assert world.requests == 2
    assert world.living()[0].label == label_of("run", 2, TAG)


def test_a_living_machine_whose_record_is_lost_is_bounded(world: World) -> None:
    world.advance(900)
    world.configuration.records_path.unlink()
    world.now += 1000.0
    world.controller = world.started()
    (machine,) = world.living()
    world.advance(600)
    assert (world.requests, machine.until) == (1, None)
    machine.silent = True
    world.advance(3 * HOUR)
    assert machine.until is not None
    assert world.requests == 1


def test_records_that_cannot_be_read_or_written(world: World) -> None:
    world.advance(900)
    path = world.configuration.records_path
    path.write_text("{")
    with pytest.raises(IntegrityError, match="first_number"):
        world.started()
    path.unlink()
    path.mkdir()
    world.now += 30
    with pytest.raises(HostError, match="cannot write the records"):
        world.look()


# -- two controllers -------------------------------------------------------------------------------------------------


def test_a_second_controller_on_the_machine_is_refused(world: World) -> None:
    with world.file(), pytest.raises(Busy), world.file():
        pass


def test_a_second_controller_elsewhere_requests_nothing(world: World, tmp_path: Path) -> None:
    world.look()
    second = World(tmp_path / "second", store=world.store, now=world.now)
    second.advance(600)
    assert second.requests == 0
    assert "Another controller" in second.looks[0].reason
    assert second.looks[0].code is ExitCode.TRY_AGAIN


def test_two_that_start_together_request_one_machine(world: World, tmp_path: Path) -> None:
    """Each sees no claim; the later claim is the one that stays."""
    second = World(tmp_path / "second", store=world.store, now=world.now)
    del world.store.data[KEYS.heartbeat]
    world.beat("user-pod", state="preempted")
    world.look()
    world.store.data.pop(KEYS.evidence("config") + ControllerClaim.FILE)
    second.look()
    for _ in range(20):
        world.advance(30)
        second.now = world.now
        second.look()
    assert world.requests + second.requests == 1


def test_a_request_needs_a_claim_that_is_decided_and_still_its_own(world: World) -> None:
    view = world.controller.view
    view.read(number=0, claims=True)
    assert not view.confirm(1), "another's claim can be on its way"
    world.now += 200.0
    view.read(number=0, claims=True)
    assert view.confirm(1)
    again = world.started().view
    again.read(number=0, claims=True)
    assert not again.confirm(1), "a new process does not know what was claimed beside the one before"
    other = ControllerClaim("run", "other", "elsewhere", 0, world.wall())
    world.store.put(KEYS.evidence("config") + ControllerClaim.FILE, other.to_bytes())
    assert not view.confirm(2)


def test_a_controller_that_ended_is_followed_by_another(world: World, tmp_path: Path) -> None:
    world.look()
    second = World(tmp_path / "second", store=world.store, now=world.now)
    second.advance(1800)
    assert second.requests == 1


# -- the end, and the configuration ----------------------------------------------------------------------------------


def test_a_finished_run_ends_its_machine_and_the_controller(world: World) -> None:
    world.advance(900)
    world.finished = True
    world.advance(300)
    assert world.living() == []
    assert (world.looks[-1].action, world.looks[-1].code) == ("end", ExitCode.OK)


def test_the_configuration_names_every_problem() -> None:
    text = 'run_id = "a b"\nmax_price = 3\nmax_spend_per_day = "much"\n[provider]\ncommand = []\n'
    with pytest.raises(ConfigurationError) as caught:
        parse_configuration(text, Path("/x/controller.toml"))
    said = str(caught.value)
    for part in ("run_id", "unknown key max_price", "max_price_per_hour is missing", "max_spend_per_day", "command",
                 "store is missing"):  # fmt: skip
        assert part in said, said
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        parse_configuration("x = ", Path("/x/controller.toml"))


def test_dry_run_writes_nothing(world: World) -> None:
    world.controller.act = False
    before = dict(world.store.data)
    world.now += 600.0
    world.look()
    assert (world.looks[-1].action, world.looks[-1].soon) == ("create", False)
    assert (world.requests, world.store.data) == (0, before)
    assert not world.configuration.records_path.exists()


# -- months ----------------------------------------------------------------------------------------------------------

FAULTS = {
    "unknown": 0.02, "refuse": 0.1, "lost": 0.05, "twice": 0.05, "liar": 0.02, "late": 0.2, "unlisted": 0.05,
    "hides": 0.0005, "no_boot": 0.1, "dies": 0.002, "vanishes": 0.001,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(2))
def test_days_with_every_fault_at_once(tmp_path: Path, seed: int) -> None:
    caps = {"max_spend_total": (1000.0, 60.0)[seed % 2], "max_spend_per_day": (60.0, 15.0)[seed // 2 % 2]}
    world = World(tmp_path, seed=seed, caps=caps, sick={**FAULTS})
    for _ in range(int(os.environ.get("PODWATCH_CONTROLLER_DAYS") or 2) * 8):
        world.advance(3 * HOUR)
        world.store.away = world.dice.random() < 0.05
        if world.dice.random() < 0.05:
            world.controller = world.started()
    assert world.problems == []
    assert world.requests > 3


def test_the_simulation_finds_a_request_beside_a_living_machine(world: World) -> None:
    world.machines.append(Machine("m9", label_of("run", 9, TAG), 0.0, 1.0))
    world.controller.provider = _Blind(world)
    world.advance(600)
    assert any("beside" in problem for problem in world.problems)


class _Blind:
    def __init__(self, world: World) -> None:
        self.create, self.destroy = world.create, world.destroy

    def list(self, run_id: str) -> Listing:
        return Listing("me")
