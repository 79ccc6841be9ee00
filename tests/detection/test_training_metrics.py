"""Sick training: rows in a row, each figure once, and the stop that its owner may ask for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.config.settings import Policies, TrainingHealthSettings
from podwatch.detection import training_metrics
from podwatch.domain.finding import Finding, Verdict
from podwatch.domain.snapshot import Snapshot, Supervision, TrainerSample, TrainingMetrics, observed
from tests.drivers.detection import RuleAlone

FINE = {"reward": 0.5, "entropy": 0.4, "kl": 0.01, "grad_norm": 1.0, "loss": 0.1}
SICK = [("entropy", 0.01, "entropy"), ("kl", 0.9, "kl"), ("grad_norm", 12.0, "grad-norm"), ("loss", math.nan, "loss")]


class Desk:
    def __init__(self, policy: TrainingHealthSettings | None = None) -> None:
        self.policies = Policies(training=policy or TrainingHealthSettings())
        self.rule = RuleAlone("training-health")
        self.step = 0
        self.window: list[TrainingMetrics] = []
        self.wanted, self.ending = True, False
        self.findings: dict[str, Finding] = {}

    def see(self, steps: int = 1, /, **values: float) -> set[str]:
        for _ in range(steps):
            self.step += 1
            row = TrainingMetrics(self.step, float(self.step), tuple(sorted((FINE | values).items())))
            self.window = [*self.window, row][-8:]
            self.turn()
        return set(self.findings)

    def turn(self) -> None:
        at = float(self.step)
        snapshot = Snapshot(at=at, wall=at, training=observed(tuple(self.window), at))
        trainer = TrainerSample("s", Supervision.SUPERVISED, alive=True)
        found = self.rule.ask(snapshot, self.policies, trainer=trainer, wanted=self.wanted, ending=self.ending)
        self.findings = {f.subject: f for f in found}


def moving(desk: Desk, steps: int, **values: float) -> set[str]:
    for _ in range(steps):
        desk.see(1, reward=desk.step / 100, **values)
    return set(desk.findings)


def test_healthy_training_is_not_worth_a_word() -> None:
    assert moving(Desk(), 300) == set()


@pytest.mark.parametrize(("figure", "value", "rule"), SICK)
def test_so_many_steps_in_a_row(figure: str, value: float, rule: str) -> None:
    desk = Desk()
    assert moving(desk, 4, **{figure: value}) == set()
    moving(desk, 1)
    assert moving(desk, 4, **{figure: value}) == set(), "a sound step begins anew"
    assert moving(desk, 1, **{figure: value}) == {rule}
    finding = desk.findings[rule]
    assert (finding.verdict, finding.confirmed) == (Verdict.NONE, False)
    assert finding.since == 6.0
    assert moving(desk, 1) == set()


def test_a_step_counts_once_however_often_it_is_read() -> None:
    desk = Desk()
    moving(desk, 3, kl=0.9)
    for _ in range(20):
        desk.turn()
    assert desk.findings == {}


def test_rows_that_come_apart_are_one_step() -> None:
    """The orchestrator's reward is two steps ahead; the trainer's figures of those steps come later."""
    desk = Desk()
    for step in range(1, 8):
        rows = []
        for number in range(max(1, step - 3), step + 1):
            kl = (("kl", 0.9),) if number <= step - 2 else ()
            rows.append(TrainingMetrics(number, float(number), (("reward", float(number)), *kl)))
        desk.step, desk.window = step, rows
        desk.turn()
        assert set(desk.findings) == ({"kl"} if step - 2 >= 5 else set())


def test_a_flat_reward_is_a_plateau_and_a_moving_one_is_not() -> None:
    desk = Desk(TrainingHealthSettings(plateau_steps=20))
    assert moving(desk, 40) == set()
    assert desk.see(10, reward=0.4) == set()
    assert desk.see(10, reward=0.4) == {"plateau"}
    assert "the reward has not changed for 2" in desk.findings["plateau"].summary
    assert moving(desk, 15) == set()
    assert Desk(TrainingHealthSettings(plateau_steps=0)).see(100, reward=0.4) == set()


def noisy(step: int, trend: float) -> float:
    """A reward around 1 with a scatter of 5 %, and a trend per step. Deterministic."""
    return 1.0 + 0.05 * math.sin(12.9898 * step) * math.cos(78.233 * step) + trend * step


@pytest.mark.parametrize(("trend", "plateau"), [(0.0, True), (-0.0002, False), (0.0002, False)])
def test_a_reward_that_falls_or_rises_slowly_is_no_plateau(
    trend: float, plateau: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change over the window is within the limit, and yet it is a trend: two percent in a hundred steps."""
    monkeypatch.setattr(training_metrics, "PLATEAU_CHANGE", 0.05)
    desk = Desk()
    for _ in range(400):
        desk.see(1, reward=noisy(desk.step, trend))
    assert ("plateau" in desk.findings) is plateau


