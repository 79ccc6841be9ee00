"""One turn of the controller, and the action that follows: read, observe, decide, record, act.

A request is in the records before it is sent, and the store's claim names its number. Whatever the command answers, the
next turn compares the provider's list with the records.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from podwatch.controller.configuration import LONGEST_CALL_SECONDS, ControllerConfiguration
from podwatch.controller.decide import Action, Decision, control_wanted, decide
from podwatch.controller.machines import Listing
from podwatch.controller.observe import Facts, observe
from podwatch.controller.provider import OutcomeUnknown, ProviderCommand, ProviderError
from podwatch.controller.records import ControllerRecords, MachineRecord, RecordFile
from podwatch.controller.run_view import RunView
from podwatch.domain.engine_and_attempt import LABEL_VARIABLE
from podwatch.domain.errors import ExitCode, PodwatchError, RemoteError
from podwatch.system.clock import Clock

AGAIN_SECONDS = 5.0
FRESH_SECONDS = 60.0
"""Nothing is done on what was read longer ago: a frozen controller would take its own absence for the pod's."""
RETRY_SECONDS = 60.0
"""Until the destruction of a machine that failed is tried again."""


@dataclass
class Controller:
    """One run. ``act`` False: everything but reading is left out."""

    caps: ControllerConfiguration
    view: RunView
    file: RecordFile
    records: ControllerRecords
    provider: ProviderCommand
    clock: Clock
    act: bool = True
    _failed: dict[str, float] = field(default_factory=dict)
    """Machines whose destruction failed, and when (boottime)."""

    def turn(self) -> Decision:
        """Blocks for as long as the store and the commands take. Raises HostError where the records cannot be
        written: then nothing is created."""
        began = self.clock.boottime()
        listing = self._list()
        listed = self.clock.boottime()
        number = max((m.number for m in self.records.machines if not m.adopted), default=0)
        run = self.view.read(number=number, claims=self.act)
        now = self.clock.boottime()
        if listed - began > LONGEST_CALL_SECONDS + FRESH_SECONDS or now - listed > LONGEST_CALL_SECONDS:
            what = "Reading took too long: what was read is too old to act on."
            return Decision(Action.WAIT, what, code=ExitCode.TRY_AGAIN, next_turn=1.0, soon=True)
        self._failed = {key: at for key, at in self._failed.items() if now - at < RETRY_SECONDS}
        wall = max(self.clock.wall(), self.records.newest_at)
        facts = Facts(wall, self.caps, self.file.tag, listing, run, frozenset(self._failed))
        machines = observe(self.records.machines, facts)
        decision = decide(machines, facts)
        if not self.act:
            acts = decision.action in (Action.CREATE, Action.DESTROY)
            return replace(decision, result="not done: a dry run changes nothing" if acts else "")
        self._save(machines, wall)
        trouble = self._order(machines, facts)
        if trouble and decision.action is Action.CREATE:
            return Decision(Action.WAIT, trouble, code=ExitCode.UNAVAILABLE)
        if decision.action is Action.DESTROY:
            return self._destroy(decision)
        return self._create(decision) if decision.action is Action.CREATE else decision

    def _list(self) -> Listing | str:
        try:
            return self.provider.list(self.caps.run_id)
        except PodwatchError as error:
            return str(error)

    def _save(self, machines: tuple[MachineRecord, ...], wall: float) -> None:
        if (machines, wall) != (self.records.machines, self.records.newest_at):
            self.records = replace(self.records, machines=machines, newest_at=wall)
            self.file.save(self.records)

    def _change(self, machine: MachineRecord, changed: MachineRecord) -> None:
        machines = (changed if one == machine else one for one in self.records.machines)
        self._save(tuple(machines), self.records.newest_at)

    def _order(self, machines: tuple[MachineRecord, ...], facts: Facts) -> str:
        """Write the control.json that is due. Why it could not be written, if so: the bounds hold all the same."""
        wanted, read = control_wanted(machines, facts), facts.run.control
        if wanted is not None and read is not None:
            try:
                self.view.write_control(wanted, read)
            except RemoteError as error:
                return f"control.json cannot be written: {error}"
        return ""

    # -- actions ------------------------------------------------------------------------------------------------------

    def _destroy(self, decision: Decision) -> Decision:
        try:
            self.provider.destroy(decision.id, decision.label)
        except PodwatchError as error:
            self._failed[decision.id] = self.clock.boottime()
            return _done(decision, f"failed: {error}", ExitCode.UNAVAILABLE)
        machine = next(one for one in self.records.machines if one.id == decision.id)
        self._change(machine, replace(machine, destroyed=self.records.newest_at))
        return _done(decision, "destroyed")

    def _create(self, decision: Decision) -> Decision:
        began = self.clock.boottime()
        try:
            ours = self.view.confirm(decision.number)
        except RemoteError as error:
            return _done(decision, f"not sent: {error}", ExitCode.UNAVAILABLE)
        if not ours:
            return replace(
                decision, result="not sent: another controller has this run", code=ExitCode.TRY_AGAIN, next_turn=30.0
            )
        machine = MachineRecord(
            decision.number, decision.max_price, self.records.newest_at, price_per_hour=decision.max_price,
            account=decision.account, configuration=self.caps.digest,
        )  # fmt: skip
        self._save((*self.records.machines, machine), self.records.newest_at)
        if self.clock.boottime() - began > FRESH_SECONDS:
            self._change(machine, replace(machine, failed="not sent: this controller was frozen"))
            return _done(decision, "not sent: this controller was frozen", ExitCode.TRY_AGAIN, 1.0)
        return self._request(decision, machine)

    def _request(self, decision: Decision, machine: MachineRecord) -> Decision:
        env = {LABEL_VARIABLE: decision.label}
        try:
            name, price = self.provider.create(
                self.caps.run_id, decision.number, decision.label, decision.max_price, env
            )
        except ProviderError as error:
            self._change(machine, replace(machine, failed=str(error)[:300], refused=error.refused))
            return _done(decision, f"failed: {error}", ExitCode.UNAVAILABLE)
        except OutcomeUnknown as error:
            return _done(decision, f"unknown: {error}", ExitCode.TRY_AGAIN)
        self._change(machine, replace(machine, id=name, price_per_hour=price))
        return _done(decision, f"created {name} for {price:g} per hour")


def _done(decision: Decision, result: str, code: ExitCode = ExitCode.OK, next_turn: float = AGAIN_SECONDS) -> Decision:
    """With what its action came to; the next turn follows soon."""
    return replace(decision, result=result, code=code, next_turn=next_turn, soon=True)


def once(controller: Controller, sleep: Callable[[float], None], report: Callable[[Decision], None]) -> ExitCode:
    """Take turns until nothing is left to do now. Returns the exit code of the last one."""
    report(decision := controller.turn())
    for _ in range(12):  # at most so many more turns
        if not decision.soon:
            break
        sleep(decision.next_turn)
        report(decision := controller.turn())
    return decision.code


def loop(controller: Controller, sleep: Callable[[float], None], report: Callable[[Decision], None]) -> ExitCode:
    """Take turns until the run has ended."""
    while True:
        report(decision := controller.turn())
        if decision.action is Action.END:
            return decision.code
        most = decision.next_turn if decision.soon else controller.caps.every
        sleep(max(0.0, min(most, decision.next_turn)))
