"""Whether a dead pod is replaced, and which rented machine is destroyed (docs/controller.md). Pure.

One look is ``observed`` (what the lists and the heartbeat add to the controller's records) and then ``decide`` (one
action). Money is spent only on positive evidence: a heartbeat that exists and does not change, and a valid list of
every provider that could hold a machine of this run. What cannot be read is never evidence. Times are the store's
clock.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from podwatch.domain.errors import ExitCode
from podwatch.domain.lease import GONE, Claim, Control, HolderState
from podwatch.domain.replacement import (
    LIVING,
    LONGEST_CALL_SECONDS,
    Billed,
    Listing,
    Record,
    Rented,
    RentedState,
    Rules,
    generation_of,
    label_of,
    parse_label,
)
from podwatch.domain.snapshot import Desired
from podwatch.policy.exit_code import Outcome
from podwatch.policy.lease import CLAIM_WAIT_SECONDS, PATIENCE_SECONDS, winner
from podwatch.policy.run_check import Beat

DAY: Final = 86_400.0
WATCHED_SECONDS: Final = 240.0
"""A silent heartbeat counts only if this controller saw it unchanged for so long while the store answered: right after
an outage of the store, a pod that trains looks like a dead one. Room for a heartbeat that hangs, and the next ones."""
WATCH_AGAIN_SECONDS: Final = 75.0
"""Between two looks of that time; a longer gap could hide an outage."""
PREPARE_SECONDS: Final = 180.0
"""Two heartbeats can be missing. From then on the controller settles which controller would act, so that this does not
add to the time that a dead pod takes."""
CLAIM_LIFE_SECONDS: Final = 900.0
"""A claim of a controller that created nothing counts as long as this: its request may still be on its way."""
USE_CLAIM_SECONDS: Final = 300.0
"""A controller sends no request on a claim of its own that is older. With LONGEST_CALL_SECONDS well below
CLAIM_LIFE_SECONDS."""
APPEAR_SECONDS: Final = 300.0
"""A machine whose request had an unknown outcome, or that is new, may be missing in lists for so long."""
CONFIRM_SECONDS: Final = 600.0
"""The controller ends only after no list has shown a machine of the run for so long."""
LOOK_MARGIN_SECONDS: Final = 900.0
"""Money is kept for this long: between two looks (a schedule of every ten minutes, often late) and for the request."""
LASTING_SECONDS: Final = 600.0
"""A machine that lived shorter and made no step counts as a failed boot."""
UNGUARDED_SECONDS: Final = 3600.0
"""podwatch has left a pod on purpose and training continues there: its machine is given up only after this."""
CLOSING_SECONDS: Final = 90.0
"""After a stop was ordered, a heartbeat older than this may not show the last checkpoint yet."""
OVERDUE_SECONDS: Final = 1800.0
"""A machine that could not be destroyed for so long needs a person."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 1800.0
"""After one failed request or boot, and at most; doubled each time."""
MARK: Final = "podwatch controller: "
"""How the ``reason`` of a control.json begins that the controller stopped the run with."""


class Action(StrEnum):
    """Stable: the journal and ``--json`` show them."""

    WAIT = "wait"
    CREATE = "create"
    DESTROY = "destroy"
    ALERT = "alert"
    """Nothing is done, and only an operator can change that."""
    END = "end"


