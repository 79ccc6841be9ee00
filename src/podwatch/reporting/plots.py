"""The plots of the page: the last day of the run as inline SVG. Pure: moments in, HTML out.

An SVG holds shapes only; every figure is also text beside it, so that the plots need neither colours nor eyes, and a
reader's text size applies. The style is in reporting/page.py.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from podwatch.client.terminal_text import BEFORE_UNIT, NO_BREAK
from podwatch.client.times_and_sizes import gib, local, size, span
from podwatch.policy.overall_status import TrainingState as Use
from podwatch.recording.last_day import DAY, Moment
from podwatch.reporting.html import Html, joined, tag

LONGEST_GAP: Final = 180.0
"""Seconds between two moments; with more, no podwatch ran."""
BUCKET: Final = 480.0
"""Seconds that share one place of a line: two pixels of a phone."""
BUCKETS: Final = int(DAY // BUCKET)
HEIGHT: Final = 100
STRIP_HEIGHTS: Final = {Use.RUNNING: 100, Use.EVALUATING: 100, Use.RECOVERING: 70, Use.DOWN: 45, Use.STOPPED: 20}
"""The state as height too: a colour alone is not enough. Finished is as stopped; unknown has none."""
LEAST_WIDTH: Final = 5.0
"""Minutes: a shorter outage would be too narrow to see."""
STARTS_SHOWN: Final = 8
WORDS: Final = {Use.UNKNOWN: "not observed"}


def plots(moments: Sequence[Moment], now: float) -> Html:
    """The strip and the plots of the day before ``now`` (epoch seconds); ``moments`` oldest first."""
    moments = [moment for moment in moments if now - DAY <= moment.at <= now]
    if not moments:
        return tag("p", "Nothing yet: podwatch writes one point a minute.")
    drawn = (
        strip(moments, now),
        *_gpus(moments, now),
        _disk(moments, now),
        _paces(moments, now),
        _figure("reward", moments, now),
        _figure("loss", moments, now),
    )
    axis = tag("p", tag("span", "24 h ago"), tag("span", "12 h ago"), tag("span", "now"), class_="axis")
    return joined(*drawn, axis)


# -- the strip -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """Epoch seconds from ``begin`` to ``end`` of one use."""

    use: Use
    begin: float
    end: float


def segments(moments: Sequence[Moment], now: float) -> tuple[Segment, ...]:
    """The day without gaps: what lies between two moments that are too far apart is unknown."""
    found: list[Segment] = []

    def put(use: Use, begin: float, end: float) -> None:
        if end <= begin:
            return
        if found and found[-1].use is use:
            found[-1] = Segment(use, found[-1].begin, end)
        else:
            found.append(Segment(use, begin, end))

    put(Use.UNKNOWN, now - DAY, moments[0].at if moments else now)
    for moment, end in zip(moments, (*(m.at for m in moments[1:]), now), strict=True):
        seen = end if end - moment.at <= LONGEST_GAP else moment.at
        put(_use(moment.state), moment.at, seen)
        put(Use.UNKNOWN, seen, end)
    return tuple(found)


def _use(name: str) -> Use:
    return _USES.get(name, Use.UNKNOWN)


_USES: Final = {str(use): use for use in Use} | {
    "starting": Use.RECOVERING,
    "gave-up": Use.DOWN,
    "blocked": Use.DOWN,
}


def strip(moments: Sequence[Moment], now: float) -> Html:
    """What the day was used for, with a line at each start of training."""
    day = segments(moments, now)
    shapes = [_block(one, now) for one in sorted(day, key=lambda s: s.use is not Use.RUNNING) if one.use in _DRAWN]
    starts = [moment.at for moment in moments if moment.started]
    marks = "".join(f"M{_minutes(at, now):.0f} 0v{HEIGHT}" for at in starts)
    if marks:
        shapes.append(tag("path", d=marks, class_="mark", vector_effect="non-scaling-stroke"))
    totals = {use: sum(s.end - s.begin for s in day if s.use is use) for use in Use}
    entries = [
        tag("li", _swatch(use), f"{WORDS.get(use, use)} {_joined(span(round(totals[use])))}")
        for use in (*_DRAWN, Use.UNKNOWN)
        if totals[use] >= 1
    ]
    if starts:
        shown = ", ".join(local(at, at)[:5] for at in starts[-STARTS_SHOWN:])
        times = f"{len(starts)} start{'s' if len(starts) > 1 else ''} of training, at {shown}"
        entries.append(tag("li", _swatch(None), times if len(starts) <= STARTS_SHOWN else f"{times} (the last ones)"))
    drawn = _svg(1440, shapes, "strip")
    return tag(
        "figure", tag("figcaption", "What the last 24 h were used for"), drawn, tag("ul", *entries, class_="key")
    )


_DRAWN: Final = (Use.RUNNING, Use.RECOVERING, Use.DOWN, Use.STOPPED, Use.EVALUATING, Use.FINISHED)


def _minutes(at: float, now: float) -> float:
    return (at - now + DAY) / 60


def _block(one: Segment, now: float) -> Html:
    begin, width = _minutes(one.begin, now), (one.end - one.begin) / 60
    if one.use is not Use.RUNNING:
        width = max(width, LEAST_WIDTH)
        begin = min(begin, 1440 - width)
    height = STRIP_HEIGHTS.get(one.use, 20)
    return tag("rect", class_=f"u-{one.use}", x=f"{begin:.1f}", y=HEIGHT - height, width=f"{width:.1f}", height=height)


def _swatch(use: Use | None) -> Html:
    if use is None:
        shape = tag("path", d="M5 0v100", class_="mark", vector_effect="non-scaling-stroke")
    else:
        height = 0 if use is Use.UNKNOWN else STRIP_HEIGHTS.get(use, 20)
        shape = tag("rect", class_=f"u-{use}", x=0, y=HEIGHT - height, width=10, height=height)
    return _svg(10, [shape], "swatch")


# -- lines -----------------------------------------------------------------------------------------------------------

Points = Sequence[tuple[float, float]]
"""(epoch seconds, value), oldest first."""


def _gpus(moments: Sequence[Moment], now: float) -> list[Html]:
    points: dict[int, list[tuple[float, float]]] = {}
    totals: dict[int, float] = {}
    for moment in moments:
        for index, used, total in moment.gpus:
            points.setdefault(index, []).append((moment.at, float(used)))
            totals[index] = max(totals.get(index, 0.0), float(total))
    return [_gpu(index, points[index], totals[index], now) for index in sorted(points)]


def _gpu(index: int, points: Points, total: float, now: float) -> Html:
    values = [value for _, value in points]
    low, high, now_used, full = (gib(value) for value in (min(values), max(values), values[-1], total))
    text = f"GPU {index} memory: {now_used} of {full} (lowest {low}, highest {high})"
    return _chart(text, points, now, low=0.0, high=total)


def _disk(moments: Sequence[Moment], now: float) -> Html:
    points = [(m.at, float(m.disk[0])) for m in moments if m.disk is not None]
    if not points:
        return Html("")
    used, capacity = next(m.disk for m in reversed(moments) if m.disk is not None)
    need = next((m.next_save for m in reversed(moments) if m.next_save), None)
    text = f"Disk: {size(used)} of {size(capacity)} used"
    if need is None:
        return _chart(text, points, now, low=0.0, high=float(capacity))
    text += f". Above the dashed line the next save ({size(need)}) does not fit"
    return _chart(text, points, now, low=0.0, high=float(capacity), level=float(capacity - need))


def paces(moments: Sequence[Moment]) -> list[tuple[float, float]]:
    """Seconds per step between two steps of one start, at the time of the second."""
    found: list[tuple[float, float]] = []
    last: Moment | None = None
    for moment in moments:
        if moment.started or _use(moment.state) is not Use.RUNNING:
            last = None
        elif moment.step is not None and moment.step_at is not None:
            if last is None or last.step is None or last.step_at is None or moment.step < last.step:
                last = moment
            elif moment.step > last.step and moment.step_at > last.step_at:
                found.append((moment.at, (moment.step_at - last.step_at) / (moment.step - last.step)))
                last = moment
    return found


def _paces(moments: Sequence[Moment], now: float) -> Html:
    points = paces(moments)
    if not points:
        return Html("")
    values = [value for _, value in points]
    last, usual, low, high = (_seconds(v) for v in (values[-1], median(values), min(values), max(values)))
    text = f"Step time: {last} (usually {usual}, {low} to {high})"
    return _chart(text, points, now, low=0.0, high=max(values))


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s" if value < 600 else span(value)


def _figure(name: str, moments: Sequence[Moment], now: float) -> Html:
    read: Callable[[Moment], float | None] = lambda moment: getattr(moment, name)  # noqa: E731
    points = [(m.at, value) for m in moments if (value := read(m)) is not None and math.isfinite(value)]
    if not points:
        return Html("")
    values = [value for _, value in points]
    low, high = min(values), max(values)
    text = f"{name.capitalize()}: {values[-1]:.4g} (lowest {low:.4g}, highest {high:.4g})"
    return _chart(text, points, now, low=low, high=high)


def _chart(text: str, points: Points, now: float, *, low: float, high: float, level: float | None = None) -> Html:
    """A line in its frame, and dashed at ``level``."""
    line = tag("path", d=path(points, now, low=low, high=high), class_="line", vector_effect="non-scaling-stroke")
    shapes = [line]
    if level is not None:
        y = _height(level, low, high)
        shapes.append(tag("path", d=f"M0 {y}h{BUCKETS}", class_="level", vector_effect="non-scaling-stroke"))
    return tag("figure", tag("figcaption", _joined(text)), _svg(BUCKETS, shapes, "chart"))


def path(points: Points, now: float, *, low: float, high: float) -> str:
    """The line as SVG path data: the lowest and highest value of each bucket, interrupted where one is empty."""
    buckets: dict[int, list[float]] = {}
    for at, value in points:
        place = min(BUCKETS - 1, max(0, int((at - now + DAY) // BUCKET)))
        buckets.setdefault(place, []).append(value)
    drawn: list[str] = []
    before, level = -BUCKETS, -1
    for place, values in sorted(buckets.items()):
        first, *more = dict.fromkeys(_height(value, low, high) for value in _ends(values))
        if place - before > _BRIDGED:
            drawn.append(f"M{place} {first}")
        elif first != level:
            drawn.append(f"L{place} {first}")
        elif drawn[-1].startswith("H"):
            drawn.pop()
        drawn += [f"H{place + 1}", *(f"V{y}" for y in more)]
        before, level = place, (first, *more)[-1]
    return "".join(drawn)


_BRIDGED: Final = 4
"""Buckets without a value that a line crosses: steps and figures come less often than once a minute."""


def _ends(values: Sequence[float]) -> Iterable[float]:
    """The lowest and the highest value in the order of time."""
    low, high = values.index(min(values)), values.index(max(values))
    return (values[low], values[high]) if low <= high else (values[high], values[low])


def _height(value: float, low: float, high: float) -> int:
    """From the top of the frame, with room for the stroke."""
    share = (value - low) / (high - low) if high > low else 0.5
    return round(4 + (HEIGHT - 8) * (1 - min(1.0, max(0.0, share))))


def _svg(width: int, shapes: Iterable[Html], kind: str) -> Html:
    return tag(
        "svg",
        *shapes,
        class_=kind,
        viewBox=f"0 0 {width} {HEIGHT}",
        preserveAspectRatio="none",
        aria_hidden="true",
        focusable="false",
    )


def _joined(text: str) -> str:
    """A number and its unit stay on one line."""
    return BEFORE_UNIT.sub(NO_BREAK, text)
