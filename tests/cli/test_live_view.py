"""What fits into a window: the verdict always, and how many lines do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.report.status import build_status
from podwatch.report.status_screen import render
from podwatch.report.terminal_text import fit, repaint
from tests.report import views
from tests.support.ptys import Screen

TEXT = "VERDICT\n\n" + "".join(f"line {n}\n" for n in range(20))


def test_what_fits_is_shown_whole_and_does_not_scroll():
    assert fit(TEXT, 80, 22) == TEXT.rstrip("\n")
    assert fit(TEXT, 0, 0) == TEXT.rstrip("\n"), "a size that is not known is no limit"


def test_the_rest_is_cut_at_the_bottom_and_counted():
    lines = fit(TEXT, 80, 10).split("\n")
    assert (len(lines), lines[0], lines[8]) == (10, "VERDICT", "line 6")
    assert lines[9] == "(13 more lines hidden: enlarge the window)"
    assert fit("a\nb\nc\n", 80, 2).split("\n") == ["a", "(2 more lines hidden: enlarge the window)"]
    assert "(1 more line hidden" in fit("a\n" + "b" * 100, 80, 2)


def test_colours_take_no_room():
    red = "\x1b[31m" + "x" * 80 + "\x1b[0m\nb\n"
    assert fit(red, 80, 2) == red.rstrip("\n")


@given(st.sampled_from(sorted(views.ALL)), st.integers(1, 140), st.integers(1, 60), st.booleans())
def test_the_verdict_is_in_view_in_any_window(name, columns, rows, colour):
    text = render(build_status(views.ALL[name]()), width=columns, colour=colour)
    first = render(build_status(views.ALL[name]()), width=columns).split("\n")[0]
    screen = Screen(columns, rows)
    screen.write(fit(text, columns, rows).replace("\n", "\r\n"))
    shown = "".join(line.ljust(columns) for line in screen.lines)
    assert shown.startswith(first[: columns * rows])


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (50, 10)])
def test_hidden_and_shown_lines_are_all_lines(size):
    text = render(build_status(views.ALL["gave-up"]()), width=size[0])
    lines = fit(text, *size).split("\n")
    assert len(lines) <= size[1]
    whole = text.rstrip("\n").split("\n")
    if len(whole) > size[1]:
        assert lines[:-1] == whole[: len(lines) - 1]
        assert lines[-1].startswith(f"({len(whole) - len(lines) + 1} more line")
    else:
        assert lines == whole


@given(
    st.lists(st.sampled_from(sorted(views.ALL)), min_size=1, max_size=4), st.integers(1, 140), st.integers(1, 60),
    st.booleans(),
)  # fmt: skip
def test_a_frame_painted_over_another_shows_the_same_as_on_an_empty_screen(names, columns, rows, colour):
    """Nothing of the frame before is left, and nothing scrolls."""
    screen, empty = Screen(columns, rows), Screen(columns, rows)
    for name in names:
        text = fit(render(build_status(views.ALL[name]()), width=columns, height=rows, colour=colour), columns, rows)
        screen.write(repaint(text, columns).replace("\n", "\r\n"))
    empty.write(text.replace("\n", "\r\n"))
    assert screen.lines == empty.lines


def test_a_line_up_to_the_last_column_is_not_erased_behind():
    assert repaint("full\npart\n\nend", 4) == "\x1b[Hfull\npart\n\x1b[K\n\x1b[Jend"
    assert repaint("abc\nend", 4) == "\x1b[Habc\x1b[K\n\x1b[Jend"
