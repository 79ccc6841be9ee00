"""podwatch's own directory belongs to another user when podwatch begins: it adopts and reports, and starts nothing."""

import os
import shutil

import pytest

from podwatch.domain.finding import FindingKind
from podwatch.recovery import Phase
from tests.recovery.test_restart import running
from tests.support.recovery_world import Podwatch, World, death

pytestmark = pytest.mark.root
E = 61_018


def replaced(world: World) -> None:
    hidden = world.root / ".podwatch"
    if hidden.exists():
        hidden.rename(world.root / "kept")
    hidden.mkdir()
    os.chown(hidden, E, E)


def repaired(world: World) -> None:
    shutil.rmtree(world.root / ".podwatch")
    if (world.root / "kept").exists():
        (world.root / "kept").rename(world.root / ".podwatch")


async def test_nothing_starts_before_it_is_repaired(world: World) -> None:
    replaced(world)
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until_phase(Phase.BLOCKED)
    (finding,) = (f for f in podwatch.recovery.findings() if f.kind is FindingKind.BLOCKED)
    assert f"belongs to user {E}" in finding.summary
    assert world.plans == []
    repaired(world)
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.plans) == 1
    await podwatch.leave()


async def test_a_living_trainer_is_adopted_and_restarted_after_the_repair(world: World) -> None:
    first = await running(world)
    await first.leave()
    replaced(world)
    heir = Podwatch(world)
    await heir.recovery.begin()
    assert "took over" in heir.recovery.opening
    assert heir.run.last_start is not None, "that is in the state directory"
    heir.see(30)
    assert heir.recovery.state.phase is Phase.RUNNING
    repaired(world)
    heir.recovery.read_again()
    await heir.until(Phase.RUNNING)
    heir.see(31, finding=death())
    await heir.until(Phase.CONFIRMING)
    assert len(world.alive()) == 1
    await heir.leave()


async def test_a_death_meanwhile_is_followed_by_no_start(world: World) -> None:
    podwatch = await running(world)
    replaced(world)
    podwatch.see(30, finding=death())
    await podwatch.until_phase(Phase.BLOCKED)
    assert len(world.plans) == 1
    repaired(world)
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.plans) == 2
    await podwatch.leave()
