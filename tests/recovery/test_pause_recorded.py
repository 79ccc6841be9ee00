"""A pause holds by its record in run.json, whenever that is read."""

import asyncio
from dataclasses import replace

import pytest

from podwatch.app.pause import Maintenance
from podwatch.domain.errors import HostError
from podwatch.domain.run import Pause
from podwatch.recovery import Phase
from podwatch.recovery.run_file import RunFile
from tests.support.recovery_world import Podwatch, World


def maintenance(podwatch: Podwatch) -> Maintenance:
    return Maintenance(podwatch.file, podwatch.world.clock, podwatch.world.events.append, podwatch.recovery)


async def paused_by_an_earlier_life(world: World) -> None:
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    world.save(5)
    podwatch.see(7)
    await podwatch.file.edit(lambda run: replace(run, pause=Pause(1.0, None, "root", "driver")))
    await podwatch.die()
    world.kill()


async def test_a_pause_of_an_earlier_life_holds_from_the_first_turn(world: World) -> None:
    await paused_by_an_earlier_life(world)
    heir = Podwatch(world)
    assert heir.recovery.context.held() == "paused"
    await heir.leave()


async def test_a_pause_that_is_read_late_holds_too_and_ends_by_the_operator(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await paused_by_an_earlier_life(world)
    starts = len(world.plans)

    def unreadable(self: RunFile, *, looking: bool) -> None:
        raise HostError("run.json cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(RunFile, "_read_own", unreadable)
        patch.setattr(RunFile, "_copy_as_read", lambda self, own, *, looking: (None, None))
        heir = Podwatch(world)
        pauses = maintenance(heir)
    assert not heir.file.known
    world.kept = None  # the trainer has ended, and its supervisor too
    await heir.recovery.begin()
    await heir.until_phase(Phase.PAUSED)
    await asyncio.sleep(0.05)
    assert len(world.plans) == starts
    assert await pauses.end("by the operator")
    await heir.until(Phase.CONFIRMING)
    assert len(world.plans) == starts + 1
    await heir.leave()


async def test_a_pause_that_cannot_be_recorded_does_not_hold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    podwatch = Podwatch(world)
    pauses = maintenance(podwatch)

    def write(*_: object) -> None:
        raise HostError("no space")

    monkeypatch.setattr(podwatch.file, "_write", write)
    with pytest.raises(HostError):
        await pauses.begin(60.0, by="root", reason="")
    assert podwatch.recovery.context.held() == ""
    monkeypatch.undo()
    await pauses.begin(60.0, by="root", reason="")
    assert podwatch.recovery.context.held() == "paused"
    await podwatch.leave()
