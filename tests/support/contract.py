"""``tests/blackbox/contract.toml``: what it says, and whether a document, a list of names or a live daemon keeps to it.

``check_status``, ``check_event``, ``check_printed`` and the like raise AssertionError. They are called for each
document that a test reads, so a document whose shape was seen before costs a fraction of a millisecond.
"""

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from tests.support.json_paths import Schema, paths_of

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "blackbox" / "contract.toml"

# -- fates -----------------------------------------------------------------------------------------------------------

_FATE = re.compile(r"(?P<kind>stays|goes|comes|renamed)(?: to (?P<name>\S.*?))?(?: in (?P<issue>0[2-9]|1[01]))?")
_NEEDS = {"stays": (False, False), "goes": (False, True), "comes": (False, True), "renamed": (True, None)}
"""By kind: whether it names a new name, and an issue (None: it can)."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a name. ``issue``: two digits, empty if it happens in none or in an unknown one."""

    kind: str
    name: str = ""
    issue: str = ""

    def allowed(self, own: str, done: Collection[str]) -> tuple[set[str], set[str]]:
        """The names that can exist now, and those of which one must exist."""
        over = self.issue in done
        if self.kind == "goes":
            return (set(), set()) if over else ({own}, {own})
        if self.kind == "comes":
            return {own}, {own} if over else set()
        if self.kind == "renamed":
            names = {self.name} if over else {own} if self.issue else {own, self.name}
            return names, names
        return {own}, {own}


def parse_fate(text: str) -> Fate:
    """Raises ValueError for anything but "stays", "goes in NN", "comes in NN" and "renamed to X", with or without
    "in NN"."""
    match = _FATE.fullmatch(text)
    if match is None:
        raise ValueError(f"malformed fate {text!r}")
    fate = Fate(match["kind"], match["name"] or "", match["issue"] or "")
    name, issue = _NEEDS[fate.kind]
    if bool(fate.name) != name or " in " in f"{fate.name} " or issue not in (None, bool(fate.issue)):
        raise ValueError(f"malformed fate {text!r}")
    return fate


def compare(listed: Mapping[str, str], found: Iterable[str], done: Collection[str]) -> list[str]:
    """What the product has and the contract does not allow now, and what the contract demands and is missing."""
    fates = {name: parse_fate(text).allowed(name, done) for name, text in listed.items()}
    have = set(found)
    can = set().union(*(names for names, _ in fates.values()))
    gone = {name for name in have - can if name in listed}
    return [
        *(f"{name} should have gone: {listed[name]}" for name in sorted(gone)),
        *(f"{name} is not in contract.toml" for name in sorted(have - can - gone)),
        *(f"{name} is missing: {listed[name]}" for name, (_, one) in sorted(fates.items()) if one and not one & have),
    ]


# -- the file --------------------------------------------------------------------------------------------------------


SECTIONS = ("findings", "events", "metrics", "settings", "variables", "http", "store", "files")
"""Plain tables of names."""


class Contract:
    """The contract as flat tables of name and fate. ``planned`` entries of a section are in its table."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.done: frozenset[str] = frozenset(data["done"])
        planned: Mapping[str, Any] = data.get("planned", {})
        self._names = {section: {**data[section], **planned.get(section, {})} for section in SECTIONS}
        self.commands = {**_commands(data["commands"]), **planned.get("commands", {})}
        self.enums = _grouped(data["enums"], planned.get("enums", {}))
        self.documents = _grouped(data["documents"], planned.get("documents", {}))

    def names(self, section: str) -> dict[str, str]:
        return self._names[section]

    def now(self, fates: Mapping[str, str]) -> frozenset[str]:
        """The names that can exist now."""
        return frozenset().union(*(parse_fate(fate).allowed(name, self.done)[0] for name, fate in fates.items()))


def _commands(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """``command`` and ``command --option`` with their fates."""
    found = {}
    for command, table in tables.items():
        found[command] = table["fate"]
        found |= {f"{command} {name}": fate for name, fate in table["parameters"].items()}
    return found


def _grouped(tables: Mapping[str, Mapping[str, list[str]]], planned: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Tables of lists by fate, turned round; with what is planned for each."""
    found = {name: {one: fate for fate, names in table.items() for one in names} for name, table in tables.items()}
    for name, names in planned.items():
        found.setdefault(name, {}).update(names)
    return found


@cache
def contract() -> Contract:
    return Contract(tomllib.loads(FILE.read_text()))


# -- live documents --------------------------------------------------------------------------------------------------

_seen: set[tuple[str, Any]] = set()


