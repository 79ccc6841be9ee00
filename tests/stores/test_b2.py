"""B2's own troubles: keys, buckets, caps, faults on the wire. Against the loopback server."""

import hashlib
import io
import logging
import socket
from collections.abc import Callable

import pytest
from b2sdk.v3 import exception as b2error

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.manifest import WRITER_TAG
from podwatch.stores.b2 import B2Store
from podwatch.stores.b2_errors import is_damaged
from podwatch.stores.b2_session import SEND_DAMAGED
from podwatch.stores.base import StoredObject
from podwatch.stores.credentials import Credentials
from tests.stores.conftest import QUICK
from tests.stores.test_conformance import MB, content, fetch
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.put_file import put_file

Make = Callable[..., B2Store]


def refused(call: Callable[[], object]) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        call()
    assert KEY not in str(caught.value)
    assert caught.value.where
    return caught.value


def test_wrong_key(b2: Make) -> None:
    error = refused(b2(key="nonsense").check)
    assert (error.what, error.transient) == ("the store refuses the key", False)
    assert "B2_APPLICATION_KEY" in error.fix


def test_bucket_does_not_exist(server: B2Server, b2: Make) -> None:
    error = refused(b2(bucket="no-such-bucket").check)
    assert "'no-such-bucket' not found" in error.what
    assert not error.transient
    server.add_key("gone", "k", bucket="other-bucket")
    error = refused(b2(key_id="gone", key="k").check)
    assert error.what == "the key is for another bucket"
    server.add_key("dead", "k", bucket="dead-bucket")
    error = refused(lambda: b2(bucket="dead-bucket", key_id="dead", key="k").put_bytes("a", b""))
    assert "not found" in error.what


def test_least_privilege_key_works_without_list_buckets(server: B2Server, b2: Make) -> None:
    server.add_key("least", "k", bucket=BUCKET, prefix="mine/", capabilities=["listFiles", "readFiles", "writeFiles"])
    store = b2(key_id="least", key="k")
    seen = len(server.events())
    warnings = store.check()
    assert len(warnings) == 1
    assert "cannot delete" in warnings[0]
    stored = put_file(store, "mine/f", io.BytesIO(content(11 * MB)), 11 * MB, part_size=5 * MB)
    assert fetch(store, stored) == content(11 * MB)
    assert store.stat("mine/f") is not None
    assert "b2_list_buckets" not in {e["ep"] for e in server.events()[seen:]}
    error = refused(lambda: store.delete(stored))
    assert "deleteFiles" in error.what
    assert not error.transient
    error = refused(lambda: store.put_bytes("theirs/f", b"x"))
    assert "writeFiles" in error.what


@pytest.mark.parametrize("lacking", ["writeFiles", "readFiles", "listFiles"])
def test_missing_capability_is_named(server: B2Server, b2: Make, lacking: str) -> None:
    have = [c for c in ("listFiles", "readFiles", "writeFiles") if c != lacking]
    server.add_key("lack", "k", bucket=BUCKET, capabilities=have)
    error = refused(b2(key_id="lack", key="k").check)
    assert lacking in error.what
    assert not error.transient


def test_cap_is_not_transient(server: B2Server, b2: Make) -> None:
    store = b2()
    server.fault("b2_upload_file", "status", status=403, code="storage_cap_exceeded")
    error = refused(lambda: store.put_bytes("cap/a", b"x"))
    assert "cap" in error.what
    assert not error.transient
    assert store.put_bytes("cap/a", b"x").size == 1


