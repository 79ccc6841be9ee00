"""``podwatch pause``: kept in the journal, shown in the status, ended by `unpause` or when it expires.

An operator often still uses the GPUs when the pause expires. While processes outside the run hold them, the pause
continues, with a warning: a start of training would fail, or end their work.
"""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.run import Pause
from podwatch.domain.snapshot import Snapshot
from podwatch.journal import AsyncJournal, Journal
from podwatch.system.clock import Clock

KEY = "pause"
"""Journal key."""
MOST_SECONDS = 30 * 86400.0


class PausedTraining(Protocol):
    def pause(self, paused: bool) -> None:
        """The pause began or ended."""
        ...

    def gpus_held(self, snapshot: Snapshot) -> str:
        """What else holds the run's GPUs; empty if nothing does."""
        ...


class Maintenance:
    def __init__(self, journal: AsyncJournal, clock: Clock, emit: Emit, training: PausedTraining) -> None:
        self._journal, self._clock, self._emit, self._training = journal, clock, emit, training
        self.pause: Pause | None = None
        self._since = 0.0

    async def load(self) -> None:
        """Read the pause from the journal. Call it before recovery acts."""
        self.pause = Pause.from_dict(await self._journal.run(Journal.learned, KEY))
        self._since = self._clock.monotonic()
        self._training.pause(self.pause is not None)

    async def begin(self, seconds: float | None, *, by: str, reason: str) -> Pause:
        """Pause, replacing an active pause. It is in force and durable when this returns."""
        wall = self._clock.wall()
        pause = Pause(wall, None if seconds is None else wall + seconds, by, reason)
        self._training.pause(True)  # first: recovery must start nothing while the journal writes
        self.pause, self._since = pause, self._clock.monotonic()
        await self._journal.run(Journal.learn, KEY, pause.to_dict())
        self._say(EventName.PAUSED, f"{described(pause)}: podwatch stops and starts no training")
        return pause

    async def end(self, why: str) -> bool:
        """End the pause; False if there was none. Durable first, so that a crash here does not restore the pause."""
        if self.pause is None:
            return False
        await self._journal.run(Journal.learn, KEY, None)
        self._over(why)
        return True

    def turn(self, snapshot: Snapshot) -> None:
        """Call it at each turn of the sensing loop: ends an expired pause. Never blocks."""
        pause = self.pause
        if pause is None or pause.until is None or snapshot.wall < pause.until:
            return
        held = self._training.gpus_held(snapshot)
        if held:
            if held != pause.held_by:
                self.pause = replace(pause, held_by=held)
            if not pause.held_by:
                self._say(
                    EventName.PAUSED,
                    f"the pause has expired, and continues while the GPUs are in use: {held}",
                    Severity.WARNING,
                )
            return
        self._journal.post(Journal.learn, KEY, None)
        self._over("the pause has expired")

    def findings(self) -> tuple[Finding, ...]:
        pause = self.pause
        if pause is None:
            return ()
        if pause.held_by:
            text = f"{described(pause)}; it has expired, and continues while the GPUs are in use: {pause.held_by}"
            fix = "the pause ends automatically when the GPUs are free; `podwatch unpause` ends it now"
            return (Finding(FindingKind.PAUSED, Severity.WARNING, text, self._since, fix),)
        fix = "podwatch reports findings but does not act on them; `podwatch unpause` ends the pause"
        return (Finding(FindingKind.PAUSED, Severity.INFO, described(pause), self._since, fix),)

    def _over(self, why: str) -> None:
        self.pause = None
        self._say(EventName.UNPAUSED, f"no longer paused ({why}): podwatch acts again")
        self._training.pause(False)

    def _say(self, name: EventName, text: str, severity: Severity = Severity.INFO) -> None:
        self._emit(Event(name, self._clock.wall(), text, severity))


def described(pause: Pause) -> str:
    """``paused until 2026-01-31 03:00Z by root (driver update)``."""
    until = "until `podwatch unpause`"
    if pause.until is not None:
        until = f"until {datetime.fromtimestamp(pause.until, UTC):%Y-%m-%d %H:%M:%SZ}"
    by, why = f" by {pause.by}" if pause.by else "", f" ({pause.reason})" if pause.reason else ""
    return f"paused {until}{by}{why}"
