"""What may leave the disk: fixed cases, and properties over arbitrary disks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.config.settings import DiskSettings
from podwatch.disk.explain import plan_document
from podwatch.disk.next_save import NextSave
from podwatch.disk.plan import (
    YIELDING,
    ByProduct,
    DiskFacts,
    Leftovers,
    Protection,
    QuarantineEntry,
    RemovalKind,
    RemovalPlan,
    Trigger,
    plan_removals,
)
from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs, PartState, newest_complete
from podwatch.domain.snapshot import DiskSample
from tests.support.examples import examples

POLICY = DiskSettings()
GB = 1_000_000_000
COMPLETE = Completeness.COMPLETE
UPLOADING = Protection.UPLOADING
ORDER = list(RemovalKind)


def a_set(step: int, size: int = 47 * GB, state: Completeness = COMPLETE, optional: int = 0) -> CheckpointSet:
    parts = [PartState("trainer", f"/o/checkpoints/step_{step}", True, state is COMPLETE, size - optional)]
    if optional:
        parts.append(PartState("weights", f"/o/weights/step_{step}", False, True, optional))
    save_id = f"id{step}" if state is COMPLETE else ""
    return CheckpointSet(
        step, "prime-rl", state, tuple(parts), size, 9, 1000.0 + step, save_id, "" if save_id else "cut"
    )


def disk(used: int, capacity: int = 250 * GB) -> DiskSample:
    return DiskSample("/app", capacity, used, capacity - used, 1000, 900)


def stored(*steps: int) -> frozenset[tuple[int, str]]:
    return frozenset((s, f"id{s}") for s in steps)


def room(**kw: object) -> DiskFacts:
    """A pod with a store, three checkpoints, and a next save of 47 GB."""
    base = DiskFacts([a_set(5), a_set(10), a_set(15)], disk(100 * GB), save(47 * GB), stored=frozenset())
    return replace(base, **kw)  # type: ignore[arg-type]


def save(size: int, due_in: float | None = None) -> NextSave:
    return NextSave(size, 0, size, 0, due_in)


def by_products(*found: ByProduct) -> Leftovers:
    return Leftovers(by_products=found)


def spare(step: int, size: int = GB, changed: float = 5000.0) -> ByProduct:
    return ByProduct(f"/o/run_default/broadcasts/step_{step}", step, size, changed)


def steps(given: DiskFacts) -> list[tuple[int | None, RemovalKind]]:
    return [(r.step, r.kind) for r in plan_removals(given, POLICY).removals]


def test_nothing_goes_while_there_is_room() -> None:
    plan = plan_removals(room(stored=stored(5, 10, 15)), POLICY)
    assert (plan.removals, plan.trigger, plan.critical) == ((), Trigger.NONE, False)
    assert [k.step for k in plan.remaining] == [15, 10, 5]


def test_a_percentage_alone_does_not_protect_so_room_is_made_before_the_next_save() -> None:
    given = room(disk=disk(205 * GB), stored=stored(5, 10))  # 82 %: below the watermark, 45 GB free
    plan = plan_removals(given, POLICY)
    assert plan.trigger is Trigger.ROOM
    assert [r.step for r in plan.removals] == [5]
    assert not plan.critical


def test_above_the_watermark_down_to_the_target() -> None:
    given = room(disk=disk(900, 1000), checkpoints=[a_set(n, 40) for n in range(1, 11)], stored=stored(*range(1, 11)))
    plan = plan_removals(replace(given, next_save=save(40)), POLICY)
    assert plan.trigger is Trigger.USAGE
    assert [r.step for r in plan.removals] == [1, 2, 3, 4]


def test_the_order() -> None:
    given = room(
        checkpoints=[a_set(2, 5 * GB, Completeness.INCOMPLETE), a_set(5, optional=16 * GB), a_set(10), a_set(15)],
        disk=disk(245 * GB),
        next_save=save(200 * GB),
        stored=stored(5),
        leftovers=Leftovers(
            (QuarantineEntry("/q/1", 3, GB, True), QuarantineEntry("/q/2", 4, GB, False)),
            (spare(12), spare(3), spare(14)),
            GB,
        ),
    )
    assert steps(given) == [
        (None, RemovalKind.TRASH),
        (None, RemovalKind.QUARANTINE),
        (2, RemovalKind.INCOMPLETE),
        (None, RemovalKind.BY_PRODUCT),
        (None, RemovalKind.BY_PRODUCT),
        (5, RemovalKind.STORED),
        (10, RemovalKind.UNSTORED),
    ]
    plan = plan_removals(given, POLICY)
    assert plan.critical
    assert plan.shortfall_bytes > 0
    assert plan.freed_bytes == (1 + 1 + 5 + 1 + 1 + 47 + 47) * GB
    assert [r.path for r in plan.removals if r.kind is RemovalKind.BY_PRODUCT] == [spare(3).path, spare(12).path]


def test_a_part_that_a_resume_does_not_need_goes_before_the_set() -> None:
    given = room(checkpoints=[a_set(5, optional=16 * GB), a_set(10)], disk=disk(205 * GB), stored=stored(5))
    (removal,) = plan_removals(given, POLICY).removals
    assert (removal.kind, removal.part, removal.path) == (RemovalKind.OPTIONAL_PART, "weights", "/o/weights/step_5")


def test_parts_of_recent_steps_stay_because_training_may_still_read_them() -> None:
    sets = [a_set(13, optional=16 * GB), a_set(14, optional=16 * GB), a_set(15)]
    given = room(checkpoints=sets, disk=disk(205 * GB), stored=stored(13, 14))
    assert steps(given) == [(13, RemovalKind.STORED)]


def test_by_products_stay_while_training_goes_on_from_further_back() -> None:
    """The resume source is below the newest set: what it needs for its first steps stays."""
    tight = room(disk=disk(249 * GB), leftovers=by_products(spare(3), spare(9)), stored=None)
    gone = [r.path for r in plan_removals(tight, POLICY).removals if r.path]
    assert gone == [spare(3).path, spare(9).path]
    resuming = replace(tight, protected={10: Protection.RESUME_SOURCE})
    assert [r.path for r in plan_removals(resuming, POLICY).removals if r.path] == [spare(3).path]
    uploading = replace(tight, protected={10: Protection.UPLOADING})
    assert [r.path for r in plan_removals(uploading, POLICY).removals if r.path] == gone


def test_by_products_from_before_podwatch_go_once_training_has_saved_under_its_eyes() -> None:
    """The sets of ``room`` were written at 1005, 1010 and 1015."""

    def gone(first_seen: float, *found: ByProduct) -> list[str]:
        given = room(disk=disk(249 * GB), leftovers=by_products(*found), first_seen_wall=first_seen)
        return [r.path for r in plan_removals(given, POLICY).removals if r.path]

    old = [spare(n, changed=10.0) for n in (2, 3, 4, 6, 9, 11)]
    assert gone(1016.0, *old) == [], "nothing was saved since podwatch came"
    assert gone(1012.0, *old) == [spare(n).path for n in (2, 6, 11)], "a resume from 5 or 10 would read 3, 4 and 9"
    assert gone(1012.0, spare(11, changed=1013.0)) == [spare(11).path], "written since"
    assert gone(1001.0, *old) == [spare(n).path for n in (2, 3, 4, 6, 9, 11)]


def test_without_a_store_sets_go_only_when_the_next_save_does_not_fit() -> None:
    high = room(disk=disk(900 * GB, 1000 * GB), stored=None)
    assert steps(high) == []
    full = room(disk=disk(970 * GB, 1000 * GB), stored=None)
    assert steps(full) == [(5, RemovalKind.UNSTORED)]
    assert plan_removals(full, POLICY).critical


def test_what_the_store_would_not_keep_goes_as_if_it_were_stored() -> None:
    high = room(disk=disk(900 * GB, 1000 * GB), surplus=stored(5))
    plan = plan_removals(high, POLICY)
    assert [(r.step, r.kind) for r in plan.removals] == [(5, RemovalKind.SURPLUS)]
    assert not plan.critical
    assert "not in the store" in {k.step: k.reason for k in plan.remaining}[10]
    assert steps(replace(high, stored=stored(10))) == [(10, RemovalKind.STORED), (5, RemovalKind.SURPLUS)]
    assert steps(replace(high, surplus=stored(15))) == [], "the newest stays"
    assert steps(replace(high, surplus=frozenset({(5, "another save")}))) == []
    assert steps(replace(high, first_seen_wall=1008.0)) == [], "one from before podwatch goes only when it is stored"
    reasons = {k.step: k.reason for k in plan_removals(room(surplus=stored(5)), POLICY).remaining}
    assert reasons[5] == "enough newer checkpoints are in the store; no need to delete it yet"


def test_an_upload_is_given_up_at_the_critical_mark_only() -> None:
    uploading = {5: Protection.UPLOADING}
    given = room(disk=disk(216 * GB), protected=uploading, stored=stored(10))
    assert steps(given) == [(10, RemovalKind.STORED)]
    full = room(disk=disk(249 * GB), protected=uploading, stored=stored(10))
    assert steps(full) == [(10, RemovalKind.STORED), (5, RemovalKind.UNSTORED)]


def test_the_set_being_uploaded_is_the_last_to_go() -> None:
    given = room(checkpoints=[a_set(5), a_set(10), a_set(15)], disk=disk(235 * GB), protected={5: UPLOADING})
    assert steps(given) == [(10, RemovalKind.UNSTORED)]
    assert steps(replace(given, disk=disk(249 * GB)))[-1] == (5, RemovalKind.UNSTORED)


def test_what_a_command_reads_goes_at_the_critical_mark_only_and_there_before_what_is_stored_nowhere() -> None:
    given = room(disk=disk(216 * GB), protected={5: Protection.READING}, stored=stored(5, 10))
    assert steps(given) == [(10, RemovalKind.STORED)]
    given = room(disk=disk(235 * GB), protected={10: Protection.READING}, stored=stored(10))
    assert [step for step, _ in steps(given)] == [10], "5 is in no store"
    assert {step for step, _ in steps(replace(given, disk=disk(249 * GB)))} == {5, 10}


def test_the_newest_incomplete_set_may_be_a_save_in_flight() -> None:
    given = room(checkpoints=[a_set(5), a_set(10), a_set(15, 9 * GB, Completeness.INCOMPLETE)], disk=disk(249 * GB))
    assert (15, RemovalKind.INCOMPLETE) not in steps(given)


def test_what_a_save_in_flight_has_written_is_not_asked_for_twice() -> None:
    writing = a_set(20, 30 * GB, Completeness.WRITING)
    given = room(checkpoints=[a_set(10), a_set(15), writing], disk=disk(205 * GB), stored=stored(10))
    assert steps(given) == []


def test_sets_from_before_podwatch_go_only_when_stored() -> None:
    given = room(disk=disk(249 * GB), first_seen_wall=1008.0, stored=stored())
    assert steps(given) == [(10, RemovalKind.UNSTORED)]
    assert (5, RemovalKind.STORED) in steps(replace(given, stored=stored(5)))


def test_nothing_complete_means_nothing_is_thrown_away() -> None:
    given = room(checkpoints=[a_set(5, state=Completeness.INCOMPLETE)], disk=disk(249 * GB))
    assert steps(given) == []


FULL = disk(250 * GB)
OLD, NEW = a_set(5), a_set(15)
NEVER = {
    "the newest complete": ([OLD, NEW], {}, 15, "the newest complete checkpoint"),
    "above it, one that a second trainer may have written": (
        [OLD, a_set(10), replace(NEW, held="two trainers", held_as=HeldAs.TWO_WRITERS)],
        {}, 15, "the newest complete checkpoint (held back)",
    ),
    "a step that no training of this run can have reached": (
        [replace(a_set(3), held="too far", held_as=HeldAs.IMPLAUSIBLE), OLD, NEW], {}, 3,
        "possibly not of this run: too far",
    ),
    "what training was started from": (
        [OLD, NEW], {"protected": {5: Protection.RESUME_SOURCE}}, 5, "protected: resume-source",
    ),
    "the newest of the branch that training left": (
        [OLD, NEW], {"protected": {5: Protection.EARLIER_NEWEST}}, 5, "protected: newest-of-earlier-branch",
    ),
    "a pin": ([OLD, NEW], {"pins": {5: "by hand"}}, 5, "pinned: by hand"),
    "what is being written": ([a_set(5, state=Completeness.WRITING), NEW], {}, 5, "being written"),
    "the only one, damaged": (
        [a_set(5, state=Completeness.DAMAGED)], {}, 5, "no complete checkpoint exists, so podwatch deletes none",
    ),
    "a save that pauses": (
        [NEW, a_set(20, state=Completeness.INCOMPLETE)], {}, 20,
        "newer than the newest complete checkpoint: possibly still being saved",
    ),
    "from before podwatch, in no store": (
        [OLD, NEW], {"first_seen_wall": 1008.0, "stored": frozenset()}, 5,
        "older than podwatch's first start and not in the store",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEVER)
def test_what_never_goes_even_from_a_disk_without_a_byte(case: str) -> None:
    checkpoints, more, step, reason = NEVER[case]
    everything = stored(*(s.step for s in checkpoints))
    plan = plan_removals(room(**{"checkpoints": checkpoints, "disk": FULL, "stored": everything, **more}), POLICY)
    assert step not in {r.step for r in plan.removals}
    assert {k.step: k.reason for k in plan.remaining}[step] == reason


@pytest.mark.parametrize(
    ("expired", "needed", "pinned"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_quarantine_that_stays(expired: bool, needed: bool, pinned: bool) -> None:
    entry = QuarantineEntry("/q/1", 7, 40 * GB, expired, needed)
    given = room(disk=FULL, leftovers=Leftovers((entry,)), pins={7: "by hand"} if pinned else {})
    assert "/q/1" not in {r.path for r in plan_removals(given, POLICY).removals}


def test_low_inodes_take_one_thing_at_a_time() -> None:
    given = room(disk=replace(disk(GB), inodes_free=10), stored=stored(5, 10))
    assert steps(given) == [(5, RemovalKind.STORED)]


def test_the_dry_run_names_every_set() -> None:
    given = room(disk=disk(249 * GB), stored=stored(5), pins={10: "good eval"})
    entries = plan_document(plan_removals(given, POLICY))["entries"]
    explained = {(e["action"], e["step"]): (e["reason"], e["size_bytes"]) for e in entries}
    assert explained["remove", 5][1] == 47 * GB
    assert explained["keep", 10][0] == "pinned: good eval"
    assert explained["keep", 15][0] == "the newest complete checkpoint"


@st.composite
def inputs(draw: st.DrawFn) -> DiskFacts:
    numbers = draw(st.lists(st.integers(0, 30), unique=True, max_size=8))
    sets = []
    for n in numbers:
        state = draw(st.sampled_from([COMPLETE, COMPLETE, Completeness.WRITING, Completeness.INCOMPLETE]))
        size = draw(st.integers(1, 60))
        found = a_set(n, size, state, draw(st.integers(0, size - 1)))
        sets.append(replace(found, changed_wall=draw(st.floats(0, 100))))
    capacity = 300
    used = draw(st.integers(0, capacity) | st.integers(250, capacity))
    soon = draw(st.booleans())
    pick = st.sampled_from(numbers or [99])
    biggest, files = draw(st.integers(0, 100)), draw(st.integers(0, 50))
    return DiskFacts(
        checkpoints=sets,
        disk=DiskSample(
            "/x", capacity, used, capacity - used, draw(st.sampled_from([0, 100])), draw(st.integers(0, 100))
        ),
        next_save=NextSave(
            biggest,
            files,
            draw(st.sampled_from([biggest, biggest // 2])),
            draw(st.sampled_from([files, files // 2])),
            None if soon else draw(st.floats(301, 5000)),
        ),
        stored=draw(st.none() | st.lists(pick, max_size=5).map(lambda some: stored(*some))),
        surplus=draw(st.lists(pick, max_size=3).map(lambda some: stored(*some))),
        pins=dict.fromkeys(draw(st.lists(pick, max_size=2)), "pin"),
        protected=dict(draw(st.lists(st.tuples(pick, st.sampled_from(Protection)), max_size=3))),
        leftovers=Leftovers(
            (QuarantineEntry("/q", 7, 5, draw(st.booleans()), draw(st.booleans())),),
            tuple(
                ByProduct(f"/o/broadcasts/step_{n}", n, draw(st.integers(0, 20)), draw(st.floats(0, 100)))
                for n in draw(st.lists(st.integers(0, 32), unique=True, max_size=6))
            ),
            draw(st.integers(0, 5)),
            linked=dict(draw(st.lists(st.tuples(pick, st.integers(1, 70)), max_size=2))),
        ),
        first_seen_wall=draw(st.floats(0, 100)),
    )


def check_last_resort(given_: DiskFacts, plan: RemovalPlan) -> None:
    """What waits, and what is said to be missing; promise 9: only what was given can be named."""
    by_step = {s.step: s for s in given_.checkpoints}
    newest = newest_complete(tuple(given_.checkpoints))
    assert not (given_.next_save.near and plan.waiting)
    for removal in plan.waiting:
        assert removal.kind is RemovalKind.UNSTORED
        assert newest is not None
        assert removal.step != newest.step
        assert removal.step not in given_.pins
    known = (
        {e.path for e in given_.leftovers.quarantine}
        | {e.path for e in given_.leftovers.by_products}
        | {given_.leftovers.trash_path}
    )
    known |= {p.path for s in given_.checkpoints for p in s.parts}
    assert all(r.path in known for r in plan.removals if r.path)
    assert all(r.step in by_step for r in plan.removals if r.step is not None)
    room = int(given_.next_save.usual_bytes * POLICY.margin) - max(
        (s.size_bytes for s in given_.checkpoints if s.completeness is Completeness.WRITING), default=0
    )
    freed = plan.freed_bytes + sum(r.bytes for r in plan.waiting)
    assert plan.missing_bytes >= max(0, room - given_.disk.free_bytes - freed)
    if plan.missing_bytes == 0 and not plan.waiting:
        assert given_.disk.free_bytes + plan.freed_bytes >= room, "else it must have been said"
    left = {k.step for k in plan.remaining}
    assert all(k.reason and k.bytes >= 0 for k in plan.remaining)
    assert not plan.missing_bytes or not [
        s
        for s in given_.checkpoints
        if s.step in left and s.complete and newest is not None and s.step != newest.step
        and s.step not in given_.pins and s.changed_wall >= given_.first_seen_wall
        and given_.protected.get(s.step, UPLOADING) in YIELDING and s.step not in {r.step for r in plan.waiting}
        and given_.freed_by(s) > sum(r.bytes for r in plan.removals if r.step == s.step)
    ], "room is missing only when nothing more may go"  # fmt: skip


@settings(deadline=None, max_examples=examples(200))
@given(inputs())
def test_promise_two_holds_for_any_disk(given_: DiskFacts) -> None:
    plan = plan_removals(given_, POLICY)
    by_step = {s.step: s for s in given_.checkpoints}
    newest = newest_complete(tuple(given_.checkpoints))
    gone = {r.step for r in plan.removals if r.step is not None and not r.part}
    spares = {s.path: s for s in given_.leftovers.by_products}
    for removal in plan.removals:
        if removal.kind is RemovalKind.BY_PRODUCT:
            # Nothing that a trainer at or beyond the newest complete set, or one being resumed, can still read.
            assert newest is not None
            used_from = min([newest.step, *(n for n, why in given_.protected.items() if why not in YIELDING)])
            assert spares[removal.path].step < used_from - 2
            assert spares[removal.path].step not in by_step
            assert max(spares[removal.path].changed_wall, newest.changed_wall) >= given_.first_seen_wall
        if removal.step is None:
            continue
        found = by_step[removal.step]
        assert newest is not None
        assert removal.step != newest.step
        assert removal.step not in given_.pins
        assert found.completeness is not Completeness.WRITING
        protection = given_.protected.get(removal.step)
        assert protection is None or (protection in YIELDING and removal.kind is RemovalKind.UNSTORED and plan.critical)
        if removal.kind is RemovalKind.UNSTORED:
            assert plan.critical
            assert given_.next_save.near, "not before the next save is near"
        if found.complete and not removal.part and (removal.step, found.save_id) not in (given_.stored or ()):
            as_if_stored = (removal.step, found.save_id) in given_.surplus and given_.is_ours(found)
            free = as_if_stored and protection is None
            assert removal.kind is (RemovalKind.SURPLUS if free else RemovalKind.UNSTORED)
    order = [ORDER.index(r.kind) for r in plan.removals]
    assert order == sorted(order), "the order of the kinds"
    if any(r.kind is RemovalKind.UNSTORED for r in plan.removals):
        idle = [s for s in given_.checkpoints if s.complete and s.step not in gone and s.step not in given_.protected]
        left = [s for s in idle if newest is not None and s.step != newest.step and s.step not in given_.pins]
        assert not [s for s in left if (s.step, s.save_id) in (given_.stored or ())], "what is in the store goes first"
        assert not [s for s in left if given_.is_surplus(s)], "and what it would not keep"
    check_last_resort(given_, plan)
    # Every set is explained exactly once.
    assert sorted([*gone, *(k.step for k in plan.remaining)]) == sorted(by_step)
    assert all(k.reason for k in plan.remaining)
    assert plan.freed_bytes + plan.shortfall_bytes >= plan.target_bytes
    assert not (plan.trigger is Trigger.NONE and plan.removals)


@settings(deadline=None, max_examples=examples(200))
@given(inputs(), st.integers(0, 100))
def test_more_pressure_never_keeps_what_less_pressure_removed(given_: DiskFacts, more: int) -> None:
    def gone(used: int) -> set[tuple[int | None, str]]:
        tight = replace(given_, disk=replace(given_.disk, used_bytes=used, free_bytes=300 - used))
        plan = plan_removals(tight, POLICY)
        whole: set[tuple[int | None, str]] = {(r.step, r.path) for r in plan.removals if not r.part}
        parts = {(r.step, r.part) for r in plan.removals if r.part}
        covered = {
            (s, p.name) for s, _ in whole for x in given_.checkpoints if x.step == s for p in x.parts if not p.required
        }
        return whole | parts | covered

    used = given_.disk.used_bytes
    assert gone(used) <= gone(min(300, used + more))


@settings(deadline=None, max_examples=examples(200))
@given(inputs(), st.integers(0, 100), st.integers(0, 50))
def test_a_bigger_save_or_more_pins_never_cost_a_pinned_set(given_: DiskFacts, bigger: int, files: int) -> None:
    def gone(some: DiskFacts) -> set[int | None]:
        plan = plan_removals(some, POLICY)
        return {r.step for r in (*plan.removals, *plan.waiting) if not r.part and r.step is not None}

    known = given_.next_save
    grown = NextSave(
        known.bytes + bigger, known.files + files, known.usual_bytes + bigger, known.usual_files + files, known.due_in
    )
    more = replace(given_, next_save=grown)
    assert gone(given_) <= gone(more) | {None}
    pinned = replace(more, pins={s.step: "all" for s in given_.checkpoints})
    assert gone(pinned) == set()
    near = replace(given_, next_save=replace(known, due_in=None))
    assert gone(near) == gone(given_), "the same sets, now or later"


def test_what_a_part_brings_is_counted_once_when_its_set_waits() -> None:
    """A weights part goes now, its set only when the save is near: the set brings what is left of it, no more."""
    sets = [a_set(n, 2 if n == 0 else 1, COMPLETE, 1 if n == 0 else 0) for n in range(8)]
    given_ = DiskFacts(checkpoints=sets, disk=DiskSample("/x", 300, 194, 106), next_save=save(100, due_in=1000.0))
    plan = plan_removals(given_, POLICY)
    assert [(r.step, r.part) for r in plan.removals] == [(0, "weights")]
    assert [r.step for r in plan.waiting] == [0, 1, 2], "4 bytes: 1 now, 1 of step 0 then, 2 of the next"
    assert plan.missing_bytes == 0


def test_bytes_that_have_another_name_are_not_freed() -> None:
    """An export that shares files with a checkpoint: to delete the checkpoint does not give the disk those bytes."""
    shares = Leftovers(linked={5: 30 * GB, 10: 47 * GB})
    given_ = room(disk=disk(205 * GB), stored=stored(5, 10), leftovers=shares)
    plan = plan_removals(given_, POLICY)
    assert [(r.step, r.bytes) for r in plan.removals] == [(5, 17 * GB)]
    tight = replace(given_, disk=disk(249 * GB))
    assert [(r.step, r.bytes) for r in plan_removals(tight, POLICY).removals] == [(5, 17 * GB), (10, 0)]
    nowhere = plan_removals(replace(tight, stored=frozenset()), POLICY)
    assert [r.step for r in nowhere.removals] == [5], "what is in no store does not go for nothing"
    assert {k.step: k.reason for k in nowhere.remaining}[10] == (
        "its files have other names outside it: to delete it frees nothing"
    )
    assert nowhere.missing_bytes == int(47 * GB * POLICY.margin) - GB - 17 * GB


def test_what_only_its_parts_would_free_goes_without_it() -> None:
    """All that a checkpoint could still free is its weights, and they go before it."""
    given_ = room(
        checkpoints=[a_set(5, optional=10 * GB), a_set(10), a_set(15)],
        disk=disk(249 * GB), leftovers=Leftovers(linked={5: 37 * GB}),
    )  # fmt: skip
    plan = plan_removals(given_, POLICY)
    assert [(r.kind, r.step) for r in plan.removals] == [(RemovalKind.OPTIONAL_PART, 5), (RemovalKind.UNSTORED, 10)]
    assert {k.step: k.reason for k in plan.remaining}[5].startswith("its files have other names outside it")


def test_the_links_of_an_upload_end_with_it() -> None:
    """podwatch links what it sends: the upload is stopped before the checkpoint is deleted."""
    given_ = room(disk=disk(249 * GB), protected={5: UPLOADING}, leftovers=Leftovers(linked={5: 47 * GB}))
    assert [(r.step, r.bytes) for r in plan_removals(given_, POLICY).removals] == [(10, 47 * GB), (5, 47 * GB)]


def test_parts_on_another_disk_do_not_count() -> None:
    given_ = room(
        checkpoints=[a_set(5, optional=16 * GB), a_set(10, optional=16 * GB), a_set(15)],
        disk=disk(211 * GB), next_save=save(40 * GB), stored=stored(5, 10), elsewhere={"weights"},
    )  # fmt: skip
    assert [(r.kind, r.step, r.bytes) for r in plan_removals(given_, POLICY).removals] == [
        (RemovalKind.STORED, 5, 31 * GB)
    ]
