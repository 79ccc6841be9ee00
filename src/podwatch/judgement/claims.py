"""Two pods, one run: who may train and publish (DESIGN section 4). Pure: what is known goes in, what to do comes out.

A store without compare-and-swap cannot lock. It can order: claims are never overwritten, each says a generation, and
of one generation the store's own upload time decides (a local store creates the name exclusively, so the first wins at
once). A pod that comes to a run held by another watches that one's heartbeat first, and a holder makes sure that it
still is one before it publishes.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum

from podwatch.domain.claims import GONE, Claim, Control, Pod, Sign
from podwatch.domain.remote import Pointer

CONFIRMED_SECONDS = 30.0
"""A confirmation is good for so long, by a clock that goes on during suspend: the bytes of a pointer leave within it.
Half of what DESIGN allows at most, which lets a claimant wait less."""
PUT_SECONDS = 60.0
"""A request whose answer takes longer is given up (stores/b2_http.py)."""
CLAIM_WAIT_SECONDS = 100.0
"""From a claim to its decision: longer than a PUT's timeout plus 30 s, so that every rival claim is visible; and longer
than confirmation plus PUT, so that the last pointer of a living former holder is there before the first of ours."""
PATIENCE_SECONDS = 300.0
"""A foreign heartbeat is watched for so long; it comes every minute, and B2 may be slow or away for a while."""
MOST_BETWEEN = 120.0
"""Two looks at a heartbeat further apart than this (we were frozen, or the store away) prove nothing between them."""

REFUSAL_SECONDS, REFUSALS = 60.0, 3
"""A permanent refusal (key, cap, bucket) is confirmed by so many answers in a row over so long a time, each with the
credentials read again. A bucket or key made a moment ago is known to all of B2's servers well within it."""


@dataclass(frozen=True, slots=True)
class Timing:
    patience: float = PATIENCE_SECONDS
    claim_wait: float = CLAIM_WAIT_SECONDS
    poll: float = 20.0
    """Seconds between two looks while watching: one cheap request each, three for every heartbeat."""
    refusal: float = REFUSAL_SECONDS


class Act(StrEnum):
    """What to do next. Stable: ``status`` shows it."""

    ASK = "asking"
    """The store has not answered: nothing is known for sure."""
    WATCH = "watching"
    CLAIM = "claiming"
    SETTLE = "settling"
    HOLD = "holding"
    REFUSE = "refused"
    SUPERSEDED = "superseded"
    ASIDE = "aside"
    """A person has named another pod in control.json."""


@dataclass(frozen=True, slots=True)
class Own:
    """Our own claim. ``won``: it was decided for us, now or (``recorded``) by an earlier podwatch on this pod.
    ``waited`` seconds have passed since it was put, which took ``took`` seconds. ``at_once``: training did not wait
    for it."""

    claim: Claim
    boot: str
    won: bool = False
    recorded: bool = False
    waited: float = 0.0
    took: float = 0.0
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Watch:
    """What was seen of the heartbeat so far: unchanged for so many seconds during which the store answered."""

    unchanged: float = 0.0
    changed: bool = False
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """Everything a decision rests on. ``answers``: the last look at the store was answered, so ``claims``, ``sign`` and
    ``floor`` (the highest generation that pointer or heartbeat speak of) are of now. ``rival``: who put the winning
    claim, where it is not ours. ``training``: a trainer of ours lives here. ``trained``: this pod has started training
    for this run before. ``exclusive``: the store admits one claim per generation."""

    me: Pod
    answers: bool
    claims: tuple[Claim, ...] = ()
    floor: int = 0
    sign: Sign | None = None
    rival: Pod | None = None
    watch: Watch = field(default_factory=Watch)
    own: Own | None = None
    control: Control = field(default_factory=Control)
    training: bool = False
    trained: bool = False
    take_over: bool = False
    exclusive: bool = False
    lost: bool = False
    """Superseded already: nothing but a new start of podwatch undoes that."""


@dataclass(frozen=True, slots=True)
class Decision:
    """``why_not`` says why no training may be started now (empty: it may); ``stop``: and what runs must end.
    ``publish``: the store may be written. ``generation``: to claim, or the one that holds. ``wait``: seconds until the
    next look. ``holder`` names the other pod. ``trains_in``: seconds until training may start here if the other pod
    stays silent; None where that is not known."""

    act: Act
    why_not: str = ""
    stop: bool = False
    publish: bool = False
    generation: int = 0
    wait: float = 0.0
    at_once: bool = False
    holder: str = ""
    reason: str = ""
    trains_in: float | None = None


def winner(claims: Collection[Claim]) -> Claim | None:
    """Of the highest generation the first by (upload time, file id); the nonce only makes the order total."""
    top = max((c.generation for c in claims), default=0)
    first = sorted((c.uploaded_wall, c.file_id, c.nonce, c) for c in claims if c.generation == top)
    return first[0][3] if first else None


