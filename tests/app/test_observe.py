"""A status shows one moment: what podwatch did since the last look corrects that look."""

from types import SimpleNamespace
from typing import Any, cast

from podwatch.app.findings import of_a_run_that_ends, of_this_trainer
from podwatch.app.observe import corrected
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.snapshot import (
    ProgressSample,
    ProgressSource,
    SensorState,
    Snapshot,
    Supervision,
    TrainerSample,
    observed,
    unobserved,
)
from podwatch.recovery.state import RecoveryState

NOW, WALL = 1000.0, 5000.0
OLD = TrainerSample(start_id="old", supervision=Supervision.SUPERVISED, alive=True, started_at=NOW - 100)


def watching(start_id: str, launcher: ProcessIdentity, seconds: float, *, adopted: bool = False) -> RecoveryState:
    """Recovery watches this trainer, started so many seconds ago."""
    supervision = Supervision.ATTACH if start_id.startswith("attach") else Supervision.SUPERVISED
    handle = SimpleNamespace(start_id=start_id, supervision=supervision, launcher=launcher, started_wall=WALL - seconds)
    return RecoveryState(handle=cast(Any, handle), adopted=adopted)


LAUNCHER = ProcessIdentity(7, 1)
ATTACHED, NONE = watching("attach-7-1", LAUNCHER, 9.0), RecoveryState()


def look(trainer: TrainerSample | None) -> Snapshot:
    reading = observed(trainer, NOW - 1) if trainer else unobserved(SensorState.PENDING, NOW - 1, "not observed yet")
    steps = (ProgressSample(ProgressSource.STEP_LINE, "trainer", NOW - 20, 96),)
    return Snapshot(at=NOW - 1, wall=WALL - 1, trainer=reading, progress=observed(steps, NOW - 1))


def test_a_trainer_that_podwatch_has_just_attached_to_lives_and_has_made_none_of_the_old_steps() -> None:
    for before in (OLD, TrainerSample(), None):
        now, changed = corrected(look(before), ATTACHED, now=NOW, wall=WALL)
        trainer = now.trainer.value
        assert changed
        assert trainer is not None
        assert (trainer.alive, trainer.supervision, trainer.started_at) == (True, Supervision.ATTACH, NOW - 9.0)
        assert trainer.launcher == LAUNCHER
        assert now.newest_step is None


def test_a_trainer_that_podwatch_has_stopped_since_does_not_run() -> None:
    now, changed = corrected(look(OLD), NONE, now=NOW, wall=WALL)
    assert changed
    assert now.trainer.value is not None
    assert not now.trainer.value.alive
    assert now.newest_step is not None
    assert now.newest_step.step == 96


def test_a_look_at_the_trainer_that_is_watched_stays_as_it_is() -> None:
    same = watching("old", ProcessIdentity(1, 1), 100)
    for before, watched in ((OLD, same), (TrainerSample(), NONE), (None, NONE)):
        seen = look(before)
        assert corrected(seen, watched, now=NOW, wall=WALL) == (seen, False)


def test_what_cannot_be_observed_is_not_made_up() -> None:
    blind = Snapshot(at=NOW, wall=WALL, trainer=unobserved(SensorState.BLIND, NOW, "not looked for 12 s"))
    assert corrected(blind, ATTACHED, now=NOW, wall=WALL) == (blind, False)
    found = watching("old", ProcessIdentity(1, 1), 100, adopted=True)  # it may have ended
    now, _ = corrected(look(None), found, now=NOW, wall=WALL)
    assert now.trainer.state is SensorState.PENDING
    assert now.trainer.value is None


def test_deaths_are_of_the_trainer_that_was_seen_and_other_findings_are_of_the_pod() -> None:
    death = Finding(FindingKind.TRAINER_EXITED, Severity.CRITICAL, "exit code 1", NOW)
    disk = Finding(FindingKind.DISK_HIGH, Severity.WARNING, "90 %", NOW)
    assert of_this_trainer([death, disk]) == (disk,)


def test_a_run_that_was_stopped_since_may_end() -> None:
    death = Finding(FindingKind.SILENT_DEATH, Severity.CRITICAL, "memory is gone", NOW)
    line = Finding(FindingKind.LOG_RULE, Severity.CRITICAL, "EngineCore encountered a fatal error", NOW)
    disk = Finding(FindingKind.DISK_HIGH, Severity.WARNING, "90 %", NOW)
    assert of_a_run_that_ends([death, line, disk]) == (disk,)
