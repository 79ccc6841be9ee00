"""What comes while an action is carried out, or where one is slow or fails: no request is lost, and nothing hangs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.errors import Busy, HostError
from podwatch.domain.lease import Decision, LeaseAction
from podwatch.domain.process import TreeAnswer
from podwatch.domain.snapshot import Desired
from podwatch.recovery import Phase, quarantine
from podwatch.store.restore.restore import Restored
from tests.recovery.test_evaluating import Lease, Work, in_the_middle, running
from tests.support.recovery_nodes import Attempt, Side, two_worlds
from tests.support.recovery_world import GIB, Podwatch, Store, World, death, stored


class Slow:
    """A method that waits, once begun, until it may go on."""

    def __init__(self, owner: Any, name: str) -> None:
        self.begun, self.go_on, original = asyncio.Event(), asyncio.Event(), getattr(owner, name)

        async def slow(*args: Any, **kwargs: Any) -> Any:
            self.begun.set()
            await self.go_on.wait()
            return await original(*args, **kwargs)

        object.__setattr__(owner, name, slow)


async def turns(podwatch: Podwatch, count: int = 5) -> None:
    for _ in range(count):
        podwatch.see()
        await podwatch.quiet()


async def attached(podwatch: Podwatch) -> None:
    """Until podwatch has searched the pod once more, and watches what it found."""
    async with asyncio.timeout(60):
        while podwatch.recovery.state.phase is not Phase.ATTACHED:
            await turns(podwatch)


def launcher(podwatch: Podwatch) -> Any:
    return podwatch.recovery.context.tools.launcher


# -- a slow pod --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["list", "search"])
async def test_training_starts_also_where_every_look_takes_long(world: World, slow: str) -> None:
    """A network volume with many checkpoints, or a pod with thousands of processes."""
    podwatch = await running(world)
    rescan, look, looks = podwatch.catalogue.rescan, launcher(podwatch).look, 0

    def slow_rescan(**kwargs: Any) -> Any:
        world.clock.advance(2.5)
        return rescan(**kwargs)

    async def slow_look() -> Any:
        nonlocal looks
        looks += 1
        world.clock.advance(2.5)
        return await look()

    if slow == "list":
        podwatch.catalogue.rescan = slow_rescan  # type: ignore[method-assign]
    else:
        object.__setattr__(launcher(podwatch), "look", slow_look)
    world.kill()
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert (len(world.plans), looks < 10) == (2, True)
    await podwatch.leave()


# -- requests during a start -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["launched", "not recorded yet"])
async def test_a_restart_from_a_step_that_is_requested_during_a_start(world: World, moment: str) -> None:
    podwatch = await running(world)
    during = Slow(launcher(podwatch), "start") if moment == "launched" else Slow(podwatch.recovery.starter, "_repair")
    world.kill()
    podwatch.see(18, finding=death())
    await during.begun.wait()
    await podwatch.recovery.requests.restart(step=10)
    during.go_on.set()
    async with asyncio.timeout(30):
        while not world.plans or world.plans[-1].step != 10:
            await asyncio.sleep(0.01)
    await podwatch.until(Phase.CONFIRMING)
    assert (len(world.alive()), podwatch.run.wanted) == (1, None)
    assert podwatch.run.starts[-1].from_step == 10
    await podwatch.leave()


async def test_a_restart_that_is_requested_during_a_start_that_fails_is_no_failure(world: World) -> None:
    """Its script before the start hung; the operator mended it, and asked for a restart."""
    podwatch = await running(world)
    during = Slow(launcher(podwatch), "start")
    world.kill()
    podwatch.see(18, finding=death())
    await during.begun.wait()
    failures = podwatch.run.history.streak_count
    world.start_error = "start_before ended with code 1"
    asked = asyncio.create_task(podwatch.recovery.requests.restart(step=10))
    while podwatch.run.wanted != 10:
        await asyncio.sleep(0.002)
    during.go_on.set()
    await asked
    world.start_error = ""
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 10
    assert podwatch.run.history.streak_count <= failures
    await podwatch.leave()


async def test_a_stop_during_an_operators_start_in_mode_observe(world: World) -> None:
    world.settings_extra = {"mode": "observe"}
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.OBSERVING)
    during = Slow(launcher(podwatch), "start")
    await podwatch.recovery.requests.start()
    await during.begun.wait()
    await podwatch.recovery.requests.stop()
    during.go_on.set()
    await podwatch.until(Phase.STOPPED)
    assert (world.alive(), podwatch.run.desired) == ([], Desired.STOPPED)
    await podwatch.leave()


async def test_a_start_after_a_death_is_no_failure(world: World) -> None:
    """In mode observe nothing else follows a death; the operator has mended the command, and starts it."""
    world.settings_extra = {"mode": "observe"}
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.OBSERVING)
    await podwatch.recovery.requests.start()
    await podwatch.until(Phase.CONFIRMING, Phase.RUNNING)
    world.kill()
    podwatch.see(finding=death())
    await podwatch.quiet()
    await podwatch.recovery.requests.start()
    await podwatch.until(Phase.CONFIRMING)
    assert (len(world.plans), len(world.alive())) == (2, 1)
    assert not [start for start in podwatch.run.starts if start.counted]
    assert podwatch.journal.sync.incidents() == []
    await podwatch.leave()


async def test_a_second_start_request_changes_nothing_of_the_first(world: World) -> None:
    podwatch = await running(world)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    during = Slow(launcher(podwatch), "start")
    await podwatch.recovery.requests.start(step=10)
    await during.begun.wait()
    assert "already" in (await podwatch.recovery.requests.start()).message
    during.go_on.set()
    await podwatch.until(Phase.CONFIRMING)
    assert [plan.step for plan in world.plans][1:] == [10]
    await podwatch.leave()


# -- evaluations -------------------------------------------------------------------------------------------------------


async def test_a_stop_while_training_stops_for_an_evaluation_answers_who_waits_for_it(world: World) -> None:
    podwatch = await running(world)
    assert world.kept is not None
    during = Slow(world.kept, "stop")
    asked = asyncio.ensure_future(podwatch.recovery.requests.evaluate(Work(world)))
    await during.begun.wait()
    await podwatch.recovery.requests.stop()
    during.go_on.set()
    async with asyncio.timeout(30):
        assert (await asked).why_not
    await podwatch.until(Phase.STOPPED)
    assert podwatch.recovery.state.evaluation == ""
    await podwatch.recovery.requests.start()
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see(17)
    await turns(podwatch)
    assert (len(world.plans), len(world.alive())) == (2, 1), "training is not stopped once more for it"
    await podwatch.leave()


async def test_a_lease_that_is_lost_while_training_stops_for_an_evaluation(world: World) -> None:
    lease = Lease()
    podwatch = await running(world, lease=lease)
    assert world.kept is not None
    during = Slow(world.kept, "stop")
    asked = asyncio.ensure_future(podwatch.recovery.requests.evaluate(Work(world)))
    await during.begun.wait()
    lease.decision = Decision(LeaseAction.SUPERSEDED, "pod b trains this run", stop=True)
    during.go_on.set()
    async with asyncio.timeout(30):
        assert (await asked).why_not == "pod b trains this run"
    await turns(podwatch)
    assert (podwatch.recovery.state.evaluation, podwatch.run.evaluation, world.alive()) == ("", "", [])
    await podwatch.leave()


async def test_a_pause_during_an_evaluation_shows_that_training_is_down(world: World) -> None:
    podwatch = await running(world)
    _, asked = await in_the_middle(world, podwatch)
    podwatch.recovery.context.pausing = True
    podwatch.recovery.wake()
    await asked
    await podwatch.until_phase(Phase.PAUSED)
    await turns(podwatch)
    assert podwatch.recovery.state.evaluation == ""
    podwatch.recovery.context.pausing = False
    await podwatch.leave()


async def test_without_training_an_evaluation_needs_no_lease(world: World) -> None:
    lease = Lease()
    podwatch = await running(world, lease=lease)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    lease.decision = Decision(LeaseAction.ASK, "the store does not answer")
    work = Work(world)
    async with asyncio.timeout(30):
        outcome = await podwatch.recovery.requests.evaluate(work)
    assert (outcome.why_not, work.ended) == ("", ["whole"])
    await podwatch.leave()


async def test_without_training_an_evaluation_does_not_begin_beside_a_trainer_that_loads(world: World) -> None:
    podwatch = await running(world)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    world.person_starts(answer=TreeAnswer.WAIT)
    work = Work(world)
    assert "may train this run" in (await podwatch.recovery.requests.evaluate(work)).why_not
    assert work.seen == []
    await podwatch.leave()


# -- clean -------------------------------------------------------------------------------------------------------------


async def test_a_clean_that_fails_is_answered_and_not_carried_out_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    podwatch = await running(world)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise HostError("no space left")

        patch.setattr(quarantine, "carry_out", full)
        with pytest.raises(HostError, match="no space left"):
            await podwatch.recovery.requests.clean()
    assert not podwatch.recorded().clean
    await turns(podwatch)
    assert podwatch.catalogue.layout.numbers("checkpoints") == [5, 10, 15]
    await podwatch.leave()


async def test_an_operators_trainer_replaces_a_clean_that_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoints must not go to quarantine when it ends."""
    podwatch = await running(world)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    await podwatch.recovery.context.edit(clean=True)  # of an earlier podwatch, killed before it was carried out
    world.clock.advance(5)
    world.person_starts()
    await attached(podwatch)
    assert not podwatch.recorded().clean
    await podwatch.leave()


