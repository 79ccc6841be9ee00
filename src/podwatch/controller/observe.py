"""What one look adds to the records: what the lists and the heartbeat show, what each machine costs, and why one must
end. Pure; ``decide`` acts by it.

The provider's list, by our label, says which machines exist. A machine costs until a list shows it as ended, or until
the provider has confirmed its destruction and a list lacks it after that. What valid lists have lacked for
``APPEAR_SECONDS`` while no heartbeat came from it is destroyed, too: a list can leave out what costs money.
"""

from dataclasses import dataclass, replace
from typing import Final

from podwatch.controller.configuration import LONGEST_CALL_SECONDS, ControllerConfiguration
from podwatch.controller.machines import Listing, Rented, RentedState, label_of, number_of
from podwatch.controller.records import MachineRecord, spent
from podwatch.controller.run_view import RunSeen
from podwatch.domain.errors import ExitCode
from podwatch.domain.lease import GONE, PATIENCE_SECONDS, Beat, HolderState
from podwatch.domain.outcome import Outcome
from podwatch.domain.snapshot import Desired

HOUR: Final = 3600.0
DAY: Final = 86_400.0
WATCHED_SECONDS: Final = 240.0
"""A silent heartbeat counts only if this controller saw it unchanged for so long while the store answered: right after
an outage of the store, a pod that trains looks like a dead one."""
APPEAR_SECONDS: Final = 300.0
"""A machine can be absent from lists for so long: one that is new, or one that a list leaves out."""
LOOK_MARGIN_SECONDS: Final = 900.0
"""Money is reserved for this long: two looks of a schedule of ten minutes that is often late."""
LASTING_SECONDS: Final = 600.0
"""A machine that lived shorter and made no step counts as a failed boot."""
UNGUARDED_SECONDS: Final = 3600.0
"""podwatch left a pod on purpose and training continues there: a silent machine is given up only after this."""
CAP: Final = "a spend cap is reached"
PRICE: Final = "it costs more than the highest price that was allowed"
FINISHED: Final = "the run is finished"
FOR_GOOD: Final = "the run must not run again (exit code 65)"


@dataclass(frozen=True, slots=True)
class Facts:
    """One look. ``listing``: the provider's; a text says why there is no valid one. ``skip``: ids of machines whose
    destruction has just failed."""

    now: float
    caps: ControllerConfiguration
    tag: str
    listing: Listing | str
    run: RunSeen
    skip: frozenset[str] = frozenset()

    @property
    def beat(self) -> Beat | None:
        return self.run.beat

    def label(self, number: int) -> str:
        return label_of(self.caps.run_id, number, self.tag)

    @property
    def listed(self) -> dict[str, tuple[Rented, int]]:
        """The machines of this run in the list with their numbers, by id."""
        rented = self.listing.instances if isinstance(self.listing, Listing) else ()
        found = ((one, number_of(one.label, self.caps.run_id, self.tag)) for one in rented)
        return {one.id: (one, number) for one, number in found if number is not None}


def is_stale(beat: Beat) -> bool:
    return beat.age > PATIENCE_SECONDS


def is_undecided(facts: Facts) -> bool:
    """Whether the heartbeat is silent, and this controller has not watched it for long enough."""
    beat = facts.beat
    return beat is not None and beat.said.state not in GONE and is_stale(beat) and facts.run.watched < WATCHED_SECONDS


def is_from(beat: Beat, machine: MachineRecord, facts: Facts) -> bool:
    """Whether the heartbeat comes from this machine: by its label, else by the provider's id."""
    sender = beat.said.instance
    if sender.label:
        return sender.label == facts.label(machine.number)
    return bool(sender.id) and sender.id == machine.id


def observe(machines: tuple[MachineRecord, ...], facts: Facts) -> tuple[MachineRecord, ...]:
    """The records with what this look shows, by number."""
    found = tuple(_heard(machine, facts) for machine in _listed(machines, facts))
    return tuple(_judged(machine, found, facts) for machine in found)