def test_network(b2: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"  # nothing listens here
        store = B2Store(BUCKET, Credentials(KEY_ID, KEY, url), writer_id="w", retry=QUICK)
        error = refused(store.check)
        assert (error.what, error.transient, error.where) == ("store cannot be reached", True, url)
    store = B2Store(BUCKET, Credentials(KEY_ID, KEY, "http://no-such-host.invalid"), writer_id="w", retry=QUICK)
    error = refused(store.check)
    assert (error.what, error.transient) == ("the store's host name cannot be resolved", True)


SHAKY = [
    ("b2_upload_part", {"action": "status", "count": 3}),
    ("b2_upload_part", {"action": "status", "status": 429, "code": "too_many_requests", "count": 2}),
    ("b2_upload_part", {"action": "reset", "after_bytes": MB, "count": 2}),
    ("b2_upload_part", {"action": "lost"}),
    ("b2_upload_part", {"action": "late", "skip": 1}),
    ("b2_upload_part", {"action": "status", "status": 401, "code": "expired_auth_token"}),
    ("b2_upload_part", {"action": "flip"}),
    ("b2_start_large_file", {"action": "status", "count": 3}),
    ("b2_finish_large_file", {"action": "lost"}),
    ("b2_finish_large_file", {"action": "status", "count": 2}),
    ("b2_get_upload_part_url", {"action": "status", "status": 429, "code": "too_many_requests", "retry_after": "1"}),
    ("b2_download", {"action": "lost", "after_bytes": 3 * MB, "count": 2}),
    ("b2_download", {"action": "status", "count": 2}),
]


@pytest.mark.parametrize(("endpoint", "fault"), SHAKY)
def test_shaky_service(server: B2Server, b2: Make, endpoint: str, fault: dict[str, object]) -> None:
    store = b2()
    server.fault(endpoint, **fault)  # type: ignore[arg-type]
    data = content(12 * MB, seed=7)
    stored = put_file(store, "shaky/f", io.BytesIO(data), len(data), part_size=5 * MB)
    assert fetch(store, stored) == data
    assert not [v for v in server.versions("shaky/f") if v["action"] == "start"]


def test_tokens_expire(server: B2Server, b2: Make) -> None:
    store = b2()
    store.put_bytes("tok/a", b"x")
    server.admin("expire")
    assert store.put_bytes("tok/b", b"y").size == 1
    server.admin("expire")
    assert store.get_bytes("tok/b") == b"y"


def test_a_failed_large_file_is_cancelled(server: B2Server, b2: Make) -> None:
    store = b2()
    server.fault("b2_upload_part", "status", skip=1, count=50)
    error = refused(lambda: put_file(store, "fail/f", io.BytesIO(content(11 * MB)), 11 * MB, part_size=5 * MB))
    assert error.transient
    server.admin("clear")
    assert server.versions("fail/f") == []


def test_finish_that_never_happened_is_an_error(server: B2Server, b2: Make) -> None:
    store = b2()
    server.fault("b2_finish_large_file", "status", status=400, code="bad_request")
    error = refused(lambda: put_file(store, "fin/f", io.BytesIO(content(11 * MB)), 11 * MB, part_size=5 * MB))
    assert not error.transient


def test_objects_without_our_mark_stay(server: B2Server, b2: Make) -> None:
    store = b2()
    store._bucket.id()
    data = b"theirs"
    sha = hashlib.sha1(data).hexdigest()
    answer = store._session.upload_file(store._bucket.id(), "old/f", 6, "text/plain", sha, {}, io.BytesIO(data))
    seen = store.stat("old/f", answer["fileId"])
    assert seen is not None
    assert not seen.ours
    error = refused(lambda: store.delete(StoredObject("old/f", 6, file_id=answer["fileId"], ours=True)))
    assert "mark" in error.what
    assert store.get_bytes("old/f") == data
    assert WRITER_TAG not in seen.info


def test_stat_of_an_unfinished_or_unknown_id_is_none(server: B2Server, b2: Make) -> None:
    store = b2()
    bucket = store._bucket.id()
    started = store._session.start_large_file(bucket, "un/f", "x/y", {})
    assert store.stat("un/f", started["fileId"]) is None
    assert store.stat("un/f") is None
    assert store.stat("un/f", "4_znever") is None
    stored = store.put_bytes("un/g", b"1")
    assert store.stat("un/other-name", stored.file_id) is None


@pytest.mark.parametrize("times", range(1, SEND_DAMAGED))
def test_damage_on_the_way_is_sent_again_at_once_on_a_new_url(server: B2Server, b2: Make, times: int) -> None:
    slept: list[float] = []
    store, data = b2(sleep=slept.append), content(1000)
    before = server.calls().get("b2_get_upload_url", 0)
    server.fault("b2_upload_file", "flip", count=times)
    stored = put_file(store, "flip/f", io.BytesIO(data), 1000, part_size=5 * MB)
    assert fetch(store, stored) == data
    assert slept == []
    assert server.calls()["b2_get_upload_url"] - before == times + 1, (
        "a URL whose machine damaged the bytes is not used again"
    )


def test_damage_that_stays_is_the_callers_to_try_again_later(server: B2Server, b2: Make) -> None:
    server.fault("b2_upload_file", "flip", count=SEND_DAMAGED)
    error = refused(lambda: put_file(b2(), "flip/f", io.BytesIO(content(1000)), 1000, part_size=5 * MB))
    assert error.transient
    assert "damaged" in error.what
    assert "memory" in error.fix


@pytest.mark.parametrize("text", ["Checksum did not match data received", "Sha1 did not match data received"])
def test_both_wordings_of_a_refused_checksum_are_known(text: str) -> None:
    assert is_damaged(b2error.BadRequest(text, "bad_request"))
    assert not is_damaged(b2error.BadRequest("sha1 is wrong length", "bad_request"))


def test_secret_is_never_shown(b2: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    credentials = Credentials(KEY_ID, KEY, "x")
    assert KEY not in repr(credentials)
    assert KEY not in str(credentials)
    store = b2()
    store.put_bytes("sec/a", b"x")
    refused(b2(key=KEY + "x").check)
    assert KEY not in caplog.text


def test_a_hung_service_is_left(server: B2Server, b2: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.stores.b2_session._Http.TIMEOUT_FOR_COPY", 1.5)
    store = b2()
    server.fault("b2_get_upload_url", "slow", seconds=6.0)
    assert store.put_bytes("hang/a", b"x").size == 1


def test_foreign_damage_shows_in_the_hash(server: B2Server, b2: Make) -> None:
    store = b2()
    stored = store.put_bytes("dam/a", b"abc")
    server.admin("damage", file_id=stored.file_id)
    assert store.get_bytes("dam/a") != b"abc"  # verification is the caller's, and it must be done


def test_integrity_error_for_too_large(b2: Make) -> None:
    store = b2()
    store.put_bytes("lim/a", b"x" * 3000)
    with pytest.raises(IntegrityError):
        store.get_bytes("lim/a", limit=10)
