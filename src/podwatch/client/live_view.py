"""Fit the status into a terminal window for ``status --watch``: the verdict is always visible."""

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def fit(text: str, columns: int, rows: int) -> str:
    """``text`` cut at its end to the window; the last line then shows how many lines are hidden. Without a final
    newline, which would scroll the first line out of the window. A size of 0 or less is unknown: no limit."""
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
    return max(1, -(-len(_COLOUR.sub("", line)) // columns))
