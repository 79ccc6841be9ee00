"""Change a few values of a TOML file and keep comments, order and layout.

The text is edited by line and column, then parsed again. Unless the result holds exactly the requested values, an error
is raised. This check makes a TOML-editing dependency unnecessary.
"""

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from podwatch.config.problems import key_lines
from podwatch.domain.errors import ConfigurationError

Path = tuple[str, ...]


def set_values(text: str, changes: Mapping[Path, Any], *, where: str = "") -> str:
    """``text`` with these values set, by key path. ConfigurationError (naming ``where``) if that would change anything
    else, for example for a key inside an inline table."""
    wanted = tomllib.loads(text)
    for path, value in changes.items():
        _put(wanted, path, value, where)
    newline = "\r\n" if "\r\n" in text else "\n"
    edited = text.replace("\r\n", "\n")
    for path, value in changes.items():
        edited = _set(edited, path, value)
    try:
        same = tomllib.loads(edited) == wanted
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        keys = ", ".join(".".join(path) for path in changes)
        raise ConfigurationError(
            f"podwatch cannot change {keys} in this file: it does not edit this form of TOML",
            where=where,
            fix="; ".join(f"write {'.'.join(path)} = {literal(value)}" for path, value in changes.items()),
        )
    return edited.replace("\n", newline)


def literal(value: Any) -> str:
    """A TOML value on one line: a string, boolean or number, or a list or table of these."""
    if isinstance(value, str):
        # JSON escapes are valid TOML except for surrogate pairs (avoided by ensure_ascii=False) and DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(name)} = {literal(item)}" for name, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(literal(item) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _key(name: str) -> str:
    plain = name.isascii() and bool(name) and all(c.isalnum() or c in "_-" for c in name)
    return name if plain else literal(name)


def _put(document: dict[str, Any], path: Path, value: Any, where: str) -> None:
    table = document
    for name in path[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{name} is not a table", where=where, fix="correct the file by hand")
        table = inner
    table[path[-1]] = list(value) if isinstance(value, tuple) else value


def _set(text: str, path: Path, value: Any) -> str:
    lines = text.split("\n")
    known = key_lines(text)
    at = known.get(path)
    if at is not None and lines[at - 1].lstrip().startswith("["):  # a table of its own: key by key
        for name, item in value.items() if isinstance(value, Mapping) else ():
            text = _set(text, (*path, name), item)
        return text
    if at is not None:
        first = at - 1
        column = _after_equals(lines[first])
        last, end, comments = _value_end(lines, first, column)
        rest = lines[last][end:]
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        kept = [f"{indent}{comment}" for comment in comments]
        return "\n".join([*lines[:first], *kept, f"{lines[first][:column]} {literal(value)}{rest}", *lines[last + 1 :]])
    new = f"{_key(path[-1])} = {literal(value)}"
    table = known.get(path[:-1])
    if table is not None and lines[table - 1].lstrip().startswith("["):
        return "\n".join([*lines[:table], new, *lines[table:]])
    header = "[" + ".".join(_key(name) for name in path[:-1]) + "]"
    break_ = "" if text.endswith("\n") or not text else "\n"
    return f"{text}{break_}\n{header}\n{new}\n"


def _after_equals(line: str) -> int:
    """The column after the ``=`` of a key line. Keys can be quoted."""
    quote = ""
    for column, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "=":
            return column + 1
    raise AssertionError("a key line without =")


def _value_end(lines: list[str], first: int, column: int) -> tuple[int, int, list[str]]:
    """(line, column) after the value that starts there, and the comments inside it."""
    depth, quote = 0, ""
    comments: list[str] = []
    end = column
    for number in range(first, len(lines)):
        line = lines[number]
        position = column if number == first else 0
        while position < len(line):
            character = line[position]
            if quote:
                if character == "\\" and quote[0] == '"':
                    position += 1
                elif line.startswith(quote, position):
                    position += len(quote) - 1
                    quote = ""
            elif character == "#":
                if depth:
                    comments.append(line[position:].rstrip())
                break
            elif character in "\"'":
                triple = character * 3
                quote = triple if line.startswith(triple, position) else character
                position += len(quote) - 1
            elif character in "[{":
                depth += 1
            elif character in "]}":
                depth -= 1
            position += 1
            if not character.isspace():
                end = min(position, len(line))
        if depth <= 0 and len(quote) != 3:
            return number, end if number > first or end > column else len(line), comments
        end = 0
    return len(lines) - 1, len(lines[-1]), comments
