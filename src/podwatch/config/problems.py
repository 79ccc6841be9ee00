"""The problems of a configuration, each with its line of the file, worded so that the user can correct all of them at
once.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podwatch.config.setting_names import (
    env_name,
    is_credential_key,
    known_keys,
    known_sections,
    looks_secret,
    similar,
    suggest_key,
)
from podwatch.config.store_kinds import kind_of
from podwatch.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import ValidationError

# -- problems --------------------------------------------------------------------------------------------------------

_EXAMPLES = {"run_id": 'run_id = "my-run"', "trainer": "[trainer]", "trainer.output_dir": 'output_dir = "/app/outputs"'}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to correct. ``missing``: a required value is absent."""

    what: str
    where: str = ""
    fix: str = ""
    missing: bool = False

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}: {self.fix}" if self.fix else text


class ConfigurationProblems(ConfigurationError):  # noqa: N818 - several, so not "Error"
    """All problems of one configuration, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        first = self.problems[0]
        if len(self.problems) == 1:
            super().__init__(first.what, where=first.where, fix=first.fix)
        else:
            super().__init__(f"{len(self.problems)} problems in the configuration", fix="correct each of them")

    def __reduce__(self) -> tuple[type["ConfigurationProblems"], tuple[tuple[Problem, ...]]]:
        return ConfigurationProblems, (self.problems,)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return f"{self.what}:\n" + "\n".join(f"  {problem}" for problem in self.problems)


@dataclass(frozen=True, slots=True)
class Sources:
    """Which source holds which key, for the place named in a message."""

    path: Path | None
    lines: dict[tuple[str, ...], int]
    file: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)

    def where(self, key: str) -> str:
        if any(_covers(key, flag) for flag in self.flags):
            return "command line"
        if any(_covers(key, time) for time in self.times):
            return "PODWATCH_TEST_TIMES"
        for name in self.environment:
            if _covers(key, name):
                return env_name(name)
        if self.path is None:
            return "configuration"
        line = line_of(self.lines, tuple(key.split(".")))
        return f"{self.path}:{line}" if line else str(self.path)


def explain_errors(error: "ValidationError", sources: Sources) -> list[Problem]:
    """One problem per key, in the order of the file."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        path = tuple(str(piece) for piece in detail["loc"])
        key = _setting_of(path)
        if (inside := _in_list_of_tables(path)) and detail["type"] != "extra_forbidden":
            at, leaf, name = inside
            lacks = detail["type"] == "missing"
            what = f'"{leaf}" in {name} is missing' if lacks else _message(leaf, dict(detail), name)
            found = Problem(what, where=sources.where(at), fix=f"add {leaf} = ..." if lacks else "")
            problems.setdefault(at, found)
            continue
        if detail["type"] == "extra_forbidden" and is_credential_key(path[-1]):
            continue  # find_secrets reports it, with a better fix
        if detail["type"] == "extra_forbidden" and inside:
            at, leaf, name = inside
            what = f'unknown key "{leaf}" in {name}'
            problems[at] = Problem(what, where=sources.where(at), fix=_other_key(path))
        elif detail["type"] == "extra_forbidden":
            key = ".".join(path)
            problems[key] = Problem(f"unknown key {_name(key)}", where=sources.where(key), fix=suggest_key(path))
        elif detail["type"] == "missing":
            problems[key] = Problem(
                f"{_name(key)} is missing", where=sources.where(key), fix=f"add {_EXAMPLES.get(key, key)}", missing=True
            )
        elif key not in problems:
            problems[key] = Problem(_message(key, dict(detail)), where=sources.where(key))
    order = {key: _line(sources, tuple(key.split("."))) for key in problems}
    return [problems[key] for key in sorted(problems, key=lambda name: order[name])]


def find_secrets(data: dict[str, Any], lines: dict[tuple[str, ...], int], path: Path | None) -> list[Problem]:
    """Secrets in the file. They are errors because the file is shown, copied and committed."""
    found: list[Problem] = []

    def at(key: tuple[str, ...]) -> str:
        line = line_of(lines, key)
        return f"{path}:{line}" if line else str(path)

    def visit(table: dict[str, Any], prefix: tuple[str, ...]) -> None:
        for name, value in table.items():
            key = (*prefix, name)
            if prefix == ("trainer", "env") or is_credential_key(name):
                text = value if isinstance(value, str) else ""
                if is_credential_key(name) or looks_secret(name, text):
                    fix = f"move it to the file named by trainer.env_file as {name.upper()}=..., mode 0600"
                    found.append(Problem(f"a secret in the configuration: {'.'.join(key)}", where=at(key), fix=fix))
            elif isinstance(value, dict):
                visit(value, key)
            elif name == "store" and isinstance(value, str) and "@" in value.partition("://")[2].partition("/")[0]:
                kind = kind_of(value)
                fix = "write scheme and bucket only"
                fix += f"; the key goes into {' and '.join(kind.key)}" if kind is not None and kind.key else ""
                found.append(Problem(f"a secret in the configuration: {'.'.join(key)}", where=at(key), fix=fix))

    visit(data, ())
    return found