@dataclass(frozen=True, slots=True)
class Facts:
    """One look. ``lists``: by provider; a text says why there is no valid list. ``configured``: the providers with a
    command on this machine. ``rules``, ``control`` None: absent or not readable (``problem`` says why).
    ``lease``: the highest generation of the lease. ``claim_age``: seconds since a pod last claimed the run.
    ``end_code``: exit code of a run that ended for good; None while it has not. ``claims``: of controllers, by
    generation; ``own``: ours, with the seconds since it was written. ``watched``: seconds for which this controller has
    seen the heartbeat unchanged, without a failed look. ``skip``: (provider, id) of machines whose destruction has just
    failed. ``tag``: of this store, in the labels of its machines. ``proves``: whether no other store has the same.
    """

    now: float
    run_id: str
    lists: Mapping[str, Listing | str] = field(default_factory=dict)
    rules: Rules | None = None
    control: Control | None = field(default_factory=Control)
    problem: str = ""
    beat: Beat | None = None
    lease: int = 0
    claim_age: float | None = None
    end_code: int | None = None
    claims: tuple[Claim, ...] = ()
    own: Claim | None = None
    own_age: float = 0.0
    watched: float = math.inf
    outdated: bool = False
    """The heartbeat is of a lower generation than a claim: a late write of a pod that lost the run."""
    skip: frozenset[tuple[str, str]] = frozenset()
    tag: str = ""
    proves: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """``reason``: one or more plain sentences. ``next_look``: seconds. ``prepare``: the number to claim now,
    because the next look may create; 0: none. ``soon``: the next look may decide more, also after a single one.
    ``code``: exit code of a single look."""

    action: Action
    reason: str
    provider: str = ""
    id: str = ""
    label: str = ""
    generation: int = 0
    max_price: float = 0.0
    account: str = ""
    next_look: float = 30.0
    prepare: int = 0
    soon: bool = False
    code: ExitCode = ExitCode.OK

    def to_dict(self) -> dict[str, object]:
        """JSON-safe."""
        return {
            "action": str(self.action),
            "reason": self.reason,
            "provider": self.provider or None,
            "id": self.id or None,
            "label": self.label or None,
            "generation": self.generation or None,
            "max_price_per_hour": self.max_price or None,
        }


# -- what a look adds to the records ---------------------------------------------------------------------------------


def observed(records: tuple[Record, ...], facts: Facts) -> tuple[Record, ...]:
    """The records with what the lists and the heartbeat show, in order of generation. A machine without a record gets
    one if it is provably of this run and store: by the tag in its label, or because this run's heartbeat comes from it.
    A label without a tag can be that of a run of the same name in another store."""
    by_generation = {record.generation: record for record in records}
    known = {record.label_in(facts.run_id) for record in records}
    there: dict[str, dict[tuple[str, str], Rented]] = {}
    for provider, one, generation in _labelled(facts):
        there.setdefault(one.label, {})[provider, one.id] = one
        sends = _sends(one, facts)
        if one.label not in known and generation not in by_generation and (sends or _proven(one, facts)):
            known.add(one.label)
            by_generation[generation] = _adopted(provider, one, generation, facts, sends=sends)
    found = tuple(by_generation[generation] for generation in sorted(by_generation))
    found = tuple(_listed(record, there.get(record.label_in(facts.run_id), {}), facts) for record in found)
    found = tuple(_heard(record, facts, newest=record is found[-1]) for record in found)
    return tuple(_judged(record, found, facts) for record in found)


def unrecorded(records: tuple[Record, ...], facts: Facts) -> bool:
    """Whether a list shows a machine with this store's tag that the records lack: either its record is lost, or they
    were read before another controller wrote it."""
    return any(_proven(one, facts) for _, one in _strange(records, facts))


def _adopted(provider: str, one: Rented, generation: int, facts: Facts, *, sends: bool) -> Record:
    """The record of a machine whose own is lost. Its bounds count from its creation, or from now."""
    made = one.created_wall or 0.0  # some lists print 0001-01-01 where they know no time
    since = min(made, facts.now) if made > 0.0 else facts.now
    label = "" if one.label == label_of(facts.run_id, generation) else one.label
    # Without a lease, a heartbeat that names no machine can still be found to be from it.
    lease = facts.lease if sends else 0
    return Record(generation, provider, one.price_per_hour, since, lease=lease, settled=True, label=label)


def _proven(one: Rented, facts: Facts) -> bool:
    """Whether only this store's controller can have created the machine."""
    found = parse_label(one.label, facts.run_id)
    return facts.proves and found is not None and bool(found[1]) and found[1] == facts.tag


def _sends(one: Rented, facts: Facts) -> bool:
    """Whether the heartbeat in this run's store comes from the machine."""
    beat = facts.beat
    return beat is not None and (beat.instance.label == one.label or (bool(one.id) and beat.instance.id == one.id))


def _recorded(records: tuple[Record, ...], facts: Facts) -> list[tuple[str, Rented, Record]]:
    """The machines of this run, each with its record."""
    known = {record.label_in(facts.run_id): record for record in records}
    return [(provider, one, known[one.label]) for provider, one, _ in _labelled(facts) if one.label in known]


