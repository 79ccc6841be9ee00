"""The seven operations, run against each kind of store."""

import hashlib
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from podwatch.domain.errors import IntegrityError
from podwatch.store.inventory import take_inventory
from podwatch.store.keys import RunKeys
from podwatch.store.objects.b2 import B2Objects
from podwatch.store.objects.base import Objects, Slice
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.store.objects.errors import LeaseUnsettled, ObjectMissing, ObjectTooLarge, StoreOutage
from podwatch.store.objects.transport import boottime
from podwatch.store.publish import PiecesMissing, Publisher
from tests.support.memory_objects import AUTHOR, AlwaysHolds, intent_of

MIB = 1 << 20


@pytest.fixture
def at() -> str:
    """A prefix of its own: the servers are shared."""
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 * MIB + 11))
    path.chmod(0o640)
    return path


def fetched(store: Objects, key: str, length: int) -> bytes:
    got = bytearray()
    digest = store.get(key, got.extend, length=length)
    assert digest == hashlib.sha256(got).hexdigest()
    return bytes(got)


def test_a_document(store: Objects, at: str) -> None:
    before = time.time() - 5
    store.put(f"{at}/a.json", b"{}")
    assert store.read(f"{at}/a.json") == b"{}"
    (found,) = store.list(f"{at}/")
    assert (found.key, found.size) == (f"{at}/a.json", 2)
    assert before < found.wall < time.time() + 5
    store.put(f"{at}/a.json", b"[1]")
    assert store.read(f"{at}/a.json") == b"[1]"
    assert [item.size for item in store.list(f"{at}/")] == [3]


def test_a_slice_of_a_file(store: Objects, at: str, file: Path) -> None:
    data, counted = file.read_bytes(), list[int]()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        piece = Slice(descriptor, MIB, 2 * MIB, counted.append)
        store.put(f"{at}/dir/piece", piece, piece.hashes(store.hashes))
        store.put(f"{at}/dir/empty", Slice(descriptor, 0, 0))
        store.put(f"{at}/dir/unhashed", Slice(descriptor, 1, 5))
    finally:
        os.close(descriptor)
    assert sum(counted) == 2 * MIB
    assert fetched(store, f"{at}/dir/piece", 2 * MIB) == data[MIB : 3 * MIB]
    assert fetched(store, f"{at}/dir/empty", 0) == b""
    assert fetched(store, f"{at}/dir/unhashed", 5) == data[1:6]


def test_an_object_of_another_length_passes_nothing_on(store: Objects, at: str) -> None:
    data = os.urandom(MIB + 7)
    store.put(f"{at}/r", data)
    assert fetched(store, f"{at}/r", len(data)) == data
    for length in (0, 5, len(data) - 1, len(data) + 1):
        got = bytearray()
        with pytest.raises(IntegrityError):
            store.get(f"{at}/r", got.extend, length=length)
        assert not got


