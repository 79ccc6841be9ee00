"""What is said before a save fails, and of file systems that are not the checkpoints' own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.checkpoints.command import Command
from podwatch.checkpoints.prime_rl import steps_in_use
from podwatch.checkpoints.records import CheckpointRecord, CheckpointRecords, RecordFiles
from podwatch.config.settings import DiskSettings
from podwatch.disk.explain import no_room, other_disks, part_elsewhere, plan_document
from podwatch.disk.next_save import NextSave, predict
from podwatch.disk.plan import DiskFacts, plan_removals
from podwatch.domain.checkpoint import CheckpointSet, Completeness, PartState
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import DiskSample
from podwatch.sensors.disk import DisksSensor
from podwatch.system.clock import SystemClock
from tests.sensors.waiting import until
from tests.support.mounts import small_mount
from tests.support.small_disk import guarded

POLICY = DiskSettings()
GB = 1_000_000_000
MIB = 1 << 20
NEXT = NextSave(bytes=47 * GB, files=9, usual_bytes=47 * GB, usual_files=9)


def a_set(step: int, size: int = 47 * GB, changed: float = 0.0) -> CheckpointSet:
    part = PartState("trainer", f"/o/step_{step}", True, True, size)
    return CheckpointSet(step, "x", Completeness.COMPLETE, (part,), size, 9, changed or 1000.0 + step, f"id{step}")


def said(next_save: NextSave = NEXT, policy: DiskSettings = POLICY, **changes: Any) -> tuple[Finding, ...]:
    disk = changes.pop("disk", DiskSample("/app", 250 * GB, 219 * GB, 31 * GB, 1000, 900))
    base = DiskFacts([a_set(40, 12 * GB), a_set(45)], disk, next_save, stored=frozenset())
    return no_room(plan_removals(replace(base, **changes), policy), disk, next_save, policy, 5.0)


def test_the_numbers_are_told() -> None:
    (found,) = said(first_seen_wall=1044.0)
    assert (found.kind, found.severity, found.verdict) == (FindingKind.DISK_NO_ROOM, Severity.CRITICAL, Verdict.NONE)
    assert found.summary == (
        "the next save needs 51.7 GB (47 GB and the margin), 31 GB are free, podwatch can remove nothing more: 20.7 GB"
        " short"
    )
    (found,) = said()
    assert "podwatch can remove 12 GB: 8.7 GB short" in found.summary
    assert said(disk=DiskSample("/app", 250 * GB, 150 * GB, 100 * GB)) == ()


def test_what_goes_unsynced_is_announced_while_there_is_time() -> None:
    later = replace(NEXT, due_in=720.0)
    (found,) = said(later, checkpoints=[a_set(40), a_set(45)])
    assert found.severity is Severity.WARNING
    assert "in about 12 min, podwatch deletes step 40, which is not in the store" in found.summary


def test_missing_inodes_are_told() -> None:
    low = DiskSample("/app", 500 * GB, 100 * GB, 400 * GB, 1000, 3)
    (found,) = said(replace(NEXT, files=50, usual_files=50), disk=low)
    assert "needs 50 files, 3 inodes are free: 43 short" in found.summary


def test_training_is_stopped_only_where_its_owner_asked_and_the_save_is_near() -> None:
    stop = DiskSettings(on_full="stop")
    (found,) = said(policy=stop, first_seen_wall=1044.0)
    assert (found.verdict, found.confirmed) == (Verdict.STOP, True)
    (found,) = said(replace(NEXT, due_in=900.0), policy=stop, first_seen_wall=1044.0)
    assert (found.verdict, found.confirmed) == (Verdict.NONE, False)


def test_a_save_that_is_seldom_so_big_is_a_warning_and_stops_nothing() -> None:
    stop, sometimes = DiskSettings(on_full="stop"), replace(NEXT, usual_bytes=20 * GB)
    (found,) = said(sometimes, stop, checkpoints=[a_set(40), a_set(45)])
    assert (found.severity, found.verdict) == (Severity.WARNING, Verdict.NONE)
    assert "the biggest of the last ones (47 GB) does not fit: 31 GB are free, 20.7 GB short" in found.summary
    disk = DiskSample("/app", 100 * GB, 69 * GB, 31 * GB)
    given = DiskFacts([a_set(40), a_set(45)], disk, sometimes, stored=frozenset())
    plan = plan_document(plan_removals(given, POLICY))
    assert (plan["freed_bytes"], plan["missing_bytes"], plan["critical"]) == (0, 0, False)
    assert plan["message"].endswith("the biggest of the last ones; one of the usual size fits")


def others(*disks: DiskSample) -> list[tuple[FindingKind, str]]:
    return [(f.kind, f.subject) for f in other_disks(disks, device=1, at=0.0)]


def test_other_file_systems_are_told_apart() -> None:
    temp = DiskSample("/tmp", 60 * GB, 20 * GB, 40 * GB, role="temp", device=2)
    assert others(temp) == []
    assert others(replace(temp, free_bytes=GB // 2)) == [(FindingKind.DISK_HIGH, "temp")]
    assert others(replace(temp, free_bytes=GB // 2, device=1)) == [], "the checkpoints' own disk tells for itself"
    state = DiskSample("/var", 10 * GB, 10 * GB, 9 * MIB, role="state", device=3)
    output = DiskSample("/app", 100 * GB, 99 * GB, GB, role="output", device=4)
    assert others(state, output) == [(FindingKind.DISK_HIGH, "state"), (FindingKind.DISK_HIGH, "output")]


def test_a_prediction_outlives_a_restart(tmp_path: Path) -> None:
    def records() -> CheckpointRecords:
        found = CheckpointRecords(RecordFiles(tmp_path))
        found.begin("x")
        return found

    first = records()
    for n in (45, 46, 47):
        first.note(CheckpointRecord(n, f"id{n}", "x", "", (), 1000.0 * n, {"trainer": n * GB}, 3))
    assert predict(records().all, 47_000.0) == predict(first.all, 47_000.0) == NextSave(47 * GB, 3, 46 * GB, 3)


def test_a_part_that_does_not_fit_on_its_own_disk_is_reported() -> None:
    small = DiskSample("/ckpt", 250 * GB, 219 * GB, 31 * GB, role="trainer", device=2)
    (found,) = part_elsewhere(small, NEXT, 1.1, 5.0)
    assert (found.kind, found.severity, found.subject) == (FindingKind.DISK_NO_ROOM, Severity.CRITICAL, "trainer")
    assert "the next save needs 51.7 GB in /ckpt (trainer), 31 GB are free" in found.summary
    assert part_elsewhere(replace(small, free_bytes=52 * GB), NEXT, 1.1, 5.0) == ()


@pytest.mark.parametrize(
    ("argv", "toml", "steps"),
    [
        ((), "", 2),
        (("--max-async-level", "5"), "", 6),
        (("--orchestrator.max-async-level=3",), "max_async_level = 8", 9),
        ((), "[orchestrator]\nmax_async_level = 4\n", 5),
        ((), 'max_async_level = "many"\n', 2),
        ((), "max_async_level = true\n", 2),
        (("--max-async-level", "-9"), "", 2),
        (("--orchestrator.max-off-policy-steps", "8"), "", 9),
        ((), "[orchestrator]\nmax_off_policy_steps = 4\n", 5),
    ],
)
def test_by_products_stay_as_long_as_the_trainer_may_read_them(
    tmp_path: Path, argv: tuple[str, ...], toml: str, steps: int
) -> None:
    (tmp_path / "rl.toml").write_text(toml)
    assert steps_in_use(Command(("uv", "run", "rl", "@", "rl.toml", *argv), tmp_path)) == steps
    assert steps_in_use(Command(("rl", "@", "gone.toml"), tmp_path)) == 2


async def test_each_place_is_looked_at_and_new_ones_join(tmp_path: Path) -> None:
    places = {"state": tmp_path, "temp": tmp_path / "not" / "yet"}
    sensor = DisksSensor(lambda: places, SystemClock(), poll=0.02)
    assert sensor.latest().value is None
    await sensor.start()
    try:
        await until(lambda: len(sensor.latest().value or ()) == 2)
        places["weights"] = tmp_path
        await until(lambda: len(sensor.latest().value or ()) == 3)
        found = {d.role: d for d in sensor.latest().value or ()}
        assert {d.device for d in found.values()} == {tmp_path.stat().st_dev}
        assert found["temp"].path == str(tmp_path)
    finally:
        await sensor.stop()


async def test_only_the_checkpoints_own_disk_is_freed(tmp_path: Path) -> None:
    """Weights on another volume that is full: podwatch reports it, and deletes no checkpoint for it."""
    from tests.support.checkpoints import finish, prime_rl_operations

    small = tmp_path / "root" / "outputs" / "weights"
    with small_mount(small, 10 * MIB) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not allowed here")
        async with guarded(tmp_path / "root", tmp_path, None, store=True, variant="A") as guard:
            for step in (5, 10, 15):
                finish(prime_rl_operations(guard.out, step, "A", size=4096))
                (small / f"step_{step}").mkdir()
                (small / f"step_{step}" / "model.safetensors").write_bytes(b"x" * (3 * MIB))
            seen = DiskSample(str(small), 10 * MIB, 9 * MIB, MIB, role="weights", device=small.stat().st_dev)
            guard.others = lambda: (seen,)
            await until(lambda: len([s for s in guard.catalogue.sets if s.complete]) == 3, 20)
            at = guard.disk.latest().at
            await until(lambda: guard.disk.latest().at > at + 0.5 and guard.pruner.last_plan is not None, 20)
            assert [(f.kind, f.subject) for f in guard.pruner.findings()] == [(FindingKind.DISK_NO_ROOM, "weights")]
            assert "the next save needs 3.46 MB in" in guard.pruner.findings()[0].summary
            assert sorted(p.name for p in small.iterdir()) == ["step_10", "step_15", "step_5"]


@pytest.mark.parametrize("why", ["", "mode observe: only `podwatch prune` deletes"])
def test_a_plan_says_why_it_is_not_carried_out(why: str) -> None:
    """``prune --dry-run`` showed "remove" for what stayed, without a reason."""
    full = DiskSample("/app", 250 * GB, 219 * GB, 31 * GB, 1000, 900)
    plan = plan_removals(DiskFacts([a_set(40, 12 * GB), a_set(45)], full, NEXT, stored=frozenset()), POLICY)
    assert plan.removals
    assert plan_document(plan, waits_for=why)["message"].endswith(
        f". podwatch deletes nothing by itself now: {why}" if why else "short"
    )
    empty = DiskSample("/app", 250 * GB, 0, 250 * GB, 1000, 900)
    nothing = plan_removals(DiskFacts([a_set(45)], empty, NEXT, stored=frozenset()), POLICY)
    assert plan_document(nothing, waits_for=why)["message"] == "there is enough space: nothing to remove"
