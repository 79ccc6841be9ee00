"""Two pods, one run: which pod trains and publishes (docs/two-pods.md). Pure.

A store without compare-and-swap cannot lock, but it can order: claims are never overwritten, each names a generation,
and within a generation the store's own upload time decides (a local store creates the name exclusively, so the first
claim wins at once). A pod that finds the run held by another watches that pod's heartbeat first, and a holder confirms
that it still holds the run before it publishes.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from podwatch.domain.lease import (
    CLAIM_WAIT_SECONDS,
    GONE,
    PATIENCE_SECONDS,
    REFUSAL_SECONDS,
    Beat,
    Claim,
    Control,
    Decision,
    LeaseAction,
    Pod,
)
from podwatch.domain.manifest import Pointer

CONFIRMED_SECONDS = 30.0
"""How long a confirmation of ownership is valid, by a clock that runs during suspend: a pointer is sent within it."""
PUT_SECONDS = 60.0
"""Timeout of a request (stores/b2_session.py)."""
LEAST_BEATS = 1.5
"""For so many intervals of the heartbeat one is watched although it is old enough by the store's clock: a holder that
could not reach the store until now writes one within this time."""
MOST_BETWEEN = 120.0
"""The time between two looks at a heartbeat counts only if it is shorter than this: with a longer one, this pod was
frozen or the store was unreachable."""

REFUSALS = 3
"""A permanent refusal (key, cap, bucket) counts after this many consecutive answers, each with the credentials read
again, over REFUSAL_SECONDS."""


@dataclass(frozen=True, slots=True)
class Timing:
    patience: float = PATIENCE_SECONDS
    claim_wait: float = CLAIM_WAIT_SECONDS
    poll: float = 20.0
    """Seconds between two looks while watching: one cheap request each, three looks per heartbeat interval."""
    refusal: float = REFUSAL_SECONDS
    heartbeat: float = 60.0


@dataclass(frozen=True, slots=True)
class Own:
    """This pod's own claim. ``won``: it was decided for this pod, now or (``recorded``) by an earlier podwatch process
    on it. ``waited``: seconds since the claim was written; ``took``: seconds that writing it took. ``at_once``:
    training did not wait for the decision. ``process``: the job's process that claimed (see ``Pod``)."""

    claim: Claim
    boot: str
    process: str = ""
    won: bool = False
    recorded: bool = False
    waited: float = 0.0
    took: float = 0.0
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Watch:
    """What was seen of the heartbeat so far. ``unchanged``: seconds without a change while the store answered. ``age``:
    its age at the first look by the store's clock, in seconds; None if the store shows no time."""

    unchanged: float = 0.0
    changed: bool = False
    mark: str = ""
    age: float | None = None

    def left(self, timing: Timing) -> float:
        """Seconds until it has been silent and was watched for long enough; at most 0: it has."""
        least = min(LEAST_BEATS * timing.heartbeat, timing.patience)
        return max(timing.patience - self.unchanged - (self.age or 0.0), least - self.unchanged)


@dataclass(frozen=True, slots=True)
class Known:
    """The input of a decision. ``answers``: the store answered the last look, so ``claims``, ``beat`` and ``floor``
    (the highest generation in pointer and heartbeat) are current. ``rival``: the pod that wrote the winning claim, if
    not this one. ``training``: a trainer of this run lives here. ``trained``: this pod started training for this run
    before. ``stands_by``: this pod waits while another one lives; else it leaves. ``exclusive``: the store admits one
    claim per generation."""

    me: Pod
    answers: bool
    claims: tuple[Claim, ...] = ()
    floor: int = 0
    beat: Beat | None = None
    rival: Pod | None = None
    watch: Watch = field(default_factory=Watch)
    own: Own | None = None
    control: Control = field(default_factory=Control)
    training: bool = False
    trained: bool = False
    take_over: bool = False
    stands_by: bool = False
    exclusive: bool = False
    holder_ended: bool = False
    """The process of the job that holds the run was on this boot of this machine, and has provably ended."""
    lost: bool = False
    """Already superseded: only a new start of podwatch resets this."""


