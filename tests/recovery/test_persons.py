"""A person starts training by hand, at any time: it is seen, guarded, said, and never joined by a second one."""

import asyncio
import contextlib
import os
import signal
import socket
from dataclasses import replace
from typing import Any

import pytest

from podwatch.domain.errors import Busy, ConfigurationError, UsageError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.outcome import ENDS_ON_ITS_OWN
from podwatch.domain.process import ExitStatus, ProcessIdentity, TreeAnswer, attached_id
from podwatch.domain.run import Pause
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.recovery import Phase, gpus_and_ports_free
from podwatch.trainer.start_and_adopt import CannotExecute, Look
from podwatch.trainer.trainer_handle import StopReport
from tests.drivers.detection import judging
from tests.recovery.test_restart import running
from tests.support.recovery_world import Killed, Killer, Podwatch, World, death, finished

pytestmark = pytest.mark.slow


async def turns(podwatch: Podwatch, seconds: float = 40.0) -> None:
    """Turns of the sensing loop without anything to judge, acts given their time."""
    end = podwatch.world.clock.now + seconds
    while podwatch.world.clock.now < end:
        podwatch.see()
        while podwatch.recovery.acting:
            await asyncio.sleep(0.001)


def notes(podwatch: Podwatch) -> list[tuple[FindingKind, Severity]]:
    return [(f.kind, f.severity) for f in podwatch.recovery.findings()]


async def idle(world: World, what: str) -> Podwatch:
    """A podwatch that wants nothing just now, with no act running."""
    if what == "given up":
        world.settings_extra = {"recovery": {"retry_after_give_up": 0}}
        podwatch = Podwatch(world)
        world.settings_extra = {}
        world.start_error = CannotExecute("the command does not exist")
        await podwatch.recovery.begin()
        await podwatch.until(Phase.GAVE_UP)
        world.start_error = ""
    else:
        podwatch = await running(world)
    if what == "stopped":
        await podwatch.recovery.requests.stop()
        await podwatch.until(Phase.STOPPED)
    elif what == "finished":
        podwatch.see(18, finding=finished())
        await podwatch.until(Phase.FINISHED)
    assert podwatch.recovery.handle is None
    return podwatch


@pytest.mark.parametrize("what", ["stopped", "finished", "given up"])
async def test_it_is_seen_whatever_podwatch_was_doing(world: World, what: str) -> None:
    podwatch = await idle(world, what)
    started = len(world.plans)
    await turns(podwatch)
    assert podwatch.recovery.handle is None, "nothing is there yet"
    candidate = world.person_starts()
    await turns(podwatch)
    recovery = podwatch.recovery
    assert (recovery.state.phase, recovery.state.supervision) == (Phase.ATTACHED, Supervision.ATTACH)
    assert recovery.desired is Desired.RUNNING
    assert len(world.plans) == started
    assert FindingKind.GAVE_UP not in [kind for kind, _ in notes(podwatch)]
    if what != "given up":
        (said,) = [e.message for e in world.events if e.name is EventName.DESIRED_CHANGED and "again" in e.message]
        assert str(candidate.launcher.pid) in said
    await podwatch.leave()
    heir = Podwatch(world)
    world.trees = [candidate]
    await heir.recovery.begin()
    await heir.until(Phase.ATTACHED)
    assert heir.recovery.desired is Desired.RUNNING
    world.save(20)
    os.kill(candidate.launcher.pid, signal.SIGKILL)
    world.foreign[candidate.launcher.pid].wait()
    heir.see(20, finding=death())
    await heir.until(Phase.CONFIRMING)
    assert (len(world.alive()), world.plans[-1].step) == (1, 20)
    await heir.leave()


async def test_a_leftover_says_nothing_about_what_is_wanted(world: World) -> None:
    """Its end would be taken for the run's, and training started that a person stopped."""
    podwatch = await idle(world, "stopped")
    world.person_starts(age=1e6)
    await turns(podwatch)
    assert (podwatch.recovery.state.phase, podwatch.recovery.desired) == (Phase.STOPPED, Desired.STOPPED)
    assert notes(podwatch) == [(FindingKind.UNGUARDED, Severity.INFO)]
    assert not podwatch.recovery.state.acting
    world.trees.clear()
    await turns(podwatch)
    assert notes(podwatch) == []
    await podwatch.leave()


