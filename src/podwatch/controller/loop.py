"""One look of the controller, and the action that follows: read (policy/rented_machines.py), decide (replacement.py),
act, record.

A request for a machine is recorded in the store before it is sent, and only while this controller's claim is known to
be the first. Whatever the command answers, the next look compares the provider's list with the records.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from podwatch.controller.providers import OutcomeUnknown, ProviderError
from podwatch.controller.run_store import ControllerClock, RunStore
from podwatch.domain.engine_and_attempt import LABEL_VARIABLE
from podwatch.domain.errors import ExitCode, PodwatchError, RemoteError, is_refusal
from podwatch.domain.replacement import LONGEST_CALL_SECONDS, Listing, Record, settled
from podwatch.policy.rented_machines import Facts, observed, unrecorded
from podwatch.policy.replacement import Action, Decision, control_wanted, decide, unwritable
from podwatch.stores.fenced_writes import TooLate

MOST_ROUNDS = 12
"""Further looks of one ``--once``: four at a silent heartbeat, two destroyed machines, a claim, a request and its
check, and some repetitions."""
AGAIN_SECONDS = 5.0
FRESH_SECONDS = 60.0
"""Nothing is done on what was read longer ago: a frozen controller would take its own absence for the pod's."""
NOT_CREATED = (
    "not created: caps and spend lie in the store, where whoever can write as a pod could raise them. Start a pod"
    " yourself, with `podwatch bootstrap`"
)
STALE = "Reading took too long: what was read is too old to act on."
CHANGED = "The records changed while the lists were read."
"""A record is written before its machine is requested: only one that is still missing now is lost."""
RECORD_ATTEMPTS = 3
RETRY_SECONDS = 60.0
"""Until the destruction of a machine that failed is tried again."""


