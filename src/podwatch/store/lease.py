"""The lease of a run: one pod's side of it, for one life of podwatch. Blocking; one thread at a time.

``lease_rules`` decides; this object keeps what this pod has seen and written. Only the clock that continues during
suspend counts: a pod does not notice that it was frozen.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.lease import (
    Beat,
    Claim,
    ClaimDocument,
    Control,
    Decision,
    Heartbeat,
    HolderState,
    LeaseAction,
    Pod,
    claim_document,
    claimant,
    read_beat,
    read_control,
)
from podwatch.domain.times import rfc3339
from podwatch.store.interfaces import OwnSide, Permit, read_or_none
from podwatch.store.keys import Kind, RunKeys
from podwatch.store.lease_rules import (
    CONFIRMED_SECONDS,
    MOST_BETWEEN,
    HeartbeatWatch,
    LeaseTiming,
    LeaseView,
    OwnClaim,
    decide,
    winner,
)
from podwatch.store.objects.base import Objects
from podwatch.store.pointers import highest_pointer
from podwatch.store.publish import LeaseLost, LeaseUnsettled
from podwatch.system.clock import Clock

CONTROL_EVERY = 5
"""control.json is read with every n-th heartbeat: each read beyond a daily number is paid for."""
OLD_CLAIM_SECONDS = 24 * 3600.0


@dataclass(slots=True)
class Lease:
    """``take_over``: the operator has requested that this pod takes the run over. ``stands_by``: this pod waits while
    another one lives; else it leaves."""

    me: Pod
    keys: RunKeys
    clock: Clock
    own_side: OwnSide
    timing: LeaseTiming = field(default_factory=LeaseTiming)
    take_over: bool = False
    stands_by: bool = False
    nonce: Callable[[], str] = lambda: secrets.token_hex(8)
    decision: Decision = field(init=False)
    problem: str = field(init=False, default="")
    """What is wrong with control.json; the request before it stays in force."""
    heartbeat: Beat | None = field(init=False, default=None)
    """The newest one that another life has written: what it knew of the run is taken over from it."""
    _view: LeaseView = field(init=False)
    _claimed_at: float = field(init=False, default=0.0)
    _read_at: float | None = field(init=False, default=None)
    _confirmed_at: float | None = field(init=False, default=None)
    _newest_other: tuple[int, str] | None = field(init=False, default=None)
    _beat_mark: str = field(init=False, default="")
    _beat_at: float | None = field(init=False, default=None)
    _beats: int = field(init=False, default=0)
    _took_over: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        last = self.own_side.last_claim()
        self._view = LeaseView(self.me, last=last, take_over=self.take_over, stands_by=self.stands_by)
        self._decide()

    @property
    def generation(self) -> int:
        """Of the claim that this life has won; 0 if none."""
        own = self._view.own
        return own.claim.generation if own is not None and own.won else 0

    @property
    def may_upload(self) -> bool:
        """Whether pieces may be sent: as the holder, or while a claim settles that did not wait for the decision."""
        settling = self.decision.act is LeaseAction.SETTLE and self.decision.at_once
        return self.decision.act is LeaseAction.HOLD or settling

    @property
    def control(self) -> Control:
        """The request in force of operators and the controller."""
        return self._view.control

    @property
    def settles_in(self) -> float | None:
        """Seconds until the claim of this life is decided; None while none settles."""
        if self.decision.act is not LeaseAction.SETTLE:
            return None
        return max(0.0, self.timing.claim_wait - (self.clock.boottime() - self._claimed_at))

    @property
    def watched_alive(self) -> bool:
        """Whether the heartbeat of the pod that is watched has changed meanwhile."""
        return self.decision.act is LeaseAction.WATCH and self._view.watch.changed

    @property
    def took_over(self) -> bool:
        """Whether another pod held the run before the claim of this life."""
        return self._took_over

    # -- looking ------------------------------------------------------------------------------------------------------

    def unanswered(self) -> Decision:
        """The store did not answer. What is known of the time in between counts no more."""
        self._read_at = None
        self._view = replace(self._view, answers=False)
        return self.decision if self.decision.act is LeaseAction.HOLD else self._decide()

    def update(self, store: Objects) -> Decision:
        """Read, decide, and claim if that is the decision. Raises what the store raises."""
        began = self.clock.boottime()
        self._read_control(store)
        beat = self._read_beat(store)
        since = began - self._read_at if self._read_at is not None else -1.0
        watch = self._view.watch.after(beat, since)
        quiet = self._view.answers and watch.mark == self._view.watch.mark
        self._read_at, before = began, self.decision.act
        self._view = replace(self._view, beat=beat, watch=watch, answers=True)
        if quiet and before is LeaseAction.WATCH and self._decide().act is before:
            return self.decision  # watching costs one small read at a time; every decision rests on a fresh listing
        listed = self.clock.boottime()
        self._list(store, pointers=True)
        if self._decide().act is LeaseAction.WATCH and self._view.watch.age is None and not self._view.watch.changed:
            self._view = replace(self._view, watch=replace(self._view.watch, age=self._age(store)))
            self._decide()
        if self.decision.act is LeaseAction.CLAIM:
            self._claim(store, listed)
        return self.decision

    def _read_beat(self, store: Objects) -> Beat | None:
        beat = read_beat(read_or_none(store, self.keys.heartbeat, Heartbeat))
        if beat is not None and beat.said.readable and beat.mark != self._beat_mark:
            self.heartbeat = beat
        return beat

    def _read_control(self, store: Objects) -> None:
        try:
            wanted = read_control(read_or_none(store, self.keys.control, Control), where=self.keys.control)
        except IntegrityError as error:
            self.problem = str(error)
            return
        self.problem = ""
        self._view = replace(self._view, control=wanted)

    def _list(self, store: Objects, *, pointers: bool = False) -> None:
        claims = []
        for item in store.list(self.keys.claims):
            name = self.keys.parse(item.key)
            if name.kind is Kind.CLAIM:
                claims.append(Claim(name.generation, name.nonce, item.wall))
        own, watch = self._view.own, self._view.watch
        others = [c for c in claims if own is None or _numbers(c) != _numbers(own.claim)]
        newest = winner(others)
        seen, self._newest_other = self._newest_other, _numbers(newest) if newest is not None else (0, "")
        if seen is not None and newest is not None and self._newest_other != seen:
            watch = HeartbeatWatch(0.0, True, watch.mark)  # a new claim shows as much life as a heartbeat
        pointed = self._pointed(store, claims) if pointers else self._view.pointed
        self._view = replace(self._view, claims=tuple(claims), watch=watch, pointed=pointed)
        self._view = replace(self._view, other_holder=self._other_holder(store))

    def _other_holder(self, store: Objects) -> Pod | None:
        """The pod with the winning claim, if that is not this life's."""
        view = self._view
        first = view.first
        if first is None or (view.own is not None and _numbers(view.own.claim) == _numbers(first)):
            return None
        if view.speaks_for(first) and view.beat is not None:
            return view.beat.said
        return claimant(read_or_none(store, self.keys.claim(*_numbers(first)), ClaimDocument))

    def _pointed(self, store: Objects, claims: Sequence[Claim]) -> int:
        """The highest generation that a pointer of this run has used, if all claims were deleted: beside a claim no
        pointer of a higher generation counts."""
        pointer = None if claims else highest_pointer(store, self.keys)
        return 0 if pointer is None else pointer.generation

    def _age(self, store: Objects) -> float | None:
        """Seconds since the other pod's newest heartbeat or claim, by the store's clock: that is read by storing a
        small object. A heartbeat that is written meanwhile makes it younger, never older."""
        key = f"{self.keys.tmp}clock-{self.nonce()}"
        store.put(key, b"podwatch asks the store for its time\n")
        now = next((item.wall for item in store.list(key) if item.key == key), None)
        try:
            store.delete([key])
        except RemoteError as error:
            if error.transient:
                raise
        written = [item.wall for item in store.list(self.keys.heartbeat) if item.key == self.keys.heartbeat]
        own = self._view.own
        written += [c.uploaded_wall for c in self._view.claims if own is None or _numbers(c) != _numbers(own.claim)]
        return None if now is None or not written else max(0.0, now - max(written))

    def _decide(self) -> Decision:
        view = self._view
        if view.own is not None and not view.own.won:
            view = replace(view, own=replace(view.own, waited=self.clock.boottime() - self._claimed_at))
        holder = view.holder
        ended = holder is not None and bool(holder.process) and self.own_side.job_ended(holder.process)
        view = replace(view, training=self.own_side.trainer_alive(), job_ended=ended)
        decision = decide(view, self.timing)
        if decision.act is LeaseAction.HOLD and view.own is not None and not view.own.won:
            self.own_side.claimed(view.own.claim)
            view = replace(view, own=replace(view.own, won=True), take_over=False)
        self._view = replace(view, lost=view.lost or decision.act is LeaseAction.SUPERSEDED)
        self.decision = decision
        return decision

    # -- claiming -----------------------------------------------------------------------------------------------------

    def _claim(self, store: Objects, listed: float) -> None:
        """A request that fails may still be carried out: the next try has another name."""
        wanted, holder = self.decision, self._view.holder
        claim = Claim(wanted.generation, self.nonce(), writer_id=self.me.writer_id)
        document = claim_document(claim, self.me, rfc3339(self.clock.wall()) or "")
        store.put(self.keys.claim(*_numbers(claim)), document, until=listed + CONFIRMED_SECONDS)
        if wanted.at_once:
            self.own_side.claimed(claim)
        self._took_over = holder is not None and not self._view.holder_is_me
        self._claimed_at = self.clock.boottime()
        self._view = replace(self._view, own=OwnClaim(claim, wanted.at_once), take_over=False)
        self._list(store)
        self._decide()

    def tidy(self, store: Objects) -> None:
        """Remove claims that a later one replaced a day ago, and the older versions of what is rewritten under its
        name, which B2 keeps: call it once a day. Raises as the store does."""
        if self.decision.act is not LeaseAction.HOLD:
            return
        permit = self.confirm(store)
        found = [(self.keys.parse(item.key), item) for item in store.list(self.keys.claims)]
        claims = [(name, item) for name, item in found if name.kind is Kind.CLAIM]
        mine = max((item.wall for name, item in claims if name.generation == self.generation), default=0.0)
        old = [i.key for n, i in claims if n.generation < self.generation and mine - i.wall >= OLD_CLAIM_SECONDS]
        store.delete(old, until=permit.until)
        for key in (self.keys.latest, self.keys.heartbeat, self.keys.control, self.keys.verdict):
            store.delete([key], older=True, until=permit.until)

    # -- holding ------------------------------------------------------------------------------------------------------

    def confirm(self, store: Objects, *, fresh: bool = False) -> Permit:
        """As ``interfaces.Ownership``."""
        self._must_hold()
        now = self.clock.boottime()
        if fresh or self._confirmed_at is None or now - self._confirmed_at > CONFIRMED_SECONDS / 2:
            self._list(store)
            if self._decide().act is LeaseAction.CLAIM:  # its claim was deleted: it claims again, and waits
                self._claim(store, now)
            self._must_hold()
            self._confirmed_at = now
        return Permit(self.generation, self._confirmed_at + CONFIRMED_SECONDS)

    def _must_hold(self) -> None:
        decision = self.decision
        if decision.act is LeaseAction.HOLD:
            return
        if decision.act in (LeaseAction.SUPERSEDED, LeaseAction.REFUSE):
            what, fix = f"another pod holds this run: {decision.why_not}", "stop training here, or: run --take-over"
            raise LeaseLost(what, where=self.keys.root, fix=fix)
        what = "it is not decided yet whether this pod holds the run"
        raise LeaseUnsettled(what, where=self.keys.root, fix="podwatch tries again soon")

    def beat(self, store: Objects, state: HolderState, heartbeat: Heartbeat) -> Decision:
        """Write a heartbeat if this pod is the one to write it, after a look at whether another pod has written one.
        Raises what the store raises."""
        own = self._view.own
        if not self.may_upload or own is None:
            return self.decision
        now = self.clock.boottime()
        gap = self._beat_at is None or now - self._beat_at > MOST_BETWEEN
        seen = self._read_beat(store)
        self._view = replace(self._view, beat=seen)
        self._beats += 1
        if gap or self._beats % CONTROL_EVERY == 0 or self._view.control != Control():
            self._read_control(store)
        if gap or seen is None or seen.mark != self._beat_mark:
            self._list(store)
            if self._decide().act is LeaseAction.CLAIM:
                self._claim(store, now)
        else:
            self._decide()
        own = self._view.own
        if not self.may_upload or own is None:
            return self.decision
        data = heartbeat.signed(self.me, own.claim, state, rfc3339(self.clock.wall()) or "").to_bytes()
        store.put(self.keys.heartbeat, data, until=now + CONFIRMED_SECONDS)
        beat = read_beat(data)
        self._beat_mark, self._beat_at = beat.mark if beat is not None else "", self.clock.boottime()
        return self.decision


def _numbers(claim: Claim) -> tuple[int, str]:
    return claim.generation, claim.nonce