async def test_what_may_train_beside_a_stopped_run_is_named(world: World) -> None:
    """``python3 train.py --output_dir OUT`` by hand: stop-training does not end it, and it goes on saving."""
    podwatch = await idle(world, "stopped")
    tree = world.person_starts(answer=TreeAnswer.WAIT)
    await turns(podwatch)
    assert (podwatch.recovery.state.phase, podwatch.recovery.desired) == (Phase.STOPPED, Desired.STOPPED)
    (found,) = podwatch.recovery.findings()
    assert (found.kind, f"pid {tree.launcher.pid}" in found.summary) == (FindingKind.UNGUARDED, True)
    await podwatch.leave()


async def test_several_are_told_and_one_is_taken_at_a_persons_word(world: World) -> None:
    podwatch = await idle(world, "stopped")
    first, second = world.person_starts(), world.person_starts()
    await turns(podwatch)
    assert notes(podwatch) == [(FindingKind.AMBIGUOUS_TRAINERS, Severity.CRITICAL)]
    started = await podwatch.recovery.requests.start()
    assert [c.launcher.pid for c in started.choose_from] == [first.launcher.pid, second.launcher.pid]
    assert (podwatch.recovery.desired, podwatch.recovery.acting) == (Desired.STOPPED, False)
    with pytest.raises(UsageError, match="process 1 is not a trainer"):
        await podwatch.recovery.requests.start(attach=1)
    started = await podwatch.recovery.requests.start(attach=second.launcher.pid)
    assert f"pid {second.launcher.pid}: python train.py" in started.message
    await podwatch.until(Phase.ATTACHED)
    assert podwatch.recovery.handle is not None
    assert podwatch.recovery.handle.launcher == second.launcher
    assert (podwatch.recovery.desired, notes(podwatch)) == (Desired.RUNNING, [])
    await podwatch.leave()


async def test_any_process_of_a_tree_names_it(world: World) -> None:
    """``nvidia-smi`` shows the workers, not the launcher."""
    podwatch = await idle(world, "stopped")
    first, second = world.person_starts(), world.person_starts()
    worker = replace(second.top, identity=replace(second.top.identity, pid=second.launcher.pid + 100_000_000))
    world.trees[:] = [first, replace(second, members=(second.top, worker))]
    await podwatch.recovery.requests.start(attach=worker.pid)
    await podwatch.until(Phase.ATTACHED)
    assert podwatch.recovery.handle is not None
    assert podwatch.recovery.handle.launcher == second.launcher
    await podwatch.leave()


async def test_a_difference_of_the_command_ends_with_the_trainer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """``bash -c 'rl; exec bash'``: training has ended, and its first process lives on as a shell."""
    world.settings_extra = {"trainer": {"command": ["python", "other.py"]}}
    podwatch = await idle(world, "stopped")
    world.person_starts()
    await podwatch.recovery.requests.start()
    await podwatch.until(Phase.ATTACHED)
    await podwatch.recovery.command.compare_command()
    assert FindingKind.COMMAND_CHANGED in [kind for kind, _ in notes(podwatch)]

    async def ended() -> ExitStatus:
        return ExitStatus()

    monkeypatch.setattr(podwatch.recovery.handle, "exit_status", ended)
    await podwatch.recovery.command.compare_command()
    assert FindingKind.COMMAND_CHANGED not in [kind for kind, _ in notes(podwatch)]
    await podwatch.leave()


async def test_start_names_what_it_takes_over_and_joins_nothing(world: World) -> None:
    world.settings_extra = {"trainer": {"command": []}}
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await asyncio.sleep(0.02)
    with pytest.raises(ConfigurationError):
        await podwatch.recovery.requests.start()
    candidate = world.person_starts()
    for impossible in ({"step": 5}, {"fresh": True}):
        with pytest.raises(Busy, match="two would train at once"):
            await podwatch.recovery.requests.start(**impossible)
    started = await podwatch.recovery.requests.start()
    assert str(candidate.launcher.pid) in started.message
    await podwatch.until(Phase.ATTACHED)
    assert world.plans == []
    await podwatch.leave()


