"""What podwatch does when it comes: adopt, attach, start, ask; and what people can ask for."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.domain.errors import Busy, ConfigurationError, HostError, PodwatchError, RemoteError, UsageError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind
from podwatch.domain.snapshot import GpuSample, SensorState, Supervision, observed, unobserved
from podwatch.recovery import Phase
from podwatch.recovery.run_file import RunFile
from podwatch.system.own_directories import Workspace
from tests.recovery.test_restart import running
from tests.support.recovery_world import Podwatch, Store, World, death, finished, stored
from tests.support.starts import guarded


async def test_a_living_trainer_is_taken_over(world: World) -> None:
    first = await running(world)
    await first.leave()
    heir = Podwatch(world)
    await heir.recovery.begin()
    assert "took over" in heir.recovery.opening
    assert heir.recovery.state.phase is Phase.RUNNING
    assert heir.recovery.handle is world.kept
    assert len(world.plans) == 1
    heir.see(30, finding=death())
    await heir.until(Phase.CONFIRMING)
    assert len(world.alive()) == 1
    await heir.leave()


async def test_a_trainer_that_ended_while_podwatch_was_away_is_judged_by_the_loop(world: World) -> None:
    first = await running(world)
    await first.leave()
    world.kill()
    heir = Podwatch(world)
    await heir.recovery.begin()
    assert "ended while podwatch was not running (signal 9)" in heir.recovery.opening
    assert len(world.plans) == 1
    heir.see(finding=death())
    await heir.until(Phase.CONFIRMING)
    assert (len(world.plans), len(world.alive())) == (2, 1)
    await heir.leave()


async def test_the_one_candidate_is_attached_to_and_replaced_when_it_dies(world: World) -> None:
    candidate = world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    assert podwatch.recovery.state.supervision is Supervision.ATTACH
    assert world.plans == []
    world.save(5)
    world.foreign[candidate.launcher.pid].kill()
    world.foreign[candidate.launcher.pid].wait()
    podwatch.see(6, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[0].step == 5
    await podwatch.leave()


async def test_several_candidates_are_asked_about_until_one_is_left(world: World) -> None:
    world.person_starts()
    second = world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until_phase(Phase.BLOCKED)
    assert [f.kind for f in podwatch.recovery.findings()] == [FindingKind.AMBIGUOUS_TRAINERS]
    assert world.plans == []
    world.trees.remove(second)
    await podwatch.until(Phase.ATTACHED)
    assert podwatch.recovery.findings() == ()
    await podwatch.leave()


async def test_several_candidates_are_not_joined_while_nobody_sees_the_gpus(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU memory at its base means that none of them trains; memory that cannot be seen means nothing."""
    podwatch = await running(world)
    world.gpu_used = None
    podwatch.recovery.context.note(gpu_base={0: 0})
    blind = unobserved(SensorState.BLIND, 0.0, "the call hangs")
    monkeypatch.setattr(podwatch.recovery.context.tools.gpus, "latest", lambda: blind)
    for _ in range(2):
        world.person_starts()
    podwatch.see(18, finding=death())
    await podwatch.until_phase(Phase.BLOCKED)
    await asyncio.sleep(0.1)
    assert [f.kind for f in podwatch.recovery.findings()] == [FindingKind.AMBIGUOUS_TRAINERS]
    assert len(world.plans) == 1
    seen = observed((GpuSample(0, "u", "n", memory_used_bytes=0, memory_total_bytes=80 << 30),), 1e12)
    monkeypatch.setattr(podwatch.recovery.context.tools.gpus, "latest", lambda: seen)
    await asyncio.sleep(0.1)
    assert len(world.plans) == 1, "one of them has a CUDA context and may be loading"
    await podwatch.leave()


async def test_a_person_who_starts_meanwhile_is_joined_by_nobody(world: World) -> None:
    podwatch = await running(world)
    world.gpu_used = 70 << 30
    podwatch.recovery.context.note(gpu_base={0: 0})
    podwatch.see(18, finding=death())
    await podwatch.until_phase(Phase.BLOCKED)
    world.person_starts()
    await podwatch.until(Phase.ATTACHED)
    assert len(world.plans) == 1
    await podwatch.leave()


async def test_old_checkpoints_of_nobody_are_not_used_unless_adopted(world: World) -> None:
    world.save(40, wall=5.0)
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.BLOCKED)
    assert world.plans == []
    assert {f.kind for f in podwatch.recovery.findings()} == {FindingKind.FOREIGN_CHECKPOINTS}
    await podwatch.leave()
    again = Podwatch(world)
    await again.recovery.begin()
    await again.until(Phase.BLOCKED)
    await again.leave()
    adopted = Podwatch(world)
    await adopted.recovery.begin(adopt_existing="id")
    await adopted.until(Phase.CONFIRMING)
    assert world.plans[0].step == 40
    await adopted.leave()


