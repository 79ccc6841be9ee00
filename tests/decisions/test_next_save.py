"""The next save: how big, how many files, when; and whole weeks of a disk that is judged every ten seconds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.checkpoints.records import CheckpointRecord, CheckpointRecords
from podwatch.config.settings import DiskSettings
from podwatch.disk.next_save import NextSave, median_gap, predict
from podwatch.disk.plan import DiskFacts, Protection, RemovalKind, Trigger, plan_removals
from podwatch.domain.checkpoint import CheckpointSet, Completeness, PartState, newest_complete
from podwatch.domain.snapshot import DiskSample

pytestmark = pytest.mark.slow

POLICY = DiskSettings()
GB = 1_000_000_000
TURN = 60.0
SAVES = int(os.environ.get("PODWATCH_DISK_SAVES", "60"))
"""`make test-disk` judges hundreds."""


def saved(
    step: int, wall: float, size: int = 47, *, export: int = 0, save_id: str = "", files: int = 9
) -> CheckpointSet:
    parts = [PartState("trainer", f"/o/checkpoints/step_{step}", True, True, size)]
    if export:
        parts.append(PartState("weights", f"/o/weights/step_{step}", False, True, export))
    whole = Completeness.COMPLETE
    return CheckpointSet(step, "x", whole, tuple(parts), size + export, files, wall, save_id or f"id{step}")


def seen(sets: Sequence[CheckpointSet], before: CheckpointRecords | None = None) -> CheckpointRecords:
    """The records after a rescan that found these."""
    records = CheckpointRecords() if before is None else before
    for found in sorted((s for s in sets if s.complete), key=lambda s: s.changed_wall):
        key, parts = (found.step, found.save_id), {p.name: p.size_bytes for p in found.parts}
        if any(r.key == key for r in records.all):
            records.grow(key, parts, found.file_count)
        else:
            records.note(CheckpointRecord(*key, "x", "", (), found.changed_wall, parts, found.file_count))
    return records


def after(*sets: CheckpointSet, wall: float | None = None, save_seconds: float = 0.0) -> NextSave:
    last = max((s.changed_wall for s in sets), default=0.0)
    return predict(seen(sets).all, last if wall is None else wall, save_seconds)


def test_nothing_is_predicted_from_nothing() -> None:
    assert after() == NextSave()
    assert after(replace(saved(1, 10.0, 400), completeness=Completeness.DAMAGED)) == NextSave()


def test_the_biggest_of_the_last_ones() -> None:
    assert after(*[saved(n, n * 100.0, size) for n, size in enumerate([47, 46, 48, 45, 46, 47])]).bytes == 48
    milestones = [saved(n, n * 100.0, export=31 if n == 3 else 0) for n in range(16)]
    assert after(*milestones[:15]).bytes == 78, "one of the last twelve had an export"
    assert after(*milestones).bytes == 47
    assert after(saved(1, 1.0, 47), saved(2, 2.0, 15)).bytes == 47, "a model without its optimizer in between"


def test_the_usual_size() -> None:
    assert after(*[saved(n, n * 100.0, 31 if n == 11 else 16) for n in range(12)]).usual_bytes == 16
    assert after(*[saved(n, n * 100.0, 47 if n % 2 else 15) for n in range(12)]).usual_bytes == 47
    assert after(*[saved(n, n * 100.0, 47 if n > 9 else 15) for n in range(12)]).usual_bytes == 47
    assert after(saved(1, 1.0, 47, files=8), saved(2, 2.0, 15)).usual_files == 9
    found = seen([saved(n, n * 100.0, export=31 if n == 3 else 0) for n in range(12)]).all
    assert predict(found, 0.0, elsewhere={"weights"}) == NextSave(47, 0, 47, 0)
    assert predict(found, 0.0, elsewhere={"trainer"}) == NextSave(31, 0, 0, 0)


def test_one_big_save_costs_no_unstored_checkpoint_and_no_training() -> None:
    sets = [saved(n, n * 1200.0, (31 if n == 10 else 16) * GB) for n in range(12)]
    expected = after(*sets)
    free = 20 * GB
    given_ = DiskFacts(sets[-3:], DiskSample("/app", 200 * GB, 200 * GB - free, free), expected, stored=frozenset())
    given_ = replace(given_, next_save=replace(expected, due_in=None))
    plan = plan_removals(given_, DiskSettings(prune_above=1.0))
    assert (plan.removals, plan.critical, plan.missing_bytes) == ((), False, 0)
    assert plan.missing_for_biggest == int(31 * GB * 1.1) - free
    both = replace(given_, stored=frozenset({(9, "id9"), (10, "id10")}))
    assert [r.step for r in plan_removals(both, POLICY).removals] == [9, 10], "what is in the store goes for it"
    low = replace(given_, disk=DiskSample("/app", 200 * GB, 183 * GB, 17 * GB))
    plan = plan_removals(low, POLICY)
    assert [r.kind for r in plan.removals] == [RemovalKind.UNSTORED], "as much as the usual size needs"
    assert plan.missing_bytes == 0
    begun = replace(saved(12, 13 * 1200.0, 18 * GB), completeness=Completeness.WRITING, save_id="")
    grown = replace(low, checkpoints=[*sets[-3:], begun], disk=DiskSample("/app", 200 * GB, 190 * GB, 10 * GB))
    assert plan_removals(grown, POLICY).critical, "the save in flight is a big one"


def test_what_podwatch_removed_of_a_set_was_written_all_the_same() -> None:
    whole, cut = saved(1, 10.0, export=16), saved(1, 10.0)
    saves = seen([whole])
    before = saves.all
    assert seen([cut], saves).all is before
    assert seen([], saves).all is before
    assert seen([whole], seen([cut])).all == before, "an export that comes later belongs to it"


def test_when_it_comes() -> None:
    regular = [saved(n, n * 1200.0) for n in range(1, 6)]
    assert after(*regular, wall=6000.0 + 100).due_in == 1100.0
    assert after(*regular, wall=6000.0 + 100, save_seconds=200.0).due_in == 900.0
    assert not after(*regular, wall=6000.0 + 100).near
    assert after(*regular, wall=6000.0 + 901).near
    late = after(*regular, wall=6000.0 + 1201)
    assert (late.due_in, late.near) == (None, True)
    for sets in (regular[:3], [*regular, saved(6, 6300.0)], [*regular, saved(6, 9000.0)]):
        found = after(*sets)
        assert (found.due_in, found.near) == (None, True), "too few, or no rhythm"
    assert after(*regular, wall=5000.0).near, "the clock was set back"


def test_how_long_it_is_from_one_to_the_next() -> None:
    saves = seen([saved(n * 5, n * 1200.0) for n in range(1, 4)] + [saved(20, 4500.0)]).all
    assert median_gap(saves) == 1200.0
    assert median_gap(seen([saved(5, 1200.0)]).all) is None


def test_a_step_back_is_no_rhythm() -> None:
    sets = [saved(5, 1000.0), saved(10, 2000.0), saved(5, 2010.0, save_id="again"), saved(10, 3010.0, save_id="again2")]
    assert median_gap(seen(sets).all) == 1000.0
    assert after(*sets).due_in is None, "two gaps"


def test_inodes_are_predicted_too() -> None:
    found = after(saved(1, 1.0, files=900), saved(2, 1201.0, files=1000))
    assert found.files == 1000
    low = DiskSample("/x", 10_000, 5000, 5000, 10_000, 600)
    given_ = DiskFacts([saved(1, 1.0, files=900), saved(2, 1201.0, files=1000)], low, replace(found, bytes=47))
    plan = plan_removals(given_, POLICY)
    assert (plan.trigger, plan.critical) == (Trigger.INODES, True)
    assert [r.kind for r in plan.removals] == [RemovalKind.UNSTORED]
    full = replace(given_, next_save=replace(found, files=2000, usual_files=2000))
    assert plan_removals(full, POLICY).missing_inodes == 2200 - 600 - 900


SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=20)


@settings(deadline=None, max_examples=150)
@given(SIZES, st.floats(0, 5000), st.floats(1, 3000))
def test_whatever_was_saved(sizes: list[int], wait: float, gap: float) -> None:
    sets = [saved(n, n * gap, size) for n, size in enumerate(sizes)]
    found = predict(seen(sets).all, (len(sizes) - 1) * gap + wait)
    assert found.bytes == max(sizes[-12:])
    assert found.due_in is None or 0 < found.due_in <= gap


# -- weeks of a disk ------------------------------------------------------------------------------------------------


@dataclass
class World:
    """The user's pod by the numbers: 250 GB, 47 GB a save every 20 minutes, and what else lies there, so that 65 GB
    are free beside two sets. Judged once a minute; a save takes two minutes. ``keep_last`` None: the trainer never
    deletes."""

    rate: float
    """Bytes per second to the store."""
    keep_last: int | None = 2
    down: tuple[float, float] = (0.0, 0.0)
    cadence: float = 1200.0
    policy: DiskSettings = POLICY
    patient: bool = True
    capacity: int = 250 * GB
    other: int = 91 * GB
    sets: dict[int, CheckpointSet] = field(default_factory=dict)
    stored: set[tuple[int, str]] = field(default_factory=set)
    lost: list[int] = field(default_factory=list)
    told: int = 0
    written = 0.0
    writing: int | None = None
    uploading: int | None = None
    sent = 0.0
    saves: CheckpointRecords = field(default_factory=CheckpointRecords)
    now = 0.0
    least_free = 1 << 60

    def used(self) -> int:
        return self.other + sum(s.size_bytes for s in self.sets.values()) + int(self.written)

    def free(self) -> int:
        return self.capacity - self.used()

    def run(self, count: int) -> None:
        step, begin = 0, self.cadence
        while step < 5 * count or self.writing is not None:
            self.now += TURN
            if self.writing is None and self.now >= begin:
                step, self.writing, self.written = step + 5, step + 5, 0.0
            if self.writing is not None:
                self.written = min(47.0 * GB, self.written + 47.0 * GB / 2)
                assert self.free() >= 0, f"no space left at step {self.writing}"
                if self.written >= 47.0 * GB:
                    self.sets[self.writing] = saved(self.writing, self.now, 47 * GB)
                    self.writing, self.written, begin = None, 0.0, begin + self.cadence
                    for old in sorted(self.sets)[: -self.keep_last] if self.keep_last else ():
                        del self.sets[old]
            self.least_free = min(self.least_free, self.free())
            self.upload()
            self.judge()

    def upload(self) -> None:
        if self.down[0] <= self.now < self.down[1]:
            return
        if self.uploading is not None and self.uploading not in self.sets:
            self.uploading = None  # the trainer was faster
        if self.uploading is None:
            newest = newest_complete(list(self.sets.values()))
            if newest is None or (newest.step, newest.save_id) in self.stored:
                return
            self.uploading, self.sent = newest.step, 0.0
        self.sent += TURN * self.rate
        if self.sent >= 47 * GB:
            self.stored.add((self.uploading, f"id{self.uploading}"))
            self.uploading = None

    def judge(self) -> None:
        listed = [self.sets[n] for n in sorted(self.sets)]
        if self.writing is not None:
            part = replace(saved(self.writing, self.now, max(1, int(self.written))), completeness=Completeness.WRITING)
            listed.append(replace(part, save_id=""))
        expected = predict(seen(listed, self.saves).all, self.now, save_seconds=120.0)
        given_ = DiskFacts(
            listed,
            DiskSample("/app", self.capacity, self.used(), self.free()),
            expected if self.patient else replace(expected, due_in=None),
            stored=frozenset(self.stored),
            protected={self.uploading: Protection.UPLOADING} if self.uploading is not None else {},
        )
        newest = newest_complete(listed)
        plan = plan_removals(given_, self.policy)
        assert plan.missing_bytes == 0, "one set and the next one always fit here"
        self.told += bool(plan.waiting)
        for removal in plan.removals:
            assert removal.step is not None
            assert newest is not None
            assert removal.step != newest.step
            if removal.step == self.uploading:
                self.uploading = None
            if removal.kind is RemovalKind.UNSTORED:
                self.lost.append(removal.step)
            del self.sets[removal.step]


@pytest.mark.parametrize("keep_last", [2, None])
@pytest.mark.parametrize("rate", [15e6, 25e6, 100e6])
def test_many_saves_at_the_users_proportions(rate: float, keep_last: int | None) -> None:
    world = World(rate, keep_last, down=(30_000.0, 60_000.0))
    world.run(SAVES)
    newest = newest_complete(list(world.sets.values()))
    assert newest is not None
    assert newest.step == 5 * SAVES
    if keep_last is None or rate > 20e6:  # else the trainer itself deletes each set before its upload can end
        assert len(world.stored) >= SAVES // 7
    if rate > 50e6:
        gap = 30_000 / 1200
        assert len(world.lost) <= gap + 2, "only what came while the store was down"


def test_waiting_until_the_save_is_near_lets_uploads_end() -> None:
    """The disk holds two sets and a half, and at 32 MB/s one takes 25 minutes: longer than the cadence, but there is
    time if it does not go before it must."""
    patient, hasty = World(32e6, None, other=130 * GB), World(32e6, None, other=130 * GB)
    hasty.patient = False
    patient.run(50)
    hasty.run(50)
    assert len(patient.stored) > 1.2 * len(hasty.stored)
    assert patient.told > 0
    assert hasty.told == 0


def test_a_disk_that_holds_one_set_says_so_in_time() -> None:
    """110 GB: two sets do not fit beside the rest."""
    sets = [saved(n, n * 1200.0, 47 * GB) for n in (1, 2)]
    save = NextSave(47 * GB, 0, 47 * GB, 0)
    given_ = DiskFacts(sets[1:], DiskSample("/app", 110 * GB, 80 * GB, 30 * GB), save, stored=frozenset())
    plan = plan_removals(given_, POLICY)
    assert plan.removals == ()
    assert plan.missing_bytes == int(47 * GB * 1.1) - 30 * GB
