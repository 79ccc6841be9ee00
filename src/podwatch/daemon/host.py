"""What a daemon runs on: it exists before the components, and ends after them."""

from dataclasses import dataclass

from podwatch.config.settings import Settings
from podwatch.daemon.checkpoint_loop import Rescans
from podwatch.daemon.events import EventBus
from podwatch.daemon.paths import RunPaths
from podwatch.daemon.run_lock import RunLock
from podwatch.daemon.shutdown import BackgroundTasks, Exit, briefly
from podwatch.daemon.startup_checks import open_journal
from podwatch.daemon.wiring import Foundation
from podwatch.journal import AsyncJournal
from podwatch.system.clock import Clock
from podwatch.system.sd_notify import Notifier
from podwatch.system.workers import Worker

STEP_SECONDS = 8.0
"""Deadline of one shutdown step."""


@dataclass(frozen=True, slots=True)
class Host:
    """``disk`` is the thread for the daemon's own files."""

    foundation: Foundation
    bus: EventBus
    exit: Exit
    tasks: BackgroundTasks
    disk: Worker
    systemd: Notifier
    lock: RunLock

    @property
    def clock(self) -> Clock:
        return self.foundation.clock

    @property
    def journal(self) -> AsyncJournal:
        return self.foundation.journal

    async def close(self, seconds: float = STEP_SECONDS) -> None:
        await briefly(self.journal.close(), seconds)
        self.disk.close()
        self.systemd.close()


async def open_host(settings: Settings, clock: Clock, ground: tuple[RunPaths, RunLock], systemd: Notifier) -> Host:
    """Open the journal: in memory where the database cannot be used."""
    paths, lock = ground
    opened, opening = await open_journal(paths.journal, clock)
    journal = AsyncJournal(opened)
    bus, leaving = EventBus(journal, clock), Exit()
    await bus.load()
    rescans = Rescans(settings.checkpoints.rescan)
    foundation = Foundation(paths, clock, journal, bus, leaving, rescans, lock, opening)
    return Host(foundation, bus, leaving, BackgroundTasks(bus, leaving), Worker("daemon"), systemd, lock)
