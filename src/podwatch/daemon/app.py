"""The daemon's life on one page: start, run, leave.

Order matters twice. At start the lock comes first (one podwatch per run), the first look before READY, and recovery
last, because it may act. At the end everything stops except training.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from podwatch import __version__
from podwatch.config.last_good import save_last_good
from podwatch.config.loading import LoadedSettings, changes_needing_restart, load_settings
from podwatch.daemon import viewing, words
from podwatch.daemon.bulletin import Bulletin
from podwatch.daemon.compose import Parts, build
from podwatch.daemon.descent import Descent
from podwatch.daemon.emitting import Emitter
from podwatch.daemon.ending import briefly, end_tasks
from podwatch.daemon.handlers import make_handlers
from podwatch.daemon.init import UNDER_INIT
from podwatch.daemon.jobs import Jobs
from podwatch.daemon.outlets import Outlets
from podwatch.daemon.own_findings import backup_findings, config_findings, store_refused_finding
from podwatch.daemon.paths import RunPaths, run_paths
from podwatch.daemon.policies import policies_from
from podwatch.daemon.reloading import waits_for_restart
from podwatch.daemon.rounds import Rounds, make_rounds
from podwatch.domain.errors import ConfigurationError, PodwatchError
from podwatch.domain.event import Event, EventName, Incident
from podwatch.domain.finding import Finding, Severity
from podwatch.domain.snapshot import Snapshot
from podwatch.journal import AsyncJournal, Journal
from podwatch.judgement.learned import Learned
from podwatch.sensors.gpu import GpuReader
from podwatch.system.clock import Clock, SystemClock
from podwatch.system.locks import FileLock
from podwatch.system.sd_notify import make_notifier
from podwatch.system.threads import Worker
from podwatch.telling import logging as log
from podwatch.telling.status import build_status
from podwatch.telling.view import DaemonView

FIRST_LOOK_SECONDS = 10.0
"""READY waits this long for the GPUs' first answer; a blind one does not hold the guard up."""
STATUS_FILE_SECONDS = 15.0
FOLLOW_SECONDS = 5.0
"""How soon the store's pointer follows a step back; the check itself costs nothing."""
TASKS_END_SECONDS = 5.0
"""A round that waits for a hung disk is left behind: training has a keeper of its own, and the thread is a daemon."""
REMEMBER_TURNS = 30
"""What was learned goes to the journal every so many turns of the sensing loop: a minute at the default poll."""
LEARNED = "learned"
"""Journal key of what judgement learned."""


async def serve(
    loaded: LoadedSettings,
    *,
    adopt_existing: bool = False,
    gpu_reader: GpuReader | None = None,
    same_disk_store: bool = False,
    clock: Clock | None = None,
    load_again: Callable[[], LoadedSettings] | None = None,
) -> int:
    """Be the daemon until told to leave; returns the exit code. Raises PodwatchError if it cannot start.

    ``load_again`` is what a reload does (None: read the same file, with the environment)."""
    settings = loaded.settings
    logs = log.configure(settings.log.format, settings.log.level)
    lock = FileLock(run_paths(settings.state_dir, settings.run_id, os.environ).lock)
    daemon = Daemon(loaded, clock or SystemClock(), load_again)
    try:
        lock.acquire(what=f"the guard of run {settings.run_id}")
        try:
            await daemon.start(gpu_reader, same_disk_store, adopt_existing)
            return await daemon.run()
        finally:
            await daemon.stop()
    finally:
        lock.release()
        logs.close()


