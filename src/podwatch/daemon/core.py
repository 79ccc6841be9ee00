"""State of the daemon, and what its components call: emit, spawn, leave, show."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from podwatch.config.loading import LoadedSettings, load_settings
from podwatch.daemon import status_view
from podwatch.daemon.endpoints import Endpoints
from podwatch.daemon.events import EventBus, OpenFindings
from podwatch.daemon.loops import DaemonLoops
from podwatch.daemon.maintenance import Maintenance
from podwatch.daemon.notifications import Notifying
from podwatch.daemon.paths import RunPaths
from podwatch.daemon.run_lock import RunLock
from podwatch.daemon.store_jobs import Jobs, StoreJobs
from podwatch.daemon.wiring import Components
from podwatch.domain.event import Event, EventName, Incident
from podwatch.domain.finding import Finding, Severity
from podwatch.journal import AsyncJournal, Journal
from podwatch.recording.recorder import Recorder
from podwatch.reporting.status import build_status
from podwatch.reporting.view import DaemonView
from podwatch.sync.upload.artifacts import Artifacts
from podwatch.system.clock import Clock
from podwatch.system.sd_notify import make_notifier
from podwatch.system.workers import Worker

AGAIN = -1
"""Not an exit code: the daemon restarts inside this process, because the state database can be read again."""


class Core:
    """Base of Daemon. ``parts`` and ``rounds`` exist only after the corresponding step of ``start``."""

    def __init__(
        self,
        loaded: LoadedSettings,
        clock: Clock,
        load_again: Callable[[], LoadedSettings] | None = None,
        ground: tuple[RunPaths, RunLock | None] | None = None,
        silent: float = 0.0,
    ) -> None:
        """``ground``: the directories and the lock of the run; None: without a lock. ``silent``: seconds without a
        response of the previous daemon when init restarted it."""
        self._ground, self._silent = ground, silent
        self.loaded, self._clock = loaded, clock
        self._load_again = load_again or (lambda: load_settings(self.loaded.path, environ=os.environ))
        self.parts: Components
        self.bulletin: OpenFindings
        self.rounds: DaemonLoops
        self.pausing: Maintenance
        self.backing: StoreJobs
        self._notifier = make_notifier(os.environ)
        self._leaving: asyncio.Future[int] | None = None
        self.left_with: int | None = None
        self._begun = asyncio.Event()
        """Set once recovery has read the state of the previous podwatch; commands can act from then on."""
        self._preempted = ""
        """The reason of the preemption; empty without one."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = clock.monotonic()
        self._pins: dict[int, str] = {}
        self._incident: Incident | None = None
        self._config_problem = loaded.refused
        self._told = ""
        self._known: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._journal: AsyncJournal | None = None
        self._emit: EventBus | None = None
        self._outlets: Endpoints | None = None
        self._recorder: Recorder | None = None
        self._artefacts: Artifacts | None = None
        self._notifying: Notifying | None = None
        self._jobs = Jobs()
        self._disk = Worker("daemon")

    def leave(self, code: int) -> None:
        """End the daemon soon with this exit code. Training continues."""
        if self.left_with in (None, AGAIN):
            self.left_with = code
        if self._leaving is not None and not self._leaving.done():
            self._leaving.set_result(code)

    def restart(self) -> None:
        """Restart the daemon inside this process. Training continues."""
        self.leave(AGAIN)

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Keep a reference to a background task until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def read_pins(self) -> None:
        """Read the pins again after a change."""
        self._pins = dict(await self.parts.run.journal.run(Journal.pins))

    def view(self) -> DaemonView:
        return status_view.view_of(
            self.parts,
            self.rounds,
            self._bus(),
            findings=self._findings_now(),
            pins={**self.parts.checkpoints.rescans.named, **self._pins},
            incident=self._incident,
            http_url=self._outlets.url if self._outlets is not None else "",
            config_path=str(self.loaded.path or ""),
            started=self._started,
            pause=self.pausing.pause,
        )

    def _bus(self) -> EventBus:
        assert self._emit is not None
        return self._emit

    def _findings_now(self) -> tuple[Finding, ...]:
        return self.bulletin.findings

    def status(self) -> dict[str, Any]:
        return build_status(self.view())

    def _headline(self) -> str:
        return status_view.headline(self.parts.recovery.state.phase, self.rounds.sensing.snapshot, self.pausing.pause)

    def _tell_systemd(self) -> None:
        """Update the line that ``systemctl status`` shows, if it changed."""
        headline = self._headline()
        if headline != self._told:
            self._told = headline
            self._notifier.status(headline)

    def _say(
        self, name: EventName, text: str, severity: Severity = Severity.INFO, **fields: str | int | float | bool | None
    ) -> None:
        if self._emit is not None:
            self._emit(Event(name, self._clock.wall(), text, severity, fields))

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self.keep(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        """A loop that fails is a bug: report it and exit, so that systemd or init starts a new daemon."""
        if task.cancelled() or task.exception() is None:
            return
        self._say(
            EventName.DAEMON_STOPPING,
            f"internal error in {task.get_name()}: {task.exception()!r}. podwatch exits, training continues",
            Severity.CRITICAL,
        )
        self.leave(1)
