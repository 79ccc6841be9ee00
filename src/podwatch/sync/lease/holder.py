"""Runs the lease protocol (sync/lease/protocol.py) for one daemon: reads, waits, claims, writes heartbeats, reports.

Has its own thread and connection, so that a heartbeat never waits behind an upload's verification.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from podwatch.domain.account_document import AccountTotals
from podwatch.domain.errors import InternalError, PodwatchError, is_refusal
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.lease import Decision, Heartbeat, HolderState, LeaseAction
from podwatch.domain.manifest import Keys, Pointer
from podwatch.domain.stored_checkpoint import KnownSaves
from podwatch.policy.who_holds_the_run import locked_out
from podwatch.stores.base import ObjectStore, OpenStore
from podwatch.sync.interfaces import PodSide, Tell
from podwatch.sync.lease.protocol import LeaseProtocol, LeaseTerms, perform
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock

FIRST_ANSWER_SECONDS = 5.0
"""How long the last recorded holder waits for the store's first answer before it trains without; B2 needs one
second."""
RETRY_MIN, RETRY_MAX = 5.0, 60.0
"""Seconds between tries while the store does not answer."""
ASIDE_SECONDS = 60.0
"""How soon a pod sees that control.json gives it the run again."""


class Follower(Protocol):
    """Acts on the lease."""

    def standing_changed(self) -> None:
        """Called on the loop when the holder's decision or ``error`` may have changed."""
        ...


