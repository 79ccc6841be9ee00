"""Counts the outcome of each checkpoint: stored, skipped for a newer one, or abandoned."""

from collections.abc import Callable, Collection, Sequence

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import EventName
from podwatch.domain.facts import Tally, UploadOutcome
from podwatch.domain.finding import Severity
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal

TALLY = "sync.tally"
"""Journal key."""
_KNOWN = 1000
"""Counted checkpoints that are remembered: far more than a pod holds."""

Key = tuple[int, str]


class CheckpointTally:
    """Loop-side object. A checkpoint is pending from when it was seen complete until it, or a newer one, is
    published."""

    def __init__(self, journal: AsyncJournal, tell: Callable[..., None]) -> None:
        self._journal, self._tell = journal, tell
        self.now = Tally()
        self._waiting: set[Key] = set()
        self._counted: dict[Key, None] = {}
        self._lineage = ""

    async def load(self) -> None:
        self.now = Tally.kept(await self._journal.run(Journal.learned, TALLY)) or Tally()

    def see(self, sets: Sequence[CheckpointSet], stored: Collection[Key], lineage: str, last: int) -> None:
        """After a rescan. ``last``: the newest step of this lineage in the store; an earlier podwatch has counted the
        older ones."""
        if lineage != self._lineage:
            self._lineage = lineage
            self._waiting.clear()
        for found in sets:
            key = (found.step, found.save_id)
            if found.earlier or found.held:
                self._waiting.discard(key)
            elif found.complete and found.save_id and key not in self._counted and key not in self._waiting:
                self._waiting = {k for k in self._waiting if k[0] != found.step}  # it was saved again
                if key in stored or found.step < last:
                    self._count(key)
                else:
                    self._waiting.add(key)

    def newer_waits(self, step: int) -> bool:
        return any(waiting > step for waiting, _ in self._waiting)

    def stored(self, key: Key, *, seconds: float, save_seconds: float | None) -> None:
        """Published after ``seconds`` of upload; older pending checkpoints will not be sent any more."""
        self._waiting.discard(key)
        self._count(key)
        skipped = sorted(k for k in self._waiting if k[0] < key[0])
        self._waiting.difference_update(skipped)
        for one in skipped:
            self._count(one)
            text = f"step {one[0]} is not uploaded: the newer step {key[0]} was uploaded first"
            self._tell(EventName.UPLOAD_SKIPPED, text, Severity.INFO, step=one[0], newer_step=key[0])
        now = self.now.adding(*(UploadOutcome.SKIPPED for _ in skipped), UploadOutcome.STORED)
        self.now = Tally(now.outcomes, seconds, save_seconds or now.save_seconds)
        self._keep()

    def abandoned(self, key: Key) -> None:
        """Its upload was given up, and is not tried again."""
        self._waiting.discard(key)
        if key not in self._counted:
            self._count(key)
            self.now = self.now.adding(UploadOutcome.ABANDONED)
            self._keep()

    def _count(self, key: Key) -> None:
        self._counted[key] = None
        while len(self._counted) > _KNOWN:
            del self._counted[next(iter(self._counted))]

    def _keep(self) -> None:
        self._journal.post(Journal.learn, TALLY, self.now.to_json())
