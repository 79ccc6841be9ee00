"""Servers that lie, drip, never end, redirect, or are no store: a clear error in bounded time, and no key elsewhere."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.store.objects.b2 import B2Access, B2Objects
from podwatch.store.objects.base import HttpObjects, Objects, Retry
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.store.objects.errors import ObjectMissing, ObjectTooLarge, StoreOutage, StoreRefused
from podwatch.store.objects.s3 import S3Access, S3Objects
from podwatch.store.objects.transport import LARGEST_REPLY, Patience, Transport
from tests.support.b2server import B2Server
from tests.support.s3server import S3Server

SECRET = "s3-secret-never-to-be-seen"
ONCE = Retry(attempts=1)


class Raw:
    """Answers every request with what ``say`` sends, and remembers the requests' heads."""

    def __init__(self, say: Callable[[socket.socket, bytes], None]) -> None:
        self.heads: list[bytes] = []
        self._say, self._listener = say, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(line,), daemon=True).start()

    def _one(self, line: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and (data := line.recv(65536)):
            head += data
        self.heads.append(head)
        try:
            self._say(line, head)
        except OSError:
            pass
        line.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def raw() -> Iterator[Callable[..., Raw]]:
    opened: list[Raw] = []

    def make(say: Callable[[socket.socket, bytes], None]) -> Raw:
        opened.append(Raw(say))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def hasty() -> Transport:
    return Transport(2, Patience(connect=2.0, idle=1.0, document=1.5))


def s3_at(url: str) -> S3Objects:
    return S3Objects("bucket", S3Access("AKTEST000000", SECRET, endpoint=url), retry=ONCE, transport=hasty())


def b2_at(url: str) -> B2Objects:
    return B2Objects("bucket-name", B2Access("key-id-0", SECRET, url), retry=ONCE, transport=hasty())


EITHER = pytest.mark.parametrize("opened", [s3_at, b2_at])
USES: dict[str, Callable[[Objects], object]] = {
    "put": lambda s: s.put("a/b", b"1"),
    "read": lambda s: s.read("a/b", 1 << 20),
    "get": lambda s: s.get("a/b", print, length=5),
    "list": lambda s: list(s.list("a/")),
    "delete": lambda s: s.delete(["a/b"]),
}
ANY = pytest.mark.parametrize("use", USES.values(), ids=USES.keys())


def page(body: bytes, status: str = "200 OK", more: str = "") -> Callable[[socket.socket, bytes], None]:
    def say(line: socket.socket, _: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
        line.sendall(head.encode() + body)

    return say


@EITHER
@ANY
@pytest.mark.parametrize("status", ["200 OK", "403 Forbidden", "404 Not Found", "502 Bad Gateway"])
def test_a_page_is_neither_an_object_nor_an_absence(
    raw: Callable[..., Raw], opened: Callable[[str], Objects], use: Callable[[Objects], object], status: str
) -> None:
    with pytest.raises(StoreOutage):
        use(opened(raw(page(b"<html><body>Please log in</body></html>", status)).url))


@EITHER
@ANY
@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"])
def test_a_redirect_is_not_followed(
    raw: Callable[..., Raw], opened: Callable[[str], Objects], use: Callable[[Objects], object], status: str
) -> None:
    other = raw(page(b"{}"))
    lured = raw(page(b"", status, f"Location: {other.url}/elsewhere\r\n"))
    with pytest.raises(RemoteError) as caught:
        use(opened(lured.url))
    assert other.heads == [], "nothing was sent elsewhere"
    assert SECRET not in str(caught.value)
    assert "Signature" not in str(caught.value)


@EITHER
@ANY
def test_what_drips_or_never_ends(
    raw: Callable[..., Raw], opened: Callable[[str], Objects], use: Callable[[Objects], object]
) -> None:
    def head_by_bytes(line: socket.socket, _: bytes) -> None:
        for _number in range(100):
            line.sendall(b"H")
            time.sleep(0.3)

    def body_by_bytes(line: socket.socket, _: bytes) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\nETag: x\r\nX-Bz-File-Id: x\r\nContent-Length: 500\r\n\r\n")
        for _number in range(100):
            line.sendall(b" ")
            time.sleep(0.3)

    def nothing(line: socket.socket, _: bytes) -> None:
        time.sleep(20)

    for say in (head_by_bytes, body_by_bytes, nothing):
        began = time.monotonic()
        with pytest.raises(RemoteError):
            use(opened(raw(say).url))
        assert time.monotonic() - began < 8


@EITHER
@ANY
def test_a_small_request_ends_in_time_whatever_the_store_does(
    raw: Callable[..., Raw], opened: Callable[[str], Objects], use: Callable[[Objects], object]
) -> None:
    """Its repetitions included, and however patient the transport is with large ones."""

    def nothing(line: socket.socket, _: bytes) -> None:
        time.sleep(20)

    def body_by_bytes(line: socket.socket, _: bytes) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\nETag: x\r\nX-Bz-File-Id: x\r\nContent-Length: 500\r\n\r\n")
        for _number in range(100):
            line.sendall(b" ")
            time.sleep(0.3)

    for say in (nothing, body_by_bytes, page(b"{}", "503 Slow Down")):
        store = opened(raw(say).url)
        assert isinstance(store, HttpObjects)
        store.small_seconds, store._retry, store._transport.patience = 1.0, Retry(1000, 0.05, 0.3), Patience()
        began = time.monotonic()
        if use is USES["get"]:
            continue  # pieces have the patience that their size needs
        with pytest.raises(RemoteError):
            use(store)
        assert time.monotonic() - began < 3


@EITHER
def test_an_endless_document_is_left(raw: Callable[..., Raw], opened: Callable[[str], Objects]) -> None:
    sent = 0

    def endless(line: socket.socket, _: bytes) -> None:
        nonlocal sent
        line.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        block = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        while sent < 10 * LARGEST_REPLY:
            line.sendall(block)
            sent += 1 << 20

    with pytest.raises(RemoteError):
        list(opened(raw(endless).url).list("a/"))
    assert sent < 4 * LARGEST_REPLY


LISTING = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{}</ListBucketResult>'
ITEM = "<Contents><Key>{}</Key><Size>1</Size><LastModified>2026-11-23T08:30:00.000Z</LastModified></Contents>"


@pytest.mark.parametrize(
    ("inside", "error"),
    [
        ("<IsTruncated>true</IsTruncated>", IntegrityError),  # names no next page
        (f"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>{ITEM.format('a/x')}",
         IntegrityError),  # for ever the same
        (ITEM.format("b/x"), IntegrityError),
        (ITEM.format("a/x") + ITEM.format("a/x").replace("<Size>1", "<Size>one"), StoreOutage),
        ("<Contents><Size>1</Size></Contents>", StoreOutage),
    ],
)  # fmt: skip
def test_listings_that_lie(raw: Callable[..., Raw], inside: str, error: type[RemoteError]) -> None:
    """What is missing from a listing counts as absent from the store."""
    with pytest.raises(error):
        list(s3_at(raw(page(LISTING.format(inside).encode())).url).list("a/"))


def test_entities_do_not_expand(raw: Callable[..., Raw]) -> None:
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    listing = LISTING.format(ITEM.format("a/&b;")).encode()
    with pytest.raises(StoreOutage, match="not the store"):
        list(s3_at(raw(page(bomb.encode() + listing)).url).list("a/"))
    late = LISTING.format(" " * 5000 + '<!ENTITY a "aaaa">' + ITEM.format("a/x")).encode()
    with pytest.raises(StoreOutage, match="not the store"):
        list(s3_at(raw(page(late)).url).list("a/"))


def test_b2_listings_that_lie(raw: Callable[..., Raw]) -> None:
    def answer(files: list[dict[str, object]], following: object) -> Callable[[socket.socket, bytes], None]:
        def say(line: socket.socket, head: bytes) -> None:
            host, port = line.getsockname()
            urls = dict.fromkeys(("apiUrl", "downloadUrl", "s3ApiUrl"), f"http://{host}:{port}")
            allowed = {"buckets": [{"id": "b", "name": "bucket-name"}], "capabilities": [], "namePrefix": None}
            storage = {**urls, "absoluteMinimumPartSize": 5, "recommendedPartSize": 5, "allowed": allowed}
            account = {"accountId": "a", "authorizationToken": "t", "apiInfo": {"storageApi": storage}}
            listing = {"files": files, "nextFileName": following, "nextFileId": None}
            page(json.dumps(account if b"authorize" in head else listing).encode())(line, head)

        return say

    item = {"action": "upload", "fileName": "a/x", "contentLength": 1, "fileId": "f", "uploadTimestamp": 1}
    for files, following, error in (
        ([item], "a/x", IntegrityError),
        ([{**item, "fileName": "b/x"}], None, IntegrityError),
        ([{**item, "fileName": None}, {"action": "upload"}], None, StoreOutage),
        ("files", None, StoreOutage),
    ):
        with pytest.raises(error):
            list(b2_at(raw(answer(files, following)).url).list("a/"))  # type: ignore[arg-type]


# -- what real services refuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "storage_cap_exceeded", "cap"), (403, "transaction_cap_exceeded", "cap"),
        (401, "unauthorized", "permission"), (403, "access_denied", "permission"), (400, "bad_request", "request"),
    ],
)  # fmt: skip
def test_b2_refusals(b2: Callable[..., B2Objects], b2server: B2Server, status: int, code: str, kind: str) -> None:
    store = b2()
    store.put("refused/a", b"1")
    before = b2server.calls()["b2_upload_file"]
    b2server.fault("b2_upload_file", "status", status=status, code=code)
    with pytest.raises(StoreRefused) as caught:
        store.put("refused/b", b"1")
    assert caught.value.kind == kind
    assert caught.value.fix
    assert b2server.calls()["b2_upload_file"] == before + 1, "asking again cannot help"