async def test_a_restart_by_hand_during_the_wait_is_no_failure(world: World) -> None:
    """Ctrl-C, then the same command again: a trainer podwatch did not start has time for that before it acts."""
    first = world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    os.kill(first.launcher.pid, signal.SIGINT)
    os.killpg(first.launcher.pid, signal.SIGKILL)
    world.foreign[first.launcher.pid].wait()
    ended = podwatch.snapshot()
    assert ended.trainer.value is not None
    object.__setattr__(ended.trainer.value, "alive", False)
    world.clock.advance(20)
    second = world.person_starts()
    object.__setattr__(ended, "at", world.clock.now)
    podwatch.consider(ended)
    await podwatch.until(Phase.ATTACHED)
    assert podwatch.recovery.handle is not None
    assert podwatch.recovery.handle.launcher == second.launcher
    assert podwatch.journal.sync.incidents() == []
    assert any("started the ended trainer" in e.message for e in world.events)
    assert world.plans == []
    await podwatch.leave()


async def test_what_is_left_of_the_old_tree_is_no_new_trainer(world: World) -> None:
    first = world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    ended = podwatch.snapshot()
    object.__setattr__(ended.trainer.value, "alive", False)
    world.trees = [first]
    world.clock.advance(20)
    object.__setattr__(ended, "at", world.clock.now)
    podwatch.consider(ended)
    while podwatch.recovery.acting:
        await asyncio.sleep(0.001)
    assert podwatch.recovery.handle is not None
    assert podwatch.recovery.handle.launcher == first.launcher
    assert not any("by hand" in e.message for e in world.events)
    await podwatch.leave()


