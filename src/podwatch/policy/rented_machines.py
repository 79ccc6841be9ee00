"""The controller's records of rented machines, with what one look adds to them: what the lists and the heartbeat show,
what each machine cost, and why one must end (docs/controller.md). Pure; ``replacement.py`` decides by them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from podwatch.domain.errors import ExitCode
from podwatch.domain.lease import GONE, PATIENCE_SECONDS, Beat, Claim, Control, HolderState
from podwatch.domain.replacement import (
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

DAY: Final = 86_400.0
WATCHED_SECONDS: Final = 240.0
"""A silent heartbeat counts only if this controller saw it unchanged for so long while the store answered: right after
an outage of the store, a pod that trains looks like a dead one. Room for a heartbeat that hangs, and the next ones."""
WATCH_AGAIN_SECONDS: Final = 75.0
"""Between two looks of that time; a longer gap could hide an outage."""
APPEAR_SECONDS: Final = 300.0
"""A machine whose request had an unknown outcome, or that is new, may be missing in lists for so long."""
LOOK_MARGIN_SECONDS: Final = 900.0
"""Money is kept for this long: between two looks (a schedule of every ten minutes, often late) and for the request."""
LASTING_SECONDS: Final = 600.0
"""A machine that lived shorter and made no step counts as a failed boot."""
UNLISTED_SECONDS: Final = 60.0
"""A heartbeat that was sent so long after a list had lost its machine was not still under way: the machine lives."""
UNGUARDED_SECONDS: Final = 3600.0
"""podwatch has left a pod on purpose and training continues there, or control.json gives the run to another pod, so
that this one sends no heartbeat: its machine is given up only after this."""


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
    kept: Rules | None = None
    """The last controller.json that could be read: its bounds hold for machines that exist. It allows no creation."""

    @property
    def bounds(self) -> Rules:
        """For machines that exist, also while controller.json cannot be read."""
        return self.rules or self.kept or CAUTIOUS


def observed(records: tuple[Record, ...], facts: Facts) -> tuple[Record, ...]:
    """The records with what the lists and the heartbeat show, in order of generation. A machine without a record gets
    one if it is provably of this run and store: by the tag in its label, or because this run's heartbeat comes from it.
    A label without a tag can be that of a run of the same name in another store."""
    by_generation = {record.generation: record for record in records}
    known = {record.label_in(facts.run_id) for record in records}
    there: dict[str, dict[tuple[str, str], Rented]] = {}
    for provider, one, generation in labelled(facts):
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
    return any(_proven(one, facts) for _, one in strange(records, facts))


def _adopted(provider: str, one: Rented, generation: int, facts: Facts, *, sends: bool) -> Record:
    """The record of a machine whose own is lost. Its bounds count from its creation, or from now."""
    made = one.created_wall or 0.0  # some lists print 0001-01-01 where they know no time
    since = min(made, facts.now) if made > 0.0 else facts.now
    label = "" if one.label == label_of(facts.run_id, generation) else one.label
    # Without a lease, a heartbeat that names no machine can still be found to be from it.
    lease = facts.lease if sends else 0
    highest = max(one.price_per_hour, facts.bounds.max_price_per_hour)  # its request's is lost
    return Record(generation, provider, highest, since, lease=lease, settled=True, label=label)


def _proven(one: Rented, facts: Facts) -> bool:
    """Whether only this store's controller can have created the machine."""
    found = parse_label(one.label, facts.run_id)
    return facts.proves and found is not None and bool(found[1]) and found[1] == facts.tag


def _sends(one: Rented, facts: Facts) -> bool:
    """Whether the heartbeat in this run's store comes from the machine."""
    beat = facts.beat
    return beat is not None and (
        beat.said.instance.label == one.label or (bool(one.id) and beat.said.instance.id == one.id)
    )


def recorded(records: tuple[Record, ...], facts: Facts) -> list[tuple[str, Rented, Record]]:
    """The machines of this run, each with its record."""
    known = {record.label_in(facts.run_id): record for record in records}
    return [(provider, one, known[one.label]) for provider, one, _ in labelled(facts) if one.label in known]


