"""Line numbers of the keys in a TOML file, for error messages: ``tomllib`` does not report them."""

import re

_HEADER = re.compile(r"^\s*\[\[?\s*(?P<name>[^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(
    r"""^\s*(?P<key>(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_PIECE = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line numbers (from 1) by key path, tables included. Broken files give what can be read."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    open_value = _Value()
    for number, line in enumerate(text.splitlines(), 1):
        if open_value.unfinished:
            open_value.feed(line)
            continue
        if header := _HEADER.match(line):
            table = _pieces(header["name"])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault(table + _pieces(key["key"]), number)
            open_value = _Value()
            open_value.feed(line[key.end() :])
    return found


def line_of(lines: dict[tuple[str, ...], int], path: tuple[str, ...]) -> int | None:
    """The line of ``path``, else of its nearest parent table."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def _pieces(dotted: str) -> tuple[str, ...]:
    return tuple(piece.strip("\"'") for piece in _PIECE.findall(dotted))


class _Value:
    """Tracks whether a value continues on the next line."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""

    @property
    def unfinished(self) -> bool:
        return self._depth > 0 or len(self._quote) == 3

    def feed(self, text: str) -> None:
        position = 0
        while position < len(text):
            character = text[position]
            if self._quote:
                if character == "\\" and self._quote[0] == '"':
                    position += 1
                elif text.startswith(self._quote, position):
                    position += len(self._quote) - 1
                    self._quote = ""
            elif character == "#":
                break
            elif character in "\"'":
                triple = character * 3
                self._quote = triple if text.startswith(triple, position) else character
                position += len(self._quote) - 1
            elif character in "[{":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
            position += 1
        if len(self._quote) == 1:
            self._quote = ""
