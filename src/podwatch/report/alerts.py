"""Which notices are sent and when: a pure function of findings, events and the notices sent before.

One notice when a condition begins and one when it is over; reminders at growing intervals while a critical one lasts.
A condition that shows only briefly sends none, and one that returns soon counts as never over. A failure that podwatch
heals sends one notice for the incident instead of one for each finding that led to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from podwatch.domain.document import Document, Flag, Integer, Many, Real, Text
from podwatch.domain.event import Change, Event, EventName, Notice, Topic
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.times import amount, span
from podwatch.report.run_cost import Account, Loss, Price

if TYPE_CHECKING:
    from podwatch.config.settings import NotifySettings

HOUR = 3600.0
SETTLE_SECONDS = 20.0
"""A finding must be open this long before a notice is sent: podwatch may fix it at once."""
QUIET_SECONDS = 60.0
"""A finding must be gone this long before a notice reports its end."""
MOST_REMIND_SECONDS = 24 * HOUR
SELF_REPAIRED = frozenset(
    {
        # podwatch or the engine starts training again; if that fails, another finding says so
        FindingKind.TRAINER_EXITED,
        FindingKind.REQUIRED_CHILD_EXITED,
        FindingKind.OUT_OF_MEMORY,
        FindingKind.NODE_FAILED,
    }
)
"""Every other critical finding needs the operator, unless podwatch restarts training for it."""
_ALWAYS_FROM_WARNING = frozenset({FindingKind.NOT_COMPLETE})
"""These send a notice as warnings: all saves of a night can be lost before they become critical."""
_RANK = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
_INCIDENT = "incident"


@dataclass(frozen=True, slots=True)
class Told:
    """A condition that was reported and is not over. Monotonic seconds; ``gone`` is None while it is present."""

    topic: Topic
    severity: Severity
    title: Text
    since: Real
    last: Real
    reminders: Integer = 0
    gone: Real | None = None


@dataclass(frozen=True, slots=True)
class NoticeState(Document):
    """``seen``: when each unreported finding first showed. ``sent``: when the notices of the last hour were sent,
    oldest first. ``unsent``: number of notices that the rate limit dropped. ``healing``: an incident was reported
    and is not over; ``incident``: its number, 0 if unknown. In one that is kept for the next process, ``at`` is the
    moment of its monotonic times that was ``wall`` in epoch seconds."""

    told: Mapping[Text, Told] = field(default_factory=dict)
    seen: Mapping[Text, Real] = field(default_factory=dict)
    sent: Many[Real] = ()
    unsent: Integer = 0
    healing: Flag = False
    incident: Integer = 0
    at: Real = 0.0
    wall: Real = 0.0


Result = tuple[NoticeState, tuple[Notice, ...]]


def topic_of(finding: Finding) -> Topic:
    """``needs-operator`` is for critical findings that podwatch does not repair."""
    if finding.kind is FindingKind.GAVE_UP:
        return Topic.GAVE_UP
    repaired = finding.kind in SELF_REPAIRED or (finding.verdict is Verdict.RESTART and finding.confirmed)
    if finding.severity is Severity.CRITICAL and not repaired:
        return Topic.NEEDS_OPERATOR
    return Topic.FINDINGS


def on_turn(
    state: NoticeState,
    findings: Sequence[Finding],
    notify: "NotifySettings",
    *,
    at: float,
    wall: float,
    lowest: Severity = Severity.CRITICAL,
) -> Result:
    """Notices after one turn. ``findings``: all open ones. ``at``: monotonic, ``wall``: epoch seconds. ``lowest``: the
    lowest severity that any channel asks for."""
    book = _Book(state, notify, at, wall)
    now = {f.key: f for f in findings if _wanted(f, notify, lowest, healing=state.healing)}
    book.seen = {key: state.seen.get(key, at) for key in now}
    for key, finding in now.items():
        before = book.told.get(key)
        if before is None:
            if at - book.seen[key] >= SETTLE_SECONDS:
                book.open(key, topic_of(finding), finding.severity, _title(finding), finding.summary, do=_do(finding))
        elif _RANK[finding.severity] > _RANK[before.severity]:
            title, text = _title(finding), finding.summary
            book.open(key, topic_of(finding), finding.severity, title, text, do=_do(finding), since=before.since)
        else:
            book.told[key] = replace(before, gone=None)
            book.remind(key, finding.summary, _do(finding))
    for key in [k for k in book.told if k not in now]:
        book.gone(key)
    return book.result()


def on_event(
    state: NoticeState, event: Event, notify: "NotifySettings", *, at: float, account: Account | None = None
) -> Result:
    """Notices for one event, as it happens. ``account``: the run's time and money after the event."""
    book = _Book(state, notify, at, event.wall)
    match event.name:
        case EventName.INCIDENT_OPENED if "incident" in event.fields:
            kind = str(event.fields.get("kind") or "a failure")
            if event.fields.get("gave_up") and Topic.GAVE_UP in notify.topics:
                return book.result()  # the next event reports it, with the reason and the fix
            book.healing, book.incident = True, int(_number(event, "incident") or 0)
            book.say(
                Topic.RESTARTS, Change.OPENED, Severity.CRITICAL, f"restarting training: {kind}", event, key=_INCIDENT,
                cost=cost_so_far(_number(event, "lost_seconds"), account), do="nothing, podwatch restarts training",
            )  # fmt: skip
        case EventName.INCIDENT_CLOSED | EventName.TRAINER_CONFIRMED:
            # A restart that failed is followed by the next; an operator who stopped the run needs no notice of it.
            if state.healing and (
                event.name is EventName.TRAINER_CONFIRMED or event.fields.get("resumed_step") is not None
            ):
                book.say(
                    Topic.RESTARTS, Change.CLOSED, Severity.INFO, "training continues", event, key=_INCIDENT,
                    cost=cost_of(state.incident, account), weight=Severity.CRITICAL,
                )  # fmt: skip
            book.healing = False
        case EventName.GAVE_UP:
            book.healing = False
            if Topic.GAVE_UP in notify.topics and str(FindingKind.GAVE_UP) not in book.told:
                book.open(
                    str(FindingKind.GAVE_UP), Topic.GAVE_UP, Severity.CRITICAL, "podwatch gave up", event.message,
                    cost=cost_of(0, account), do="fix the cause, then run `podwatch start`",
                )  # fmt: skip
        case EventName.LINEAGE_OPENED if event.severity is Severity.WARNING:
            step = event.fields.get("step")
            where = "the beginning" if step is None else f"step {step}"
            title = f"an operator took training back to {where}"
            do = "nothing, if that was you; else `podwatch events` shows who started it"
            book.say(Topic.RESTARTS, Change.HAPPENED, Severity.WARNING, title, event, do=do)
        case EventName.TRAINER_FINISHED:
            cost, do = cost_of(0, account), "end the machine, if podwatch does not: it is still billed"
            book.say(Topic.FINISHED, Change.HAPPENED, Severity.INFO, "training is finished", event, cost=cost, do=do)
        case EventName.DAEMON_STOPPING if event.fields.get("preempted"):
            do = "start another machine, if no controller does: `podwatch run` continues there from the store"
            title = "this machine is being preempted"
            book.say(Topic.NEEDS_OPERATOR, Change.HAPPENED, Severity.CRITICAL, title, event, do=do)
        case EventName.DAEMON_STOPPING if event.severity is Severity.CRITICAL:
            do = "start podwatch again: training continues without a guard"
            book.say(Topic.NEEDS_OPERATOR, Change.HAPPENED, Severity.CRITICAL, "podwatch is stopping", event, do=do)
    return book.result()


