"""The plots of the page: what the strip and the lines show of a day, worked out by hand."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.policy.overall_status import TrainingState as Use
from podwatch.recording.last_day import DAY, Moment
from podwatch.reporting.html import Html
from podwatch.reporting.plots import BUCKET, BUCKETS, HEIGHT, Segment, paces, path, plots, segments
from tests.reporting.test_page import Read
from tests.support.examples import examples

NOW = 1_769_832_000.0
GIB = 1 << 30
Moments = list[Moment]


def minutes(first: float, last: float, use: Use, **known: object) -> Moments:
    """One moment a minute, from ``first`` to ``last`` minutes before now, the last one left out."""
    return [Moment(NOW - 60 * m, str(use), **known) for m in range(int(first), int(last), -1)]  # type: ignore[arg-type]


def day() -> Moments:
    """Training for 10 h, a death of 4 min, training for 1 h 56 min, no podwatch for 2 h, stopped for 2 h."""
    return [
        *minutes(960, 360, Use.RUNNING),
        Moment(NOW - 60 * 360, str(Use.RECOVERING)),
        Moment(NOW - 60 * 359, str(Use.RECOVERING), started=True),
        *minutes(358, 356, Use.RECOVERING),
        *minutes(356, 240, Use.RUNNING),
        *minutes(120, 0, Use.STOPPED),
    ]


def text_of(html: Html) -> str:
    return " ".join("".join(Read(html).text).replace("\u00a0", " ").split())


def test_a_day_by_hand() -> None:
    assert segments(day(), NOW) == (
        Segment(Use.UNKNOWN, NOW - DAY, NOW - 60 * 960),
        Segment(Use.RUNNING, NOW - 60 * 960, NOW - 60 * 360),
        Segment(Use.RECOVERING, NOW - 60 * 360, NOW - 60 * 356),
        Segment(Use.RUNNING, NOW - 60 * 356, NOW - 60 * 241),
        Segment(Use.UNKNOWN, NOW - 60 * 241, NOW - 60 * 120),
        Segment(Use.STOPPED, NOW - 60 * 120, NOW),
    )
    text = text_of(plots(day(), NOW))
    assert "running 11 h 55 min" in text
    assert "recovering 4 min" in text
    assert "stopped 2 h" in text
    assert "not observed 10 h 1 min" in text
    assert "1 start of training, at " in text


def test_a_short_outage_can_be_seen() -> None:
    moments = [*minutes(100, 50, Use.RUNNING), Moment(NOW - 3000, "down"), *minutes(49, 0, Use.RUNNING)]
    width, _swatch = re.findall(r'<rect class="u-down" [^>]*width="([\d.]+)"', plots(moments, NOW))
    assert float(width) >= 5
    assert "down 60 s" in text_of(plots(moments, NOW))


def test_nothing_written_yet() -> None:
    assert "podwatch writes one point a minute" in plots((), NOW)
    assert "podwatch writes one point a minute" in plots([Moment(NOW - 2 * DAY, "running")], NOW)


def test_figures_are_text_too() -> None:
    moments = minutes(
        60,
        0,
        Use.RUNNING,
        gpus=((0, 70 * GIB, 80 * GIB),),
        disk=(600 * 10**9, 10**12),
        next_save=44 * 10**9,
        reward=0.25,
    )
    moments[10] = replace(moments[10], gpus=((0, 0, 80 * GIB),), reward=0.5)
    text = text_of(plots(moments, NOW))
    assert "GPU 0 memory: 70.0 GiB of 80.0 GiB (lowest 0.0 GiB, highest 70.0 GiB)" in text
    assert "Disk: 600 GB of 1 TB used. Above the dashed line the next save (44 GB) does not fit" in text
    assert "Reward: 0.25 (lowest 0.25, highest 0.5)" in text
    assert "Loss" not in text


def test_the_dashed_line_is_where_the_next_save_no_longer_fits() -> None:
    html = plots(minutes(60, 0, Use.RUNNING, disk=(500, 1000), next_save=250), NOW)
    (level,) = re.findall(r'd="M0 (\d+)h\d+" class="level"', html)
    assert int(level) == round(4 + (HEIGHT - 8) * 0.25)


def test_step_times_are_those_of_one_start() -> None:
    def at(minute: int, step: int, second: float, **more: object) -> Moment:
        return Moment(NOW - 60 * minute, "running", step=step, step_at=NOW - second, **more)  # type: ignore[arg-type]

    moments = [
        at(20, 10, 1200), at(19, 10, 1200), at(18, 11, 1100), at(16, 13, 960),
        at(15, 12, 900, started=True), at(14, 12, 830), at(13, 13, 780),
    ]  # fmt: skip
    assert paces(moments) == [(NOW - 1080, 100.0), (NOW - 960, 70.0), (NOW - 780, 50.0)]


def test_a_line_keeps_its_dips_and_has_holes() -> None:
    flat = [(NOW - DAY + 60 * m, 80.0) for m in range(480)]
    assert path(flat, NOW, low=0, high=80) == "M0 4H60"
    flat[100] = (flat[100][0], 0.0)
    assert path(flat, NOW, low=0, high=80) == f"M0 4H13V{HEIGHT - 4}L13 4H60"
    holes = [(NOW - DAY, 80.0), (NOW - DAY + 20 * BUCKET, 80.0)]
    assert path(holes, NOW, low=0, high=80) == "M0 4H1M20 4H21"


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(
        st.builds(
            Moment,
            st.floats(NOW - 2 * DAY, NOW + DAY),
            st.sampled_from([*map(str, Use), "<script>", ""]),
            st.booleans(),
            st.lists(st.tuples(st.integers(0, 8), st.integers(0, 10**11), st.integers(1, 10**11))).map(tuple),
            st.none() | st.tuples(st.integers(0, 10**13), st.integers(0, 10**13)),
            st.none() | st.integers(0, 10**13),
            st.none() | st.integers(0, 10**6),
            st.none() | st.floats(NOW - DAY, NOW),
            st.none() | st.floats(),
            st.none() | st.floats(),
        ),
        max_size=40,
    )
)
def test_any_moments_are_drawn_within_the_frame(moments: Moments) -> None:
    moments.sort(key=lambda moment: moment.at)
    html = plots(moments, NOW)
    Read(html)
    assert "<script>" not in html
    for data in re.findall(r' d="([^"]*)"', html):
        for kind, numbers in re.findall(r"([MLHVvh])([-\d. ]+)", data):
            assert all(0 <= float(n) <= max(BUCKETS, 1440) for n in numbers.split()), (kind, data)
    if moments and any(NOW - DAY <= m.at <= NOW for m in moments):
        kept = [m for m in moments if NOW - DAY <= m.at <= NOW]
        shown = segments(kept, NOW)
        assert shown[0].begin == NOW - DAY
        assert shown[-1].end == NOW
        assert all(a.end == b.begin and a.use is not b.use for a, b in pairwise(shown))


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_plots_of_a_day_are_small(gpus: int) -> None:
    moments = minutes(
        1440, 0, Use.RUNNING, gpus=tuple((n, 70 * GIB, 80 * GIB) for n in range(gpus)), disk=(1, 2), next_save=1
    )
    assert len(plots(moments, NOW)) < 8_000
