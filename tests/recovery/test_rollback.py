"""An operator starts training below the newest checkpoint: podwatch follows the new line, and keeps the old one."""

import os
import signal

import pytest

from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.event import EventName
from podwatch.domain.facts import StoreFacts
from podwatch.domain.lease import Decision, LeaseAction
from podwatch.domain.process import FoundTree
from podwatch.domain.run import Lineage
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.recovery import Phase
from tests.recovery.test_persons import turns
from tests.support.recovery_world import Podwatch, Store, World, death, stored


async def stopped(world: World, **kw: object) -> Podwatch:
    """Trained to step 120 with saves each five steps from 95 on, then stopped on purpose."""
    podwatch = Podwatch(world, **kw)  # type: ignore[arg-type]
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    for step in range(95, 121, 5):
        save(world, step)
    podwatch.see(124)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    world.clock.advance(60)
    return podwatch


def save(world: World, step: int) -> None:
    world.clock.advance(1)
    world.save(step, wall=world.clock.wall())


async def by_hand(podwatch: Podwatch, *flags: str) -> FoundTree:
    candidate = podwatch.world.person_starts(*flags)
    await turns(podwatch)
    assert podwatch.recovery.state.phase is Phase.ATTACHED
    await look(podwatch)
    return candidate


async def look(podwatch: Podwatch) -> None:
    """A rescan, a turn of the sensing loop, and what follows from both."""
    podwatch.catalogue.rescan()
    podwatch.see()
    task = podwatch.recovery.lineages.check
    if task is not None:
        await task


def die(world: World, candidate: FoundTree) -> None:
    os.killpg(candidate.launcher.pid, signal.SIGKILL)
    world.foreign[candidate.launcher.pid].wait()


def lineage(podwatch: Podwatch) -> Lineage:
    record = podwatch.run
    return record.lineage


def newest(podwatch: Podwatch) -> int:
    found = newest_complete(podwatch.catalogue.rescan())
    assert found is not None
    return found.step


async def restarted_from(podwatch: Podwatch) -> int | None:
    podwatch.see(finding=death())
    await podwatch.until(Phase.CONFIRMING)
    return podwatch.world.plans[-1].step


async def test_the_resume_step_in_its_command_opens_a_new_line(world: World) -> None:
    podwatch = await stopped(world)
    old = lineage(podwatch).id
    candidate = await by_hand(podwatch, "--resume", "100", "--seed", "9")
    assert (lineage(podwatch).parent, lineage(podwatch).parent_step) == (old, 100)
    assert podwatch.recovery.handle is not None
    assert lineage(podwatch).left_step == 120
    assert lineage(podwatch).opened_wall == podwatch.recovery.handle.started_wall
    assert newest(podwatch) == 100, "what the old line has above it counts no more"
    (said,) = [e for e in world.events if e.name is EventName.LINEAGE_OPENED]
    assert "its command resumes from step 100" in said.message
    save(world, 105)
    save(world, 110)  # once more: the old line had it, too
    await look(podwatch)
    assert newest(podwatch) == 110
    assert len([e for e in world.events if e.name is EventName.LINEAGE_OPENED]) == 1
    assert sorted(podwatch.catalogue.layout.numbers("checkpoints"))[-1] == 120, "nothing is moved before the next start"
    die(world, candidate)
    assert await restarted_from(podwatch) == 110
    assert b"a.bin of 120" in world.contents(), "the old line's newest is in quarantine"


async def test_a_clock_that_is_set_back_makes_no_save_an_earlier_one(world: World) -> None:
    """Neither one that the operator's start has left, nor one of another run."""
    podwatch = await stopped(world)
    await by_hand(podwatch, "--resume", "100")
    opened, handle = lineage(podwatch), podwatch.recovery.handle
    assert handle is not None
    world.clock.offset -= 50_000.0
    save(world, 105)
    await look(podwatch)
    save(world, 107)
    await look(podwatch)
    save(world, 110)
    await look(podwatch)
    assert lineage(podwatch).id == opened.id
    assert newest(podwatch) == 110
    assert all(s.of_line for s in podwatch.catalogue.sets if s.step in (105, 107))
    (made,) = [s for s in podwatch.catalogue.sets if s.step == 110]
    assert made.ours
    save(world, 200)
    world.set_walls[200] -= 100_000.0
    podwatch.catalogue.rescan()
    (older,) = [s for s in podwatch.catalogue.sets if s.step == 200]
    assert not older.ours


@pytest.mark.parametrize("flags", [(), ("--resume", "-1")])
async def test_a_save_below_the_newest_opens_one_and_nothing_before_that(world: World, flags: tuple[str, ...]) -> None:
    podwatch = await stopped(world)
    old = lineage(podwatch)
    candidate = await by_hand(podwatch, *flags)
    podwatch.see(101)
    podwatch.see(102)
    await look(podwatch)
    assert lineage(podwatch) == old, "a printed number proves nothing"
    assert newest(podwatch) == 120
    save(world, 103)
    await look(podwatch)
    assert (lineage(podwatch).parent, lineage(podwatch).parent_step) == (old.id, 100)
    assert newest(podwatch) == 103
    die(world, candidate)
    assert await restarted_from(podwatch) == 103