def test_a_reward_that_falls_is_told_until_it_has_recovered() -> None:
    desk = Desk(TrainingHealthSettings(plateau_steps=20))
    for _ in range(40):
        assert desk.see(1, reward=noisy(desk.step, 0.0)) <= {"plateau"}
    for _ in range(14):
        desk.see(1, reward=0.5 * noisy(desk.step, 0.0))
    assert "falling" in desk.findings
    assert desk.findings["falling"].verdict is Verdict.NONE
    for _ in range(40):
        desk.see(1, reward=noisy(desk.step, 0.0))
    assert "falling" not in desk.findings


def test_a_few_hard_batches_are_no_fall() -> None:
    desk = Desk(TrainingHealthSettings(plateau_steps=20))
    for number in range(60):
        desk.see(1, reward=0.0 if number in (30, 33) else noisy(desk.step, 0.0))
        assert "falling" not in desk.findings


def test_a_plateau_warns_at_200_steps_and_stops_training_at_300() -> None:
    desk = Desk(TrainingHealthSettings(stop=True))
    assert desk.see(199, reward=0.4) == set()
    assert desk.see(1, reward=0.4) == {"plateau"}
    assert desk.findings["plateau"].verdict is Verdict.NONE
    desk.see(99, reward=0.4)
    assert desk.findings["plateau"].verdict is Verdict.NONE
    desk.see(1, reward=0.4)
    assert "300 steps" in desk.findings["plateau"].summary
    assert desk.findings["plateau"].verdict is Verdict.STOP
    assert Desk(TrainingHealthSettings(stop=True)).see(250, reward=0.4) == {"plateau"}


def test_rules_that_are_off() -> None:
    policy = TrainingHealthSettings(plateau_steps=0, entropy_below=None, kl_above=None, grad_norm_above=None)
    assert Desk(policy).see(20, entropy=0.0, kl=9.0, grad_norm=99.0) == set()
    assert Desk(policy).see(20, loss=math.inf) == {"loss"}


def test_the_owner_may_ask_for_a_stop() -> None:
    desk = Desk(TrainingHealthSettings(stop=True))
    assert moving(desk, 5, kl=0.9) == {"kl"}
    assert (desk.findings["kl"].verdict, desk.findings["kl"].confirmed) == (Verdict.STOP, True)
    desk.ending = True
    desk.turn()
    assert desk.findings["kl"].verdict is Verdict.NONE
    desk.ending, desk.wanted = False, False
    desk.turn()
    assert "kl" not in desk.findings, "a training that is stopped needs no warning"


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(sorted(FINE)), st.floats(allow_nan=True)), max_size=60))
def test_total_over_any_rows(rows: list[tuple[int, str, float]]) -> None:
    desk = Desk(TrainingHealthSettings(stop=True, plateau_steps=3))
    for step, name, value in rows:
        desk.window = [TrainingMetrics(step, 0.0, ((name, value),))]
        desk.turn()
        stops = {name: f.verdict is Verdict.STOP for name, f in desk.findings.items()}
        assert all(stop for name, stop in stops.items() if name != "plateau"), "a plateau stops later"