def strange(records: tuple[Record, ...], facts: Facts) -> list[tuple[str, Rented]]:
    """Machines with a label of this run that this store has no record of, and that another store's tag does not
    explain: never destroyed, and nothing is created beside one that lives."""
    known = {record.label_in(facts.run_id) for record in records}
    return [
        (provider, one)
        for provider, one, _ in labelled(facts)
        if one.label not in known and (parse_label(one.label, facts.run_id) or (0, ""))[1] in ("", facts.tag)
    ]


def labelled(facts: Facts) -> list[tuple[str, Rented, int]]:
    return [
        (provider, one, generation)
        for provider, listing in sorted(facts.lists.items())
        if isinstance(listing, Listing)
        for one in listing.instances
        if (generation := generation_of(one.label, facts.run_id)) is not None
    ]


def _listed(record: Record, listed: Mapping[tuple[str, str], Rented], facts: Facts) -> Record:
    """``listed``: the machines with this record's label."""
    if not listed and not record.open and not any(_sends_on(one, record, facts) for one in record.billed):
        return record  # most of a long run's records: they cost nothing, and no list shows them
    now, there, billed = facts.now, dict(listed), []
    for known in record.billed:
        one = there.pop((known.provider, known.id), None)
        if one is not None and one.state is not RentedState.ENDED:
            # Whoever was gone and is back cost money in between, as far as anybody knows.
            # A price that falls (of a stopped machine: its disk's) does not make the past cheaper.
            price = max(known.price_per_hour, one.price_per_hour)
            billed.append(replace(known, until=None, seen=now, price_per_hour=price))
        elif one is None and _sends_on(known, record, facts):
            billed.append(replace(known, until=None))
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


def _sends_on(known: Billed, record: Record, facts: Facts) -> bool:
    """Whether this run's heartbeat comes from a machine that no list shows any more: it was given another name at the
    provider, or the list leaves it out. It still costs money."""
    beat = facts.beat
    if beat is None or is_stale(beat):
        return False
    sender, ids = beat.said.instance, [one.id for one in record.billed]
    if sender.label and sender.label != record.label_in(facts.run_id):
        return False
    named = sender.id if sender.id in ids else ids[-1] if sender.label else ""
    lost = known.until if known.until is not None else known.seen if known.seen is not None else known.since
    return known.id == named and facts.now - beat.age > lost + UNLISTED_SECONDS


def unlisted(record: Record, facts: Facts) -> list[Billed]:
    """Its machines that live by the heartbeat, although a valid list does not show them with their label."""
    return [one for one in record.costs if _sends_on(one, record, facts) and _gone(one, record, facts)]


def _valid(facts: Facts, record: Record) -> Listing | None:
    listing = facts.lists.get(record.provider)
    same = isinstance(listing, Listing) and record.account in ("", listing.account)
    return listing if same and isinstance(listing, Listing) else None


def _heard(record: Record, facts: Facts, *, newest: bool) -> Record:
    beat = facts.beat
    if beat is None or not is_from(beat, record, facts, newest=newest):
        return record
    at = facts.now - beat.age
    first = record.first_step if record.first_step is not None else beat.said.step
    return replace(
        record,
        booted_at=record.booted_at if record.booted_at is not None else facts.now,
        alive_at=max(at, record.alive_at or at),
        first_step=first,
        last_step=beat.said.step if beat.said.step is not None else record.last_step,
    )


def is_from(beat: Beat, record: Record, facts: Facts, *, newest: bool) -> bool:
    """Whether the heartbeat comes from the machine of this record: by its label, by the provider's id, or, if it names
    neither, because it is newer than the request and its lease is."""
    if beat.said.instance.label:
        return beat.said.instance.label == record.label_in(facts.run_id)
    if beat.said.instance.id:
        return any(one.id == beat.said.instance.id for one in record.billed)
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


FINISHED, STOPPED_FOR_GOOD = "the run is finished", "the run must not run again (exit code 65)"
CAP = "the spend cap is reached"


