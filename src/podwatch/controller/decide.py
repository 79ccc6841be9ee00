"""What the controller does now: one decision for each turn. Pure.

First what must be destroyed, then every reason not to create, then the creation. A machine is requested only if the
list is valid and shows no living machine of this run, the heartbeat proves that no pod trains, and every cap has room.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from podwatch.controller.machines import Listing, RentedState
from podwatch.controller.observe import (
    CAP,
    LOOK_MARGIN_SECONDS,
    PRICE,
    WATCHED_SECONDS,
    Facts,
    caps_of,
    is_due,
    is_listed,
    is_lost,
    is_stale,
    is_undecided,
)
from podwatch.controller.records import MachineRecord, spent
from podwatch.domain.errors import ExitCode
from podwatch.domain.lease import GONE, PATIENCE_SECONDS, Beat, Control
from podwatch.domain.outcome import Outcome
from podwatch.domain.snapshot import Desired

DAY: Final = 86_400.0
LOST: Final = "the provider's list does not show it any more"
MARK: Final = "podwatch controller: "
"""Begins the reason in a control.json that the controller wrote. What people wrote stays."""


class Action(StrEnum):
    WAIT = "wait"
    CREATE = "create"
    DESTROY = "destroy"
    ALERT = "alert"
    """An operator must decide; nothing is created."""
    END = "end"


@dataclass(frozen=True, slots=True)
class Decision:
    """``reason``: a sentence. ``result``: what the action came to; empty if there was none. ``code``: of a single turn.
    ``soon``: another turn follows, after ``next_turn`` seconds."""

    action: Action
    reason: str
    id: str = ""
    label: str = ""
    number: int = 0
    max_price: float = 0.0
    account: str = ""
    code: ExitCode = ExitCode.OK
    next_turn: float = 30.0
    soon: bool = False
    result: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "action": str(self.action),
            "reason": self.reason,
            "id": self.id or None,
            "label": self.label or None,
            "generation": self.number or None,
            "max_price_per_hour": self.max_price or None,
            "result": self.result or None,
        }


def decide(machines: tuple[MachineRecord, ...], facts: Facts) -> Decision:
    """``machines``: after ``observe``."""
    for row in (_destroyed, _ended, _unanswered, _forbidden, _unseen, _living, _guarded, _no_room):
        if (found := row(machines, facts)) is not None:
            return found
    return _create(machines, facts)


def _wait(reason: str, **more: Any) -> Decision:
    return Decision(Action.WAIT, reason, **more)


def _alert(reason: str, code: ExitCode = ExitCode.FAILED) -> Decision:
    return Decision(Action.ALERT, reason, code=code)


# -- what ends -------------------------------------------------------------------------------------------------------


def _destroyed(machines: tuple[MachineRecord, ...], facts: Facts) -> Decision | None:
    """Only what a list, or the answer to our request, has shown with exactly our label is destroyed. A list that cannot
    be read now protects nothing from its bound."""
    for machine in machines:
        if not machine.costs or not machine.id or machine.destroyed is not None or machine.id in facts.skip:
            continue
        if isinstance(facts.listing, Listing) and not is_listed(machine, facts):
            continue
        lost = is_lost(machine, machines, facts)
        if lost or is_due(machine, machines, facts):
            reason = f"Machine {machine.id} is destroyed: {LOST if lost else machine.ended}."
            label = facts.label(machine.number)
            return Decision(Action.DESTROY, reason, machine.id, label, machine.number, next_turn=5.0)
    return None


def _ended(machines: tuple[MachineRecord, ...], facts: Facts) -> Decision | None:
    code = facts.run.end_code
    if code is None or any(machine.costs for machine in machines):
        return None
    why = "is finished" if code == ExitCode.OK else "must not run again (exit code 65)"
    return Decision(Action.END, f"The run {why}, and no machine of it costs money.", code=ExitCode(code))


# -- why nothing is created ------------------------------------------------------------------------------------------


def _unanswered(_machines: tuple[MachineRecord, ...], facts: Facts) -> Decision | None:
    if facts.run.trouble:
        what = f"The store says nothing, so nothing is created, and silence is no death: {facts.run.trouble}"
        return _wait(what, code=ExitCode.UNAVAILABLE)
    if facts.run.other:
        what = f"Another controller ({facts.run.other}) has this run: nothing is created. Stop one of the two."
        return _alert(what, ExitCode.TRY_AGAIN)
    return None


def _forbidden(machines: tuple[MachineRecord, ...], facts: Facts) -> Decision | None:
    """What people order, and what the records lack."""
    control, caps = facts.run.control, facts.caps
    if control is None:
        return _alert(f"Nothing is created: {facts.run.control_problem}.", ExitCode.CONFIGURATION)
    if facts.run.end_code is not None:
        return _wait("The run has ended: its machine is destroyed once its last checkpoint is stored.")
    if caps.paused:
        return _wait("controller.toml pauses the controller: nothing is created.")
    if control.stopped and not control.reason.startswith(MARK):
        return _wait("control.json orders this run to stop: nothing is created.")
    adopted = [machine.number for machine in machines if machine.adopted]
    highest = max((facts.run.number, *adopted), default=0)
    recorded = max((m.number for m in machines if not m.adopted), default=0)
    if highest >= max(caps.first_number, recorded + 1):
        return _alert(
            f"Nothing is created: the records lack machine {highest}, so what was spent is not known. Restore"
            f" {caps.records_path}, or set first_number = {highest + 1} and spent_before in controller.toml.",
            ExitCode.CONFIGURATION,
        )
    return None


def _unseen(machines: tuple[MachineRecord, ...], facts: Facts) -> Decision | None:
    """A machine can live where no valid list was read."""
    if not isinstance(facts.listing, Listing):
        what = f"Nothing is created, because a machine can live unseen: there is no valid list: {facts.listing}."
        return _alert(what, ExitCode.UNAVAILABLE)
    for machine in machines:
        if machine.costs and not is_listed(machine, facts):
            what = f"the provider answers for account {facts.listing.account}, not {machine.account}"
            return _alert(f"Nothing is created: {what}. Use the right key.", ExitCode.CONFIGURATION)
    return None


def _living(machines: tuple[MachineRecord, ...], facts: Facts) -> Decision | None:
    """Nothing is created beside a machine of this run that lives, or can live."""
    soon = {"next_turn": _left(facts), "soon": True} if is_undecided(facts) else {}
    states = {name: one.state for name, (one, _) in facts.listed.items()}
    for machine in machines:
        if not machine.costs:
            continue
        label = facts.label(machine.number)
        if not machine.id:
            what = f"It is not known whether the request for {label} created a machine: the list is watched, and"
            return _wait(f"{what} nothing else is created meanwhile.", code=ExitCode.TRY_AGAIN)
        name = f"Machine {machine.id} ({label})"
        if machine.id in facts.skip:
            return _alert(f"{name} cannot be destroyed: destroy it yourself.", ExitCode.UNAVAILABLE)
        if states.get(machine.id) is not RentedState.STOPPED:
            how = _how(machine, facts) if machine.id in states else "is not in the provider's list now"
            return _wait(f"{name} {how}.", **soon)
    return None


def _how(machine: MachineRecord, facts: Facts) -> str:
    beat = facts.beat
    if machine.ended:
        return f"is to end ({machine.ended}); its last checkpoint has time until its bound"
    if machine.booted_at is None:
        return "has sent no heartbeat yet"
    if beat is None or is_stale(beat):
        return "lives by the provider's list, and its heartbeat is silent"
    if beat.said.desired == Desired.STOPPED:
        return "costs money although training is stopped there"
    return "trains" if beat.said.step is None else f"trains (step {beat.said.step})"


def _left(facts: Facts) -> float:
    return min(60.0, max(1.0, WATCHED_SECONDS - facts.run.watched + 0.5))


def _guarded(_machines: tuple[MachineRecord, ...], facts: Facts) -> Decision | None:
    """A heartbeat that is not proof of a dead pod, or none at all."""
    beat = facts.beat
    if beat is None or not beat.said.state:
        what = "no pod has ever sent a heartbeat" if beat is None else "the heartbeat cannot be read"
        return _alert(f"Nothing is created: {what}. Start the first pod yourself.")
    who = beat.said.described
    if beat.said.desired == Desired.STOPPED or beat.said.outcome == Outcome.STOPPED:
        return _wait(f"An operator has stopped training on pod {who}: nothing is created.")
    age = facts.run.claim_age
    if age is not None and age <= PATIENCE_SECONDS and (age < beat.age or facts.run.outdated):
        return _wait(f"A pod claimed the run {age:.0f} s ago.")
    if beat.said.state in GONE:
        return None
    if is_undecided(facts):
        left = WATCHED_SECONDS - facts.run.watched
        what = f"Pod {who} is silent for {beat.age:.0f} s: it counts as dead if its heartbeat stays unchanged for"
        what += f" {left:.0f} s more, because an outage of the store can have kept it silent."
        return _wait(what, next_turn=_left(facts), soon=True)
    if is_stale(beat):
        return None
    next_turn = min(30.0, max(1.0, PATIENCE_SECONDS - beat.age + 0.5))
    return _wait(f"Pod {who} sent its heartbeat {beat.age:.0f} s ago.", next_turn=next_turn)


def _no_room(machines: tuple[MachineRecord, ...], facts: Facts) -> Decision | None:
    caps, now = facts.caps, facts.now
    needed = caps.max_price_per_hour * (caps.boot + caps.final_save + LOOK_MARGIN_SECONDS) / 3600
    for window, cap in caps_of(facts):
        so_far, name = spent(machines, now, window), {None: "total", DAY: "day", 3600.0: "hour"}[window]
        if so_far + (min(needed, caps.max_price_per_hour) if window == 3600.0 else needed) > cap:
            return _alert(
                f"The run has no pod, and the cap of its {name} has no room for another: {so_far:.2f} of {cap:.2f} is"
                f" spent, and a machine needs up to {needed:.2f} before it can be judged."
            )
    made = len({machine.number for machine in machines if now - machine.requested_at < DAY and not machine.failed})
    if made >= caps.max_machines_per_day:
        return _alert(f"The run has no pod, and {made} machines were requested within 24 h: no more are allowed.")
    if (bad := boot_failures(machines, caps.digest)) >= caps.max_boot_failures:
        what = f"The run has no pod, and {bad} machines in a row failed to start training: nothing more is created"
        return _alert(f"{what} until controller.toml is edited.")
    return _too_soon(machines, facts)


def boot_failures(machines: tuple[MachineRecord, ...], digest: str) -> int:
    """Machines in a row, the last ones, that never got to train, since controller.toml was edited last."""
    found = set[int]()
    for machine in reversed(machines):
        if machine.configuration != digest or not (machine.failed or machine.boot_failure):
            break
        found |= set() if machine.failed else {machine.number}
    return len(found)


def _too_soon(machines: tuple[MachineRecord, ...], facts: Facts) -> Decision | None:
    """After failed requests or boots the next one waits, each time longer."""
    count, last = 0, 0.0
    for machine in reversed(machines):
        if not (machine.failed or machine.boot_failure):
            break
        count, last = count + 1, max(last, machine.requested_at)
    pause = min(3600.0, 60.0 * 2.0 ** min(count - 1, 10))
    left = pause - (facts.now - last)
    if not count or left <= 0:
        return None
    what = f"The last {count} requests for a machine failed: the next one follows in {left:.0f} s."
    return _wait(what, next_turn=min(60.0, max(1.0, left)))


# -- the creation ----------------------------------------------------------------------------------------------------


def _create(machines: tuple[MachineRecord, ...], facts: Facts) -> Decision:
    if (left := facts.run.settles_in) > 0:
        what = f"A machine is needed: it is decided in {left:.0f} s whether this controller has the run."
        return _wait(what, code=ExitCode.TRY_AGAIN, next_turn=left, soon=True)
    if any(machine.refused and machine.configuration == facts.caps.digest for machine in machines):
        what = "The provider refused the request for good: correct its command or controller.toml."
        return _alert(what, ExitCode.CONFIGURATION)
    beat, listing, caps = facts.beat, facts.listing, facts.caps
    number = max([caps.first_number, *(machine.number + 1 for machine in machines)])
    return Decision(
        Action.CREATE,
        f"Pod {_described(beat)}, no machine of this run lives, and every cap has room: machine {number} is requested"
        f" for at most {caps.max_price_per_hour:g} per hour.",
        label=facts.label(number),
        number=number,
        max_price=caps.max_price_per_hour,
        account=listing.account if isinstance(listing, Listing) else "",
        next_turn=5.0,
    )


def _described(beat: Beat | None) -> str:
    if beat is None:
        return "?"
    how = f"has left the run ({beat.said.state})" if beat.said.state in GONE else "is silent"
    return f"{beat.said.described} {how} for {beat.age:.0f} s"


# -- control.json ----------------------------------------------------------------------------------------------------


def control_wanted(machines: tuple[MachineRecord, ...], facts: Facts) -> Control | None:
    """The control.json to write now; None if there is nothing to change. It stops training on a machine that ends for
    its cost, so that the machine can save first, and takes that back once no such machine costs money."""
    control = facts.run.control
    if control is None or facts.run.trouble or facts.run.other:
        return None
    ends = [machine.ended for machine in machines if machine.costs and machine.ended in (CAP, PRICE)]
    own = control.reason.startswith(MARK)
    if ends and not control.stopped:
        return Control("stopped", f"{MARK}{ends[0]}")
    if not ends and own and control.stopped:
        return Control()
    return None