async def test_a_directory_of_another_run_is_refused(world: World) -> None:
    other = RunFile(world.root / "other", Workspace(world.output), "other", world.clock)
    other.path.parent.mkdir()
    other.edit_now(lambda run: replace(run, starts=guarded("l")))
    other.close()
    podwatch = Podwatch(world)
    with pytest.raises(ConfigurationError, match="belongs to run 'other'"):
        await podwatch.recovery.begin()
    await podwatch.leave()


async def test_a_new_pod_fetches_the_newest_save_of_the_run(world: World) -> None:
    store = Store(world, stored(30, "s30", "line1", 3), stored(25, "s25", "line1", 2))
    podwatch = Podwatch(world, restore=store)
    shown: list[str] = []
    store.meanwhile = lambda: shown.append(podwatch.recovery.state.detail)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    assert store.fetched == [30]
    assert shown == ["fetching step 30 from the store: 12.3 of 47.0 GB"]
    assert store.within == 180.0, "only the store can help"
    assert world.plans[0].step == 30
    record = podwatch.recorded()
    assert record.lineage.id == "line1", "the line goes on"
    await podwatch.leave()


async def test_an_unreachable_store_and_nothing_here_never_starts_fresh(world: World) -> None:
    store = Store(world, error=RemoteError("no route", where="b2://x"))
    podwatch = Podwatch(world, restore=store)
    await podwatch.recovery.begin()
    await podwatch.until_phase(Phase.BLOCKED)
    assert "no route" in podwatch.recovery.state.detail
    assert world.plans == []
    store.error, store.given = None, [stored(30, "s30", "line1", 3)]
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[0].step == 30
    await podwatch.leave()


async def test_an_unreachable_store_does_not_stop_a_local_restart(world: World) -> None:
    store = Store(world)
    podwatch = await running(world, restore=store)
    store.error = RemoteError("down")
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert store.within == 4.0, "it is not waited for while a checkpoint is here"
    assert world.plans[-1].step == 15
    await podwatch.leave()


async def test_stop_and_start_are_durable(world: World) -> None:
    podwatch = await running(world)
    with pytest.raises(Busy, match="running already"):
        await podwatch.recovery.requests.start()
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    assert world.alive() == []
    await podwatch.leave()
    heir = Podwatch(world)
    await heir.recovery.begin()
    await heir.until(Phase.STOPPED)
    assert world.alive() == []
    await heir.recovery.requests.start()
    await heir.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 15
    assert heir.recovery.state.attempts == 0, "what a person wanted is no failure"
    await heir.leave()


async def test_stop_after_the_next_save(world: World) -> None:
    podwatch = await running(world)
    podwatch.catalogue.rescan()
    await podwatch.recovery.requests.stop(after_save=True)
    await asyncio.sleep(0.05)
    assert len(world.alive()) == 1
    world.save(20)
    await podwatch.until(Phase.STOPPED)
    assert world.alive() == []
    await podwatch.leave()


async def test_restart_from_an_older_step_opens_a_new_line(world: World) -> None:
    podwatch = await running(world)
    old = podwatch.run.lineage
    with pytest.raises(UsageError, match="step 99"):
        await podwatch.recovery.requests.restart(99)
    assert len(world.alive()) == 1, "a mistake must not cost the running trainer"
    await podwatch.recovery.requests.restart(10)
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 10
    record = podwatch.run
    assert (record.lineage.parent, record.lineage.parent_step) == (old.id, 10)
    assert podwatch.recovery.context.run.wanted is None
    await podwatch.leave()


async def test_restart_from_a_step_that_only_the_store_has(world: World) -> None:
    """Also an older one: the disk keeps few checkpoints, the store keeps milestones."""
    store = Store(world)
    podwatch = await running(world, restore=store)
    old = podwatch.run.lineage
    store.given = [stored(8, "s8", old.id, 2), stored(3, "s3", old.id, 1)]
    store.error = RemoteError("down")
    with pytest.raises(PodwatchError, match="step 3 is not on this pod, and the store did not provide it: down"):
        await podwatch.recovery.requests.restart(3)
    store.error = None
    with pytest.raises(UsageError, match="step 7"):
        await podwatch.recovery.requests.restart(7)
    assert len(world.alive()) == 1, "neither costs the running trainer"
    await podwatch.recovery.requests.restart(3)
    await podwatch.until(Phase.CONFIRMING)
    assert (store.fetched, world.plans[-1].step) == ([3], 3)
    record = podwatch.run
    assert (record.lineage.parent, record.lineage.parent_step) == (old.id, 3)
    await podwatch.leave()


async def test_a_fresh_start_sets_everything_aside(world: World) -> None:
    podwatch = await running(world)
    before = world.contents()
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    await podwatch.recovery.requests.start(fresh=True)
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step is None
    assert podwatch.catalogue.layout.numbers("checkpoints") == []
    assert world.contents() == before
    assert podwatch.run.lineage.parent_step is None
    await podwatch.leave()