def _covers(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.")


def _setting_of(path: tuple[str, ...]) -> str:
    """The setting of a pydantic location, without list indices and union members."""
    names = set(known_keys()) | set(known_sections())
    for length in range(len(path), 0, -1):
        if ".".join(path[:length]) in names:
            return ".".join(path[:length])
    return ".".join(path)


def _line(sources: Sources, path: tuple[str, ...]) -> int:
    """Where a problem is sorted: what is missing comes last, in a list of tables by its table."""
    exact = sources.lines.get(path)
    return exact or (line_of(sources.lines, path) if _in_list_of_tables(path) else None) or 1 << 30


def _name(key: str) -> str:
    if key in known_sections():
        return f"[{key}]"
    section, _, leaf = key.rpartition(".")
    return f'"{leaf}" in [{section}]' if section else f'"{leaf}"'


def _in_list_of_tables(path: tuple[str, ...]) -> tuple[str, str, str] | None:
    """(key for the line, name of the key, name of the table) of a pydantic location in ``[[hooks]]`` or the like."""
    if len(path) < 3 or path[0] not in known_keys() or not path[1].isdecimal() or path[2].isdecimal():
        return None
    return ".".join(path[:3]), path[2], f"[[{path[0]}]] number {int(path[1]) + 1}"


def _other_key(path: tuple[str, ...]) -> str:
    """The fix for an unknown key of a list of tables: the description of the setting lists its keys."""
    from podwatch.config.setting_names import walk

    described = next((field.description or "" for key, field in walk() if key == path[0]), "")
    names = [name.strip(" .") for name in described.rpartition("keys")[2].split(",")]
    close = similar(path[2], names, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else f"remove it; the keys are {', '.join(names)}"


def _message(key: str, detail: dict[str, Any], table: str = "") -> str:
    text = str(detail["msg"]).removeprefix("Value error, ")
    text = re.sub(r"^Input should be (?=greater|less)", "expected a value ", text)
    text = re.sub(r"^Input should be a valid tuple", "expected a list", text)
    text = re.sub(r"^Input should be ", "expected ", text)
    text = re.sub(r"^Tuple should have at least 1 item .*", "is empty (expected at least one)", text)
    text = re.sub(r"^String should match pattern .*a-z0-9-.*", "expected lower-case letters, digits and dashes", text)
    if key == "trainer.resume_args":
        text = 'expected "auto", "none" or a list of arguments'
    if not key:
        return text
    value = detail.get("input")
    shown = f'"{key}" in {table}' if table else _name(key)
    if isinstance(value, str | int | float) and not isinstance(value, bool) and repr(value) not in text:
        secret = looks_secret(key) or looks_secret("", str(value))
        text = f"{text[0].lower()}{text[1:]}" if secret else f"{value!r} ({text[0].lower()}{text[1:]})"
    return f"Invalid value for {shown}: {text}{_nearest(detail)}"


def _nearest(detail: dict[str, Any]) -> str:
    """The similar allowed word, if only certain words are allowed."""
    if detail["type"] != "literal_error" or not isinstance(detail.get("input"), str):
        return ""
    words = re.findall(r"'([^']+)'", str(detail.get("ctx", {}).get("expected", "")))
    close = similar(detail["input"].lower(), words, cutoff=0.7)
    return f': did you mean "{close[0]}"?' if close else ""


# -- line numbers of TOML keys ---------------------------------------------------------------------------------------
# ``tomllib`` does not report them.

_HEADER = re.compile(r"^\s*\[\[?\s*(?P<name>[^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(
    r"""^\s*(?P<key>(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_PIECE = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line numbers (from 1) by key path, tables included. Broken files give what can be read."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    tables: dict[tuple[str, ...], int] = {}
    open_value = _Value()
    for number, line in enumerate(text.splitlines(), 1):
        if open_value.unfinished:
            open_value.feed(line)
            continue
        if header := _HEADER.match(line):
            table = _pieces(header["name"])
            found.setdefault(table, number)
            if line.lstrip().startswith("[["):  # the n-th table of a list, as pydantic numbers it
                tables[table] = tables.get(table, -1) + 1
                table = (*table, str(tables[table]))
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
