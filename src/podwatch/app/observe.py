"""The one place that puts together what podwatch knows: new facts at each turn of the loop, and those of this moment.

Recovery extends the facts of the turn by what it searched and asked (recovery/observe.py).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from podwatch.app.sensing import Detection, Sensors
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.facts import Facts
from podwatch.domain.run import Mutation
from podwatch.domain.snapshot import (
    CheckpointMark,
    Reading,
    SensorState,
    Snapshot,
    TrainerSample,
    observed,
    unobserved,
)
from podwatch.recovery.recovery import Recovery
from podwatch.recovery.state import RecoveryState

if TYPE_CHECKING:
    from podwatch.app.backup.backup import Backup
    from podwatch.app.build import Checkpoints, Run


@dataclass(frozen=True, slots=True)
class Observation:
    """Builds ``Facts``. Never blocks."""

    run: "Run"
    checkpoints: "Checkpoints"
    sensors: Sensors
    detection: Detection
    recovery: Recovery
    backup: "Backup | None"

    def read(self) -> Facts:
        """The facts with the newest readings of all sensors. On the event loop only."""
        clock, catalogue = self.run.clock, self.checkpoints.catalogue
        newest = newest_complete(catalogue.sets)
        mark = CheckpointMark() if newest is None else CheckpointMark(newest.step, newest.changed_wall)
        desired = self.recovery.context.judged
        return self.now(self.sensors.snapshot(clock, saving=catalogue.saving, desired=desired, checkpoint=mark))

    def now(self, pod: Snapshot | None = None) -> Facts:
        """The facts of this moment with the readings ``pod``, by default those of the last turn. From any thread: reads
        frozen values."""
        checkpoints, run, state = self.checkpoints, self.run.file.current, self.recovery.state
        return Facts(
            pod=self.detection.snapshot if pod is None else pod,
            run=run,
            checkpoints=checkpoints.catalogue.sets,
            unreadable=checkpoints.rescans.blind or checkpoints.catalogue.problem,
            store=None if self.backup is None else self.backup.status(),
            pins={**checkpoints.rescans.named, **run.pins},
            resume_sources=state.protect,
            reading=frozenset(step for reader in checkpoints.readers for step in reader.reading),
            keep_all=self._keep_all(state),
            save_seconds=self.detection.state.learned.median_save_seconds or 0.0,
        )

    def corrected(self) -> tuple[Facts, bool]:
        """The facts of this moment, corrected by what recovery has done since the last turn, and whether the trainer in
        them was replaced."""
        clock = self.run.clock
        pod, changed = corrected(self.detection.snapshot, self.recovery.state, now=clock.monotonic(), wall=clock.wall())
        return self.now(pod), changed

    def _keep_all(self, state: RecoveryState) -> str:
        """Why podwatch may delete no checkpoint; empty if it may."""
        if blocked := self.run.guard.blocked_reason(Mutation.DELETE):
            return blocked
        if state.hold_deletions:
            return "the last resume could not be confirmed: nothing is deleted before the next save"
        return "training is being stopped or started" if state.acting else ""


def corrected(snapshot: Snapshot, state: RecoveryState, *, now: float, wall: float) -> tuple[Snapshot, bool]:
    """Return ``snapshot`` with the trainer that recovery watches now, and whether the trainer in it was replaced.

    The loop takes a snapshot every few seconds; recovery stops, starts and attaches between two of them. Without this
    the status contradicts itself: "attached" (from recovery) and "is not running" (from the snapshot). ``now``
    (monotonic) and ``wall`` (epoch seconds) are the same moment.
    """
    reading, watched = snapshot.trainer, state.handle
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
    if state.adopted:  # found under a supervisor, it may have ended
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
