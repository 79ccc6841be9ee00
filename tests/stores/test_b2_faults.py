"""The table of errors in facts/b2.md section 1.4, row by row, with the outcome one wants instead of the SDK's.

What test_b2.py proves already (three 503, two resets, lost and late answers, expired tokens, one flipped bit, the lost
answer of a finish) is not repeated.
"""

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.stores.b2 import B2Store, Retry
from podwatch.stores.base import StoredPart
from podwatch.stores.credentials import Credentials
from podwatch.stores.part_reader import StreamSource
from tests.stores.test_conformance import MB, content, fetch
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.put_file import put_file

pytestmark = pytest.mark.slow

SEVEN = Retry(attempts=7, base=0.005, cap=0.02)
"""As many tries as by default, without the waiting."""


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def store(server: B2Server, slept: list[float]) -> Iterator[B2Store]:
    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(min(seconds, 0.01))

    opened = B2Store(BUCKET, Credentials(KEY_ID, KEY, server.url), writer_id="w1", retry=SEVEN, sleep=sleep)
    yield opened
    opened.close()
    server.admin("clear")


def send_large(store: B2Store, name: str) -> None:
    data = content(11 * MB)
    stored = put_file(store, name, io.BytesIO(data), len(data), part_size=5 * MB)
    assert fetch(store, stored) == data


@pytest.mark.parametrize("endpoint", ["b2_upload_part", "b2_start_large_file", "b2_finish_large_file"])
def test_five_refusals_in_a_row_are_outlived_with_pauses(
    server: B2Server, store: B2Store, slept: list[float], endpoint: str
) -> None:
    server.fault(endpoint, "status", count=5)
    send_large(store, f"five/{endpoint}")
    assert len(slept) == 5
    assert all(0 <= pause <= SEVEN.cap for pause in slept)


