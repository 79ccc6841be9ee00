"""Checkpoint overdue: training makes steps, but no save has completed for far longer than usual."""

from dataclasses import dataclass

from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import Snapshot

STEPPING_SECONDS = 1800.0
"""A step this recent, or within three median gaps between steps, shows that training continues. A hang is judged by
another detector."""
LEAST_SAVES = 2
"""Save intervals that must be seen before their median counts."""


@dataclass(frozen=True, slots=True)
class OverdueState:
    """``step`` is the newest complete checkpoint's, ``at`` its time (monotonic seconds). ``whole``: podwatch saw that
    save appear, so the interval to the next one can be learned."""

    step: int | None = None
    at: float | None = None
    whole: bool = False


class CheckpointOverdueDetector:
    name = "checkpoint-overdue"
    kinds = (FindingKind.CHECKPOINT_OVERDUE,)
    needs = ("progress",)
    second: tuple[str, ...] = ()
    survives_restart = False

    def initial(self) -> OverdueState:
        return OverdueState()

    def armed(self, state: OverdueState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: OverdueState, look: Look) -> DetectorResult[OverdueState]:
        state, learned = _follow(state, look.snapshot, look.learned)
        finding = _judge(state, look, learned)
        return DetectorResult(state, learned, (finding,) if finding is not None else ())


DETECTOR = CheckpointOverdueDetector()


def _follow(state: OverdueState, snapshot: Snapshot, learned: Learned) -> tuple[OverdueState, Learned]:
    """A higher step is a new save. A lower one is a step back or a deletion and teaches nothing about the interval."""
    mark = snapshot.checkpoint
    if mark.newest_step is None or mark.newest_step == state.step:
        return state, learned
    age = snapshot.wall - mark.newest_wall if mark.newest_wall is not None else 0.0
    at = snapshot.at - max(0.0, age)
    higher = state.step is not None and mark.newest_step > state.step
    if state.at is not None and higher:
        at = max(state.at, at)
        if state.whole and at > state.at:
            learned = learned.with_save_gap(at - state.at)
    return OverdueState(mark.newest_step, at, higher), learned


def _judge(state: OverdueState, look: Look, learned: Learned) -> Finding | None:
    progress, snapshot, policy = look.progress, look.snapshot, look.policies.resources
    active, first = progress.numbered_at, progress.first_at
    # Never during start-up, for a trainer that makes no steps or is ending, or while a checkpoint is being written.
    if look.trainer is None or not look.trainer.alive or look.ending or active is None or first is None:
        return None
    # A save from before this start does not show that this start saves: count from the first step.
    since = first if state.at is None else max(first, state.at)
    waited = snapshot.at - since
    if waited <= policy.overdue_floor or active <= since:
        return None  # the limit is never lower; skip computing the medians
    recent = max(STEPPING_SECONDS, 3.0 * (learned.median_gap_seconds or 0.0))
    if not snapshot.progress.ok or snapshot.saving or snapshot.at - active > recent:
        return None
    usual = learned.median_save_gap_seconds if len(learned.save_gaps) >= LEAST_SAVES else None
    limit = max(policy.overdue_floor, policy.overdue * (usual or 0.0))
    configured = look.policies.save_interval_steps
    steps = _steps_since(state, snapshot)
    if usual is None and (configured is None or steps is None or steps < policy.overdue * configured):
        # The usual interval is unknown, and no more steps are at risk than a few saves would have kept: wait longer.
        # With the defaults 3 h, which is longer than any sensible save interval.
        limit *= policy.overdue
    if waited <= limit:
        return None
    newest = (
        "none since this start of training" if state.step is None or since == first else f"newest: step {state.step}"
    )
    rhythm = "usual interval unknown" if configured is None else f"configured: every {configured} steps"
    if usual is not None:
        rhythm = f"usually every {usual / 60:.0f} minutes"
    made = "training makes steps" if steps is None else f"training made {steps} step{'' if steps == 1 else 's'}"
    return Finding(
        FindingKind.CHECKPOINT_OVERDUE,
        Severity.WARNING,
        f"no checkpoint was saved for {waited / 60:.0f} minutes while {made} ({rhythm}); {newest}. A failure now loses"
        " these steps",
        since + limit,
        suggestion="check that the training command saves checkpoints (prime-rl: --ckpt --ckpt.interval N) and whether"
        " the last save failed (`podwatch checkpoints`)",
        evidence=(
            Evidence("checkpoints", f"none for {waited:.0f} s (limit {limit:.0f} s)", Agreement.AGREES, waited),
            Evidence("steps", f"newest {snapshot.at - active:.0f} s ago", Agreement.AGREES),
        ),
    )


def _steps_since(state: OverdueState, snapshot: Snapshot) -> int | None:
    """Steps since the newest checkpoint; None if no training step was seen, or one below the newest checkpoint."""
    newest = snapshot.newest_step
    if newest is None or newest.step is None or newest.step < (state.step or 0):
        return None
    return newest.step - (state.step or 0)
