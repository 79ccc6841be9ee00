"""When the run reaches its target step, from the measured paces and failures. Pure."""

import statistics
from dataclasses import dataclass

from podwatch.policy.time_ledger import FEWEST_PACES, WANTED, Ledger, Use


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds until the target step is reached: without a failure at the faster paces, as usual, at the slower paces
    with more failures than so far."""

    low: float
    likely: float
    high: float


def finish(ledger: Ledger, target: int | None) -> Spread | None:
    """The time to the target step, from the measured paces and failures; None while one of them is unknown."""
    if target is None or ledger.position is None or len(ledger.paces) < FEWEST_PACES or ledger.use is Use.FINISHED:
        return None
    left = max(0, target - ledger.position)
    paces = sorted(ledger.paces)
    failed = [loss for cause, loss in ledger.causes.items() if cause not in WANTED]
    times = sum(loss.times for loss in failed)
    each = sum(loss.seconds + loss.training_seconds for loss in failed) / times if times else 0.0
    rate = times / max(ledger.seconds.get(Use.TRAINING, 0.0), 1.0)
    usual, slow = left * statistics.median(paces), left * _share(paces, 0.9)
    coming = rate * slow
    return Spread(
        left * _share(paces, 0.1),
        usual + rate * usual * each,
        slow + (coming + 2 * coming**0.5) * each,
    )


def _share(ordered: list[float], share: float) -> float:
    """The value below which ``share`` of ``ordered`` is, interpolated."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