def test_b2_keys(b2: Callable[..., B2Objects], b2server: B2Server) -> None:
    with pytest.raises(StoreRefused, match="refuses the key") as caught:
        b2(key="wrong-secret-0").read("a")
    assert (caught.value.kind, "wrong-secret" in str(caught.value)) == ("key", False)
    with pytest.raises(StoreRefused) as caught:
        b2(bucket="another-bucket").read("a")
    assert caught.value.kind == "bucket"
    b2server.add_key("reader", "reader-secret", capabilities=["listFiles", "readFiles"], bucket="test-bucket")
    with pytest.raises(StoreRefused, match="writeFiles") as caught:
        b2("reader", "reader-secret").check("run/")
    assert caught.value.kind == "permission"
    b2server.add_key("keeper", "keeper-secret", bucket="test-bucket",
                     capabilities=["listFiles", "readFiles", "writeFiles"])  # fmt: skip
    checked = b2("keeper", "keeper-secret").check("run/")
    assert not checked.can_delete
    assert any("cannot delete" in warning for warning in checked.warnings)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "InvalidAccessKeyId", "key"), (403, "SignatureDoesNotMatch", "key"), (401, "Unauthorized", "key"),
        (404, "NoSuchBucket", "bucket"), (403, "AccessDenied", "permission"), (403, "QuotaExceeded", "cap"),
        (507, "StorageFull", "cap"), (403, "RequestTimeTooSkewed", "clock"), (501, "NotImplemented", "unsupported"),
    ],
)  # fmt: skip
def test_s3_refusals(s3: Callable[..., S3Objects], s3server: S3Server, status: int, code: str, kind: str) -> None:
    store = s3()
    s3server.fault("PutObject", "status", status=status, code=code)
    with pytest.raises(StoreRefused) as caught:
        store.put("refused/b", b"1")
    assert caught.value.kind == kind
    assert caught.value.fix