def _wanted(finding: Finding, notify: "NotifySettings", lowest: Severity, *, healing: bool) -> bool:
    if topic_of(finding) not in notify.topics:
        return False
    if _RANK[finding.severity] < _RANK[lowest] and not _usual(finding.key, finding.severity, notify):
        return False
    # A failure that podwatch heals is reported as an incident; if restarts are not reported, by its finding.
    led_to_it = finding.verdict is Verdict.RESTART and finding.confirmed
    return not (led_to_it and healing and Topic.RESTARTS in notify.topics)


def _usual(key: str, severity: Severity, notify: "NotifySettings") -> bool:
    """Whether channels without a severity of their own get notices about this condition."""
    least = _RANK[Severity(notify.min_severity)]
    if key.partition(":")[0] in _ALWAYS_FROM_WARNING:
        least = min(least, _RANK[Severity.WARNING])
    return _RANK[severity] >= least


# -- texts -----------------------------------------------------------------------------------------------------------


def _title(finding: Finding) -> str:
    return f"{finding.kind} ({finding.subject})" if finding.subject else str(finding.kind)


def _do(finding: Finding) -> str:
    """Never "nothing" without knowing it: a finding without a suggestion has an entry in the runbook."""
    return finding.suggestion or f"see {finding.kind} in docs/runbook.md"


