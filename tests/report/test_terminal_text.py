"""Columns, lines and bars, with every kind of character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.report.terminal_text import CUT, EMPTY, FULL, bar, columns_of, cut, encodable, wrap

WORDS = st.text(st.sampled_from("ab1 -\u00e9\u4e2d\u6587\uff21\U0001f600e\u0301 "), max_size=60)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("", 0),
        ("abc", 3),
        ("\u00e9", 1),
        ("e\u0301", 1),
        ("\u4e2d\u6587", 4),
        ("\uff21", 2),
        ("\U0001f600", 2),
        ("\u2588", 1),
    ],
)
def test_columns(text, columns):
    assert columns_of(text) == columns


@given(WORDS, st.integers(4, 30))
def test_no_line_is_too_wide_and_no_word_is_lost(text, width):
    lines = wrap(text, width)
    assert all(line and columns_of(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@given(WORDS, st.integers(8, 30))
def test_every_line_begins_as_asked(text, width):
    lines = wrap(text, width, first="do: ", rest="    ")
    assert all(columns_of(line) <= width for line in lines)
    assert [line[:4] for line in lines] == ["do: ", "    ", *["    "] * len(lines)][: len(lines)]


def test_a_number_stays_with_its_unit_and_spaces_inside_a_line_stay():
    assert wrap("aa  bb 12 GB", 10) == ["aa  bb", "12 GB"]
    assert wrap("abcdefgh ij", 4) == ["abcd", "efgh", "ij"]
    assert wrap("", 10) == []


@given(WORDS, st.integers(2, 30))
def test_a_cut_text_says_so(text, width):
    shown = cut(text, width)
    assert columns_of(shown) <= width
    assert shown == text or shown.endswith(CUT)


@given(st.floats(-1, 2), st.integers(2, 30))
def test_a_bar_is_full_at_one_only(share, width):
    shown = bar(share, width)
    assert len(shown) == width
    assert (shown == FULL * width) == (share >= 1)
    assert (shown == EMPTY * width) == (share < 0.01)


def test_what_an_encoding_cannot_show_is_replaced():
    text = f"{FULL}{EMPTY} \u4e2d{CUT}"
    assert encodable(text, "utf-8") == text
    assert encodable(text, "ascii") == "#. ?~"
    assert encodable("caf\u00e9", "iso8859-1") == "caf\u00e9"