def winner(claims: Collection[Claim]) -> Claim | None:
    """The claim that wins: of the highest generation, the first by (upload time, file id). The nonce only makes the
    order total."""
    top = max((c.generation for c in claims), default=0)
    first = sorted((c.uploaded_wall, c.file_id, c.nonce, c) for c in claims if c.generation == top)
    return first[0][3] if first else None


def watched(before: Watch, beat: Beat | None, seconds_since_last: float) -> Watch:
    """Add one answered look. Time counts only between two looks at most ``MOST_BETWEEN`` apart; a heartbeat that
    changed proves that its pod lives."""
    mark = beat.mark if beat is not None else "none"
    if before.mark == "":
        return Watch(0.0, False, mark)
    if mark != before.mark:
        return Watch(0.0, True, mark)
    counted = seconds_since_last if 0 <= seconds_since_last <= MOST_BETWEEN else 0.0
    return replace(before, unchanged=before.unchanged + counted)


def decide(known: Known, timing: Timing) -> Decision:
    """Decide what to do now, and whether this pod trains and publishes meanwhile."""
    decision = _decide(known, timing)
    if known.control.stopped and not decision.stop:
        why = _because("control.json in the store orders training to stop", known.control)
        decision = replace(decision, why_not=why, stop=True, ordered=True)
    return decision


def _decide(known: Known, timing: Timing) -> Decision:
    own, me, control = known.own, known.me, known.control
    first = winner(known.claims)
    top = max(first.generation if first is not None else 0, known.floor)
    if known.lost:
        return _superseded(known, top)
    if control.holder and not me.called(control.holder):
        why = _because(f"control.json in the store gives this run to {control.holder}", control)
        return Decision(
            LeaseAction.ASIDE, why, stop=True, generation=top, wait=timing.poll, holder=control.holder, reason=why
        )
    if not known.answers:
        return _without_store(known, timing)
    if own is not None and first is not None and first.generation == top and _same(own.claim, top, first.nonce):
        return _ours(known, own, timing)
    listed = own is not None and any(_same(own.claim, c.generation, c.nonce) for c in known.claims)
    if own is not None and own.won and not listed and own.claim.generation >= top:
        return Decision(
            LeaseAction.CLAIM, generation=top + 1, at_once=True, reason="this pod's claim is no longer in the store"
        )
    claim = Decision(LeaseAction.CLAIM, generation=top + 1)
    here = replace(claim, at_once=True)
    if known.take_over:  # before the check for a lost claim: the operator keeps the trainer on this pod
        return replace(here, reason="an operator took the run over for this pod")
    if own is not None and _was_holding(known, own):
        return _superseded(known, top)
    if first is None and known.beat is None and top == 0:
        return replace(here, reason="no pod has held this run")
    holder, said = _holder(known, first), _last_word(known, first)
    if holder is not None and _this_pod(known, holder):
        return replace(here, reason="this pod held the run before")
    if said in GONE:
        return replace(here, reason=f"pod {_name(holder)} reported {said}")
    who = _name(holder)
    if control.holder:
        return replace(claim, why_not=_asking(who), reason="control.json gives the run to this pod", holder=who)
    if known.watch.changed and known.training:
        return _superseded(known, top)
    left = known.watch.left(timing)
    if left > 0 or (known.watch.changed and not known.stands_by):
        return _watching(known, timing, top, who, left)
    return replace(claim, why_not=_asking(who), reason=f"the heartbeat of pod {who} did not change", holder=who)


