"""What happens between two acts: a verdict that comes while a person's wish is being taken in, a wish that fails."""

import asyncio
import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from podwatch.checkpoints.known_checkpoints import CHANGED, InspectionUnanswered
from podwatch.domain.errors import HostError
from podwatch.domain.finding import FindingKind
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Desired
from podwatch.recovery import Phase
from podwatch.recovery.choose import INSPECTIONS, Choice
from podwatch.recovery.context import Attempt
from podwatch.trainer.start_and_adopt import Look
from podwatch.trainer.trainer_handle import TrainerHandle
from tests.support.recovery_world import Podwatch, World, death


async def running(world: World) -> Podwatch:
    podwatch = Podwatch(world)
    await podwatch.recovery.begin()
    await podwatch.until(Phase.CONFIRMING)
    world.save(5)
    podwatch.see(7)
    return podwatch


def slow_look(podwatch: Podwatch, during: Callable[[], Any]) -> None:
    """The next look takes a moment, and ``during`` happens in it."""
    launcher = podwatch.recovery.context.tools.launcher
    original = launcher.look

    async def look() -> Look:
        object.__setattr__(launcher, "look", original)
        found = await original()
        during()
        await asyncio.sleep(0.05)
        return found

    object.__setattr__(launcher, "look", look)


async def test_a_verdict_during_a_stop_request_starts_nothing(world: World) -> None:
    podwatch = await running(world)
    slow_look(podwatch, lambda: podwatch.see(8, finding=death(FindingKind.SILENT_DEATH)))
    await podwatch.recovery.requests.stop()
    await podwatch.until(Phase.STOPPED)
    await asyncio.sleep(0.1)
    assert (world.alive(), len(world.plans)) == ([], 1)
    assert podwatch.recovery.state.phase is Phase.STOPPED
    await podwatch.leave()


async def test_a_verdict_during_a_restart_request_makes_no_second_act(world: World) -> None:
    podwatch = await running(world)
    slow_look(podwatch, lambda: podwatch.see(8, finding=death(FindingKind.SILENT_DEATH)))
    await podwatch.recovery.requests.restart()
    await podwatch.until(Phase.CONFIRMING)
    await asyncio.sleep(0.1)
    assert (len(world.alive()), len(world.plans)) == (1, 2)
    assert podwatch.journal.sync.incidents() == [], "a person's restart is no failure"
    await podwatch.leave()


async def test_a_request_that_cannot_be_recorded_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    podwatch = await running(world)
    world.kill()
    world.gpu_used = 60 << 30
    podwatch.see(8, finding=death())
    await podwatch.until_phase(Phase.BLOCKED)  # the GPU is still held: recovery waits for it
    with monkeypatch.context() as patch:

        def write(*_: object) -> None:
            raise HostError("no space", where=str(errno.ENOSPC))

        patch.setattr(podwatch.file, "_write", write)
        with pytest.raises(HostError):
            await podwatch.recovery.requests.stop()
    world.gpu_used = 0
    await podwatch.until(Phase.CONFIRMING)
    assert (len(world.alive()), podwatch.recovery.desired) == (1, Desired.RUNNING)
    await podwatch.leave()


async def test_a_request_that_is_cancelled_gives_the_interrupted_act_back(world: World) -> None:
    podwatch = await running(world)
    world.kill()
    world.gpu_used = 60 << 30
    podwatch.see(8, finding=death())
    await podwatch.until_phase(Phase.BLOCKED)
    slow_look(podwatch, lambda: None)
    request = asyncio.create_task(podwatch.recovery.requests.restart())
    await asyncio.sleep(0.02)
    request.cancel()
    await asyncio.wait([request])
    world.gpu_used = 0
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.alive()) == 1
    await podwatch.leave()


async def test_nothing_begins_once_podwatch_leaves(world: World) -> None:
    """What is requested in its last moments is recorded for the next podwatch."""
    podwatch = await running(world)
    podwatch.recovery.leave()
    before = (world.alive(), len(world.plans))
    await podwatch.recovery.requests.restart()
    podwatch.see(8, finding=death(FindingKind.SILENT_DEATH))
    await asyncio.sleep(0.05)
    await podwatch.recovery.close()
    assert (world.alive(), len(world.plans)) == before
    recorded = podwatch.recorded()
    assert recorded.stopping is not None
    assert not [start for start in recorded.starts if start.counted]
    await podwatch.journal.close()