class LeaseHolder:
    """Loop-side object, except ``confirm``. ``open_store`` opens a store for this object's thread."""

    def __init__(
        self,
        terms: LeaseTerms,
        keys: Keys,
        clock: Clock,
        pod: PodSide,
        *,
        open_store: OpenStore,
        follower: Follower,
        tell: Tell,
        retry: tuple[float, float] = (RETRY_MIN, RETRY_MAX),
    ) -> None:
        self._clock, self._pod, self._open, self._follower, self._say = clock, pod, open_store, follower, tell
        self._retry, self._timing = retry, terms.timing
        self._refusals, self._refused_since = 0, 0.0
        self._claims = LeaseProtocol(terms, keys, clock, pod)
        self._worker = Worker("claims")
        self._lock = threading.Lock()
        self._store: ObjectStore | None = None
        self._skew: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began = clock.monotonic()
        self._asked = False
        self._woken = asyncio.Event()
        self._turned = asyncio.Event()
        self._tidied = False
        self._told: Decision | None = None
        self._told_error: PodwatchError | None = None
        self.error: PodwatchError | None = None
        """Why the store cannot show which pod holds the lease, while it cannot."""

    @property
    def decision(self) -> Decision:
        decision = self._claims.decision
        if not self._asked and not decision.why_not and self._clock.monotonic() - self._began < FIRST_ANSWER_SECONDS:
            return replace(decision, why_not="reading from the store whether another pod trains this run")
        return decision

    @property
    def speaks(self) -> bool:
        return self._claims.speaks

    @property
    def digest_wall(self) -> float | None:
        """When the run's last digest was sent by any pod; epoch seconds."""
        return self._claims.digest_wall

    def note_digest(self, wall: float) -> None:
        """The next heartbeat says that a digest was sent at ``wall``."""
        self._claims.note_digest(wall)

    @property
    def foreign_pins(self) -> Mapping[int, str]:
        """The pins (step: reason) of the podwatch that wrote the heartbeat before this one did, until they are taken
        over. Empty while this pod does not write the heartbeat."""
        return self._claims.foreign_pins if self.speaks else {}

    def took_over_pins(self) -> None:
        self._claims.foreign_pins = {}

    def take_account(self) -> tuple[AccountTotals | None, int]:
        """The account of the run in the same heartbeat, once, and the generation of this pod's claim. None and 0 while
        this pod does not write the heartbeat."""
        if not self.speaks:
            return None, 0
        found, self._claims.foreign_account = self._claims.foreign_account, None
        return found, self._claims.claimed

    @property
    def holding(self) -> bool:
        """Whether the claim is settled, so that no other pod publishes."""
        return self._claims.holding

    @property
    def locked_out(self) -> PodwatchError | None:
        """The store's refusal, where that alone keeps this pod from training and lasts."""
        refused_for = self._clock.monotonic() - self._refused_since
        return self.error if locked_out(self.decision, self._refusals, refused_for, self._timing) else None

    @property
    def generation(self) -> int:
        """Of the claim that this pod has won; 0 if none."""
        return self._claims.generation

    @property
    def foreign_saves(self) -> KnownSaves | None:
        """The saves that the same heartbeat lists; None before its pins were taken over, because without them pinned
        saves would be deleted."""
        return self._claims.foreign_saves if self.speaks and not self._claims.foreign_pins else None

    @property
    def pointer(self) -> Pointer | None:
        """As it was when this pod won the lease; None: absent, unusable, or not read yet."""
        return self._claims.pointer

    @property
    def clock_skew(self) -> float | None:
        """Seconds that this machine's clock is ahead of the store's; None: not known."""
        return self._skew

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._task is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._began = self._clock.monotonic()
        self._task = asyncio.create_task(self._run(), name="claims")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._worker.close()

    def hurry(self) -> None:
        """A caller waits: try again now."""
        self._woken.set()

    async def change(self) -> None:
        """Return once something may have changed."""
        self._turned.clear()
        await self._turned.wait()

    async def _run(self) -> None:
        failures = 0
        while True:
            self._woken.clear()
            try:
                await self._worker.call(self._look)
                self.error, failures, self._refusals = None, 0, 0
            except Exception as error:  # this task must not end: nothing else watches the lease
                failures += 1
                self._failed(error)
            self._asked = True
            self._tell()
            decision = self.decision
            if decision.act is LeaseAction.REFUSE:
                self._pod.must_not_train(decision.why_not)
            if decision.act in (LeaseAction.SUPERSEDED, LeaseAction.REFUSE):
                return
            if decision.act is LeaseAction.HOLD:
                await self._tidy()
                await self._until_doubt()
            elif self.error is not None:
                low, high = self._retry
                await self._rest(random.uniform(low / 2, min(high, low * 2.0 ** min(failures, 10))))
            else:
                await self._rest(ASIDE_SECONDS if decision.act is LeaseAction.ASIDE else decision.wait)

    async def _until_doubt(self) -> None:
        """Wait for what heartbeats and confirmations cannot settle themselves."""
        while self.decision.act is LeaseAction.HOLD:
            await self._woken.wait()
            self._woken.clear()

    async def _rest(self, seconds: float) -> None:
        await self._clock.wait(self._woken, seconds)

    # -- the store ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        with self._lock:
            store = self._opened()
            perform(store, self._claims.look(), self._clock)
            self._skew = store.clock_skew

    def _opened(self) -> ObjectStore:
        if self._store is None:
            self._store = self._open()
        self._claims.exclusive = self._store.exclusive  # asks the store where that is not known yet
        return self._store

    def _failed(self, error: Exception) -> None:
        self.error = _told(error)
        if not is_refusal(self.error):
            self._refusals = 0
        else:
            self._refusals += 1
            self._refused_since = self._refused_since if self._refusals > 1 else self._clock.monotonic()
        self._claims.unanswered()
        store, self._store = self._store, None  # opened again with fresh credentials
        if store is not None:
            store.close()

    async def _tidy(self) -> None:
        if self._tidied:
            return
        self._tidied = True
        with contextlib.suppress(Exception):  # a key that cannot delete; the next podwatch tries again
            await self._worker.call(self._tidy_now)

    def _tidy_now(self) -> None:
        with self._lock:
            perform(self._opened(), self._claims.tidy(), self._clock)

    async def beat(self, state: HolderState, heartbeat: Heartbeat) -> bytes | None:
        """Write a heartbeat, if this pod is the one to write it. Returns the pointer if it was read. Raises
        PodwatchError."""
        if not self._claims.speaks:
            return None

        def carry_out() -> bytes | None:
            with self._lock:
                store = self._opened()
                steps = self._claims.beat(state, heartbeat, versioned=store.versioned)
                found: bytes | None = perform(store, steps, self._clock)
                self._skew = store.clock_skew
                return found

        try:
            return await self._worker.call(carry_out)
        finally:
            self._tell()

    def confirm(self, store: ObjectStore) -> tuple[int, float]:
        """From any thread: (generation, boottime until which a write may be sent). Raises Superseded, NotHolding or
        what the store raises."""
        try:
            with self._lock:
                self._claims.exclusive = store.exclusive
                answer: tuple[int, float] = perform(store, self._claims.confirm(), self._clock)
                return answer
        finally:
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: podwatch is stopping
                    self._loop.call_soon_threadsafe(self._tell)

    # -- reporting ----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        news, self._claims.news = self._claims.news, []
        for item in news:
            self._say(item.event, item.text, item.severity, **_facts(self.decision))
        decision = self.decision
        if self._told is None or self._told.act is not decision.act:
            if decision.act in (LeaseAction.WATCH, LeaseAction.REFUSE):
                severity = Severity.WARNING if decision.act is LeaseAction.WATCH else Severity.CRITICAL
                self._say(EventName.RUN_HELD_ELSEWHERE, decision.reason, severity, **_facts(decision))
            if self._told is not None and self._told.act is LeaseAction.HOLD:
                self._woken.set()
        turned = self._told is None or (self._told.act, self._told.publish) != (decision.act, decision.publish)
        turned, self._told_error = turned or self._told_error is not self.error, self.error
        self._told = decision
        self._turned.set()
        if turned:
            self._follower.standing_changed()


def _told(error: Exception) -> PodwatchError:
    if isinstance(error, PodwatchError):
        return error
    if isinstance(error, OSError):
        return PodwatchError(f"the store does not respond: {error}")
    what = f"reading this run's lease failed inside podwatch: {type(error).__name__}: {error}"
    return InternalError(what, fix="please report this; podwatch tries again")


def _facts(decision: Decision) -> dict[str, Any]:
    return {"generation": decision.generation, "holder": decision.holder}
