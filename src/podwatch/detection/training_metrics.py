"""Unhealthy training, judged by its own figures (loss, entropy, KL, gradient norm, reward) at each step. Findings only;
with ``[training] stop`` podwatch stops training cleanly after the next save.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, pvariance

from podwatch.config.settings import TrainingHealthSettings
from podwatch.detection.observe import Turn
from podwatch.detection.start import Figures, Streak
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import TrainingMetrics

NAMES = ("reward", "entropy", "kl", "grad_norm", "loss")
STEPS = 5
"""Unhealthy steps in a row before a warning: a single odd batch does not count."""
REWARDS_LISTED = 500
"""The longest plateau that can be configured, in steps."""
PLATEAU_STOP = 1.5
"""With ``[training] stop``, training ends when the reward has been flat for this many times ``plateau_steps``."""
PLATEAU_CHANGE = 0.01
"""A smaller relative change over the window is none."""
FALL = 0.1
"""A reward that lost this part of its size from the older to the newer half of the window has fallen, if the loss is
also more than ``FALL_SIGMA`` standard errors: a few hard batches in a row are no fall."""
FALL_SIGMA = 4.0
TWO_SIGMA = 2.0
"""Standard errors within which two means count as equal: pure noise looks like a trend once in 20 windows."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Range:
    """A figure is unhealthy outside of ``lowest`` to ``highest``, or if it is not a number."""

    figure: str
    means: str
    fix: str
    lowest: float = -math.inf
    highest: float = math.inf

    def broken_by(self, value: float) -> bool:
        return math.isnan(value) or not self.lowest <= value <= self.highest


def ranges(policy: TrainingHealthSettings) -> dict[str, Range]:
    """The rows that are configured; a loss that is not a finite number always counts."""
    low, kl, norm, most = policy.entropy_below, policy.kl_above, policy.grad_norm_above, sys.float_info.max
    rows = {
        "loss": Range(
            "loss", "the loss is not a finite number, so training learns nothing",
            "restart from an earlier checkpoint with a lower learning rate", lowest=-most, highest=most,
        ),
        "entropy": None if low is None else Range(
            "entropy", f"the entropy is below {low:g}: the policy no longer explores",
            "restart from a checkpoint before the fall with a higher temperature or an entropy bonus", lowest=low,
        ),
        "kl": None if kl is None else Range(
            "kl", f"KL is above {kl:g}: the policy is far from the policy that generates its data",
            "lower the learning rate or the number of off-policy steps; with prime-rl, compare trainer and engine",
            highest=kl,
        ),
        "grad-norm": None if norm is None else Range(
            "grad_norm", f"the gradient norm is above {norm:g}",
            "lower the learning rate or clip the gradient more strictly", highest=norm,
        ),
    }  # fmt: skip
    return {name: row for name, row in rows.items() if row is not None}


def training_health(turn: Turn) -> Iterator[Finding]:
    """Each figure that was unhealthy for enough steps, and a reward that no longer changes."""
    reading, policy, start = turn.snapshot.training, turn.policies.training, turn.start
    if reading.ok and reading.value is not None and reading.value != start.figures.taken:
        for metrics in reading.value:
            start.figures = _take(start.figures, metrics, policy)
        start.figures = replace(start.figures, taken=reading.value)
    if turn.wanted:
        stop = policy.stop and not turn.ending and turn.trainer.alive
        yield from _findings(start.figures, policy, turn.at, stop)


def _take(figures: Figures, metrics: TrainingMetrics, policy: TrainingHealthSettings) -> Figures:
    """Take the figures of one step, each once."""
    steps, streaks = dict(figures.steps), dict(figures.streaks)
    fresh = {name: v for name, v in metrics.values if name in NAMES and metrics.step > steps.get(name, -1)}
    if not fresh:
        return figures
    steps.update(dict.fromkeys(fresh, metrics.step))
    for name, row in ranges(policy).items():
        if row.figure not in fresh:
            continue
        value, old = fresh[row.figure], streaks.pop(name, None) or Streak(0, metrics.at, 0.0)
        if row.broken_by(value):
            streaks[name] = Streak(old.count + 1, old.since, value)
    figures = replace(figures, streaks=streaks, steps=steps)
    reward = fresh.get("reward", math.nan)
    return _take_reward(figures, reward, metrics.at, policy.plateau_steps) if math.isfinite(reward) else figures


