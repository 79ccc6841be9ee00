"""From a verdict to a running, confirmed trainer; and everything that must not happen on the way."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.app.status_view import recovery_view
from podwatch.detection.merge import Healing, fold, reported
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.snapshot import Desired, TrainerSample, observed
from podwatch.job.exit_code import Blame
from podwatch.journal import Journal
from podwatch.recovery import Phase, quarantine
from podwatch.recovery.observe import adopt
from podwatch.recovery.restart_budget import RestartHistory
from podwatch.trainer.start_and_adopt import CannotExecute
from tests.support.recovery_world import GIB, Killer, Podwatch, Store, World, death, finished, index_of, stored

pytestmark = pytest.mark.slow

LOAD_ERROR = "RuntimeError: cannot load checkpoints/step_15: file is truncated"


async def running(world: World, **kw: object) -> Podwatch:
    """A confirmed trainer with steps 5, 10 and 15 saved by it."""
    podwatch = Podwatch(world, **kw)  # type: ignore[arg-type]
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    for step in (5, 10, 15):
        world.save(step)
    podwatch.see(17)
    assert podwatch.recovery.state.phase is Phase.RUNNING
    return podwatch


def told_of(healing: Healing | None) -> Finding | None:
    return None if healing is None else reported(healing)


async def test_the_first_start_is_fresh_and_recorded(world: World) -> None:
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    assert podwatch.recovery.opening == "no training is running: starting it"
    await podwatch.until(Phase.CONFIRMING)
    plan = world.plans[0]
    assert plan.argv == ("/bin/train", "cfg.toml")
    assert plan.env["PODWATCH_STEP"] == ""
    assert plan.env["WANDB_RUN_ID"] == "w1"
    record = podwatch.recorded()
    assert record.last_start is not None
    assert record.last_start.start_id == plan.start_id
    assert "HF_TOKEN" in record.last_start.environment_names
    assert [Path(name).name for name, _ in record.last_start.config_digests] == ["cfg.toml"]
    assert "secretsecret" not in podwatch.file.path.read_text()
    podwatch.see(0)
    assert podwatch.recovery.state.phase is Phase.RUNNING
    await podwatch.leave()
    assert len(world.alive()) == 1, "leaving must not stop training"


async def test_a_death_is_healed_and_the_incident_closed(world: World) -> None:
    podwatch = await running(world)
    world.save(20, whole=False)
    podwatch.see(18, finding=death(FindingKind.SILENT_DEATH))
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.alive()) == 1
    plan = world.plans[-1]
    assert plan.argv[-2:] == ("--resume", "15")
    assert (plan.step, plan.env["PODWATCH_STEP"], plan.env["PODWATCH_RESUME_ARGS"]) == (15, "15", "--resume 15")
    assert plan.env["PODWATCH_CHECKPOINT"].endswith("checkpoints/step_15")
    assert 15 in podwatch.recovery.state.protect
    podwatch.see(16)
    assert podwatch.recovery.state.phase is Phase.RUNNING
    assert podwatch.recovery.state.protect == frozenset()
    await podwatch.leave()
    heir = Podwatch(world)
    incident = heir.journal.sync.incidents()[0]
    assert (incident.kind, incident.resumed_step, incident.lost_steps) == ("silent-death", 15, 3)
    assert incident.resolution == "restarted from step 15"
    bundle = Path(incident.bundle)
    assert (bundle / "finding.json").exists()
    assert "secretsecret" not in "".join(f.read_text() for f in bundle.iterdir())
    record = heir.recorded()
    assert record.lineage.parent == "", "going on from the newest step is the same line"
    await heir.leave()


async def test_the_logs_are_in_the_bundle_before_anything_is_killed(world: World) -> None:
    def tails() -> dict[str, list[str]]:
        return {"logs/inference.stdout": [f"EngineDeadError while {len(world.alive())} trainer runs"]}

    podwatch = await running(world, log_tails=tails)
    podwatch.see(18, finding=death(FindingKind.SILENT_DEATH))
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.leave()
    heir = Podwatch(world)
    bundle = Path(heir.journal.sync.incidents()[0].bundle)
    assert (bundle / "logs_inference.stdout").read_text() == "EngineDeadError while 1 trainer runs\n"
    await heir.leave()


async def test_logs_that_cannot_be_read_cost_no_evidence_and_no_restart(world: World) -> None:
    def tails() -> dict[str, list[str]]:
        raise OSError("the disk is gone")

    podwatch = await running(world, log_tails=tails)
    podwatch.see(18, finding=death(FindingKind.SILENT_DEATH))
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.leave()
    heir = Podwatch(world)
    assert (Path(heir.journal.sync.incidents()[0].bundle) / "finding.json").exists()
    await heir.leave()


async def test_a_save_that_settles_when_the_trainer_dies_is_resumed_from_at_once(world: World) -> None:
    """Seen: everything that was saved within its settle time before a death went to quarantine."""
    podwatch = await running(world)
    world.save(20)
    world.settles_at[20] = float("inf")
    podwatch.see(21, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 20, "all writers were watched and have ended"
    assert 20 in podwatch.catalogue.layout.numbers("checkpoints")
    await podwatch.leave()


async def test_a_new_podwatch_waits_until_the_newest_save_has_settled(world: World) -> None:
    """Daemon, supervisor and trainer killed together, a second after a save: nobody saw the writer end."""
    podwatch = await running(world)
    await podwatch.die()
    world.kill()
    world.kept = None  # the supervisor too
    world.save(20)
    settled = world.settles_at[20] = world.clock.monotonic() + 60.0
    heir = Podwatch(world)
    await heir.recovery.begin()
    await heir.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 20
    assert world.clock.monotonic() >= settled
    assert heir.catalogue.layout.numbers("checkpoints") == [5, 10, 15, 20]
    await heir.leave()


async def test_a_save_that_never_settles_asks_instead_of_being_thrown_away(world: World) -> None:
    podwatch = await running(world)
    await podwatch.die()
    world.kill()
    world.kept = None  # the supervisor too
    world.save(20)
    world.settles_at[20] = float("inf")
    heir = Podwatch(world)
    await heir.recovery.begin()
    await heir.until(Phase.BLOCKED)
    assert len(world.plans) == 1
    assert heir.catalogue.layout.numbers("checkpoints") == [5, 10, 15, 20]
    (finding,) = heir.recovery.findings()
    assert "Another process writes to it" in finding.summary
    await heir.leave()


async def test_what_is_ahead_is_set_aside_and_can_be_returned(world: World) -> None:
    podwatch = await running(world)
    world.save(20, whole=False)
    before = world.contents()
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert podwatch.catalogue.layout.numbers("checkpoints") == [5, 10, 15]
    assert podwatch.catalogue.layout.numbers("notes") == [5, 10, 15]
    (entry,) = quarantine.listing(podwatch.workspace)
    index = index_of(entry.paths[0])
    assert index["steps"] == {"20": "incomplete"}
    assert world.contents() == before
    back = quarantine.give_back(podwatch.workspace, entry.id)
    assert {p.name for p in back} == {"step_20"}
    assert podwatch.catalogue.layout.numbers("notes") == [5, 10, 15, 20]
    assert quarantine.listing(podwatch.workspace) == []
    await podwatch.leave()


async def test_a_resume_without_a_readable_step_is_reported_until_the_next_save(world: World) -> None:
    podwatch = await running(world)
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert recovery_view(podwatch.recovery.state).confirmed is None
    world.clock.advance(world.settings().trainer.startup_patience)
    podwatch.see()
    state = podwatch.recovery.state
    assert (state.phase, recovery_view(state).confirmed) == (Phase.RUNNING, False)
    (finding,) = (f for f in podwatch.recovery.findings() if f.kind is FindingKind.RESUME_UNCONFIRMED)
    assert "the resume from step 15" in finding.summary
    world.save(20)
    podwatch.catalogue.rescan()
    podwatch.see()
    assert recovery_view(podwatch.recovery.state).confirmed is True
    assert not podwatch.recovery.findings()
    await podwatch.leave()


async def test_memory_still_held_blocks_and_is_not_counted(world: World) -> None:
    world.gpu_used = 1 * GIB
    podwatch = await running(world)
    world.gpu_used = 40 * GIB
    podwatch.see(18, finding=death())
    await podwatch.until_phase(Phase.BLOCKED)
    for _ in range(20):
        await podwatch.world.clock.sleep(1)
    assert len(world.plans) == 1
    (finding,) = [f for f in podwatch.recovery.findings() if f.kind is FindingKind.BLOCKED]
    assert "gpu0 holds 39.0 GiB more than before training" in finding.summary
    world.gpu_used = int(1.9 * GIB)
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.plans) == 2
    assert podwatch.recovery.findings() == ()
    assert podwatch.recovery.state.attempts == 1
    assert podwatch.recovery.context.run.gpu_base == {0: GIB}, "the base never rises"
    await podwatch.leave()


async def test_a_leftover_engine_blocks_even_the_first_start(world: World) -> None:
    world.gpu_used = 70 * GIB
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until_phase(Phase.BLOCKED)
    assert world.plans == []
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    await podwatch.leave()


async def test_a_port_in_use_is_waited_for(world: World) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        podwatch = Podwatch(world, ports=(port,))
        await podwatch.recovery.begin()
        await podwatch.until_phase(Phase.BLOCKED)
        assert "is in use" in podwatch.recovery.state.detail
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.leave()


async def test_findings_of_another_start_or_unconfirmed_ones_kill_nothing(world: World) -> None:
    podwatch = await running(world)
    stale = podwatch.snapshot(18)
    other = replace(stale, trainer=observed(TrainerSample(start_id="other", alive=True), 0.0))
    podwatch.consider(other, death())
    podwatch.consider(podwatch.snapshot(19), replace(death(), confirmed=False))
    await podwatch.quiet()
    await podwatch.leave()


async def test_observe_only_reports(world: World) -> None:
    world.settings_extra = {"mode": "observe"}
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.OBSERVING)
    assert world.plans == []
    world.launch("earlier")
    await adopt(podwatch.recovery.context, world.kept)  # type: ignore[arg-type]
    for _ in range(3):
        podwatch.see(3, finding=death())
    await podwatch.quiet()
    assert len(world.alive()) == 1
    told = [e for e in world.events if e.name is EventName.FINDING_RAISED]
    assert len(told) == 1
    await podwatch.leave()


async def test_backoff_then_gave_up_then_one_try_an_hour(world: World) -> None:
    world.settings_extra = {"recovery": {"budget_restarts": 3, "budget_time": 20.0}}
    podwatch = await running(world)
    for _ in range(3):
        world.clock.slept.clear()
        podwatch.see(18, finding=death())
        await podwatch.until(Phase.CONFIRMING)
        podwatch.see(18)
    assert max(world.clock.slept) >= 10.0, "the pause grows"
    assert not podwatch.recovery.context.run.history.gave_up
    before = len(world.plans)
    world.clock.advance(20)
    world.clock.slept.clear()
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert 3599 <= sum(s for s in world.clock.slept if s > 1) < 3660
    assert any(e.name is EventName.GAVE_UP for e in world.events)
    assert len(world.plans) == before + 1
    podwatch.see(18)
    assert not any(f.kind is FindingKind.GAVE_UP for f in podwatch.recovery.findings()), "it works again"
    await podwatch.leave()


async def test_a_command_that_never_worked_gets_two_tries_and_is_to_blame(world: World) -> None:
    world.settings_extra = {"recovery": {"on_give_up": "exit"}}
    world.lines = ["error: unknown thing"]
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see(finding=death())
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see(finding=death())
    await podwatch.until(Phase.GAVE_UP)
    assert podwatch.recovery.settled, "nothing is tried in an hour: app/end_of_run.py ends podwatch"
    assert podwatch.recovery.context.blame is Blame.COMMAND
    assert len(world.plans) == 2
    assert world.alive() == []
    await podwatch.leave()


async def test_a_command_that_resumes_the_steps_of_an_earlier_pod_is_not_to_blame_by_a_count(world: World) -> None:
    """This pod has seen no step of the run, whose checkpoints prove that the command works elsewhere."""
    podwatch = await running(world)
    await podwatch.leave()
    world.kill()
    world.kept = None
    world.settings_extra = {"recovery": {"on_give_up": "exit"}}
    heir = Podwatch(world)
    heir.recovery.context.note(history=RestartHistory())
    await heir.recovery.begin()
    heir.recovery.context.note(history=RestartHistory())
    await heir.until(Phase.CONFIRMING)
    assert world.plans[-1].step is not None
    for _ in range(10):
        heir.see(finding=death())
        await heir.until(Phase.CONFIRMING, Phase.GAVE_UP)
        if heir.recovery.state.phase is Phase.GAVE_UP:
            break
    assert heir.recovery.context.run.history.gave_up
    assert not heir.recovery.context.run.history.ever_worked
    assert heir.recovery.context.blame is Blame.UNKNOWN
    await heir.leave()


async def test_a_command_that_does_not_exist_is_tried_once(world: World) -> None:
    world.start_error = CannotExecute("the command /bin/train does not exist", fix="install it")
    world.settings_extra = {"recovery": {"on_give_up": "exit"}}
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.GAVE_UP)
    assert podwatch.recovery.settled
    assert podwatch.recovery.context.blame is Blame.COMMAND
    assert any("gave up: the command /bin/train does not exist" in f.summary for f in podwatch.recovery.findings())
    assert len(podwatch.journal.sync.incidents()) == 1
    world.start_error = ""
    await podwatch.recovery.requests.start()
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.leave()


async def test_a_program_that_worked_and_is_gone_is_waited_for(world: World) -> None:
    """Its volume may come back: only count and time give up a run that has worked (promise 12)."""
    podwatch = await running(world)
    world.start_error = CannotExecute("the command /bin/train does not exist", fix="install it")
    podwatch.see(18, finding=death())
    await podwatch.until_phase(Phase.BACKOFF)
    assert not any(f.kind is FindingKind.GAVE_UP for f in podwatch.recovery.findings())
    world.start_error = ""
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see(16)
    await podwatch.leave()
    heir = Podwatch(world)
    assert heir.journal.sync.current_incident() is None
    await heir.leave()


async def test_a_start_that_fails_for_ever_does_not_grow(world: World) -> None:
    """Each try follows the last in a loop: hundreds of them are no deeper than one."""
    world.settings_extra = {"recovery": {"retry_after_give_up": 1.0}}
    world.start_error = "no space"
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    while len(podwatch.journal.sync.incidents(2000)) < 400:
        await asyncio.sleep(0.1)  # reading the incidents costs more than many of them
    assert not any("RecursionError" in event.message for event in world.events)
    await podwatch.leave()


async def test_a_try_after_exit_86_does_not_wait_an_hour(world: World) -> None:
    world.settings_extra = {"recovery": {"on_give_up": "exit"}}
    world.start_error = CannotExecute("the command /bin/train does not exist", fix="install it")
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.GAVE_UP)
    await podwatch.leave()
    world.start_error = ""
    before = world.clock.now
    again = Podwatch(world)
    await again.recovery.begin()
    await again.until(Phase.CONFIRMING)
    assert world.clock.now - before < 60
    await again.leave()


async def test_a_run_that_ends_just_after_podwatch_was_restarted_has_worked(world: World) -> None:
    podwatch = await running(world)
    await podwatch.leave()
    world.lines = ["ValidationError: 2 validation errors for Message", LOAD_ERROR]
    again = Podwatch(world)
    await again.recovery.begin()
    again.see(finding=death())
    await again.until(Phase.CONFIRMING)
    run = again.run
    assert (run.history.gave_up, run.history.failed_loads, run.below) == (False, (), None)
    await again.leave()


async def test_the_error_of_an_earlier_start_is_not_the_cause_of_this_one(world: World) -> None:
    """Seen: a CUDA error once, and every failure after it with less output counted as a machine fault: no checkpoint
    was ever blamed. And a crash loop's third incident named no error."""
    podwatch = await running(world)
    world.lines = ["CUDA error: an illegal memory access was encountered"]
    podwatch.see(18, finding=death())
    for expected in (15, 15, 10):
        await podwatch.until(Phase.CONFIRMING)
        assert world.plans[-1].step == expected
        world.lines += ["loading", LOAD_ERROR]
        podwatch.see(finding=death())
    await podwatch.until(Phase.CONFIRMING)
    latest = podwatch.journal.sync.incidents()[:3]
    assert all(f'(trainer.log: "{LOAD_ERROR}")' in incident.summary for incident in latest), latest
    await podwatch.leave()