async def test_what_ran_beside_it_all_the_time_is_no_restart_by_hand(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    podwatch = Podwatch(world)
    first = world.person_starts()
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    handle = podwatch.recovery.handle
    assert handle is not None
    ended = ExitStatus(at_wall=world.clock.wall())

    async def gone() -> ExitStatus:
        return ended

    monkeypatch.setattr(handle, "exit_status", gone)
    snapshot = podwatch.snapshot()
    object.__setattr__(snapshot.trainer.value, "alive", False)
    for age, taken in ((500.0, False), (15.0, True)):
        world.trees.clear()
        second = world.person_starts(age=age)
        world.clock.advance(20)
        object.__setattr__(snapshot, "at", world.clock.now)
        podwatch.consider(snapshot)
        while podwatch.recovery.acting:
            await asyncio.sleep(0.001)
        assert podwatch.recovery.handle is not None
        assert podwatch.recovery.handle.launcher == (second if taken else first).launcher
    await podwatch.leave()


async def test_a_lookout_that_cannot_look_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    podwatch = await idle(world, "stopped")

    async def blind() -> Look:
        raise TimeoutError("/proc hangs")

    with monkeypatch.context() as patch:
        patch.setattr(podwatch.recovery.context.tools.launcher, "look", blind)
        await turns(podwatch)
        assert notes(podwatch) == [(FindingKind.SENSOR_BLIND, Severity.WARNING)]
    await turns(podwatch)
    assert notes(podwatch) == []
    await podwatch.leave()


# --- stop-training --after-save --------------------------------------------------------------------------------------


async def ending(world: World) -> Podwatch:
    podwatch = await running(world)
    podwatch.catalogue.rescan()
    await podwatch.recovery.requests.stop(after_save=True)
    await podwatch.until_phase(Phase.ENDING)
    return podwatch


async def test_after_save_survives_podwatch(world: World) -> None:
    podwatch = await ending(world)
    assert "after its next save (the newest checkpoint is step 15)" in podwatch.recovery.state.detail
    assert not podwatch.recovery.state.acting, "room may have to be made for that very save"
    await podwatch.die()
    heir = Podwatch(world)
    heir.catalogue.rescan()
    await heir.recovery.begin()
    await heir.until_phase(Phase.ENDING)
    await asyncio.sleep(0.05)
    assert len(world.alive()) == 1, "it is not stopped before its save"
    world.save(20)
    await heir.until(Phase.STOPPED)
    record = heir.run
    assert (world.alive(), record.stop_above, record.stopping) == ([], None, None)
    await heir.leave()


async def test_a_save_made_while_no_podwatch_ran_counts(world: World) -> None:
    podwatch = await ending(world)
    await podwatch.die()
    world.save(20)
    heir = Podwatch(world)
    heir.catalogue.rescan()
    await heir.recovery.begin()
    await heir.until(Phase.STOPPED)
    assert world.alive() == []
    await heir.leave()


async def test_a_dead_engine_ends_the_wait(world: World) -> None:
    podwatch = await ending(world)
    assert str(podwatch.recovery.context.judged) == "running", "else nobody would look whether it still lives"
    podwatch.see(16, finding=death(FindingKind.SILENT_DEATH))
    await podwatch.until(Phase.STOPPED)
    assert (world.alive(), len(world.plans)) == ([], 1)
    assert str(podwatch.recovery.context.judged) == "stopped"
    (said,) = [e.message for e in world.events if "no further save will come" in e.message]
    assert "silent-death happened; the newest checkpoint is step 15" in said
    assert podwatch.journal.sync.incidents() == []
    await podwatch.leave()


async def test_a_start_cancels_the_stop_that_waits_for_a_save(world: World) -> None:
    podwatch = await ending(world)
    with pytest.raises(Busy):
        await podwatch.recovery.requests.start(step=10)
    answer = await podwatch.recovery.requests.start()
    assert "training continues" in answer.message
    record = podwatch.run
    assert (record.desired, record.stop_above, podwatch.recovery.state.phase) == (Desired.RUNNING, None, Phase.RUNNING)
    world.save(20)
    podwatch.see(21)
    await asyncio.sleep(0.05)
    assert (len(world.alive()), len(world.plans)) == (1, 1), "it trains on, and was not started again"
    await podwatch.die()
    heir = Podwatch(world)
    heir.catalogue.rescan()
    await heir.recovery.begin()
    await heir.until_phase(Phase.RUNNING)
    assert (heir.recovery.desired, len(world.alive())) == (Desired.RUNNING, 1)
    heir.see(22, finding=death(FindingKind.SILENT_DEATH))
    await heir.until_phase(Phase.CONFIRMING)
    assert len(world.plans) == 2, "its death is repaired again"
    await heir.leave()


async def test_a_start_cancels_the_stop_of_a_trainer_that_a_person_started(world: World) -> None:
    world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    await podwatch.recovery.requests.stop(after_save=True)
    await podwatch.until_phase(Phase.ENDING)
    await podwatch.recovery.requests.start()
    assert (podwatch.recovery.state.phase, podwatch.recovery.desired) == (Phase.ATTACHED, Desired.RUNNING)
    world.save(5)
    await asyncio.sleep(0.05)
    assert (len(world.alive()), world.plans) == (1, [])
    await podwatch.leave()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 12, 20, 40])
async def test_a_start_while_podwatch_takes_a_trainer_over_ends_no_trainer(world: World, turns: int) -> None:
    """Right after a restart of podwatch: the trainer that is taken over meanwhile was stopped, and started again."""
    candidate = world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    await podwatch.die()
    world.trees = [candidate]
    heir = Podwatch(world)
    begins = asyncio.create_task(heir.recovery.begin())
    for _ in range(turns):
        await asyncio.sleep(0)
    with contextlib.suppress(Busy):
        await heir.recovery.requests.start()
    await begins
    await heir.until(Phase.ATTACHED)
    assert (len(world.alive()), world.plans, heir.recovery.desired) == (1, [], Desired.RUNNING)
    await heir.leave()