def watched(before: Watch, sign: Sign | None, seconds_since_last: float) -> Watch:
    """One more answered look. Time counts only between two looks close enough to each other; once a heartbeat has
    changed, the pod behind it lives."""
    mark = sign.mark if sign is not None else "none"
    if before.mark == "":
        return Watch(0.0, False, mark)
    if mark != before.mark:
        return Watch(0.0, True, mark)
    counted = seconds_since_last if 0 <= seconds_since_last <= MOST_BETWEEN else 0.0
    return replace(before, unchanged=before.unchanged + counted)


def decide(known: Known, timing: Timing) -> Decision:
    """What is to be done now, and what may be done meanwhile."""
    decision = _decide(known, timing)
    if known.control.stopped and not decision.stop:
        why = _because("control.json in the store says that training is to be stopped", known.control)
        decision = replace(decision, why_not=why, stop=True)
    return decision


def _decide(known: Known, timing: Timing) -> Decision:
    own, me, control = known.own, known.me, known.control
    first = winner(known.claims)
    top = max(first.generation if first is not None else 0, known.floor)
    if known.lost:
        return _superseded(known, top)
    if control.holder and not me.called(control.holder):
        why = _because(f"control.json in the store gives this run to {control.holder}", control)
        return Decision(Act.ASIDE, why, stop=True, generation=top, wait=timing.poll, holder=control.holder, reason=why)
    if not known.answers:
        return _without_store(known, timing)
    if own is not None and first is not None and first.generation == top and _same(own.claim, top, first.nonce):
        return _ours(known, own, timing)
    listed = own is not None and any(_same(own.claim, c.generation, c.nonce) for c in known.claims)
    if own is not None and own.won and not listed and own.claim.generation >= top:
        return Decision(
            Act.CLAIM, generation=top + 1, at_once=True, reason="our own claim is not in the store any more"
        )
    claim = Decision(Act.CLAIM, generation=top + 1)
    here = replace(claim, at_once=True)
    if known.take_over:  # before anything is lost: a trainer that lives here is the one to be kept
        return replace(here, reason="taken over by hand")
    if own is not None and _was_holding(known, own):
        return _superseded(known, top)
    if first is None and known.sign is None and top == 0:
        return replace(here, reason="nobody has held this run")
    holder, said = _holder(known, first), _last_word(known, first)
    if holder is not None and me.same_as(holder):
        return replace(here, reason="this pod held it before")
    if said in GONE:
        return replace(here, reason=f"{_name(holder)} has {said} it")
    who = _name(holder)
    if control.holder:
        return replace(claim, why_not=_asking(who), reason="control.json gives it to this pod", holder=who)
    if known.watch.changed and known.training:
        return _superseded(known, top)
    if known.watch.changed:
        why = f"pod {who} holds this run and is alive"
        return Decision(Act.REFUSE, why, generation=top, wait=timing.poll, holder=who, reason=why)
    left = timing.patience - known.watch.unchanged
    if left > 0:
        why = f"pod {who} may still train this run: its heartbeat is watched for {left:.0f} s more"
        wait, ready = min(timing.poll, max(left, 0.01)), left + timing.claim_wait
        return Decision(Act.WATCH, why, generation=top, wait=wait, holder=who, reason=why, trains_in=ready)
    return replace(claim, why_not=_asking(who), reason=f"{who} showed no sign of life", holder=who)


def locked_out(decision: Decision, refusals: int, seconds: float, timing: Timing) -> bool:
    """May this pod not train, only because the store refuses it for good? ``refusals`` in a row came within
    ``seconds``. The last recorded holder trains on without the store; any other pod would wait for ever."""
    confirmed = refusals >= REFUSALS and seconds >= timing.refusal
    return confirmed and decision.act is Act.ASK and bool(decision.why_not)


def _ours(known: Known, own: Own, timing: Timing) -> Decision:
    """Our claim is the first of the highest generation."""
    generation = own.claim.generation
    if own.won:
        if own.boot != known.me.boot:
            # A copy of this machine's disk may have been started elsewhere: a new claim tells the two apart.
            return Decision(Act.CLAIM, generation=generation + 1, at_once=True, reason="this pod held it before")
        return Decision(Act.HOLD, publish=True, generation=generation)
    if known.exclusive:
        return Decision(Act.HOLD, publish=True, generation=generation)
    if own.took > PUT_SECONDS + CONFIRMED_SECONDS:
        # Others may have decided before it was to be seen.
        why = "" if own.at_once else "the store took too long over a claim: it is made again"
        return Decision(Act.CLAIM, why, generation=generation + 1, at_once=own.at_once, reason="late claim")
    left = timing.claim_wait - own.waited
    if left > 0:
        why = "" if own.at_once else f"this run has been claimed for this pod: decided in {left:.0f} s"
        return Decision(Act.SETTLE, why, generation=generation, wait=left, at_once=own.at_once, trains_in=left)
    return Decision(Act.HOLD, publish=True, generation=generation)


