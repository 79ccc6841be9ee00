"""``podwatch pause``: kept in run.json, shown in the status, ended by `unpause` or when it expires.

An operator often still uses the GPUs when the pause expires. While processes outside the run hold them, the pause
continues, with a warning: a start of training would fail, or end their work.
"""

from dataclasses import replace
from datetime import UTC, datetime

from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.run import Pause
from podwatch.domain.snapshot import Snapshot
from podwatch.recovery.recovery import Recovery
from podwatch.recovery.run_file import RunFile
from podwatch.system.clock import Clock

MOST_SECONDS = 30 * 86400.0


class Maintenance:
    def __init__(self, file: RunFile, clock: Clock, emit: Emit, recovery: Recovery) -> None:
        self._file, self._clock, self._emit, self._recovery = file, clock, emit, recovery
        self._since = clock.monotonic()

    @property
    def pause(self) -> Pause | None:
        return self._file.current.pause

    async def begin(self, seconds: float | None, *, by: str, reason: str) -> Pause:
        """Pause, replacing an active pause. It is in force and durable when this returns."""
        wall = self._clock.wall()
        pause = Pause(wall, None if seconds is None else wall + seconds, by, reason)
        before = self.pause
        self._recovery.context.pausing = True  # first: recovery must start nothing while this is recorded
        try:
            await self._file.edit(lambda run: replace(run, pause=pause, requested=False))
        finally:
            self._recovery.context.pausing = False  # now the record decides
            self._recovery.wake()
        self._since = self._since if before is not None else self._clock.monotonic()
        self._say(EventName.PAUSED, f"{described(pause)}: podwatch stops and starts no training")
        return pause

    async def end(self, why: str) -> bool:
        """End the pause; False if there was none. Durable first, so that a crash here does not restore the pause."""
        if self.pause is None:
            return False
        await self._file.edit(lambda run: replace(run, pause=None))
        self._over(why)
        return True

    def turn(self, snapshot: Snapshot) -> None:
        """Call it at each turn of the sensing loop: ends an expired pause. Never blocks."""
        pause = self.pause
        if pause is None or pause.until is None or snapshot.wall < pause.until:
            return
        held = self._gpus_held(snapshot)
        if held:
            if held != pause.held_by:
                self._file.note(lambda run: replace(run, pause=replace(pause, held_by=held)))
            if not pause.held_by:
                self._say(
                    EventName.PAUSED,
                    f"the pause has expired, and continues while the GPUs are in use: {held}",
                    Severity.WARNING,
                )
            return
        self._file.note(lambda run: replace(run, pause=None))
        self._file.record_soon()
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

    def _gpus_held(self, snapshot: Snapshot) -> str:
        """What else holds the run's GPUs; empty if nothing does, if our own trainer runs, or if that is unknown."""
        trainer = snapshot.trainer.value
        if trainer is not None and trainer.descendants:
            return ""
        return "; ".join(self._recovery.starter.free(0.0).gpus)

    def _over(self, why: str) -> None:
        self._say(EventName.UNPAUSED, f"no longer paused ({why}): podwatch acts again")
        self._recovery.wake()

    def _say(self, name: EventName, text: str, severity: Severity = Severity.INFO) -> None:
        self._emit(Event(name, self._clock.wall(), text, severity))


def described(pause: Pause) -> str:
    """``paused until 2026-01-31 03:00Z by root (driver update)``."""
    until = "until `podwatch unpause`"
    if pause.until is not None:
        until = f"until {datetime.fromtimestamp(pause.until, UTC):%Y-%m-%d %H:%M:%SZ}"
    by, why = f" by {pause.by}" if pause.by else "", f" ({pause.reason})" if pause.reason else ""
    return f"paused {until}{by}{why}"
