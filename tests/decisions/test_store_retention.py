"""Which saves, uploads, pointers and other objects retention deletes from the store: a test for each rule."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from podwatch.domain.checkpoint import FileEntry
from podwatch.store.documents import RunPointer, SaveIntent, SaveManifest
from podwatch.store.inventory import Inventory, Stored, Unfinished
from podwatch.store.pointers import PointerSeen
from podwatch.store.retention import RetentionRules, keeps, milestones, named_lately, plan

HOUR = 3600.0
NOW = 1.7e9
"""The store's present time."""
OLD = NOW - 100 * HOUR
"""When the first save was stored."""
LAST_TWO = RetentionRules(keep_last=2, keep_every=0)
HASH = "sha256:" + "0" * 64
FILE = FileEntry("model", "w", 1, 1, hashes=("sha1:" + "0" * 40,))


def manifest(step: int, save_id: str, seq: int, lineage: str = "main") -> SaveManifest:
    return SaveManifest("run", step, save_id, "me", 1, OLD, "custom", 100, (FILE,), seq=seq, lineage=lineage)


def stored(step: int, *, seq: int | None = None, wall: float = OLD, **changes: Any) -> Stored:
    number, save_id = step if seq is None else seq, f"s{step}"
    made = Stored.of(manifest(step, save_id, number), HASH, wall, ())
    return replace(made, **changes)


def pointer(step: int | None, seq: int, wall: float, generation: int = 1) -> PointerSeen:
    names = {"save_id": f"s{step}", "manifest_hash": HASH} if step is not None else {}
    document = RunPointer("run", generation, seq, step, "me", wall, **names)
    return PointerSeen(f"pointers/{generation:012}-{seq:012}-aa.json", generation, seq, "aa", wall, document)