async def test_a_reload_is_in_force_at_the_next_verdict(world: World) -> None:
    podwatch = await running(world)
    recovery = podwatch.recovery
    recovery.reconfigure(
        recovery.context.tools.settings.model_copy(update={"mode": "observe"}), recovery.context.tools.policies
    )
    podwatch.see(8, finding=death(FindingKind.SILENT_DEATH))
    await podwatch.quiet()
    assert len(world.plans) == 1
    assert "mode observe: would restart" in world.events[-1].message
    assert recovery.starter.context.tools.settings.mode == "observe"
    await podwatch.leave()


async def test_a_set_that_is_removed_while_it_is_chosen_is_not_started_from(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal that was planned before may still strike, until the choice protects the set."""
    podwatch = await running(world)
    for step in (10, 15):
        world.save(step)
    world.damaged[15] = ("truncated",)
    protected: list[frozenset[int]] = []
    verify = podwatch.catalogue.verify

    def prune_then_verify(step: int) -> tuple[str, ...]:
        reasons = verify(step)
        if step == 10:
            shutil.rmtree(world.output / "checkpoints" / "step_10")
        return reasons

    monkeypatch.setattr(podwatch.catalogue, "verify", prune_then_verify)
    start = podwatch.recovery.starter.start

    async def watched(choice: Choice, still_asked: Callable[[RunState], bool]) -> tuple[TrainerHandle, Attempt]:
        protected.append(podwatch.recovery.state.protect)
        return await start(choice, still_asked)

    monkeypatch.setattr(podwatch.recovery.starter, "start", watched)
    podwatch.see(17, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 5
    assert protected == [frozenset({5})], "also in the moment before the start is recorded"
    assert podwatch.recovery.context.chosen is None
    await podwatch.leave()


def inspections(podwatch: Any, step: int, answers: list[tuple[str, ...] | None]) -> None:
    """What the next inspections of this step before a start answer; None: nothing."""
    verify = podwatch.catalogue.verify

    def answer(chosen: int) -> tuple[str, ...]:
        found = answers.pop(0) if chosen == step and answers else verify(chosen)
        if found is None:
            raise InspectionUnanswered("the inspection ended without an answer")
        return tuple(found)

    podwatch.catalogue.verify = answer


async def test_a_save_that_appears_after_the_choice_is_chosen_not_moved_to_quarantine(world: World) -> None:
    podwatch = await running(world)
    world.save(10)
    verify = podwatch.catalogue.verify

    def save_then_verify(step: int) -> tuple[str, ...]:
        if step == 10:
            world.save(15)
        return verify(step)

    podwatch.catalogue.verify = save_then_verify  # type: ignore[method-assign]
    world.kill()
    podwatch.see(17, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 15
    assert not any(event.name == "quarantined" for event in world.events)
    await podwatch.leave()


@pytest.mark.parametrize("answers", [[None], [None, None], [(CHANGED,)], [(CHANGED,), None]])
async def test_no_answer_and_a_change_are_no_damage(world: World, answers: list[tuple[str, ...] | None]) -> None:
    podwatch = await running(world)
    for step in (10, 15):
        world.save(step)
    inspections(podwatch, 15, answers)
    world.kill()
    podwatch.see(17, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 15
    assert answers == []
    await podwatch.leave()


@pytest.mark.parametrize("since", ["the death", "the choice"])
async def test_while_the_checkpoints_cannot_be_listed_nothing_is_chosen_or_moved(world: World, since: str) -> None:
    podwatch = await running(world)
    world.save(10)
    podwatch.catalogue.rescan()
    world.save(15)  # not in the list that was read last
    verify = podwatch.catalogue.verify

    def unlist() -> None:
        podwatch.catalogue.unlisted = "Input/output error"

    def verify_then_unlist(step: int) -> tuple[str, ...]:
        if since == "the choice" and len(world.plans) == 1 and not podwatch.catalogue.unlisted:
            unlist()
        return verify(step)

    podwatch.catalogue.verify = verify_then_unlist  # type: ignore[method-assign]
    world.kill()
    if since == "the death":
        unlist()
    podwatch.see(17, finding=death())
    await podwatch.until_phase(Phase.BLOCKED)
    assert "cannot be listed: Input/output error" in podwatch.recovery.state.detail
    assert len(world.plans) == 1
    podwatch.catalogue.verify = verify  # type: ignore[method-assign]
    podwatch.catalogue.unlisted = ""
    await podwatch.until(Phase.CONFIRMING)
    assert world.plans[-1].step == 15
    assert not any(event.name == "quarantined" for event in world.events)
    await podwatch.leave()


async def test_without_any_answer_the_operator_is_asked(world: World) -> None:
    podwatch = await running(world)
    for step in (10, 15):
        world.save(step)
    inspections(podwatch, 15, [None] * INSPECTIONS)
    world.kill()
    podwatch.see(17, finding=death())
    await podwatch.until(Phase.BLOCKED)
    assert any("no inspection gave an answer" in f.summary for f in podwatch.recovery.findings())
    assert len(world.plans) == 1
    await podwatch.leave()


async def test_a_person_who_starts_during_the_pause_after_giving_up_is_guarded(world: World) -> None:
    podwatch = await running(world)
    world.kill()
    podwatch.recovery.context.note(next_try_wall=world.clock.wall() + 3600.0)
    history = podwatch.recovery.context.run.history
    podwatch.recovery.context.note(history=replace(history, gave_up_at=world.clock.now))
    podwatch.file.note(lambda run: run.with_start(world.plans[-1].start_id, counted=True))
    release = asyncio.Event()
    sleep = world.clock.sleep

    async def real_pause(seconds: float) -> None:
        if seconds > 10:
            await release.wait()
        await sleep(seconds)

    object.__setattr__(world.clock, "sleep", real_pause)
    podwatch.see(finding=death())
    await podwatch.until_phase(Phase.GAVE_UP)
    world.person_starts()
    began = world.clock.now
    release.set()
    await podwatch.until(Phase.ATTACHED)
    assert world.clock.now - began < 60
    assert len(world.plans) == 1
    assert podwatch.recovery.findings() == ()
    await podwatch.leave()


async def test_a_completion_that_was_recorded_and_not_carried_out_is_carried_out(world: World) -> None:
    """Else the processes that linger are billed for ever: nothing is judged any more once a run is finished."""
    podwatch = await running(world)
    await podwatch.recovery.performer.want(Desired.FINISHED)
    await podwatch.leave()
    again = Podwatch(world)
    await again.recovery.begin()
    await again.until(Phase.FINISHED)
    assert world.alive() == []
    await again.leave()


async def test_a_stop_before_a_start_is_recorded_prevents_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    podwatch = Podwatch(world)
    recovery = podwatch.recovery

    async def repair(*_: object) -> None:
        await recovery.performer.want(Desired.STOPPED)

    monkeypatch.setattr(recovery.starter, "_repair", repair)
    await recovery.begin()
    await podwatch.until(Phase.STOPPED)
    assert (world.plans, podwatch.recorded().desired) == ([], Desired.STOPPED)
    await podwatch.leave()


async def test_a_stop_during_a_long_start_is_durable_at_once(world: World) -> None:
    """``trainer.start_before`` takes minutes, and the pod may end in them."""
    podwatch = Podwatch(world)
    recovery, launcher = podwatch.recovery, podwatch.recovery.context.tools.launcher
    original, go, begun = launcher.start, asyncio.Event(), asyncio.Event()

    async def start(plan: Any) -> TrainerHandle:
        begun.set()
        await go.wait()
        return await original(plan)

    object.__setattr__(launcher, "start", start)
    await recovery.begin()
    await begun.wait()
    stop = asyncio.create_task(recovery.requests.stop())
    end = asyncio.get_running_loop().time() + 20
    while podwatch.recorded().desired is not Desired.STOPPED:
        assert asyncio.get_running_loop().time() < end, "only once the start has been made"
        await asyncio.sleep(0.005)
    go.set()
    await stop
    await podwatch.until(Phase.STOPPED)
    assert (world.alive(), recovery.desired) == ([], Desired.STOPPED)
    await podwatch.leave()


async def test_a_start_that_fails_tells_no_secret(world: World) -> None:
    """The command before a start is quoted where it failed: `ray start --redis-password ...`."""
    world.settings_extra = {"recovery": {"retry_after_give_up": 0}}
    podwatch = Podwatch(world)
    world.start_error = HostError(
        "a command of trainer.start_before ended with code 1: login --token=tok_abcdefghijk hf_secretsecretsecret1",
        where="trainer.start_before",
    )
    await podwatch.recovery.begin()
    await podwatch.until(Phase.GAVE_UP)
    told = [e.message for e in world.events] + [f.summary for f in podwatch.recovery.findings()]
    told += [i.summary for i in podwatch.journal.sync.incidents()]
    told += [podwatch.recovery.state.detail]
    assert any("ended with code 1: login" in text for text in told)
    told.append((world.root / "state" / "j.sqlite").read_bytes().decode("latin-1"))
    told.append((world.root / "state" / "j.sqlite-wal").read_bytes().decode("latin-1"))
    assert [t for t in told if "tok_abcdefghijk" in t or "hf_secretsecretsecret1" in t] == []
    await podwatch.leave()
