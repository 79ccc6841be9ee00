"""What may leave the disk: fixed cases of DESIGN section 6, and properties over arbitrary disks."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.daemon.pruning import plan_document
from podwatch.domain.checkpoint import CheckpointSet, Completeness, PartState, newest_complete
from podwatch.domain.policy import DiskPolicy
from podwatch.domain.snapshot import DiskSample
from podwatch.judgement.retention import (
    Protection,
    QuarantineEntry,
    RemovalInput,
    RemovalKind,
    SpareEntry,
    Trigger,
    plan_removal,
    predict_next_save,
)

POLICY = DiskPolicy()
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


def room(**kw: object) -> RemovalInput:
    base = RemovalInput([a_set(5), a_set(10), a_set(15)], disk(100 * GB), 47 * GB, True)
    return replace(base, **kw)  # type: ignore[arg-type]


def spare(step: int, size: int = GB, changed: float = 5000.0) -> SpareEntry:
    return SpareEntry(f"/o/run_default/broadcasts/step_{step}", step, size, changed)


def steps(given: RemovalInput) -> list[tuple[int | None, RemovalKind]]:
    return [(r.step, r.kind) for r in plan_removal(given, POLICY).removals]


def test_nothing_goes_while_there_is_room() -> None:
    plan = plan_removal(room(stored=stored(5, 10, 15)), POLICY)
    assert (plan.removals, plan.trigger, plan.critical) == ((), Trigger.NONE, False)
    assert [k.step for k in plan.kept] == [15, 10, 5]


def test_a_percentage_alone_does_not_protect_so_room_is_made_before_the_next_save() -> None:
    given = room(disk=disk(205 * GB), stored=stored(5, 10))  # 82 %: below the watermark, 45 GB free
    plan = plan_removal(given, POLICY)
    assert plan.trigger is Trigger.ROOM
    assert [r.step for r in plan.removals] == [5]
    assert not plan.critical


def test_above_the_watermark_down_to_the_target() -> None:
    given = room(disk=disk(900, 1000), sets=[a_set(n, 40) for n in range(1, 11)], stored=stored(*range(1, 11)))
    plan = plan_removal(replace(given, next_save_bytes=40), POLICY)
    assert plan.trigger is Trigger.USAGE
    assert [r.step for r in plan.removals] == [1, 2, 3, 4]


def test_the_order() -> None:
    given = room(
        sets=[a_set(2, 5 * GB, Completeness.INCOMPLETE), a_set(5, optional=16 * GB), a_set(10), a_set(15)],
        disk=disk(245 * GB),
        next_save_bytes=200 * GB,
        stored=stored(5),
        trash_bytes=GB,
        quarantine=[QuarantineEntry("/q/1", 3, GB, True), QuarantineEntry("/q/2", 4, GB, False)],
        spares=[spare(12), spare(3), spare(14)],
    )
    assert steps(given) == [
        (None, RemovalKind.TRASH),
        (None, RemovalKind.QUARANTINE),
        (2, RemovalKind.INCOMPLETE),
        (None, RemovalKind.SPARE),
        (None, RemovalKind.SPARE),
        (5, RemovalKind.STORED_SET),
        (10, RemovalKind.UNSTORED_SET),
    ]
    plan = plan_removal(given, POLICY)
    assert plan.critical
    assert plan.shortfall_bytes > 0
    assert plan.freed_bytes == (1 + 1 + 5 + 1 + 1 + 47 + 47) * GB
    assert [r.path for r in plan.removals if r.kind is RemovalKind.SPARE] == [spare(3).path, spare(12).path]


def test_a_part_that_a_resume_does_not_need_goes_before_the_set() -> None:
    given = room(sets=[a_set(5, optional=16 * GB), a_set(10)], disk=disk(205 * GB), stored=stored(5))
    (removal,) = plan_removal(given, POLICY).removals
    assert (removal.kind, removal.part, removal.path) == (RemovalKind.OPTIONAL_PART, "weights", "/o/weights/step_5")


def test_parts_of_recent_steps_stay_because_training_may_still_read_them() -> None:
    sets = [a_set(13, optional=16 * GB), a_set(14, optional=16 * GB), a_set(15)]
    given = room(sets=sets, disk=disk(205 * GB), stored=stored(13, 14))
    assert steps(given) == [(13, RemovalKind.STORED_SET)]


def test_by_products_stay_while_training_goes_on_from_further_back() -> None:
    """The resume source is below the newest set: what it needs for its first steps stays."""
    tight = room(disk=disk(249 * GB), spares=[spare(3), spare(9)], has_store=False)
    gone = [r.path for r in plan_removal(tight, POLICY).removals if r.path]
    assert gone == [spare(3).path, spare(9).path]
    resuming = replace(tight, protected={10: Protection.RESUME_SOURCE})
    assert [r.path for r in plan_removal(resuming, POLICY).removals if r.path] == [spare(3).path]
    uploading = replace(tight, protected={10: Protection.UPLOADING})
    assert [r.path for r in plan_removal(uploading, POLICY).removals if r.path] == gone


def test_by_products_from_before_podwatch_stay() -> None:
    given = room(disk=disk(249 * GB), spares=[spare(3, changed=10.0)], first_seen_wall=11.0)
    assert not [r for r in plan_removal(given, POLICY).removals if r.path]


def test_without_a_store_sets_go_only_when_the_next_save_does_not_fit() -> None:
    high = room(disk=disk(900 * GB, 1000 * GB), has_store=False)
    assert steps(high) == []
    full = room(disk=disk(970 * GB, 1000 * GB), has_store=False)
    assert steps(full) == [(5, RemovalKind.UNSTORED_SET)]
    assert plan_removal(full, POLICY).critical


def test_an_upload_is_given_up_at_the_critical_mark_only() -> None:
    uploading = {5: Protection.UPLOADING}
    given = room(disk=disk(216 * GB), protected=uploading, stored=stored(10))
    assert steps(given) == [(10, RemovalKind.STORED_SET)]
    full = room(disk=disk(249 * GB), protected=uploading, stored=stored(10))
    assert steps(full) == [(10, RemovalKind.STORED_SET), (5, RemovalKind.UNSTORED_SET)]


def test_the_newest_incomplete_set_may_be_a_save_in_flight() -> None:
    given = room(sets=[a_set(5), a_set(10), a_set(15, 9 * GB, Completeness.INCOMPLETE)], disk=disk(249 * GB))
    assert (15, RemovalKind.INCOMPLETE) not in steps(given)


def test_what_a_save_in_flight_has_written_is_not_asked_for_twice() -> None:
    writing = a_set(20, 30 * GB, Completeness.WRITING)
    given = room(sets=[a_set(10), a_set(15), writing], disk=disk(205 * GB), stored=stored(10))
    assert steps(given) == []


def test_sets_from_before_podwatch_go_only_when_stored() -> None:
    given = room(disk=disk(249 * GB), first_seen_wall=1008.0, stored=stored())
    assert steps(given) == [(10, RemovalKind.UNSTORED_SET)]
    assert (5, RemovalKind.STORED_SET) in steps(replace(given, stored=stored(5)))


def test_nothing_complete_means_nothing_is_thrown_away() -> None:
    given = room(sets=[a_set(5, state=Completeness.INCOMPLETE)], disk=disk(249 * GB))
    assert steps(given) == []


def test_prediction_takes_the_biggest_of_the_newest() -> None:
    assert predict_next_save([]) == 0
    assert predict_next_save([a_set(n, n) for n in (9, 4, 5, 6)]) == 9
    assert predict_next_save([a_set(1, 99), a_set(4, 4), a_set(5, 7), a_set(6, 6)]) == 7
    assert predict_next_save([a_set(1, 4), a_set(2, 400, Completeness.DAMAGED)]) == 4


def test_low_inodes_take_one_thing_at_a_time() -> None:
    given = room(disk=replace(disk(GB), inodes_free=10), stored=stored(5, 10))
    assert steps(given) == [(5, RemovalKind.STORED_SET)]


def test_the_dry_run_names_every_set() -> None:
    given = room(disk=disk(249 * GB), stored=stored(5), pins={10: "good eval"})
    entries = plan_document(plan_removal(given, POLICY))["entries"]
    told = {(e["action"], e["step"]): (e["reason"], e["size_bytes"]) for e in entries}
    assert told["remove", 5][1] == 47 * GB
    assert told["keep", 10][0] == "pinned: good eval"
    assert told["keep", 15][0] == "the newest complete checkpoint"


@st.composite
def inputs(draw: st.DrawFn) -> RemovalInput:
    numbers = draw(st.lists(st.integers(0, 30), unique=True, max_size=8))
    sets = []
    for n in numbers:
        state = draw(st.sampled_from([COMPLETE, COMPLETE, Completeness.WRITING, Completeness.INCOMPLETE]))
        size = draw(st.integers(1, 60))
        found = a_set(n, size, state, draw(st.integers(0, size - 1)))
        sets.append(replace(found, changed_wall=draw(st.floats(0, 100))))
    capacity = 300
    used = draw(st.integers(0, capacity))
    pick = st.sampled_from(numbers or [99])
    return RemovalInput(
        sets=sets,
        disk=DiskSample("/x", capacity, used, capacity - used),
        next_save_bytes=draw(st.integers(0, 100)),
        has_store=draw(st.booleans()),
        stored=stored(*draw(st.lists(pick, max_size=5))),
        pins=dict.fromkeys(draw(st.lists(pick, max_size=2)), "pin"),
        protected=dict(draw(st.lists(st.tuples(pick, st.sampled_from(Protection)), max_size=3))),
        quarantine=[QuarantineEntry("/q", 7, 5, draw(st.booleans()), draw(st.booleans()))],
        spares=[
            SpareEntry(f"/o/broadcasts/step_{n}", n, draw(st.integers(0, 20)), draw(st.floats(0, 100)))
            for n in draw(st.lists(st.integers(0, 32), unique=True, max_size=6))
        ],
        trash_bytes=draw(st.integers(0, 5)),
        first_seen_wall=draw(st.floats(0, 100)),
    )


@settings(deadline=None, max_examples=300)
@given(inputs())
def test_promise_two_holds_for_any_disk(given_: RemovalInput) -> None:
    plan = plan_removal(given_, POLICY)
    by_step = {s.step: s for s in given_.sets}
    newest = newest_complete(tuple(given_.sets))
    gone = {r.step for r in plan.removals if r.step is not None and not r.part}
    spares = {s.path: s for s in given_.spares}
    for removal in plan.removals:
        if removal.kind is RemovalKind.SPARE:
            # Nothing that a trainer at or beyond the newest complete set, or one being resumed, can still read.
            assert newest is not None
            used_from = min([newest.step, *(n for n, why in given_.protected.items() if why is not UPLOADING)])
            assert spares[removal.path].step < used_from - 2
            assert spares[removal.path].step not in by_step
            assert spares[removal.path].changed_wall >= given_.first_seen_wall
        if removal.step is None:
            continue
        found = by_step[removal.step]
        assert newest is not None
        assert removal.step != newest.step
        assert removal.step not in given_.pins
        assert found.completeness is not Completeness.WRITING
        protection = given_.protected.get(removal.step)
        assert protection is None or (
            protection is Protection.UPLOADING and removal.kind is RemovalKind.UNSTORED_SET and plan.critical
        )
        if removal.kind is RemovalKind.UNSTORED_SET:
            assert plan.critical
        if found.complete and not removal.part and (removal.step, found.save_id) not in given_.stored:
            assert removal.kind is RemovalKind.UNSTORED_SET
    order = [ORDER.index(r.kind) for r in plan.removals]
    assert order == sorted(order), "the order of DESIGN section 6"
    if any(r.kind is RemovalKind.UNSTORED_SET for r in plan.removals):
        idle = [s for s in given_.sets if s.complete and s.step not in gone and s.step not in given_.protected]
        left = [s for s in idle if newest is not None and s.step != newest.step and s.step not in given_.pins]
        assert not [s for s in left if (s.step, s.save_id) in given_.stored], "what is in the store goes first"
    # Every set is explained exactly once.
    assert sorted([*gone, *(k.step for k in plan.kept)]) == sorted(by_step)
    assert all(k.reason for k in plan.kept)
    assert plan.freed_bytes + plan.shortfall_bytes >= plan.target_bytes
    assert not (plan.trigger is Trigger.NONE and plan.removals)


@settings(deadline=None, max_examples=300)
@given(inputs(), st.integers(0, 100))
def test_more_pressure_never_keeps_what_less_pressure_removed(given_: RemovalInput, more: int) -> None:
    def gone(used: int) -> set[tuple[int | None, str]]:
        tight = replace(given_, disk=DiskSample("/x", 300, used, 300 - used))
        plan = plan_removal(tight, POLICY)
        whole: set[tuple[int | None, str]] = {(r.step, r.path) for r in plan.removals if not r.part}
        parts = {(r.step, r.part) for r in plan.removals if r.part}
        covered = {(s, p.name) for s, _ in whole for x in given_.sets if x.step == s for p in x.parts if not p.required}
        return whole | parts | covered

    used = given_.disk.used_bytes
    assert gone(used) <= gone(min(300, used + more))
