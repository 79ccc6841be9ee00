"""A finished run is archived: its newest checkpoint stays whole, whatever happens, and nothing foreign is touched."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from podwatch.domain.errors import Busy, HostError, IntegrityError, RemoteError
from podwatch.domain.lease import Claim, Pod, claim_document
from podwatch.store.inventory import take_inventory
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Checked
from podwatch.store.objects.errors import StoreRefused
from podwatch.store.runs.archive import ArchiveKeep, Archiver
from podwatch.store.runs.judge import Level, Limits, judge
from podwatch.store.runs.read import read_run_to_check, record_key
from tests.support.memory_objects import MemoryObjects
from tests.support.stored_runs import past_run, publisher_of, put_beat

KEYS = RunKeys("past")
DAY = 86400.0


@dataclass
class Store(MemoryObjects):
    skew: float | None = 0.0
    warnings: tuple[str, ...] = ()

    def check(self, prefix: str) -> Checked:
        return Checked("sha256", not self.warnings, self.skew, self.warnings)


@dataclass
class Now:
    store: Store

    def wall(self) -> float:
        return self.store.wall

    def boottime(self) -> float:
        return self.store.wall


@dataclass
class World:
    """A run of four checkpoints whose pod left it three days ago."""

    store: Store = field(default_factory=Store)

    def __post_init__(self) -> None:
        self.store.boottime = lambda: self.store.wall
        past_run(self.store, KEYS, 10, 20, 30, 40)  # type: ignore[arg-type]
        put_beat(self.store, KEYS, state="released", desired="finished", outcome="finished")
        self.store.wall += 3 * DAY

    @property
    def archiver(self) -> Archiver:
        return Archiver(self.store, KEYS, Now(self.store), "laptop")  # type: ignore[arg-type]

    def archive(self, keep: ArchiveKeep = ArchiveKeep.LATEST, **options: object) -> None:
        archiver = self.archiver
        archiver.carry_out(archiver.look(keep, **{"keep_every": 10, **options}))  # type: ignore[arg-type]

    def steps(self) -> list[int]:
        found = take_inventory(self.store, KEYS)
        assert all(not save.problem for save in found.saves)
        assert found.newest is not None
        assert found.newest.step == 40
        return sorted(save.step for save in found.saves)


@pytest.fixture
def world() -> World:
    return World()


def test_only_the_newest_stays(world: World) -> None:
    plan = world.archiver.look(ArchiveKeep.LATEST, keep_every=10)
    assert [(v.save.step, v.stays) for v in plan.retention.saves] == [
        (10, False), (20, False), (30, False), (40, True),
    ]  # fmt: skip
    assert plan.freed_bytes == 750
    world.archive()
    assert world.steps() == [40]
    assert not [key for key in world.store.data if "step_10/" in key]
    assert world.archiver.look(ArchiveKeep.LATEST, keep_every=10).is_empty


def test_milestones_pins_and_what_was_superseded_today_stay(world: World) -> None:
    for keep, pins in ((ArchiveKeep.MILESTONES, set[int]()), (ArchiveKeep.LATEST, {20})):
        plan = world.archiver.look(keep, keep_every=2, pins=pins)
        assert {verdict.save.step for verdict in plan.retention.deleted} == {10, 30}
    world.store.put(KEYS.save(30, "save30") + "pinned", b"")
    world.archive()
    assert world.steps() == [30, 40]
    fresh = World()
    fresh.store.wall -= 3 * DAY - 3600
    assert fresh.archiver.look(ArchiveKeep.LATEST, keep_every=0).is_empty, "a reader can still use them"


def test_a_run_that_a_podwatch_can_still_guard_is_refused(world: World) -> None:
    put_beat(world.store, KEYS, state="restarting")
    with pytest.raises(Busy, match="podwatch is active"):
        world.archive()
    world.store.wall += 1000
    world.archive()
    assert world.steps() == [40]


def test_a_run_that_its_pod_has_just_left_can_be_archived(world: World) -> None:
    put_beat(world.store, KEYS, state="released", desired="finished")
    world.archive()
    assert world.steps() == [40]


def test_a_claim_after_the_last_farewell_is_another_pod(world: World) -> None:
    put_beat(world.store, KEYS, state="released", generation=1)
    world.store.put(KEYS.claim(2, "n"), claim_document(Claim(2, "n"), Pod("w2"), "now"))
    with pytest.raises(Busy):
        world.archive()
    assert world.steps() == [10, 20, 30, 40]


def test_a_pod_that_comes_back_in_the_middle_ends_it(world: World) -> None:
    """Between two deletions: nothing more is deleted, and nothing says that the run is archived."""
    deletions = 0

    def back(operation: str, _key: str) -> None:
        nonlocal deletions
        deletions += operation == "delete"
        if deletions == 2:
            deletions += 1
            put_beat(world.store, KEYS, state="running")

    plan = world.archiver.look(ArchiveKeep.LATEST, keep_every=0)
    world.store.before = back
    with pytest.raises(Busy):
        world.archiver.carry_out(plan)
    assert len(world.steps()) >= 3
    assert record_key(KEYS) not in world.store.data


def test_a_pointer_that_moves_meanwhile_ends_it(world: World) -> None:
    plan = world.archiver.look(ArchiveKeep.LATEST, keep_every=0)
    past_run(world.store, KEYS, 50)  # type: ignore[arg-type]
    with pytest.raises(Busy, match="changed while it was archived"):
        world.archiver.carry_out(plan)
    assert len(take_inventory(world.store, KEYS).saves) == 5


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda store: [store.data.pop(k) for k in list(store.data) if "pointers/" in k], "no pointer"),
        (lambda store: store.data.pop(KEYS.save(40, "save40") + "manifest.json"), "manifest is not in the store"),
        (lambda store: store.data.pop(KEYS.save(40, "save40") + "checkpoint/sub/state"), "missing or different"),
        (lambda store: store.put(KEYS.pointer(1, 9, "aa"), b"{"), "cannot be read"),
        (lambda store: publisher_of(store, KEYS, 2).repoint(None, _author()), "started fresh"),
    ],
)
def test_nothing_goes_where_the_newest_is_not_known_or_not_whole(
    world: World, damage: Callable[[Store], object], text: str
) -> None:
    damage(world.store)
    before = set(world.store.data)
    with pytest.raises((HostError, IntegrityError), match=text):
        world.archive()
    assert set(world.store.data) == before


def _author() -> object:
    from podwatch.store.interfaces import Author

    return Author("past", "w1")


def test_killed_at_every_step(world: World) -> None:
    """Whatever is listed afterwards is whole, the newest stays, and later archives finish it."""

    class Killed(BaseException):
        pass

    for deadly in range(40):
        one = World()
        calls = 0

        def kill(operation: str, _key: str, deadly: int = deadly) -> None:
            nonlocal calls
            calls += operation in ("delete", "put")
            if calls > deadly:
                raise Killed

        plan = one.archiver.look(ArchiveKeep.LATEST, keep_every=0)
        one.store.before = kill
        try:
            one.archiver.carry_out(plan)
        except Killed:
            one.store.before = lambda _operation, _key: None
            assert 40 in one.steps()
            one.store.wall += 2 * DAY
            one.archive()
        assert one.steps() == [40]
        assert not [key for key in one.store.data if "step_" in key and "step_40/" not in key]
        if calls <= deadly:
            return
    pytest.fail("it never came to its end")


def test_what_is_not_ours_inside_a_save_stays(world: World) -> None:
    foreign = KEYS.save(10, "save10") + "notes.txt"
    world.store.put(foreign, b"mine")
    world.store.put("past/other/data", b"mine")
    world.archive()
    assert {foreign, "past/other/data"} <= set(world.store.data)
    assert not [key for key in world.store.data if key.startswith(KEYS.save(10, "save10")) and key != foreign]


def test_a_key_that_cannot_delete(world: World) -> None:
    world.store.warnings = ("the key cannot delete: old checkpoints stay",)
    assert "cannot delete" in world.archiver.why_not_deletable()

    def refuse(operation: str, key: str) -> None:
        if operation == "delete":
            raise StoreRefused("permission", "the key may not delete", where=key, fix="")

    plan = world.archiver.look(ArchiveKeep.LATEST, keep_every=0)
    world.store.before = refuse
    with pytest.raises((HostError, RemoteError), match="not everything was deleted"):
        world.archiver.carry_out(plan)
    assert record_key(KEYS) not in world.store.data


def test_an_archived_run_is_well_until_a_pod_continues_it(world: World) -> None:
    put_beat(world.store, KEYS, state="released", desired="running", outcome="gave-up")
    world.store.wall += DAY
    assert judge(read_run_to_check(world.store, KEYS, world.store.wall), Limits()).level is Level.CRITICAL
    world.archive()
    evidence = read_run_to_check(world.store, KEYS, world.store.wall)
    assert evidence.archived_wall is not None
    assert judge(evidence, Limits()).level is Level.OK
    world.store.wall += 60
    put_beat(world.store, KEYS, state="released", desired="running")
    assert read_run_to_check(world.store, KEYS, world.store.wall).archived_wall is None


def test_a_confirmation_looks_at_the_store(world: World) -> None:
    """The deleter asks before each checkpoint: that is what ends an archive when a pod comes back."""
    permit = world.archiver.confirm(world.store)
    assert permit.until == world.store.wall + 30.0
    put_beat(world.store, KEYS)
    with pytest.raises(Busy):
        world.archiver.confirm(world.store)