async def test_a_start_answers_a_clean_that_waits(world: World) -> None:
    podwatch = await running(world)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    during = Slow(podwatch.recovery.performer, "clean")
    asked = asyncio.ensure_future(podwatch.recovery.requests.clean())
    await during.begun.wait()
    await podwatch.recovery.requests.start()
    with pytest.raises(Busy, match="replaced"):
        await asked
    during.go_on.set()
    await podwatch.leave()


# -- begin -------------------------------------------------------------------------------------------------------------


async def test_a_move_that_cannot_be_finished_does_not_keep_podwatch_from_guarding(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    podwatch = Podwatch(world)

    def broken(*_: object) -> None:
        raise HostError("read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(quarantine, "unfinished", lambda _: [object()])
        patch.setattr(quarantine, "carry_out", broken)
        await podwatch.recovery.begin()
    assert "read-only file system" in " ".join(f.summary for f in podwatch.recovery.findings())
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.leave()


# -- several nodes -----------------------------------------------------------------------------------------------------


async def test_a_node_that_follows_starts_nothing_beside_an_operators_trainer(tmp_path: Path) -> None:
    """Rank 0 may take an hour, in which nobody looked."""
    first, second = two_worlds(tmp_path)
    attempt = Attempt()
    other = Podwatch(second, gang=Side(attempt, leads=False))
    await other.recovery.begin()
    await other.until_phase(Phase.STARTING)
    second.person_starts()
    second.clock.advance(60)
    attempt.ready.set()
    await other.until(Phase.ATTACHED)
    assert (len(second.alive()), second.plans) == (1, [])
    await other.leave()
    first.close()
    second.close()


async def test_rank_0_fetches_only_once_all_nodes_are_here(world: World) -> None:
    store = Store(world, stored(40, "r40", "b", 1))
    fetched_before: list[list[int]] = []

    class Leads(Side):
        async def gather(self) -> None:
            fetched_before.append(list(store.fetched))

    podwatch = Podwatch(world, gang=Leads(Attempt(), leads=True), restore=store)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    assert (fetched_before[0], store.fetched) == ([], [40])
    await podwatch.leave()


# -- the store ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["beside a process", "by request"])
async def test_what_waits_for_something_else_does_not_wait_for_the_store(world: World, case: str) -> None:
    """Else podwatch leaves a pod with its code for a locked-out store while an operator's trainer loads there."""
    lease = Lease()
    lease.decision = Decision(LeaseAction.ASK, "the store does not answer")
    if case == "beside a process":
        world.person_starts(answer=TreeAnswer.WAIT)
    else:
        world.gpu_used = 60 * GIB
    podwatch = Podwatch(world, lease=lease)
    await podwatch.recovery.begin()
    await turns(podwatch)
    if case == "by request":
        await podwatch.recovery.requests.start(fresh=True)
        world.clock.advance(100)
        await turns(podwatch)
    assert podwatch.recovery.state.phase is Phase.BLOCKED
    assert not podwatch.recovery.waits_for_store
    await podwatch.leave()


async def test_a_damaged_checkpoint_is_replaced_by_the_stores_copy_once(world: World) -> None:
    """The copy has the same name, size and times: the inspection that found damage was of the one before."""

    class SameTimes(Store):
        async def fetch_save(self, key: tuple[int, str], *_: Any, **__: Any) -> Restored:
            self.fetched.append(key[0])
            world.damaged.clear()
            return Restored(*key, "", (), 0, 0)

    store = SameTimes(world)
    podwatch = await running(world, restore=store)
    store.given.append(stored(15, "r15", podwatch.run.lineage.id, 1))
    world.damaged[15] = ("zeros",)
    world.kill()
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert (store.fetched, world.plans[-1].step) == ([15], 15)
    await podwatch.leave()


async def test_a_trainer_that_an_operator_starts_on_a_superseded_pod_is_not_stopped(world: World) -> None:
    """Also where none ran when the pod was superseded."""
    lease = Lease()
    podwatch = await running(world, lease=lease)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    lease.decision = Decision(LeaseAction.SUPERSEDED, "pod b trains this run", stop=True)
    await turns(podwatch)
    world.clock.advance(5)
    tree = world.person_starts()
    await attached(podwatch)
    await turns(podwatch)
    assert world.alive() == [tree.launcher.pid]
    await podwatch.leave()


# -- attach ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stopped_beside_an_operators_trainer(world: World) -> AsyncIterator[tuple[Podwatch, int, Callable[[], None]]]:
    podwatch = await running(world)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    pids = list[int]()

    def begins() -> None:
        world.clock.advance(5)
        pids.append(world.person_starts().launcher.pid)

    yield podwatch, len(world.plans), begins
    await podwatch.leave()


async def test_an_error_while_podwatch_attaches_stops_no_trainer(world: World) -> None:
    async with stopped_beside_an_operators_trainer(world) as (podwatch, starts, begins):
        record, failed = podwatch.catalogue.record_starts, []

        def once() -> None:
            if not failed:
                failed.append(True)
                raise HostError("the disk does not answer")
            record()

        podwatch.catalogue.record_starts = once  # type: ignore[method-assign]
        begins()
        await attached(podwatch)
        await turns(podwatch)
        assert failed
        assert (len(world.alive()), len(world.plans)) == (1, starts)
        assert podwatch.run.desired is Desired.RUNNING


async def test_a_question_about_an_earlier_start_does_not_outlive_it(world: World) -> None:
    async with stopped_beside_an_operators_trainer(world) as (podwatch, starts, begins):
        podwatch.recovery.observer.ask("step 15 may be complete, but no inspection gave an answer")
        begins()
        await attached(podwatch)
        podwatch.see(20)
        (pid,) = world.alive()
        os.killpg(pid, signal.SIGKILL)
        world.foreign[pid].wait()
        podwatch.see(finding=death())
        await podwatch.until(Phase.CONFIRMING)
        assert len(world.plans) == starts + 1
