"""S3 through podwatch's store, against a server that refuses what is wrong and does what real services do: promises
that rest on single answers."""

import hashlib
import io
import threading
import uuid
from collections.abc import Callable

import pytest

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.manifest import Proof
from podwatch.stores.base import CannotDelete, StoredObject, StoredPart
from podwatch.stores.part_reader import StreamSource
from podwatch.stores.s3 import S3Store
from podwatch.stores.s3_credentials import S3Credentials
from podwatch.stores.s3_features import Features
from tests.support.s3server import KEY, KEY_ID, S3Server

pytestmark = pytest.mark.slow

MIB = 1 << 20
Make = Callable[..., S3Store]


def source(data: bytes) -> StreamSource:
    return StreamSource(io.BytesIO(data))


def content(size: int, seed: int = 1) -> bytes:
    block = hashlib.sha512(str(seed).encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def upload(store: S3Store, key: str, data: bytes, part: int = 5 * MIB) -> StoredObject:
    started = store.begin_large(key, len(data))
    spans = [(at, min(part, len(data) - at)) for at in range(0, len(data), part)]
    parts = [store.put_part(started, n, source(data), *span) for n, span in enumerate(spans, 1)]
    return store.finish_large(started, parts, len(data))


# -- what it finds out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        ({}, {"object_checks": ["sha1", "sha256", "md5"], "etag_md5": True, "composite": True, "create": True,
              "replace": True, "versioned": False, "deletes": True}),
        ({"versions": True}, {"versioned": True}),
        ({"verify": ["md5"]}, {"object_checks": ["md5"], "part_checks": ["md5"], "composite": False}),
        ({"verify": []}, {"object_checks": [], "part_checks": [], "composite": False, "etag_md5": True}),
        ({"etag": "opaque"}, {"etag_md5": False, "composite": True}),
        ({"conditions": "ignore"}, {"create": False, "replace": False}),
        ({"conditions": "501"}, {"create": False, "replace": False}),
    ],
)  # fmt: skip
def test_probe(s3: Make, s3server: S3Server, traits: dict[str, object], expected: dict[str, object]) -> None:
    """An echoed checksum (``verify`` without it) proves nothing."""
    store = s3(prefix="inside", **traits)
    before = s3server.versions()
    store.check()
    assert {name: store.features[name] for name in expected} == expected
    assert s3server.versions() == before
    assert s3server.uploads() == []


def test_it_is_found_out_once(s3: Make, s3server: S3Server) -> None:
    first = s3()
    first.put_bytes("once/a", b"1")
    kept = dict(first.features)
    before = s3server.calls()
    s3(features=kept).put_bytes("once/b", b"1")
    assert s3server.calls()["PutObject"] == before["PutObject"] + 1
    moved = s3(features={**kept, "endpoint": "https://elsewhere"})
    moved.put_bytes("once/c", b"1")
    assert s3server.calls()["PutObject"] > before["PutObject"] + 2, "of another endpoint nothing is known"


@pytest.mark.parametrize(
    ("traits", "proof"),
    [
        ({}, Proof.STORE_CHECKED),
        ({"verify": ["sha256"], "etag": "opaque", "composite": False}, Proof.STORE_CHECKED),
        ({"verify": ["md5"], "etag": "opaque"}, Proof.STORE_CHECKED),
        ({"verify": []}, Proof.STORE_CHECKED),
        ({"verify": [], "etag": "opaque"}, Proof.NONE),
    ],
)
def test_a_damaged_part_is_found_where_the_store_can_show_it(
    s3: Make, s3server: S3Server, traits: dict[str, object], proof: Proof
) -> None:
    store = s3(**traits)
    store.check()
    data = content(12 * MIB)
    s3server.fault("UploadPart", "flip", count=2)
    s3server.fault("PutObject", "flip", suffix="small")
    stored = upload(store, "flip/large", data)
    small = store.put_bytes("flip/small", b"0123456789")
    assert (stored.proof, small.proof) == (proof, proof)
    intact = store.get_bytes(stored.key, stored.file_id) == data, store.get_bytes(small.key) == b"0123456789"
    assert intact == ((True, True) if proof else (False, False)), "without a proof the caller reads back"


