"""podwatch is killed at every point of a restart; the next one ends in the same state (promises 2, 4, 10)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.finding import FindingKind
from podwatch.domain.run import Pause
from podwatch.recovery import Phase, quarantine
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree
from podwatch.trainer.start_and_adopt import Look
from tests.support.recovery_world import Killed, Killer, Podwatch, World, begun, death

pytestmark = pytest.mark.slow


async def prepared(root: Path) -> World:
    """A trainer that runs, confirmed, with step 15 saved, step 20 cut off, and notes ahead."""
    world = World(root)
    world.output.mkdir()
    first = Podwatch(world)
    await first.recovery.begin()
    await first.until(Phase.CONFIRMING)
    for step in (5, 10, 15):
        world.save(step)
    first.see(16)
    assert first.recovery.state.phase is Phase.RUNNING
    await first.leave()
    world.save(20, whole=False)
    return world


async def one_kill(root: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """False when the restart went through without reaching the target."""
    world = await prepared(root)
    before = world.contents()
    killer = Killer(target)
    real = PinnedTree.rename

    def rename(self: PinnedTree, *args: Any, **kwargs: Any) -> bool:
        killer.point("before rename")
        moved = real(self, *args, **kwargs)
        killer.point("after rename")
        return moved

    struck = False
    try:
        victim = Podwatch(world, killer=killer)
        with monkeypatch.context() as patch:
            patch.setattr(PinnedTree, "rename", rename)
            try:
                await victim.recovery.begin()
                victim.see(17, finding=death(FindingKind.HANG))
                await victim.until(Phase.CONFIRMING)
            except Killed:
                struck = True
            await victim.die()
        assert len(world.alive()) <= 1, killer.where
        assert before <= world.contents(), killer.where

        heir = Podwatch(world)
        await heir.recovery.begin()
        await heir.until(Phase.CONFIRMING, Phase.RUNNING)
        if heir.recovery.state.phase is Phase.RUNNING and not world.plans[1:]:
            # Killed before the verdict was acted upon: the same verdict comes again.
            heir.see(17, finding=death(FindingKind.HANG))
            await heir.until(Phase.CONFIRMING)
        where = f"killed at {killer.where} ({target})"
        assert len(world.alive()) == 1, where
        assert world.kept is not None
        assert world.kept.process.pid == world.alive()[0], where
        assert before <= world.contents(), where
        assert world.plans[-1].step == 15, where
        assert not (world.output / "checkpoints" / "step_20").exists(), where
        assert (world.output / "checkpoints" / "step_15" / "done").exists(), where
        assert (heir.run.stopping, quarantine.unfinished(heir.workspace)) == (None, []), where
        heir.see(16)
        assert heir.recovery.state.phase is Phase.RUNNING, where
        assert heir.recovery.context.run.history.streak_count <= 1, where
        await heir.leave()
        assert len(world.alive()) == 1
    finally:
        world.close()
    return struck


async def test_killed_at_every_point_of_a_restart(quick_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = 1
    while True:
        root = quick_dir / str(target)
        root.mkdir()
        if not await one_kill(root, target, monkeypatch):
            break
        target += 1
    assert target > 30, "the restart passed fewer points than it has: the test does not reach it"


async def test_a_stop_that_was_asked_for_is_carried_out_after_a_crash(quick_dir: Path) -> None:
    for target in range(1, 60):
        root = quick_dir / str(target)
        root.mkdir()
        world = await prepared(root)
        killer = Killer()
        victim = Podwatch(world, killer=killer)
        await victim.recovery.begin()
        killer.target = killer.count + target
        asked = True
        try:
            await victim.recovery.requests.stop()
            await victim.until(Phase.STOPPED)
        except Killed:
            asked = victim.recorded().desired.value == "stopped"
        done = not killer.dead
        await victim.die()
        heir = Podwatch(world)
        await heir.recovery.begin()
        if asked:
            await heir.until(Phase.STOPPED)
            assert world.alive() == [], killer.where
        else:
            await heir.until(Phase.RUNNING)
            assert len(world.alive()) == 1
        assert heir.run.stopping is None
        await heir.leave()
        world.close()
        if done:
            return
    raise AssertionError("never got through")


async def test_an_interrupted_quarantine_waits_while_another_supervisor_holds_the_run(
    quick_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await prepared(quick_dir)
    world.kill()
    world.kept = None
    target = world.output / "checkpoints" / "step_15"
    begun(Workspace(world.output), quarantine.plan([target], step=10, steps={}, lineage="l", wall=0.0, number=1))
    heir = Podwatch(world)

    async def look() -> Look:
        return Look(kept="another container holds the run")

    monkeypatch.setattr(heir.recovery.context.tools.launcher, "look", look)
    await heir.recovery.begin()
    await heir.until_phase(Phase.BLOCKED)
    assert (target / "done").exists()
    assert len(quarantine.unfinished(heir.workspace)) == 1
    await heir.leave()
    world.close()


async def test_a_start_decides_anew_what_an_interrupted_quarantine_had_not_moved(quick_dir: Path) -> None:
    """Else the next podwatch would move what that start has saved since."""
    world = await prepared(quick_dir)
    world.kill()
    world.kept = None
    target = world.output / "checkpoints" / "step_15"
    begun(Workspace(world.output), quarantine.plan([target], step=10, steps={}, lineage="l", wall=0.0, number=1))
    paused = Podwatch(world)
    await paused.file.edit(lambda run: replace(run, pause=Pause(1.0)))
    await paused.recovery.begin()
    await paused.until_phase(Phase.PAUSED)
    await paused.file.edit(lambda run: replace(run, pause=None))
    paused.recovery.wake()
    await paused.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 15
    assert quarantine.unfinished(paused.workspace) == []
    assert (target / "done").exists()
    await paused.leave()
    world.close()


async def test_an_interrupted_quarantine_does_not_touch_a_living_trainer(quick_dir: Path) -> None:
    world = await prepared(quick_dir)
    target = world.output / "checkpoints" / "step_15"
    index = quarantine.plan([target], step=10, steps={15: "complete"}, lineage="l", wall=0.0, number=1)
    begun(Workspace(world.output), index)
    heir = Podwatch(world)
    await heir.recovery.begin()
    assert (target / "done").exists()
    assert quarantine.unfinished(heir.workspace) == []
    await heir.leave()
    world.close()
