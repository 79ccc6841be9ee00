"""What the run costs, and what failures took of it: from its incidents, the time of a step, and the price. Pure.

A failure costs the time without training, and the steps that the resume went back. What is unknown is None, never 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from podwatch.domain.account_document import AccountTotals, Finish
from podwatch.domain.document import Document, Integer, Real, Text, Whole, of
from podwatch.domain.event import Incident

COST_KEY: Final = "cost"
"""Journal key of what is kept for the next podwatch."""
WINDOW: Final = 60
"""Newest steps seen over which the time of a step is measured, more where they contain fewer than SAVES saves. One
look a minute sees one."""
SAVES: Final = 2
_Number = TypeVar("_Number", int, float)
DOWN: Final = "down"
"""The cause of time without training outside of incidents: podwatch gave up, or something blocks the start."""


@dataclass(frozen=True, slots=True)
class Price:
    """``[cost]``: what one hour of this machine costs; None: not configured."""

    per_hour: float | None = None
    currency: str = ""

    def of(self, seconds: float | None) -> float | None:
        return None if self.per_hour is None or seconds is None else self.per_hour * seconds / 3600


@dataclass(frozen=True, slots=True)
class Loss:
    """What failures have cost. ``idle``: seconds without training; ``training``: seconds of training that was lost, in
    ``steps``."""

    times: int = 0
    idle: float = 0.0
    training: float | None = 0.0
    steps: int | None = 0

    @property
    def seconds(self) -> float | None:
        return _sum(self.idle, self.training)

    def plus(self, other: "Loss") -> "Loss":
        training, steps = _sum(self.training, other.training), _sum(self.steps, other.steps)
        return Loss(self.times + other.times, self.idle + other.idle, training, steps)


@dataclass(frozen=True, slots=True)
class RunCost:
    """What one pod has cost, or all of them. ``since``: epoch seconds; ``seconds``: that podwatch guarded the run."""

    since: Real
    seconds: Real = 0.0
    failures: Whole | None = 0
    lost_seconds: Real | None = 0.0
    steps_lost: Integer | None = 0
    so_far: Real | None = None
    lost: Real | None = None
    currency: Text = ""


@dataclass(frozen=True, slots=True)
class Spent(Document):
    """What incidents do not say. ``down``: seconds without training and without an open incident. ``earlier``: of the
    run's earlier pods. ``after``: the incidents up to this one are in ``earlier``. ``unconfirmed``: incident -> epoch
    seconds from which training runs, although no step confirms it and the incident stays open. ``claim``: generation of
    the newest claim on the run with which this pod looked for an earlier account."""

    FILE = "costs so far"

    since: Real
    seconds: Real = 0.0
    down: Real = 0.0
    step_seconds: Real | None = None
    earlier: RunCost | None = None
    after: Whole = 0
    unconfirmed: Mapping[str, Real] = field(default_factory=dict)
    claim: Whole = 0


@dataclass(frozen=True, slots=True)
class Account:
    """``run``: of all pods. ``causes`` and ``incidents``: of this pod."""

    run: RunCost
    goodput: float | None
    """The share of the time that no failure took; None before the time of a step is known."""
    causes: Mapping[str, Loss]
    incidents: Mapping[int, Loss]
    price: Price = Price()
    finish: Finish | None = None

    @property
    def at_end(self) -> float | None:
        return None if self.finish is None else _sum(self.run.so_far, self.price.of(self.finish.low))


def account(
    spent: Spent,
    incidents: Iterable[Incident],
    wall: float,
    *,
    price: Price = Price(),
    median: float | None = None,
    left: int | None = None,
) -> Account:
    """The totals at ``wall``. ``median``: the learned time of a step, for what was lost before it is measured with
    saves; ``left``: steps to the target. When training ends is not known before that."""
    pace = spent.step_seconds or median
    own: dict[int, Loss] = {}
    causes: dict[str, Loss] = {DOWN: Loss(idle=spent.down)} if spent.down else {}
    for one in incidents:
        if one.id > spent.after:
            own[one.id] = loss_of(one, min(wall, spent.unconfirmed.get(str(one.id), wall)), pace)
            causes[one.kind] = causes.get(one.kind, Loss()).plus(own[one.id])
    whole = Loss()
    for loss in causes.values():
        whole = whole.plus(loss)
    so_far, lost = price.of(spent.seconds), price.of(whole.seconds)
    run = RunCost(spent.since, spent.seconds, whole.times, whole.seconds, whole.steps, so_far, lost, price.currency)
    run = run if spent.earlier is None else both(spent.earlier, run)
    goodput = None
    if pace is not None and run.lost_seconds is not None and run.seconds > 0:
        goodput = max(0.0, 1 - run.lost_seconds / run.seconds)
    found = Account(run, goodput, causes, own, price)
    if not left or left < 0 or not spent.step_seconds or not goodput:
        return found
    seconds = left * spent.step_seconds
    return replace(found, finish=Finish(seconds, seconds / goodput))


def loss_of(incident: Incident, wall: float, step_seconds: float | None) -> Loss:
    """What ``incident`` has cost until ``wall``."""
    idle = max(0.0, min(wall, wall if incident.closed_wall is None else incident.closed_wall) - incident.opened_wall)
    steps = incident.lost_steps
    training = None if steps is None or step_seconds is None else steps * step_seconds
    return Loss(1, idle, training, steps)


def both(earlier: RunCost, own: RunCost) -> RunCost:
    """Money is added up in one currency only."""
    same = earlier.currency == own.currency
    return RunCost(
        earlier.since,
        earlier.seconds + own.seconds,
        _sum(earlier.failures, own.failures),
        _sum(earlier.lost_seconds, own.lost_seconds),
        _sum(earlier.steps_lost, own.steps_lost),
        _sum(earlier.so_far, own.so_far) if same else None,
        _sum(earlier.lost, own.lost) if same else None,
        own.currency,
    )


def _sum(one: _Number | None, other: _Number | None) -> _Number | None:
    return None if one is None or other is None else one + other


Steps = tuple[tuple[int, float], ...]
"""(step, monotonic seconds at which it was made), oldest first: a time in which nothing was wrong."""


def measured(window: Steps, step: int, at: float, save_gap: float | None) -> Steps:
    """``window`` with the newest step. A lower step is that of another start. ``save_gap``: seconds from one save
    to the next, as far as it is known."""
    if not window or step < window[-1][0]:
        return ((step, at),)
    longer = window if step == window[-1][0] else (*window, (step, at))
    while len(longer) > WINDOW and at - longer[1][1] >= SAVES * (save_gap or 0.0):
        longer = longer[1:]
    return longer


def step_seconds(window: Steps, save_gap: float | None) -> float | None:
    """Wall time per step, saves included; None while the window contains fewer than SAVES of them."""
    if len(window) < 2 or save_gap is None:
        return None
    (first, began), (last, ended) = window[0], window[-1]
    return (ended - began) / (last - first) if ended - began >= SAVES * save_gap else None


def totals_of(account: AccountTotals | None) -> RunCost | None:
    """The totals in a heartbeat's account; None without their times."""
    if account is None or account.since is None:
        return None
    return of(
        RunCost,
        account,
        since=account.since,
        seconds=account.total_seconds,
        so_far=account.money.so_far,
        lost=account.money.lost,
        currency=account.money.currency[:8],
    )