def test_what_head_proves(s3: Make, s3server: S3Server) -> None:
    store = s3()
    data = content(12 * MIB)
    stored = upload(store, "head/large", data)
    seen = store.stat(stored.key, stored.file_id)
    assert seen is not None
    assert store.prove(seen, stored.parts_sha1, 5 * MIB) is Proof.STORE_CHECKED
    with pytest.raises(IntegrityError):
        store.prove(seen, [*stored.parts_sha1[:-1], "0" * 40], 5 * MIB)
    assert s3().prove(seen, stored.parts_sha1, 5 * MIB) is Proof.NONE, "nothing is known of this store: perhaps an echo"


# -- conditions ------------------------------------------------------------------------------------------------------


def test_a_frozen_writer_cannot_set_the_pointer_back(s3: Make) -> None:
    ours, theirs = s3(), s3(writer_id="w2")
    first = ours.put_bytes("frozen/latest.json", b"1")
    second = theirs.replace("frozen/latest.json", source(b"22"), 2, first)
    assert second is not None
    assert ours.replace("frozen/latest.json", source(b"333"), 3, first) is None
    assert ours.get_bytes("frozen/latest.json") == b"22"
    assert ours.replace("frozen/latest.json", source(b"4"), 1, None) is None
    read = ours.read("frozen/latest.json")
    assert read is not None
    assert ours.replace("frozen/latest.json", source(b"55"), 2, read[0]) is not None


@pytest.mark.parametrize("versions", [False, True])
def test_412_from_our_own_object(s3: Make, s3server: S3Server, versions: bool) -> None:
    """The write is carried out, its answer lost, and the repetition refused: by our own object."""
    store, other = s3(versions=versions), s3(writer_id="w2")
    store.check()
    other.check()
    s3server.fault("PutObject", "lost", suffix="claim")
    made = store.create(f"own-{versions}/claim", b"claim of w1")
    assert made is not None
    assert made.ours
    s3server.fault("PutObject", "lost", suffix="claim")
    replaced = store.replace(f"own-{versions}/claim", source(b"again"), 5, made)
    assert replaced is not None
    assert store.get_bytes(f"own-{versions}/claim") == b"again"
    # Another writer that was faster, while our answer got lost, is not taken for us.
    s3server.fault("PutObject", "reset", suffix="claim2")
    assert other.create(f"own-{versions}/claim2", b"x") is not None, "the first try was cut before it arrived"
    s3server.fault("PutObject", "status", status=500, code="InternalError", suffix="claim2")
    assert store.create(f"own-{versions}/claim2", b"x") is None
    assert s3server.violations() == []


@pytest.mark.parametrize(
    ("endpoint", "region", "service"),
    [
        ("", "", ""), ("", "eu-west-1", ""), ("https://s3.eu-west-1.amazonaws.com", "", ""),
        ("", "cn-north-1", "s3.cn-north-1.amazonaws.com.cn"), ("http://minio:9000", "", "minio:9000"),
        ("https://Acc.r2.cloudflarestorage.com/", "auto", "acc.r2.cloudflarestorage.com"),
    ],
)  # fmt: skip
def test_within_which_service_a_bucket_has_its_name(endpoint: str, region: str, service: str) -> None:
    store = S3Store("bucket", S3Credentials(KEY_ID, KEY, endpoint=endpoint, region=region), writer_id="w")
    assert store.service == service
    store.close()