async def test_step_back_after_two_proven_failed_loads_opens_a_new_line(world: World) -> None:
    podwatch = await running(world)
    world.lines = [LOAD_ERROR]
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    old = podwatch.run.lineage
    for expected in (15, 10):
        podwatch.see(finding=death())
        await podwatch.until(Phase.CONFIRMING)
        assert world.plans[-1].step == expected
    record = podwatch.run
    assert (record.lineage.parent, record.lineage.parent_step) == (old.id, 10)
    kept = quarantine.listing(podwatch.workspace)
    assert kept[-1].index is not None
    assert kept[-1].index.steps == {15: "complete"}
    (finding,) = podwatch.recovery.findings()
    assert finding.kind is FindingKind.STEPPED_BACK
    assert f"Step 15 is kept in quarantine {kept[-1].id}" in finding.summary
    await podwatch.leave()


async def test_an_xid_while_it_loads_is_no_reason_to_step_back(world: World) -> None:
    podwatch = await running(world)
    world.lines = [LOAD_ERROR]
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    for _ in range(3):
        podwatch.see(finding=Finding(FindingKind.GPU_FAULT, Severity.WARNING, "GPU 1: XID 79", 0.0, subject="gpu1"))
        podwatch.see(finding=death())
        await podwatch.until(Phase.CONFIRMING)
        assert world.plans[-1].step == 15
    await podwatch.leave()