def cost_so_far(lost_seconds: float | None, account: Account | None) -> str:
    """What a failure that has just been found has cost; empty if unknown."""
    if lost_seconds is None:
        return ""
    price = Price() if account is None else account.price
    return f"{span(lost_seconds)} of training so far{_money(price.of(lost_seconds), price)}"


def cost_of(incident: int, account: Account | None) -> str:
    """What one failure has cost, and all of them; empty if unknown. ``incident`` 0: all of them only."""
    if account is None:
        return ""
    loss, run, parts = account.incidents.get(incident, Loss()), account.run, []
    if loss.times:
        took = f"{span(loss.idle)} without training" if loss.seconds is None else span(loss.seconds)
        steps = f", {loss.steps} steps to train again" if loss.steps else ""
        parts.append(f"{took}{steps}{_money(account.price.of(loss.seconds), account.price)}")
    if run.lost_seconds is not None and run.lost_seconds >= 1 and not (loss.times and run.failures == 1):
        known = "all failures" if run.failures is None else f"{run.failures} failures"
        count = "1 failure" if run.failures == 1 else known
        parts.append(f"{count} of this run: {span(run.lost_seconds)}{_money(run.lost, account.price)}")
    return "; ".join(parts)


def _money(value: float | None, price: Price) -> str:
    return "" if value is None else f" ({amount(value, price.currency)})"


def _number(event: Event, name: str) -> float | None:
    value = event.fields.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def body(notice: Notice) -> str:
    """The text of a message: what happened and what podwatch does, what it cost, what the operator does."""
    unsent = f"({notice.unsent} more not sent: hourly limit reached)" if notice.unsent else ""
    cost, do = f"Cost: {notice.cost}" if notice.cost else "", f"Do: {notice.do}" if notice.do else ""
    return "\n".join(line for line in (notice.text, cost, do, unsent) if line)


# -- channels and digests --------------------------------------------------------------------------------------------


def channel_of(entry: str) -> tuple[Severity | None, str]:
    """The severity that the channel asks for (None: the configured one) and the URL, of an entry such as
    ``warning ntfy://...``."""
    word, _, url = entry.partition(" ")
    return (Severity(word), url.strip()) if url and word in tuple(Severity) else (None, entry)


def reaches(notice: Notice, least: Severity | None) -> bool:
    """Whether a channel that asks for ``least`` gets the notice."""
    if least is None:
        return notice.usual
    return _RANK[notice.weight or notice.severity] >= _RANK[least]


def lowest_of(least: Sequence[Severity | None], default: Severity) -> Severity:
    """The lowest severity of findings that any channel gets. Findings of severity info are notes: never sent."""
    asked = [Severity.WARNING if one is Severity.INFO else one for one in least if one is not None]
    return min((default, *asked), key=_RANK.__getitem__)


def digest_due(last: float | None, now: float, every: float) -> bool:
    """Whether a digest is due at ``now`` (epoch seconds, as ``last``). A clock that was set back delays it: at most one
    in ``every`` seconds."""
    return last is not None and every > 0 and now - last >= every