def check(name: str, document: object) -> None:
    """Hold a document to its published schema, if it has one, and to the contract's list of its fields."""
    shape = (name, _shape(document))
    if shape in _seen:
        return
    if name in contract().data["schemas"]:
        errors = [f"{error.json_path}: {error.message[:300]}" for error in _validator(name).iter_errors(document)]
        assert not errors, f"{name} does not follow its schema: {errors}"
    known = _known(name)
    unknown = paths_of(document, known) - known
    assert not unknown, f"{name} has fields that are not in contract.toml: {sorted(unknown)}"
    _seen.add(shape)


def _shape(value: object) -> Any:
    """Equal for documents of the same fields and types. Words are kept, because they can be of a fixed set."""
    if isinstance(value, dict):
        return tuple((key, _shape(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return frozenset(map(_shape, value))
    return value if isinstance(value, str) and len(value) < 16 and value.isascii() and value.islower() else type(value)


@cache
def schemas() -> dict[str, Schema]:
    """The JSON schemas that the product publishes, by the name of the document."""
    return {name: json.loads((ROOT / path).read_text()) for name, path in contract().data["schemas"].items()}


@cache
def _validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(schemas()[name])


@cache
def _known(name: str) -> frozenset[str]:
    return contract().now(contract().documents[name])


def check_status(document: object) -> None:
    check("status", document)


def check_event(entry: Mapping[str, Any]) -> None:
    """One line of the log that is an event."""
    name = entry["podwatch_event"]
    assert name in _events(), f"event {name} is not in contract.toml"
    shape = tuple((key, type(value)) for key, value in entry.items())
    if (name, shape) in _seen:
        return
    fields = {key: value for key, value in entry.items() if key not in _OWN_KEYS_OF_A_LINE}
    same = {"name": name, "severity": entry["level"], "message": entry["event"], "fields": fields}
    check("event", {"id": 0, "at": _milliseconds(entry["timestamp"]), **same})
    _seen.add((name, shape))


_OWN_KEYS_OF_A_LINE = ("event", "level", "timestamp", "podwatch_event")


def _milliseconds(timestamp: str) -> str:
    """A time of the log as documents have it."""
    return re.sub(r"(\.\d{3})\d*Z$", r"\1Z", timestamp)


@cache
def _events() -> frozenset[str]:
    return contract().now(contract().names("events"))


def check_metrics(exposition: str) -> None:
    """The families of a scrape."""
    found = {line.split()[2] for line in exposition.splitlines() if line.startswith("# TYPE ")}
    unknown = found - contract().now(contract().names("metrics"))
    assert not unknown, f"metrics that are not in contract.toml: {sorted(unknown)}"


def check_names(section: str, names: Iterable[str]) -> None:
    """Names of files or objects against the patterns of a section. In a pattern ``<X>`` stands for one name or number,
    and ``<path>`` at its end for the rest of the name."""
    known = [_pattern(one) for one in contract().now(contract().names(section))]
    unknown = sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in known))
    assert not unknown, f"{section}: names that are not in contract.toml: {unknown}"


def _pattern(text: str) -> re.Pattern[str]:
    last = r".+" if text.endswith("<path>") else ""
    words = re.split(r"(<\w+>)", text.removesuffix("<path>"))
    return re.compile("".join(r"[^/]+?" if word.startswith("<") else re.escape(word) for word in words) + last)


# -- what commands print ---------------------------------------------------------------------------------------------


def check_printed(arguments: Sequence[str], stdout: str) -> None:
    """The document that a command with ``--json`` printed. What is no JSON (an error) is not looked at."""
    name = printed_document(arguments) if "--json" in arguments else None
    if name is None:
        return
    for text in stdout.splitlines() if name in ("event", "controller --json") else [stdout]:
        try:
            document = json.loads(text)
        except ValueError:
            continue
        check(name, document)


def printed_document(arguments: Sequence[str]) -> str | None:
    """The contract's name of what this command prints: that with the most words that are among the arguments."""
    words = list(_words(arguments))
    if words[:1] in (["status"], ["events"]):
        return {"status": "status", "events": "event"}[words[0]]
    fitting = [name for name in contract().documents if name.endswith(" --json") and _fits(name, arguments, words)]
    return max(fitting, key=lambda name: len(name.split()), default=None)


def _words(arguments: Iterable[str]) -> Iterator[str]:
    """The arguments without options, and without the choice of a run."""
    rest = iter(arguments)
    for word in rest:
        if word in ("-c", "--config", "--run", "--store"):
            next(rest, None)
        elif not word.startswith("-"):
            yield word


def _fits(name: str, arguments: Sequence[str], words: Sequence[str]) -> bool:
    """Placeholders, in capitals, stand for one word each, which comes after those of the command."""
    parts = name.split()
    command = [part for part in parts if not part.startswith("-") and not part.isupper()]
    placeholders = sum(part.isupper() for part in parts)
    flags = {part for part in parts if part.startswith("-")}
    return (
        list(words[: len(command)]) == command
        and flags <= set(arguments)
        and len(words) >= len(command) + placeholders
    )  # fmt: skip