def test_s3_keys_regions_and_clocks(s3: Callable[..., S3Objects], s3server: S3Server) -> None:
    with pytest.raises(StoreRefused, match="secret key is wrong"):
        s3(S3Access("AKTESTKEY0001", "another-secret", endpoint=s3server.url)).put("k/a", b"1")
    elsewhere = s3(region="eu-central-9")
    elsewhere.put("k/region", b"1")
    assert elsewhere.read("k/region") == b"1", "the region that the answer names"
    s3(region="us-east-1")
    s3server.admin("clock", ahead=3600.0)
    s3().put("k/behind", b"1")
    s3server.admin("clock", ahead=-3600.0)
    with pytest.raises(StoreRefused, match="clock is wrong") as caught:
        s3().put("k/ahead", b"1")
    assert caught.value.kind == "clock"


@pytest.mark.parametrize("make", ["b2", "s3"])
def test_passing_trouble(make: str, request: pytest.FixtureRequest) -> None:
    store: Objects = request.getfixturevalue(make)()
    server = request.getfixturevalue(f"{make}server")
    put, get, list_ = {
        "b2": ("b2_upload_file", "b2_download", "b2_list_file_names"),
        "s3": ("PutObject", "GetObject", "ListObjectsV2"),
    }[make]  # fmt: skip
    data = bytes(range(256)) * 8192
    store.put("trouble/data", data)
    for action, more in (
        ("status", {"status": 503, "code": "SlowDown", "count": 2}), ("status", {"status": 429, "code": "TooMany"}),
        ("reset", {"count": 2}), ("lost", {}), ("page", {"status": 502}), ("page", {"status": 404}), ("torn", {}),
    ):  # fmt: skip
        for ep in (put, get, list_):
            server.fault(ep, action, **{**more, "after_bytes": 1 << 19 if (ep, action) == (get, "lost") else 0})
        store.put("trouble/small", b"abc")
        got = bytearray()
        store.get("trouble/data", got.extend, length=len(data))
        assert got == data, action
        assert [item.key for item in store.list("trouble/")] == ["trouble/data", "trouble/small"]
        server.admin("clear")
    store.delete(["trouble/data", "trouble/small"])
    assert server.versions() == [] or all(not str(v).count("trouble/") for v in server.versions())