async def test_a_start_cancels_a_stop_that_waits_for_the_end_of_a_pause(world: World) -> None:
    podwatch = await ending(world)
    await podwatch.die()
    heir = Podwatch(world)
    heir.catalogue.rescan()
    heir.file.note(lambda run: replace(run, pause=Pause(world.clock.wall()), requested=False))
    await heir.recovery.begin()
    await heir.until_phase(Phase.PAUSED)
    assert "training continues" in (await heir.recovery.requests.start()).message
    heir.file.note(lambda run: replace(run, pause=None))
    world.save(20)
    heir.see(21)
    await asyncio.sleep(0.05)
    assert (len(world.alive()), len(world.plans), heir.recovery.desired) == (1, 1, Desired.RUNNING)
    await heir.leave()


async def test_a_finding_does_not_repeat_a_stop_that_the_operator_cancelled(world: World) -> None:
    """[training] stop, and a full disk: the finding is still there."""
    podwatch = await running(world)
    podwatch.catalogue.rescan()
    sick = Finding(FindingKind.TRAINING_HEALTH, Severity.CRITICAL, "loss is NaN", 0.0, "", Verdict.STOP, True)
    podwatch.see(16, finding=sick)
    await podwatch.until_phase(Phase.ENDING)
    await podwatch.recovery.requests.start()
    for step in range(17, 25):
        podwatch.see(step, finding=sick)
        await asyncio.sleep(0.005)
    assert (podwatch.recovery.state.phase, podwatch.recovery.desired) == (Phase.RUNNING, Desired.RUNNING)
    await podwatch.die()
    heir = Podwatch(world)
    heir.catalogue.rescan()
    await heir.recovery.begin()
    await heir.until_phase(Phase.RUNNING)
    heir.see(25, finding=sick)
    await asyncio.sleep(0.02)
    assert (len(world.alive()), heir.recovery.desired) == (1, Desired.RUNNING), "also not by the next podwatch"
    await heir.recovery.requests.restart()
    await heir.until_phase(Phase.CONFIRMING)
    heir.see(26)
    await heir.until_phase(Phase.RUNNING)
    heir.see(27, finding=sick)
    await heir.until_phase(Phase.ENDING)
    await heir.leave()


async def test_a_start_while_the_awaited_save_stops_training_starts_it_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    podwatch = await ending(world)
    assert world.kept is not None
    real, begun, ends = world.kept.stop, asyncio.Event(), asyncio.Event()

    async def slow(**options: Any) -> StopReport:
        begun.set()
        await ends.wait()
        return await real(**options)

    monkeypatch.setattr(world.kept, "stop", slow)
    world.save(20)
    await begun.wait()
    answer = await podwatch.recovery.requests.start()
    assert "starts it again after that" in answer.message
    ends.set()
    await podwatch.until_phase(Phase.CONFIRMING)
    assert (len(world.plans), len(world.alive()), podwatch.recovery.desired) == (2, 1, Desired.RUNNING)
    await podwatch.leave()


async def test_a_stop_now_ends_the_wait_for_a_save(world: World) -> None:
    podwatch = await ending(world)
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    assert world.alive() == []
    await podwatch.leave()


async def test_the_same_for_a_trainer_that_a_person_started(world: World) -> None:
    candidate = world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    await podwatch.recovery.requests.stop(after_save=True)
    await podwatch.until_phase(Phase.ENDING)
    await podwatch.die()
    world.trees = [candidate]
    heir = Podwatch(world)
    await heir.recovery.begin()
    await heir.until_phase(Phase.ENDING)
    assert heir.recovery.desired is Desired.STOPPED, "it runs on, and is not wanted again for that"
    world.save(5)
    await heir.until(Phase.STOPPED)
    assert world.alive() == []
    await heir.leave()


async def until_ended(podwatch: Podwatch, phase: Phase, finding: Finding) -> None:
    """Turns of the sensing loop that bring this finding, until podwatch has acted on it."""
    async with asyncio.timeout(20):
        while podwatch.recovery.state.phase is not phase or podwatch.recovery.acting:
            if podwatch.recovery.handle is not None:
                podwatch.see(finding=finding)
            await asyncio.sleep(0.002)


def is_finished(podwatch: Podwatch) -> None:
    record, events = podwatch.run, podwatch.world.events
    assert (record.desired, record.stop_above, record.stopping) == (Desired.FINISHED, None, None)
    assert [e.message for e in events if e.name is EventName.TRAINER_FINISHED] == ["done"]
    assert not [e for e in events if e.severity is not Severity.INFO]
    assert (podwatch.world.alive(), len(podwatch.world.plans)) == ([], 1)