class Daemon:
    """Holds the parts together. ``parts`` and ``rounds`` exist once ``start`` has got that far."""

    def __init__(
        self, loaded: LoadedSettings, clock: Clock, load_again: Callable[[], LoadedSettings] | None = None
    ) -> None:
        self.loaded, self._clock = loaded, clock
        self._load_again = load_again or (lambda: load_settings(self.loaded.path, environ=os.environ))
        self.parts: Parts
        self.rounds: Rounds
        self._notifier = make_notifier(os.environ)
        self._leaving: asyncio.Future[int] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = clock.monotonic()
        self._pins: dict[int, str] = {}
        self._incident: Incident | None = None
        self._config_problem = loaded.refused
        self._told = ""
        self._armed: tuple[str, ...] = ()
        self._journal: AsyncJournal | None = None
        self._emit: Emitter | None = None
        self._outlets: Outlets | None = None
        self._jobs = Jobs()
        self._disk = Worker("daemon")

    # -- start

    async def start(self, gpu_reader: GpuReader | None, same_disk_store: bool, adopt_existing: bool) -> None:
        loop = asyncio.get_running_loop()
        self._leaving = loop.create_future()
        settings = self.loaded.settings
        paths = run_paths(settings.state_dir, settings.run_id, os.environ)
        journal = self._journal = AsyncJournal(await self._disk.call(Journal.open, paths.journal))
        emit = self._emit = Emitter(journal)
        await emit.load()
        emit.listeners.append(self._on_event)
        self.bulletin = Bulletin(emit)
        self.parts = await self._disk.call(self._build, paths, journal, emit, gpu_reader, same_disk_store, loop)
        await self._load_memory()
        if journal.sync.rebuilt:
            self._say(EventName.STATE_REBUILT, journal.sync.rebuilt, Severity.WARNING)
        self._open_outlets()
        assert self._outlets is not None
        await self._outlets.open()
        await self._first_look()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave, 0)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        await self._begin(adopt_existing)
        await self._disk.call(self._keep_last_good)
        self._notifier.ready(self._headline())

    def _build(
        self,
        paths: RunPaths,
        journal: AsyncJournal,
        emit: Emitter,
        gpu_reader: GpuReader | None,
        same_disk_store: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> Parts:
        return build(
            self.loaded.settings,
            paths,
            self._clock,
            journal,
            emit,
            wake=lambda: _soon(loop, self.wake),
            current=lambda: self.loaded.settings,
            heartbeat_base=lambda: self._outlets.url if self._outlets is not None else "",
            gpu_reader=gpu_reader,
            same_disk_store=same_disk_store,
        )

    async def _load_memory(self) -> None:
        journal = self.parts.journal
        kept = await journal.run(Journal.learned, LEARNED, {})
        self._pins = dict(await journal.run(Journal.pins))
        self._incident = next(iter(await journal.run(Journal.incidents, 1)), None)
        learned = Learned.from_dict(kept) if isinstance(kept, dict) else Learned()
        self.rounds = make_rounds(self.parts, learned=learned, pins=lambda: self._pins, on_turn=self._on_turn)

    def _open_outlets(self) -> None:
        self._outlets = Outlets(
            self.parts,
            config_path=str(self.loaded.path or ""),
            view=self.view,
            status=self.status,
            live=self.rounds.sensing.alive,
            ready=lambda: words.readiness(self.parts, self.rounds.sensing.snapshot),
            handlers=make_handlers(self),
            complain=lambda text: self._say(EventName.SENSOR_CHANGED, text, Severity.WARNING),
        )

    async def _first_look(self) -> None:
        parts = self.parts
        await parts.removals.call(parts.remover.sweep_trash)
        await parts.senses.start()
        await self._disk.call(parts.watcher.start)
        await self.rounds.guarding.look()
        end = self._clock.monotonic() + FIRST_LOOK_SECONDS
        while self._clock.monotonic() < end and str(parts.gpus.latest().state) == "pending":
            await self._clock.sleep(0.05)

    async def _begin(self, adopt_existing: bool) -> None:
        parts, sync = self.parts, self.parts.settings.sync
        await parts.recovery.begin(adopt_existing=adopt_existing)
        self._say(EventName.DAEMON_STARTED, words.opening(self.parts), version=__version__, pid=os.getpid())
        for warning in self.loaded.warnings:
            self._say(EventName.CONFIG_WARNING, warning, Severity.WARNING)
        self._spawn(self.rounds.sensing.run(), "sensing")
        self._spawn(self.rounds.guarding.run(), "guarding")
        if parts.syncer is not None:
            await parts.syncer.start()
            self._spawn(self._beat(), "first heartbeat")
            self._jobs.every(sync.sweep, "sync sweep", self._sweep)
            self._jobs.every(sync.heartbeat, "heartbeat", self._beat)
            self._jobs.every(FOLLOW_SECONDS, "descent", Descent(parts.syncer, parts.record, parts.journal).follow)
        assert self._outlets is not None
        self._jobs.every(STATUS_FILE_SECONDS, "status file", self._outlets.refresh)
        self._jobs.start()

    # -- run

    async def run(self) -> int:
        assert self._leaving is not None
        return await self._leaving

    def leave(self, code: int) -> None:
        """End the daemon soon, with this exit code. Training is left alone."""
        if self._leaving is not None and not self._leaving.done():
            self._leaving.set_result(code)

    def wake(self) -> None:
        """Checkpoint files changed: rescan soon."""
        self.rounds.guarding.wake()

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Hold on to a task that somebody started on the side."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reload(self) -> str:
        """Take the configuration file anew; returns what happened. What cannot change while running is refused."""
        self._notifier.reloading()
        try:
            return self._reload()
        finally:  # whatever happens: a service that never comes back from its reload cannot be reloaded again
            self._notifier.ready(self._headline())

    def _reload(self) -> str:
        try:
            new = self._load_again()
            if blocked := changes_needing_restart(self.loaded.settings, new.settings):
                raise ConfigurationError(
                    f"{', '.join(blocked)} cannot change while podwatch runs",
                    where=str(new.path),
                    fix="restart podwatch; training goes on meanwhile",
                )
        except PodwatchError as error:
            self._config_problem, text = str(error), f"the old configuration stays: {error}"
            self._say(EventName.CONFIG_REFUSED, text, Severity.WARNING)
        else:
            later = waits_for_restart(self.loaded.settings, new.settings)
            text = "configuration reloaded: thresholds and policies are in force"
            if later:
                text += f"; after the next start of podwatch: {', '.join(later)}"
            self.loaded, self._config_problem = new, ""
            parts = self.parts
            parts.settings = new.settings
            parts.policies = policies_from(new.settings, max_steps=parts.policies.detection.max_steps)
            self.rounds.sensing.policies = parts.policies
            parts.recovery.reconfigure(parts.settings, parts.policies)
            self._say(EventName.CONFIG_RELOADED, text)
        return text

    def _on_turn(self, snapshot: Snapshot, findings: tuple[Finding, ...]) -> None:
        parts, sensing = self.parts, self.rounds.sensing
        self._notifier.watchdog()
        parts.recovery.consider(snapshot, findings)
        everything = (*findings, *parts.recovery.findings(), *self.rounds.pruner.findings(), *self._own(snapshot))
        self.bulletin.update(everything, snapshot.wall)
        if parts.recovery.exit_code is not None:
            self.leave(parts.recovery.exit_code)
        if sensing.turns % REMEMBER_TURNS == 0 or sensing.state.armed != self._armed:
            # What is armed is told to the next podwatch at once: the engine may die while none runs.
            self._armed = sensing.state.armed
            parts.journal.post(Journal.learn, LEARNED, sensing.state.learned.to_dict())
            parts.emit.save()
        self._tell_systemd()

    def _own(self, snapshot: Snapshot) -> tuple[Finding, ...]:
        parts = self.parts
        config = config_findings(self._config_problem, since=self._started)
        if parts.store_refused:
            return (*store_refused_finding(parts.store_refused, since=self._started), *config)
        backup = backup_findings(
            parts.syncer.state if parts.syncer is not None else None,
            parts.catalogue.sets,
            now=snapshot.at,
            wall=snapshot.wall,
            max_lag=parts.settings.sync.max_lag,
            since=self._started,
        )
        return (*backup, *config)

    def _on_event(self, event: Event) -> None:
        if event.name in (EventName.INCIDENT_OPENED, EventName.INCIDENT_CLOSED, EventName.GAVE_UP):
            self._spawn(self._refresh_incident(), "incident")

    async def _refresh_incident(self) -> None:
        self._incident = next(iter(await self.parts.journal.run(Journal.incidents, 1)), None)

    async def _sweep(self) -> None:
        if self.parts.syncer is not None:
            self.parts.syncer.sweep()

    async def _beat(self, state: str = "") -> None:
        if self.parts.syncer is not None:
            await self.parts.syncer.beat(viewing.heartbeat_fields(self.view(), state))

    # -- leave

    async def stop(self) -> None:
        """Let go of everything, in reverse order; each step has its own deadline, so that leaving never hangs."""
        self._notifier.stopping()
        self._jobs.stop()
        await end_tasks(self._tasks, within=TASKS_END_SECONDS)
        if hasattr(self, "rounds"):
            await self._let_go()
        if self._journal is not None:
            await briefly(self._journal.close())
        self._disk.close()
        self._notifier.close()

    async def _let_go(self) -> None:
        parts = self.parts
        self._say(
            EventName.DAEMON_STOPPING,
            words.farewell(training=parts.recovery.state.handle is not None, preempted=self._preempted()),
        )
        await briefly(parts.recovery.close())
        if parts.syncer is not None:
            await briefly(self._beat("preempted" if self._preempted() else "restarting"), 3.0)
            await briefly(parts.syncer.stop())
        await briefly(self.rounds.pruner.stop())
        if self._outlets is not None:
            await briefly(self._outlets.close())
        await briefly(parts.senses.stop())
        await briefly(self._disk.call(parts.watcher.stop))
        await briefly(parts.launcher.close())
        parts.journal.post(Journal.learn, LEARNED, self.rounds.sensing.state.learned.to_dict())
        parts.emit.save()

    # -- what others see

    def view(self) -> DaemonView:
        return viewing.view_of(
            self.parts,
            self.rounds,
            findings=self.bulletin.findings,
            pins=self._pins,
            incident=self._incident,
            http_url=self._outlets.url if self._outlets is not None else "",
            config_path=str(self.loaded.path or ""),
            started=self._started,
        )

    def status(self) -> dict[str, Any]:
        return build_status(self.view())

    def _preempted(self) -> bool:
        """Told to leave by an init that is PID 1: the container ends, and training with it (DESIGN section 4)."""
        leaving = self._leaving
        told = leaving is not None and leaving.done() and not leaving.cancelled() and leaving.result() == 0
        return told and os.environ.get(UNDER_INIT) == "pid1"

    def _headline(self) -> str:
        return words.headline(self.parts.recovery.state.phase, self.rounds.sensing.snapshot)

    # -- small change

    def _tell_systemd(self) -> None:
        """The line that ``systemctl status`` shows, as soon as it changes."""
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
        """A round that ends is a bug: say so and leave, so that whoever supervises us starts afresh."""
        if task.cancelled() or task.exception() is None:
            return
        self._say(EventName.DAEMON_STOPPING, f"{task.get_name()} failed: {task.exception()!r}", Severity.CRITICAL)
        self.leave(1)

    def _keep_last_good(self) -> None:
        try:
            save_last_good(self.loaded)
        except OSError as error:
            self._say(EventName.CONFIG_REFUSED, f"no copy of the configuration could be kept: {error}")


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From any thread; nothing to do once the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