@pytest.mark.parametrize(
    "endpoint",
    [
        "b2_authorize_account",
        "b2_list_buckets",
        "b2_get_upload_url",
        "b2_get_upload_part_url",
        "b2_upload_file",
        "b2_upload_part",
        "b2_start_large_file",
        "b2_finish_large_file",
        "b2_list_file_names",
        "b2_list_parts",
    ],
)
def test_an_answer_that_ends_in_the_middle_is_asked_for_again(
    server: B2Server, store: B2Store, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK takes it for an unknown error that no waiting helps against, and logs its own traceback."""
    before = server.calls().get(endpoint, 0)
    server.fault(endpoint, "torn", count=2)
    send_large(store, f"torn/{endpoint}/large")
    store.put_bytes(f"torn/{endpoint}/small", b"x")
    assert len(list(store.list(f"torn/{endpoint}/"))) == 2
    upload = store.begin_large(f"torn/{endpoint}/unfinished", 11 * MB)
    assert store.parts_there(upload) == {}
    store.cancel_large(upload)
    assert server.calls()[endpoint] - before >= 3
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


def test_answers_that_never_come_whole_are_a_passing_error(server: B2Server, store: B2Store) -> None:
    server.fault("b2_list_file_names", "torn", count=7)
    with pytest.raises(RemoteError) as caught:
        list(store.list("torn/"))
    assert caught.value.transient
    assert "cannot be reached" in caught.value.what


def test_a_service_that_stays_broken_is_a_passing_error_that_says_so(server: B2Server, store: B2Store) -> None:
    server.fault("b2_upload_file", "status", count=7)
    with pytest.raises(RemoteError) as caught:
        store.put_bytes("broken/a", b"x")
    assert caught.value.transient
    assert "busy or broken" in caught.value.what


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("endpoint", ["b2_upload_file", "b2_get_upload_url"])
def test_what_the_server_asks_to_wait_is_waited(
    server: B2Server, store: B2Store, slept: list[float], status: int, endpoint: str
) -> None:
    code = "too_many_requests" if status == 429 else "service_unavailable"
    server.fault(endpoint, "status", status=status, code=code, retry_after="7", count=2)
    assert store.put_bytes(f"wait/{status}", b"x").size == 1
    assert len(slept) == 2
    assert all(7 <= pause <= 7 + SEVEN.base for pause in slept)


@pytest.mark.parametrize(
    "asked", ["Fri, 31 Dec 2060 23:59:59 GMT", "Wed, 21 Oct 2015 07:28:00 GMT", "soon", "-5", "nan", "1e99", "2.5"]
)
def test_an_odd_wish_to_wait_is_no_crash(server: B2Server, store: B2Store, slept: list[float], asked: str) -> None:
    server.fault("b2_upload_file", "status", retry_after=asked)
    assert store.put_bytes("odd/a", b"x").size == 1
    assert len(slept) == 1
    assert 0 <= slept[0] <= 120 + SEVEN.base, "never longer than two minutes"


def test_a_cap_ends_it_at_once(server: B2Server, store: B2Store, slept: list[float]) -> None:
    before = server.calls().get("b2_upload_part", 0)
    server.fault("b2_upload_part", "status", status=403, code="storage_cap_exceeded", skip=1)
    with pytest.raises(RemoteError) as caught:
        send_large(store, "cap/large")
    assert not caught.value.transient
    assert "cap" in caught.value.what
    assert slept == []
    assert server.calls()["b2_upload_part"] - before == 2, "nothing was sent after the refusal"
    assert server.versions("cap/large") == [], "and nothing is left that costs"


@pytest.mark.parametrize("code", ["transaction_cap_exceeded", "download_cap_exceeded"])
def test_other_caps_are_no_passing_trouble(server: B2Server, store: B2Store, slept: list[float], code: str) -> None:
    stored = store.put_bytes("cap/read", b"x")
    server.fault("b2_download", "status", status=403, code=code)
    with pytest.raises(RemoteError) as caught:
        store.get_bytes("cap/read", stored.file_id)
    assert not caught.value.transient
    assert "cap" in str(caught.value).lower()
    assert slept == []


def test_a_part_that_always_arrives_damaged_is_given_up(server: B2Server, store: B2Store) -> None:
    server.fault("b2_upload_part", "flip", count=100)
    with pytest.raises(RemoteError, match="damaged") as caught:
        send_large(store, "flip/large")
    assert caught.value.transient
    assert server.versions("flip/large") == []


def test_a_lost_answer_leaves_two_versions_and_the_last_is_told(server: B2Server, store: B2Store) -> None:
    server.fault("b2_upload_file", "lost")
    stored = store.put_bytes("twice/a", b"x")
    found = list(store.versions("twice/"))
    assert len(found) == 2, "B2 keeps both; the sweep removes what nothing names"
    assert found[0].file_id == stored.file_id


@pytest.mark.parametrize("action", ["hang", "stall"])
def test_a_stalled_part_is_left_and_sent_again(
    server: B2Server, store: B2Store, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr("podwatch.stores.b2_session._Http.CONNECTION_TIMEOUT", 0.4)
    monkeypatch.setattr("podwatch.stores.b2_session._Http.TIMEOUT_FOR_UPLOAD", 0.4)
    server.fault("b2_upload_part", action, seconds=30, after_bytes=MB)
    began = time.monotonic()
    send_large(store, "hang/large")
    assert time.monotonic() - began < 15


def test_a_stalled_download_goes_on_where_it_was(
    server: B2Server, store: B2Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(11 * MB)
    stored = put_file(store, "stall/f", io.BytesIO(data), len(data), part_size=5 * MB)
    monkeypatch.setattr("podwatch.stores.b2_session._Http.TIMEOUT_FOR_DOWNLOAD", 0.4)
    server.fault("b2_download", "stall", seconds=30, after_bytes=4 * MB)
    began, got = time.monotonic(), 0

    def progress(count: int) -> None:
        nonlocal got
        got += count

    target = io.BytesIO()
    store.get_file(stored.key, target, file_id=stored.file_id, progress=progress)
    assert target.getvalue() == data
    assert got == len(data), "no byte was written twice"
    assert time.monotonic() - began < 15


def test_a_file_that_becomes_shorter_ends_at_once(server: B2Server, store: B2Store, slept: list[float]) -> None:
    upload = store.begin_large("short/f", 10 * MB)
    began = time.monotonic()
    with pytest.raises(IntegrityError, match="shorter"):
        store.put_part(upload, 1, StreamSource(io.BytesIO(content(2 * MB))), 0, 5 * MB)
    assert time.monotonic() - began < 10, "not even one read timeout"
    assert slept == []
    store.cancel_large(upload)


def test_what_a_listener_raises_comes_through_at_once(store: B2Store, slept: list[float]) -> None:
    class Enough(Exception):  # noqa: N818
        pass

    def stop(_: int) -> None:
        raise Enough

    upload = store.begin_large("stop/f", 10 * MB)
    with pytest.raises(Enough):
        store.put_part(upload, 1, StreamSource(io.BytesIO(content(5 * MB))), 0, 5 * MB, stop)
    assert slept == []
    store.cancel_large(upload)


def test_tokens_expire_under_several_connections(server: B2Server, store: B2Store) -> None:
    data = content(40 * MB)
    upload = store.begin_large("many/f", len(data))
    parts: dict[int, StoredPart] = {}

    def send(number: int) -> None:
        source = StreamSource(io.BytesIO(data))
        for n in (number, number + 4):
            parts[n] = store.put_part(upload, n, source, (n - 1) * 5 * MB, 5 * MB)

    threads = [threading.Thread(target=send, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    server.admin("expire")
    for thread in threads:
        thread.join()
    stored = store.finish_large(upload, [parts[n] for n in sorted(parts)], len(data))
    assert fetch(store, stored) == data


Call = Callable[[B2Store], object]
PROXIED: dict[str, tuple[str, Call]] = {
    "a small file": ("b2_upload_file", lambda s: s.put_bytes("proxy/a", b"x")),
    "a listing": ("b2_list_file_names", lambda s: list(s.list("proxy/"))),
    "a part": ("b2_upload_part", lambda s: send_large(s, "proxy/large")),
}


@pytest.mark.parametrize("status", [200, 502, 407, 302])
@pytest.mark.parametrize("name", PROXIED)
def test_a_page_from_something_in_between_is_no_crash(server: B2Server, store: B2Store, name: str, status: int) -> None:
    """Proxies and portals answer with a web page where B2 answers with JSON."""
    endpoint, call = PROXIED[name]
    server.fault(endpoint, "page", status=status)
    if status in (200, 502):
        call(store)
        return
    with contextlib.suppress(RemoteError):
        call(store)


def test_a_page_that_says_not_found_makes_nothing_absent(server: B2Server, store: B2Store) -> None:
    stored = store.put_bytes("proxy/latest.json", b"1")
    server.fault("b2_download", "page", status=404)
    assert store.get_bytes(stored.key) == b"1"
    server.fault("b2_get_file_info", "page", status=404)
    assert store.stat(stored.key, stored.file_id) is not None
    assert store.get_bytes("proxy/none") is None


@pytest.mark.parametrize("offset", [0, 3])
def test_a_page_instead_of_a_range_is_no_damaged_object(server: B2Server, store: B2Store, offset: int) -> None:
    data = bytes(range(256)) * 40
    stored, got = store.put_bytes("proxy/range", data), bytearray()
    server.fault("b2_download", "page", status=200)
    assert store.get_range(stored.key, offset, 9000, got.extend, file_id=stored.file_id) == len(data)
    assert got == data[offset : offset + 9000]


def test_a_page_that_stays_says_what_it_is(server: B2Server, store: B2Store) -> None:
    server.fault("b2_upload_file", "page", status=200, count=7)
    with pytest.raises(RemoteError, match="not the store answered") as caught:
        store.put_bytes("proxy/b", b"x")
    assert caught.value.transient