class Provider(Protocol):
    """``ProviderCommand`` is one."""

    def list(self, run_id: str) -> Listing: ...
    def create(
        self, run_id: str, generation: int, label: str, max_price: float, env: Mapping[str, str]
    ) -> tuple[str, float]: ...
    def destroy(self, machine: str, label: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Look:
    """``result``: what the action came to; empty if there was none. ``code``: exit code of a single look."""

    decision: Decision
    result: str = ""
    code: ExitCode = ExitCode.OK
    next_look: float = 30.0
    again: bool = False
    """Another look should follow soon, because the action changed something."""


@dataclass
class Controller:
    """One run. ``act`` False: everything but reading is left out. ``creates`` False: it requests no machine."""

    store: RunStore
    run_id: str
    providers: Mapping[str, Provider]
    clock: ControllerClock
    act: bool = True
    creates: bool = True
    parallel: bool = True
    """Ask several providers at once."""
    _failed: dict[tuple[str, str], float] = field(default_factory=dict)
    """Machines whose destruction failed, and when (boottime): the others are not kept waiting."""

    def look(self) -> Look:
        """Blocks for as long as the store and the commands take. Raises RemoteError if the store does not answer."""
        before = self.store.records()
        began = self.clock.boottime()
        lists = self._lists()
        now = self.clock.boottime()
        self._failed = {key: at for key, at in self._failed.items() if now - at < RETRY_SECONDS}
        facts = replace(self.store.facts(lists), skip=frozenset(self._failed))
        late = now - began > LONGEST_CALL_SECONDS + FRESH_SECONDS
        if late or self.clock.boottime() - now > FRESH_SECONDS:
            return Look(Decision(Action.WAIT, STALE), code=ExitCode.TRY_AGAIN, next_look=1.0, again=True)
        if unrecorded(before, facts) and self.store.records() != before:
            return Look(Decision(Action.WAIT, CHANGED), code=ExitCode.TRY_AGAIN, next_look=1.0, again=True)
        after = observed(before, facts)
        decision = decide(after, facts)
        if not self.act:
            return _waits(decision)
        try:
            self._write(before, after, facts)
        except RemoteError as error:
            needed = unwritable(after, facts) if is_refusal(error) else None
            if needed is None:
                raise
            return self._destroy(needed)
        if self.clock.boottime() - now > FRESH_SECONDS:
            return Look(Decision(Action.WAIT, STALE), code=ExitCode.TRY_AGAIN, next_look=1.0, again=True)
        look = self._act(decision, facts)
        self.store.journal({**decision.to_dict(), "result": look.result or None})
        return look

    def _write(self, before: tuple[Record, ...], after: tuple[Record, ...], facts: Facts) -> None:
        """Store what the look found."""
        self.store.keep_rules()
        self.store.update(before, after)
        wanted = control_wanted(after, facts)
        if wanted is not None:
            self.store.write_control(wanted)

    def _lists(self) -> dict[str, Listing | str]:
        names = sorted(self.providers)
        if len(names) < 2 or not self.parallel:
            return {name: self._list(name) for name in names}
        with ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(self._list, names), strict=True))

    def _list(self, name: str) -> Listing | str:
        try:
            return self.providers[name].list(self.run_id)
        except PodwatchError as error:
            return str(error)

    def _act(self, decision: Decision, facts: Facts) -> Look:
        if decision.action is Action.CREATE and not self.creates:
            return Look(decision, NOT_CREATED, ExitCode.FAILED)
        if decision.prepare:
            self.store.claim(decision.prepare)
        if decision.action is Action.DESTROY:
            return self._destroy(decision)
        if decision.action is Action.CREATE:
            return self._create(decision, facts)
        return _waits(decision)

    def _destroy(self, decision: Decision) -> Look:
        try:
            self.providers[decision.provider].destroy(decision.id, decision.label)
        except PodwatchError as error:
            self._failed[decision.provider, decision.id] = self.clock.boottime()
            return Look(decision, f"failed: {error}", ExitCode.UNAVAILABLE, AGAIN_SECONDS, again=True)
        return Look(decision, "destroyed", next_look=AGAIN_SECONDS, again=True)

    def _create(self, decision: Decision, facts: Facts) -> Look:
        if self.store.claimed != decision.generation:
            if not self.store.claim(decision.generation):
                return Look(decision, "another controller has claimed this request", next_look=30.0)
            if self.store.left_to_wait() > 0:
                return self._waiting(decision)
            return Look(
                decision, "claimed", next_look=0.0, again=True
            )  # what was read is read again before the request
        if self.store.left_to_wait() > 0:
            return self._waiting(decision)
        won, until = self.store.won()
        if not won:
            self.store.drop_claim()
            return Look(decision, "another controller's claim came first", next_look=30.0)
        record = Record(
            decision.generation,
            decision.provider,
            decision.max_price,
            facts.now,
            account=decision.account,
            lease=facts.lease,
            rules=facts.rules.digest if facts.rules is not None else "",
            label=decision.label,
        )
        problem = self._recorded(record, until)
        if problem:
            return Look(decision, problem, ExitCode.TRY_AGAIN, AGAIN_SECONDS, again=True)
        if self.clock.boottime() > until + FRESH_SECONDS:  # frozen: others have counted this request as failed by now
            self._keep(replace(record, settled=True, failed="not sent: this controller was frozen"), record)
            return Look(decision, "not sent: this controller was frozen", ExitCode.TRY_AGAIN, 1.0, again=True)
        return self._request(decision, record)

    def _recorded(self, record: Record, until: float) -> str:
        """Store the record of a request that was not sent yet. Returns why it must not be sent; empty if it is stored.
        A lost answer is asked for again, because a record without an answer stops everything until lists settle it."""
        lost: RemoteError | None = None
        for _ in range(RECORD_ATTEMPTS):
            try:
                self.store.write(record, until=until)
            except TooLate as error:
                if lost is not None:
                    break
                return str(error)
            except RemoteError as error:
                lost = error
            else:
                return ""
        self._keep(
            replace(record, settled=True, failed=f"not sent: its record was not confirmed ({lost})"[:300]), record
        )
        return f"not sent, because its record was not confirmed ({lost})"

    def _waiting(self, decision: Decision) -> Look:
        left = self.store.left_to_wait()
        what = f"claimed; it is decided in {left:.0f} s whether this controller sends the request"
        return Look(decision, what, ExitCode.TRY_AGAIN, left, again=True)

    def _request(self, decision: Decision, record: Record) -> Look:
        env = {LABEL_VARIABLE: decision.label}
        again = Look(decision, next_look=AGAIN_SECONDS, again=True)
        try:
            machine, price = self.providers[decision.provider].create(
                self.run_id, decision.generation, decision.label, decision.max_price, env
            )
        except ProviderError as error:
            failed = replace(record, settled=True, failed=str(error)[:300], refused=error.refused)
            self._keep(failed, record)
            return replace(again, result=f"failed: {error}", code=ExitCode.UNAVAILABLE)
        except OutcomeUnknown as error:
            self._keep(replace(record, unsure_at=self.store.now()), record)
            return replace(again, result=f"unknown: {error}", code=ExitCode.TRY_AGAIN)
        self._keep(settled(record, machine, price, decision.account), record)
        return replace(again, result=f"created {machine} for {price:g} per hour")

    def _keep(self, record: Record, base: Record) -> None:
        try:
            self.store.amend(record, base)
        except RemoteError:
            pass  # the record of the request is there: the next look finds the machine by its label


def _waits(decision: Decision) -> Look:
    return Look(decision, code=decision.code, next_look=decision.next_look, again=decision.soon)


def once(controller: Controller, sleep: Callable[[float], None], report: Callable[[Look], None]) -> ExitCode:
    """Look, act, and look again until nothing is left to do now. Returns the exit code of the last look."""
    look = controller.look()
    report(look)
    for _ in range(MOST_ROUNDS):
        if not look.again:
            break
        sleep(look.next_look)
        look = controller.look()
        report(look)
    return look.code


def loop(
    controller: Controller, every: float, sleep: Callable[[float], None], report: Callable[[Look | PodwatchError], None]
) -> ExitCode:
    """Look until the run has ended. A store that does not answer is reported, and asked again: the first time soon."""
    failed = False
    while True:
        pause = every
        try:
            look = controller.look()
        except RemoteError as error:
            report(error)
            pause = every if failed else min(AGAIN_SECONDS, every)
            failed = True
        else:
            failed = False
            report(look)
            if look.decision.action is Action.END:
                return look.code
            pause = look.next_look if look.again else min(every, look.next_look)
        sleep(max(0.0, pause))
