"""Whether a dead pod is replaced, and which rented machine is destroyed (docs/controller.md). Pure.

One look is ``observed`` (rented_machines.py: what the lists and the heartbeat add to the controller's records) and then
``decide`` (one action). Money is spent only on positive evidence: a heartbeat that exists and does not change, and a
valid list of every provider that could hold a machine of this run. What cannot be read is never evidence. Times are the
store's clock.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from podwatch.domain.errors import ExitCode
from podwatch.domain.lease import CLAIM_WAIT_SECONDS, GONE, PATIENCE_SECONDS, Beat, Claim, Control
from podwatch.domain.replacement import (
    LIVING,
    Listing,
    Record,
    Rented,
    RentedState,
    Rules,
    generation_of,
    label_of,
)
from podwatch.domain.snapshot import Desired
from podwatch.policy.exit_code import Outcome
from podwatch.policy.rented_machines import (
    CAP,
    DAY,
    FINISHED,
    LOOK_MARGIN_SECONDS,
    STOPPED_FOR_GOOD,
    WATCHED_SECONDS,
    Facts,
    above_cap,
    is_from,
    is_pending,
    is_stale,
    is_undecided,
    is_watched,
    labelled,
    recorded,
    spent,
    strange,
    unlisted,
    watch_on,
)
from podwatch.policy.who_holds_the_run import winner

PREPARE_SECONDS: Final = 180.0
"""Two heartbeats can be missing. From then on the controller settles which controller would act, so that this does not
add to the time that a dead pod takes."""
CLAIM_LIFE_SECONDS: Final = 900.0
"""A claim of a controller that created nothing counts as long as this: its request may still be on its way."""
USE_CLAIM_SECONDS: Final = 300.0
"""A controller sends no request on a claim of its own that is older. With LONGEST_CALL_SECONDS well below
CLAIM_LIFE_SECONDS."""
CONFIRM_SECONDS: Final = 600.0
"""The controller ends only after no list has shown a machine of the run for so long."""
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


# -- the decision ----------------------------------------------------------------------------------------------------


def decide(records: tuple[Record, ...], facts: Facts) -> Decision:
    """One action. ``records``: as ``observed`` returned them for the same facts."""
    decision = (
        _destroy(records, facts)
        or _unlisted(records, facts)
        or _ended(records, facts)
        or _forbidden(records, facts)
        or _living(records, facts)
        or _guarded(records, facts)
        or _no_room(records, facts)
        or _create(records, facts)
    )
    waits = decision.action in (Action.WAIT, Action.ALERT)
    if waits and any(is_pending(record, records, facts) for record in records):
        return replace(decision, next_look=watch_on(facts), soon=True)
    return decision


def _destroy(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """The first machine that may end now. Only one that the provider's own list shows with our whole label. Where its
    pod has left the run, another machine follows: which controller requests it is settled meanwhile."""
    for provider, one, record in recorded(records, facts):
        if one.state is RentedState.ENDED or (provider, one.id) in facts.skip:
            continue
        newest = record is records[-1]
        why = _double(one, record, facts) or (record.ended if _ready(one, record, facts, newest=newest) else "")
        if why:
            reason = f"Machine {one.id} at {provider} ({one.label}) is destroyed: {why}."
            follows = facts.beat is not None and facts.beat.said.state in GONE and facts.end_code is None
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


def unwritable(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """What is done while the store takes no writes: only what a cap that is passed demands. A full quota keeps pods
    silent, so that nothing else may be concluded; and nothing can be stored that would be worth waiting for."""
    if not above_cap(records, facts):
        return None
    for provider, one, record in recorded(records, facts):
        if record.ended == CAP and one.state is not RentedState.ENDED and (provider, one.id) not in facts.skip:
            reason = f"Machine {one.id} at {provider} ({one.label}) is destroyed: {CAP}, and the store takes no writes."
            return Decision(Action.DESTROY, reason, provider, one.id, one.label, record.generation, next_look=5.0)
    return None


def _double(one: Rented, record: Record, facts: Facts) -> str:
    """Why this machine is not the one of its label; empty if it is. The one that sends the heartbeat stays, then the
    one that is listed first by its time of creation."""
    same = [
        other for _, other, _ in labelled(facts) if other.label == one.label and other.state is not RentedState.ENDED
    ]
    if len(same) < 2:
        return ""
    beating = facts.beat.said.instance.id if facts.beat is not None else ""
    known = [billed.id for billed in record.billed]

    def rank(other: Rented) -> tuple[bool, bool, int, str]:
        place = known.index(other.id) if other.id in known else len(known)
        return other.id != beating, other.state not in LIVING, place, other.id

    return "" if one.id == min(same, key=rank).id else "a second machine has the same label"


def _ready(one: Rented, record: Record, facts: Facts, *, newest: bool) -> bool:
    """Whether nothing is lost with this machine, or its time is over."""
    if not record.ended or record.ended_at is None:
        return False
    rules, beat = facts.bounds, facts.beat
    over = facts.now - record.ended_at >= rules.final_checkpoint_seconds
    if over or one.state not in LIVING or record.booted_at is None:
        return True
    if beat is None or not is_from(beat, record, facts, newest=newest):
        return True  # it does not hold the run: it publishes nothing
    told = record.ended != CAP or facts.now - beat.age > record.ended_at + CLOSING_SECONDS
    return (is_stale(beat) and is_watched(facts)) or (told and beat.said.unstored_step is None)


def _unlisted(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """A machine that only a person can destroy: nothing is created beside it, and the run does not end without it."""
    for record in records:
        for one in unlisted(record, facts):
            return Decision(
                Action.ALERT,
                f"Machine {one.id} at {one.provider} sends this run's heartbeat, but the provider's list does not show"
                f" it with the label {record.label_in(facts.run_id)}: it costs money, and podwatch cannot destroy it."
                " Give it this label again, or destroy it yourself.",
                code=ExitCode.FAILED,
            )
    return None


def _ended(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    if facts.end_code is None:
        return None
    why = FINISHED if facts.end_code == ExitCode.OK else STOPPED_FOR_GOOD
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
    for provider, one in strange(records, facts):
        if one.state in LIVING:
            return Decision(
                Action.ALERT,
                f"Machine {one.id} at {provider} has the label {one.label}, but this store has no record of it, and the"
                " heartbeat is not from it: it may be of a run of the same name in another store. Nothing is created"
                " beside it, and it is not destroyed: destroy it yourself, or give one of the runs another name.",
                code=ExitCode.FAILED,
            )
    for provider, one, record in recorded(records, facts):
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
            if is_undecided(facts):
                return Decision(Action.WAIT, what, next_look=watch_on(facts), soon=True)
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
    if beat is not None and beat.said.desired == Desired.STOPPED:
        return "costs money although training is stopped there"
    if beat is None or is_stale(beat):
        silent = facts.now - (record.alive_at or record.booted_at)
        return f"lives by the provider's list, but its heartbeat is silent since {silent:.0f} s"
    return "trains" if beat.said.step is None else f"trains (step {beat.said.step})"


def _guarded(records: tuple[Record, ...], facts: Facts) -> Decision | None:
    """A heartbeat that is not stale, or none at all: no evidence of a dead pod."""
    beat = facts.beat
    if beat is None or not beat.said.state:
        what = "no pod has ever sent a heartbeat" if beat is None else "the heartbeat cannot be read"
        return Decision(
            Action.ALERT, f"Nothing is created: {what}. Start the first pod yourself.", code=ExitCode.FAILED
        )
    if beat.said.desired == Desired.STOPPED or beat.said.outcome == Outcome.STOPPED:
        return Decision(
            Action.WAIT, f"An operator has stopped training on pod {beat.said.described}: nothing is created."
        )
    if facts.claim_age is not None and facts.claim_age <= PATIENCE_SECONDS and facts.claim_age < beat.age:
        return Decision(Action.WAIT, f"A pod claimed the run {facts.claim_age:.0f} s ago.")
    if beat.said.state in GONE:
        return None
    if is_undecided(facts):
        left = WATCHED_SECONDS - facts.watched
        return Decision(
            Action.WAIT,
            f"Pod {beat.said.described} is silent since {beat.age:.0f} s: it counts as dead if its heartbeat stays"
            f" unchanged for {left:.0f} s more, because an outage of the store can have kept it silent.",
            prepare=_prepared(records, facts) if left <= CLAIM_WAIT_SECONDS else 0,
            next_look=watch_on(facts),
            soon=True,
        )
    if is_stale(beat):
        return None
    left = PATIENCE_SECONDS - beat.age
    prepare = _prepared(records, facts) if beat.age >= PREPARE_SECONDS else 0
    what = f"Pod {beat.said.described} sent its heartbeat {beat.age:.0f} s ago"
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
    rules, now = facts.bounds, facts.now
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
    who = beat.said.described if beat is not None else "?"
    how = f"has left the run ({beat.said.state})" if beat is not None and beat.said.state in GONE else "is silent"
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
    known = [r.generation for r in records] + [c.generation for c in facts.claims] + [g for _, _, g in labelled(facts)]
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
    capped = any(record.costs and record.ended == CAP for record in records)
    if stopped_by_people:
        return wanted if wanted != control else None
    if capped:
        wanted = replace(wanted, desired="stopped", reason=f"{MARK}{CAP}")
    elif _own(control):
        wanted = replace(wanted, desired="running", reason="")
    return wanted if wanted != control else None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
