"""Keeps the store's pointer on the current lineage.

A step back on purpose, or a fresh start, opens a new lineage. From then on the pointer must not name the abandoned
later step, or a new pod would restore it.
"""

from podwatch.domain.errors import PodwatchError
from podwatch.journal import AsyncJournal, Journal
from podwatch.recovery.state import RecordHolder
from podwatch.sync.syncer import Syncer

FOLLOWED = "sync.lineage"
"""Journal key: the lineage to which the pointer was last moved."""


class Descent:
    """Call ``follow`` every few seconds; it does nothing until the lineage changes, and retries after an error."""

    def __init__(self, syncer: Syncer, record: RecordHolder, journal: AsyncJournal) -> None:
        self._syncer, self._record, self._journal = syncer, record, journal
        self._followed: str | None = None

    async def follow(self) -> None:
        record = self._record.current
        if record is None or not record.lineage.parent:
            return
        if self._followed is None:
            self._followed = str(await self._journal.run(Journal.learned, FOLLOWED, ""))
        if self._followed == record.lineage.id:
            return
        try:
            await self._syncer.repoint(record.lineage.parent_step)
        except PodwatchError:
            return  # the syncer's state has the reason; the next call retries
        self._followed = record.lineage.id
        self._journal.post(Journal.learn, FOLLOWED, record.lineage.id)