async def test_training_that_finishes_while_a_stop_waits_for_its_save_is_finished(world: World) -> None:
    podwatch = await ending(world)
    world.kill()
    await asyncio.sleep(0.02)
    assert podwatch.recovery.state.phase is Phase.ENDING, "the sensing loop has not judged this end yet"
    await until_ended(podwatch, Phase.FINISHED, finished())
    is_finished(podwatch)
    await podwatch.leave()


@pytest.mark.parametrize("away", [True, False])
async def test_the_same_after_a_restart_of_podwatch(world: World, away: bool) -> None:
    podwatch = await ending(world)
    await podwatch.die()
    if away:
        world.kill()
    heir = Podwatch(world)
    heir.catalogue.rescan()
    await heir.recovery.begin()
    await heir.until_phase(Phase.ENDING)
    if not away:
        world.kill()
    await until_ended(heir, Phase.FINISHED, finished())
    is_finished(heir)
    await heir.leave()


async def test_in_mode_observe_a_finish_that_was_interrupted_is_completed(world: World) -> None:
    """The operator asked for the stop that it came before; nothing else ends a trainer in this mode."""
    podwatch = await ending(world)
    await podwatch.die()
    world.settings_extra = {"mode": "observe"}
    heir = Podwatch(world, killer=Killer(at="stop"))
    heir.catalogue.rescan()
    await heir.recovery.begin()
    await heir.until_phase(Phase.ENDING)
    world.kill()
    heir.see(finding=finished())
    with pytest.raises(Killed):
        await heir.until(Phase.FINISHED)
    await heir.die()
    last = Podwatch(world)
    await last.recovery.begin()
    await last.until(Phase.FINISHED)
    assert last.recovery.desired is Desired.FINISHED
    await last.leave()


async def test_a_finished_run_whose_processes_linger_is_finished(world: World) -> None:
    podwatch = await ending(world)
    await until_ended(podwatch, Phase.FINISHED, finished())
    is_finished(podwatch)
    await podwatch.leave()


async def test_a_new_save_of_a_run_that_has_finished_changes_nothing(world: World) -> None:
    podwatch = await ending(world)
    world.save(20)
    world.kill()
    await until_ended(podwatch, Phase.FINISHED, finished())
    is_finished(podwatch)
    await podwatch.leave()


async def test_after_its_last_save_training_may_end_on_its_own(world: World) -> None:
    """An export of the model can follow, and the finish line does."""
    podwatch = await running(world, policies=judging(max_steps=20))
    podwatch.catalogue.rescan()
    await podwatch.recovery.requests.stop(after_save=True)
    await podwatch.until_phase(Phase.ENDING)
    world.save(20)
    await asyncio.sleep(0.05)
    assert len(world.alive()) == 1
    assert "step 20 is the last" in podwatch.recovery.state.detail
    assert podwatch.recovery.state.detail.endswith(ENDS_ON_ITS_OWN)
    world.kill()
    await until_ended(podwatch, Phase.FINISHED, finished())
    is_finished(podwatch)
    await podwatch.leave()


async def test_a_target_that_training_does_not_end_at_costs_one_save(world: World) -> None:
    podwatch = await running(world, policies=judging(max_steps=20))
    podwatch.catalogue.rescan()
    await podwatch.recovery.requests.stop(after_save=True)
    await podwatch.until_phase(Phase.ENDING)
    world.save(20)
    await asyncio.sleep(0.05)
    assert len(world.alive()) == 1
    world.save(25)
    await podwatch.until(Phase.STOPPED)
    assert world.alive() == []
    await podwatch.leave()


async def test_training_that_has_printed_its_finish_line_is_not_stopped_by_its_last_save(world: World) -> None:
    podwatch = await ending(world)
    snapshot = podwatch.snapshot()
    object.__setattr__(snapshot.trainer.value, "finish_line", True)
    podwatch.consider(snapshot)
    world.save(20)
    await asyncio.sleep(0.05)
    assert len(world.alive()) == 1
    world.kill()
    await until_ended(podwatch, Phase.FINISHED, finished())
    is_finished(podwatch)
    await podwatch.leave()