async def test_a_start_that_never_loaded_is_no_reason_to_step_back(world: World) -> None:
    podwatch = await running(world)
    for _ in range(4):
        podwatch.see(finding=death())
        await podwatch.until(Phase.CONFIRMING)
        assert world.plans[-1].step == 15
    await podwatch.leave()


async def test_numbers_that_count_saves_are_no_steps(world: World) -> None:
    """accelerate's automatic naming: the save 15 may be of step 1500. A bar that begins anew accuses nobody."""
    podwatch = await running(world)
    podwatch.catalogue.layout.counts_saves = True
    podwatch.see(1540, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 15
    told = told_of(podwatch.recovery.context.healing())
    assert told is not None
    assert "1525 steps" not in told.summary
    podwatch.see(2)
    podwatch.see(3)
    assert podwatch.recovery.state.phase is Phase.RUNNING
    await podwatch.leave()
    incident = Podwatch(world).journal.sync.incidents()[0]
    assert (incident.resumed_step, incident.lost_steps) == (15, None)


async def test_resumed_wrong_is_stopped_and_waits_for_a_person(world: World) -> None:
    podwatch = await running(world)
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see(2)
    await podwatch.quiet()
    assert len(world.alive()) == 1, "one sighting is not enough"
    podwatch.see(3)
    await podwatch.until(Phase.GAVE_UP)
    assert (world.alive(), len(world.plans)) == ([], 2), "no checkpoint is at fault: podwatch does not step back"
    assert podwatch.catalogue.layout.numbers("checkpoints") == [5, 10, 15], "nothing is moved for it"
    assert 15 in podwatch.recovery.state.protect
    assert {f.kind for f in podwatch.recovery.findings()} == {FindingKind.RESUMED_WRONG, FindingKind.GAVE_UP}
    world.clock.advance(7200)
    podwatch.see()
    await podwatch.quiet()
    assert podwatch.recovery.state.phase is Phase.GAVE_UP, "each further start would train the same steps again"
    await podwatch.recovery.requests.start()
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 15, "the operator's start decides"
    podwatch.see(16)
    assert podwatch.recovery.findings() == ()
    await podwatch.leave()


async def test_no_number_readable_means_no_deletion_before_the_next_save(world: World) -> None:
    podwatch = await running(world)
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    world.clock.advance(world.settings().trainer.startup_patience)
    podwatch.see()
    assert podwatch.recovery.state.phase is Phase.RUNNING
    assert podwatch.recovery.state.hold_deletions
    world.save(20)
    podwatch.catalogue.rescan()
    podwatch.see()
    assert not podwatch.recovery.state.hold_deletions
    await podwatch.leave()


async def test_a_damaged_newest_set_is_passed_over(world: World) -> None:
    podwatch = await running(world)
    world.damaged[15] = ("b.bin is shorter than its index says",)
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 10
    await podwatch.leave()


async def test_one_that_is_damaged_in_the_store_too_is_fetched_once_and_passed_over(world: World) -> None:
    """It was uploaded as it was. A newer save of the same step is another one."""
    store = Store(world)
    podwatch = await running(world, restore=store)
    line = podwatch.run.lineage.id
    store.given = [stored(10, "s10", line, 1), stored(15, "s15", line, 2)]
    world.damaged[15] = ("b.bin is shorter than its index says",)
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert (world.plans[-1].step, store.fetched) == (10, [15])
    (said,) = [e for e in world.events if e.name is EventName.CHECKPOINT_DAMAGED and "in the store" in e.message]
    assert "podwatch start --step 15" in said.message
    (shown,) = [f for f in podwatch.recovery.context.notes.all if f.kind is FindingKind.STEPPED_BACK]
    assert "step 15 is damaged in the store" in shown.summary
    assert "podwatch start --step 15" in shown.suggestion
    podwatch.see(11)
    podwatch.see(12, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert (world.plans[-1].step, store.fetched) == (10, [15]), "not again"
    await podwatch.leave()


async def test_finish_is_recorded_and_lingering_processes_end(world: World) -> None:
    podwatch = await running(world)
    podwatch.see(18, finding=finished())
    await podwatch.until(Phase.FINISHED)
    assert world.alive() == []
    await podwatch.leave()
    heir = Podwatch(world)
    await heir.recovery.begin()
    await heir.until(Phase.FINISHED)
    assert len(world.plans) == 1
    await heir.leave()


async def test_the_trainers_own_trackers_are_set_right_before_it_starts(world: World) -> None:
    """A number and a link, both ahead of the step that is started from; the other way round they are left alone."""
    podwatch = await running(world)
    root = world.output / "checkpoints"
    (root / "latest").write_text("20")
    (root / "latest").chmod(0o640)
    (root / "newest").symlink_to("step_20")
    world.save(20, whole=False)
    plan = await podwatch.recovery.requests.dry_run()
    assert plan["trackers_set_right"] == [str(root / "latest"), str(root / "newest")]
    assert (root / "latest").read_text() == "20", "a dry run changes nothing"
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert (root / "latest").read_text() == "15"
    assert (await podwatch.recovery.requests.dry_run())["trackers_set_right"] == []
    assert (root / "latest").stat().st_mode & 0o777 == 0o640
    assert (root / "newest").readlink() == Path("step_15")
    assert not [p for p in root.iterdir() if p.name.startswith(".")]
    told = [e for e in world.events if e.message.startswith("updated ")]
    assert [e.message for e in told] == ["updated latest, newest for a start from step 15"]
    await podwatch.leave()


@pytest.mark.parametrize(("saved", "started", "fits"), [(8, 4, False), (4, 8, False), (8, 8, True), (8, None, True)])
async def test_a_set_of_another_world_size_is_not_started_from_where_the_trainer_cannot_reshard(
    world: World, saved: int, started: int | None, fits: bool
) -> None:
    podwatch = await running(world)
    layout = podwatch.catalogue.layout
    layout.reshards, layout.saved_by, layout.started = False, saved, started
    starts = len(world.plans)
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING if fits else Phase.BLOCKED)
    assert len(world.plans) == starts + fits
    if not fits:
        (note,) = [f for f in podwatch.recovery.findings() if f.kind is FindingKind.BLOCKED]
        assert f"step 15 cannot be resumed from: {saved} processes saved it" in note.summary
        assert f"the command starts {started} processes" in note.summary
        assert (await podwatch.recovery.requests.dry_run())["possible"] is False
        await podwatch.recovery.requests.start(step=15)  # a person knows better
        await podwatch.until(Phase.CONFIRMING)
        assert world.plans[-1].step == 15
    await podwatch.leave()


async def test_what_ends_while_podwatch_stops_it_is_judged_as_an_end(world: World) -> None:
    seen: dict[str, Desired] = {}

    class Watching(Killer):
        def point(self, name: str) -> None:
            if "podwatch" in known:
                seen[name] = known["podwatch"].recovery.context.judged

    known: dict[str, Podwatch] = {}
    known["podwatch"] = podwatch = await running(world, killer=Watching())
    assert podwatch.recovery.context.judged is Desired.RUNNING
    await podwatch.recovery.requests.restart()
    await podwatch.until(Phase.CONFIRMING)
    assert seen["stop"] is seen["stopped"] is Desired.STOPPED
    assert podwatch.recovery.context.judged is Desired.RUNNING
    await podwatch.leave()


async def test_a_run_that_was_given_up_and_is_stopped_is_not_critical(world: World) -> None:
    podwatch = await running(world)
    podwatch.recovery.context.notes.add(FindingKind.GAVE_UP, Severity.CRITICAL, "gave up: five restarts failed")
    podwatch.recovery.context.notes.add(FindingKind.BLOCKED, Severity.CRITICAL, "port 8000 is held")
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    assert podwatch.recovery.findings() == ()
    await podwatch.leave()


async def test_one_failure_is_one_finding_until_a_step_confirms_the_restart(world: World) -> None:
    podwatch = await running(world)
    recovery, seen = podwatch.recovery, dict[str, tuple[str, int | None]]()

    class Watching(Killer):
        def point(self, name: str) -> None:
            told = told_of(recovery.context.healing())
            seen[name] = (told.summary if told is not None else "", recovery.state.step)

    assert world.kept is not None
    podwatch.recovery.context.tools.launcher.killer = Watching()  # type: ignore[attr-defined]
    world.kept.point = Watching().point
    podwatch.recovery.context.tools.catalogue.rescan()
    assert recovery.context.healing() is None
    podwatch.see(17, finding=death(FindingKind.HANG))
    await podwatch.until(Phase.CONFIRMING)
    text, step = seen["stop"]
    assert "Restarting from step 15 (2 steps" in text
    assert step == 15, "while it stops, the step shown is the one it resumes from"
    told = told_of(recovery.context.healing())
    assert told is not None
    assert "Restarted from step 15 (2 steps" in told.summary
    assert told.suggestion == "nothing, podwatch restarts training"
    opened = next(e for e in world.events if e.name is EventName.INCIDENT_OPENED)
    assert "Restarting from step 15 (2 steps" in opened.message
    podwatch.see(16)
    assert recovery.context.healing() is None
    await podwatch.leave()


@pytest.mark.parametrize("end", ["stop", "start", "restart"])
async def test_an_operator_who_decides_ends_the_story(world: World, end: str) -> None:
    world.settings_extra = {"recovery": {"backoff_min": 1e6}}
    podwatch = await running(world)
    podwatch.recovery.context.failed(death(), podwatch.recovery.context.attempt)
    assert podwatch.recovery.context.healing() is not None
    if end == "stop":
        await podwatch.recovery.requests.stop()
        await podwatch.until(Phase.STOPPED)
    else:
        await podwatch.recovery.requests.restart()
        await podwatch.until(Phase.CONFIRMING)
    assert podwatch.recovery.context.healing() is None
    await podwatch.leave()


async def test_steps_lost_are_told_only_where_they_are_known(world: World) -> None:
    podwatch = await running(world)
    attempt = podwatch.recovery.context.attempt
    assert attempt is not None
    attempt.last_step = 17
    podwatch.recovery.context.failed(death(), attempt)
    told = told_of(podwatch.recovery.context.healing())
    assert told is not None
    assert told.summary.endswith("Restarting training"), "no checkpoint was seen yet: the store may have one"
    podwatch.recovery.context.tools.catalogue.rescan()
    for last, text in ((15, "(no step lost)"), (16, "(1 step lost, "), (None, "lost)"), (12, "lost)")):
        attempt.last_step = last
        podwatch.recovery.context.failed(death(), attempt)
        told = told_of(podwatch.recovery.context.healing())
        assert told is not None
        assert text in told.summary
        assert ("step lost" in told.summary or "step, " in told.summary) is (last in (15, 16)), told.summary
    await podwatch.leave()


async def test_a_run_that_an_operator_types_does_not_wait_out_a_backoff(world: World) -> None:
    """Once: the init that restarts podwatch was not typed."""
    podwatch = await running(world)
    gave_up = replace(podwatch.run.history, gave_up_at=world.clock.now)
    await podwatch.recovery.context.edit(next_try_wall=world.clock.wall() + 3000.0, history=gave_up)
    await podwatch.leave()
    world.kill()
    for word, waits in (("typed", False), ("typed", True), ("typed again", False)):
        world.kept = None
        podwatch = Podwatch(world)
        world.clock.slept.clear()
        await podwatch.recovery.begin(by_hand=word)
        await podwatch.until(Phase.CONFIRMING)
        assert (sum(s for s in world.clock.slept if s > 1) > 1000.0) is waits, word
        await podwatch.recovery.context.edit(next_try_wall=world.clock.wall() + 3000.0)
        await podwatch.leave()
        world.kill()


async def test_an_attempt_of_a_job_waits_out_the_pause_that_the_attempts_before_it_left(world: World) -> None:
    podwatch = Podwatch(world)
    world.clock.slept.clear()
    await podwatch.recovery.begin(not_before_wall=world.clock.wall() + 300.0)
    await podwatch.until(Phase.CONFIRMING)
    assert 300.0 <= sum(s for s in world.clock.slept if s > 1) < 400.0
    assert any(e.name is EventName.RECOVERY_BACKOFF and "300 s" in e.message for e in world.events)
    assert podwatch.recovery.context.run.next_try_wall is None
    await podwatch.leave()


async def test_what_is_given_up_at_once_is_never_said_to_be_restarted_and_its_incident_ends(world: World) -> None:
    world.lines = ["usage: rl [-h]", "rl: error: unrecognized arguments: --foo"]
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see(finding=death())
    await podwatch.until_phase(Phase.GAVE_UP)
    line = 'trainer.log: "rl: error: unrecognized arguments: --foo"'
    reason = "podwatch gave up: unknown argument; the same command would fail again"
    (opened,) = [e for e in world.events if e.name is EventName.INCIDENT_OPENED]
    (gave_up,) = [e for e in world.events if e.name is EventName.GAVE_UP]
    assert opened.fields["gave_up"] is True
    assert not any("estarting training" in e.message or "Restarting from" in e.message for e in world.events)
    assert gave_up.message == f"Trainer-exited happened ({line}). {reason}"
    async with asyncio.timeout(60):  # it is closed once the phase is shown
        while (incident := podwatch.journal.sync.incidents()[0]).closed_wall is None:
            await asyncio.sleep(0.005)
    assert (incident.resolution, incident.closed_wall is not None, incident.resumed_step) == (reason, True, None)
    assert line in incident.summary
    assert podwatch.recovery.state.detail == reason.removeprefix("podwatch gave up: ")
    (told,) = fold(podwatch.recovery.findings(), podwatch.recovery.context.healing())
    assert told.summary == f"Trainer-exited happened ({line}). {reason}"
    await podwatch.leave()


async def test_the_incident_begins_with_the_failure_and_its_end_says_what_it_cost(world: World) -> None:
    """What was waited before podwatch acted belongs to the cost."""
    podwatch = await running(world)
    podwatch.see(18)
    world.set_walls[15] = world.clock.wall()
    podwatch.catalogue.rescan()
    world.clock.advance(9)
    began = world.clock.wall()
    failure = replace(death(FindingKind.REQUIRED_CHILD_EXITED), since=world.clock.monotonic())
    world.clock.advance(70)
    podwatch.see(finding=failure)
    await podwatch.until(Phase.CONFIRMING)
    (opened,) = [e for e in world.events if e.name is EventName.INCIDENT_OPENED]
    assert "(3 steps lost, 9 s of training)" in opened.message
    assert (await podwatch.journal.run(Journal.incidents))[0].lost_steps == 3, "the next podwatch knows it too"
    world.set_walls[15] = world.clock.wall()  # the new trainer writes into the checkpoint that it was started from
    podwatch.catalogue.rescan()
    assert "; no training for 7" in opened.message
    podwatch.see(16)
    (closed,) = [e for e in world.events if e.name is EventName.INCIDENT_CLOSED]
    assert closed.message.startswith(
        "Training continues at step 16 (resumed from step 15); 3 steps lost (9 s of training), "
    )
    assert "no training for 7" in closed.message
    await podwatch.journal.run(Journal.incidents)
    await podwatch.journal.run(Journal.incidents)
    (incident,) = podwatch.journal.sync.incidents()
    assert abs(incident.opened_wall - began) < 1.0
    assert incident.resolution == "restarted from step 15"
    await podwatch.leave()


async def test_the_steps_of_a_failure_count_once_where_the_next_start_fails(world: World) -> None:
    podwatch = await running(world)
    world.start_error = CannotExecute("the command does not exist")
    podwatch.see(18, finding=death())
    async with asyncio.timeout(60):
        while len([e for e in world.events if e.name is EventName.INCIDENT_OPENED]) < 2:
            await asyncio.sleep(0.005)
    world.start_error = ""
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see(16)
    await podwatch.journal.run(Journal.incidents)
    await podwatch.journal.run(Journal.incidents)
    found = podwatch.journal.sync.incidents()
    assert [one.kind for one in found][-2] == "start-failed"
    assert [one.lost_steps for one in found] == [0] * (len(found) - 1) + [3]
    assert all(one.closed_wall is not None for one in found)
    await podwatch.leave()


async def test_an_error_of_the_start_before_is_not_shown_for_this_one(world: World) -> None:
    podwatch = await running(world)
    world.lines = ["Step 18", "ValueError: bad batch"]
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    podwatch.see(16)
    world.lines += ["Step 16", "Step 17"]  # the trainer appends to its log
    podwatch.see(17, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.journal.run(Journal.incidents)
    second, first = podwatch.journal.sync.incidents()
    assert 'ValueError: bad batch"' in first.summary
    assert "ValueError" not in second.summary
    await podwatch.leave()


async def test_a_long_error_is_cut_after_a_sentence(world: World) -> None:
    podwatch = await running(world)
    world.lines = ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. " + "GPU 0 has " * 20]
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    await podwatch.journal.run(Journal.incidents)
    (incident,) = podwatch.journal.sync.incidents()
    assert incident.summary.endswith('CUDA out of memory. Tried to allocate 4.64 GiB. ...")')
    world.lines = ["ValueError: " + "x" * 30 + " y" * 100]
    podwatch.see(19, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert podwatch.journal.sync.incidents()[0].summary.endswith(' y ...")')
    await podwatch.leave()
