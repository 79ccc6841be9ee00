"""Provider commands as real processes."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from podwatch.controller.machines import Listing, parse_listing
from podwatch.controller.provider import OutcomeUnknown, ProviderCommand, ProviderError
from podwatch.domain.errors import IntegrityError
from podwatch.system import procfs
from tests.support import provider_commands
from tests.support.pod import LIMITS
from tests.support.provider_commands import change

LABEL = "podwatch:r:1"


def command(state: Path, timeout: float = 60.0) -> ProviderCommand:
    argv = (sys.executable, "-I", provider_commands.__file__, str(state))
    return ProviderCommand(argv, timeout, {"PATH": os.environ["PATH"]})


def script(tmp_path: Path, text: str, timeout: float = 60.0) -> ProviderCommand:
    path = tmp_path / "provider.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return ProviderCommand((str(path),), timeout, {"PATH": os.environ["PATH"]})


def faults(state: Path, **kinds: object) -> None:
    change(state, lambda found: found["faults"].update({verb: [fault] for verb, fault in kinds.items()}))


def test_a_machine_is_created_listed_and_destroyed(tmp_path: Path) -> None:
    vast = command(tmp_path / "state.json")
    assert vast.list("r") == Listing("me")
    machine, price = vast.create("r", 1, LABEL, 2.0, {"PODWATCH_LABEL": LABEL})
    assert price == 1.0
    assert [one.id for one in vast.list("r").instances] == [machine]
    vast.destroy(machine, LABEL)
    vast.destroy(machine, LABEL)  # already gone
    assert vast.list("r").instances == ()
    calls = json.loads((tmp_path / "state.json").read_text())["calls"]
    assert calls[1] == [
        "create",
        {
            "version": 1,
            "run_id": "r",
            "generation": 1,
            "label": LABEL,
            "max_price_per_hour": 2.0,
            "environment": {"PODWATCH_LABEL": LABEL},
        },
    ]


@pytest.mark.parametrize("fault", ["garbage", "empty", "after", 69, 65, 3, 1])
def test_a_list_that_fails_is_an_error_with_the_commands_words(tmp_path: Path, fault: object) -> None:
    faults(tmp_path / "state.json", list=fault)
    with pytest.raises(ProviderError) as error:
        command(tmp_path / "state.json").list("r")
    assert "sk-live" not in str(error.value)
    if isinstance(fault, int):
        assert f"exit code {fault}" in str(error.value)
        assert "the provider says no" in str(error.value)


@pytest.mark.parametrize(("fault", "refused"), [(65, True), (69, False), (3, False)])
def test_a_request_that_was_refused_created_nothing(tmp_path: Path, fault: int, refused: bool) -> None:
    faults(tmp_path / "state.json", create=fault)
    with pytest.raises(ProviderError) as error:
        command(tmp_path / "state.json").create("r", 1, LABEL, 2.0, {})
    assert error.value.refused == refused


@pytest.mark.parametrize("fault", ["garbage", "empty", "after", 75, 1])
def test_every_other_end_of_a_request_is_unknown(tmp_path: Path, fault: object) -> None:
    faults(tmp_path / "state.json", create=fault)
    with pytest.raises(OutcomeUnknown):
        command(tmp_path / "state.json").create("r", 1, LABEL, 2.0, {})


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    kept = tmp_path / "child"
    for limit in LIMITS:
        hanging = script(tmp_path, f"sleep 600 & echo $! > {kept}\nwait", timeout=limit)
        with pytest.raises(OutcomeUnknown, match="time limit"):
            hanging.create("r", 1, LABEL, 2.0, {})
        if kept.exists() and kept.read_text():
            break
    child = int(kept.read_text())
    until = time.monotonic() + 20
    while procfs.start_ticks(child) is not None and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_child_that_keeps_the_output_open_delays_nothing(tmp_path: Path) -> None:
    answer = '{"version": 1, "account": "me", "complete": true, "instances": []}'
    began = time.monotonic()
    assert script(tmp_path, f"sleep 600 &\necho '{answer}'", timeout=300.0).list("r") == Listing("me")
    assert time.monotonic() - began < 120


def test_an_answer_without_end_is_cut_off(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="too long"):
        script(tmp_path, "yes").list("r")


def test_a_command_that_does_not_exist_created_nothing(tmp_path: Path) -> None:
    missing = ProviderCommand((str(tmp_path / "nothing"),))
    with pytest.raises(ProviderError, match="cannot run") as error:
        missing.create("r", 1, LABEL, 2.0, {})
    assert error.value.refused


def test_a_command_that_reads_nothing_can_answer(tmp_path: Path) -> None:
    answer = '{"version": 1, "account": "me", "complete": true, "instances": []}'
    assert script(tmp_path, f"exec 0<&-\necho '{answer}'").list("r" * 100) == Listing("me")


MACHINE = {
    "id": "m1", "label": LABEL, "state": "running", "price_per_hour": 1, "created_at": "2026-01-01T00:00:00+00:00",
    "detail": "",
}  # fmt: skip
LISTED = {"version": 1, "account": "me", "complete": True, "instances": [MACHINE]}


def test_a_list_with_labels_of_any_form_is_read() -> None:
    foreign = {**MACHINE, "id": "m2", "label": "\u202ebad\n", "created_at": None, "state": "ended"}
    listing = parse_listing(json.dumps({**LISTED, "instances": [MACHINE, foreign]}).encode())
    assert [(one.id, one.price_per_hour, one.created_at) for one in listing.instances] == [
        ("m1", 1.0, 1767225600.0), ("m2", 1.0, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"version": True}, {"account": ""}, {"account": None}, {"complete": False}, {"complete": 1},
        {"instances": None}, {"instances": {}}, {"instances": [MACHINE, MACHINE]}, {"more": 1},
        {"instances": [{**MACHINE, "state": "sleeping"}]}, {"instances": [{**MACHINE, "price_per_hour": -1}]},
        {"instances": [{**MACHINE, "price_per_hour": True}]}, {"instances": [{**MACHINE, "price_per_hour": "1"}]},
        {"instances": [{**MACHINE, "price_per_hour": None}]}, {"instances": [{**MACHINE, "price_per_hour": 1e7}]},
        {"instances": [{**MACHINE, "id": "a\nb"}]}, {"instances": [{**MACHINE, "id": 7}]},
        {"instances": [{**MACHINE, "created_at": "yesterday"}]}, {"instances": [{**MACHINE, "created_at": 5}]},
        {"instances": [{**MACHINE, "label": None}]}, {"instances": [None]},
    ],
)  # fmt: skip
def test_a_list_of_another_shape_is_never_an_empty_one(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        parse_listing(json.dumps({**LISTED, **change}).encode())


@pytest.mark.parametrize("field", [*LISTED, *(f"instances.{name}" for name in MACHINE)])
def test_a_list_without_a_field_is_not_read(field: str) -> None:
    found = json.loads(json.dumps(LISTED))
    name = field.rpartition(".")[2]
    del (found["instances"][0] if "." in field else found)[name]
    with pytest.raises(IntegrityError):
        parse_listing(json.dumps(found).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"[" * 10_000, b'{"version": 1, "version": 1}', b"\xff", b"NaN"])
def test_what_is_no_answer_is_not_read(text: bytes) -> None:
    with pytest.raises(IntegrityError):
        parse_listing(text)
