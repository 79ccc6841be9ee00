"""Advice from measured numbers: one line each, never an act. Empty where the numbers do not support it."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from podwatch.domain.event import Event, EventName

FEWEST_FAILURES: Final = 3
"""The rate of two failures can be wrong by a factor of ten (Poisson, 95 %)."""
FEWEST_SAVES: Final = 3
FEWEST_UPLOADS: Final = 3
WORTH: Final = 0.01
"""Share of training that the advice must save: below it the measurement decides more than the interval."""
SLOTS: Final = 3
"""One checkpoint that is being saved, one to resume from, one to step back to."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds and bytes are medians; None was not measured. ``saves``: how many save times; ``failures`` in
    ``training_seconds``; ``room_bytes``: what checkpoints occupy or could occupy on the disk."""

    save_seconds: float | None = None
    saves: int = 0
    gap_seconds: float | None = None
    step_seconds: float | None = None
    failures: int = 0
    training_seconds: float = 0.0
    save_bytes: int | None = None
    upload_rate: float | None = None
    uploads: int = 0
    room_bytes: int | None = None


def advise(measured: Measured) -> list[str]:
    return [line for line in (save_interval(measured), uplink(measured), disk(measured)) if line]


def best_interval(save_seconds: float, between_failures: float) -> float:
    """Daly's estimate of the time of training between two saves that loses least (J. Daly, 2006, equation 37; its
    first term is Young's, 1974)."""
    if save_seconds >= 2 * between_failures:
        return between_failures
    ratio = save_seconds / (2 * between_failures)
    return math.sqrt(2 * save_seconds * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def lost_share(interval: float, save_seconds: float, between_failures: float) -> float:
    """The share of time that saves, and training since the last save, cost at this interval (to first order)."""
    return save_seconds / (interval + save_seconds) + (interval + save_seconds) / (2 * between_failures)


def save_interval(m: Measured) -> str:
    if m.save_seconds is None or m.gap_seconds is None or m.saves < FEWEST_SAVES or m.failures < FEWEST_FAILURES:
        return ""
    between = m.training_seconds / m.failures
    now = m.gap_seconds - m.save_seconds
    if m.save_seconds <= 0 or now <= 0 or between <= 0:
        return ""
    best = best_interval(m.save_seconds, between)
    if m.step_seconds:  # a trainer saves at whole steps
        best = max(1, round(best / m.step_seconds)) * m.step_seconds
    loses, would = lost_share(now, m.save_seconds, between), lost_share(best, m.save_seconds, between)
    if loses - would < WORTH:
        return ""
    steps = f" ({round(best / m.step_seconds)} steps)" if m.step_seconds else ""
    return (
        f"a save every {span(best)}{steps} instead of every {span(m.gap_seconds)} would lose {would:.0%} of the time"
        f" instead of {min(loses, 1.0):.0%}: {m.failures} failures in {span(m.training_seconds)} of training, a save"
        f" takes {span(m.save_seconds)}; assumes that training waits for a save and that failures come at random"
    )


def uplink(m: Measured) -> str:
    """Measured at uploads, which give way to training: `podwatch check --throughput` measures the uplink itself."""
    if not m.upload_rate or m.save_bytes is None or not m.gap_seconds or m.uploads < FEWEST_UPLOADS:
        return ""
    takes = m.save_bytes / m.upload_rate
    if takes <= m.gap_seconds:
        return ""
    nth = math.ceil(takes / m.gap_seconds)
    rate = f"{size(m.upload_rate)}/s, {m.uploads} uploads"
    return (
        f"uploads are slower than saves: {size(m.save_bytes)} took {span(takes)} ({rate}), a save comes every"
        f" {span(m.gap_seconds)}; with a save every {span(nth * m.gap_seconds)} each would be stored"
    )


def disk(m: Measured) -> str:
    if not m.save_bytes or m.room_bytes is None:
        return ""
    fit = m.room_bytes // m.save_bytes
    if fit >= SLOTS:
        return ""
    more = size(SLOTS * m.save_bytes - m.room_bytes)
    return (
        f"the disk has room for {fit} checkpoint{'' if fit == 1 else 's'} of {size(m.save_bytes)}; with {more} more it"
        " would hold one to resume from, one to step back to, and the next"
    )


def upload_rate(events: Iterable[Event]) -> tuple[float | None, int]:
    """Median bytes per second of the uploads in ``events``, oldest first, and how many there were. An upload that was
    interrupted, or continued with less to send, does not count."""
    running: tuple[int, float, float] | None = None  # step, wall, bytes
    rates: list[float] = []
    for event in events:
        step, count = event.fields.get("step"), event.fields.get("bytes")
        if event.name is EventName.DAEMON_STARTED or event.name is EventName.CLOCK_CHANGED:
            running = None
        if not isinstance(step, int) or not isinstance(count, int):
            continue
        if event.name is EventName.UPLOAD_STARTED:
            running = step, event.wall, float(count)
        elif event.name is EventName.PUBLISHED and running is not None and running[0] == step:
            _, at, total = running
            running = None
            if total > 0 and event.wall > at and total >= 0.99 * count:
                rates.append(total / (event.wall - at))
    return (statistics.median(rates) if rates else None), len(rates)


def span(seconds: float) -> str:
    """Whole seconds, minutes, or hours and minutes."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours and minutes else f"{hours} h" if hours else f"{minutes} min"


def size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
