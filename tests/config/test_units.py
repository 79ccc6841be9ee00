from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ByteSize, TypeAdapter

from podwatch.config.units import (
    exact_size,
    format_duration,
    format_ratio,
    parse_duration,
    parse_ratio,
    parse_size,
)
from podwatch.domain.times import size
from tests.support.examples import examples


@settings(deadline=None, max_examples=examples(300))
@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_durations_come_back_exactly(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@settings(deadline=None, max_examples=examples(300))
@given(st.integers(min_value=0, max_value=1 << 60))
def test_sizes_come_back_exactly(size: int) -> None:
    assert parse_size(exact_size(size)) == size


@settings(deadline=None, max_examples=examples(300))
@given(st.floats(min_value=0, max_value=1, allow_nan=False))
def test_ratios_come_back_exactly(ratio: float) -> None:
    assert parse_ratio(format_ratio(ratio)) == ratio


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", 2), ("35m", 2100), ("1h30m", 5400), ("250ms", 0.25), ("1.5 h", 5400), (3, 3), ("10", 10), ("2d", 172800)],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["2 parsec", "s", "", "-3s", -3, True, "1h nonsense", float("inf"), "nan", None, [1]])
def test_no_durations(text: object) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"), [("47GB", 47 * 10**9), ("1GiB", 1 << 30), ("1.5 MB", 1_500_000), (7, 7), ("512 kib", 512 * 1024)]
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5 kbit", True, "9007199254740993B", "1e9"])
def test_pydantics_own_sizes_are_others(text: object) -> None:
    """So podwatch keeps its parser: a change of what a configuration means is none of a library's."""

    def read(parse: Callable[[object], object]) -> object:
        try:
            return parse(text)
        except ValueError:
            return None

    assert read(parse_size) != read(TypeAdapter(ByteSize).validate_python)


@pytest.mark.parametrize("text", ["47 gigs", "GB", "", -1, True, "nan", "1h"])
def test_no_sizes(text: object) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def test_a_bare_85_is_refused_because_it_looks_like_a_percentage() -> None:
    assert parse_ratio("85%") == parse_ratio(0.85) == 0.85
    for text in (85, "85", "120%", "x%", "-1%"):
        with pytest.raises(ValueError):
            parse_ratio(text)


def test_shown_sizes_are_short() -> None:
    assert [size(n) for n in (999, 47_000_000_000, 1_234_000)] == ["999 B", "47 GB", "1.23 MB"]
