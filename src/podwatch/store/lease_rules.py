"""Two pods, one run: which pod trains and publishes. Pure.

No store that podwatch supports can lock, but each can order: claims are never overwritten, each names a generation, and
within a generation the store's own upload time decides, then the name. A pod that finds the run held by another watches
that pod's heartbeat first; a claim is decided only after everything that a former holder could still do has happened;
and a holder confirms that it still holds the run before it publishes or deletes.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from podwatch.domain.lease import CLAIM_WAIT_SECONDS, GONE, Beat, Claim, Control, Decision, LeaseAction, Pod

CONFIRMED_SECONDS = 30.0
"""How long a confirmation is valid, by a clock that runs during suspend: a write that rests on it begins within it."""
LATE_SECONDS = 30.0
"""For so long after its client gave up, a store can still carry a request out, or list what was there before."""
LEAST_BEATS = 1.5
"""For so many intervals of the heartbeat one is watched although it is old enough by the store's clock: a holder that
could not reach the store until now writes one within this time."""
MOST_BETWEEN = 120.0
"""The time between two looks at a heartbeat counts only if it is shorter than this: with a longer one, this pod was
frozen or the store was unreachable."""
REFUSALS, REFUSAL_SECONDS = 3, 60.0
"""A permanent refusal (key, cap, bucket) counts after so many consecutive answers over so many seconds: by then all of
B2's servers know a new key."""


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    patience: float = 300.0
    claim_wait: float = CLAIM_WAIT_SECONDS
    poll: float = 20.0
    """Between two looks while watching: one cheap request each, three looks per heartbeat."""
    heartbeat: float = 60.0
    refusal: float = REFUSAL_SECONDS


@dataclass(frozen=True, slots=True)
class OwnClaim:
    """The claim of this life of podwatch. ``waited``: seconds since it was stored. ``at_once``: training did not wait
    for the decision. ``won``: it was decided for this pod."""

    claim: Claim
    at_once: bool = False
    waited: float = 0.0
    won: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatWatch:
    """What was seen of a foreign heartbeat. ``unchanged``: seconds without a change while the store answered. ``age``:
    its age at the first look by the store's clock, in seconds; None if not known."""

    unchanged: float = 0.0
    changed: bool = False
    mark: str = ""
    age: float | None = None

    def left(self, timing: LeaseTiming) -> float:
        """Seconds until it has been silent and was watched for long enough; at most 0: it has."""
        least = min(LEAST_BEATS * timing.heartbeat, timing.patience)
        return max(timing.patience - self.unchanged - (self.age or 0.0), least - self.unchanged)

    def after(self, beat: Beat | None, seconds_since_last: float) -> "HeartbeatWatch":
        """With one more answered look. A heartbeat that changed proves that its pod lives."""
        mark = beat.mark if beat is not None else "none"
        if mark != self.mark:
            return HeartbeatWatch(0.0, self.mark != "", mark)
        counted = seconds_since_last if 0 <= seconds_since_last <= MOST_BETWEEN else 0.0
        return replace(self, unchanged=self.unchanged + counted)


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What this pod knows when it decides. ``answers``: the store answered the last look. ``pointed``: the highest
    generation in a pointer. ``other_holder``: the pod that made the winning claim, if not this life. ``last``: the
    claim that an earlier life of this pod won or trained on. ``training``: a trainer of this run lives here.
    ``stands_by``: this pod waits while another one lives; else it leaves. ``job_ended``: the earlier attempt of this
    job that holds the run has provably ended, and nothing of it trains. ``lost``: already superseded."""

    me: Pod
    answers: bool = False
    claims: tuple[Claim, ...] = ()
    pointed: int = 0
    beat: Beat | None = None
    other_holder: Pod | None = None
    watch: HeartbeatWatch = field(default_factory=HeartbeatWatch)
    own: OwnClaim | None = None
    last: Claim | None = None
    control: Control = field(default_factory=Control)
    training: bool = False
    take_over: bool = False
    stands_by: bool = False
    job_ended: bool = False
    lost: bool = False

    @property
    def first(self) -> Claim | None:
        return winner(self.claims)

    @property
    def top(self) -> int:
        """The highest generation that any pod has used."""
        beat = self.beat.said.generation if self.beat is not None else 0
        return max(self.pointed, beat, *(claim.generation for claim in self.claims), 0)

    @property
    def holder(self) -> Pod | None:
        """The pod that holds the run by what was read; None if none does."""
        if self.first is None:
            return self.beat.said if self.beat is not None else None
        return self.other_holder or (self.beat.said if self.beat is not None and self.speaks_for(self.first) else Pod())

    def speaks_for(self, claim: Claim) -> bool:
        """Whether the heartbeat is that of the pod with ``claim``."""
        said = self.beat.said if self.beat is not None else None
        return said is not None and (said.generation, said.claim) == (claim.generation, claim.nonce)

    @property
    def holder_left(self) -> bool:
        """Whether the holder's last heartbeat says that it trains no more."""
        if self.beat is None or (self.first is not None and not self.speaks_for(self.first)):
            return False
        return self.beat.said.state in GONE and self.beat.said.generation >= self.top

    @property
    def holder_is_me(self) -> bool:
        return self.holder is not None and is_same_pod(self.me, self.holder, job_ended=self.job_ended)


