"""Unhealthy training, judged by its own figures (loss, entropy, KL, gradient norm, reward) at each step. Findings only;
with ``[training] stop`` podwatch stops training cleanly after the next save.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, pvariance

from podwatch.config.settings import TrainingHealthSettings
from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import TrainingMetrics

NAMES = ("reward", "entropy", "kl", "grad_norm", "loss")
REWARDS_KEPT = 500
"""The longest plateau that can be configured, in steps."""
PLATEAU_CHANGE = 0.01
"""A smaller relative change over the window is none."""
TWO_SIGMA = 2.0
"""Standard errors within which two means count as equal: pure noise looks like a trend once in 20 windows."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Streak:
    """Consecutive unhealthy steps: how many, since when (monotonic), the newest value, and whether a finding was
    raised (``told``)."""

    count: int = 0
    since: float = 0.0
    value: float = 0.0
    told: bool = False


@dataclass(frozen=True, slots=True)
class TrainingHealthState:
    """``streaks`` by rule name. ``steps``: the newest step taken of each figure, because the figures of one step can
    arrive in separate rows."""

    streaks: tuple[tuple[str, Streak], ...] = ()
    steps: tuple[tuple[str, int], ...] = ()
    rewards: tuple[float, ...] = ()
    flat_since: float | None = None
    flat_steps: int = 0
    """Steps without improvement: the window plus every step since it was first flat."""
    taken: tuple[TrainingMetrics, ...] = ()


class TrainingHealthDetector:
    name = "training-health"
    kinds = (FindingKind.TRAINING_HEALTH,)
    needs = ("training",)
    second: tuple[str, ...] = ()
    survives_restart = False

    def initial(self) -> TrainingHealthState:
        return TrainingHealthState()

    def armed(self, state: TrainingHealthState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: TrainingHealthState, look: Look) -> DetectorResult[TrainingHealthState]:
        reading, policy = look.snapshot.training, look.policies.training
        if reading.ok and reading.value is not None and reading.value != state.taken:
            state = replace(state, taken=reading.value)
            for metrics in reading.value:
                state = _take(state, metrics, policy)
        if not look.wanted or (not state.streaks and state.flat_since is None):
            return DetectorResult(state, look.learned)
        stop = policy.stop and look.wanted and not look.ending and look.trainer is not None and look.trainer.alive
        return DetectorResult(state, look.learned, tuple(_findings(state, policy, look.snapshot.at, stop)))


DETECTOR = TrainingHealthDetector()


@dataclass(frozen=True, slots=True)
class _Rule:
    """The figure is unhealthy outside of ``lowest`` to ``highest``, or if it is not a number."""

    figure: str
    means: str
    fix: str
    lowest: float = -math.inf
    highest: float = math.inf

    def broken_by(self, value: float) -> bool:
        return math.isnan(value) or not self.lowest <= value <= self.highest


def _rules(policy: TrainingHealthSettings) -> dict[str, _Rule]:
    rules = {
        "loss": _Rule(
            "loss", "the loss is not a finite number, so training learns nothing",
            "restart from an earlier checkpoint with a lower learning rate",
            lowest=-sys.float_info.max, highest=sys.float_info.max,
        ),
    }  # fmt: skip
    low, kl, norm = policy.entropy_below, policy.kl_above, policy.grad_norm_above
    if low is not None:
        rules["entropy"] = _Rule(
            "entropy", f"the entropy is below {low:g}: the policy no longer explores",
            "restart from a checkpoint before the fall with a higher temperature or an entropy bonus", lowest=low,
        )  # fmt: skip
    if kl is not None:
        rules["kl"] = _Rule(
            "kl", f"KL is above {kl:g}: the policy is far from the policy that generates its data",
            "lower the learning rate or the number of off-policy steps; with prime-rl, compare trainer and engine",
            highest=kl,
        )  # fmt: skip
    if norm is not None:
        rules["grad-norm"] = _Rule(
            "grad_norm", f"the gradient norm is above {norm:g}",
            "lower the learning rate or clip the gradient more strictly", highest=norm,
        )  # fmt: skip
    return rules


