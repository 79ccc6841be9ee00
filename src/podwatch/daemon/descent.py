"""Keeps the store's pointer on the line of descent that is trained now (DESIGN section 2, "Lineage").

A step back on purpose, or a fresh start, opens a new lineage; from then on the pointer must not name the abandoned
later step, or a new pod would fetch it again.
"""

from podwatch.domain.errors import PodwatchError
from podwatch.journal import AsyncJournal, Journal
from podwatch.recovery.state import RecordHolder
from podwatch.sync.syncer import Syncer

FOLLOWED = "sync.lineage"
"""Journal key: the lineage the pointer was last moved to."""


class Descent:
    """``follow`` is called every few seconds; it does nothing until the lineage changes, and retries after trouble."""

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
            return  # the syncer's state says why; the next call tries again
        self._followed = record.lineage.id
        self._journal.post(Journal.learn, FOLLOWED, record.lineage.id)