def test_racing_creators(s3: Make) -> None:
    stores, won = [s3(writer_id=f"w{n}") for n in range(6)], list[StoredObject]()
    for store in stores:
        store.check()
    barrier = threading.Barrier(6)

    def race(number: int) -> None:
        barrier.wait()
        made = stores[number].create("race/claim", b"%d" % number)
        if made is not None:
            won.append(made)

    racers = [threading.Thread(target=race, args=(n,)) for n in range(6)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(won) == 1
    assert stores[0].get_bytes("race/claim") == won[0].writer_id[1:].encode()


# -- uploads in parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traits", [{}, {"versions": True}, {"etag": "opaque"}, {"verify": []}])
def test_a_lost_answer_to_completing(s3: Make, s3server: S3Server, traits: dict[str, object]) -> None:
    store = s3(**traits)
    store.check()
    s3server.fault("CompleteMultipartUpload", "lost")
    data = content(12 * MIB)
    stored = upload(store, "lost/complete", data)
    assert store.get_bytes(stored.key, stored.file_id) == data
    assert stored.proof is Proof.STORE_CHECKED


def test_an_error_behind_status_200(s3: Make, s3server: S3Server) -> None:
    store = s3()
    store.check()
    s3server.fault("CompleteMultipartUpload", "error200", code="InternalError")
    stored = upload(store, "late/error", content(6 * MIB))
    assert stored.size == 6 * MIB
    s3server.fault("CompleteMultipartUpload", "error200", code="InvalidPart", count=9)
    with pytest.raises(IntegrityError):
        upload(store, "late/refused", content(6 * MIB))
    assert store.stat("late/refused") is None


def test_a_lost_answer_to_starting_leaves_one_upload_too_many(s3: Make, s3server: S3Server) -> None:
    store = s3()
    store.check()
    s3server.fault("CreateMultipartUpload", "lost")
    stored = upload(store, "lost/start", content(6 * MIB))
    assert stored.size == 6 * MIB
    (left,) = store.unfinished("lost/")
    assert left.ours is None, "nothing in a listing says whose it is: only a journal's own ids are cancelled"
    store.cancel_large(left.upload)
    assert list(store.unfinished("lost/")) == []


def test_uploads_that_vanish(s3: Make, s3server: S3Server) -> None:
    """A server that forgets uploads at its restart, or after a day."""
    store = s3()
    started = store.begin_large("gone/x", 12 * MIB)
    store.put_part(started, 1, source(content(12 * MIB)), 0, 5 * MIB)
    s3server.admin("forget-uploads")
    assert store.parts_there(started) is None
    assert store.finished(started, [StoredPart(5 * MIB, "0" * 40, "0" * 32)], 12 * MIB) is None
    with pytest.raises(RemoteError):
        store.put_part(started, 2, source(content(12 * MIB)), 5 * MIB, 5 * MIB)
    store.cancel_large(started)


def test_an_older_object_of_the_same_name_is_not_this_upload(s3: Make, s3server: S3Server) -> None:
    store = s3()
    old = upload(store, "same/name", content(6 * MIB, seed=1))
    started = store.begin_large("same/name", 6 * MIB)
    other = content(6 * MIB, seed=2)
    parts = [store.put_part(started, n, source(other), *span) for n, span in ((1, (0, 5 * MIB)), (2, (5 * MIB, MIB)))]
    s3server.admin("forget-uploads")
    assert store.finished(started, parts, 6 * MIB) is None
    assert store.stat("same/name", old.file_id) is not None


def test_a_file_that_changes_between_hashing_and_sending(s3: Make) -> None:
    """The store refuses the part; podwatch hashes again, and what it records is what the store has."""
    store = s3()
    store.check()
    calm, changed = content(5 * MIB, 1), content(5 * MIB, 2)

    class Changing(StreamSource):
        reads = 0

        def read_into(self, offset: int, buffer: memoryview) -> int:
            self.reads += 1
            data = (calm if self.reads <= 6 else changed)[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            return len(data)

    started = store.begin_large("changing", 5 * MIB)
    part = store.put_part(started, 1, Changing(io.BytesIO(b"")), 0, 5 * MIB)
    assert part.sha1 == hashlib.sha1(changed).hexdigest()
    stored = store.finish_large(started, [part], 5 * MIB)
    assert store.get_bytes(stored.key) == changed


# -- trouble ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"action": "status", "status": 503, "code": "SlowDown", "count": 2},
        {"action": "status", "status": 429, "code": "TooManyRequests", "retry_after": "0.01"},
        {"action": "status", "status": 409, "code": "ConditionalRequestConflict"},
        {"action": "reset", "count": 2},
        {"action": "lost"},
        {"action": "page", "status": 502},
        {"action": "page", "status": 200},
        {"action": "torn"},
    ],
)
def test_passing_trouble(s3: Make, s3server: S3Server, fault: dict[str, object]) -> None:
    store, at = s3(), f"trouble-{uuid.uuid4().hex[:6]}"
    data = content(12 * MIB)
    stored = upload(store, f"{at}/data", data)
    for ep in ("PutObject", "GetObject", "HeadObject", "ListObjectsV2", "UploadPart", "DeleteObject"):
        s3server.admin("fault", ep=ep, **{**fault, "after_bytes": 3 * MIB if ep == "GetObject" else 0})
    small = store.put_bytes(f"{at}/small", b"abc")
    got = bytearray()
    assert store.get_range(stored.key, MIB, 10 * MIB, got.extend, file_id=stored.file_id) == len(data)
    assert got == data[MIB : 11 * MIB]
    assert store.stat(small.key) is not None
    assert [o.key for o in store.list(f"{at}/")] == [f"{at}/data", f"{at}/small"]
    assert upload(store, f"{at}/again", data).size == len(data)
    store.delete(small)
    assert store.stat(small.key) is None


