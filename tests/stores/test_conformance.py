"""What every store must do, run against each of them."""

import hashlib
import io
import time
import uuid

import pytest

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.stores.base import ObjectStore, StoredObject

MB = 1_000_000


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
    assert bool(stored.file_id) == store.versioned
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

    stored = store.put_file(f"{at}/dir/f.bin", io.BytesIO(data), size, part_size=5 * MB, progress=progress)
    expected = [hashlib.sha1(data[i : i + 5 * MB]).hexdigest() for i in range(0, size, 5 * MB)]
    assert (stored.size, stored.parts_sha1, seen) == (size, tuple(expected), size)
    assert fetch(store, stored) == data
    for offset in {size // 2, max(0, size - 1), size}:
        assert fetch(store, stored, offset) == data[offset:]


def test_source_shorter_than_announced(store: ObjectStore, at: str) -> None:
    with pytest.raises(IntegrityError, match="shorter"):
        store.put_file(f"{at}/f", io.BytesIO(b"abc"), 10, part_size=5 * MB)
    assert store.stat(f"{at}/f") is None
    with pytest.raises(IntegrityError, match="shorter"):
        store.put_file(f"{at}/g", io.BytesIO(content(6 * MB)), 12 * MB, part_size=5 * MB)
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
    assert all(o.ours for o in store.list(f"{at}/"))


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
        store.put_file(key, io.BytesIO(b"x"), 1, part_size=5 * MB)


def test_check_leaves_nothing(store: ObjectStore) -> None:
    before = {o.key for o in store.list("")}
    assert store.check() == ()
    assert {o.key for o in store.list("")} == before