def _take_reward(figures: Figures, reward: float, at: float, length: int) -> Figures:
    length = min(length, REWARDS_LISTED)
    if not length:
        return replace(figures, rewards=(), flat_since=None, flat_steps=0, falling_since=None)
    rewards = (*figures.rewards, reward)[-length:]
    since, steps = figures.flat_since, figures.flat_steps + (figures.flat_since is not None)
    if len(rewards) >= length and is_flat(rewards, PLATEAU_CHANGE):
        since, steps = (at, len(rewards)) if since is None else (since, steps)
    elif since is not None and not is_flat(rewards, 2 * PLATEAU_CHANGE):
        since, steps = None, 0
    falling = figures.falling_since
    if len(rewards) >= length and has_fallen(rewards, FALL, FALL_SIGMA):
        falling = at if falling is None else falling
    elif not has_fallen(rewards, FALL / 2, 0.0):
        falling = None
    return replace(figures, rewards=rewards, flat_since=since, flat_steps=steps, falling_since=falling)


def is_flat(rewards: tuple[float, ...], change: float) -> bool:
    """Whether the means of the older and the newer half differ by no more than ``change`` times the largest reward, and
    by no more than two standard errors. Halves instead of ends, because single rewards are noisy. A slow, steady rise
    or fall is no plateau."""
    if len(rewards) < 2:
        return False
    difference, scatter, scale = _halves(rewards)
    return abs(difference) <= change * scale and abs(difference) <= TWO_SIGMA * scatter + ROUNDING * scale


def has_fallen(rewards: tuple[float, ...], part: float, sigmas: float) -> bool:
    """Whether the mean of the newer half is below that of the older one by more than ``part`` of the largest reward,
    and by more than ``sigmas`` standard errors."""
    if len(rewards) < 2:
        return False
    difference, scatter, scale = _halves(rewards)
    return -difference > part * scale and -difference > sigmas * scatter


def _halves(rewards: tuple[float, ...]) -> tuple[float, float, float]:
    """Mean of the newer half minus that of the older one, its standard error, and the largest reward."""
    half = len(rewards) // 2
    older, newer = rewards[:half], rewards[-half:]
    scatter = math.sqrt((pvariance(newer) + pvariance(older)) / half)
    return fmean(newer) - fmean(older), scatter, max(abs(r) for r in rewards)


def _findings(figures: Figures, policy: TrainingHealthSettings, at: float, stop: bool) -> Iterator[Finding]:
    for name, row in ranges(policy).items() if figures.streaks else ():
        streak = figures.streaks.get(name)
        if streak is not None and streak.count >= STEPS:
            summary = f"{row.means}; {row.figure} = {streak.value:.4g}, {streak.count} steps in a row"
            yield _finding(name, summary, row.fix, streak.since, at, f"{streak.value:.4g}", stop)
    if figures.falling_since is not None and figures.rewards:
        newest, steps = fmean(figures.rewards[len(figures.rewards) // 2 :]), len(figures.rewards)
        summary = f"the reward has fallen over the last {steps} steps (mean of the newer half {newest:.4g})"
        fix = "compare samples with earlier ones; restart from a checkpoint before the fall with a lower learning rate"
        yield _finding("falling", summary, fix, figures.falling_since, at, f"{newest:.4g}", stop)
    if figures.flat_since is not None and figures.rewards:
        mean = fmean(figures.rewards)
        summary = f"the reward has not changed for {figures.flat_steps} steps (mean {mean:.4g})"
        stop = stop and figures.flat_steps >= PLATEAU_STOP * policy.plateau_steps
        fix = "if these tasks are learned, use harder tasks or stop training"
        yield _finding("plateau", summary, fix, figures.flat_since, at, f"{mean:.4g}", stop)


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