def _strange(records: tuple[Record, ...], facts: Facts) -> list[tuple[str, Rented]]:
    """Machines with a label of this run that this store has no record of, and that another store's tag does not
    explain: never destroyed, and nothing is created beside one that lives."""
    known = {record.label_in(facts.run_id) for record in records}
    return [
        (provider, one)
        for provider, one, _ in _labelled(facts)
        if one.label not in known and (parse_label(one.label, facts.run_id) or (0, ""))[1] in ("", facts.tag)
    ]


def _labelled(facts: Facts) -> list[tuple[str, Rented, int]]:
    return [
        (provider, one, generation)
        for provider, listing in sorted(facts.lists.items())
        if isinstance(listing, Listing)
        for one in listing.instances
        if (generation := generation_of(one.label, facts.run_id)) is not None
    ]


def _listed(record: Record, listed: Mapping[tuple[str, str], Rented], facts: Facts) -> Record:
    """``listed``: the machines with this record's label."""
    if not listed and not record.open:
        return record  # most of a long run's records: they cost nothing, and no list shows them
    now, there, billed = facts.now, dict(listed), []
    for known in record.billed:
        one = there.pop((known.provider, known.id), None)
        if one is not None and one.state is not RentedState.ENDED:
            # Whoever was gone and is back cost money in between, as far as anybody knows.
            # A price that falls (of a stopped machine: its disk's) does not make the past cheaper.
            price = max(known.price_per_hour, one.price_per_hour)
            billed.append(replace(known, until=None, seen=now, price_per_hour=price))
        elif known.until is None and (one is not None or _gone(known, record, facts)):
            billed.append(replace(known, until=now))
        else:
            billed.append(known)
    for (provider, _), one in there.items():
        until = now if one.state is RentedState.ENDED else None
        billed.append(Billed(provider, one.id, one.price_per_hour, record.intended_at, until, seen=now))
    listing = facts.lists.get(record.provider)
    account = record.account or (listing.account if billed and isinstance(listing, Listing) else "")
    record = replace(record, billed=tuple(billed), settled=record.settled or bool(billed), account=account)
    if record.settled:
        return record
    unsure = record.unsure_at if record.unsure_at is not None else record.intended_at + LONGEST_CALL_SECONDS
    if now - unsure >= APPEAR_SECONDS and _valid(facts, record) is not None:
        return replace(record, settled=True, failed="the provider's list shows no machine for this request")
    return record


def _gone(known: Billed, record: Record, facts: Facts) -> bool:
    """Whether a valid list of the same account, without this machine, shows that it is gone."""
    listing = facts.lists.get(known.provider)
    if not isinstance(listing, Listing) or (record.account and listing.account != record.account):
        return False
    return known.seen is not None or facts.now - record.intended_at >= APPEAR_SECONDS + LONGEST_CALL_SECONDS


def _valid(facts: Facts, record: Record) -> Listing | None:
    listing = facts.lists.get(record.provider)
    same = isinstance(listing, Listing) and record.account in ("", listing.account)
    return listing if same and isinstance(listing, Listing) else None


def _heard(record: Record, facts: Facts, *, newest: bool) -> Record:
    beat = facts.beat
    if beat is None or not _from(beat, record, facts, newest=newest):
        return record
    at = facts.now - beat.age
    first = record.first_step if record.first_step is not None else beat.step
    return replace(
        record,
        booted_at=record.booted_at if record.booted_at is not None else facts.now,
        alive_at=max(at, record.alive_at or at),
        first_step=first,
        last_step=beat.step if beat.step is not None else record.last_step,
    )


def _from(beat: Beat, record: Record, facts: Facts, *, newest: bool) -> bool:
    """Whether the heartbeat comes from the machine of this record: by its label, by the provider's id, or, if it names
    neither, because it is newer than the request and its lease is."""
    if beat.instance.label:
        return beat.instance.label == record.label_in(facts.run_id)
    if beat.instance.id:
        return any(one.id == beat.instance.id for one in record.billed)
    later = facts.lease > record.lease and facts.now - beat.age > record.intended_at
    return newest and bool(record.billed) and later


