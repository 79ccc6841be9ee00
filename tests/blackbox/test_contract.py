"""The rules of ``contract.toml``, by which every test checks the documents and names that podwatch shows."""

import time

import pytest

from tests.support import contract as rules
from tests.support.contract import compare, contract, parse_fate
from tests.support.json_paths import paths_of


def test_every_fate_is_well_formed() -> None:
    mine = contract()
    tables = [mine.commands, *mine.enums.values(), *mine.documents.values(), mine.data["store_outside"]]
    tables += [mine.names(section) for section in rules.SECTIONS]
    for fate in (fate for table in tables for fate in table.values()):
        parse_fate(fate)
    assert set(mine.done) <= {f"{number:02}" for number in range(2, 12)}


@pytest.mark.parametrize("text", ["", "gone", "goes", "goes in 1", "goes in 12", "goes in 01", "stays in 02", "renamed",
                                  "renamed to x in 12 ", "stays to x", "comes"])  # fmt: skip
def test_a_malformed_fate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="malformed fate"):
        parse_fate(text)


@pytest.mark.parametrize(
    ("fate", "done", "right"),
    [
        ("stays", (), {"a"}),
        ("goes in 04", (), {"a"}),
        ("goes in 04", ("04",), set()),
        ("renamed to b in 04", (), {"a"}),
        ("renamed to b in 04", ("04",), {"b"}),
        ("renamed to b", (), {"b"}),
        ("renamed to b", (), {"a"}),
        ("comes in 04", (), set()),
        ("comes in 04", (), {"a"}),
        ("comes in 04", ("04",), {"a"}),
    ],
)
def test_what_a_fate_allows(fate: str, done: tuple[str, ...], right: set[str]) -> None:
    assert compare({"a": fate}, right, done) == []


@pytest.mark.parametrize(
    ("fate", "done", "wrong"),
    [
        ("stays", (), set()),
        ("goes in 04", (), set()),
        ("goes in 04", ("04",), {"a"}),
        ("renamed to b in 04", (), {"b"}),
        ("renamed to b in 04", ("04",), {"a"}),
        ("renamed to b", (), set()),
        ("comes in 04", ("04",), set()),
        ("stays", (), {"a", "new"}),
    ],
)
def test_what_a_fate_does_not_allow(fate: str, done: tuple[str, ...], wrong: set[str]) -> None:
    assert compare({"a": fate}, wrong, done)


def test_a_document_with_an_unknown_field_or_a_wrong_value_is_refused() -> None:
    event = {
        "id": 1,
        "at": "2026-01-01T00:00:00.000Z",
        "name": "paused",
        "severity": "info",
        "message": "",
        "fields": {},
    }
    rules.check("event", event)
    for change in ({"surprise": 1}, {"severity": "loud"}, {"fields": {"x": []}}):
        with pytest.raises(AssertionError):
            rules.check("event", {**event, **change})
    with pytest.raises(AssertionError, match=r"contract\.toml"):
        rules.check_event({"podwatch_event": "never-heard-of", "level": "info"})
    with pytest.raises(AssertionError, match="podwatch_unheard_of"):
        rules.check_metrics("# TYPE podwatch_step gauge\n# TYPE podwatch_unheard_of gauge\n")


def test_free_keys_are_one_path() -> None:
    assert paths_of({"calls": {"class B": 1, "class C": 2}}, {"calls.*"}) == {"calls", "calls.*"}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("status --json", "status"),
        ("events --json --follow", "event"),
        ("checkpoints --json", "checkpoints --json"),
        ("checkpoints verify --step 5 --json", "checkpoints verify --json"),
        ("checkpoints pin 5 --json", "checkpoints pin N --json"),
        ("restart --json", "restart --json"),
        ("restart --dry-run --json", "restart --dry-run --json"),
        ("incidents --json", "incidents --json"),
        ("-c run.toml incidents --json", "incidents --json"),
        ("incidents 3 --json", "incidents ID --json"),
    ],
)
def test_which_document_a_command_prints(arguments: str, name: str) -> None:
    assert rules.printed_document(arguments.split()) == name


def test_names_of_the_store_fit_their_patterns() -> None:
    rules.check_names("store", ["latest.json", "step_5/abc/manifest.json", "step_5/abc/trainer/a/b", "claims/1-x"])
    for name in ("step_5/abc", "step_5/abc/other.json", "claims/1-x/y", "loose.txt"):
        with pytest.raises(AssertionError):
            rules.check_names("store", [name])


def test_a_shape_that_was_seen_costs_little() -> None:
    """Tests ask for the status every 50 ms."""
    document = {
        "id": 1,
        "at": "x",
        "name": "n",
        "severity": "info",
        "message": "m",
        "fields": {str(n): n for n in range(300)},
    }
    rules._seen.add(("event", rules._shape(document)))
    start = time.process_time()
    for _ in range(100):
        rules.check("event", document)
    assert (time.process_time() - start) / 100 < 0.001