async def test_a_save_that_nobody_had_looked_at_counts_when_it_dies(world: World) -> None:
    podwatch = await stopped(world)
    candidate = await by_hand(podwatch)
    save(world, 103)
    die(world, candidate)
    assert await restarted_from(podwatch) == 103


async def test_a_start_above_or_at_the_newest_opens_none(world: World) -> None:
    podwatch = await stopped(world)
    old = lineage(podwatch)
    await by_hand(podwatch, "--resume", "120")
    save(world, 125)
    await look(podwatch)
    assert (lineage(podwatch), newest(podwatch)) == (old, 125)


async def test_an_older_checkpoint_in_which_a_file_changed_proves_nothing(world: World) -> None:
    podwatch = await stopped(world)
    old = lineage(podwatch)
    await by_hand(podwatch)
    world.began_walls[110] = world.set_walls[110]
    world.set_walls[110] = world.clock.wall()
    await look(podwatch)
    assert (lineage(podwatch), newest(podwatch)) == (old, 120)


async def test_a_start_anew_by_hand_leaves_everything(world: World) -> None:
    podwatch = await stopped(world)
    await by_hand(podwatch)
    save(world, 5)
    await look(podwatch)
    assert (lineage(podwatch).parent_step, newest(podwatch)) == (None, 5)


async def test_podwatch_comes_back_and_still_follows_the_new_line(world: World) -> None:
    podwatch = await stopped(world)
    candidate = await by_hand(podwatch, "--resume", "100")
    save(world, 105)
    await look(podwatch)
    line = lineage(podwatch)
    await podwatch.leave()
    for path in (world.root / "state").glob("j.sqlite*"):
        path.unlink()  # with the state directory: the record beside output_dir is enough
    heir = Podwatch(world)
    world.trees = [candidate]
    await heir.recovery.begin()
    await heir.until(Phase.ATTACHED)
    await look(heir)
    assert (lineage(heir), newest(heir)) == (line, 105)
    die(world, candidate)
    assert await restarted_from(heir) == 105


async def test_a_rollback_while_podwatch_was_away_is_found(world: World) -> None:
    podwatch = await stopped(world)
    await podwatch.leave()
    candidate = world.person_starts("--resume", "100")
    save(world, 105)
    save(world, 110)
    heir = Podwatch(world)
    await heir.recovery.begin()
    await turns(heir)
    await look(heir)
    assert heir.recovery.state.phase is Phase.ATTACHED
    assert (lineage(heir).parent_step, newest(heir)) == (100, 110)
    die(world, candidate)
    assert await restarted_from(heir) == 110


async def test_the_operator_can_return_to_the_old_line(world: World) -> None:
    podwatch = await stopped(world)
    old = lineage(podwatch).id
    await by_hand(podwatch, "--resume", "100")
    save(world, 105)
    save(world, 108)
    await look(podwatch)
    left = lineage(podwatch).id
    await podwatch.recovery.requests.restart(120)
    await podwatch.until(Phase.CONFIRMING)
    assert podwatch.world.plans[-1].step == 120
    assert (lineage(podwatch).parent, lineage(podwatch).parent_step) == (old, 120)
    assert newest(podwatch) == 120
    marked = {s.step: s.earlier for s in podwatch.catalogue.sets}
    assert marked == {95: False, 100: False, 105: True, 108: True, 110: False, 115: False, 120: False}
    assert left not in podwatch.run.ancestry


async def test_what_the_store_has_of_the_old_line_is_not_fetched(world: World) -> None:
    store = Store(world)
    podwatch = await stopped(world, restore=store)
    store.given = [stored(130, "r130", lineage(podwatch).id, 7)]
    candidate = await by_hand(podwatch, "--resume", "100")
    save(world, 105)
    die(world, candidate)
    assert await restarted_from(podwatch) == 105
    assert store.fetched == []


class Listed:
    """A store that this pod holds, with these checkpoints."""

    decision = Decision(LeaseAction.HOLD, publish=True)
    checkpoints: tuple[StoredCheckpoint, ...] = ()

    def status(self) -> StoreFacts:
        return StoreFacts(checkpoints=self.checkpoints, listed=True)


async def test_what_is_newest_in_the_store_counts_where_the_pod_has_it_no_more(world: World) -> None:
    store = Listed()
    podwatch = await stopped(world, lease=store)
    old = lineage(podwatch)
    for step in (105, 110, 115, 120):
        world.drop(step)
    store.checkpoints = (world.in_store(120, old.id, seq=9),)
    await by_hand(podwatch, "--resume", "100")
    assert (lineage(podwatch).parent, lineage(podwatch).parent_step) == (old.id, 100)
