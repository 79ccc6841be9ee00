"""The single path of every event: journal, log, counters, listeners."""

import asyncio
import contextlib
from collections import Counter

from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Severity
from podwatch.journal import AsyncJournal, Journal
from podwatch.report.logging import log_event
from podwatch.system.clock import Clock

COUNTED = "event-counts"
"""Journal key of the event counters."""
UPLOADED = "uploaded-bytes"
"""Journal key of the bytes of all published checkpoints."""


class EventBus:
    """Call it with an event. Never blocks: the journal writes on its own thread, the log through a queue. Construct it
    on the event loop. ``quiet``: record events only, for a command that prints what it did itself."""

    def __init__(self, journal: AsyncJournal, clock: Clock, *, quiet: bool = False) -> None:
        self._journal, self._clock, self._quiet = journal, clock, quiet
        self._loop = asyncio.get_running_loop()
        self.counts: Counter[str] = Counter()
        self.uploaded_bytes = 0
        self.listeners: list[Emit] = []

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
        if not self._quiet:
            log_event(event)
        for listener in self.listeners:
            listener(event)

    def say(
        self, name: EventName, text: str, severity: Severity = Severity.INFO, **fields: str | int | float | bool | None
    ) -> None:
        """Emit an event of this moment. On the event loop."""
        self(Event(name, self._clock.wall(), text, severity, fields))

    def say_from_thread(self, name: EventName, text: str, severity: Severity) -> None:
        """The same from any thread; does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.say, name, text, severity)

    def warn(self, text: str) -> None:
        """Report a warning about the configuration or this machine. From any thread."""
        self.say_from_thread(EventName.CONFIG_WARNING, text, Severity.WARNING)