def _was_holding(known: Known, own: Own) -> bool:
    """Another claim came after ours; whether that ends something here, or we are a claimant like any other."""
    if not own.won or own.recorded:
        # A claim of ours that the journal does not know of: podwatch ended before it was decided, or its answer was
        # lost and another was made. In the boot in which ours was won, only what comes from this boot is ours.
        holder = _holder(known, winner(known.claims))
        this_pod = holder is not None and holder.writer_id == known.me.writer_id and known.me.same_as(holder)
        if this_pod and holder is not None and (holder.boot == known.me.boot or own.boot != known.me.boot):
            return False
    if own.recorded:
        # Of an earlier podwatch: only a trainer that lives on is a second one, and not where the other has left.
        return known.training and _last_word(known, winner(known.claims)) not in GONE
    return own.won or (own.at_once and known.training)


def _without_store(known: Known, timing: Timing) -> Decision:
    """The last recorded holder trains on, without publishing; others wait, and so does whoever has seen another holder
    before the store fell silent."""
    own = known.own
    ours = (own.won or own.at_once) if own is not None else known.trained
    may = known.take_over or (ours and not _saw_another(known))
    why = "" if may else "the store could not be asked who holds this run: training waits for it"
    generation = own.claim.generation if own is not None else 0
    return Decision(Act.ASK, why, generation=generation, wait=timing.poll, reason="the store does not answer")


def _saw_another(known: Known) -> bool:
    """By what was answered last, another pod holds the run, and has not said that it left."""
    first, sign, own = winner(known.claims), known.sign, known.own
    if first is None and sign is None:
        return False
    generation = first.generation if first is not None else sign.generation if sign is not None else 0
    if own is not None and (own.claim.generation > generation or (first and _same(own.claim, generation, first.nonce))):
        return False  # the one seen was there before our claim
    holder = _holder(known, first)
    here = holder is not None and known.me.same_as(holder)
    return not here and _last_word(known, first) not in GONE


def _superseded(known: Known, top: int) -> Decision:
    who = _name(_holder(known, winner(known.claims)))
    why = f"pod {who} has taken this run over (generation {top})"
    return Decision(Act.SUPERSEDED, why, stop=True, generation=top, holder=who, reason=why)


def _holder(known: Known, first: Claim | None) -> Pod | None:
    """Whoever put the winning claim; without claims, whoever wrote the heartbeat."""
    sign = known.sign
    if first is None:
        return sign.pod if sign is not None else known.rival
    if known.rival is not None:
        return known.rival
    return sign.pod if sign is not None and _same(first, sign.generation, sign.nonce) else Pod(first.writer_id)


def _last_word(known: Known, first: Claim | None) -> str:
    """The state that the holder last told of; nothing where the heartbeat is not the holder's."""
    sign = known.sign
    if sign is None or (first is not None and not _same(first, sign.generation, sign.nonce)):
        return ""
    return sign.state if sign.generation >= known.floor else ""


def _same(claim: Claim, generation: int, nonce: str) -> bool:
    return (claim.generation, claim.nonce) == (generation, nonce)


def _name(pod: Pod | None) -> str:
    if pod is None:
        return "unknown"
    return pod.host or f"with writer id {pod.writer_id[:8]}" if pod.writer_id or pod.host else "unknown"


def _asking(who: str) -> str:
    return f"this run is being claimed after pod {who}"


def _because(text: str, control: Control) -> str:
    return f"{text} ({control.reason})" if control.reason else text


@dataclass(frozen=True, slots=True)
class PointerDecision:
    """``ok`` is false when this writer must not publish; the numbers are then those of the pointer that won."""

    ok: bool
    generation: int
    seq: int
    reason: str = ""


def next_pointer(current: Pointer | None, *, writer_id: str, generation: int, own_seq: int = 0) -> PointerDecision:
    """The numbers of the next pointer write, of a writer that has just confirmed that it holds ``generation``.

    ``current`` is the pointer as just read; None means the store answered that there is none. ``own_seq`` is the
    highest seq this writer has published, as the journal remembers it: seq never goes back, also where the pointer was
    deleted or set back, and counts on across generations, because retention orders saves by it.
    """
    if current is None:
        return PointerDecision(True, generation, own_seq + 1)
    foreign = current.writer_id != writer_id
    if current.generation > generation or (foreign and current.generation == generation):
        why = f"writer {current.writer_id} has published generation {current.generation}, this one holds {generation}"
        return PointerDecision(False, current.generation, current.seq, why)
    return PointerDecision(True, generation, max(current.seq, own_seq) + 1)
