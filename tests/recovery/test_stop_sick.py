"""A training that is sick by its own figures, whose owner asked for a stop then."""

import asyncio

from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import Desired
from podwatch.recovery import Phase
from tests.recovery.test_restart import running
from tests.support.recovery_world import Podwatch, World

SICK = Finding(
    FindingKind.TRAINING_HEALTH,
    Severity.WARNING,
    "KL above 0.5",
    0.0,
    verdict=Verdict.STOP,
    confirmed=True,
    subject="kl",
)


async def test_it_is_stopped_after_the_next_save_once_and_for_good(world: World) -> None:
    podwatch = await running(world)
    podwatch.catalogue.rescan()
    for _ in range(5):
        podwatch.see(18, finding=SICK)
        await asyncio.sleep(0.01)
    assert len(world.alive()) == 1, "only after the next save"
    assert podwatch.recovery.desired is Desired.STOPPED
    world.save(20)
    await podwatch.until(Phase.STOPPED)
    assert world.alive() == []
    told = [e for e in world.events if e.name == "desired-changed"]
    assert len(told) == 1
    await podwatch.leave()
    heir = Podwatch(world)
    await heir.recovery.begin()
    await heir.until(Phase.STOPPED)
    assert len(world.plans) == 1
    await heir.recovery.requests.start()
    await heir.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 20
    await heir.leave()


async def test_before_a_full_disk_it_does_not_wait_for_the_save_that_cannot_fit(world: World) -> None:
    full = Finding(
        FindingKind.DISK_NO_ROOM, Severity.CRITICAL, "16 GB short", 0.0, verdict=Verdict.STOP, confirmed=True
    )
    podwatch = await running(world)
    podwatch.catalogue.rescan()
    for _ in range(5):
        podwatch.see(18, finding=full)
        await asyncio.sleep(0.01)
    await podwatch.until(Phase.STOPPED)
    assert world.alive() == []
    assert podwatch.recovery.desired is Desired.STOPPED
    assert len([e for e in world.events if e.name == "desired-changed"]) == 1
    await podwatch.leave()


async def test_without_the_owners_word_nothing_is_stopped(world: World) -> None:
    podwatch = await running(world)
    warning = Finding(FindingKind.TRAINING_HEALTH, Severity.WARNING, "KL above 0.5", 0.0, subject="kl")
    podwatch.see(18, finding=warning)
    await asyncio.sleep(0.05)
    assert podwatch.recovery.desired is Desired.RUNNING
    assert len(world.alive()) == 1
    await podwatch.leave()