@dataclass
class World:
    """Six saves, an hour apart, each named by a pointer as it was stored; all of it long ago."""

    saves: list[Stored] = field(default_factory=list)
    pointers: list[PointerSeen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.saves = [stored(n, wall=OLD + n * HOUR) for n in range(1, 7)]
        self.pointers = [pointer(n, n, OLD + n * HOUR) for n in range(6, 0, -1)]

    def deleted(self, rules: RetentionRules = LAST_TWO, *, now: float = NOW, latest: int = 6, **more: Any) -> list[int]:
        names = {"unfinished", "tmp"} & more.keys()
        inventory = Inventory(
            tuple(self.saves), pointers=tuple(self.pointers), latest=pointer(latest, 1, OLD).pointer, store_wall=now,
            **{name: more.pop(name) for name in names},
        )  # fmt: skip
        return [verdict.save.step for verdict in plan(inventory, rules, **more).deleted]


@pytest.fixture
def world() -> World:
    return World()


# -- what stays


@pytest.mark.parametrize(("keep_last", "deleted"), [(0, [1, 2, 3, 4, 5]), (1, [1, 2, 3, 4, 5]), (4, [1, 2]), (9, [])])
def test_the_last_ones_stay(world: World, keep_last: int, deleted: list[int]) -> None:
    assert world.deleted(RetentionRules(keep_last=keep_last, keep_every=0)) == deleted


def test_the_last_ones_of_those_that_are_whole(world: World) -> None:
    world.saves[4] = replace(world.saves[4], problem="objects are missing")
    assert world.deleted() == [1, 2, 3, 5]


def test_the_last_ones_in_the_order_of_publication_not_of_steps(world: World) -> None:
    """After a step back the newest have lower steps."""
    world.saves = [stored(step, seq=n) for n, step in enumerate((10, 20, 30, 11, 12), 1)]
    world.pointers = [pointer(12, 5, OLD)]
    assert world.deleted(latest=12) == [10, 20, 30]


def test_milestones_stay(world: World) -> None:
    assert world.deleted(RetentionRules(keep_last=1, keep_every=2)) == [1, 3, 5]
    assert milestones(world.saves, 0) == frozenset()
    gap = [save for save in world.saves if save.seq != 4]
    assert milestones(gap, 4) == {(5, "s5")}, "the first at or after a multiple"


def test_pins_stay_of_this_pod_and_of_the_store(world: World) -> None:
    world.saves[0] = replace(world.saves[0], pinned=True)
    assert world.deleted(pins={3}) == [2, 4]


def test_saves_with_exports_stay(world: World) -> None:
    world.saves[1] = replace(world.saves[1], exports=True)
    assert world.deleted() == [1, 3, 4]


def test_what_is_sent_restored_or_resumed_from_stays(world: World) -> None:
    assert world.deleted(live={(2, "s2")}) == [1, 3, 4]


def test_another_save_of_the_same_step_is_not_in_use(world: World) -> None:
    assert world.deleted(live={(2, "other")}) == [1, 2, 3, 4]


def test_what_a_pointer_of_this_life_has_named_stays(world: World) -> None:
    """A listing may not show that pointer yet."""
    assert world.deleted(named={(3, "s3")}) == [1, 2, 4]


def test_what_it_named_counts_for_a_day() -> None:
    """Else a podwatch that is never restarted would never delete what it has published."""
    named = {(1, "s1"): 1000.0, (2, "s2"): 1000.0 + HOUR}
    assert named_lately(named, 1000.0 + 24 * HOUR, LAST_TWO) == {(2, "s2")}
    assert named_lately(named, 1000.0 + 25 * HOUR, LAST_TWO) == frozenset()


def test_what_the_highest_pointer_names_stays_however_old(world: World) -> None:
    world.pointers.insert(0, pointer(1, 7, OLD + 7 * HOUR))
    assert world.deleted() == [2, 3, 4]


def test_what_the_highest_pointer_names_stays_also_where_it_is_not_whole(world: World) -> None:
    """Objects that a listing lacks now can be there again, and readers follow the pointer."""
    world.saves[5] = replace(world.saves[5], problem="objects are missing")
    inventory = Inventory(tuple(world.saves), pointers=tuple(world.pointers), store_wall=NOW)
    (verdict,) = [one for one in plan(inventory, LAST_TWO).saves if one.save.step == 6]
    assert (verdict.stays, verdict.until, verdict.reason) == (True, None, "a pointer names it, or it is in use")


def test_what_the_highest_readable_pointer_names_stays_where_its_save_is_whole(world: World) -> None:
    """The highest pointer names nothing whole: a reader goes to the next one."""
    world.pointers = [pointer(9, 9, OLD + 9 * HOUR), pointer(1, 8, OLD + 8 * HOUR)]
    assert 1 not in world.deleted()


def test_what_the_highest_pointer_names_stays_also_while_an_object_of_it_is_missing(world: World) -> None:
    """Its pod sends that object again."""
    world.saves[0] = replace(world.saves[0], problem="an object is missing")
    world.pointers.insert(0, pointer(1, 7, OLD + 7 * HOUR))
    assert world.deleted() == [2, 3, 4]


def test_what_any_pointer_of_the_last_day_names_stays(world: World) -> None:
    world.pointers[1:1] = [pointer(2, 6, NOW - 23 * HOUR)]
    world.pointers[0] = pointer(6, 7, NOW - 22.5 * HOUR)
    assert world.deleted() == [1, 3, 4]
    assert world.deleted(now=NOW + 2 * HOUR) == [1, 2, 3, 4]


def test_what_latest_json_names_stays(world: World) -> None:
    assert world.deleted(latest=2) == [1, 3, 4]


def test_a_save_whose_manifest_cannot_be_read_is_never_deleted(world: World) -> None:
    world.saves[0] = replace(world.saves[0], manifest=None, problem="no JSON")
    assert world.deleted() == [2, 3, 4]


# -- ages


def test_a_save_stays_for_six_hours_after_another_replaced_it(world: World) -> None:
    """By the next save, and by the pointer that came after the one that named it."""
    world.saves[4:] = [stored(n, wall=NOW - 5.9 * HOUR) for n in (5, 6)]
    assert world.deleted() == [1, 2, 3], "step 4 was replaced by step 5"
    assert world.deleted(now=NOW + 0.2 * HOUR) == [1, 2, 3, 4]
    world.pointers[:2] = [pointer(6, 6, NOW - HOUR), pointer(5, 5, NOW - 25 * HOUR)]
    world.saves = [stored(n, wall=OLD + n * HOUR) for n in range(1, 7)]
    assert world.deleted(RetentionRules(keep_last=1, keep_every=0)) == [1, 2, 3, 4], "step 5 was the newest until then"
    assert 5 in world.deleted(RetentionRules(keep_last=1, keep_every=0), now=NOW + 5.1 * HOUR)


def test_a_save_that_no_pointer_has_named_stays_for_a_day(world: World) -> None:
    """Its pointer may still arrive."""
    world.pointers = [one for one in world.pointers if one.pointer is not None and one.pointer.step != 2]
    world.saves[1] = stored(2, wall=NOW - 23.9 * HOUR)
    assert world.deleted() == [1, 3, 4]
    assert world.deleted(now=NOW + 0.2 * HOUR) == [1, 2, 3, 4]


def test_when_only_its_age_keeps_a_save_the_plan_says_until_when(world: World) -> None:
    world.saves[4:] = [stored(n, wall=NOW - 2 * HOUR) for n in (5, 6)]
    inventory = Inventory(tuple(world.saves), pointers=tuple(world.pointers), store_wall=NOW)
    verdict = next(v for v in plan(inventory, LAST_TWO).saves if v.save.step == 4)
    assert (verdict.stays, verdict.until) == (True, NOW + 4 * HOUR)


# -- a pointer that cannot be read


@pytest.mark.parametrize(
    ("place", "wall", "blocks"),
    [(0, OLD + 7 * HOUR, True), (1, NOW - 23 * HOUR, True), (1, NOW - 25 * HOUR, False)],
    ids=["the highest", "of the last day", "older"],
)
def test_a_pointer_that_counts_and_cannot_be_read_keeps_every_save_and_pointer(
    world: World, place: int, wall: float, blocks: bool
) -> None:
    broken = PointerSeen("pointers/x", 1, 7, "bb", wall, None, "no JSON")
    world.pointers.insert(place, broken)
    inventory = Inventory(
        tuple(world.saves), (unfinished(NOW - 25 * HOUR),), tuple(world.pointers), tmp=(("t", OLD),), store_wall=NOW
    )
    wanted = plan(inventory, replace(LAST_TWO, keep_pointers=1))
    assert bool(wanted.blocked) is blocks
    assert (wanted.deleted == (), wanted.pointers == ()) == (blocks, blocks)
    assert (len(wanted.unfinished), wanted.tmp) == (1, ("t",)), "these no pointer names"


# -- what else goes


def unfinished(newest: float, **changes: Any) -> Unfinished:
    intent = SaveIntent("run", 9, "u9", "me", 1, OLD, "custom", 100, (FILE,))
    return replace(Unfinished(9, "u9", newest, 1, intent), **changes)


@pytest.mark.parametrize(
    ("one", "live", "goes"),
    [
        (unfinished(NOW - 24 * HOUR), (), True),
        (unfinished(NOW - 23.9 * HOUR), (), False),
        (unfinished(OLD, intent=None, problem="no JSON"), (), False),
        (unfinished(OLD), {(9, "u9")}, False),
    ],
    ids=["a day old", "younger", "what it names is not known", "being sent"],
)
def test_an_unfinished_upload_goes_a_day_after_its_newest_object(one: Unfinished, live: Any, goes: bool) -> None:
    assert bool(plan(Inventory(unfinished=(one,), store_wall=NOW), LAST_TWO, live=live).unfinished) is goes


def test_pointers_beyond_the_last_hundred_go_once_they_are_a_day_old() -> None:
    seen = [pointer(None, n, OLD + n * 60) for n in range(120, 0, -1)]
    wanted = plan(Inventory(pointers=tuple(seen), store_wall=NOW), LAST_TWO)
    assert [one.seq for one in wanted.pointers] == list(range(20, 0, -1))
    young = [replace(one, wall=NOW - 23 * HOUR) for one in seen]
    assert plan(Inventory(pointers=tuple(young), store_wall=NOW), LAST_TWO).pointers == ()
    assert (
        len(plan(Inventory(pointers=tuple(seen), store_wall=NOW), replace(LAST_TWO, keep_pointers=0)).pointers) == 119
    )


def test_temporary_objects_go_after_a_day() -> None:
    inventory = Inventory(tmp=(("old", NOW - 24 * HOUR), ("young", NOW - 23 * HOUR)), store_wall=NOW)
    assert plan(inventory, LAST_TWO).tmp == ("old",)


def test_one_that_never_was_the_newest_takes_no_place_of_the_last(world: World) -> None:
    """A pinned one of the last life, stored at its end and unpinned later; its generation is the highest."""
    late = stored(0, seq=0, wall=OLD + 7 * HOUR, generation=2)
    world.saves.append(late)
    assert 5 not in world.deleted()
    assert 0 in world.deleted()


# -- what is not stored yet


def test_what_retention_would_delete_at_once_is_not_kept_for_upload(world: World) -> None:
    inventory = Inventory(tuple(world.saves), store_wall=NOW)
    assert not keeps(inventory, LAST_TWO, 4, lineage="main")
    lacking = replace(inventory, saves=tuple(save for save in inventory.saves if save.step != 4))
    assert not keeps(lacking, LAST_TWO, 4, lineage="main"), "two newer ones are enough"
    assert keeps(inventory, LAST_TWO, 5, lineage="main")
    assert keeps(inventory, LAST_TWO, 4, lineage="branch"), "saves of another lineage do not replace it"
    assert not keeps(inventory, RetentionRules(keep_last=0), 5, lineage="main")
    assert keeps(inventory, RetentionRules(keep_last=0), 6, lineage="main"), "the newest always stays"
    damaged = replace(inventory, saves=(*inventory.saves[:-1], replace(inventory.saves[-1], problem="damaged")))
    assert keeps(damaged, LAST_TWO, 4, lineage="main"), "a damaged save replaces nothing"
