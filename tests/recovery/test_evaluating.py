"""Training stops for an evaluation and starts again, whatever the evaluation does, and whoever is killed meanwhile."""

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from podwatch.app.status_view import recovery_view
from podwatch.domain.event import EventName
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import FindingKind
from podwatch.domain.lease import Decision, LeaseAction
from podwatch.domain.snapshot import Desired
from podwatch.recovery import Phase, perform
from podwatch.recovery.perform import Outcome
from tests.drivers.detection import judging
from tests.support.recovery_world import GIB, Killed, Killer, Podwatch, World, death, finished

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")]


@pytest.fixture(autouse=True)
def no_garbage_of_other_tests() -> None:
    """Their unclosed sockets would count as this test's errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@dataclass
class Work:
    """Runs ``act``; ``seen`` is how many trainers lived meanwhile."""

    world: World
    act: Callable[[], Awaitable[None]] | None = None
    title: str = "step 15"
    most_seconds: float = 7200.0
    seen: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def run(self) -> None:
        self.seen.append(len(self.world.alive()))
        try:
            if self.act is not None:
                await self.act()
            self.ended.append("whole")
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def running(world: World, **kw: object) -> Podwatch:
    podwatch = Podwatch(world, **kw)  # type: ignore[arg-type]
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    for step in (5, 10, 15):
        world.save(step)
    podwatch.see(17)
    assert podwatch.recovery.state.phase is Phase.RUNNING
    return podwatch


async def test_stop_evaluate_start_without_an_incident_or_budget(world: World) -> None:
    podwatch = await running(world)
    podwatch.catalogue.rescan()
    shown: list[tuple[str, Desired, bool]] = []

    async def look() -> None:
        state = podwatch.recovery.state
        shown.append((str(state.phase), podwatch.recovery.context.judged, state.acting))
        assert recovery_view(state).evaluating
        assert (state.detail, state.step) == ("training is stopped to evaluate step 15", 15)

    work = Work(world, look)
    assert await podwatch.recovery.requests.evaluate(work) == Outcome(stopped=True)
    await podwatch.until(Phase.CONFIRMING)
    assert (work.seen, work.ended) == ([0], ["whole"])
    assert shown == [("evaluating", Desired.STOPPED, False)], "no detector judges it, and pruning continues"
    assert len(world.alive()) == 1
    assert world.plans[-1].step == 15
    podwatch.see(16)
    state = podwatch.recovery.state
    assert (state.phase, state.attempts, state.evaluation) == (Phase.RUNNING, 0, "")
    assert podwatch.recovery.desired is Desired.RUNNING
    assert podwatch.journal.sync.incidents() == []
    assert podwatch.recovery.context.run.history.streak_count == 0
    (stopping,) = [e for e in world.events if e.name is EventName.TRAINER_STOPPING]
    assert stopping.fields["evaluation"] is True
    assert stopping.message == "stopping training: to evaluate step 15"
    await podwatch.leave()


async def broken() -> None:
    raise RuntimeError("bug")


@pytest.mark.parametrize(("act", "why"), [(broken, "internal error: RuntimeError('bug')"), (forever, "7200 s")])
async def test_work_that_fails_or_hangs_costs_no_training(
    world: World, act: Callable[[], Awaitable[None]], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perform, "WATCH_SECONDS", 0.01)
    podwatch = await running(world)
    work = Work(world, act)
    asked = asyncio.ensure_future(podwatch.recovery.requests.evaluate(work))
    while not work.seen:
        await asyncio.sleep(0.002)
    world.clock.advance(7201.0)
    outcome = await asked
    assert outcome.stopped
    assert why in outcome.why_not
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.alive()) == 1
    assert FindingKind.BLOCKED not in {f.kind for f in podwatch.recovery.findings()}
    assert podwatch.journal.sync.incidents() == []
    await podwatch.leave()


async def test_work_that_ignores_its_end_delays_training_by_a_bounded_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perform, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(perform, "END_SECONDS", 0.05)
    released = asyncio.Event()

    async def deaf() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    podwatch = await running(world)
    work = Work(world, deaf)
    asked = asyncio.ensure_future(podwatch.recovery.requests.evaluate(work))
    while not work.seen:
        await asyncio.sleep(0.002)
    world.clock.advance(7201.0)
    assert (await asked).stopped
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.alive()) == 1
    released.set()
    await podwatch.leave()


async def test_memory_that_the_evaluation_leaves_is_waited_for(world: World) -> None:
    world.gpu_used = 0
    podwatch = await running(world)

    async def leaves() -> None:
        world.gpu_used = 60 * GIB

    assert (await podwatch.recovery.requests.evaluate(Work(world, leaves))).stopped
    await podwatch.until_phase(Phase.BLOCKED)
    assert "gpu0 holds 60.0 GiB" in podwatch.recovery.state.detail
    assert world.alive() == []
    assert not recovery_view(podwatch.recovery.state).gave_up
    world.gpu_used = 0
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.alive()) == 1
    await podwatch.leave()


async def test_gpus_that_are_not_free_after_the_stop_cost_the_evaluation_only(world: World) -> None:
    world.gpu_used = 0
    podwatch = await running(world)
    world.gpu_used = 60 * GIB  # of the trainer, until it is seen to be gone
    work = Work(world)
    asked = asyncio.ensure_future(podwatch.recovery.requests.evaluate(work))
    outcome = await asked
    assert (outcome.stopped, work.seen) == (True, [])
    assert "gpu0 holds 60.0 GiB" in outcome.why_not
    await podwatch.until_phase(Phase.BLOCKED)
    world.gpu_used = 0
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.leave()


async def in_the_middle(world: World, podwatch: Podwatch) -> tuple[Work, "asyncio.Future[Outcome]"]:
    work = Work(world, forever)
    asked = asyncio.ensure_future(podwatch.recovery.requests.evaluate(work))
    while not work.seen:
        await asyncio.sleep(0.002)
    return work, asked


async def test_an_operators_stop_ends_it_and_training_stays_stopped(world: World) -> None:
    podwatch = await running(world)
    work, asked = await in_the_middle(world, podwatch)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    assert (await asked).why_not == "podwatch interrupted it"
    assert work.ended == ["cancelled"]
    assert world.alive() == []
    assert podwatch.run.stopping is None
    await podwatch.leave()


@pytest.mark.parametrize("request_", ["start", "restart"])
async def test_an_operators_start_ends_it(world: World, request_: str) -> None:
    podwatch = await running(world)
    work, asked = await in_the_middle(world, podwatch)
    await getattr(podwatch.recovery.requests, request_)(step=10)
    await podwatch.until(Phase.CONFIRMING)
    assert (await asked).stopped
    assert work.ended == ["cancelled"]
    assert len(world.alive()) == 1
    assert world.plans[-1].step == 10
    await podwatch.leave()


async def test_a_pause_ends_it_and_the_start_waits_for_the_end_of_the_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perform, "WATCH_SECONDS", 0.01)
    podwatch = await running(world)
    work, asked = await in_the_middle(world, podwatch)
    podwatch.recovery.context.pausing = True
    podwatch.recovery.wake()
    assert await asked == Outcome("podwatch is paused", stopped=True)
    await podwatch.until_phase(Phase.PAUSED)
    assert (work.ended, world.alive()) == (["cancelled"], [])
    podwatch.recovery.context.pausing = False
    podwatch.recovery.wake()
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.leave()


async def test_a_trainer_that_an_operator_starts_meanwhile_is_taken_over(world: World) -> None:
    podwatch = await running(world)

    async def by_hand() -> None:
        world.person_starts()

    assert (await podwatch.recovery.requests.evaluate(Work(world, by_hand))).stopped
    await podwatch.until(Phase.ATTACHED)
    assert len(world.alive()) == 1
    assert len(world.plans) == 1
    await podwatch.leave()


class Lease:
    def __init__(self) -> None:
        self.decision = Decision(LeaseAction.HOLD, publish=True)

    def status(self) -> StoreFacts:
        return StoreFacts(lease=self.decision)


async def test_a_run_that_another_pod_takes_over_meanwhile_is_not_started(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perform, "WATCH_SECONDS", 0.01)
    lease = Lease()
    podwatch = await running(world, lease=lease)
    work, asked = await in_the_middle(world, podwatch)
    lease.decision = Decision(LeaseAction.SUPERSEDED, "pod b trains this run", stop=True)
    podwatch.recovery.wake()
    assert (await asked).why_not == "pod b trains this run"
    await podwatch.until(Phase.STOPPED)
    assert (work.ended, world.alive()) == (["cancelled"], [])
    await podwatch.leave()


# -- when it is refused ----------------------------------------------------------------------------------------------


async def refused(podwatch: Podwatch, why: str) -> None:
    work = Work(podwatch.world)
    outcome = await podwatch.recovery.requests.evaluate(work)
    assert not outcome.stopped
    assert why in outcome.why_not
    assert work.seen == []


async def test_training_is_not_stopped_while_something_speaks_against_it(world: World) -> None:
    lease = Lease()
    podwatch = await running(world, lease=lease)
    recovery, tools = podwatch.recovery, podwatch.recovery.context.tools
    recovery.context.pausing = True
    await refused(podwatch, "podwatch is paused")
    recovery.context.pausing = False
    lease.decision = Decision(LeaseAction.SUPERSEDED, "pod b may train this run")
    await refused(podwatch, "pod b may train")
    lease.decision = Decision(LeaseAction.HOLD, publish=True)
    recovery.reconfigure(tools.settings.model_copy(update={"mode": "observe"}), tools.policies)
    await refused(podwatch, "mode observe")
    recovery.reconfigure(tools.settings, tools.policies)
    command = tools.settings.trainer.model_copy(update={"command": ()})
    recovery.reconfigure(tools.settings.model_copy(update={"trainer": command}), tools.policies)
    await refused(podwatch, "[trainer] command")
    recovery.reconfigure(tools.settings, tools.policies)
    missing = tools.settings.trainer.model_copy(update={"env_file": world.root / "missing"})
    recovery.reconfigure(tools.settings.model_copy(update={"trainer": missing}), tools.policies)
    podwatch.environment.build = lambda _trainer: (_ for _ in ()).throw(OSError("no such file"))  # type: ignore[method-assign]
    await refused(podwatch, "could not be started again")
    del podwatch.environment.build
    recovery.reconfigure(tools.settings, tools.policies)
    podwatch.see(18, finding=death())
    await refused(podwatch, "stopping or starting")
    await podwatch.until(Phase.CONFIRMING)
    await refused(podwatch, "not confirmed by a step")
    assert len(world.alive()) == 1
    podwatch.see(19)
    world.kill()
    await refused(podwatch, "training has ended")
    await podwatch.leave()


async def test_a_trainer_that_podwatch_did_not_start_is_never_stopped(world: World) -> None:
    world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    await refused(podwatch, "podwatch did not start the trainer")
    assert len(world.alive()) == 1
    await podwatch.leave()


async def test_training_whose_last_step_is_saved_ends_instead(world: World) -> None:
    """Its GPUs are free after that, and a start from the last step would train nothing."""
    podwatch = await running(world, policies=judging(max_steps=15))
    podwatch.catalogue.rescan()
    await refused(podwatch, "saved its last step")
    await podwatch.leave()


# -- no training is wanted: nothing has to stop ----------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.STOPPED])
async def test_without_training_it_runs_on_the_free_gpus(world: World, phase: Phase) -> None:
    world.gpu_used = 0
    podwatch = await running(world)
    if phase is Phase.FINISHED:
        podwatch.see(18, finding=finished())
    else:
        await podwatch.recovery.requests.stop()
    await podwatch.until(phase)
    detail = podwatch.recovery.state.detail
    assert podwatch.recovery.requests.idle
    world.gpu_used = 60 * GIB
    await refused(podwatch, "gpu0 holds 60.0 GiB")
    world.gpu_used = 0

    async def look() -> None:
        assert podwatch.recovery.state.phase is phase
        assert podwatch.recovery.state.detail.endswith("; evaluating step 15")
        assert not podwatch.recovery.state.acting

    assert await podwatch.recovery.requests.evaluate(Work(world, look)) == Outcome()
    await podwatch.until(phase)
    assert podwatch.recovery.state.detail == detail
    assert (world.alive(), len(world.plans)) == ([], 1)
    work, asked = await in_the_middle(world, podwatch)
    await podwatch.recovery.requests.start()
    await podwatch.until(Phase.CONFIRMING)
    assert (await asked).why_not
    assert work.ended == ["cancelled"]
    assert len(world.alive()) == 1
    await podwatch.leave()


# -- kill -9 ---------------------------------------------------------------------------------------------------------


async def one_kill(root: Path, target: int) -> tuple[bool, bool]:
    """(whether the kill struck, whether it struck during the evaluation)."""
    world = World(root)
    world.output.mkdir()
    killer = Killer()
    inside = False
    try:
        victim = await running(world, killer=killer)
        killer.target = killer.count + target

        async def work() -> None:
            nonlocal inside
            inside = True
            killer.point("evaluating")
            inside = False

        struck = False
        task = asyncio.ensure_future(victim.recovery.requests.evaluate(Work(world, work)))
        try:
            await victim.until(Phase.CONFIRMING)
        except Killed:
            struck = True
        await asyncio.wait([task], timeout=1.0)
        task.cancel()
        await victim.die()
        assert len(world.alive()) <= 1, killer.where
        heir = Podwatch(world)
        await heir.recovery.begin()
        await heir.until(Phase.CONFIRMING, Phase.RUNNING)
        where = f"killed at {killer.where} ({target})"
        assert len(world.alive()) == 1, where
        assert world.kept is not None
        assert world.kept.process.pid == world.alive()[0], where
        assert heir.run.stopping is None, where
        assert heir.recovery.desired is Desired.RUNNING, where
        assert heir.recovery.context.run.history.streak_count == 0, where
        assert heir.journal.sync.incidents() == [], where
        if world.plans[1:]:
            assert world.plans[-1].step == 15, where
        await heir.leave()
    finally:
        world.close()
    return struck, inside


async def test_killed_at_every_point_training_runs_again(quick_dir: Path) -> None:
    target, during = 1, 0
    while True:
        root = quick_dir / str(target)
        root.mkdir()
        struck, inside = await one_kill(root, target)
        during += inside
        if not struck:
            break
        target += 1
    assert during == 1
    assert target > 20, "it passed fewer points than it has"