def _judged(record: Record, records: tuple[Record, ...], facts: Facts) -> Record:
    """The record with the reason to destroy its machine, kept with its time as long as there is one."""
    if not record.costs:
        failure = record.boot_failure or _never_lived(record)
        return record if failure == record.boot_failure else replace(record, boot_failure=failure)
    why = _why_ended(record, records, facts)
    if not why:
        return replace(record, ended="", ended_at=None, boot_failure=False)
    at = record.ended_at if record.ended_at is not None else facts.now
    return replace(record, ended=why, ended_at=at, boot_failure=record.boot_failure or _never_lived(record))


def _never_lived(record: Record) -> bool:
    """Whether this machine, now that it ends, counts as a failed boot."""
    if not record.billed:
        return False
    if record.booted_at is None or record.alive_at is None:
        return True
    progress = record.first_step is not None and (record.last_step or 0) > record.first_step
    return not progress and record.alive_at - record.booted_at < LASTING_SECONDS


_FINISHED, _STOPPED_FOR_GOOD = "the run is finished", "the run must not run again (exit code 65)"
_CAP = "the spend cap is reached"


def _why_ended(record: Record, records: tuple[Record, ...], facts: Facts) -> str:
    rules, beat, now = facts.rules or _CAUTIOUS, facts.beat, facts.now
    if facts.end_code == ExitCode.OK:
        return _FINISHED
    if facts.end_code is not None:
        return _STOPPED_FOR_GOOD
    if any(r.generation > record.generation and r.booted_at is not None and r.open for r in records):
        return "a newer machine has taken the run over"
    if any(one.price_per_hour > record.max_price * 1.000001 for one in record.costs) and record.max_price > 0:
        return "it costs more than the highest price that was allowed"
    if over_cap(records, facts):
        return _CAP
    mine = beat is not None and _from(beat, record, facts, newest=record is records[-1])
    if record.booted_at is None:
        waited = now - min(one.since for one in record.costs)
        limit = rules.boot_seconds
        if waited >= limit and not _watched(facts):
            return record.ended
        return f"no heartbeat within {limit:.0f} s of its request" if waited >= limit else ""
    if beat is not None and not mine and not _stale(beat) and not facts.outdated:
        return f"pod {beat.pod} has taken the run over"
    if beat is None or not mine:
        since = record.alive_at or record.booted_at
        silent = now - since
    else:
        if beat.desired == Desired.STOPPED:
            return ""  # an operator's decision, also that the machine stays
        if beat.state in GONE:
            return "podwatch has left it"
        if beat.outcome in (Outcome.GAVE_UP, Outcome.BAD_HOST, Outcome.FAILED):
            return "podwatch gave up there"
        silent = beat.age
        if beat.state == HolderState.RESTARTING:
            silent -= UNGUARDED_SECONDS - rules.silent_seconds
    if silent >= rules.silent_seconds and not _watched(facts):
        return record.ended
    return f"no heartbeat from it for {rules.silent_seconds:.0f} s" if silent >= rules.silent_seconds else ""


_CAUTIOUS: Final = Rules((), 0.0, 1e9, 1e9)
"""The bounds for machines that exist, while controller.json cannot be read. It allows no creation."""


def spent(records: tuple[Record, ...], now: float, window: float | None = None) -> float:
    """Money of all records, in the last ``window`` seconds or since ever."""
    return sum(record.spent(now - window if window is not None else 0.0, now) for record in records)


def over_cap(records: tuple[Record, ...], facts: Facts) -> bool:
    """Whether the machines must end now, so that a cap holds even if this takes its time."""
    rules = facts.rules
    if rules is None:
        return False
    rate = sum(one.price_per_hour for record in records for one in record.costs)
    kept = rate * (rules.final_checkpoint_seconds + LOOK_MARGIN_SECONDS) / 3600
    today = spent(records, facts.now, DAY)
    return spent(records, facts.now) + kept > rules.max_spend_total or today + kept > rules.max_spend_per_day


def _stale(beat: Beat) -> bool:
    return beat.age > PATIENCE_SECONDS


def _watched(facts: Facts) -> bool:
    """Whether a pod that lives would have sent a heartbeat while this controller watched."""
    return facts.watched >= WATCHED_SECONDS


def _undecided(facts: Facts) -> bool:
    """Whether only more looks can tell a dead pod from one that an outage of the store kept silent."""
    return facts.beat is not None and _stale(facts.beat) and facts.beat.state not in GONE and not _watched(facts)


def _watch_on(facts: Facts) -> float:
    return min(WATCH_AGAIN_SECONDS, max(1.0, WATCHED_SECONDS - facts.watched))