def _listed(machines: tuple[MachineRecord, ...], facts: Facts) -> list[MachineRecord]:
    listed, found = facts.listed, list[MachineRecord]()
    known = {machine.id for machine in machines}
    for record in machines:
        machine = record
        if record.costs and not record.id:  # the list answers in place of the command
            name = next((n for n, (_, number) in listed.items() if number == record.number and n not in known), "")
            machine = replace(record, id=name, price_per_hour=0.0) if name else record
            known.add(name)
        one, _ = listed.pop(machine.id, (None, 0))
        found.append(_priced(machine, one, machines, facts))
    found += [_unrecorded(one, number, machines, facts) for one, number in listed.values()]
    return sorted(found, key=lambda machine: machine.number)


def _unrecorded(one: Rented, number: int, machines: tuple[MachineRecord, ...], facts: Facts) -> MachineRecord:
    """A machine with our label in no record: its request created several, the file was lost, or another controller
    requested it."""
    since = min(one.created_at or facts.now, facts.now)
    adopted = MachineRecord(
        number, facts.caps.max_price_per_hour, since, adopted=True, configuration=facts.caps.digest
    )  # fmt: skip
    made = next((machine for machine in machines if machine.number == number), adopted)
    until = facts.now if one.state is RentedState.ENDED else None
    machine = replace(made, id=one.id, price_per_hour=one.price_per_hour, until=until, failed="", missing=None)
    return _priced(replace(machine, destroyed=None), one, machines, facts)


def _priced(
    machine: MachineRecord, one: Rented | None, machines: tuple[MachineRecord, ...], facts: Facts
) -> MachineRecord:
    """With what the list shows of it (None: nothing)."""
    if one is None and not (machine.costs and is_listed(machine, facts)):
        return machine  # most of a long run's: they cost nothing, and no list shows them
    account = machine.account or (facts.listing.account if isinstance(facts.listing, Listing) else "")
    if one is not None:
        # What was missing and is back cost money meanwhile; a price that falls does not make the past cheaper.
        price = max(machine.price_per_hour, one.price_per_hour)
        until = (machine.until or facts.now) if one.state is RentedState.ENDED else None
        return replace(
            machine, until=until, seen=facts.now, missing=None, destroyed=None, price_per_hour=price, account=account
        )
    missing = machine.missing if machine.missing is not None else facts.now
    until = facts.now if machine.destroyed is not None else None
    machine = replace(machine, missing=missing, until=until, account=account)
    if not machine.id and is_lost(machine, machines, facts):
        return replace(machine, failed="the provider's list shows no machine for this request")
    return machine


def is_lost(machine: MachineRecord, machines: tuple[MachineRecord, ...], facts: Facts) -> bool:
    """Whether valid lists have lacked it for so long that it has ended, or that they hide it."""
    if machine.missing is None or facts.run.trouble or is_undecided(facts) or _sends(machine, machines, facts):
        return False
    new = machine.seen is None and facts.now - machine.requested_at < APPEAR_SECONDS + LONGEST_CALL_SECONDS
    return is_listed(machine, facts) and facts.now - machine.missing >= APPEAR_SECONDS and not new


def is_listed(machine: MachineRecord, facts: Facts) -> bool:
    """Whether there is a valid list of the account in which the machine would be."""
    return isinstance(facts.listing, Listing) and machine.account in ("", facts.listing.account)


def _sends(machine: MachineRecord, machines: tuple[MachineRecord, ...], facts: Facts) -> bool:
    """Whether the heartbeat is fresh and from it: of several with one label, from the one whose id it has."""
    beat = facts.beat
    if beat is None or is_stale(beat) or not is_from(beat, machine, facts):
        return False
    sender = beat.said.instance.id
    return sender == machine.id or all(sender != other.id for other in machines if other.number == machine.number)


def _heard(machine: MachineRecord, facts: Facts) -> MachineRecord:
    beat = facts.beat
    if beat is None or not is_from(beat, machine, facts):
        return machine
    at, step = facts.now - beat.age, beat.said.step
    return replace(
        machine,
        booted_at=machine.booted_at if machine.booted_at is not None else facts.now,
        alive_at=max(at, machine.alive_at or at),
        first_step=machine.first_step if machine.first_step is not None else step,
        last_step=machine.last_step if step is None else step,
    )


# -- why a machine ends ----------------------------------------------------------------------------------------------


