"""The lease of a run between pods: one pod's side of the protocol, step by step (docs/two-pods.md).

Each method is a generator of store requests, answered by its driver: ``perform`` with a real store, or a simulation
that freezes, loses and delays. policy/who_holds_the_run.py decides; this object keeps what this pod has seen and
written. Only the clock that continues during suspend counts: a pod does not notice that it was frozen.
"""

import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from podwatch.domain.account_document import AccountTotals
from podwatch.domain.errors import IntegrityError, PodwatchError, RemoteError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.lease import (
    Beat,
    Claim,
    Control,
    Decision,
    Heartbeat,
    HolderState,
    LeaseAction,
    Pod,
    claim_document,
    claimant,
    parse_claim_name,
    read_beat,
    read_control,
)
from podwatch.domain.manifest import Keys, Pointer
from podwatch.domain.run_state import WonClaim
from podwatch.domain.stored_checkpoint import KnownSaves
from podwatch.policy.who_holds_the_run import (
    CONFIRMED_SECONDS,
    MOST_BETWEEN,
    Known,
    Own,
    Timing,
    Watch,
    decide,
    holder_of,
    watched,
    winner,
)
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.stores.fenced_writes import Boottime, put_before
from podwatch.sync.interfaces import TrainingFacts, rfc3339

# -- store requests ---------------------------------------------------------------------------------------------------
# As data, so that a simulation can answer the same requests.

LIMIT = 1 << 20
"""Largest document, in bytes, that is read this way."""


@dataclass(frozen=True, slots=True)
class Get:
    key: str


@dataclass(frozen=True, slots=True)
class ListAll:
    prefix: str


@dataclass(frozen=True, slots=True)
class Put:
    """``until``: the boottime second after which no byte may be sent any more."""

    key: str
    data: bytes
    until: float