def _watching(known: Known, timing: Timing, top: int, who: str, left: float) -> Decision:
    """The decision while another pod holds the run. ``left``: seconds of silence after which it counts as gone."""
    wait = min(timing.poll, max(left, 0.01))
    if not known.watch.changed:
        why = f"pod {who} holds this run: podwatch takes it over if its heartbeat does not change for {left:.0f} s more"
        ready = left + timing.claim_wait
        return Decision(LeaseAction.WATCH, why, generation=top, wait=wait, holder=who, reason=why, trains_in=ready)
    why = f"pod {who} holds this run and is alive"
    if known.stands_by:
        why += f": podwatch takes it over if that pod leaves, or if its heartbeat does not change for {left:.0f} s"
        return Decision(LeaseAction.WATCH, why, generation=top, wait=wait, holder=who, reason=why)
    return Decision(LeaseAction.REFUSE, why, generation=top, wait=timing.poll, holder=who, reason=why)


def locked_out(decision: Decision, refusals: int, seconds: float, timing: Timing) -> bool:
    """Whether this pod cannot train only because the store refuses it permanently. ``refusals``: consecutive refusals
    during the last ``seconds``. The last recorded holder continues without the store; any other pod would wait
    forever."""
    confirmed = refusals >= REFUSALS and seconds >= timing.refusal
    return confirmed and decision.act is LeaseAction.ASK and bool(decision.why_not)


def _ours(known: Known, own: Own, timing: Timing) -> Decision:
    """The decision if this pod's claim is the winning one."""
    generation = own.claim.generation
    if own.won:
        if (own.boot, own.process) != (known.me.boot_id, known.me.process):
            # A copy of this machine's disk may run elsewhere, or this is a job's next attempt: a new claim
            # distinguishes the two.
            return Decision(
                LeaseAction.CLAIM, generation=generation + 1, at_once=True, reason="this pod held the run before"
            )
        return Decision(LeaseAction.HOLD, publish=True, generation=generation)
    if known.exclusive:
        return Decision(LeaseAction.HOLD, publish=True, generation=generation)
    if own.took > PUT_SECONDS + CONFIRMED_SECONDS:
        # Other pods may have decided before this claim was visible.
        why = "" if own.at_once else "the store took too long to accept this pod's claim: podwatch claims again"
        return Decision(LeaseAction.CLAIM, why, generation=generation + 1, at_once=own.at_once, reason="late claim")
    left = timing.claim_wait - own.waited
    if left > 0:
        why = "" if own.at_once else f"podwatch claimed this run for this pod: the claim is decided in {left:.0f} s"
        return Decision(LeaseAction.SETTLE, why, generation=generation, wait=left, at_once=own.at_once, trains_in=left)
    return Decision(LeaseAction.HOLD, publish=True, generation=generation)


def _was_holding(known: Known, own: Own) -> bool:
    """A later claim exists: True if this pod held the run and is superseded, False if it can claim again."""
    if not own.won or own.recorded:
        # The later claim may be this pod's own and missing in the journal: podwatch ended before it was decided, or its
        # answer was lost. If the recorded claim was won in this boot, only claims of this boot are this pod's.
        holder = _holder(known, winner(known.claims))
        this_pod = holder is not None and holder.writer_id == known.me.writer_id and _this_pod(known, holder)
        if this_pod and holder is not None and (holder.boot_id == known.me.boot_id or own.boot != known.me.boot_id):
            return False
    if own.recorded:
        # Won by an earlier podwatch process: superseded only if its trainer still lives and the other pod has not left.
        return known.training and _last_word(known, winner(known.claims)) not in GONE
    return own.won or (own.at_once and known.training)


def _without_store(known: Known, timing: Timing) -> Decision:
    """The store does not answer, or refuses the key: the last recorded holder continues training without publishing.
    Other pods wait, and so does a pod that saw another holder before the store stopped answering."""
    own = known.own
    ours = (own.won or own.at_once) if own is not None else known.trained
    may = known.take_over or (ours and not _saw_another(known))
    why = "" if may else "podwatch cannot read the store, so it does not know which pod holds this run: training waits"
    generation = own.claim.generation if own is not None else 0
    return Decision(LeaseAction.ASK, why, generation=generation, wait=timing.poll, reason="the store does not answer")


