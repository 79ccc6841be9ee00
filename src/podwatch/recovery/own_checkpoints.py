"""Which checkpoints on this pod belong to the run; ``policy.resume.Ownership`` decides."""

from podwatch.checkpoints.records import CheckpointRecords
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.process import ProcessIdentity
from podwatch.policy.resume import Ownership
from podwatch.recovery.run_file import RunFile
from podwatch.system.clock import Clock
from podwatch.trainer.trainer_handle import started_wall


class OwnCheckpoints:
    """For the event loop; nothing blocks."""

    def __init__(self, file: RunFile, clock: Clock, records: CheckpointRecords) -> None:
        self._file, self._clock, self._records = file, clock, records
        self.launched: ProcessIdentity | None = None
        """The launcher of the last start that podwatch watched."""

    @property
    def fetched(self) -> frozenset[tuple[int, str]]:
        """(step, save_id) of every checkpoint that came from this run's store."""
        return self._records.restored

    def owns(self, found: CheckpointSet) -> bool:
        """Whether this checkpoint belongs to the run; False before run.json is read. Others are not uploaded either."""
        run = self._file.current
        if not self._file.known:
            return False
        last = run.last_start.step if run.last_start is not None else None
        return Ownership(self._guarded_since(found), last, self.fetched, run.adopted).owns(found)

    def _guarded_since(self, found: CheckpointSet) -> float:
        """Since when podwatch guards the run, in the time that ``found`` was saved in. Where the clock was set back
        since, saves of the last start look older than that."""
        since, wall = self._file.current.first_seen_wall, self._clock.wall()
        if self.launched is None or wall >= since or found.changed_wall > wall:
            return since
        return min(since, started_wall(self.launched, self._clock))
