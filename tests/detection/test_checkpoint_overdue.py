"""An overdue checkpoint: only while steps are made, never in start-up, by the run's own rhythm."""

from dataclasses import replace

import pytest

from podwatch.config.settings import Policies, ResourceSettings
from podwatch.detection.learned import Learned
from podwatch.detection.progress import Progress
from podwatch.domain.snapshot import (
    CheckpointMark,
    ProgressSample,
    ProgressSource,
    Snapshot,
    Supervision,
    TrainerSample,
    observed,
)
from tests.drivers.detection import RuleAlone

POLICIES = Policies(resources=ResourceSettings(overdue_floor=1000.0))


class Desk:
    def __init__(self) -> None:
        self.rule = RuleAlone("checkpoint-overdue")
        self.now = 0.0
        self.progress = Progress(started_at=0.0)
        self.mark = CheckpointMark()
        self.stepping, self.saving, self.ending = True, False, False
        self.trainer = TrainerSample("s", Supervision.SUPERVISED, alive=True)
        self.policies, self.told = POLICIES, ""
        self.step: int | None = None

    def run(self, seconds: float) -> bool:
        overdue = False
        end = self.now + seconds
        while self.now < end:
            self.now += 50.0
            if self.stepping:
                first = self.progress.first_at if self.progress.first_at is not None else self.now
                self.progress = replace(self.progress, numbered_at=self.now, first_at=first)
            sample = ProgressSample(ProgressSource.STEP_LINE, "trainer", self.now, self.step)
            shown = () if self.step is None else (sample,)
            snapshot = Snapshot(
                at=self.now, wall=1e9 + self.now, checkpoint=self.mark, saving=self.saving,
                progress=observed(shown, self.now),
            )  # fmt: skip
            self.rule.start.progress = self.progress
            found = self.rule.ask(snapshot, self.policies, trainer=self.trainer, ending=self.ending)
            overdue = bool(found)
            self.told = found[0].summary if found else ""
        return overdue

    def save(self, step: int) -> None:
        self.mark = CheckpointMark(step, 1e9 + self.now)


def rhythm(desk: Desk, saves: int, gap: float) -> None:
    for number in range(saves):
        desk.save(number + 1)
        assert not desk.run(gap)


def test_by_the_runs_own_rhythm() -> None:
    desk = Desk()
    rhythm(desk, 5, 2000.0)
    # The first one was found, not seen to come: nothing is learned from the interval that ends with the second.
    assert desk.rule.learned.save_gaps == (2000.0, 2000.0, 2000.0)
    assert not desk.run(3900.0)
    assert desk.run(200.0)
    desk.save(6)
    assert not desk.run(50.0)


def test_never_sooner_than_the_floor() -> None:
    desk = Desk()
    rhythm(desk, 6, 100.0)
    assert not desk.run(850.0)
    assert desk.run(100.0)


def test_before_its_rhythm_is_known_patience_is_three_times_the_floor() -> None:
    desk = Desk()
    assert not desk.run(3000.0)
    assert desk.run(150.0)


@pytest.mark.parametrize(("steps", "overdue"), [(29, False), (30, True)])
@pytest.mark.parametrize("saved", [None, 40])
def test_more_steps_at_risk_than_three_configured_saves_would_have_kept(
    steps: int, overdue: bool, saved: int | None
) -> None:
    desk = Desk()
    desk.policies = POLICIES.model_copy(update={"save_interval_steps": 10})
    if saved is not None:
        desk.save(saved)
    desk.step = (saved or 0) + steps
    assert not desk.run(1000.0), "never sooner than the floor"
    assert desk.run(100.0) is overdue
    assert ("every 10 steps" in desk.told, f"training made {steps} steps" in desk.told) == (overdue, overdue)
    desk.policies = POLICIES
    assert not desk.run(50.0), "without a known interval only time counts"


def test_the_runs_own_rhythm_counts_more_than_what_is_configured() -> None:
    desk = Desk()
    desk.policies = POLICIES.model_copy(update={"save_interval_steps": 10})
    rhythm(desk, 4, 2000.0)
    desk.step = 500
    assert not desk.run(3000.0)


def test_standing_still_saving_ending_or_starting_up_is_not_overdue() -> None:
    for change in ("stepping", "saving", "ending"):
        desk = Desk()
        desk.run(100.0)
        setattr(desk, change, change != "stepping")
        assert not desk.run(20_000.0), change
    desk = Desk()
    desk.stepping = False
    assert not desk.run(20_000.0), "no step yet"


def test_a_run_that_shows_no_step_numbers_and_saves_nothing() -> None:
    """Its program pings podwatch, whatever its layout."""
    desk = Desk()
    desk.stepping = False
    desk.progress = Progress(started_at=0.0)
    overdue = False
    for _ in range(80):
        desk.progress = replace(desk.progress, ping_at=desk.now + 50.0)
        overdue = desk.run(50.0)
    assert overdue
    assert "none since this start" in desk.told


def test_an_old_save_is_no_promise_of_this_start() -> None:
    desk = Desk()
    desk.mark = CheckpointMark(40, 1e9 - 90_000.0)
    desk.rule.learned = replace(desk.rule.learned, save_gaps=(500.0, 500.0))
    assert not desk.run(1400.0)
    assert desk.run(200.0)


def test_a_step_back_teaches_nothing() -> None:
    desk = Desk()
    rhythm(desk, 3, 500.0)
    learned = desk.rule.learned.save_gaps
    desk.save(1)
    desk.run(50.0)
    assert desk.rule.learned.save_gaps == learned
    assert Learned.from_json(desk.rule.learned.to_json()).save_gaps == learned