def test_a_page_that_says_not_found_makes_nothing_absent(s3: Make, s3server: S3Server) -> None:
    """A load balancer without its store behind it: a pod that believed it would start a run from the beginning."""
    store = s3()
    store.put_bytes("found/latest.json", b"1")
    for status in (404, 302):
        s3server.fault("GetObject", "page", status=status)
        assert store.get_bytes("found/latest.json") == b"1"
    s3server.fault("HeadObject", "page", status=404)
    assert store.stat("found/latest.json") is not None
    s3server.fault("GetObject", "page", status=404, count=99)
    with pytest.raises(RemoteError, match="in its place") as caught:
        store.get_bytes("found/latest.json")
    assert caught.value.transient
    s3server.admin("clear")
    assert store.get_bytes("found/none") is store.stat("found/none") is None


def test_retry_after_is_waited_for(s3: Make, s3server: S3Server) -> None:
    slept: list[float] = []
    store = s3(sleep=slept.append)
    store.check()
    s3server.fault("PutObject", "status", status=503, retry_after="7")
    store.put_bytes("later", b"1")
    assert len(slept) == 1
    assert 7 <= slept[0] < 8


def test_a_download_that_is_cut_again_and_again(s3: Make, s3server: S3Server) -> None:
    store = s3()
    data = content(8 * MIB)
    stored = upload(store, "cut/data", data)
    s3server.fault("GetObject", "lost", after_bytes=MIB, count=5)
    target = io.BytesIO()
    store.get_file(stored.key, target, file_id=stored.file_id)
    assert target.getvalue() == data


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_wrong_clock(s3: Make, s3server: S3Server, ahead: float) -> None:
    s3server.admin("clock", ahead=ahead)
    store = s3()
    stored = store.put_bytes("clock/a", b"1")
    assert store.stat(stored.key) is not None
    assert store.clock_skew == pytest.approx(-ahead, abs=5)
    assert abs(stored.uploaded_wall - store._session.store_wall()) < 5


def test_another_region(s3: Make, s3server: S3Server) -> None:
    store = s3(region="eu-central-7")
    store.put_bytes("region/a", b"1")
    assert store.stat("region/a") is not None, "also for HEAD, whose errors have no text"
    wrong = s3(region="eu-central-7")
    assert wrong.stat("region/a") is not None
    before = s3server.calls()
    s3(features=store.features).put_bytes("region/b", b"1")
    assert s3server.calls()["PutObject"] == before["PutObject"] + 1, "the region is remembered"


def test_at_aws_the_region_that_the_store_named_is_remembered_with_what_was_found_out() -> None:
    """Without it each upload child tried the bucket out again: its endpoint seemed to be another one."""
    found = {"endpoint": "https://s3.eu-central-1.amazonaws.com", "bucket": "b", "region": "eu-central-1"}
    features = {**found, **Features(create=True).as_json()}
    child = S3Store("b", S3Credentials(KEY_ID, KEY), writer_id="w", features=features)
    assert child.features == features
    child.close()
    chosen = S3Store("b", S3Credentials(KEY_ID, KEY, region="us-west-2"), writer_id="w", features=features)
    assert chosen.features == {}, "the operator's region counts"
    chosen.close()