def _why_ended(record: Record, records: tuple[Record, ...], facts: Facts) -> str:
    rules, beat, now = facts.bounds, facts.beat, facts.now
    if facts.end_code == ExitCode.OK:
        return FINISHED
    if facts.end_code is not None:
        return STOPPED_FOR_GOOD
    if any(r.generation > record.generation and r.booted_at is not None and r.open for r in records):
        return "a newer machine has taken the run over"
    if any(one.price_per_hour > record.max_price * 1.000001 for one in record.costs) and record.max_price > 0:
        return "it costs more than the highest price that was allowed"
    if over_cap(records, facts):
        return CAP
    mine = beat is not None and is_from(beat, record, facts, newest=record is records[-1])
    if record.booted_at is None:
        waited = now - min(one.since for one in record.costs)
        limit = rules.boot_seconds
        if waited >= limit and not is_watched(facts):
            return record.ended
        return f"no heartbeat within {limit:.0f} s of its request" if waited >= limit else ""
    if beat is not None and beat.said.state and not mine and not is_stale(beat) and not facts.outdated:
        return f"pod {beat.said.described} has taken the run over"
    if beat is None or not mine:
        since = record.alive_at or record.booted_at
        silent = now - since
    else:
        if beat.said.desired == Desired.STOPPED:
            return ""  # an operator's decision, also that the machine stays
        if beat.said.state in GONE:
            return "podwatch has left it"
        if beat.said.outcome in (Outcome.GAVE_UP, Outcome.BAD_HOST, Outcome.FAILED):
            return "podwatch gave up there"
        silent = beat.age
    left_alone = mine and beat is not None and beat.said.state == HolderState.RESTARTING
    if left_alone or _told_to_be_silent(facts):
        silent -= max(0.0, UNGUARDED_SECONDS - rules.silent_seconds)
    if silent >= rules.silent_seconds and not is_watched(facts):
        return record.ended
    return f"no heartbeat from it for {rules.silent_seconds:.0f} s" if silent >= rules.silent_seconds else ""


def _told_to_be_silent(facts: Facts) -> bool:
    """Whether control.json gives the run to a pod that the controller did not create: this one stops training, and what
    it has not stored is lost with it. A wrong name in the file must not cost it within minutes."""
    holder = facts.control.holder if facts.control is not None else ""
    return bool(holder) and generation_of(holder, facts.run_id) is None


CAUTIOUS: Final = Rules((), 0.0, 1e9, 1e9)
"""The bounds for machines that exist, where no controller.json was ever read. It allows no creation."""


def spent(records: tuple[Record, ...], now: float, window: float | None = None) -> float:
    """Money of all records, in the last ``window`` seconds or since ever."""
    return sum(record.spent(now - window if window is not None else 0.0, now) for record in records)


def over_cap(records: tuple[Record, ...], facts: Facts) -> bool:
    """Whether the machines must end now, so that a cap holds even if this takes its time."""
    rules = facts.bounds
    rate = sum(one.price_per_hour for record in records for one in record.costs)
    return above_cap(records, facts, rate * (rules.final_checkpoint_seconds + LOOK_MARGIN_SECONDS) / 3600)


def above_cap(records: tuple[Record, ...], facts: Facts, kept: float = 0.0) -> bool:
    """Whether more is spent than a cap allows. ``kept``: money that must be left."""
    rules, today = facts.bounds, spent(records, facts.now, DAY)
    return spent(records, facts.now) + kept > rules.max_spend_total or today + kept > rules.max_spend_per_day


def is_stale(beat: Beat) -> bool:
    return beat.age > PATIENCE_SECONDS


def is_watched(facts: Facts) -> bool:
    """Whether a pod that lives would have sent a heartbeat while this controller watched."""
    return facts.watched >= WATCHED_SECONDS


def is_undecided(facts: Facts) -> bool:
    """Whether only more looks can tell a dead pod from one that an outage of the store kept silent."""
    return (
        facts.beat is not None and is_stale(facts.beat) and facts.beat.said.state not in GONE and not is_watched(facts)
    )


def is_pending(record: Record, records: tuple[Record, ...], facts: Facts) -> bool:
    """Whether only more looks can tell that this machine must end: with a schedule whose looks are further apart than
    ``WATCH_AGAIN_SECONDS``, the time for which the heartbeat was watched never comes together by itself."""
    if is_watched(facts) or record.ended or not record.costs:
        return False
    return bool(_why_ended(record, records, replace(facts, watched=math.inf)))


def watch_on(facts: Facts) -> float:
    return min(WATCH_AGAIN_SECONDS, max(1.0, WATCHED_SECONDS - facts.watched))
