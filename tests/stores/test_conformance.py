"""What every store must do, run against each of them."""

import hashlib
import io
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.manifest import Proof
from podwatch.stores.base import ObjectStore, StoredObject, StoredPart, recognized
from podwatch.stores.part_reader import StreamSource, part_spans
from tests.support.put_file import put_file

MB = 1 << 20


@pytest.fixture
def at() -> str:
    """A prefix of its own, because the B2 server is shared by a module's tests."""
    return f"run-{uuid.uuid4().hex[:8]}"


def content(size: int, seed: int = 1) -> bytes:
    block = hashlib.sha512(str(seed).encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def fetch(store: ObjectStore, stored: StoredObject, offset: int = 0) -> bytes:
    target = io.BytesIO()
    store.get_file(stored.key, target, file_id=stored.file_id, offset=offset)
    return target.getvalue()


def test_small_object(store: ObjectStore, at: str) -> None:
    before = time.time() - 5
    stored = store.put_bytes(f"{at}/a.json", b"{}")
    assert (stored.key, stored.size, stored.ours, stored.writer_id) == (f"{at}/a.json", 2, True, "w1")
    assert stored.parts_sha1 == (hashlib.sha1(b"{}").hexdigest(),)
    assert stored.file_id or not store.versioned
    assert before < stored.uploaded_wall < time.time() + 5
    assert store.get_bytes(stored.key) == b"{}"
    assert store.get_bytes(stored.key, stored.file_id) == b"{}"
    seen = store.stat(stored.key, stored.file_id)
    assert seen is not None
    assert (seen.size, seen.ours, seen.writer_id, seen.file_id) == (2, True, "w1", stored.file_id)


def test_what_is_not_there(store: ObjectStore, at: str) -> None:
    assert store.stat(f"{at}/nothing") is None
    assert store.get_bytes(f"{at}/nothing") is None
    assert list(store.list(f"{at}/")) == []
    with pytest.raises(RemoteError) as caught:
        store.get_file(f"{at}/nothing", io.BytesIO())
    assert not caught.value.transient
    store.delete(StoredObject(f"{at}/nothing", 3))


@pytest.mark.parametrize("size", [0, 1, 5 * MB - 1, 5 * MB, 5 * MB + 1, 12 * MB])
def test_file_in_parts(store: ObjectStore, at: str, size: int) -> None:
    data, seen = content(size), 0

    def progress(count: int) -> None:
        nonlocal seen
        seen += count

    stored = put_file(store, f"{at}/dir/f.bin", io.BytesIO(data), size, part_size=5 * MB, progress=progress)
    expected = [hashlib.sha1(data[i : i + 5 * MB]).hexdigest() for i in range(0, size, 5 * MB)]
    assert (stored.size, stored.parts_sha1, seen) == (size, tuple(expected), size)
    assert fetch(store, stored) == data
    for offset in {size // 2, max(0, size - 1), size}:
        assert fetch(store, stored, offset) == data[offset:]


def test_ranges(store: ObjectStore, at: str) -> None:
    data = content(12 * MB)
    stored = put_file(store, f"{at}/r.bin", io.BytesIO(data), len(data), part_size=5 * MB)

    def ranged(offset: int, length: int, key: str = stored.key) -> tuple[int, bytes]:
        got = bytearray()
        size = store.get_range(key, offset, length, got.extend, file_id=stored.file_id if key == stored.key else "")
        return size, bytes(got)

    for offset, length in ((0, 1), (0, len(data)), (5 * MB - 1, 2), (7 * MB, 5 * MB), (len(data) - 1, 1)):
        assert ranged(offset, length) == (len(data), data[offset : offset + length])
    for offset, length in ((len(data) - 1, 2), (len(data), 1), (len(data) + 5, 3)):
        with pytest.raises(IntegrityError, match="shorter"):
            ranged(offset, length)
    with pytest.raises(RemoteError) as caught:
        ranged(0, 1, f"{at}/nothing")
    assert not caught.value.transient

    def full(_: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.get_range(stored.key, 0, 10, full, file_id=stored.file_id)
    assert ranged(3, 4) == (len(data), data[3:7]), "and the store can be used on"


def test_source_shorter_than_announced(store: ObjectStore, at: str) -> None:
    with pytest.raises(IntegrityError, match="shorter"):
        put_file(store, f"{at}/f", io.BytesIO(b"abc"), 10, part_size=5 * MB)
    assert store.stat(f"{at}/f") is None
    with pytest.raises(IntegrityError, match="shorter"):
        put_file(store, f"{at}/g", io.BytesIO(content(6 * MB)), 12 * MB, part_size=5 * MB)
    assert store.stat(f"{at}/g") is None


def test_overwrite(store: ObjectStore, at: str) -> None:
    first = store.put_bytes(f"{at}/p", b"one")
    second = store.put_bytes(f"{at}/p", b"three")
    assert store.get_bytes(f"{at}/p") == b"three"
    assert [o.size for o in store.list(f"{at}/")] == [5]
    if store.versioned:
        assert store.get_bytes(f"{at}/p", first.file_id) == b"one"
        store.delete(first)
        assert store.stat(f"{at}/p", first.file_id) is None
    assert store.get_bytes(f"{at}/p", second.file_id) == b"three"


def test_list_is_in_order_and_by_prefix(store: ObjectStore, at: str) -> None:
    names = [f"{at}/{n}" for n in ("b", "a/x", "a.txt", "a/b/c", "ab/y", "umlaut-ä b+c")]
    for name in names:
        store.put_bytes(name, b"1")
    assert [o.key for o in store.list(f"{at}/")] == sorted(names)
    assert [o.key for o in store.list(f"{at}/a/")] == [f"{at}/a/b/c", f"{at}/a/x"]
    assert [o.key for o in store.list(f"{at}/a")] == sorted(n for n in names if n.startswith(f"{at}/a"))
    assert all(o.ours is not False for o in store.list(f"{at}/"))
    known = list(store.identify(store.list(f"{at}/")))
    assert [(o.key, o.ours, o.writer_id) for o in known] == [(name, True, "w1") for name in sorted(names)]


def test_delete(store: ObjectStore, at: str) -> None:
    stored = store.put_bytes(f"{at}/x/y", b"1")
    kept = store.put_bytes(f"{at}/x/z", b"1")
    store.delete(stored)
    store.delete(stored)
    assert [o.key for o in store.list(f"{at}/")] == [kept.key]


def test_limit(store: ObjectStore, at: str) -> None:
    store.put_bytes(f"{at}/big", b"x" * 100)
    assert store.get_bytes(f"{at}/big", limit=100) == b"x" * 100
    with pytest.raises(IntegrityError):
        store.get_bytes(f"{at}/big", limit=99)


@pytest.mark.parametrize("key", ["/abs", "a/../b", "a//b", "", "a\0b", "a/./b"])
def test_unsafe_keys(store: ObjectStore, key: str) -> None:
    with pytest.raises(IntegrityError):
        store.put_bytes(key, b"x")
    with pytest.raises(IntegrityError):
        put_file(store, key, io.BytesIO(b"x"), 1, part_size=5 * MB)


def test_read_is_one_object_and_its_bytes(store: ObjectStore, at: str) -> None:
    assert store.read(f"{at}/none") is None
    stored = store.put_bytes(f"{at}/doc", b"{}")
    found = store.read(f"{at}/doc")
    assert found is not None
    assert found[1] == b"{}"
    assert (found[0].key, found[0].size, found[0].file_id) == (stored.key, 2, stored.file_id)
    assert (found[0].ours, found[0].writer_id) == (True, "w1")
    assert abs(found[0].uploaded_wall - stored.uploaded_wall) < 2
    with pytest.raises(IntegrityError):
        store.read(f"{at}/doc", limit=1)


def test_identify_leaves_out_what_is_gone(store: ObjectStore, at: str) -> None:
    kept, gone = store.put_bytes(f"{at}/kept", b"1"), store.put_bytes(f"{at}/gone", b"2")
    unknown = [replace(o, ours=None, writer_id="") for o in (gone, kept)]
    store.delete(gone)
    known = [o for o in store.identify(unknown) if o.ours is not None]
    assert [o.key for o in known] in ([], [kept.key]), "a store whose listings tell returns them as they are"


def test_what_it_proves(store: ObjectStore, at: str) -> None:
    """A store that shows a hash must show another one as wrong; one that shows none proves nothing."""
    data = content(12 * MB)
    for size in (1000, len(data)):
        stored = put_file(store, f"{at}/{size}", io.BytesIO(data[:size]), size, part_size=5 * MB)
        found = store.stat(stored.key, stored.file_id)
        assert found is not None
        proof = store.prove(found, stored.parts_sha1, 5 * MB)
        assert proof in (stored.proof, Proof.NONE)
        assert proof is not Proof.READ_BACK, "no data passes"
        if proof is Proof.STORE_CHECKED and size < 5 * MB:
            with pytest.raises(IntegrityError):
                store.prove(found, (hashlib.sha1(b"other").hexdigest(),), 5 * MB)


def test_a_replacement_has_a_condition(store: ObjectStore, at: str) -> None:
    key = f"{at}/latest.json"

    def replaced(data: bytes, expected: StoredObject | None) -> StoredObject | None:
        return store.replace(key, StreamSource(io.BytesIO(data)), len(data), expected)

    if not store.conditional:
        with pytest.raises(RemoteError):
            replaced(b"one", None)
        return
    first = replaced(b"one", None)
    assert first is not None
    assert replaced(b"two", None) is None, "the name is taken"
    found = store.read(key)
    assert found is not None
    second = replaced(b"second", found[0])
    assert second is not None
    assert replaced(b"set back", first) is None, "a writer that was frozen meanwhile"
    assert store.get_bytes(key) == b"second"
    store.delete(second)
    if store.stat(key) is None:
        assert replaced(b"third", second) is None, "it is not there any more"


def test_deleting_needs_the_mark_in_the_store(store: ObjectStore, at: str, unmarked: Callable[[str], None]) -> None:
    unmarked(f"{at}/foreign")
    (found,) = store.identify(store.list(f"{at}/"))
    assert found.ours is False
    for said in (False, None, True):
        with pytest.raises(RemoteError, match="mark"):
            store.delete(replace(found, ours=said))
    assert store.stat(f"{at}/foreign") is not None


def test_check_leaves_nothing(store: ObjectStore) -> None:
    before = {o.key for o in store.list("")}
    assert [w for w in store.check() if "reads every object back" not in w] == []
    assert {o.key for o in store.list("")} == before


def test_parts_in_any_order_and_going_on_after_an_end(store: ObjectStore, at: str) -> None:
    data, key = content(12 * MB), f"{at}/large"
    source = StreamSource(io.BytesIO(data))
    upload = store.begin_large(key, len(data))
    assert store.parts_there(upload) == {}
    spans = part_spans(len(data), 5 * MB)
    assert "\n" not in upload.id, "the journal and the child keep it as one word"
    parts = {n: store.put_part(upload, n, source, *spans[n - 1]) for n in (3, 1)}
    there = store.parts_there(upload)
    assert there is not None
    assert {n: part.size for n, part in there.items()} == {n: spans[n - 1][1] for n in (1, 3)}
    assert recognized(there, {n: StoredPart.noted(part.note, part.size) for n, part in parts.items()}) == parts
    assert parts[1].sha1 == hashlib.sha1(data[: 5 * MB]).hexdigest()
    assert store.stat(key) is None
    (left,) = store.unfinished(f"{at}/")
    assert (left.key, left.upload) == (key, upload)
    assert (left.ours, left.writer_id) in ((True, "w1"), (None, ""))
    assert list(store.unfinished("elsewhere/")) == []
    assert store.finished(upload, [parts[1], parts[3]], len(data)) is None
    parts[2] = store.put_part(upload, 2, source, *spans[1])
    whole = [parts[n] for n in (1, 2, 3)]
    stored = store.finish_large(upload, whole, len(data))
    assert (stored.key, stored.size, stored.ours) == (key, len(data), True)
    assert stored.parts_sha1 == tuple(part.sha1 for part in whole)
    assert fetch(store, stored) == data
    again = store.finish_large(upload, whole, len(data))
    assert (again.file_id, again.size) == (stored.file_id, stored.size)
    assert store.parts_there(upload) is None
    found = store.finished(upload, whole, len(data))
    assert found is None or (found.file_id, found.parts_sha1) == (stored.file_id, stored.parts_sha1)
    assert list(store.unfinished(at)) == []


def test_an_upload_given_up_leaves_nothing(store: ObjectStore, at: str) -> None:
    upload = store.begin_large(f"{at}/large", 10 * MB)
    store.put_part(upload, 1, StreamSource(io.BytesIO(content(10 * MB))), 0, 5 * MB)
    store.cancel_large(upload)
    store.cancel_large(upload)
    assert store.parts_there(upload) is None
    assert list(store.unfinished(at)) == []
    with pytest.raises((RemoteError, IntegrityError)):
        store.finish_large(upload, [StoredPart(1, hashlib.sha1(b"x").hexdigest(), "x")], 10 * MB)
    assert store.stat(f"{at}/large") is None


def test_finishing_with_a_missing_part_is_refused(store: ObjectStore, at: str) -> None:
    data = content(12 * MB)
    upload = store.begin_large(f"{at}/large", len(data))
    first = store.put_part(upload, 1, StreamSource(io.BytesIO(data)), 0, 5 * MB)
    with pytest.raises((RemoteError, IntegrityError)):
        store.finish_large(upload, [first, first], len(data))
    assert store.stat(f"{at}/large") is None


def test_a_part_of_a_source_that_became_shorter(store: ObjectStore, at: str) -> None:
    upload = store.begin_large(f"{at}/large", 10 * MB)
    with pytest.raises(IntegrityError, match="shorter"):
        store.put_part(upload, 1, StreamSource(io.BytesIO(b"short")), 0, 5 * MB)
    assert not store.parts_there(upload)
    store.cancel_large(upload)


def test_versions(store: ObjectStore, at: str) -> None:
    first, second = store.put_bytes(f"{at}/v", b"1"), store.put_bytes(f"{at}/v", b"22")
    found = list(store.versions(f"{at}/"))
    expected = [second.file_id, first.file_id] if store.versioned else [second.file_id]
    assert [v.file_id for v in found] == expected
    assert found[0].size == 2


def test_a_name_for_whoever_is_first(store: ObjectStore, at: str) -> None:
    key = f"{at}/claims/1-only"
    if not store.exclusive:
        with pytest.raises(RemoteError):
            store.create(key, b"one")
        return
    results: list[StoredObject | None] = []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        barrier.wait()
        results.append(store.create(key, b"writer %d" % number))

    racers = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    won = [r for r in results if r is not None]
    assert len(won) == 1
    assert won[0].ours
    data = store.get_bytes(key)
    assert data is not None
    assert data.startswith(b"writer ")
    assert len(data) == won[0].size
    assert store.create(key, b"late") is None
    assert [o.key for o in store.list(f"{at}/claims/")] == [key]