def test_temporary_credentials_are_read_again(s3: Make, s3server: S3Server, tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "credentials"

    def issue(number: int) -> None:
        s3server.add_key(f"ASIA-{number}", f"temporary-secret-{number}", token=f"token-{number}")
        lines = [f"aws_access_key_id = ASIA-{number}", f"aws_secret_access_key = temporary-secret-{number}"]
        file.write_text("\n".join(["[pod]", *lines, f"aws_session_token = token-{number}", ""]))
        file.chmod(0o600)

    issue(1)
    first = S3Credentials(
        "ASIA-1", "temporary-secret-1", "token-1", renew=f"profile:pod\n{file}\n/none", endpoint=s3server.url
    )
    store = s3(credentials=first)
    store.put_bytes("temporary/a", b"1")
    s3server.add_key("ASIA-1", "temporary-secret-1", token="token-1", expired=True)
    file.write_text("[po")  # another program is writing it
    with pytest.raises(RemoteError, match="expired") as caught:
        store.put_bytes("temporary/b", b"2")
    assert caught.value.transient
    issue(2)
    store.put_bytes("temporary/b", b"2")
    assert store.get_bytes("temporary/b") == b"2"
    fixed = s3(credentials=S3Credentials("ASIA-1", "temporary-secret-1", "token-1", endpoint=s3server.url))
    with pytest.raises(RemoteError, match="expired") as caught:
        fixed.get_bytes("temporary/b")
    assert caught.value.transient


@pytest.mark.parametrize(
    ("credentials", "message"),
    [
        (S3Credentials("AKUNKNOWN", KEY), "does not know the access key"),
        (S3Credentials(KEY_ID, "wrong-secret-value"), "secret key is wrong"),
    ],
)
def test_wrong_keys(s3: Make, s3server: S3Server, credentials: S3Credentials, message: str) -> None:
    from dataclasses import replace

    store = s3(credentials=replace(credentials, endpoint=s3server.url))
    with pytest.raises(RemoteError, match=message) as caught:
        store.check()
    assert not caught.value.transient
    with pytest.raises(RemoteError, match=message):
        store.stat("wrong/key")
    assert credentials.secret not in str(caught.value)


# -- permissions -----------------------------------------------------------------------------------------------------


def limited(s3: Make, s3server: S3Server, *permissions: str, prefix: str = "mine/") -> S3Store:
    s3server.add_key("AKLIMITED", "limited-secret", permissions=permissions, prefix=prefix)
    found = S3Credentials("AKLIMITED", "limited-secret", endpoint=s3server.url)
    return s3(credentials=found, prefix=prefix.rstrip("/"))


def test_without_permission_to_delete(s3: Make, s3server: S3Server) -> None:
    store = limited(s3, s3server, "put", "get", "list")
    warnings = store.check()
    assert [type(w) for w in warnings] == [CannotDelete]
    assert store.features["create"] is True
    stored = store.put_bytes("mine/a", b"1")
    with pytest.raises(RemoteError, match="s3:DeleteObject") as caught:
        store.delete(stored)
    assert not caught.value.transient
    for version in s3server.versions():  # the probe could not clean up
        if version["key"].startswith("mine/"):
            s3server.admin("drop", key=version["key"])


@pytest.mark.parametrize("verify", [["sha1", "md5"], ["md5"]])
def test_a_bucket_with_object_lock(s3: Make, s3server: S3Server, verify: list[str]) -> None:
    """Each write needs a checksum there, the first one of the probe too."""
    store = s3(prefix="locked", versions=True, lock=True, verify=verify, composite="sha1" in verify, minimum_part=1)
    warnings = store.check()
    assert [type(w) for w in warnings] == [CannotDelete]
    assert {store.features[name] for name in ("create", "replace", "versioned")} == {True}
    stored = store.put_bytes("locked/a", b"1")
    data = content(6000)
    assert store.get_bytes(upload(store, "locked/large", data, part=5000).key) == data
    with pytest.raises(RemoteError, match="object lock") as caught:
        store.delete(stored)
    assert not caught.value.transient
    for version in s3server.versions():
        s3server.admin("drop", key=version["key"])


def test_a_store_that_refuses_to_be_asked_for_checksums(s3: Make, s3server: S3Server) -> None:
    store = s3(checksum_mode=False)
    empty = store.put_bytes("asked/empty", b"")
    before = s3server.calls()
    seen = store.stat(empty.key)
    assert seen is not None
    assert seen.size == 0
    assert store.stat(empty.key, empty.file_id) is not None
    assert s3server.calls()["HeadObject"] == before["HeadObject"] + 2
    assert s3server.calls()["GetObject"] == before["GetObject"], "a refused HEAD is asked again as a GET"


def test_a_listing_without_etags(s3: Make) -> None:
    store = s3(lists_etags=False)
    stored = store.put_bytes("bare/a", b"1")
    [listed] = store.list("bare/")
    assert store.get_bytes(listed.key, listed.file_id) == b"1"
    [known] = store.identify([listed])
    assert (known.file_id, known.ours) == (stored.file_id, True)
    store.delete(listed)
    assert store.stat(stored.key) is None


def test_versions_that_cannot_be_listed_are_not_used(s3: Make, s3server: S3Server) -> None:
    s3(versions=True)
    store = limited(s3, s3server, "put", "get", "list", "delete")
    store.check()
    assert store.features["versioned"] is False
    stored = store.put_bytes("mine/v", b"1")
    (listed,) = store.list("mine/v")
    assert stored.file_id == listed.file_id
    assert store.get_bytes("mine/v", listed.file_id) == b"1"
    store.delete(stored)
    assert store.stat("mine/v") is None


def test_reading_needs_no_permission_to_write(s3: Make, s3server: S3Server) -> None:
    s3().put_bytes("mine/read", b"1")
    reader = limited(s3, s3server, "get", "list")
    assert reader.get_bytes("mine/read") == b"1"
    assert reader.get_bytes("mine/absent") is None
    assert (reader.exclusive, reader.conditional, reader.versioned) == (False, False, False)
    with pytest.raises(RemoteError, match="s3:PutObject"):
        reader.check()


def test_without_permission_to_list_absent_is_forbidden(s3: Make, s3server: S3Server) -> None:
    store = limited(s3, s3server, "get", "put", "delete")
    with pytest.raises(RemoteError, match="access denied"):
        store.stat("mine/absent")
    with pytest.raises(RemoteError, match="s3:ListBucket"):
        store.check()


def test_another_prefix(s3: Make, s3server: S3Server) -> None:
    store = limited(s3, s3server, "get", "put", "delete", "list")
    assert store.check() == ()
    with pytest.raises(RemoteError, match="access denied"):
        store.put_bytes("theirs/a", b"1")


# -- other people's objects ------------------------------------------------------------------------------------------


def test_a_version_of_somebody_else(s3: Make, s3server: S3Server) -> None:
    store = s3(versions=True)
    mine = store.put_bytes("shared/name", b"mine")
    s3server.admin("put", key="shared/name", text="theirs")
    with pytest.raises(RemoteError, match="does not carry podwatch's mark"):
        store.delete(StoredObject("shared/name", 6))
    store.delete(mine)
    assert store.get_bytes("shared/name") == b"theirs"


def test_a_bucket_that_was_given_versions_later(s3: Make, s3server: S3Server) -> None:
    early = s3().put_bytes("grown/a", b"1")
    store = s3(versions=True)
    store.check()
    assert store.get_bytes(early.key, early.file_id) == b"1", "as recorded before"
    later = store.put_bytes("grown/a", b"22")
    assert [v.size for v in store.versions("grown/")] == [2, 1]
    assert store.get_bytes(later.key, later.file_id) == b"22"
    assert store.stat("grown/a", early.file_id) is None, "hidden by the later one"
    for version in list(store.versions("grown/")):
        store.delete(version)
    assert list(store.versions("grown/")) == []


def test_a_replaced_object_is_not_the_recorded_one(s3: Make) -> None:
    """Without versions the ETag is the pin, also where the server ignores If-Match."""
    for conditions in ("yes", "ignore"):
        store = s3(conditions=conditions)
        first = store.put_bytes("pin/a", b"one")
        store.put_bytes("pin/a", b"two")
        assert store.stat("pin/a", first.file_id) is None
        assert store.get_bytes("pin/a", first.file_id) is None
        with pytest.raises(RemoteError, match="not found"):
            store.get_range("pin/a", 0, 3, lambda data: None, file_id=first.file_id)


def test_virtual_host_addressing(s3: Make, s3server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket in the host name; its address is resolved to the server's here."""
    import socket

    real = socket.getaddrinfo

    def resolve(host: str, *more: object, **options: object) -> object:
        return real("127.0.0.1" if host == "test-bucket.s3.test" else host, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    endpoint = f"http://s3.test:{s3server.port}"
    store = s3(credentials=S3Credentials(KEY_ID, KEY, endpoint=endpoint, addressing="virtual"), styles=["virtual"])
    assert store.check() == ()
    store.put_bytes("virtual/a b", b"1")
    assert [o.key for o in store.list("virtual/")] == ["virtual/a b"]


def test_aws_addresses() -> None:
    def host(bucket: str, **options: str) -> str:
        found = S3Store(bucket, S3Credentials("a", "b", **options), writer_id="w")._session  # type: ignore[arg-type]
        from podwatch.stores.s3_session import Call

        return found._signed(Call("GET", "", "k"), "x")[0]

    assert host("bucket") == "https://bucket.s3.us-east-1.amazonaws.com/k"
    assert host("bucket", region="cn-north-1") == "https://bucket.s3.cn-north-1.amazonaws.com.cn/k"
    assert host("with.dot", region="eu-west-1") == "https://s3.eu-west-1.amazonaws.com/with.dot/k"
    assert host("bucket", endpoint="https://id.r2.example") == "https://id.r2.example/bucket/k"
    assert host("bucket", endpoint="https://host", addressing="virtual") == "https://bucket.host/k"
    assert host("bucket", addressing="path") == "https://s3.us-east-1.amazonaws.com/bucket/k"
