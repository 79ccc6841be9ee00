"""What one listing shows of a run: which save is the newest, which are whole, which uploads can continue."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from podwatch.domain.checkpoint import FileEntry
from podwatch.store.inventory import REUSED_SECONDS, DocumentCache, Inventory, take_inventory
from podwatch.store.retention import RetentionRules
from tests.support.memory_objects import AUTHOR, KEYS, MemoryObjects, intent_of, publisher, send


class World:
    """Two saves, published; what a test does to the store, and what is read then."""

    def __init__(self) -> None:
        self.store = MemoryObjects()
        self.store.put(KEYS.claim(1, "aa"), b"{}")
        self.publisher = publisher(self.store)
        for step in (1, 2):
            self.publisher.publish(*send(self.store, intent_of(step, f"s{step}")), AUTHOR)

    def take(self) -> Inventory:
        return take_inventory(self.store, KEYS)

    def newest(self) -> int | None:
        found = self.take().newest
        return None if found is None else found.step

    def change(self, key: str, data: bytes | None) -> None:
        if data is None:
            del self.store.data[key]
        else:
            self.store.put(key, data)


@pytest.fixture
def world() -> World:
    return World()


PIECE = KEYS.save(2, "s2") + "w/model.piece-00001"


@pytest.mark.parametrize(
    ("key", "data"),
    [
        (PIECE, None),
        (PIECE, b"shorter"),
        (PIECE, b"x" * 100),
        (KEYS.save(2, "s2") + "manifest.json", None),
        (KEYS.save(2, "s2") + "manifest.json", b"{"),
    ],
    ids=["no piece", "size", "bytes", "no manifest", "no JSON"],
)
def test_the_newest_is_the_highest_that_is_whole(world: World, key: str, data: bytes | None) -> None:
    assert world.newest() == 2
    world.change(key, data)
    assert world.newest() == 1
    assert (2, "s2") not in world.take().stored


def test_a_manifest_that_the_pointer_does_not_name_is_not_the_newest(world: World) -> None:
    key = KEYS.save(2, "s2") + "manifest.json"
    manifest = world.take().saves[-1].manifest
    assert manifest is not None
    world.change(key, replace(manifest, created_at=5.0).to_bytes())
    assert world.newest() == 1


def test_a_manifest_without_a_hash_proves_nothing(world: World) -> None:
    manifest = world.take().saves[-1].manifest
    assert manifest is not None
    data = manifest.to_bytes().replace(b'"hashes"', b'"others"', 1)
    world.change(KEYS.save(2, "s2") + "manifest.json", data)
    assert "has no hash" in world.take().saves[0].problem
    assert world.newest() == 1


@pytest.mark.parametrize("place", [(3, "s3"), (2, "x"), (1, "s1")], ids=["step", "id", "of another save"])
def test_a_copied_manifest_is_of_no_save(world: World, place: tuple[int, str]) -> None:
    data = world.store.data[KEYS.save(2, "s2") + "manifest.json"][0]
    world.change(KEYS.save(*place) + "manifest.json", data)
    found = next(save for save in world.take().saves if save.key == place)
    assert found.manifest is None
    assert "belongs to another save" in found.problem


def test_a_pointer_with_other_numbers_than_its_name_counts_for_nothing(world: World) -> None:
    key = max(key for key in world.store.data if "/pointers/" in key)
    first = min(key for key in world.store.data if "/pointers/" in key)
    world.change(key, world.store.data[first][0])
    assert world.take().pointers[0].pointer is None
    assert world.newest() == 1


def test_a_fresh_start_has_no_newest(world: World) -> None:
    world.publisher.repoint(None, AUTHOR)
    assert world.newest() is None
    assert len(world.take().stored) == 2


def test_of_two_pointers_of_one_number_the_first_uploaded_counts(world: World) -> None:
    top = max(key for key in world.store.data if "/pointers/" in key)
    world.store.wall += 5.0
    data = world.store.data[top][0].replace(b'"s2"', b'"s1"').replace(b'"step": 2', b'"step": 1')
    world.change(KEYS.pointer(1, 2, "0"), data)
    assert world.take().pointers[0].key == top


# -- uploads that were begun


FILES = intent_of(5, "u5").files


@pytest.mark.parametrize(
    ("files", "step", "writer", "age", "found"),
    [
        (FILES, 5, "me", REUSED_SECONDS - 1, True),
        (FILES, 5, "me", REUSED_SECONDS, False),
        (FILES, 5, "other", 0.0, False),
        (FILES, 6, "me", 0.0, False),
        (FILES[:1], 5, "me", 0.0, False),
        (tuple(replace(f, mtime_ns=f.mtime_ns + 1) for f in FILES), 5, "me", 0.0, False),
    ],
    ids=["young", "old", "of another pod", "of another step", "of other files", "saved again"],
)
def test_which_upload_is_continued(
    world: World, files: tuple[FileEntry, ...], step: int, writer: str, age: float, found: bool
) -> None:
    send(world.store, intent_of(5, "u5"))
    world.store.wall += age
    world.store.put(KEYS.heartbeat, b"{}")
    assert (world.take().find_unfinished(step, files, writer) is not None) is found


def test_no_upload_is_continued_that_a_sweep_can_be_removing() -> None:
    assert RetentionRules().unfinished / 2 >= REUSED_SECONDS


def test_an_upload_is_as_old_as_its_own_newest_object(world: World) -> None:
    """What somebody puts beside it makes it no younger."""
    send(world.store, intent_of(5, "u5"))
    before = world.take().unfinished[0].newest_wall
    world.store.wall += 100.0
    world.change(KEYS.save(5, "u5") + "w/notes.txt", b"x")
    assert world.take().unfinished[0].newest_wall == before
    world.change(KEYS.save(5, "u5") + "w/model.piece-00000", b"x")
    assert world.take().unfinished[0].newest_wall == before + 100.0


@pytest.mark.parametrize(
    "break_it",
    [lambda data: b"{", lambda data: data.replace(b'"u5"', b'"u6"')],
    ids=["no JSON", "of another save"],
)
def test_an_intent_that_cannot_be_read_names_nothing(world: World, break_it: Callable[[bytes], bytes]) -> None:
    send(world.store, intent_of(5, "u5"))
    key = KEYS.save(5, "u5") + "intent.json"
    world.change(key, break_it(world.store.data[key][0]))
    (one,) = world.take().unfinished
    assert one.intent is None
    assert one.problem


def test_a_document_that_was_replaced_is_read_again(world: World) -> None:
    cache = DocumentCache()
    key = KEYS.save(2, "s2") + "manifest.json"
    assert not take_inventory(world.store, KEYS, cache).saves[-1].problem
    reads = world.store.reads
    take_inventory(world.store, KEYS, cache)
    assert world.store.reads == reads, "each document is read once"
    world.store.wall += 1.0
    world.change(key, b"{")
    assert any(save.problem for save in take_inventory(world.store, KEYS, cache).saves)