async def test_dry_run_explains_and_changes_nothing(world: World) -> None:
    podwatch = await running(world)
    world.save(20, whole=False)
    (world.root / "cfg.toml").write_text("x = 2")
    answer = await podwatch.recovery.requests.dry_run()
    assert (answer["possible"], answer["step"], answer["source"]) == (True, 15, "local")
    assert [Path(p).name for p in answer["set_aside"]] == ["step_20", "step_20"]  # type: ignore[union-attr]
    assert [Path(p).name for p in answer["changed_since_last_start"]] == ["cfg.toml"]  # type: ignore[union-attr]
    assert "HF_TOKEN" in answer["environment_names"]  # type: ignore[operator]
    assert "secretsecret" not in str(answer)
    assert (await podwatch.recovery.requests.dry_run(99))["possible"] is False
    assert podwatch.catalogue.layout.numbers("checkpoints") == [5, 10, 15, 20]
    await podwatch.leave()


async def test_no_command_attaches_but_never_kills(world: World) -> None:
    world.settings_extra = {"trainer": {"command": []}}
    world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    podwatch.see(1, finding=death(FindingKind.HANG))
    await podwatch.quiet()
    assert len(world.alive()) == 1
    assert any(f.kind is FindingKind.UNGUARDED for f in podwatch.recovery.findings())
    with pytest.raises(ConfigurationError, match="no command"):
        await podwatch.recovery.requests.restart()
    await podwatch.leave()


@pytest.mark.parametrize("end", ["stopped", "finished"])
async def test_what_could_not_be_restarted_needs_no_command_once_it_has_ended_as_it_should(
    world: World, end: str
) -> None:
    world.settings_extra = {"trainer": {"command": []}}
    world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    podwatch.see(1, finding=death(FindingKind.HANG))
    assert any(f.kind is FindingKind.UNGUARDED for f in podwatch.recovery.findings())
    if end == "stopped":
        await podwatch.recovery.requests.stop()
        await podwatch.until(Phase.STOPPED)
    else:
        podwatch.see(2, finding=finished())
        await podwatch.until(Phase.FINISHED)
    assert podwatch.recovery.findings() == ()
    await podwatch.leave()


async def test_a_full_state_disk_delays_a_restart_and_loses_nothing(world: World) -> None:
    """The stop cannot be recorded: nothing is killed before it can."""
    podwatch = await running(world)

    def refuse(*_: object) -> None:
        raise HostError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(podwatch.file, "_write", refuse)
        podwatch.see(18, finding=death(FindingKind.HANG))
        await podwatch.until(Phase.BLOCKED)
        assert len(world.alive()) == 1
        assert len(world.plans) == 1
    assert any(e.name is EventName.RECOVERY_BLOCKED and "no space left" in e.message for e in world.events)
    podwatch.see(18, finding=death(FindingKind.HANG))
    await podwatch.until(Phase.CONFIRMING)
    assert (len(world.plans), len(world.alive())) == (2, 1)
    await podwatch.leave()


async def test_an_interrupted_stop_of_an_attached_trainer_is_finished(world: World) -> None:
    candidate = world.person_starts()
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.ATTACHED)
    world.save(5)
    podwatch.killer.at = "stop"
    podwatch.see(6, finding=death(FindingKind.HANG))
    while not podwatch.killer.dead:
        await asyncio.sleep(0.002)
    await podwatch.die()
    assert world.alive() == [candidate.launcher.pid]
    world.trees = [candidate]
    heir = Podwatch(world)
    await heir.recovery.begin()
    await heir.until(Phase.CONFIRMING)
    assert world.plans[0].step == 5
    assert len(world.alive()) == 1
    assert heir.run.stopping is None
    await heir.leave()


async def test_a_fetch_that_keeps_failing_gives_way_to_an_older_step_here(world: World) -> None:
    store = Store(world)
    podwatch = await running(world, restore=store)
    lineage = podwatch.run.lineage.id
    store.given, store.fetch_error = [stored(30, "s30", lineage, 3)], RemoteError("half of it is missing")
    podwatch.see(31, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert store.fetched == [30, 30, 30]
    assert world.plans[-1].step == 15
    await podwatch.leave()


async def test_waiting_is_not_acting(world: World) -> None:
    """Pruning is held while something is stopped or started; a wait (for the disk, perhaps) must not hold it."""
    world.gpu_used = 70 << 30
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until_phase(Phase.BLOCKED)
    assert not podwatch.recovery.state.acting
    await podwatch.leave()


async def test_checkpoints_behind_a_link_are_never_a_reason_for_a_fresh_start(world: World) -> None:
    """They are not followed; but a run that has them must not begin at step 0 either."""
    podwatch = Podwatch(world)
    podwatch.catalogue.out_of_reach = frozenset({40})
    await podwatch.recovery.begin()
    await podwatch.until_phase(Phase.BLOCKED)
    assert world.plans == []
    (found,) = [f for f in podwatch.recovery.findings() if f.kind is FindingKind.BLOCKED]
    assert "step 40 seems to be behind a symbolic link" in found.summary
    assert "trainer.checkpoint_dir" in found.suggestion
    await podwatch.leave()