def _take(state: TrainingHealthState, metrics: TrainingMetrics, policy: TrainingHealthSettings) -> TrainingHealthState:
    """Take the figures of one step, each once."""
    steps, streaks = dict(state.steps), dict(state.streaks)
    values = dict(metrics.values)
    fresh = {name: v for name, v in values.items() if name in NAMES and metrics.step > steps.get(name, -1)}
    if not fresh:
        return state
    steps.update(dict.fromkeys(fresh, metrics.step))
    for name, rule in _rules(policy).items():
        if rule.figure not in fresh:
            continue
        value, old = fresh[rule.figure], streaks.get(name, Streak())
        if not rule.broken_by(value):
            streaks.pop(name, None)
            continue
        since = old.since if old.count else metrics.at
        streaks[name] = Streak(old.count + 1, since, value, old.told or old.count + 1 >= policy.steps)
    rewards, flat, flat_steps = state.rewards, state.flat_since, state.flat_steps
    if "reward" in fresh and math.isfinite(fresh["reward"]):
        rewards = (*rewards, fresh["reward"])[-min(policy.plateau_steps, REWARDS_KEPT) :]
        flat_steps += flat is not None
        if not policy.plateau_steps:
            rewards, flat = (), None
        elif len(rewards) >= min(policy.plateau_steps, REWARDS_KEPT) and _flat(rewards, PLATEAU_CHANGE):
            if flat is None:
                flat, flat_steps = metrics.at, len(rewards)
        elif flat is not None and not _flat(rewards, 2 * PLATEAU_CHANGE):
            flat, flat_steps = None, 0
    return replace(
        state,
        streaks=tuple(sorted(streaks.items())),
        steps=tuple(sorted(steps.items())),
        rewards=rewards,
        flat_since=flat,
        flat_steps=flat_steps,
    )


def _flat(rewards: tuple[float, ...], change: float) -> bool:
    """Whether the means of the older and the newer half differ by no more than ``change`` times the largest reward, and
    by no more than two standard errors. Halves instead of ends, because single rewards are noisy. A slow, steady rise
    or fall is no plateau."""
    half = len(rewards) // 2
    if not half:
        return False
    older, newer = rewards[:half], rewards[-half:]
    scale = max(abs(r) for r in rewards)
    difference = abs(fmean(newer) - fmean(older))
    scatter = math.sqrt((pvariance(newer) + pvariance(older)) / half)
    return difference <= change * scale and difference <= TWO_SIGMA * scatter + ROUNDING * scale


def _findings(state: TrainingHealthState, policy: TrainingHealthSettings, at: float, stop: bool) -> Iterator[Finding]:
    streaks = dict(state.streaks)
    for name, rule in _rules(policy).items():
        streak = streaks.get(name)
        if streak is not None and streak.told:
            summary = f"{rule.means}; {rule.figure} = {streak.value:.4g}, {streak.count} steps in a row"
            yield _finding(name, summary, rule.fix, streak.since, at, f"{streak.value:.4g}", stop)
    if state.flat_since is not None and state.rewards:
        mean = sum(state.rewards) / len(state.rewards)
        summary = f"the reward has not changed for {state.flat_steps} steps (mean {mean:.4g})"
        stop = stop and state.flat_steps >= policy.plateau_stop_steps
        fix = "if these tasks are learned, use harder tasks or stop training"
        yield _finding("plateau", summary, fix, state.flat_since, at, f"{mean:.4g}", stop)


def _finding(rule: str, summary: str, fix: str, since: float, at: float, value: str, stop: bool) -> Finding:
    return Finding(
        FindingKind.TRAINING_HEALTH,
        Severity.WARNING,
        summary,
        since,
        suggestion=f"podwatch stops training after its next save ([training] stop); {fix}" if stop else fix,
        verdict=Verdict.STOP if stop else Verdict.NONE,
        confirmed=stop,
        evidence=(Evidence(rule, value, Agreement.AGREES, max(0.0, at - since)),),
        subject=rule,
    )
