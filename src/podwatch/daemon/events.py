"""The path of every event, and the open findings: each is reported once when it appears and once when it clears."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Finding, Severity
from podwatch.journal import AsyncJournal, Journal
from podwatch.reporting.logging import log_event
from podwatch.system.clock import Clock

# -- event bus -------------------------------------------------------------------------------------------------------
# The single path of every event: journal, log, counters, listeners.

COUNTED = "event-counts"
"""Journal key of the event counters."""
UPLOADED = "uploaded-bytes"
"""Journal key of the bytes of all published checkpoints."""


class Events(Protocol):
    """Records events, and the warnings of other threads."""

    def __call__(self, event: Event, /) -> None: ...

    def warn(self, text: str) -> None:
        """Report a warning about the configuration or this machine. From any thread."""
        ...


class EventBus:
    """Call it with an event. Never blocks: the journal writes on its own thread, the log through a queue. Construct it
    on the event loop."""

    def __init__(self, journal: AsyncJournal, clock: Clock) -> None:
        self._journal, self._clock = journal, clock
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
        log_event(event)
        for listener in self.listeners:
            listener(event)

    def say(
        self, name: EventName, text: str, severity: Severity = Severity.INFO, **fields: str | int | float | bool | None
    ) -> None:
        """Emit an event of this moment. On the event loop."""
        self(Event(name, self._clock.wall(), text, severity, fields))

    def warn(self, text: str) -> None:
        """From any thread; does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.say, EventName.CONFIG_WARNING, text, Severity.WARNING)


# -- open findings ---------------------------------------------------------------------------------------------------


class OpenFindings:
    """Keeps the open findings of all sources and emits an event when one appears, changes its severity, or clears."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._open: dict[str, Finding] = {}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Worst first, then oldest."""
        return _sorted(self._open.values())

    def as_of_now(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """``findings``, collected between two turns, sorted, with the times of their raising. Emits nothing."""
        return _sorted({f.key: self._since_raised(f) for f in findings}.values())

    def update(self, findings: tuple[Finding, ...], wall: float) -> None:
        """Set the findings of all sources for this turn. An open finding keeps the time at which it was raised, which a
        pure source does not know."""
        now = {f.key: self._since_raised(f) for f in findings}
        for key, finding in now.items():
            before = self._open.get(key)
            if before is None or (before.severity, before.confirmed) != (finding.severity, finding.confirmed):
                message = finding.summary + (f"; {finding.suggestion}" if finding.suggestion else "")
                self._emit(Event(EventName.FINDING_RAISED, wall, message, finding.severity, _fields(finding)))
        for key, finding in self._open.items():
            if key not in now:
                text = f"resolved: {finding.summary}"
                self._emit(Event(EventName.FINDING_CLEARED, wall, text, fields=_fields(finding)))
        self._open = now

    def _since_raised(self, finding: Finding) -> Finding:
        before = self._open.get(finding.key)
        return finding if before is None else replace(finding, since=min(before.since, finding.since))


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    order = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
    return tuple(sorted(findings, key=lambda f: (order[f.severity], f.since, f.key)))


def _fields(finding: Finding) -> dict[str, str | int | float | bool | None]:
    return {"finding": str(finding.kind), "subject": finding.subject, "confirmed": finding.confirmed}
