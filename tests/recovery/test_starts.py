"""The list of starts: what each start leaves in it, and that it alone decides whose a checkpoint is."""

import contextlib
import os
import signal

import pytest

from podwatch.domain.starts import StartedBy
from podwatch.recovery import Phase
from tests.recovery.test_rollback import by_hand, look, save, stopped
from tests.support.recovery_world import Killed, Killer, Podwatch, Store, World, death, finished, stored

HOUR = 3600.0


async def begun(world: World, **kw: object) -> Podwatch:
    podwatch = Podwatch(world, **kw)  # type: ignore[arg-type]
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    return podwatch


async def test_one_entry_tells_the_life_of_a_start(world: World) -> None:
    podwatch = await begun(world)
    guard, first = podwatch.recorded().starts
    assert (guard.by, guard.proved) == (StartedBy.GUARD, False)
    assert (first.id, first.from_step, first.by) == (world.plans[-1].start_id, None, StartedBy.PODWATCH)
    assert (first.seen, first.confirmed, first.ended, first.counted) == (True, False, None, False)
    podwatch.see(1)
    save(world, 5)
    podwatch.see(6)
    await podwatch.file.edit(lambda run: run)
    assert podwatch.recorded().starts[-1].confirmed
    world.kill()
    podwatch.see(finding=death())
    await podwatch.until(Phase.CONFIRMING)
    _, first, second = podwatch.recorded().starts
    assert first.counted
    assert first.ended is not None
    assert (second.from_step, second.counted, second.ended, second.branch) == (5, False, None, first.branch)
    assert podwatch.run.history.streak_count == 1
    await podwatch.leave()


@pytest.mark.parametrize("at", range(1, 12))
async def test_each_end_is_counted_once_whenever_podwatch_is_killed(world: World, at: int) -> None:
    killer = Killer()
    podwatch = await begun(world, killer=killer)
    failed = podwatch.run.starts[-1].id
    world.kill()
    killer.target = killer.count + at
    with contextlib.suppress(Killed):
        podwatch.see(finding=death())
        await podwatch.until(Phase.CONFIRMING)
    await podwatch.die()
    heir = Podwatch(world)
    await heir.recovery.begin()
    handle = heir.recovery.handle
    if handle is not None and handle.start_id == failed and heir.run.stopping is None:
        await heir.until(Phase.CONFIRMING)
        heir.see(finding=death())
    await heir.until(Phase.CONFIRMING)
    counted = {s.id for s in heir.run.starts if s.counted}
    assert counted == {failed}, killer.where
    assert heir.run.history.streak_count == 1, killer.where
    await heir.leave()


async def test_a_clock_that_is_set_back_between_two_starts_changes_nothing(world: World) -> None:
    podwatch = await stopped(world)  # saves 95 to 120
    wrote = podwatch.run.starts[-1].id
    world.clock.offset -= 10 * HOUR
    await podwatch.recovery.requests.start(step=110)
    await podwatch.until(Phase.CONFIRMING)
    save(world, 115)
    save(world, 117)
    podwatch.catalogue.rescan()
    found = {s.step: (s.start_id, s.earlier) for s in podwatch.catalogue.sets}
    second = podwatch.run.starts[-1].id
    assert found == dict.fromkeys((95, 100, 105, 110), (wrote, False)) | dict.fromkeys((115, 117), (second, False))
    world.kill()
    podwatch.see(finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 117
    await podwatch.leave()


async def test_a_clock_that_is_set_back_during_a_start_makes_its_saves_no_older_starts(world: World) -> None:
    podwatch = await stopped(world)
    await podwatch.recovery.requests.start(step=110)
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see()
    handle = podwatch.recovery.handle
    assert handle is not None
    world.clock.offset -= 10 * HOUR
    await look(podwatch)
    save(world, 115)
    podwatch.catalogue.rescan()
    marks = {s.step: (s.start_id, s.earlier) for s in podwatch.catalogue.sets}
    assert marks[115] == (handle.start_id, False)
    assert marks[110] == (podwatch.run.starts[1].id, False)
    await podwatch.leave()


async def test_what_another_pod_saved_is_of_its_start(world: World) -> None:
    world.save(5, wall=world.clock.wall() - 1000.0)
    podwatch = Podwatch(world, restore=Store(world, stored(30, "s30", "theirs", 3)))
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 30
    assert podwatch.run.lineage.id == "theirs"
    assert podwatch.run.lineage.parent == ""
    await podwatch.leave()


async def test_a_step_that_was_returned_to_training_from_quarantine_is_of_the_branch_that_was_left(
    world: World,
) -> None:
    podwatch = await stopped(world)
    await podwatch.recovery.requests.start(step=100)
    await podwatch.until(Phase.CONFIRMING)
    back = world.set_walls[120]
    world.save(120, wall=back)
    podwatch.catalogue.rescan()
    (found,) = [s for s in podwatch.catalogue.sets if s.step == 120]
    assert found.earlier
    world.kill()
    podwatch.see(finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 100
    await podwatch.leave()


async def test_an_operators_start_is_recorded_as_unproved_until_a_save_shows_its_step(world: World) -> None:
    podwatch = await stopped(world)
    candidate = await by_hand(podwatch)
    start = podwatch.run.starts[-1]
    assert (start.by, start.proved, start.from_step) == (StartedBy.OPERATOR, False, None)
    save(world, 103)
    await look(podwatch)
    start = podwatch.run.starts[-1]
    assert (start.proved, start.from_step, start.left_step, start.why) == (True, 100, 120, "it saved step 103")
    os.killpg(candidate.launcher.pid, signal.SIGKILL)
    await podwatch.leave()


async def test_a_finished_run_has_counted_nothing(world: World) -> None:
    podwatch = await begun(world)
    podwatch.see(5, finding=finished())
    await podwatch.until(Phase.FINISHED)
    assert not any(s.counted for s in podwatch.run.starts)
    await podwatch.leave()
