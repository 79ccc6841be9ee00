"""The plots of the page: what the lines show of a day, worked out by hand."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.status_document import TrainingState
from podwatch.recording.last_day import DAY, Moment
from podwatch.reporting.html import Html
from podwatch.reporting.plots import BUCKET, BUCKETS, HEIGHT, path, plots, step_times
from tests.reporting.test_page import Read
from tests.support.examples import examples

NOW = 1_769_832_000.0
GIB = 1 << 30
Moments = list[Moment]


def minutes(first: float, last: float, state: str = "running", **known: object) -> Moments:
    """One moment a minute, from ``first`` to ``last`` minutes before now, the last one left out."""
    return [Moment(NOW - 60 * m, state, **known) for m in range(int(first), int(last), -1)]  # type: ignore[arg-type]


def text_of(html: Html) -> str:
    return " ".join("".join(Read(html).text).replace("\u00a0", " ").split())


def test_nothing_written_yet() -> None:
    assert "podwatch writes one point a minute" in plots((), NOW)
    assert "podwatch writes one point a minute" in plots([Moment(NOW - 2 * DAY, "running")], NOW)


def test_a_short_outage_can_be_seen() -> None:
    moments = [*minutes(100, 50), Moment(NOW - 3000, "starting", started=True), *minutes(49, 0)]
    html = plots(moments, NOW)
    assert "Training: running; 1 start of training" in text_of(html)
    assert f" {HEIGHT - 4}h1L" in html, "down and up again"
    assert f" {HEIGHT - 4}" not in plots(minutes(100, 0), NOW)


def test_figures_are_text_too() -> None:
    moments = minutes(
        60, 0, gpus=((0, 70 * GIB, 80 * GIB),), disk=(600 * 10**9, 10**12), next_save=44 * 10**9, reward=0.25
    )
    moments[10] = replace(moments[10], gpus=((0, 0, 80 * GIB),), reward=0.5)
    text = text_of(plots(moments, NOW))
    assert "GPU 0 memory: 70.0 GiB of 80.0 GiB (lowest 0.0 GiB, highest 70.0 GiB)" in text
    assert "Disk: 600 GB of 1 TB used; the next save needs 44 GB" in text
    assert "Reward: 0.25 (lowest 0.25, highest 0.5)" in text
    assert "Loss" not in text


def test_step_times_are_those_of_one_start() -> None:
    def at(minute: int, step: int, second: float, state: str = "running") -> Moment:
        return Moment(NOW - 60 * minute, state, step=step, step_at=NOW - second)

    moments = [
        at(20, 10, 1200), at(19, 10, 1200), at(18, 11, 1100), at(16, 13, 960),
        at(15, 13, 960, "starting"), at(14, 12, 830), at(13, 13, 780),
    ]  # fmt: skip
    assert step_times(moments) == [(NOW - 1080, 100.0), (NOW - 960, 70.0), (NOW - 780, 50.0)]


def test_the_axis_begins_with_the_data() -> None:
    assert "1 h 40 min ago" in text_of(plots(minutes(100, 0), NOW))
    assert "1 h ago" in text_of(plots(minutes(5, 0), NOW)), "an hour at least"
    assert "24 h ago" in text_of(plots(minutes(1440, 0), NOW))


def test_a_line_keeps_its_dips_and_has_holes() -> None:
    flat = [(NOW - DAY + 60 * m, 80.0) for m in range(24)]
    assert path(flat, NOW, 0, 80) == "M0 4h1L1 4h1L2 4h1"
    flat[10] = (flat[10][0], 0.0)
    assert path(flat, NOW, 0, 80) == f"M0 4h1L1 {HEIGHT - 4}L1 4h1L2 4h1"
    holes = [(NOW - DAY, 80.0), (NOW - DAY + 20 * BUCKET, 80.0)]
    assert path(holes, NOW, 0, 80) == "M0 4h1M20 4h1"


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(
        st.builds(
            Moment,
            st.floats(NOW - 2 * DAY, NOW + DAY),
            st.sampled_from([*map(str, TrainingState), "<script>", ""]),
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
            assert all(0 <= float(n) <= BUCKETS for n in numbers.split()), (kind, data)


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_plots_of_a_day_are_small(gpus: int) -> None:
    moments = minutes(1440, 0, gpus=tuple((n, 70 * GIB, 80 * GIB) for n in range(gpus)), disk=(1, 2), next_save=1)
    assert len(plots(moments, NOW)) < 20_000
