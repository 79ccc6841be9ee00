"""The last snapshot, corrected by what podwatch itself has done since.

The sensing loop takes a snapshot every few seconds; recovery stops, starts and attaches between two snapshots. Without
this correction the status contradicts itself: "attached" (from recovery) beside "is not running" (from the snapshot).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from podwatch.domain.finding import DEATHS, Finding, FindingKind
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.snapshot import Reading, SensorState, Snapshot, Supervision, TrainerSample, observed, unobserved


@dataclass(frozen=True, slots=True)
class Watched:
    """The trainer that recovery watches now. ``started_wall``: epoch seconds. ``adopted``: podwatch found it under a
    supervisor, and it may have ended; otherwise podwatch has just started it or attached to it while it lived."""

    start_id: str
    supervision: Supervision
    launcher: ProcessIdentity
    started_wall: float
    adopted: bool = False


def present(snapshot: Snapshot, watched: Watched | None, *, now: float, wall: float) -> tuple[Snapshot, bool]:
    """Return ``snapshot`` with the trainer that is watched now, and whether the trainer in it was replaced.

    ``watched`` None: podwatch watches no trainer, so a living one in the snapshot was stopped since. ``now``
    (monotonic) and ``wall`` (epoch seconds) are the same moment.
    """
    reading = snapshot.trainer
    sample = reading.value if reading.ok else None
    if watched is None:
        if sample is None or not sample.alive:
            return snapshot, False
        stopped = replace(sample, alive=False, descendants=())
        return replace(snapshot, trainer=observed(stopped, now)), True
    if sample is not None and sample.start_id == watched.start_id:
        return snapshot, False
    if sample is None and reading.state is not SensorState.PENDING:
        return snapshot, False  # it cannot be observed, and the status shows that
    if watched.adopted:
        unknown: Reading[TrainerSample] = unobserved(SensorState.PENDING, now, "not observed yet")
        return replace(snapshot, trainer=unknown), True
    starting = TrainerSample(
        start_id=watched.start_id,
        supervision=watched.supervision,
        alive=True,
        started_at=now - max(0.0, wall - watched.started_wall),
        launcher=watched.launcher,
    )
    return replace(snapshot, trainer=observed(starting, now)), True


def of_a_run_that_ends(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """``findings`` without deaths and log rules: the run was stopped or finished since, so its end is expected."""
    return tuple(f for f in findings if f.kind not in DEATHS and f.kind is not FindingKind.LOG_RULE)


def of_this_trainer(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """``findings`` without deaths: they belong to a trainer that is no longer watched."""
    return tuple(f for f in findings if f.kind not in DEATHS)