def winner(claims: Collection[Claim]) -> Claim | None:
    """The claim that wins: of the highest generation, the first that the store received; by name if equal."""
    top = max((c.generation for c in claims), default=0)
    return min((c for c in claims if c.generation == top), key=lambda c: (c.uploaded_wall, c.nonce), default=None)


def is_same_pod(me: Pod, other: Pod, *, job_ended: bool = False) -> bool:
    """Whether ``other`` is certainly an earlier life of this pod, which has ended: the same state on the same boot of
    the same machine (there the state's lock admits one podwatch), or the ended attempt before this one of a job. An
    engine starts a job again beside an attempt that lives on, so of a job nothing else proves it."""
    if me.process or other.process:
        return me.process == other.process or (job_ended and me.same_job(other))
    life = (me.writer_id, me.machine_id, me.boot_id)
    return all(life) and life == (other.writer_id, other.machine_id, other.boot_id)


def decide(view: LeaseView, timing: LeaseTiming) -> Decision:
    """What to do now, and whether this pod trains and publishes meanwhile."""
    decision = _decide(view, timing)
    if view.control.stopped and not decision.stop:
        why = _because("control.json in the store orders training to stop", view.control)
        decision = replace(decision, why_not=why, stop=True, ordered=True)
    return decision


def _decide(view: LeaseView, timing: LeaseTiming) -> Decision:
    own, first, top = view.own, view.first, view.top
    if view.lost:
        return _superseded(view)
    if not view.answers:
        return _without_store(view, timing)
    if own is not None and first is not None and _same(own.claim, first) and first.generation == top:
        return _decide_own(own, timing)
    used = max(top, own.claim.generation if own is not None else 0)
    at_once = Decision(LeaseAction.CLAIM, generation=used + 1, at_once=True)
    listed = own is not None and any(_same(own.claim, claim) for claim in view.claims)
    if own is not None and own.won and own.claim.generation >= top and not listed:
        return replace(at_once, reason="this pod's claim is no longer in the store")
    if view.take_over:
        return replace(at_once, reason="an operator took the run over for this pod")
    if _lost_to_another(view):
        return _superseded(view)
    if first is None and view.beat is None and top == 0:
        return replace(at_once, reason="no pod has held this run")
    if view.holder_is_me:
        return replace(at_once, reason="this pod held the run before")
    who = _name(view.holder)
    if view.holder_left:
        return replace(at_once, reason=f"pod {who} has left the run")
    claim = Decision(LeaseAction.CLAIM, _claiming(who), generation=used + 1, holder=who)
    if view.watch.changed and view.training:
        return _superseded(view)
    left = view.watch.left(timing)
    if left > 0 or (view.watch.changed and not view.stands_by):
        return _watching(view, timing, who, left)
    return replace(claim, reason=f"the heartbeat of pod {who} did not change")