def test_what_the_taker_raises_passes_unchanged(store: Objects, at: str) -> None:
    store.put(f"{at}/x", b"0123456789")

    def full(_: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.get(f"{at}/x", full, length=10)
    assert fetched(store, f"{at}/x", 10) == b"0123456789", "and the store can be used on"


def test_what_is_not_there(store: Objects, at: str) -> None:
    for act in (lambda: store.read(f"{at}/none"), lambda: store.get(f"{at}/none", print, length=1)):
        with pytest.raises(ObjectMissing) as caught:
            act()
        assert f"{at}/none" in str(caught.value)
    assert list(store.list(f"{at}/")) == []
    store.delete([f"{at}/none", f"{at}/deep/er/none"])


def test_a_listing_is_in_order_and_by_prefix(store: Objects, at: str) -> None:
    names = [f"{at}/{n}" for n in ("b", "a/x", "a.txt", "a/b/c", "ab/y", "umlaut-ä b+c", "100%41", "a&b<c>")]
    for name in names:
        store.put(name, b"1")
    assert [o.key for o in store.list(f"{at}/")] == sorted(names)
    assert [o.key for o in store.list(f"{at}/a/")] == [f"{at}/a/b/c", f"{at}/a/x"]
    assert [o.key for o in store.list(f"{at}/a")] == sorted(n for n in names if n.startswith(f"{at}/a"))
    with pytest.raises(ObjectTooLarge):
        list(store.list(f"{at}/", limit=len(names) - 1))
    assert store.read(f"{at}/umlaut-ä b+c") == b"1"
    store.delete(names)
    assert list(store.list(f"{at}/")) == []


def test_delete_means_every_version_and_nothing_else(store: Objects, at: str) -> None:
    for key in ("x", "x", "x", "xy", "w"):
        store.put(f"{at}/{key}", key.encode())
    store.delete([f"{at}/x"])
    assert [o.key for o in store.list(f"{at}/")] == [f"{at}/w", f"{at}/xy"]
    with pytest.raises(ObjectMissing):
        store.read(f"{at}/x")
    store.delete([f"{at}/xy", f"{at}/w"])
    assert list(store.list(f"{at}/")) == []


def test_of_what_is_rewritten_the_older_versions_go(store: Objects, at: str) -> None:
    for key, text in (("x", "1"), ("x", "2"), ("x", "3"), ("xy", "1"), ("xy", "2")):
        store.put(f"{at}/{key}", text.encode())
    store.delete([f"{at}/x", f"{at}/absent"], older=True)
    store.delete([f"{at}/x"], older=True)
    assert (store.read(f"{at}/x"), store.read(f"{at}/xy")) == (b"3", b"2")
    if isinstance(store, B2Objects):
        left = [item.key for item in store._pages(f"{at}/", versions=True)]
        assert (left.count(f"{at}/x"), left.count(f"{at}/xy")) == (1, 2)
    store.delete([f"{at}/x", f"{at}/xy"])
    assert list(store.list(f"{at}/")) == []


FROZEN_SECONDS = 3.0


def stops_itself(store_of: Callable[[], Objects], key: str, path: Path) -> None:
    """In a child: freeze after the body's first block was read, and go on after the permission has ended."""
    store = store_of()
    list(store.list(key))  # the client is made: the first block is read soon after the call
    with path.open("rb") as file:
        piece = Slice(file.fileno(), 0, 4 << 18, lambda _: os.kill(os.getpid(), signal.SIGSTOP))
        try:
            store.put(key, piece, until=boottime() + FROZEN_SECONDS)
        except LeaseUnsettled:
            os._exit(42)
    os._exit(1)


@pytest.mark.parametrize("kind", ["file", "b2", "s3"])
def test_a_call_that_was_frozen_sends_nothing_any_more(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, at: str, file: Path
) -> None:
    def make() -> Objects:
        return DirectoryObjects(tmp_path / "store") if kind == "file" else request.getfixturevalue(kind)()

    store = make()
    store.put(f"{at}/before", b"1")
    child = multiprocessing.get_context("fork").Process(target=stops_itself, args=(make, f"{at}/frozen", file))
    child.start()
    assert child.pid is not None
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "it ended before it read the first block"
    time.sleep(FROZEN_SECONDS + 0.2)
    while child.exitcode is None:  # each block stops it again
        os.kill(child.pid, signal.SIGCONT)
        child.join(0.05)
    assert child.exitcode == 42
    assert [item.key for item in store.list(f"{at}/")] == [f"{at}/before"]


def test_a_save_is_published_and_replaced_bytes_are_noticed_where_listings_show(store: Objects, at: str) -> None:
    """The rules, on the real store."""
    keys, holds, intent = RunKeys("run", at), AlwaysHolds(until=boottime() + 60), intent_of(1, "s1")
    one = Publisher(store, keys, holds, holds)
    one.begin(intent)
    data, hashes = b"weights " * 40, {}
    for piece in intent.objects():
        body = data[piece.offset : piece.offset + piece.size]
        store.put(keys.save(1, "s1") + piece.name, body)
        hashes[piece.name] = f"{store.hashes[0]}:{hashlib.new(store.hashes[0], body).hexdigest()}"
    one.publish(intent, hashes, AUTHOR)
    assert [save.problem for save in take_inventory(store, keys).saves] == [""]
    shown = {item.key.rpartition("/")[2]: item.hash for item in store.list(keys.save(1, "s1") + "w/")}
    known = {name.rpartition("/")[2]: digest for name, digest in hashes.items()}
    assert shown == (known if store.url.startswith("b2:") else dict.fromkeys(known, ""))
    store.put(keys.save(1, "s1") + "w/model.piece-00000", b"x" * 100)
    assert (take_inventory(store, keys).saves[0].problem != "") is store.url.startswith("b2:")
    if store.url.startswith("b2:"):
        with pytest.raises(PiecesMissing):
            one.publish(intent, hashes, AUTHOR)


def test_nothing_is_stored_or_deleted_after_the_given_time(store: Objects, at: str) -> None:
    store.put(f"{at}/a", b"1", until=boottime() + 60)
    with pytest.raises(LeaseUnsettled):
        store.put(f"{at}/b", b"1", until=boottime() - 0.01)
    with pytest.raises(LeaseUnsettled):
        store.delete([f"{at}/a"], until=boottime() - 0.01)
    assert [item.key for item in store.list(f"{at}/")] == [f"{at}/a"]
    store.put(f"{at}/b", b"1")
    store.delete([f"{at}/a", f"{at}/b"], until=boottime() + 60)
    assert list(store.list(f"{at}/")) == []


def test_limits(store: Objects, at: str) -> None:
    store.put(f"{at}/big", b"x" * 100)
    assert store.read(f"{at}/big", limit=100) == b"x" * 100
    with pytest.raises(ObjectTooLarge):
        store.read(f"{at}/big", limit=99)


@pytest.mark.parametrize("key", ["/abs", "a/../b", "a//b", "", "a\0b", "a/./b"])
def test_unsafe_keys(store: Objects, key: str) -> None:
    for act in (lambda: store.put(key, b"x"), lambda: store.read(key), lambda: store.delete([key])):
        with pytest.raises(IntegrityError, match="unsafe"):
            act()


def test_a_wrong_hash_is_not_stored_where_one_is_compared(store: Objects, at: str) -> None:
    checked = store.check(f"{at}/")
    assert list(store.list(f"{at}/")) == [], "a check leaves nothing"
    assert checked.can_delete
    wrong = {name: hashlib.new(name, b"other").hexdigest() for name in store.hashes}
    if not checked.verifies:
        assert any("compares no hash" in warning for warning in checked.warnings)
        return
    with pytest.raises(StoreOutage, match="damaged"):
        store.put(f"{at}/x", b"these bytes", wrong)
    assert list(store.list(f"{at}/")) == []


def test_a_file_that_becomes_shorter(store: Objects, at: str, file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        piece = Slice(descriptor, 0, 3 * MIB)
        known = piece.hashes(store.hashes)
        os.truncate(file, MIB)
        with pytest.raises(IntegrityError, match="shorter"):
            store.put(f"{at}/x", piece, known)
        with pytest.raises(IntegrityError, match="shorter"):
            store.put(f"{at}/x", Slice(descriptor, 0, 2 * MIB))
    finally:
        os.close(descriptor)
    assert list(store.list(f"{at}/")) == []


def test_writers_that_begin_together_take_nothing_from_each_other(tmp_path: Path) -> None:
    """Each sweeps once, at its first write, what killed writers left; what another has just made is no such file."""

    def write(number: int) -> None:
        for turn in range(40):
            DirectoryObjects(tmp_path).put(f"k/{number}-{turn}", b"x")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    assert len(list(DirectoryObjects(tmp_path).list("k/"))) == 240