class _Book:
    """The state being built. Every notice passes ``_go``, which applies the rate limit."""

    def __init__(self, state: NoticeState, notify: "NotifySettings", at: float, wall: float) -> None:
        self.notify, self.at, self.wall = notify, at, wall
        self.told, self.seen, self.healing = dict(state.told), dict(state.seen), state.healing
        self.incident = state.incident
        self.sent = [s for s in state.sent if at - s < HOUR]
        self.unsent = state.unsent
        self.notices: list[Notice] = []

    def result(self) -> Result:
        state = NoticeState(self.told, self.seen, tuple(self.sent), self.unsent, self.healing, self.incident)
        return state, tuple(self.notices)

    def open(
        self,
        key: str,
        topic: Topic,
        severity: Severity,
        title: str,
        text: str,
        *,
        do: str,
        cost: str = "",
        since: float | None = None,
    ) -> None:
        """Report a condition. If the rate limit prevents it now, it is reported at a later turn."""
        usual = _usual(key, severity, self.notify)
        notice = Notice(topic, Change.OPENED, severity, title, text, key, self.wall, cost=cost, do=do, usual=usual)
        if self._go(notice, count=False):
            began = self.seen.get(key, self.at) if since is None else since
            self.told[key] = Told(topic, severity, title, began, self.at)

    def remind(self, key: str, text: str, do: str) -> None:
        told = self.told[key]
        first = self.notify.remind
        if told.severity is not Severity.CRITICAL or first <= 0:
            return
        due = told.last + min(first * 2.0 ** min(told.reminders, 30), MOST_REMIND_SECONDS)
        if self.at >= due:
            lasts = f"{text}\nThis has lasted {span(self.at - told.since)}."
            notice = Notice(
                told.topic, Change.REMINDER, told.severity, told.title, lasts, key, self.wall, do=do,
                usual=_usual(key, told.severity, self.notify),
            )  # fmt: skip
            if self._go(notice, count=False):
                self.told[key] = replace(told, last=self.at, reminders=told.reminders + 1)

    def gone(self, key: str) -> None:
        told = self.told[key]
        gone = self.at if told.gone is None else told.gone
        if self.at - gone < QUIET_SECONDS:
            self.told[key] = replace(told, gone=gone)
            return
        text = f"It lasted {span(max(0.0, gone - told.since))}."
        over = Notice(
            told.topic, Change.CLOSED, Severity.INFO, f"resolved: {told.title}", text, key, self.wall,
            weight=told.severity, usual=_usual(key, told.severity, self.notify),
        )  # fmt: skip
        if self._go(over, count=False):  # else at a later turn, unless the condition returned
            del self.told[key]

    def say(
        self,
        topic: Topic,
        change: Change,
        severity: Severity,
        title: str,
        event: Event,
        *,
        key: str = "",
        cost: str = "",
        do: str = "nothing",
        weight: Severity | None = None,
    ) -> None:
        if topic not in self.notify.topics:
            return
        notice = Notice(topic, change, severity, title, event.message, key or str(event.name), self.wall)
        self._go(replace(notice, fields=dict(event.fields), cost=cost, do=do, weight=weight))

    def _go(self, notice: Notice, *, count: bool = True) -> bool:
        """Send within the hourly limit. Half of it is reserved for critical notices and their ends, and one of it for
        the end of a restart that is in progress; the last words of podwatch are always sent."""
        critical = (notice.weight or notice.severity) is Severity.CRITICAL
        limit = self.notify.per_hour if critical else max(1, self.notify.per_hour // 2)
        if self.healing and (notice.key, notice.change) != (_INCIDENT, Change.CLOSED):
            limit = min(limit, self.notify.per_hour - 1)
        if len(self.sent) >= limit and notice.key != EventName.DAEMON_STOPPING:
            self.unsent += count
            return False
        self.sent.append(self.at)
        self.notices.append(replace(notice, unsent=self.unsent))
        self.unsent = 0
        return True


# -- handover to the next podwatch process ---------------------------------------------------------------------------


def kept(state: NoticeState, *, at: float, wall: float) -> NoticeState:
    """What the next podwatch needs of the state."""
    return replace(state, seen={}, unsent=0, at=at, wall=wall)


def continued(document: object, *, at: float, wall: float, patience: float = 300.0) -> NoticeState:
    """The state that an earlier podwatch kept as JSON: conditions that it reported are not reported again, and those
    that do not show within ``patience`` seconds are over. Unreadable data gives an empty state."""
    before = NoticeState.kept(document)
    if before is None:
        return NoticeState()
    by = at - max(0.0, wall - before.wall) - before.at
    told = {
        key: replace(one, since=one.since + by, last=one.last + by, gone=at + patience)
        for key, one in before.told.items()
    }
    sent = tuple(sorted(moment + by for moment in before.sent))
    return replace(before, told=told, sent=sent)
