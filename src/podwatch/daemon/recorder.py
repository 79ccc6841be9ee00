"""Builds the recorder for `podwatch replay`: its header, its scrubbing, and its error events."""

import asyncio
from collections.abc import Callable

from podwatch.daemon.wiring import Components
from podwatch.detection.learned import Learned
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.secrets import scrub
from podwatch.recording.format import Header
from podwatch.recording.recorder import Recorder


def make_recorder(parts: Components, learned: Callable[[], Learned]) -> Recorder | None:
    """None if [record] is off. ``learned`` and the components are read in the recorder's thread: frozen values only."""
    settings = parts.settings
    if not settings.record.enabled:
        return None
    loop = asyncio.get_running_loop()

    def header() -> Header:
        return Header(
            run_id=settings.run_id,
            layout=parts.run.layout.name,
            poll=parts.settings.gpu.poll,
            policies=parts.run.config.policies,
            learned=learned(),
        )

    def tell(problem: str | None) -> None:
        text = problem or "recording for `podwatch replay` works again"
        severity = Severity.INFO if problem is None else Severity.WARNING
        event = Event(EventName.RECORDING_CHANGED, parts.run.clock.wall(), text, severity)
        loop.call_soon_threadsafe(parts.run.emit, event)

    return Recorder(parts.run.paths.recording, header, max_size=settings.record.max_size, mask=scrub, complain=tell)
