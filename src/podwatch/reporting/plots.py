"""The plots of the page: the last day of the run as lines in inline SVG. Pure: moments in, HTML out.

An SVG holds shapes only; every figure is also text above it, so that the plots need neither colours nor eyes, and a
reader's text size applies. The style is in reporting/page.html.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Final

from podwatch.domain.status_document import TrainingState
from podwatch.domain.times import ago, gib, size, span
from podwatch.recording.last_day import DAY, Moment
from podwatch.reporting.html import Html, joined, tag
from podwatch.reporting.terminal_text import BEFORE_UNIT, NO_BREAK

BUCKET: Final = 480.0
"""Seconds that share one place of a line: two pixels of a phone."""
BUCKETS: Final = int(DAY // BUCKET)
BRIDGED: Final = 4
"""Buckets without a value that a line crosses: steps and figures come less often than once a minute."""
HEIGHT: Final = 100
LEAST: Final = 3600.0
"""Seconds that the axis has at least; it begins with the first moment."""

Points = Sequence[tuple[float, float]]
"""(epoch seconds, value), oldest first."""


def plots(moments: Sequence[Moment], now: float) -> Html:
    """The day before ``now`` (epoch seconds); ``moments`` oldest first."""
    moments = [moment for moment in moments if now - DAY <= moment.at <= now]
    if not moments:
        return tag("p", "Nothing yet: podwatch writes one point a minute.")
    seen = min(DAY, max(LEAST, now - moments[0].at))
    axis = tag("p", tag("span", ago(seen)), tag("span", ago(seen / 2)), tag("span", "now"), class_="axis")
    drawn = (_chart(text, points, now, low, high, seen) for text, points, low, high in _series(moments) if points)
    return joined(tag("div", *drawn, class_="plots"), axis)


def _series(moments: Sequence[Moment]) -> Iterator[tuple[str, Points, float, float]]:
    """(text, points, lowest and highest value of the frame)"""
    starts = sum(moment.started for moment in moments)
    running = [(m.at, 1.0 if m.state == TrainingState.RUNNING else 0.0) for m in moments]
    text = (
        f"Training: {moments[-1].state}; {starts} start{'s' * (starts != 1)} of training. The line is up while it runs"
    )
    yield text, running, 0.0, 1.0
    for index in sorted({gpu[0] for moment in moments for gpu in moment.gpus}):
        found = [(m.at, float(used), float(total)) for m in moments for one, used, total in m.gpus if one == index]
        values, full = [used for _, used, _ in found], max(total for *_, total in found)
        text = f"{gib(values[-1])} of {gib(full)} (lowest {gib(min(values))}, highest {gib(max(values))})"
        yield f"GPU {index} memory: {text}", [(at, used) for at, used, _ in found], 0.0, full
    if disk := [(m.at, m.disk) for m in moments if m.disk is not None]:
        used, capacity = disk[-1][1]
        need = next((m.next_save for m in reversed(moments) if m.next_save), None)
        text = f"Disk: {size(used)} of {size(capacity)} used" + (f"; the next save needs {size(need)}" if need else "")
        yield text, [(at, float(one[0])) for at, one in disk], 0.0, float(capacity)
    if paces := step_times(moments):
        values = [value for _, value in paces]
        last, usual, low, high = (_seconds(v) for v in (values[-1], median(values), min(values), max(values)))
        yield f"Step time: {last} (usually {usual}, {low} to {high})", paces, 0.0, max(values)
    yield from _figure("Reward", moments, lambda moment: moment.reward)
    yield from _figure("Loss", moments, lambda moment: moment.loss)


def _figure(
    name: str, moments: Sequence[Moment], read: Callable[[Moment], float | None]
) -> Iterator[tuple[str, Points, float, float]]:
    points = [(m.at, value) for m in moments if (value := read(m)) is not None and math.isfinite(value)]
    if points:
        values = [value for _, value in points]
        low, high = min(values), max(values)
        yield f"{name}: {values[-1]:.4g} (lowest {low:.4g}, highest {high:.4g})", points, low, high


def step_times(moments: Sequence[Moment]) -> list[tuple[float, float]]:
    """Seconds per step between two steps of one start, at the time of the second."""
    found: list[tuple[float, float]] = []
    last: tuple[int, float] | None = None
    for moment in moments:
        if moment.state != TrainingState.RUNNING:
            last = None
        elif moment.step is not None and moment.step_at is not None:
            if last is not None and moment.step > last[0] and moment.step_at > last[1]:
                found.append((moment.at, (moment.step_at - last[1]) / (moment.step - last[0])))
            if last is None or moment.step != last[0]:
                last = moment.step, moment.step_at
    return found


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s" if value < 600 else span(value)


def _chart(text: str, points: Points, now: float, low: float, high: float, seen: float) -> Html:
    line = tag("path", d=path(points, now, low, high, seen), class_="line", vector_effect="non-scaling-stroke")
    frame = f"0 0 {BUCKETS} {HEIGHT}"
    drawn = tag(
        "svg", line, class_="chart", viewBox=frame, preserveAspectRatio="none", aria_hidden="true", focusable="false"
    )
    return tag("figure", tag("figcaption", BEFORE_UNIT.sub(NO_BREAK, text)), drawn)


def path(points: Points, now: float, low: float, high: float, seen: float = DAY) -> str:
    """The line over the last ``seen`` seconds as SVG path data: the lowest and the highest value of each bucket,
    interrupted where none is known."""
    buckets: dict[int, list[float]] = {}
    for at, value in points:
        buckets.setdefault(min(BUCKETS - 1, max(0, int((at - now + seen) / seen * BUCKETS))), []).append(value)
    bridged = max(BRIDGED, BRIDGED * BUCKET * BUCKETS / seen)
    drawn, before = "", -BUCKETS
    for place, values in sorted(buckets.items()):
        for y in dict.fromkeys(_height(value, low, high) for value in (min(values), max(values))):
            drawn += f"{'L' if place - before <= bridged else 'M'}{place} {y}"
            before = place
        drawn += "h1"
    return drawn


def _height(value: float, low: float, high: float) -> int:
    """From the top of the frame, with room for the stroke."""
    share = (value - low) / (high - low) if high > low else 0.5
    return round(4 + (HEIGHT - 8) * (1 - min(1.0, max(0.0, share))))
