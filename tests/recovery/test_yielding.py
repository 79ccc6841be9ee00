"""A pod that has lost its run gives way, whatever else it was doing, and leaves alone what a person starts then."""

import asyncio

from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import FindingKind
from podwatch.domain.lease import Decision, LeaseAction
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.recovery import Phase
from tests.support.recovery_world import Podwatch, World

HOLD = Decision(LeaseAction.HOLD, publish=True)
LOST = Decision(LeaseAction.SUPERSEDED, "pod b holds this run", stop=True)


class Standing:
    def __init__(self, now: Decision = HOLD) -> None:
        self.now = now

    @property
    def decision(self) -> Decision:
        return self.now

    def status(self) -> StoreFacts:
        return StoreFacts(lease=self.now)


async def training(world: World, standing: Standing) -> Podwatch:
    podwatch = Podwatch(world, lease=standing)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    world.save(15)
    podwatch.see(17)
    podwatch.catalogue.rescan()
    return podwatch


async def settled(podwatch: Podwatch) -> None:
    podwatch.see()
    while podwatch.recovery.acting:
        await asyncio.sleep(0.001)


async def test_it_gives_way_while_a_stop_waits_for_the_next_save(world: World) -> None:
    standing = Standing()
    podwatch = await training(world, standing)
    await podwatch.recovery.requests.stop(after_save=True)
    await podwatch.until_phase(Phase.ENDING)
    standing.now = LOST
    await podwatch.until(Phase.STOPPED)
    assert world.alive() == []
    assert "pod b holds this run" in podwatch.recovery.state.detail
    assert podwatch.recovery.desired is Desired.STOPPED, "what the person asked for stands"
    assert podwatch.recovery.context.run.yielded
    await podwatch.leave()


async def test_what_a_person_starts_after_that_is_left_alone_by_the_next_podwatch_too(world: World) -> None:
    standing = Standing()
    podwatch = await training(world, standing)
    standing.now = LOST
    await settled(podwatch)
    assert (world.alive(), podwatch.recovery.state.phase) == ([], Phase.STOPPED)
    candidate = world.person_starts()
    await podwatch.leave()
    world.trees = [candidate]
    heir = Podwatch(world, lease=standing)
    await heir.recovery.begin()
    await heir.until(Phase.ATTACHED)
    for _ in range(3):
        await settled(heir)
    assert world.alive() == [candidate.launcher.pid]
    standing.now = HOLD
    await settled(heir)
    assert not heir.recovery.context.run.yielded
    standing.now = LOST  # and the run it held is taken from it once more
    await settled(heir)
    assert world.alive() == []
    await heir.leave()


async def test_what_podwatch_starts_itself_is_always_its_own_to_end(world: World) -> None:
    standing = Standing()
    podwatch = await training(world, standing)
    standing.now = LOST
    await settled(podwatch)
    standing.now = Decision(LeaseAction.CLAIM, at_once=True)  # taken over by hand: training does not wait for the claim
    await podwatch.recovery.requests.start()
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.alive()) == 1
    assert podwatch.recovery.handle is not None
    podwatch.recovery.handle.supervision = Supervision.ATTACH  # its supervisor was killed
    standing.now = LOST
    await settled(podwatch)
    assert world.alive() == []
    await podwatch.leave()


async def test_a_pod_that_waits_says_when_it_takes_over_and_nothing_else(world: World) -> None:
    watch = Decision(LeaseAction.WATCH, "pod b possibly still trains this run", holder="b", trains_in=150.0)
    podwatch = Podwatch(world, lease=(standing := Standing(watch)))
    await podwatch.recovery.begin()
    await podwatch.until_phase(Phase.BLOCKED)
    (finding,) = podwatch.recovery.findings()
    assert (finding.kind, finding.summary) == (FindingKind.BLOCKED, "pod b possibly still trains this run")
    assert finding.suggestion.startswith("nothing: podwatch takes the run over at ")
    assert "take-over" not in finding.suggestion

    started = await podwatch.recovery.requests.start()
    assert (
        started.message == "the request is recorded; training does not start yet: pod b possibly still trains this run"
    )

    standing.now = Decision(LeaseAction.REFUSE, "pod b holds this run and is alive", holder="b")
    await podwatch.until_finding("pod b holds this run and is alive")
    (finding,) = podwatch.recovery.findings()
    assert finding.suggestion.startswith("stop training on the other pod, or ")

    await podwatch.leave()
