"""The lifecycle of the daemon: start, run, stop.

Order matters at start: the run lock first (one podwatch per run), the first sensor readings before READY, recovery
last, because it can stop and start training. At the end everything stops except training.
"""

import asyncio
import os
import signal
from collections.abc import Callable

from podwatch import __version__
from podwatch.config.loading import LoadedSettings, save_last_good
from podwatch.daemon import preempt, status_view
from podwatch.daemon.artifacts import make_artifacts
from podwatch.daemon.checkpoint_loop import ANNOUNCED, Announced, Rescans
from podwatch.daemon.commands import make_handlers, once_begun
from podwatch.daemon.core import AGAIN
from podwatch.daemon.endpoints import Endpoints
from podwatch.daemon.entry import BY_HAND, silent_seconds
from podwatch.daemon.events import EventBus, OpenFindings
from podwatch.daemon.init import UNDER_INIT
from podwatch.daemon.loops import make_loops
from podwatch.daemon.maintenance import KEY as PAUSE
from podwatch.daemon.maintenance import Maintenance, pause_handlers
from podwatch.daemon.notifications import FAREWELL_SECONDS, make_notifying
from podwatch.daemon.preempt import Budget, preempt_handlers
from podwatch.daemon.recorder import make_recorder
from podwatch.daemon.run_lock import RunLock
from podwatch.daemon.shutdown import briefly, end_tasks
from podwatch.daemon.startup_checks import RECOVERED, last_pause, open_journal, take_ground
from podwatch.daemon.store_jobs import StoreJobs
from podwatch.daemon.tick import Turning
from podwatch.daemon.wiring import LEARNED as LEARNED
from podwatch.daemon.wiring import READ_SO_FAR, Choices, Foundation, build
from podwatch.detection.learned import Learned
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.lease import HolderState
from podwatch.journal import AsyncJournal, Journal
from podwatch.recovery.stop import tell_to_end
from podwatch.reporting import logging as log
from podwatch.sensors.gpu import GpuReader
from podwatch.sync.upload.artifacts import LAST_SECONDS
from podwatch.system.clock import Clock, SystemClock
from podwatch.system.workers import Worker, give_back, settle

FIRST_LOOK_SECONDS = 10.0
"""READY waits at most this long for the first GPU reading; a GPU sensor without an answer does not block the start."""
STATUS_FILE_SECONDS = 15.0
EXPOSED = "paths.exposed"
"""Journal key: the last reported warning that another user can move podwatch's directory away."""
STARTED_FRESH = "recovery.started-fresh"
"""Journal key: the id of the last executed `run --fresh`."""
GIVE_BACK_SECONDS = 30.0
"""Interval of returning freed memory to the system; takes less than a millisecond when there is none."""
TASKS_END_SECONDS = 5.0
"""A loop that waits for a hung disk is abandoned after this: its thread is a daemon thread."""
STEP_SECONDS = 8.0
"""Deadline of one shutdown step."""
LAST_WORDS_SECONDS = 2.0
"""Time that the shutdown takes after the last preemption step."""
PREEMPTED_TASKS_SECONDS, PREEMPTED_ACT_SECONDS = 0.3, 0.4
"""Deadlines for the loops and for recovery's operation in progress at a preemption: the next podwatch completes it."""


async def serve(
    loaded: LoadedSettings,
    *,
    adopt_existing: bool = False,
    gpu_reader: GpuReader | None = None,
    same_disk_store: bool = False,
    clock: Clock | None = None,
    load_again: Callable[[], LoadedSettings] | None = None,
    take_over: str = "",
    fresh: str = "",
) -> int:
    """Run the daemon until it is stopped; returns the exit code. Raises PodwatchError if it cannot start.

    ``load_again`` loads the settings at a reload (None: the same file, with the environment). ``take_over`` is the id
    of an operator's `--take-over`, ``fresh`` that of a `--fresh`; each id is executed once."""
    settings = loaded.settings
    logs = log.configure(settings.log.format, settings.log.level)
    lock: RunLock | None = None
    try:
        paths, lock = await take_ground(settings)
        told: list[int] = []
        while True:
            daemon = Daemon(loaded, clock or SystemClock(), load_again, (paths, lock), silent_seconds(os.environ))
            try:
                await daemon.start(gpu_reader, same_disk_store, adopt_existing, take_over, fresh)
                if told:
                    daemon.leave(0)
                await daemon.run()
            finally:
                await daemon.stop()
            assert daemon.left_with is not None
            if daemon.left_with != AGAIN:
                return daemon.left_with
            loaded = daemon.loaded
            for number in (signal.SIGTERM, signal.SIGINT):  # until the next Daemon installs its own
                asyncio.get_running_loop().add_signal_handler(number, told.append, number)
    finally:
        if lock is not None:
            lock.release()
        logs.close()