@pytest.mark.parametrize("confirmed", [True, False])
async def test_training_that_fails_while_a_stop_waits_is_stopped(world: World, confirmed: bool) -> None:
    """Unconfirmed: podwatch would wait because an operator may have stopped it, which is what was asked for."""
    podwatch = await ending(world)
    world.kill()
    finding = death()
    object.__setattr__(finding, "confirmed", confirmed)
    await until_ended(podwatch, Phase.STOPPED, finding)
    assert (world.alive(), len(world.plans), podwatch.recovery.desired) == ([], 1, Desired.STOPPED)
    (said,) = [e.message for e in world.events if "ended on its own" in e.message]
    assert "trainer-exited happened" in said
    assert not [e for e in world.events if e.name is EventName.TRAINER_FINISHED]
    await podwatch.leave()


async def test_an_end_that_cannot_be_judged_is_a_stop(world: World) -> None:
    podwatch = await ending(world)
    began = world.clock.now
    world.kill()
    await podwatch.until(Phase.STOPPED)
    assert 60 < world.clock.now - began < 600
    await podwatch.leave()


async def test_a_stop_of_training_that_has_just_finished_changes_nothing(world: World) -> None:
    podwatch = await running(world)
    world.kill()
    await podwatch.recovery.requests.stop()
    await until_ended(podwatch, Phase.FINISHED, finished())
    is_finished(podwatch)
    await podwatch.leave()


@pytest.mark.parametrize("ends", ["before the request", "after it"])
async def test_what_podwatch_itself_has_begun_to_end_did_not_finish(
    world: World, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A trainer that ends with code 0 after SIGTERM would count as finished where ``clean_exit_finishes``."""
    podwatch = await running(world)
    podwatch.catalogue.rescan()
    assert world.kept is not None
    real, signalled, ended = world.kept.stop, asyncio.Event(), asyncio.Event()

    async def slow(**options: Any) -> StopReport:
        signalled.set()
        await ended.wait()
        return await real(**options)

    monkeypatch.setattr(world.kept, "stop", slow)
    await podwatch.recovery.requests.restart()
    await signalled.wait()
    if ends == "before the request":
        world.kill()
    await podwatch.recovery.requests.stop(after_save=True)
    if ends == "after it":
        world.kill()
    podwatch.see(finding=finished())
    ended.set()
    await podwatch.until(Phase.STOPPED)
    assert (podwatch.recovery.desired, len(world.plans)) == (Desired.STOPPED, 1)
    await podwatch.leave()


# --- who is in the way -----------------------------------------------------------------------------------------------


async def test_who_holds_the_gpu_and_the_port_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        podwatch = Podwatch(world, ports=(port,))
        look = podwatch.recovery.context.tools.launcher.look

        async def held() -> Look:
            found = await look()
            return Look(found.handle, found.trees, ("pid 99 (VLLM::EngineCor) has a context on /dev/nvidia0",))

        monkeypatch.setattr(podwatch.recovery.context.tools.launcher, "look", held)
        world.gpu_used = 60 << 30
        podwatch.recovery.context.note(gpu_base={0: 0})
        await podwatch.recovery.begin()
        await podwatch.until_phase(Phase.BLOCKED)
        text = podwatch.recovery.state.detail
        assert "pid 99 (VLLM::EngineCor)" in text
        assert f"port {port} is in use by pid {os.getpid()}" in text
    world.gpu_used = 0
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.leave()


def test_where_nobody_can_be_named_it_says_so() -> None:
    free = gpus_and_ports_free.Free(("gpu0 holds 3.0 GiB more than before training",), True)
    assert "no process that podwatch can read" in gpus_and_ports_free.named(free, ()).holders[1]
    assert gpus_and_ports_free.named(gpus_and_ports_free.Free((), True), ("pid 1",)).holders == ()


def test_a_candidate_has_one_name_for_every_podwatch() -> None:
    assert attached_id(ProcessIdentity(7, 70)) == "attach-7-70"
