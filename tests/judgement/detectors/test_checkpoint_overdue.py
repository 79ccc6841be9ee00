"""An overdue checkpoint: only while steps are made, never in start-up, by the run's own rhythm."""

from dataclasses import replace

from podwatch.domain.policy import Policies, ResourcePolicy
from podwatch.domain.reading import observed
from podwatch.domain.snapshot import CheckpointMark, Snapshot, Supervision, TrainerSample
from podwatch.judgement.detectors.base import Look
from podwatch.judgement.detectors.checkpoint_overdue import DETECTOR
from podwatch.judgement.learned import Learned
from podwatch.judgement.progress import Progress

POLICIES = Policies(resources=ResourcePolicy(checkpoint_overdue_floor_seconds=1000.0))


class Desk:
    def __init__(self) -> None:
        self.state, self.learned = DETECTOR.initial(), Learned()
        self.now = 0.0
        self.progress = Progress(started_at=0.0)
        self.mark = CheckpointMark()
        self.stepping, self.saving, self.ending = True, False, False
        self.trainer = TrainerSample("s", Supervision.KEEPER, alive=True)

    def run(self, seconds: float) -> bool:
        overdue = False
        end = self.now + seconds
        while self.now < end:
            self.now += 50.0
            if self.stepping:
                first = self.progress.first_at if self.progress.first_at is not None else self.now
                self.progress = replace(self.progress, numbered_at=self.now, first_at=first)
            snapshot = Snapshot(
                at=self.now, wall=1e9 + self.now, checkpoint=self.mark, saving=self.saving,
                progress=observed((), self.now),
            )  # fmt: skip
            look = Look(snapshot, self.progress, self.learned, POLICIES, trainer=self.trainer, ending=self.ending)
            turn = DETECTOR.advance(self.state, look)
            self.state, self.learned = turn.state, turn.learned
            overdue = bool(turn.findings)
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
    assert desk.learned.save_gaps == (2000.0, 2000.0, 2000.0)
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


def test_standing_still_saving_ending_or_starting_up_is_not_overdue() -> None:
    for change in ("stepping", "saving", "ending"):
        desk = Desk()
        desk.run(100.0)
        setattr(desk, change, change != "stepping")
        assert not desk.run(20_000.0), change
    desk = Desk()
    desk.stepping = False
    assert not desk.run(20_000.0), "no step yet"


def test_an_old_save_is_no_promise_of_this_start() -> None:
    desk = Desk()
    desk.mark = CheckpointMark(40, 1e9 - 90_000.0)
    desk.learned = replace(desk.learned, save_gaps=(500.0, 500.0))
    assert not desk.run(1400.0)
    assert desk.run(200.0)


def test_a_step_back_teaches_nothing() -> None:
    desk = Desk()
    rhythm(desk, 3, 500.0)
    learned = desk.learned.save_gaps
    desk.save(1)
    desk.run(50.0)
    assert desk.learned.save_gaps == learned
    assert Learned.from_dict(desk.learned.to_dict()).save_gaps == learned