@pytest.mark.parametrize("make", ["b2", "s3"])
def test_the_wait_that_the_store_asks_for(make: str, request: pytest.FixtureRequest) -> None:
    slept: list[float] = []
    store: Objects = request.getfixturevalue(make)(retry=Retry(attempts=3, base=0.01, cap=0.05, sleep=slept.append))
    ep = {"b2": "b2_upload_file", "s3": "PutObject"}[make]
    for asked in ("7", "1e99", "-5", "soon"):
        request.getfixturevalue(f"{make}server").fault(ep, "status", status=503, retry_after=asked)
        store.put("wait/a", b"1")
    assert slept[0] == 7.0
    assert all(seconds <= 120 for seconds in slept)


def test_a_repeated_put_leaves_no_version(b2: Callable[..., B2Objects], b2server: B2Server) -> None:
    store = b2()
    b2server.fault("b2_upload_file", "lost")
    store.put("twice/a", b"1")
    assert len(b2server.versions("twice/a")) == 2
    store.delete(["twice/a"])
    assert b2server.versions("twice/a") == []


def test_billed_calls(b2: Callable[..., B2Objects], b2server: B2Server) -> None:
    before = b2server.classes()
    store = b2()
    for number in range(30):
        store.put(f"billed/{number:02}", b"1")
    store.delete([f"billed/{number:02}" for number in range(30)])
    spent = {name: count - before.get(name, 0) for name, count in b2server.classes().items()}
    assert {name: store.calls[name] for name in "AC"} == {name: spent[name] for name in "AC"}
    assert spent["C"] <= 4, "opening, and one listing for all that is deleted"


# -- directories -----------------------------------------------------------------------------------------------------


def test_no_link_is_followed_out_of_a_directory(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "store"
    outside.mkdir()
    (outside / "victim").write_text("as it was")
    root.mkdir()
    (root / "run").symlink_to(outside)
    (root / "file").symlink_to(outside / "victim")
    store = DirectoryObjects(root)
    with pytest.raises(StoreRefused, match="link"):
        store.put("run/victim", b"x")
    store.delete(["run/victim"])
    for act in (lambda: store.read("run/victim"), lambda: store.read("file")):
        with pytest.raises(RemoteError):
            act()
    assert list(store.list("")) == []
    store.put("file", b"mine")
    assert (outside / "victim").read_text() == "as it was"
    assert [p.name for p in outside.iterdir()] == ["victim"]


def test_a_directory_that_vanishes_is_no_empty_store(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = DirectoryObjects(root)
    store.put("a", b"1")
    root.rename(tmp_path / "away")
    with pytest.raises(StoreOutage):
        list(store.list(""))
    root.mkdir()
    for act in (lambda: store.put("b", b"1"), lambda: list(store.list("")), lambda: store.read("a")):
        with pytest.raises(StoreOutage, match="mounted"):
            act()
    assert list(root.iterdir()) == []


def test_folders_that_a_put_makes_survive_a_crash_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is durable once the folder that has it was synced, after it was made."""
    synced: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()).removeprefix(str(tmp_path)).lstrip("/"))
        fsync(descriptor)

    store = DirectoryObjects(tmp_path)
    monkeypatch.setattr(os, "fsync", noting)
    store.put("a/b/c/x", b"1")
    assert {"", "a", "a/b", "a/b/c"} <= set(synced)
    synced.clear()
    store.put("a/b/c/y", b"1")
    assert "a/b" not in synced, "once is enough"
    store.delete(["a/b/c/x", "a/b/c/y"])
    synced.clear()
    store.put("a/b/c/x", b"1")
    assert {"", "a", "a/b", "a/b/c"} <= set(synced), "made again"


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    store = DirectoryObjects(tmp_path)
    store.put("a", b"1")
    (tmp_path / ".podwatch-writing" / "left").write_bytes(b"half")
    DirectoryObjects(tmp_path).put("b", b"1")
    assert list((tmp_path / ".podwatch-writing").iterdir()) == []
    assert [item.key for item in store.list("")] == ["a", "b"]


def test_a_missing_object_and_a_large_one_are_no_refusals() -> None:
    from podwatch.domain.errors import is_refusal

    assert not is_refusal(ObjectMissing("x"))
    assert not is_refusal(ObjectTooLarge("x"))
    assert is_refusal(StoreRefused("key", "x", where="", fix=""))
    assert not is_refusal(StoreOutage("x", where=""))
