"""A process that may become this run's training: nothing is started beside it, nothing is quarantined, and the operator
is asked in the end (DESIGN section 2, "Supervise")."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from podwatch.domain.errors import Busy, UsageError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.process import FoundTree, TreeAnswer
from podwatch.domain.snapshot import Desired
from podwatch.recovery import Phase, quarantine
from tests.recovery.test_restart import running
from tests.support.recovery_world import Killed, Killer, Podwatch, World, begun, death

AWAITS = "a CUDA context or a training process"
PATIENCE = 70 * 60.0


def end(world: World, candidate: FoundTree) -> None:
    os.killpg(candidate.launcher.pid, signal.SIGKILL)
    world.foreign[candidate.launcher.pid].wait()


async def waiting(world: World, **more: float) -> tuple[Podwatch, FoundTree]:
    """podwatch wants to train, and such a process is here, ahead of which checkpoints lie."""
    world.save(5, whole=False)
    candidate = world.person_starts(answer=TreeAnswer.WAIT, **more)  # type: ignore[arg-type]
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until_phase(Phase.BLOCKED)
    return podwatch, candidate


def asked(podwatch: Podwatch) -> tuple[Severity, str, str]:
    (found,) = [f for f in podwatch.recovery.findings() if f.kind is FindingKind.AMBIGUOUS_TRAINERS]
    return found.severity, found.summary, found.suggestion


async def looks(world: World, count: int = 5) -> None:
    """Some more looks at the pod; the clock moves with each."""
    before = world.clock.now
    while world.clock.now < before + count * 3.0:
        await asyncio.sleep(0.001)


async def test_nothing_is_started_and_nothing_moved_while_it_loads(world: World) -> None:
    podwatch, candidate = await waiting(world)
    before = world.contents()
    await looks(world)
    assert (world.plans, world.contents()) == ([], before)
    assert not (world.root / ".podwatch" / "quarantine").exists() or not any(
        (world.root / ".podwatch" / "quarantine").rglob("*.bin")
    )
    severity, text, fix = asked(podwatch)
    assert severity is Severity.WARNING
    assert f"pid {candidate.launcher.pid}: python train.py" in text
    assert AWAITS in text
    for command in (
        f"start --attach {candidate.launcher.pid}",
        f"start --ignore {candidate.launcher.pid}",
        "stop-training",
    ):
        assert command in fix
    assert not podwatch.recovery.state.acting, "it only waits"
    await podwatch.leave()


async def test_it_is_attached_to_as_soon_as_it_trains(world: World) -> None:
    podwatch, candidate = await waiting(world)
    world.trees = [replace(candidate, answer=TreeAnswer.ATTACH, trains=True)]
    await podwatch.until(Phase.ATTACHED)
    assert podwatch.recovery.handle is not None
    assert podwatch.recovery.handle.launcher == candidate.launcher
    assert (world.plans, podwatch.recovery.findings()) == ([], ())
    await podwatch.leave()


async def test_training_starts_when_it_ends(world: World) -> None:
    podwatch, candidate = await waiting(world)
    await looks(world)
    end(world, candidate)
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.plans) == 1
    assert [f for f in podwatch.recovery.findings() if f.kind is FindingKind.AMBIGUOUS_TRAINERS] == []
    await podwatch.leave()


async def test_after_the_patience_of_a_start_the_operator_is_asked_and_nothing_is_started(world: World) -> None:
    podwatch, candidate = await waiting(world, age=PATIENCE + 1)
    await looks(world, 50)
    severity, text, _ = asked(podwatch)
    assert severity is Severity.CRITICAL
    assert "Training is not running" in text
    assert world.plans == []
    end(world, candidate)
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.leave()


async def test_the_operator_decides(world: World) -> None:
    podwatch, candidate = await waiting(world)
    pid = candidate.launcher.pid
    with pytest.raises(UsageError, match="does not wait for process 1"):
        await podwatch.recovery.requests.start(ignore=1)
    started = await podwatch.recovery.requests.start()
    assert f"does not start training beside pid {pid}" in started.message
    await podwatch.until_phase(Phase.BLOCKED)
    await looks(world)
    assert world.plans == []
    await podwatch.recovery.requests.start(attach=pid)
    await podwatch.until(Phase.ATTACHED)
    assert podwatch.recovery.handle is not None
    assert podwatch.recovery.handle.launcher == candidate.launcher
    await podwatch.leave()


async def test_an_operator_may_say_that_it_is_no_training_and_it_stays_said(world: World) -> None:
    podwatch, candidate = await waiting(world)
    world.processes.remove(world.foreign[candidate.launcher.pid])  # it is no trainer: two may live
    await podwatch.recovery.requests.start(ignore=candidate.launcher.pid)
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.plans) == 1
    await podwatch.leave()
    world.kill()
    heir = Podwatch(world)
    await heir.recovery.begin()
    await heir.until(Phase.CONFIRMING)
    heir.see(finding=death())
    await heir.until(Phase.CONFIRMING)
    assert len(world.plans) == 2, "it was ignored after a restart of podwatch, too"
    await heir.leave()
    end(world, candidate)


async def test_a_terminal_is_never_attached_to(world: World) -> None:
    podwatch, candidate = await waiting(world)
    world.trees = [replace(candidate, attachable=False)]
    with pytest.raises(UsageError, match="is not a trainer of this run"):
        await podwatch.recovery.requests.start(attach=candidate.launcher.pid)
    await podwatch.leave()


async def test_stop_training_ends_the_wait(world: World) -> None:
    podwatch, candidate = await waiting(world)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    assert podwatch.recovery.desired is Desired.STOPPED
    assert world.foreign[candidate.launcher.pid].poll() is None, "it is left alone"
    await podwatch.leave()


async def test_clean_moves_nothing_beside_it(world: World) -> None:
    podwatch, candidate = await waiting(world)
    before = world.contents()
    with pytest.raises(Busy, match=str(candidate.launcher.pid)):
        await podwatch.recovery.requests.clean()
    assert world.contents() == before
    await podwatch.leave()


async def test_an_interrupted_quarantine_is_left_as_it_is_beside_it(world: World) -> None:
    """The files that were to be moved may be what this process has written since."""
    world.save(5)
    first = Podwatch(world)
    path = world.output / "checkpoints" / "step_5"
    index = quarantine.plan((path,), step=0, steps={5: "complete"}, lineage="", wall=1.0, number=1)
    begun(first.workspace, index)
    await first.die()
    candidate = world.person_starts(answer=TreeAnswer.WAIT)
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until_phase(Phase.BLOCKED)
    await looks(world)
    assert path.exists()
    assert world.foreign[candidate.launcher.pid].poll() is None
    await podwatch.leave()


@pytest.mark.parametrize(("age", "waits"), [(1_000.0, False), (5.0, True)])
async def test_what_ran_beside_our_trainer_is_not_waited_for(world: World, age: float, waits: bool) -> None:
    """``python monitor.py --output_dir OUT`` since days: a death is followed by a restart, not by a question."""
    podwatch = await running(world)
    world.clock.advance(2_000.0)
    candidate = world.person_starts(answer=TreeAnswer.WAIT, age=age)
    world.processes.remove(world.foreign[candidate.launcher.pid])
    world.kill()
    podwatch.see(16, finding=death())
    if waits:
        await podwatch.until_phase(Phase.BLOCKED)
        await looks(world)
        assert len(world.plans) == 1
    else:
        await podwatch.until(Phase.CONFIRMING)
        assert len(world.plans) == 2
    await podwatch.leave()
    end(world, candidate)


async def test_a_trainer_that_ran_beside_ours_is_never_its_successor(world: World) -> None:
    """A second one in the same output_dir: a start would make two."""
    podwatch = await running(world)
    world.clock.advance(2_000.0)
    candidate = world.person_starts(age=1_000.0)
    world.processes.remove(world.foreign[candidate.launcher.pid])
    world.kill()
    podwatch.see(16, finding=death())
    await podwatch.until_phase(Phase.BLOCKED)
    await looks(world)
    assert asked(podwatch)[0] is Severity.CRITICAL
    assert len(world.plans) == 1
    assert not any(e.name is EventName.TRAINER_ATTACHED for e in world.events)
    await podwatch.leave()
    end(world, candidate)


async def test_a_restart_by_hand_that_only_loads_yet_is_no_failure(world: World) -> None:
    """Ctrl-C, then the same command again: imports take a minute."""
    first = world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    end(world, first)
    ended = podwatch.snapshot()
    object.__setattr__(ended.trainer.value, "alive", False)
    world.clock.advance(20)
    second = world.person_starts(answer=TreeAnswer.WAIT)
    object.__setattr__(ended, "at", world.clock.now)
    podwatch.consider(ended)
    await podwatch.until_phase(Phase.BLOCKED)
    await looks(world)
    assert podwatch.journal.sync.incidents() == []
    assert any("started the ended trainer" in e.message for e in world.events)
    world.trees = [replace(second, answer=TreeAnswer.ATTACH, trains=True)]
    await podwatch.until(Phase.ATTACHED)
    assert world.plans == []
    await podwatch.leave()


async def test_observe_starts_nothing_anyway_and_does_not_wait(world: World) -> None:
    world.settings_extra = {"mode": "observe"}
    world.person_starts(answer=TreeAnswer.WAIT)
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.OBSERVING)
    assert world.plans == []
    await podwatch.leave()


async def test_a_stop_that_was_begun_is_finished_though_the_trainer_shows_no_sign_of_training(world: World) -> None:
    """podwatch was killed while an attached trainer was ending: its context is gone, its launcher is not."""
    candidate = world.person_starts()
    killer = Killer(at="stop")
    podwatch = Podwatch(world, killer=killer)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    podwatch.see(16, finding=death())
    with pytest.raises(Killed):
        await podwatch.until(Phase.CONFIRMING)
    await podwatch.die()
    assert world.trees == []
    world.stoppable = frozenset({candidate.launcher})
    heir = Podwatch(world)
    await heir.recovery.begin()
    await heir.until(Phase.CONFIRMING)
    assert world.foreign[candidate.launcher.pid].poll() is not None, "a start beside it would make two"
    assert len(world.plans) == 1
    await heir.leave()