class Daemon(Turning):
    """Start, run, stop. tick.py handles each turn of the sensing loop, core.py holds the state."""

    # -- start

    async def start(
        self,
        gpu_reader: GpuReader | None,
        same_disk_store: bool,
        adopt_existing: bool,
        take_over: str = "",
        fresh: str = "",
    ) -> None:
        loop = asyncio.get_running_loop()
        self._leaving = loop.create_future()
        settings = self.loaded.settings
        if self._ground is None:
            self._ground = await take_ground(settings, lock=False)
        paths, _ = self._ground
        opened, worker = await open_journal(paths.journal, self._clock.wall)
        journal = self._journal = AsyncJournal(opened)
        emit = self._emit = EventBus(journal, self._clock)
        await emit.load()
        emit.listeners.append(self._on_event)
        self.bulletin = OpenFindings(emit)
        self.parts = await self._disk.call(
            build,
            settings,
            Foundation(
                paths,
                self._clock,
                journal,
                emit,
                self,
                Rescans(settings.checkpoints.rescan),
                self._ground[1],
                worker,
            ),
            Choices(gpu_reader, same_disk_store, take_over),
        )
        if self.parts.checks.unknown and (pause := await self._disk.call(last_pause, paths.runtime)):
            await journal.run(Journal.learn, PAUSE, pause)
        lock = self._ground[1]
        if lock is not None and not lock.complete and journal.sync.obstacle is None:
            self.parts.checks.missing = f"podwatch cannot lock the run ({paths.lock})"
        await self.parts.checks.prove()
        self.backing = StoreJobs(self.parts, self.view)
        await self._load_memory()
        if journal.sync.recovered:
            self._say(EventName.STATE_RECOVERED, RECOVERED)
        if journal.sync.rebuilt:
            self._say(EventName.STATE_REBUILT, journal.sync.rebuilt, Severity.WARNING)
        await self._open_notifying()
        self._open_outlets()
        assert self._outlets is not None
        await self._outlets.open()
        await self._first_look()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave, 0)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        await self._begin(adopt_existing, fresh)
        await self._disk.call(self._keep_last_good)
        settle()
        self._notifier.ready(self._headline())

    async def _load_memory(self) -> None:
        journal = self.parts.run.journal
        kept = await journal.run(Journal.learned, LEARNED, {})
        self._pins = dict(await journal.run(Journal.pins))
        self._incident = next(iter(await journal.run(Journal.incidents, 1)), None)
        learned = Learned.from_dict(kept) if isinstance(kept, dict) else Learned()
        announced = Announced(
            await journal.run(Journal.learned, ANNOUNCED), lambda known: journal.post(Journal.learn, ANNOUNCED, known)
        )
        self.rounds = make_loops(
            self.parts, learned=learned, pins=lambda: self._pins, on_turn=self._on_turn, announced=announced
        )
        parts = self.parts
        self.pausing = Maintenance(
            journal,
            self._clock,
            parts.run.emit,
            lambda look: status_view.gpus_held(parts, look),
            parts.recovery.context.pause,
        )
        await self.pausing.load()
        self._recorder = make_recorder(self.parts, lambda: self.rounds.sensing.state.learned)

    async def _open_notifying(self) -> None:
        def complain(text: str) -> None:
            self._say(EventName.CONFIG_WARNING, text, Severity.WARNING)

        parts = self.parts
        self._notifying = await make_notifying(
            parts.settings,
            self._clock,
            parts.run.journal,
            self._disk,
            complain,
            parts.run.paths.journal.parent,
        )
        if self._notifying is not None:
            self._bus().listeners.append(self._notifying.event)

    def _open_outlets(self) -> None:
        self._outlets = Endpoints(
            self.parts,
            config_path=str(self.loaded.path or ""),
            view=self.view,
            status=self.status,
            live=self.rounds.sensing.alive,
            ready=lambda: status_view.readiness(self.parts, self.rounds.sensing.snapshot),
            handlers=once_begun(
                {
                    **make_handlers(self),
                    **pause_handlers(self.pausing, lambda: self.parts.recovery.state.acting),
                    **preempt_handlers(self._preempt, lambda: self.parts.settings.recovery.preempt_grace),
                },
                self._begun,
            ),
            complain=lambda text: self._say(EventName.SENSOR_CHANGED, text, Severity.WARNING),
        )

    async def _first_look(self) -> None:
        parts = self.parts
        if parts.settings.mode == "act":
            await parts.deletion.worker.call(parts.deletion.remover.sweep_trash)
        await parts.sensing.sensors.start()
        await self._disk.call(parts.checkpoints.watcher.start)
        await self.rounds.guarding.look()
        end = self._clock.monotonic() + FIRST_LOOK_SECONDS
        while self._clock.monotonic() < end and str(parts.sensing.gpus.latest().state) == "pending":
            await self._clock.sleep(0.05)

    async def _begin(self, adopt_existing: bool, fresh: str) -> None:
        parts = self.parts
        self.backing.ask()
        await parts.recovery.begin(adopt_existing=adopt_existing, by_hand=os.environ.get(BY_HAND, ""))
        if fresh and await parts.run.journal.run(Journal.learned, STARTED_FRESH) != fresh:
            await parts.run.journal.run(Journal.learn, STARTED_FRESH, fresh)  # once: init passes it again
            await self._start_fresh()
        parts.checks.missing = parts.checks.missing or parts.training.record.problem
        self._begun.set()
        self._say(
            EventName.DAEMON_STARTED,
            status_view.opening(self.parts, self.pausing.pause),
            version=__version__,
            pid=os.getpid(),
        )
        for warning in (*self.loaded.warnings, *await self._exposed()):
            self._say(EventName.CONFIG_WARNING, warning, Severity.WARNING)
        self._spawn(self.rounds.sensing.run(), "sensing")
        self._spawn(self.rounds.guarding.run(), "guarding")
        await self.backing.begin(self._jobs, parts.settings, self._spawn)
        assert self._outlets is not None
        if self._notifying is not None and self._notifying.wandb is not None:
            self._jobs.every(parts.settings.wandb.every, "wandb", self._push_metrics)
        self._artefacts = make_artifacts(parts)
        if self._artefacts is not None:
            self._jobs.every(parts.settings.sync.artefacts_every, "artefacts", self._artefacts.store)
        self._jobs.every(STATUS_FILE_SECONDS, "status file", self._outlets.refresh)
        self._jobs.every(GIVE_BACK_SECONDS, "memory", _give_back)
        self._jobs.start()

    async def _start_fresh(self) -> None:
        """Execute `run --fresh` as `podwatch start --fresh`. A running trainer is kept, which is reported."""
        try:
            await self.parts.recovery.requests.start(fresh=True)
        except PodwatchError as error:
            self._say(
                EventName.START_WARNING,
                f"cannot start training from the beginning (--fresh): {error}",
                Severity.WARNING,
            )

    async def _exposed(self) -> tuple[str, ...]:
        """A warning where another user can move podwatch's directory away; reported once, not at each start."""
        worker = Worker("exposed")  # a thread of its own: a hung file system blocks it
        try:
            text = await worker.call(self.parts.run.workspace.exposed, timeout=FIRST_LOOK_SECONDS)
        except TimeoutError:
            return ()
        finally:
            worker.close()
        if text == await self.parts.run.journal.run(Journal.learned, EXPOSED, ""):
            return ()
        await self.parts.run.journal.run(Journal.learn, EXPOSED, text)
        return (text,) if text else ()

    # -- run

    async def run(self) -> int:
        assert self._leaving is not None
        return await self._leaving

    def _preempt(self, why: str) -> None:
        self._preempted = self._preempted or why
        self.leave(0)

    # -- leave

    async def stop(self) -> None:
        """Stop everything in reverse order; each step has its own deadline, so that the shutdown never hangs."""
        again = self.left_with == AGAIN
        if not again:  # after STOPPING the service manager waits for our exit
            self._notifier.stopping()
        self._jobs.stop()
        budget = await self._time_left()
        if self._preempted:  # init waits for the configured grace, and no longer
            self._notifier.extend_timeout(self.loaded.settings.recovery.preempt_grace + LAST_WORDS_SECONDS)
        await end_tasks(
            self._tasks, within=budget.seconds(PREEMPTED_TASKS_SECONDS if self._preempted else TASKS_END_SECONDS)
        )
        if hasattr(self, "rounds"):
            await self._let_go(budget)
        if self._journal is not None:
            await briefly(self._journal.close(), max(0.5, budget.seconds(STEP_SECONDS)))
        self._disk.close()
        self._notifier.close()

    async def _time_left(self) -> Budget:
        """The time for the shutdown: ``preempt_grace`` at a preemption (docs/maintenance.md), else unlimited."""
        grace = Budget(self.loaded.settings.recovery.preempt_grace)
        leaving = self._leaving
        if leaving is not None and leaving.done() and not leaving.cancelled() and leaving.result() == 0:
            self._preempted = self._preempted or await preempt.told_by(os.environ.get(UNDER_INIT, ""))
        return grace if self._preempted else Budget()

    async def _let_go(self, budget: Budget) -> None:
        parts, state, usual = self.parts, self.parts.recovery.state, STEP_SECONDS
        self._say(
            EventName.DAEMON_STOPPING,
            status_view.farewell(training=state.handle is not None, preempted=self._preempted)
            if self.left_with != AGAIN
            else "the state database can be read again: podwatch restarts itself to load it, training continues",
            preempted=bool(self._preempted),
        )
        await briefly(parts.recovery.close(), budget.seconds(PREEMPTED_ACT_SECONDS if self._preempted else usual))
        said = asyncio.ensure_future(self._last_artefacts())
        if self._preempted:
            await self._say_goodbye(budget)
        elif parts.syncer is not None:
            if self.left_with != AGAIN:
                await briefly(self.backing.say_leaving(), 3.0)
            await briefly(parts.syncer.stop())
        await briefly(parts.checks.stop(), budget.seconds(usual))
        await briefly(self.rounds.pruner.stop(), budget.seconds(usual))
        await said
        if self._notifying is not None:
            await briefly(self._notifying.farewell(budget.seconds(FAREWELL_SECONDS)), budget.seconds(usual))
        if self._outlets is not None:
            await briefly(self._outlets.close(), budget.seconds(usual))
        await briefly(parts.sensing.sensors.stop(), budget.seconds(usual))
        await briefly(self._disk.call(parts.checkpoints.watcher.stop), budget.seconds(usual))
        await briefly(parts.training.launcher.close(), budget.seconds(usual))
        if self._recorder is not None:
            await briefly(self._disk.call(self._recorder.close), budget.seconds(usual))
        parts.run.journal.post(Journal.learn, LEARNED, self.rounds.sensing.state.learned.to_dict())
        parts.run.journal.post(Journal.learn, READ_SO_FAR, parts.sensing.progress.remembered)
        self._bus().save()

    async def _last_artefacts(self) -> None:
        """Upload logs and bundles a last time, parallel to the last heartbeat; skipped at a preemption."""
        if self._artefacts is not None:
            await briefly(self._artefacts.stop(last=not self._preempted), LAST_SECONDS + 0.5)

    async def _say_goodbye(self, budget: Budget) -> None:
        syncer, recovery = self.parts.syncer, self.parts.recovery
        await preempt.say_goodbye(
            budget,
            state=None if syncer is None else syncer.status,
            beat=lambda: self.backing.say(HolderState.PREEMPTED),
            end_sync=syncer.stop if syncer is not None else preempt.nothing,
            tell=lambda: tell_to_end(recovery.context.tools, recovery.handle, self._preempted),
        )

    def _keep_last_good(self) -> None:
        try:
            save_last_good(self.loaded)
        except OSError as error:
            self._say(EventName.CONFIG_REFUSED, f"cannot save the last good copy of the configuration: {error}")


async def _give_back() -> None:
    give_back()
