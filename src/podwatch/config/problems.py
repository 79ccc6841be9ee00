"""The problems of a configuration, worded so that the user can correct all of them at once."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from podwatch.config.setting_names import (
    entry_of,
    env_name,
    fixed_keys,
    is_credential_key,
    known_keys,
    known_sections,
    looks_secret,
    similar,
    suggest_key,
    walk,
)
from podwatch.config.store_kinds import kind_of
from podwatch.domain.errors import ConfigurationError

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
    """All problems of one configuration."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        first = self.problems[0]
        if len(self.problems) == 1:
            super().__init__(first.what, where=first.where, fix=first.fix)
        else:
            super().__init__(f"{len(self.problems)} problems in the configuration", fix="correct each of them")

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return f"{self.what}:\n" + "\n".join(f"  {problem}" for problem in self.problems)


def explain_errors(error: ValidationError, sources: Mapping[str, str], path: Path | None) -> list[Problem]:
    """One problem per key. ``sources`` of the given keys, and the file at ``path``, are named as their place."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        location = tuple(str(piece) for piece in detail["loc"])
        unknown = detail["type"] == "extra_forbidden"
        if unknown and is_credential_key(location[-1]) and sources.get(".".join(location)) == "file":
            continue  # find_secrets reports it, with a better fix
        if table := _in_list_of_tables(location):
            key = ".".join(location[:3])
            found = _problem_of_table(location, table, dict(detail))
        else:
            key = ".".join(location) if unknown else _setting_of(location)
            found = _problem_of(key, dict(detail))
        if unknown or detail["type"] == "missing" or key not in problems:
            problems[key] = replace(found, where=_place(key, sources, path))
    return list(problems.values())


def find_fixed(keys: Iterable[str], sources: Mapping[str, str], path: Path | None) -> list[Problem]:
    """One problem for each of the given keys that only tests can set."""
    return [
        Problem(f"{_name(key)} is no setting", _place(key, sources, path), "remove it: podwatch chooses this value")
        for key in keys
        if key in fixed_keys()
    ]


def _problem_of(key: str, detail: dict[str, Any]) -> Problem:
    if detail["type"] == "extra_forbidden":
        return Problem(f"unknown key {_name(key)}", fix=suggest_key(tuple(key.split("."))))
    if detail["type"] == "missing":
        return Problem(f"{_name(key)} is missing", fix=f"add {_EXAMPLES.get(key, key)}", missing=True)
    return Problem(_message(key, detail))


def _problem_of_table(location: tuple[str, ...], table: str, detail: dict[str, Any]) -> Problem:
    leaf = location[2]
    if detail["type"] == "extra_forbidden":
        return Problem(f'unknown key "{leaf}" in {table}', fix=_other_key(location))
    if detail["type"] == "missing":
        return Problem(f'"{leaf}" in {table} is missing', fix=f"add {leaf} = ...")
    return Problem(_message(leaf, detail, table))


def _place(key: str, sources: Mapping[str, str], path: Path | None) -> str:
    """Where the value of the highest rank for this key, or for one inside or around it, was given."""
    given = {source: name for name, source in sources.items() if _covers(key, name)}
    if "flag" in given:
        return "command line"
    if "PODWATCH_TEST_TIMES" in given:
        return "PODWATCH_TEST_TIMES"
    if "environment" in given:
        return env_name(given["environment"])
    return str(path) if path is not None else "configuration"


def find_secrets(data: dict[str, Any], path: Path | None) -> list[Problem]:
    """Secrets in the file. They are errors because the file is shown, copied and committed."""
    found: list[Problem] = []

    def add(key: tuple[str, ...], fix: str) -> None:
        found.append(Problem(f"a secret in the configuration: {'.'.join(key)}", where=str(path), fix=fix))

    def visit(table: dict[str, Any], prefix: tuple[str, ...]) -> None:
        for name, value in table.items():
            key = (*prefix, name)
            if prefix == ("trainer", "env") or is_credential_key(name):
                text = value if isinstance(value, str) else ""
                if is_credential_key(name) or looks_secret(name, text):
                    add(key, f"move it to the file named by trainer.env_file as {name.upper()}=..., mode 0600")
            elif isinstance(value, dict):
                visit(value, key)
            elif name == "store" and isinstance(value, str) and "@" in value.partition("://")[2].partition("/")[0]:
                kind = kind_of(value)
                fix = "write scheme and bucket only"
                add(
                    key,
                    fix + (f"; the key goes into {' and '.join(kind.key)}" if kind is not None and kind.key else ""),
                )

    visit(data, ())
    return found


def _covers(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.")


def _setting_of(path: tuple[str, ...]) -> str:
    """The setting of a pydantic location, without list indices and union members."""
    names = {*known_keys(), *fixed_keys(), *known_sections()}
    for length in range(len(path), 0, -1):
        if ".".join(path[:length]) in names:
            return ".".join(path[:length])
    return ".".join(path)


def _name(key: str) -> str:
    if key in known_sections():
        return f"[{key}]"
    section, _, leaf = key.rpartition(".")
    return f'"{leaf}" in [{section}]' if section else f'"{leaf}"'


def _in_list_of_tables(path: tuple[str, ...]) -> str:
    """The table of a pydantic location in ``[[hooks]]`` or the like; empty for a location elsewhere."""
    if len(path) < 3 or path[0] not in known_keys() or not path[1].isdecimal() or path[2].isdecimal():
        return ""
    return f"[[{path[0]}]] number {int(path[1]) + 1}"


def _other_key(path: tuple[str, ...]) -> str:
    """The fix for an unknown key of a list of tables."""
    entry = next((entry_of(field) for key, field in walk() if key == path[0]), None)
    names = list(entry.model_fields) if entry is not None else []
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
