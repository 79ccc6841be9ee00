"""The documents that nodes with disks of their own exchange: whatever another process writes there harms nothing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.node_files import (
    NodeList,
    NodeOrders,
    NodeStep,
    SentFile,
    SentFiles,
    UploadOrder,
    list_document,
    orders_document,
    parse_list,
    parse_orders,
    parse_sent,
    sent_document,
)

ENTRY = FileEntry("sub/a.bin", "checkpoint", 7, 5_000, 0o640, node=3, problem="is truncated")
LIST = NodeList(3, "boot:1", (NodeStep(8, (ENTRY,), settled=True), NodeStep(16, ())), "")
ORDERS = NodeOrders(
    "boot:0",
    12,
    UploadOrder(5, 8, "ab12", "writer", {1: "d1"}, {1: ("checkpoint/sub/a.bin",)}, ("checkpoint/sub/a.bin",)),
    {8: {1: "d1"}},
    {4: {1: "d0", 2: "d2"}},
    (8,),
    8,
    ((6, "cd34"),),
)
SENT = SentFiles(
    "boot:1", 5, 7, True, "", False, (SentFile("checkpoint/a", 7, 5, 0o640, "key", "id", ("ff",), ("ee",)),)
)
PARSERS = (
    (list_document, parse_list, LIST),
    (orders_document, parse_orders, ORDERS),
    (sent_document, parse_sent, SENT),
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(("write", "parse", "value"), PARSERS)
def test_what_is_written_is_read(write: Any, parse: Any, value: Any) -> None:
    assert parse(write(value, "run"), "run") == value
    assert parse(write(value, "run"), "other") is None, "of another run"


@pytest.mark.parametrize(("write", "parse", "value"), PARSERS)
@given(data=st.data())
def test_anything_else_is_dropped(write: Any, parse: Any, value: Any, data: st.DataObject) -> None:
    """One value of a sound document replaced by any other, or any bytes: parsed or dropped, never an error."""
    document = json.loads(write(value, "run"))
    places: list[tuple[Any, Any]] = []

    def walk(inside: Any) -> None:
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], dict | list):
                walk(inside[key])

    walk(document)
    inside, key = data.draw(st.sampled_from(places))
    inside[key] = data.draw(json_values)
    parse(json.dumps(document).encode(), "run")
    parse(data.draw(st.binary(max_size=60)), "run")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", "a//b", "", "a\0b"])
def test_a_hostile_name_drops_its_step(path: str) -> None:
    """Which then never settles; the others stay."""
    hostile = NodeStep(8, (FileEntry(path, "checkpoint", 1, 1, node=1),), settled=True)
    sound = NodeStep(16, (FileEntry("a", "checkpoint", 1, 1, node=1),), settled=True)
    heard = parse_list(list_document(NodeList(1, "p", (hostile, sound)), "run"), "run")
    assert heard is not None
    assert heard.steps == (NodeStep(8, ()), sound)