def _decide_own(own: OwnClaim, timing: LeaseTiming) -> Decision:
    """The decision while this pod's claim is the first of the highest generation."""
    generation, left = own.claim.generation, timing.claim_wait - own.waited
    if own.won or left <= 0:
        return Decision(LeaseAction.HOLD, publish=True, generation=generation)
    why = "" if own.at_once else f"podwatch claimed this run for this pod: the claim is decided in {left:.0f} s"
    return Decision(LeaseAction.SETTLE, why, generation=generation, wait=left, at_once=own.at_once, trains_in=left)


def _lost_to_another(view: LeaseView) -> bool:
    """Whether this pod trains or held the run, and another pod has claimed it since."""
    own, first = view.own, view.first
    if first is None or view.holder_is_me:
        return False
    if own is not None and (own.won or (own.at_once and view.training)):
        return True
    earlier = view.last is not None and view.last.generation < first.generation
    return own is None and earlier and view.training and not view.holder_left


def _watching(view: LeaseView, timing: LeaseTiming, who: str, left: float) -> Decision:
    """While another pod holds the run. ``left``: seconds of silence after which it counts as gone."""
    watch = Decision(LeaseAction.WATCH, generation=view.top, wait=min(timing.poll, max(left, 0.01)), holder=who)
    if not view.watch.changed:
        why = f"pod {who} holds this run: podwatch takes it over if its heartbeat does not change for {left:.0f} s more"
        return replace(watch, why_not=why, reason=why, trains_in=left + timing.claim_wait)
    why = f"pod {who} holds this run and is alive"
    if view.stands_by:
        why += f": podwatch takes it over if that pod leaves, or if its heartbeat does not change for {left:.0f} s"
        return replace(watch, why_not=why, reason=why)
    return replace(watch, act=LeaseAction.REFUSE, why_not=why, reason=why, wait=timing.poll)


def _without_store(view: LeaseView, timing: LeaseTiming) -> Decision:
    """The store does not answer, or refuses the key: the last holder trains on without publishing. Other pods wait, and
    so does one that saw another holder before the store stopped answering."""
    own = view.own
    is_ours = (own.won or own.at_once) if own is not None else view.last is not None
    may = view.take_over or (is_ours and not _saw_another(view))
    why = "" if may else "podwatch cannot read the store, so it does not know which pod holds this run: training waits"
    generation = own.claim.generation if own is not None else 0
    return Decision(LeaseAction.ASK, why, generation=generation, wait=timing.poll, reason="the store does not answer")


def _saw_another(view: LeaseView) -> bool:
    """Whether the last answer of the store showed another pod that holds the run and has not left it."""
    first, own = view.first, view.own
    if first is None and view.beat is None:
        return False
    if own is not None and (own.claim.generation > view.top or (first is not None and _same(own.claim, first))):
        return False
    return not view.holder_is_me and not view.holder_left


def is_locked_out(decision: Decision, refusals: int, seconds: float, timing: LeaseTiming) -> bool:
    """Whether this pod cannot train only because the store refuses it permanently. ``refusals``: consecutive ones
    during the last ``seconds``. The last holder continues without the store; any other pod would wait forever."""
    confirmed = refusals >= REFUSALS and seconds >= timing.refusal
    return confirmed and decision.act is LeaseAction.ASK and bool(decision.why_not)


def _superseded(view: LeaseView) -> Decision:
    who = _name(view.holder)
    why = f"pod {who} has taken this run over (generation {view.top})"
    return Decision(LeaseAction.SUPERSEDED, why, stop=True, generation=view.top, holder=who, reason=why)


def _same(one: Claim, other: Claim) -> bool:
    return (one.generation, one.nonce) == (other.generation, other.nonce)


def _name(pod: Pod | None) -> str:
    if pod is None or not (pod.host or pod.writer_id):
        return "unknown"
    return pod.host or f"with writer id {pod.writer_id[:8]}"


def _claiming(who: str) -> str:
    return f"podwatch is claiming this run, which pod {who} held"


def _because(text: str, control: Control) -> str:
    return f"{text} ({control.reason})" if control.reason else text
