"""Builds the facts of each turn. Never blocks."""

from podwatch.app.components import Components
from podwatch.detection.learned import Learned
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.facts import Facts
from podwatch.domain.run import Mutation
from podwatch.domain.snapshot import CheckpointMark, Snapshot


def observe(parts: Components, learned: Learned) -> Facts:
    """The facts with the newest readings of all sensors. On the event loop only."""
    catalogue = parts.checkpoints.catalogue
    pod = parts.sensing.look(
        parts.run.clock,
        saving=catalogue.saving,
        desired=parts.recovery.context.judged,
        checkpoint=_mark(catalogue.sets),
    )
    return as_of_now(parts, pod, learned)


def as_of_now(parts: Components, pod: Snapshot, learned: Learned) -> Facts:
    """The facts of this moment with the readings of an earlier turn, ``pod``. From any thread: reads frozen values."""
    checkpoints, run, state = parts.checkpoints, parts.run.file.current, parts.recovery.state
    return Facts(
        pod=pod,
        run=run,
        checkpoints=checkpoints.catalogue.sets,
        unreadable=checkpoints.rescans.blind or checkpoints.catalogue.problem,
        store=None if parts.backup is None else parts.backup.status(),
        pins={**checkpoints.rescans.named, **run.pins},
        resume_sources=state.protect,
        reading=frozenset(step for reader in checkpoints.readers for step in reader.reading),
        keep_all=_keep_all(parts),
        save_seconds=learned.median_save_seconds or 0.0,
    )


def _keep_all(parts: Components) -> str:
    """Why podwatch may delete no checkpoint; empty if it may."""
    if blocked := parts.run.guard.blocked_reason(Mutation.DELETE):
        return blocked
    if parts.recovery.state.hold_deletions:
        return "the last resume could not be confirmed: nothing is deleted before the next save"
    return "training is being stopped or started" if parts.recovery.state.acting else ""


def _mark(sets: tuple[CheckpointSet, ...]) -> CheckpointMark:
    newest = newest_complete(sets)
    return CheckpointMark() if newest is None else CheckpointMark(newest.step, newest.changed_wall)