def _judged(machine: MachineRecord, machines: tuple[MachineRecord, ...], facts: Facts) -> MachineRecord:
    """With the reason to destroy it, and since when there is one. A failed boot stays one."""
    if not machine.costs:
        failure = machine.boot_failure or (not machine.failed and not _lived(machine))
        return replace(machine, boot_failure=failure)
    why = _why_ended(machine, machines, facts)
    if not why and facts.run.trouble and machine.ended:
        why = machine.ended  # without the store nothing is taken back
    if not why:
        return replace(machine, ended="", ended_at=None, boot_failure=False)
    at = machine.ended_at if machine.ended_at is not None else facts.now
    return replace(machine, ended=why, ended_at=at, boot_failure=machine.boot_failure or not _lived(machine))


def _lived(machine: MachineRecord) -> bool:
    if machine.booted_at is None or machine.alive_at is None:
        return False
    progress = machine.first_step is not None and (machine.last_step or 0) > machine.first_step
    return progress or machine.alive_at - machine.booted_at >= LASTING_SECONDS


def _why_ended(machine: MachineRecord, machines: tuple[MachineRecord, ...], facts: Facts) -> str:
    if facts.run.end_code is not None:
        return FINISHED if facts.run.end_code == ExitCode.OK else FOR_GOOD
    if any(other.number > machine.number and other.booted_at is not None and other.costs for other in machines):
        return "a newer machine has taken the run over"
    if machine.price_per_hour > machine.max_price * 1.000001:
        return PRICE
    if any(_is_over(machines, facts, window, cap) for window, cap in caps_of(facts)):
        return CAP
    return "" if facts.run.trouble else _why_silent(machine, facts)


def _why_silent(machine: MachineRecord, facts: Facts) -> str:
    """By what the store says; only while it answers."""
    beat = facts.beat
    own = beat is not None and is_from(beat, machine, facts)
    # Where an operator stopped training, the operator pays for the machine.
    if own and beat is not None and beat.said.state in GONE and beat.said.desired != Desired.STOPPED:
        gave_up = beat.said.outcome == Outcome.GAVE_UP
        return "podwatch gave up there" if gave_up else f"podwatch has left it ({beat.said.state})"
    if machine.booted_at is None:
        late = facts.now - machine.requested_at >= facts.caps.boot
        return f"it has sent no heartbeat within {facts.caps.boot:.0f} s" if late else ""
    if is_undecided(facts) or (own and beat is not None and not is_stale(beat)):
        return ""
    silent = facts.now - (machine.alive_at if machine.alive_at is not None else machine.booted_at)
    unguarded = own and beat is not None and beat.said.state == HolderState.RESTARTING
    limit = UNGUARDED_SECONDS if unguarded else facts.caps.silent
    return f"its heartbeat is silent for {silent:.0f} s" if silent >= limit else ""


def caps_of(facts: Facts) -> tuple[tuple[float | None, float], ...]:
    """(window in seconds, None: ever; cap)."""
    caps = facts.caps
    total = caps.max_spend_total - caps.spent_before
    return ((None, total), (DAY, caps.max_spend_per_day), (HOUR, caps.max_spend_per_hour))


def _is_over(machines: tuple[MachineRecord, ...], facts: Facts, window: float | None, cap: float) -> bool:
    """Whether the last save and its machine would cost more than is left."""
    rate = sum(machine.price_per_hour for machine in machines if machine.costs)
    reserve = rate * (facts.caps.final_save + LOOK_MARGIN_SECONDS) / 3600
    return spent(machines, facts.now, window) + reserve > cap


def is_due(machine: MachineRecord, machines: tuple[MachineRecord, ...], facts: Facts) -> bool:
    """Whether a machine that ends is destroyed now: its last save is stored, or had its time, or no money is left."""
    if machine.ended_at is None:
        return False
    beat = facts.beat
    lives = beat is not None and is_from(beat, machine, facts) and not is_stale(beat)
    if not lives and not facts.run.trouble and not is_undecided(facts):
        return True
    saved = lives and beat is not None and beat.said.state in GONE and beat.said.unstored_step is None
    broke = any(spent(machines, facts.now, window) >= cap for window, cap in caps_of(facts))
    return saved or broke or facts.now - machine.ended_at >= facts.caps.final_save