# -- the decision ----------------------------------------------------------------------------------------------------


def decide(records: tuple[Record, ...], facts: Facts) -> Decision:
    """One action. ``records``: as ``observed`` returned them for the same facts."""
    return (
        _destroy(records, facts)
        or _ended(records, facts)
        or _forbidden(records, facts)
        or _living(records, facts)
        or _guarded(records, facts)
        or _no_room(records, facts)
        or _create(records, facts)
    )


def _destroy(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """The first machine that may end now. Only one that the provider's own list shows with our whole label. Where its
    pod has left the run, another machine follows: which controller requests it is settled meanwhile."""
    for provider, one, record in _recorded(records, facts):
        if one.state is RentedState.ENDED or (provider, one.id) in facts.skip:
            continue
        newest = record is records[-1]
        why = _double(one, record, facts) or (record.ended if _ready(one, record, facts, newest=newest) else "")
        if why:
            reason = f"Machine {one.id} at {provider} ({one.label}) is destroyed: {why}."
            follows = facts.beat is not None and facts.beat.state in GONE and facts.end_code is None
            follows = follows and _forbidden(records, facts) is None
            return Decision(
                Action.DESTROY,
                reason,
                provider,
                one.id,
                one.label,
                record.generation,
                account=record.account,
                prepare=_prepared(records, facts) if follows else 0,
                next_look=5.0,
            )
    return None


def _double(one: Rented, record: Record, facts: Facts) -> str:
    """Why this machine is not the one of its label; empty if it is. The one that sends the heartbeat stays, then the
    one that is listed first by its time of creation."""
    same = [
        other for _, other, _ in _labelled(facts) if other.label == one.label and other.state is not RentedState.ENDED
    ]
    if len(same) < 2:
        return ""
    beating = facts.beat.instance.id if facts.beat is not None else ""
    known = [billed.id for billed in record.billed]

    def rank(other: Rented) -> tuple[bool, bool, int, str]:
        place = known.index(other.id) if other.id in known else len(known)
        return other.id != beating, other.state not in LIVING, place, other.id

    return "" if one.id == min(same, key=rank).id else "a second machine has the same label"


def _ready(one: Rented, record: Record, facts: Facts, *, newest: bool) -> bool:
    """Whether nothing is lost with this machine, or its time is over."""
    if not record.ended or record.ended_at is None:
        return False
    rules, beat = facts.rules or _CAUTIOUS, facts.beat
    over = facts.now - record.ended_at >= rules.final_checkpoint_seconds
    if over or one.state not in LIVING or record.booted_at is None:
        return True
    if beat is None or not _from(beat, record, facts, newest=newest):
        return True  # it does not hold the run: it publishes nothing
    told = record.ended != _CAP or facts.now - beat.age > record.ended_at + CLOSING_SECONDS
    return (_stale(beat) and _watched(facts)) or (told and beat.unstored_step is None)


def _ended(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    if facts.end_code is None:
        return None
    why = _FINISHED if facts.end_code == ExitCode.OK else _STOPPED_FOR_GOOD
    left = [record for record in records if record.open]
    blind = _blind(records, facts)
    if left or blind:
        what = f"{len(left)} of its machines may still cost money" if left else f"one list is missing: {blind}"
        code = ExitCode.UNAVAILABLE if blind else ExitCode.OK
        return Decision(Action.WAIT, _sentence(f"{why}, but {what}"), code=code)
    gone = max((one.until for record in records for one in record.billed if one.until is not None), default=0.0)
    if facts.now - gone < CONFIRM_SECONDS:
        return Decision(
            Action.WAIT,
            _sentence(
                f"{why}, and the lists show none of its machines; they are watched for a while: a list can be wrong"
            ),
        )
    code = ExitCode.OK if facts.end_code == ExitCode.OK else ExitCode.DO_NOT_RUN
    return Decision(Action.END, _sentence(f"{why}, and none of its machines is left"), code=code)


def _forbidden(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """What people or missing facts forbid."""
    if facts.control is None or facts.rules is None:
        return Decision(
            Action.ALERT, f"Nothing is created: {facts.problem or 'a file is missing'}.", code=ExitCode.CONFIGURATION
        )
    holder = facts.control.holder
    if facts.control.stopped and not _own(facts.control):
        return Decision(Action.WAIT, "control.json orders this run to stop: nothing is created.")
    if holder and generation_of(holder, facts.run_id) is None:
        return Decision(Action.WAIT, f"control.json gives this run to {holder}: nothing is created.")
    strange = [
        f"{name} answers for account {listing.account}, not {record.account}"
        for record in records
        if record.open and record.account and isinstance(listing := facts.lists.get(record.provider), Listing)
        for name in [record.provider]
        if listing.account != record.account
    ]
    if strange:
        return Decision(
            Action.ALERT, f"Nothing is created: {strange[0]}. Use the right key.", code=ExitCode.CONFIGURATION
        )
    if blind := _blind(records, facts):
        return Decision(
            Action.ALERT,
            f"Nothing is created, because a machine of this run may live unseen: {blind}.",
            code=ExitCode.UNAVAILABLE,
        )
    return None


def _blind(records: tuple[Record, ...], facts: Facts) -> str:
    """Why not every provider that may hold a machine of this run was seen; empty if all were."""
    needed = [record.provider for record in records if record.open]
    needed += [one.provider for record in records for one in record.costs]
    needed += list(facts.rules.providers if facts.rules is not None else ())
    for name in dict.fromkeys(needed):
        found = facts.lists.get(name, "no command is configured for it on this machine")
        if not isinstance(found, Listing):
            return f"provider {name} gave no valid list: {found}"
    return ""


def _living(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """A machine of this run that lives, or may: nothing is created beside it."""
    beat = facts.beat
    for provider, one in _strange(records, facts):
        if one.state in LIVING:
            return Decision(
                Action.ALERT,
                f"Machine {one.id} at {provider} has the label {one.label}, but this store has no record of it, and the"
                " heartbeat is not from it: it may be of a run of the same name in another store. Nothing is created"
                " beside it, and it is not destroyed: destroy it yourself, or give one of the runs another name.",
                code=ExitCode.FAILED,
            )
    for provider, one, record in _recorded(records, facts):
        if one.state in LIVING:
            overdue = record.ended_at is not None and facts.now - record.ended_at >= OVERDUE_SECONDS
            if overdue and (provider, one.id) in facts.skip:
                return Decision(
                    Action.ALERT,
                    f"Machine {one.id} at {provider} ({one.label}) still costs money, because it cannot be destroyed:"
                    " destroy it yourself.",
                    code=ExitCode.UNAVAILABLE,
                )
            what = f"Machine {one.id} at {provider} ({one.label}) {_how(record, beat, facts)}."
            if _undecided(facts):
                return Decision(Action.WAIT, what, next_look=_watch_on(facts), soon=True)
            return Decision(Action.WAIT, what)
    for record in records:
        label = record.label_in(facts.run_id)
        if not record.settled:
            return Decision(
                Action.WAIT,
                f"It is not known whether the request for {label} at {record.provider} created a machine: the list is"
                " watched, and nothing else is created meanwhile.",
                code=ExitCode.TRY_AGAIN,
            )
        hidden = [one for one in record.costs if one.seen is None]
        if hidden:
            return Decision(
                Action.WAIT, f"Machine {hidden[0].id} at {hidden[0].provider} ({label}) is not in the list yet."
            )
    return None


def _how(record: Record, beat: Beat | None, facts: Facts) -> str:
    if record.ended:
        return f"is to end ({record.ended}); its last checkpoint has time until its bound"
    if record.booted_at is None:
        return "has sent no heartbeat yet"
    if beat is not None and beat.desired == Desired.STOPPED:
        return "costs money although training is stopped there"
    if beat is None or _stale(beat):
        silent = facts.now - (record.alive_at or record.booted_at)
        return f"lives by the provider's list, but its heartbeat is silent since {silent:.0f} s"
    return "trains" if beat.step is None else f"trains (step {beat.step})"


def _guarded(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """A heartbeat that is not stale, or none at all: no evidence of a dead pod."""
    beat = facts.beat
    if beat is None or not beat.state:
        what = "no pod has ever sent a heartbeat" if beat is None else "the heartbeat cannot be read"
        return Decision(
            Action.ALERT, f"Nothing is created: {what}. Start the first pod yourself.", code=ExitCode.FAILED
        )
    if beat.desired == Desired.STOPPED or beat.outcome == Outcome.STOPPED:
        return Decision(Action.WAIT, f"An operator has stopped training on pod {beat.pod}: nothing is created.")
    if facts.claim_age is not None and facts.claim_age <= PATIENCE_SECONDS and facts.claim_age < beat.age:
        return Decision(Action.WAIT, f"A pod claimed the run {facts.claim_age:.0f} s ago.")
    if beat.state in GONE:
        return None
    if _undecided(facts):
        left = WATCHED_SECONDS - facts.watched
        return Decision(
            Action.WAIT,
            f"Pod {beat.pod} is silent since {beat.age:.0f} s: it counts as dead if its heartbeat stays unchanged for"
            f" {left:.0f} s more, because an outage of the store can have kept it silent.",
            prepare=_prepared(records, facts) if left <= CLAIM_WAIT_SECONDS else 0,
            next_look=_watch_on(facts),
            soon=True,
        )
    if _stale(beat):
        return None
    left = PATIENCE_SECONDS - beat.age
    prepare = _prepared(records, facts) if beat.age >= PREPARE_SECONDS else 0
    what = f"Pod {beat.pod} sent its heartbeat {beat.age:.0f} s ago"
    if beat.age >= PREPARE_SECONDS:
        what += f": it counts as dead after {left:.0f} s more"
    return Decision(Action.WAIT, f"{what}.", prepare=prepare, next_look=min(30.0, max(1.0, left + 0.5)))


def _prepared(records: tuple[Record, ...], facts: Facts) -> int:
    """The number to claim before it is needed; 0: none."""
    if _no_room(records, facts) is not None:
        return 0
    first, ours = _pending(records, facts)
    usable = first is None or (ours and facts.own_age >= USE_CLAIM_SECONDS)
    return next_generation(records, facts) if usable else 0


def _no_room(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """Which cap leaves no room; None if there is room under every one."""
    rules, now = facts.rules or _CAUTIOUS, facts.now
    if rules.paused:
        return Decision(
            Action.WAIT,
            _sentence(f"controller.json pauses the controller{f' ({rules.reason})' if rules.reason else ''}"),
        )
    needed = (
        rules.max_price_per_hour * (rules.boot_seconds + rules.final_checkpoint_seconds + LOOK_MARGIN_SECONDS) / 3600
    )
    for name, window, cap in (
        ("total spend", None, rules.max_spend_total),
        ("spend per day", DAY, rules.max_spend_per_day),
    ):
        so_far = spent(records, now, window)
        if so_far + needed > cap:
            return Decision(
                Action.ALERT,
                f"The run has no pod, and its {name} has no room for another: {so_far:.2f} of {cap:.2f} is spent, and a"
                f" machine needs up to {needed:.2f} before it can be judged.",
                code=ExitCode.FAILED,
            )
    made = sum(1 for r in records if now - r.intended_at < DAY and (r.billed or not r.settled))
    if made >= rules.max_replacements_per_day:
        return Decision(
            Action.ALERT,
            f"The run has no pod, and {made} machines were requested within 24 h: that is the highest number allowed.",
            code=ExitCode.FAILED,
        )
    bad = boot_failures(records, rules)
    if bad >= rules.max_boot_failures:
        return Decision(
            Action.ALERT,
            f"The run has no pod, and {bad} machines in a row failed to start training: nothing more is created until"
            " controller.json is edited.",
            code=ExitCode.FAILED,
        )
    return _too_soon(records, facts)


def boot_failures(records: tuple[Record, ...], rules: Rules) -> int:
    """Machines in a row, the last ones, that never got to train, since controller.json was edited last."""
    count = 0
    for record in sorted(records, key=lambda r: -r.generation):
        if record.rules != rules.digest:
            break
        if record.billed and not record.boot_failure:
            break
        count += bool(record.billed)
    return count


def _too_soon(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """After failed requests or boots the next one waits, each time longer."""
    count, last = 0, 0.0
    for record in sorted(records, key=lambda r: -r.generation):
        if record.billed and not record.boot_failure:
            break
        count += 1
        last = max(last, record.intended_at)
    pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(count - 1, 10))
    left = pause - (facts.now - last)
    if not count or left <= 0:
        return None
    return Decision(
        Action.WAIT,
        f"{count} request{'s' if count > 1 else ''} for a machine failed: the next one follows in {left:.0f} s.",
        next_look=min(60.0, max(1.0, left)),
    )


def _create(records: tuple[Record, ...], facts: Facts) -> Decision:
    assert facts.rules is not None
    rules, beat = facts.rules, facts.beat
    first, ours = _pending(records, facts)
    if first is not None and not ours:
        return Decision(Action.WAIT, "Another controller is about to create a machine for this run.")
    provider = _provider(records, rules)
    if not provider:
        return Decision(
            Action.ALERT,
            "Every provider refused the request for good: correct its command or controller.json.",
            code=ExitCode.CONFIGURATION,
        )
    usable = first is not None and facts.own_age < USE_CLAIM_SECONDS
    generation = first.generation if first is not None and usable else next_generation(records, facts)
    who = beat.pod if beat is not None else "?"
    how = f"has left the run ({beat.state})" if beat is not None and beat.state in GONE else "is silent"
    age = beat.age if beat is not None else 0.0
    listing = facts.lists[provider]
    return Decision(
        Action.CREATE,
        f"Pod {who} {how} since {age:.0f} s, no machine of this run lives, and every cap has room: machine"
        f" {generation} is requested at {provider} for at most {rules.max_price_per_hour:g} per hour.",
        provider,
        label=label_of(facts.run_id, generation, facts.tag),
        generation=generation,
        max_price=rules.max_price_per_hour,
        account=listing.account if isinstance(listing, Listing) else "",
        next_look=5.0,
    )


def _pending(records: tuple[Record, ...], facts: Facts) -> tuple[Claim | None, bool]:
    """The claim of the controller that may be about to create a machine, and whether it is ours."""
    newest, mine = max((r.generation for r in records), default=0), facts.own
    pending = [c for c in facts.claims if c.generation > newest and facts.now - c.uploaded_wall < CLAIM_LIFE_SECONDS]
    first = winner(pending)
    if first is None or mine is None:
        return first, False
    return first, (first.generation, first.nonce) == (mine.generation, mine.nonce)


def next_generation(records: tuple[Record, ...], facts: Facts) -> int:
    """The number of the next machine: higher than every one that is known."""
    known = [r.generation for r in records] + [c.generation for c in facts.claims] + [g for _, _, g in _labelled(facts)]
    return max(known, default=0) + 1


def _provider(records: tuple[Record, ...], rules: Rules) -> str:
    """The first in the order whose requests failed least since one of them worked; empty if all refused for good."""
    failures: dict[str, int] = dict.fromkeys(rules.providers, 0)
    done: set[str] = set()
    refused = set()
    for record in sorted(records, key=lambda r: -r.generation):
        name = record.provider
        if name not in failures or name in done:
            continue
        if record.refused and record.rules == rules.digest:
            refused.add(name)
        if record.billed and not record.boot_failure:
            done.add(name)
        else:
            failures[name] += 1
    left = [name for name in rules.providers if name not in refused]
    return min(left, key=lambda name: failures[name], default="")


# -- control.json ----------------------------------------------------------------------------------------------------


def _own(control: Control) -> bool:
    return control.reason.startswith(MARK)


def control_wanted(records: tuple[Record, ...], facts: Facts) -> Control | None:
    """The control.json that the controller should write now; None if it has nothing to change.

    It names the machine that it created until that one has sent a heartbeat, so that the new pod need not wait and an
    old one that wakes up does not train; and it stops the run before a spend cap. What people wrote stays.
    """
    control = facts.control
    if control is None:
        return None
    theirs = bool(control.holder) and generation_of(control.holder, facts.run_id) is None
    stopped_by_people = control.stopped and not _own(control)
    newest = records[-1] if records else None
    fresh = newest is not None and newest.costs and newest.booted_at is None and not newest.ended
    named = newest.label_in(facts.run_id) if newest is not None and fresh else ""
    wanted = replace(control, holder=control.holder if theirs else named)
    capped = any(record.costs and record.ended == _CAP for record in records)
    if stopped_by_people:
        return wanted if wanted != control else None
    if capped:
        wanted = replace(wanted, desired="stopped", reason=f"{MARK}{_CAP}")
    elif _own(control):
        wanted = replace(wanted, desired="running", reason="")
    return wanted if wanted != control else None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
