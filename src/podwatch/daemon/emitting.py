"""The single path of every event: journal, log, counters, listeners."""

from collections import Counter
from collections.abc import Callable

from podwatch.domain.event import Event, EventName
from podwatch.journal import AsyncJournal, Journal
from podwatch.telling.logging import log_event

COUNTED = "event-counts"
"""Journal key of the event counters."""
UPLOADED = "uploaded-bytes"
"""Journal key of the bytes of all published checkpoints."""


class Emitter:
    """Call it with an event. Never blocks: the journal writes on its own thread, the log through a queue."""

    def __init__(self, journal: AsyncJournal) -> None:
        self._journal = journal
        self.counts: Counter[str] = Counter()
        self.uploaded_bytes = 0
        self.listeners: list[Callable[[Event], None]] = []

    async def load(self) -> None:
        kept = await self._journal.run(Journal.learned, COUNTED, {})
        if isinstance(kept, dict):
            self.counts.update({str(k): int(v) for k, v in kept.items() if isinstance(v, int)})
        uploaded = await self._journal.run(Journal.learned, UPLOADED, 0)
        self.uploaded_bytes += uploaded if isinstance(uploaded, int) else 0

    def save(self) -> None:
        self._journal.post(Journal.learn, COUNTED, dict(self.counts))
        self._journal.post(Journal.learn, UPLOADED, self.uploaded_bytes)

    def __call__(self, event: Event) -> None:
        self.counts[str(event.name)] += 1
        if event.name is EventName.PUBLISHED:
            self.uploaded_bytes += int(event.fields.get("bytes") or 0)
        self._journal.post(Journal.add_event, event)
        log_event(event)
        for listener in self.listeners:
            listener(event)