def _saw_another(known: Known) -> bool:
    """Whether the last answer of the store showed another pod that holds the run and has not left it."""
    first, beat, own = winner(known.claims), known.beat, known.own
    if first is None and beat is None:
        return False
    generation = first.generation if first is not None else beat.said.generation if beat is not None else 0
    if own is not None and (own.claim.generation > generation or (first and _same(own.claim, generation, first.nonce))):
        return False  # the holder seen is older than this pod's claim
    holder = _holder(known, first)
    here = holder is not None and _this_pod(known, holder)
    return not here and _last_word(known, first) not in GONE


def _superseded(known: Known, top: int) -> Decision:
    who = _name(_holder(known, winner(known.claims)))
    why = f"pod {who} has taken this run over (generation {top})"
    return Decision(LeaseAction.SUPERSEDED, why, stop=True, generation=top, holder=who, reason=why)


def _this_pod(known: Known, holder: Pod) -> bool:
    """Whether ``holder`` is this pod, or the ended attempt before this one of the same job."""
    return known.me.same_as(holder) or (known.holder_ended and known.me.same_job(holder))


def holder_of(known: Known) -> Pod | None:
    """The pod that holds the run by what was read from the store; None if no pod does."""
    return _holder(known, winner(known.claims))


def _holder(known: Known, first: Claim | None) -> Pod | None:
    """The pod that wrote the winning claim; without claims, the pod that wrote the heartbeat."""
    beat = known.beat
    if first is None:
        return beat.said if beat is not None else known.rival
    if known.rival is not None:
        return known.rival
    return (
        beat.said if beat is not None and _same(first, beat.said.generation, beat.said.claim) else Pod(first.writer_id)
    )


def _last_word(known: Known, first: Claim | None) -> str:
    """The state in the holder's last heartbeat; empty if the heartbeat is not the holder's."""
    beat = known.beat
    if beat is None or (first is not None and not _same(first, beat.said.generation, beat.said.claim)):
        return ""
    return beat.said.state if beat.said.generation >= known.floor else ""


def _same(claim: Claim, generation: int, nonce: str) -> bool:
    return (claim.generation, claim.nonce) == (generation, nonce)


def _name(pod: Pod | None) -> str:
    if pod is None:
        return "unknown"
    return pod.host or f"with writer id {pod.writer_id[:8]}" if pod.writer_id or pod.host else "unknown"


def _asking(who: str) -> str:
    return f"podwatch is claiming this run, which pod {who} held"


def _because(text: str, control: Control) -> str:
    return f"{text} ({control.reason})" if control.reason else text


@dataclass(frozen=True, slots=True)
class PointerDecision:
    """``ok`` false: this writer must not publish, and the numbers are those of the existing pointer."""

    ok: bool
    generation: int
    seq: int
    reason: str = ""


def next_pointer(current: Pointer | None, *, writer_id: str, generation: int, own_seq: int = 0) -> PointerDecision:
    """Generation and seq of the next pointer of a writer that has just confirmed that it holds ``generation``.

    ``current`` is the pointer as just read; None: the store has none. ``own_seq`` is the highest seq in this writer's
    journal: seq never decreases, even if the pointer was deleted or replaced by an older one, and continues across
    generations, because retention orders saves by it.
    """
    if current is None:
        return PointerDecision(True, generation, own_seq + 1)
    foreign = current.writer_id != writer_id
    if current.generation > generation or (foreign and current.generation == generation):
        why = f"writer {current.writer_id} published generation {current.generation}; this pod holds {generation}"
        return PointerDecision(False, current.generation, current.seq, why)
    return PointerDecision(True, generation, max(current.seq, own_seq) + 1)
