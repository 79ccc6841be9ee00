"""A save confirms a start only if that start's own tree can have written it; nor does another's accuse it."""

from dataclasses import replace

from podwatch.checkpoints.second_writer import Beside, Span
from podwatch.domain.finding import FindingKind
from podwatch.recovery import Phase
from tests.support.recovery_world import Podwatch, World, death


class Looks:
    """What the looks at the other processes of the pod found."""

    def __init__(self, world: World) -> None:
        self.clock = world.clock
        self.beside = Beside()

    def another(self, since: float) -> None:
        self.beside = Beside(self.clock.monotonic(), (Span(since, None, "pid 7"),))

    def gone(self) -> None:
        at = self.clock.monotonic()
        spans = tuple(replace(span, end=span.end if span.end is not None else at) for span in self.beside.spans)
        self.beside = Beside(at, spans)


async def test_the_save_of_another_confirms_no_start(world: World) -> None:
    looks = Looks(world)
    podwatch = Podwatch(world, beside=looks)
    looks.another(since=world.clock.monotonic() - 100.0)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    for step in (5, 6, 7):
        world.clock.advance(5.0)
        podwatch.see(step)
    assert podwatch.recovery.state.phase is Phase.CONFIRMING
    assert not podwatch.recovery.context.run.history.ever_worked, "another's step is no proof that our command works"
    world.clock.advance(5.0)
    looks.gone()
    world.clock.advance(5.0)
    podwatch.see(8)
    assert podwatch.recovery.state.phase is Phase.CONFIRMING, "nobody has looked since that step"
    assert podwatch.recovery.asks_whose
    world.clock.advance(1.0)
    looks.gone()
    podwatch.see(8)
    assert podwatch.recovery.state.phase is Phase.RUNNING
    await podwatch.leave()


async def test_the_step_of_another_accuses_no_resume(world: World) -> None:
    looks = Looks(world)
    podwatch = Podwatch(world, beside=looks)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    for step in (5, 10, 15):
        world.save(step)
    podwatch.see(17)
    podwatch.see(18, finding=death(FindingKind.SILENT_DEATH))
    await podwatch.until(Phase.CONFIRMING)
    looks.another(since=world.clock.monotonic())
    for step in (2, 3, 4):
        world.clock.advance(5.0)
        podwatch.see(step)
    assert podwatch.recovery.state.phase is Phase.CONFIRMING
    assert FindingKind.RESUMED_WRONG not in {f.kind for f in podwatch.recovery.findings()}
    assert len(world.plans) == 2
    await podwatch.leave()
