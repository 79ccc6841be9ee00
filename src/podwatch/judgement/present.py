"""The last look at the pod, corrected by what podwatch itself has done since. Pure.

The sensing loop looks every few seconds; recovery stops, starts and attaches between two looks. A status that takes the
trainer from the older look and the headline from recovery contradicts itself: "attached" beside "is not running".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from podwatch.domain.finding import Finding, FindingKind
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.reading import Reading, SensorState, observed, unobserved
from podwatch.domain.snapshot import Snapshot, Supervision, TrainerSample
from podwatch.judgement.one_failure import DEATHS


@dataclass(frozen=True, slots=True)
class Watched:
    """The trainer that recovery watches now. ``started_wall`` in epoch seconds. ``adopted``: it was found under a
    keeper and may have ended; else podwatch has just started it, or attached to it, and it lived then."""

    start_id: str
    supervision: Supervision
    launcher: ProcessIdentity
    started_wall: float
    adopted: bool = False


def present(snapshot: Snapshot, watched: Watched | None, *, now: float, wall: float) -> tuple[Snapshot, bool]:
    """``snapshot`` with the trainer that is watched now, and whether the trainer in it was another one.

    ``watched`` None: podwatch watches no trainer, so one that still lives in the snapshot was stopped since. ``now`` is
    monotonic, ``wall`` epoch seconds of the same moment.
    """
    reading = snapshot.trainer
    sample = reading.value if reading.ok else None
    if watched is None:
        if sample is None or not sample.alive:
            return snapshot, False
        stopped = replace(sample, alive=False, descendants=(), required_exits=())
        return replace(snapshot, trainer=observed(stopped, now)), True
    if sample is not None and sample.start_id == watched.start_id:
        return snapshot, False
    if sample is None and reading.state is not SensorState.PENDING:
        return snapshot, False  # it cannot be observed, and that is what is shown
    if watched.adopted:
        unknown: Reading[TrainerSample] = unobserved(SensorState.PENDING, now, "not observed yet")
        return replace(snapshot, trainer=unknown), True
    begun = TrainerSample(
        start_id=watched.start_id,
        supervision=watched.supervision,
        alive=True,
        started_at=now - max(0.0, wall - watched.started_wall),
        launcher=watched.launcher,
    )
    return replace(snapshot, trainer=observed(begun, now)), True


def of_a_run_that_ends(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Without the deaths and what the logs said of them: a run that was stopped or has finished since may end."""
    return tuple(f for f in findings if f.kind not in DEATHS and f.kind is not FindingKind.LOG_RULE)


def of_this_trainer(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Without the deaths: they are of a trainer that is watched no more."""
    return tuple(f for f in findings if f.kind not in DEATHS)
