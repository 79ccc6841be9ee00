"""The lease of the run, for one daemon: looks, waits, claims, confirms, and reports what changes (``store.lease``)."""

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Any

from podwatch.app.backup.connection import StoreConnection, as_known
from podwatch.app.backup.run_side import RunSide
from podwatch.domain.errors import PodwatchError, is_refusal
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.lease import Beat, Control, Decision, Heartbeat, HolderState, LeaseAction
from podwatch.store.interfaces import Permit
from podwatch.store.lease import Lease
from podwatch.store.lease_rules import is_locked_out
from podwatch.system.clock import Clock

FIRST_ANSWER_SECONDS = 5.0
"""How long the last holder waits for the store's first answer before it trains without; B2 needs one second."""
RETRY_MIN, RETRY_MAX = 5.0, 60.0
"""Seconds between tries while the store does not answer."""
NOT_OURS = (LeaseAction.SUPERSEDED, LeaseAction.REFUSE)


class LeaseKeeper:
    """Loop-side object."""

    def __init__(self, lease: Lease, connection: StoreConnection, clock: Clock, pod: RunSide) -> None:
        self._lease, self._connection, self._clock, self._pod = lease, connection, clock, pod
        self._turned = asyncio.Event()
        self.error: PodwatchError | None = None
        """Why the store cannot show which pod holds the run, while it cannot."""
        self.updates = 0
        """That have ended, whether or not the store answered."""
        self._began = clock.monotonic()
        self._refusals, self._refused_at = 0, 0.0
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reported: tuple[LeaseAction, bool] | None = None
        self._reported_control, self._reported_problem = Control(), ""

    @property
    def decision(self) -> Decision:
        decision = self._lease.decision
        if not self.updates and not decision.why_not and self._clock.monotonic() - self._began < FIRST_ANSWER_SECONDS:
            return replace(decision, why_not="reading from the store whether another pod trains this run")
        return decision

    @property
    def holds(self) -> bool:
        """Whether this pod publishes: its claim is decided."""
        return self._lease.decision.act is LeaseAction.HOLD

    @property
    def may_upload(self) -> bool:
        return self._lease.may_upload

    @property
    def generation(self) -> int:
        return self._lease.generation

    @property
    def claimed(self) -> int:
        """The generation of this pod's claim, decided or not; 0 if none."""
        return self.decision.generation if self.may_upload else 0

    async def turned(self) -> None:
        """Returns once the decision or ``error`` may have changed."""
        self._turned.clear()
        await self._turned.wait()

    async def until_speaking(self, speaks: bool) -> None:
        """Returns once this pod writes the run's heartbeat, or once it no longer does."""
        while self.may_upload is not speaks:
            await self.turned()

    @property
    def earlier_beat(self) -> Beat | None:
        """The newest heartbeat of another life, whose knowledge of the run is taken over; None while this pod does not
        write the heartbeat."""
        return self._lease.heartbeat if self.may_upload else None

    @property
    def settles_in(self) -> float | None:
        """Seconds until this pod's claim is decided; None while none settles."""
        return self._lease.settles_in

    @property
    def locked_out(self) -> PodwatchError | None:
        """The store's refusal, where that alone keeps this pod from training and lasts."""
        seconds = self._clock.monotonic() - self._refused_at
        out = is_locked_out(self.decision, self._refusals, seconds, self._lease.timing)
        return self.error if out else None

    # -- life

    def start(self) -> None:
        if self._task is None:
            self._began = self._clock.monotonic()
            self._task = asyncio.create_task(self._run(), name="lease")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def hurry(self) -> None:
        """A caller waits: look now."""
        self._woken.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            self._woken.clear()
            failures = 0 if await self._update() else failures + 1
            decision = self.decision
            if decision.act is LeaseAction.REFUSE:
                self._pod.must_not_train(decision.why_not)
            if decision.act in (LeaseAction.SUPERSEDED, LeaseAction.REFUSE):
                return
            if decision.act is LeaseAction.HOLD and self.error is None:
                await self._woken.wait()  # for what heartbeats and confirmations cannot settle
            elif self.error is not None:
                most = min(RETRY_MAX, RETRY_MIN * 2.0 ** min(failures, 10))
                await self._clock.wait(self._woken, random.uniform(RETRY_MIN / 2, most))
            else:
                await self._clock.wait(self._woken, decision.wait)

    async def _update(self) -> bool:
        """Whether the store answered. Nothing that fails ends the watch over the lease."""
        try:
            await self._connection.call(self._lease.update)
        except Exception as error:
            self._failed(as_known(error))
        else:
            self.error, self._refusals = None, 0
        self.updates += 1
        self._report()
        return self.error is None

    def _failed(self, error: PodwatchError) -> None:
        self.error = error
        self._refusals = self._refusals + 1 if is_refusal(error) else 0
        if self._refusals == 1:
            self._refused_at = self._clock.monotonic()
        self._lease.unanswered()

    # -- holding

    async def confirm(self) -> Permit:
        """Raises LeaseLost, LeaseUnsettled or what the store raises."""
        try:
            return await self._connection.call(self._lease.confirm)
        finally:
            self._report()

    async def beat(self, heartbeat: Heartbeat, state: HolderState) -> None:
        """Write the heartbeat, if this pod is the one that does. Raises what the store raises."""
        try:
            await self._connection.call(lambda store: self._lease.beat(store, state, heartbeat))
        finally:
            self._report()

    async def tidy(self) -> None:
        """Once a day. A key that cannot delete is no error."""
        with contextlib.suppress(PodwatchError):
            await self._connection.call(self._lease.tidy)

    # -- reporting

    def _report(self) -> None:
        """Call after each use of the lease: reports what is new, and wakes whoever waits for it."""
        decision = self.decision
        self._say_control()
        now = (decision.act, bool(self._lease.watched_alive))
        if now != self._reported:
            self._say_decision(decision)
            if self._reported is not None and self._reported[0] is LeaseAction.HOLD:
                self._woken.set()
        self._reported = now
        self._turned.set()

    def _say_decision(self, decision: Decision) -> None:
        say = self._connection.say
        facts: dict[str, Any] = {"generation": decision.generation, "holder": decision.holder}
        before = self._reported[0] if self._reported is not None else None
        if decision.act is LeaseAction.SUPERSEDED and before is not LeaseAction.SUPERSEDED:
            say(EventName.SUPERSEDED, decision.why_not, Severity.CRITICAL, **facts)
        elif decision.act is LeaseAction.WATCH:
            say(EventName.RUN_HELD_ELSEWHERE, decision.reason, Severity.WARNING, **facts)
        elif decision.act is LeaseAction.REFUSE and before is not LeaseAction.REFUSE:
            say(EventName.RUN_HELD_ELSEWHERE, decision.reason, Severity.CRITICAL, **facts)
        elif decision.act is LeaseAction.HOLD and self._lease.took_over:
            text = f"this pod now holds the run's lease in the store (generation {decision.generation})"
            say(EventName.RUN_CLAIMED, text, **facts)

    def _say_control(self) -> None:
        control, problem = self._lease.control, self._lease.problem
        if problem and problem != self._reported_problem:
            text = f"{problem}; the previous request stays in force"
            self._connection.say(EventName.CONTROL_REFUSED, text, Severity.WARNING)
        if control != self._reported_control:
            text = f"control.json in the store was changed: training {'must stop' if control.stopped else 'is allowed'}"
            text += f" ({control.reason})" if control.reason else ""
            self._connection.say(EventName.CONTROL_CHANGED, text, Severity.WARNING)
        self._reported_control, self._reported_problem = control, problem