@dataclass(frozen=True, slots=True)
class Create:
    """Answered with None if the name is taken."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    item: StoredObject


@dataclass(frozen=True, slots=True)
class Skew:
    """Answered with the seconds that this machine's clock is ahead of the store's; None if the store shows no time."""


Request = Get | ListAll | Put | Create | Delete | Skew


def perform(store: ObjectStore, steps: Generator[Request, Any, Any], clock: Boottime) -> Any:
    """Perform the requests against a real store; returns what the generator returns. Raises as both do."""
    try:
        request = next(steps)
        while True:
            try:
                answer = _answer(store, request, clock)
            except PodwatchError as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        return end.value


def _answer(store: ObjectStore, request: Request, clock: Boottime) -> Any:
    match request:
        case Get(key):
            return store.get_bytes(key, limit=LIMIT)
        case ListAll(prefix):
            return list(store.identify(store.list(prefix)))
        case Create(key, data):
            return store.create(key, data)
        case Delete(item):
            return store.delete(item)
        case Put(key, data, until):
            return put_before(store, key, data, until, clock)
        case Skew():
            return store.clock_skew


# -- one pod's side ---------------------------------------------------------------------------------------------------

EXCLUSIVE_NAME = "only"
"""In a store that creates names exclusively, all lease claims of a generation use this same name."""
EVERY = 5
"""Pointer and control.json are read at every n-th heartbeat, because each read beyond a daily number is paid for. A pod
that took over from a pod that never released the lease reads the pointer each time: that pod may wake up and write."""
DIGEST_AHEAD = 3600.0
"""Seconds by which another pod's clock can be ahead of this one's."""
OLD_CLAIM_SECONDS = 24 * 3600.0
"""Claims of lower generations are removed after this (by the store's clock): as long as B2's upload tokens live."""


class Superseded(PodwatchError):  # noqa: N818
    """Another pod now holds the lease of the run in the store: publish nothing more (docs/two-pods.md)."""


class NotHolding(RemoteError):  # noqa: N818
    """It is not decided yet whether this pod holds the lease; waiting can help."""


@dataclass(frozen=True, slots=True)
class News:
    """Something to report to the operator."""

    event: EventName
    severity: Severity
    text: str


class LeaseClock(Boottime, Protocol):
    """``wall`` is for people, and for ages by the store's clock."""

    def wall(self) -> float: ...


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """With what this pod asks for the lease. ``take_over``: the operator has requested that it takes the run over.
    ``ended``: whether the process of another attempt of the job (``Pod.process``) has provably ended. ``stands_by``:
    this pod waits while another one lives; else it leaves."""

    me: Pod
    timing: Timing
    take_over: bool = False
    ended: Callable[[str], bool] = lambda _process: False
    stands_by: bool = False


class LeaseProtocol:
    """One pod's side. Not thread-safe: one generator at a time. ``exclusive``: the store creates names exclusively; set
    it before the first look."""

    def __init__(
        self,
        terms: LeaseTerms,
        keys: Keys,
        clock: LeaseClock,
        training: TrainingFacts,
        *,
        exclusive: bool = False,
        nonce: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self.me, self._timing, self._exclusive, self._ended = terms.me, terms.timing, exclusive, terms.ended
        self._keys, self._clock, self._training, self._nonce = keys, clock, training, nonce
        self.news: list[News] = []
        self.contested = False
        """This pod took over from a pod that may still write."""
        self._known = Known(
            terms.me, answers=False, take_over=terms.take_over, stands_by=terms.stands_by, exclusive=exclusive,
            own=self._recorded(),
        )  # fmt: skip
        self._told_alive = False
        """It is reported that this pod stands by because the other one lives."""
        self._put_at = 0.0
        self._looked_at: float | None = None
        self._rival_seen: tuple[int, str] | None = None
        self._confirmed_at: float | None = None
        self._said = ""
        self._said_at: float | None = None
        self._written: StoredObject | None = None
        self._beats = 0
        self._complaint = ""
        self.digest_wall: float | None = None
        """When the run's last digest was sent by any pod; epoch seconds. Heartbeats hand it on."""
        self.foreign_pins: Mapping[int, str] = {}
        """Pins (step: reason) in the last heartbeat of another podwatch, until they are taken over."""
        self.foreign_saves: KnownSaves | None = None
        """The saves that the same heartbeat lists."""
        self.foreign_account: AccountTotals | None = None
        """Its account of the run, until it is taken over."""
        self.pointer: Pointer | None = None
        """As it was when this pod won the lease; None: absent or unusable."""
        self._seen_pointer: Pointer | None = None
        self._pins_from = ""
        self.decision = decide(self._known, self._timing)

    def _recorded(self) -> Own | None:
        """The claim that this pod won last. An attempt of a job has none of an earlier attempt, unless that one has
        provably ended: it may live on beside this one, with the same state directory."""
        kept = self._training.claim()
        if kept is None:
            return None
        own = Own(Claim(kept.generation, kept.nonce), kept.boot, kept.process, won=True, recorded=True)
        if own.process == self.me.process:
            return own
        same_job = kept.job == tuple(self.me.instance.job)
        return own if same_job and self._ended(own.process) else None

    @property
    def exclusive(self) -> bool:
        return self._exclusive

    @exclusive.setter
    def exclusive(self, exclusive: bool) -> None:
        self._exclusive = exclusive
        self._known = replace(self._known, exclusive=exclusive)

    @property
    def claimed(self) -> int:
        """Generation of the claim of this pod, won or not; 0 if none."""
        own = self._known.own
        return own.claim.generation if own is not None else 0

    @property
    def generation(self) -> int:
        own = self._known.own
        return own.claim.generation if own is not None and own.won else 0

    @property
    def holding(self) -> bool:
        return self.decision.act is LeaseAction.HOLD

    @property
    def speaks(self) -> bool:
        """Whether this pod writes the heartbeat: as the holder, or while it trains on a claim that is not decided yet,
        so that another pod that trains sees it soon."""
        return self.holding or (self.decision.act is LeaseAction.SETTLE and self.decision.at_once)

    # -- looking ------------------------------------------------------------------------------------------------------

    def unanswered(self) -> Decision:
        """The store did not answer."""
        self._looked_at = None  # the time in between is unknown
        self._known = replace(self._known, answers=False)
        return self.decision if self.holding else self._decide()

    def look(self) -> Generator[Request, Any, Decision]:
        """Read the leases in the store, decide, and claim if that is the decision. Raises what the store raises."""
        began = self._clock.boottime()
        yield from self._read_control()
        beat = self._heard((yield Get(self._keys.heartbeat)))
        since = began - self._looked_at if self._looked_at is not None else -1.0
        watch = watched(self._known.watch, beat, since)
        self._looked_at = began
        quiet, before = self._known.answers and not self._moved(watch, beat), self.decision.act
        self._known = replace(self._known, beat=beat, watch=watch, answers=True)
        if not quiet or before not in (LeaseAction.WATCH, LeaseAction.ASIDE) or self._decide().act is not before:
            # Watching costs one cheap read at a time; every decision rests on a fresh listing.
            began = self._clock.boottime()
            yield from self._list()
            if self._decide().act is LeaseAction.WATCH and watch.age is None:
                yield from self._read_age()
            if self._decide().act is LeaseAction.CLAIM:
                yield from self._claim(began)
        self._tell_standby()
        return self.decision

    def _moved(self, watch: Watch, beat: Beat | None) -> bool:
        """Whether a new heartbeat names another claim than the newest one known: a third pod has taken the run over."""
        first = winner(self._known.claims)
        if beat is None or first is None or watch.mark == self._known.watch.mark:
            return False
        return (beat.said.generation, beat.said.claim) != _numbers(first)

    def _tell_standby(self) -> None:
        if not self._told_alive and self.decision.act is LeaseAction.WATCH and self._known.watch.changed:
            self._told_alive = True
            self.news.append(News(EventName.RUN_HELD_ELSEWHERE, Severity.WARNING, self.decision.why_not))

    def note_digest(self, wall: float) -> None:
        """A digest was sent at ``wall``, or a pod waits for the first since then."""
        self.digest_wall = max(wall, self.digest_wall or wall)

    def _heard(self, data: bytes | None) -> Beat | None:
        """The heartbeat. A time of a digest that is ahead of this pod's clock is not believed: it would delay the next
        digest by as much."""
        beat = read_beat(data)
        now = self._clock.wall()
        if beat is not None and beat.said.digest_wall is not None and 0 < beat.said.digest_wall <= now + DIGEST_AHEAD:
            self.note_digest(min(beat.said.digest_wall, now))
        if beat is None or not beat.said.readable:  # what an earlier one of that pod said still holds
            return beat
        if beat.said.writer_id != self.me.writer_id and beat.mark != self._pins_from:
            self.foreign_pins, self._pins_from = beat.said.pinned, beat.mark
            self.foreign_saves = beat.said.saves.taken() if beat.said.saves is not None else None
            self.foreign_account = beat.said.account
        return beat

    def _list(self) -> Generator[Request, Any, None]:
        found = []
        for item in (yield ListAll(self._keys.claims)):
            name = parse_claim_name(item.key.removeprefix(self._keys.claims))
            # Where names are exclusive, a claim without our mark comes from a writer that was killed: it counts.
            if name is not None and (item.ours or self._exclusive):
                found.append(Claim(*name, item.uploaded_wall, item.file_id, item.writer_id))
        pointer = self._seen_pointer = _pointer((yield Get(self._keys.latest)), self._keys.run_id)
        first, own, beat = winner(found), self._known.own, self._known.beat
        rival: Pod | None = None
        if first is not None and (own is None or (own.claim.generation, own.claim.nonce) != _numbers(first)):
            if beat is not None and (beat.said.generation, beat.said.claim) == _numbers(first):
                rival = beat.said
            else:
                who = claimant((yield Get(self._key(first))))
                rival = who if who.writer_id == first.writer_id else Pod(first.writer_id)
        others = [c for c in found if own is None or _numbers(c) != _numbers(own.claim)]
        newest = winner(others)
        seen, self._rival_seen = self._rival_seen, _numbers(newest) if newest is not None else (0, "")
        if seen is not None and self._rival_seen[0] > 0 and self._rival_seen != seen:
            # A new claim counts as a heartbeat too, of a pod that has not written one yet.
            self._known = replace(self._known, watch=Watch(0.0, True, self._known.watch.mark))
        published = pointer.generation if pointer is not None else 0
        floor = max(published, beat.said.generation if beat is not None else 0)
        self._known = replace(self._known, claims=tuple(found), rival=rival, floor=floor, own=self._timed(own))

    def _read_age(self) -> Generator[Request, Any, None]:
        """How old the newest heartbeat of another pod was at the start of this look, or the claim of a pod that has
        written none yet. A heartbeat written since then makes it younger, never older."""
        own = self._known.own
        if (yield Skew()) is None:
            return
        written = [i.uploaded_wall for i in (yield ListAll(self._keys.heartbeat)) if i.key == self._keys.heartbeat]
        written += [c.uploaded_wall for c in self._known.claims if own is None or _numbers(c) != _numbers(own.claim)]
        skew = yield Skew()  # again: the listing's answer shows the store's time now
        if skew is not None and written and self._looked_at is not None:
            passed = self._clock.boottime() - self._looked_at
            age = max(0.0, self._clock.wall() - skew - max(written) - passed)
            self._known = replace(self._known, watch=replace(self._known.watch, age=age))

    def _timed(self, own: Own | None) -> Own | None:
        return own if own is None or own.won else replace(own, waited=self._clock.boottime() - self._put_at)

    def _read_control(self) -> Generator[Request, Any, None]:
        data = yield Get(self._keys.control)
        try:
            wish = read_control(data, where=self._keys.control)
        except IntegrityError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                self.news.append(
                    News(EventName.CONTROL_REFUSED, Severity.WARNING, f"{error}; the previous request stays in force")
                )
            return
        self._complaint = ""
        if wish != self._known.control:
            told = f"training {'must stop' if wish.stopped else 'is allowed'}"
            told += f", on pod {wish.holder} only" if wish.holder else ""
            told += f" ({wish.reason})" if wish.reason else ""
            self.news.append(
                News(EventName.CONTROL_CHANGED, Severity.WARNING, f"control.json in the store was changed: {told}")
            )
            self._known = replace(self._known, control=wish)

    def _decide(self) -> Decision:
        self._known = replace(self._known, training=self._training.trainer_alive(), trained=self._trained())
        self._look_at_holder()
        before, known = self.decision, self._known
        decision = decide(known, self._timing)
        own = known.own
        if decision.act is LeaseAction.HOLD and known.take_over:  # nothing left to take over: a later loss counts again
            known = self._known = replace(known, take_over=False)
        if decision.act is LeaseAction.HOLD and own is not None and not (own.won and not own.recorded):
            self._known = replace(known, own=replace(own, won=True, recorded=False))
            claim, job = own.claim, tuple(self.me.instance.job)
            self._training.won(WonClaim(claim.generation, claim.nonce, own.boot, own.process, job))
        if decision.act is LeaseAction.HOLD and before.act is not LeaseAction.HOLD:
            self._confirmed_at, self.pointer = self._looked_at, self._seen_pointer
            if self.contested:
                text = f"this pod now holds the run's lease in the store (generation {decision.generation})"
                self.news.append(News(EventName.RUN_CLAIMED, Severity.INFO, text))
        if decision.act is LeaseAction.SUPERSEDED and not known.lost:
            self._known = replace(self._known, lost=True)
            self.news.append(News(EventName.SUPERSEDED, Severity.CRITICAL, decision.why_not))
        self.decision = decision
        return decision

    def _trained(self) -> bool:
        """Two attempts of a job can share a state directory: what was started in it proves nothing there."""
        return not self.me.process and self._training.ever_started()

    def _look_at_holder(self) -> None:
        holder = holder_of(self._known)
        ended = holder is not None and bool(holder.process) and self._ended(holder.process)
        self._known = replace(self._known, holder_ended=ended)

    # -- claiming -----------------------------------------------------------------------------------------------------

    def _claim(self, listed_at: float) -> Generator[Request, Any, None]:
        wanted = self.decision
        generation = wanted.generation
        others = [c for c in self._known.claims if c.writer_id != self.me.writer_id]
        self.contested = self.contested or bool(others) or self._known.rival is not None
        claim = Claim(generation, EXCLUSIVE_NAME if self._exclusive else self._nonce(), writer_id=self.me.writer_id)
        data = claim_document(claim, self.me, rfc3339(self._clock.wall()))
        began = self._clock.boottime()
        if self._exclusive:
            stored = yield Create(self._key(claim), data)
        else:
            stored = yield Put(self._key(claim), data, listed_at + CONFIRMED_SECONDS)
        now = self._clock.boottime()
        if stored is None:  # another pod was first; the next look shows which
            self._known = replace(self._known, watch=Watch(), answers=False)
            self.decision = replace(wanted, act=LeaseAction.WATCH, wait=0.0)
            return
        self._put_at = now
        own = Own(claim, self.me.boot_id, self.me.process, took=now - began, at_once=wanted.at_once)
        self._known = replace(self._known, own=own, take_over=False)
        yield from self._list()
        self._decide()

    def tidy(self) -> Generator[Request, Any, None]:
        """Remove claims that a later one has long replaced. Raises as the store does."""
        found = [i for i in (yield ListAll(self._keys.claims)) if i.ours]
        mine = next((i for i in found if i.key == self._own_key()), None)
        for item in found:
            name = parse_claim_name(item.key.removeprefix(self._keys.claims))
            if mine is None or name is None or name[0] >= self.generation:
                continue
            if mine.uploaded_wall - item.uploaded_wall >= OLD_CLAIM_SECONDS:
                yield Delete(item)

    def _own_key(self) -> str:
        own = self._known.own
        return self._key(own.claim) if own is not None else ""

    def _key(self, claim: Claim) -> str:
        return f"{self._keys.claims}{claim.generation}-{claim.nonce}"

    # -- holding ------------------------------------------------------------------------------------------------------

    def confirm(self, *, fresh: bool = False) -> Generator[Request, Any, tuple[int, float]]:
        """Confirm that this pod holds the lease: (generation, boottime until which a write may be sent). One listing,
        unless one was made just now. Raises Superseded, NotHolding, or what the store raises."""
        self._must_hold()
        now = self._clock.boottime()
        if fresh or self._confirmed_at is None or now - self._confirmed_at > CONFIRMED_SECONDS / 2:
            yield from self._list()
            self._decide()
            if self.decision.act is LeaseAction.CLAIM:  # our claim was deleted: claim again, and wait as for any claim
                yield from self._claim(now)
            self._must_hold()
            self._confirmed_at = now
        assert self._confirmed_at is not None
        return self.generation, self._confirmed_at + CONFIRMED_SECONDS

    def _must_hold(self) -> None:
        decision = self.decision
        if decision.act is LeaseAction.HOLD:
            return
        if decision.act in (LeaseAction.SUPERSEDED, LeaseAction.REFUSE, LeaseAction.ASIDE):
            raise Superseded(
                f"another pod holds this run's lease: {decision.why_not}",
                where=self._keys.root,
                fix="stop training here, or take the lease over: podwatch run --take-over",
            )
        raise NotHolding(
            "it is not decided yet whether this pod holds the run's lease",
            where=self._keys.root,
            fix="podwatch tries again soon",
        )

    def beat(
        self, state: HolderState, heartbeat: Heartbeat, *, versioned: bool
    ) -> Generator[Request, Any, bytes | None]:
        """Write a heartbeat, after checking that no other pod has written one. Returns the pointer if it was read. Does
        nothing unless this pod holds the lease and trains; raises Superseded when it has lost the lease."""
        if not self.speaks:
            return None
        now = self._clock.boottime()
        gap = self._said_at is None or now - self._said_at > MOST_BETWEEN
        seen = self._heard((yield Get(self._keys.heartbeat)))
        self._known = replace(self._known, beat=seen)
        foreign = seen is not None and seen.mark != self._said
        if gap or foreign:
            self.contested = self.contested or (foreign and not gap)
            if self.holding:
                yield from self.confirm(fresh=self._said_at is not None)
            else:
                yield from self._list()
                self._decide()
        self._beats += 1
        often = self._beats % EVERY == 1
        if often or gap or self._known.control != Control():
            yield from self._read_control()
            self._decide()
        own = self._known.own
        if not self.speaks or own is None:
            return None
        said = heartbeat.signed(self.me, own.claim, state, rfc3339(self._clock.wall()))
        if self.digest_wall is not None:
            said = replace(said, last_digest_at=rfc3339(self.digest_wall))
        data = said.to_bytes()
        written = yield Put(self._keys.heartbeat, data, self._clock.boottime() + CONFIRMED_SECONDS)
        beat = read_beat(data)
        assert beat is not None
        self._said, self._said_at = beat.mark, self._clock.boottime()
        previous, self._written = self._written, written
        pointer: bytes | None = None
        if often or gap or foreign or self.contested:
            pointer = yield Get(self._keys.latest)
        if previous is not None and versioned:
            try:
                yield Delete(previous)
            except RemoteError as error:
                if error.transient:
                    raise
        return pointer


def _pointer(data: bytes | None, run_id: str) -> Pointer | None:
    if data is None:
        return None
    try:
        found = Pointer.from_bytes(data)
    except IntegrityError:
        return None
    return found if found.run_id == run_id else None


def _numbers(claim: Claim) -> tuple[int, str]:
    return claim.generation, claim.nonce
