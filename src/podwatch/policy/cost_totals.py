"""What a run has cost so far, and how much of it failures cost: totals of a ledger (``time_ledger.py``), in seconds and
in money.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from podwatch.policy.time_ledger import TOTALLED, WANTED, Ledger, Loss, Use, until
from podwatch.policy.time_to_finish import Spread, finish


@dataclass(frozen=True, slots=True)
class Price:
    """``[cost]``: what one hour of this machine costs; None: not configured."""

    per_hour: float | None = None
    currency: str = ""

    def of(self, seconds: float | None) -> float | None:
        return None if self.per_hour is None or seconds is None else self.per_hour * seconds / 3600


@dataclass(frozen=True, slots=True)
class Account:
    """Totals at one time. Money is None without ``[cost] per_hour``."""

    since: float
    use: Use
    seconds: Mapping[Use, float]
    useful_seconds: float
    goodput: float | None
    """Useful training of the time in which training should have run; None before there was any."""
    failures: int
    lost_seconds: float
    """By failures: time without training, and training that was lost."""
    causes: Mapping[str, Loss]
    incidents: Mapping[int, Loss]
    finish: Spread | None
    price: Price = Price()

    @property
    def steps_lost(self) -> int:
        return sum(loss.steps for loss in self.causes.values())

    @property
    def steps_redone(self) -> int:
        return sum(loss.redone for loss in self.causes.values())

    @property
    def billed_seconds(self) -> float:
        """All time in which a podwatch ran, or a trainer that it took over later."""
        return sum(self.seconds[use] for use in TOTALLED if use is not Use.UNKNOWN)

    @property
    def so_far(self) -> float | None:
        return self.price.of(self.billed_seconds)

    @property
    def lost(self) -> float | None:
        return self.price.of(self.lost_seconds)

    @property
    def at_end(self) -> float | None:
        return None if self.finish is None else self.price.of(self.billed_seconds + self.finish.likely)


def account(ledger: Ledger, wall: float, *, target: int | None = None, price: Price = Price()) -> Account | None:
    """The totals at ``wall``; None before the first event. ``target``: the run's last step, if it is known."""
    if ledger.since is None:
        return None
    since = ledger.since
    ledger = until(ledger, wall)
    seconds = {use: max(0.0, ledger.seconds.get(use, 0.0)) for use in TOTALLED}
    wanted = seconds[Use.TRAINING] + seconds[Use.RESTARTING] + seconds[Use.DOWN]
    failed = [loss for cause, loss in ledger.causes.items() if cause not in WANTED]
    return Account(
        since,
        ledger.use,
        seconds,
        max(0.0, ledger.useful),
        max(0.0, ledger.useful) / wanted if wanted else None,
        sum(loss.times for loss in failed),
        sum(loss.seconds + loss.training_seconds for loss in failed),
        dict(ledger.causes),
        dict(ledger.incidents),
        finish(ledger, target),
        price,
    )
