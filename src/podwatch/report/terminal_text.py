"""Text in a terminal: how many columns it takes, lines of a width, bars. Standard library only.

Some characters take two columns (Chinese, Japanese, Korean, emoji) and some none (combining marks). textwrap counts
characters, and its patterns alone take `podwatch status` longer than this module.
"""

import re
from collections.abc import Iterator

BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|(?:[kMGTP]?B|GiB|[kMGT]?B/s|s|min|h|d|C)(?!\w))")
NO_BREAK = "\u00a0"
FULL, EMPTY, CUT = "\u2588", "\u2591", "\u2026"
"""What a bar and a cut text are made of; ASCII has other characters for them."""


def columns_of(text: str) -> int:
    """How many columns a terminal needs for ``text``, which contains no control characters."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me", "Cf")
        else 2 if unicodedata.east_asian_width(c) in "WF"
        else 1
        for c in text
    )  # fmt: skip


def wrap(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most ``width`` columns; a number and its unit stay on one line. ``first`` and ``rest``: what the
    first line and the others begin with. No line for an empty text."""
    lines: list[str] = []
    line, empty = first, True
    for word in re.findall(r" *[^ ]+", BEFORE_UNIT.sub(NO_BREAK, text)):
        if not empty and columns_of(line) + columns_of(word) > width:
            lines.append(line)
            line, empty = rest, True
        if empty:
            *whole, end = _pieces(word.lstrip(" "), max(2, width - columns_of(rest)))
            lines += [f"{first if not lines and n == 0 else rest}{piece}" for n, piece in enumerate(whole)]
            line, empty = (rest if whole else line) + end, False
        else:
            line += word
    return [shown.replace(NO_BREAK, " ") for shown in ([*lines, line] if not empty else lines)]


def _pieces(word: str, width: int) -> Iterator[str]:
    """A word that is wider than a line, in pieces; the word itself otherwise."""
    while columns_of(word) > width:
        piece = _head(word, width)
        yield piece
        word = word[len(piece) :]
    yield word


def _head(text: str, width: int) -> str:
    """The longest beginning of ``text`` that fits into ``width`` columns."""
    used = 0
    for end, character in enumerate(text):
        used += columns_of(character)
        if used > width:
            return text[:end]
    return text


def cut(text: str, width: int) -> str:
    """``text``, or its beginning and an ellipsis if it is wider than ``width`` columns."""
    return text if columns_of(text) <= width else _head(text, width - 1).rstrip() + CUT


def bar(share: float, width: int) -> str:
    """A bar for a share from 0 to 1. It is full only at 1, and empty only near 0."""
    filled = round(min(1.0, max(0.0, share)) * width)
    filled = min(filled, width - 1) if share < 1 else filled
    filled = max(filled, 1) if share >= 0.01 else filled
    return FULL * filled + EMPTY * (width - filled)


# -- a screen that is painted again and again ------------------------------------------------------------------------

HOME, ERASE_LINE, ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def fit(text: str, columns: int, rows: int) -> str:
    """``text`` cut at its end to a window, so that its first line is visible. The last line then shows how many lines
    are hidden. Without a final newline, which would scroll the first line out of the window. A size of 0 or less is
    unknown: no limit."""
    lines = text.rstrip("\n").split("\n")
    if rows <= 0 or columns <= 0 or sum(_height(line, columns) for line in lines) <= rows:
        return "\n".join(lines)
    shown, free = [], rows - 1
    for line in lines:
        free -= _height(line, columns)
        if free < 0:
            break
        shown.append(line)
    if not shown:  # no space for the verdict and one more line
        return _COLOUR.sub("", lines[0])[: columns * rows]
    hidden = len(lines) - len(shown)
    note = f"({hidden} more line{'' if hidden == 1 else 's'} hidden: enlarge the window)"
    return "\n".join([*shown, note[:columns]])


def _height(line: str, columns: int) -> int:
    """Number of terminal rows that ``line`` takes."""
    return max(1, -(-columns_of(_COLOUR.sub("", line)) // columns))


def repaint(text: str, columns: int) -> str:
    """What paints ``text``, which fits into the window, over the frame before: nothing is cleared first, so nothing
    flickers. A line that ends in the last column is not erased behind: some terminals would erase its last character.
    """
    *lines, last = text.split("\n")
    ends = (bool(columns) and columns_of(_COLOUR.sub("", line)) % columns == 0 for line in lines)
    above = (line + ("" if line and full else ERASE_LINE) for line, full in zip(lines, ends, strict=True))
    return HOME + "\n".join([*above, ERASE_BELOW + last])


# -- encodings -------------------------------------------------------------------------------------------------------


def encodable(text: str, encoding: str) -> str:
    """``text`` with what ``encoding`` cannot show replaced: bars and the ellipsis by ASCII, other characters by "?"."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        plain = text.replace(FULL, "#").replace(EMPTY, ".").replace(CUT, "~")
        return plain.encode(encoding, "replace").decode(encoding)
    return text
