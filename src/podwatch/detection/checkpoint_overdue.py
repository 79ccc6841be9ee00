"""Checkpoint overdue: training makes steps, but no save has completed for far longer than usual, or none ever.

Pings count as steps, so that a run of any layout that saves nothing is found.
"""

from collections.abc import Iterator

from podwatch.detection.observe import Turn
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, counted

STEPPING_SECONDS = 1800.0
"""A step this recent, or within three median gaps between steps, shows that training continues. A hang is judged by
another rule."""
LEAST_SAVES = 2
"""Save intervals that must be seen before their median counts."""


def checkpoint_overdue(turn: Turn) -> Iterator[Finding]:
    """Never during start-up, for a trainer that makes no steps or is ending, or while a checkpoint is being written."""
    progress, saves, policy = turn.start.progress, turn.start.saves, turn.policies.resources
    active, first = progress.newest_at, progress.first_at
    if first is None and progress.ping_at is not None:
        first = progress.started_at
    if active is None or first is None:
        return
    # A save from before this start does not show that this start saves: count from the first step.
    since = first if saves.at is None else max(first, saves.at)
    waited = turn.at - since
    if waited <= policy.overdue_floor or active <= since:
        return  # the limit is never lower
    recent = max(STEPPING_SECONDS, 3.0 * (turn.learned.median_gap_seconds or 0.0))
    if turn.snapshot.progress.ok and not turn.snapshot.saving and turn.at - active <= recent:
        limit = _limit(turn)
        if waited > limit:
            yield _finding(turn, since, waited, limit, turn.at - active)


def _usual(turn: Turn) -> float | None:
    return turn.learned.median_save_gap_seconds if len(turn.learned.save_gaps) >= LEAST_SAVES else None


def _limit(turn: Turn) -> float:
    policy, usual, configured = turn.policies.resources, _usual(turn), turn.policies.save_interval_steps
    steps = _steps_since(turn)
    limit = max(policy.overdue_floor, policy.overdue * (usual or 0.0))
    if usual is None and (configured is None or steps is None or steps < policy.overdue * configured):
        # The usual interval is unknown, and no more steps are at risk than a few saves would have kept: wait longer.
        # With the defaults 3 h, which is longer than any sensible save interval.
        limit *= policy.overdue
    return limit


def _finding(turn: Turn, since: float, waited: float, limit: float, quiet: float) -> Finding:
    saves, usual, configured = turn.start.saves, _usual(turn), turn.policies.save_interval_steps
    steps = _steps_since(turn)
    none = saves.step is None or (saves.at is not None and since > saves.at)
    newest = "none since this start of training" if none else f"newest: step {saves.step}"
    pace = "usual interval unknown" if configured is None else f"configured: every {configured} steps"
    pace = pace if usual is None else f"usually every {usual / 60:.0f} minutes"
    made = "training makes steps" if steps is None else f"training made {counted(steps, 'step')}"
    return Finding(
        FindingKind.CHECKPOINT_OVERDUE,
        Severity.WARNING,
        f"no checkpoint was saved for {waited / 60:.0f} minutes while {made} ({pace}); {newest}. A failure now loses"
        " these steps",
        since + limit,
        suggestion="check that the training command saves checkpoints (prime-rl: --ckpt --ckpt.interval N) and whether"
        " the last save failed (`podwatch checkpoints`)",
        evidence=(
            Evidence("checkpoints", f"none for {waited:.0f} s (limit {limit:.0f} s)", Agreement.AGREES, waited),
            Evidence("steps", f"newest {quiet:.0f} s ago", Agreement.AGREES),
        ),
    )


def _steps_since(turn: Turn) -> int | None:
    """Steps since the newest checkpoint; None if no training step was seen, or one below the newest checkpoint."""
    newest, saved = turn.snapshot.newest_step, turn.start.saves.step or 0
    if newest is None or newest.step is None or newest.step < saved:
        return None
    return newest.step - saved
