"""A flag of `podwatch run` is executed once, and an operator's request is recorded whole or not at all, wherever
podwatch is killed."""

from typing import Any

import pytest

from podwatch.domain.errors import HostError
from podwatch.domain.snapshot import Desired
from podwatch.recovery import Phase
from tests.support.recovery_world import Killed, Killer, Podwatch, World

KILLS = 12
"""More than the edits of one request."""


async def stopped(world: World) -> None:
    """A run with a checkpoint that its operator has stopped."""
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    world.save(5)
    podwatch.see(7)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    await podwatch.leave()


@pytest.mark.parametrize("at", range(1, KILLS))
async def test_a_flag_and_its_request_are_recorded_together(world: World, at: int) -> None:
    await stopped(world)
    killer = Killer()
    podwatch = Podwatch(world, killer=killer)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.STOPPED)
    killer.target = killer.count + at
    try:
        await podwatch.recovery.requests.start(fresh=True, executed={"--fresh": "id"})
    except Killed:
        pass
    found = podwatch.recorded()
    if found.starts[-1].seen:
        assert (found.desired is Desired.RUNNING, found.fresh, found.executed.get("--fresh")) in (
            (True, True, "id"),
            (False, False, None),
        ), killer.where
    await podwatch.die()


async def test_a_flag_that_could_not_be_recorded_has_changed_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stopped(world)
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.STOPPED)

    def write(*_: object) -> None:
        raise HostError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(podwatch.file, "_write", write)
        with pytest.raises(HostError):
            await podwatch.recovery.requests.start(fresh=True, executed={"--fresh": "id"})
    run = podwatch.run
    assert (run.desired, run.fresh, dict(run.executed)) == (Desired.STOPPED, False, {})
    await podwatch.leave()


async def test_existing_checkpoints_are_adopted_once_and_not_again_after_a_clean(world: World) -> None:
    world.save(40, wall=5.0)
    first = Podwatch(world)
    await first.recovery.begin(adopt_existing="id")
    await first.until(Phase.CONFIRMING)
    assert first.recorded().adopted
    await first.recovery.requests.stop()
    await first.until(Phase.STOPPED)
    await first.recovery.requests.clean()
    assert not first.recorded().adopted
    await first.leave()
    again = Podwatch(world)
    await again.recovery.begin(adopt_existing="id")
    assert not again.run.adopted, "init passes the flag to each daemon"
    await again.leave()
    asked: dict[str, Any] = {"adopt_existing": "another"}
    other = Podwatch(world)
    await other.recovery.begin(**asked)
    assert other.run.adopted
    await other.leave()


async def test_a_stop_is_recorded_whole(world: World) -> None:
    """Otherwise a podwatch that only observes would not carry it out after a crash."""
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    podwatch.killer.at = "after record"
    with pytest.raises(Killed):
        await podwatch.recovery.requests.stop()
    found = podwatch.recorded()
    assert (found.desired, found.requested) == (Desired.STOPPED, True)
    await podwatch.die()
