"""``tests/blackbox/contract.toml`` against the product: neither has a name that the other does not have."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from tests.support import contract as rules
from tests.support import outside
from tests.support.contract import ROOT, compare, contract
from tools import schemas


def differences(listed: Mapping[str, str], found: Collection[str]) -> list[str]:
    return compare(listed, found, contract().done)


def test_commands_options_and_arguments() -> None:
    found = [name for command, names in outside.commands().items() for name in (command, *_below(command, names))]
    assert differences(contract().commands, found) == []


def _below(command: str, names: list[str]) -> list[str]:
    return [f"{command} {name}" for name in names]


def test_exit_codes() -> None:
    listed = {code: entry["fate"] for code, entry in contract().data["exit_codes"].items()}
    assert differences(listed, {str(code) for code in outside.exit_codes()}) == []


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ("settings", outside.setting_names),
        ("variables", outside.variables),
        ("findings", outside.finding_kinds),
        ("events", outside.event_names),
        ("http", outside.http_requests),
    ],
)
def test_names(section: str, found: Any) -> None:
    assert differences(contract().names(section), found()) == []


def test_metrics() -> None:
    """The product lists families without the endings of the text format."""
    listed = {_family(name): _family(fate) for name, fate in contract().names("metrics").items()}
    assert differences(listed, outside.metric_names()) == []


def _family(name: str) -> str:
    return re.sub(r"_(total|info)\b", "", name)


@pytest.mark.parametrize("name", sorted({*contract().enums, *outside.enums()}))
def test_words(name: str) -> None:
    assert differences(contract().enums.get(name, {}), outside.enums().get(name, ())) == []


@pytest.mark.parametrize("name", sorted({*contract().documents, *outside.documents()}))
def test_fields_of_documents(name: str) -> None:
    """Where the product's own list is shorter than what is printed, ``unlisted`` has the rest."""
    found = {*outside.documents().get(name, ()), *contract().data["unlisted"].get(name, ())}
    assert differences(contract().documents.get(name, {}), found) == []


def test_files_of_an_incident() -> None:
    rules.check_names("files", [f"incident/{name}" for name in outside.incident_files()])


@pytest.mark.parametrize("name", schemas.texts())
def test_a_published_schema_is_that_of_the_type(name: str) -> None:
    assert (ROOT / "docs/schema" / name).read_text() == schemas.texts()[name], "run `python tools/schemas.py`"


def test_settings_are_few() -> None:
    """A table in a list counts once."""
    assert len({re.sub(r"\[\].*", "", name) for name in outside.setting_names()}) <= 110
