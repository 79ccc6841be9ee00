"""Calls counted by class, against what the server itself counted."""

import io
import itertools
from collections.abc import Callable

import pytest

from podwatch.stores.b2 import B2Store
from podwatch.stores.b2_session import class_of
from podwatch.stores.base import TOTAL, ChildCalls
from tests.support.b2server import B2Server
from tests.support.b2server.api import CLASSES
from tests.support.put_file import put_file


@pytest.mark.parametrize(("call", "charged"), sorted(CLASSES.items()))
def test_the_classes_are_those_of_the_server(call: str, charged: str) -> None:
    if call != "b2_download":
        assert class_of(f"https://api.example/b2api/v4/{call}?x=/file/") == charged


def test_a_download_by_name_is_of_class_b() -> None:
    assert class_of("https://f001.example/file/bucket/b2_list_parts") == "B"


def test_every_call_is_counted(server: B2Server, b2: Callable[..., B2Store]) -> None:
    before, billed = TOTAL.snapshot(), server.classes()
    store = b2()
    data = b"x" * 11_000_000
    stored = put_file(store, "calls/large", io.BytesIO(data), len(data), part_size=5_000_000)
    store.put_bytes("calls/small", b"y")
    store.stat("calls/small")
    store.stat(stored.key, stored.file_id)
    store.get_bytes("calls/small")
    list(store.list("calls/"))
    now, after = server.classes(), TOTAL.snapshot()
    counted = {name: after[name] - before[name] for name in after}
    assert counted == {name: now.get(name, 0) - billed.get(name, 0) for name in counted}
    assert min(counted.values()) > 0


@pytest.mark.parametrize("order", [*itertools.permutations(({"A": 1}, {"A": 1, "B": 1}, {"A": 2, "B": 3, "C": 1}))])
def test_a_child_whose_threads_report_out_of_order_is_counted_once(order: tuple[dict[str, int], ...]) -> None:
    """Each takes the sum first and sends it then: the largest one does not always arrive last."""
    before, calls = TOTAL.snapshot(), ChildCalls()
    for sums in order:
        calls.hear({"calls": sums})
    assert {name: count - before[name] for name, count in TOTAL.snapshot().items()} == {"A": 2, "B": 3, "C": 1}
