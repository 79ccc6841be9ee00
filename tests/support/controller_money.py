"""When machines cost money although a spend cap was reached. Exact: between two events, costs grow evenly."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[float, float]


@dataclass(frozen=True)
class Bill:
    """One machine, while it costs ``price`` per hour. ``excused``: when no controller could see or destroy it.
    ``hidden``: when no list showed it: what it costs there counts from the end of each span."""

    start: float
    end: float
    price: float
    excused: tuple[Span, ...] = ()
    hidden: tuple[Span, ...] = ()

    def cost(self, start: float, end: float) -> float:
        return self.price * max(0.0, min(end, self.end) - max(start, self.start)) / 3600

    def known(self, start: float, end: float, during: Span) -> float:
        """``cost`` as far as a list has shown it ``during`` a span without events."""
        since = [a for a, b in self.hidden if a <= during[0] and during[1] <= b]
        return self.cost(start, min(end, *since)) if since else self.cost(start, end)


def overspent(bills: Sequence[Bill], cap: float, *, window: float | None = None) -> list[tuple[float, float, float]]:
    """(start, end, highest spend) of each span in which a machine that was not excused cost money although the spend
    of the last ``window`` seconds (None: all) was above ``cap``."""
    found: list[tuple[float, float, float]] = []
    for start, end in pairwise(_events(bills, window)):
        running = [b for b in bills if b.start <= start and b.end >= end and not _covers(b.excused, start, end)]
        if not running:
            continue
        before, after = (_spent(bills, at, window, (start, end)) for at in (start, end))
        if max(before, after) <= cap:
            continue
        crossing = start + (end - start) * (cap - before) / (after - before) if before != after else start
        span = (start if before > cap else crossing, end if after > cap else crossing)
        if found and found[-1][1] == span[0]:
            first, _, most = found.pop()
            found.append((first, span[1], max(most, before, after)))
        else:
            found.append((*span, max(before, after)))
    return found


def highest(bills: Sequence[Bill], window: float) -> float:
    """The most that was spent in any ``window`` seconds."""
    return max((sum(b.cost(at - window, at) for b in bills) for at in _events(bills, window)), default=0.0)


def _events(bills: Sequence[Bill], window: float | None) -> list[float]:
    times = {t for b in bills for t in (b.start, b.end)}
    times |= {t + window for t in times} if window is not None else set()
    times |= {t for b in bills for span in (*b.excused, *b.hidden) for t in span if b.start < t < b.end}
    return sorted(times)


def _spent(bills: Sequence[Bill], now: float, window: float | None, during: Span) -> float:
    return sum(b.known(now - window if window is not None else 0.0, now, during) for b in bills)


def _covers(spans: Iterable[Span], start: float, end: float) -> bool:
    return any(a <= start and end <= b for a, b in spans)
