"""The daemon: start, the loop, leave.

The loop turns every few seconds: observe, judge, decide, act, report. Order matters at start: the run lock first (one
podwatch per run), the first sensor readings before READY, recovery last, because it can stop and start training. At the
end everything stops except training.
"""

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from podwatch import __version__
from podwatch.app.backup.post_mortem import LAST_SECONDS, TELLING, make_post_mortem
from podwatch.app.build import Components, Foundation, StartOptions, build, make_recorder
from podwatch.app.commands import Commands
from podwatch.app.end_of_run import EndOfRun, FinalSync
from podwatch.app.end_pod import PodEnder
from podwatch.app.endpoints import Endpoints
from podwatch.app.entry import silent_seconds
from podwatch.app.event_bus import EventBus
from podwatch.app.findings import Findings
from podwatch.app.job_mode import end_grace, refuse_during_earlier_attempt, supervisor_job
from podwatch.app.keep_run_cost import KEEP_SECONDS, Accountant
from podwatch.app.notifications import CLOSE_SECONDS, Notifying, make_notifying
from podwatch.app.paths_and_run_lock import RunLock
from podwatch.app.pause import Maintenance
from podwatch.app.preemption import Budget, Preemption, why_preempted
from podwatch.app.sensing import LEARNED, READ_SO_FAR
from podwatch.app.settings_in_force import LoadAgain, Reload
from podwatch.app.shutdown import STEP_SECONDS, briefly
from podwatch.app.state_check import open_journal, take_paths_and_lock
from podwatch.app.status_view import StatusSource, last_line
from podwatch.app.store_jobs import Jobs, StoreJobs
from podwatch.app.variables_of_own_processes import BY_HAND, UNDER_INIT
from podwatch.config.last_good import save_last_good
from podwatch.config.loading import LoadedSettings
from podwatch.domain.errors import ConfigurationError, ExitCode, PodwatchError
from podwatch.domain.event import Event, EventName
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import Severity
from podwatch.domain.snapshot import SensorState
from podwatch.journal import AsyncJournal, Journal
from podwatch.report import logging as log
from podwatch.system.blocking_calls import Worker
from podwatch.system.child import give_back, settle
from podwatch.system.clock import Clock, SystemClock
from podwatch.trainer.start_and_adopt import SupervisorJob

if TYPE_CHECKING:
    from podwatch.hooks.evaluation import Evaluations
    from podwatch.hooks.hook_runner import Hooks

FIRST_LOOK_SECONDS = 10.0
"""READY waits at most this long for the first GPU reading; a GPU sensor without an answer does not block the start."""
REMEMBER_TURNS = 10
"""Turns between two writes of what the next podwatch needs, 20 s at the default poll. After a crash it reads the log
lines since then again, which is harmless."""
STATUS_FILE_SECONDS = 60.0
EXPOSED = "paths.exposed"
"""Journal key: the last reported warning that another user can move podwatch's directory away."""
GIVE_BACK_SECONDS = 30.0
"""Interval of returning freed memory to the system; takes less than a millisecond when there is none."""
TASKS_END_SECONDS = 5.0
"""A loop that waits for a hung disk is abandoned after this: its thread is a daemon thread."""
AFTER_GRACE_SECONDS = 2.0
"""Time that the shutdown takes after the last preemption step."""
PREEMPTED_TASKS_SECONDS, PREEMPTED_ACT_SECONDS = 0.3, 0.4
"""Deadlines for the loops and for recovery's operation in progress at a preemption: the next podwatch completes it."""


async def serve(
    loaded: LoadedSettings,
    start: StartOptions | None = None,
    *,
    clock: Clock | None = None,
    load_again: LoadAgain | None = None,
) -> int:
    """Run the daemon until it is stopped; returns the exit code. Raises PodwatchError if it cannot start."""
    settings, start, clock = loaded.settings, start or StartOptions(), clock or SystemClock()
    logs = log.configure(settings.log.format, settings.log.level)
    lock: RunLock | None = None
    try:
        paths, lock = await take_paths_and_lock(settings)
        silent = silent_seconds(os.environ)
        journal = AsyncJournal(await open_journal(paths.journal, clock))
        bus = EventBus(journal, clock)
        await bus.load()
        foundation = Foundation(paths, clock, journal, bus, lock)
        try:
            job = supervisor_job(settings.recovery, os.environ)
            parts = await foundation.disk.call(build, settings, foundation, start, job)
            # Raises Busy where another podwatch guards output_dir.
            await foundation.disk.call(lock.take_output_lock, parts.run.workspace)
            daemon = await make_daemon(parts, loaded, load_again, job, silent)
        except BaseException:
            foundation.systemd.stopping()
            await foundation.tasks.end(within=TASKS_END_SECONDS)
            await foundation.close()
            raise
        try:
            await daemon.start(start)
            await foundation.exit.wait()
        finally:
            await daemon.stop()
        return foundation.exit.code
    finally:
        if lock is not None:
            lock.release()
        logs.close()


async def make_daemon(
    parts: Components, loaded: LoadedSettings, load_again: LoadAgain | None, job: SupervisorJob | None, silent: float
) -> "Daemon":
    """The daemon with what the journal has for its reports; starts nothing."""
    foundation, run, bus, hooks, evaluations = parts.foundation, parts.run, parts.bus, None, None
    run.config.problem = loaded.refused
    await parts.checks.try_again()
    accountant = Accountant(run.journal, run.clock, bus, counted=not run.layout.counts_saves)
    await accountant.load()
    for text in (run.journal.sync.rebuilt, *run.file.news):
        if text:
            bus.say(EventName.STATE_REBUILT, text, Severity.WARNING)
    notifying = await make_notifying(parts.settings, run.clock, run.journal, foundation.disk, bus.warn, run.paths.state)
    if parts.settings.hooks:
        from podwatch.app.hooks import make_hooks

        hooks = await make_hooks(parts, loaded.path)
    if parts.settings.evaluation.command:
        from podwatch.app.evaluation import make_evaluations

        evaluations = await make_evaluations(parts, loaded.path)
    daemon = Daemon(parts, loaded, load_again, job, silent, accountant, notifying, hooks, evaluations)
    await daemon.status.read_incidents()
    return daemon


class Daemon:
    """Start, the loop, leave. ``notifying``, ``hooks`` and ``evaluations`` are None where they are not configured."""

    def __init__(
        self,
        parts: Components,
        loaded: LoadedSettings,
        load_again: LoadAgain | None,
        job: SupervisorJob | None,
        silent: float,
        accountant: Accountant,
        notifying: Notifying | None,
        hooks: "Hooks | None",
        evaluations: "Evaluations | None",
    ) -> None:
        self._parts, self._job, self._notifying = parts, job, notifying
        self._hooks, self._evaluations = hooks, evaluations
        self._maintenance = Maintenance(parts.run.file, parts.run.clock, parts.bus, parts.recovery)
        reporters = [one for one in (notifying, hooks, evaluations) if one is not None]
        self._findings = Findings(parts, self._maintenance, reporters, silent)
        self.status = StatusSource(parts, self._findings, self._maintenance, accountant, evaluations, loaded.path)
        self._recorder = make_recorder(parts)
        self._reload = Reload(parts, loaded, load_again, self.status, self._recorder)
        self._store_jobs = StoreJobs(parts, self.status, accountant)
        self._commands = Commands(parts, self.status, self._maintenance, self._reload, evaluations)
        self._artifacts = make_post_mortem(parts, self._reload)
        pod = PodEnder(parts.run.config, parts.recovery, parts.exit, os.environ)
        final = FinalSync(parts, self._artifacts)
        self._ending = EndOfRun(parts, final, parts.verdicts, pod, self._store_jobs, evaluations, hooks)
        self._endpoints = Endpoints(parts, self.status, self._commands.table(), str(loaded.path or ""))
        self._jobs = Jobs()
        self._remembered: tuple[object, ...] = ()
        self._headline = ""
        parts.bus.listeners.append(self._on_event)
        parts.bus.listeners.extend(one.event for one in (hooks, evaluations) if one is not None)

    # -- the loop

    async def _loop(self) -> None:
        while True:
            self._turn()
            await self._parts.detection.until_next_turn()

    def _turn(self) -> None:
        """Observe, judge, decide, report. Recovery, the uploads and the pruner act in tasks of their own."""
        parts = self._parts
        facts = parts.observation.read()
        detected = parts.detection.judge(facts.pod)
        parts.foundation.systemd.watchdog()
        if self._recorder is not None:
            self._recorder.turn(facts.pod)

        parts.checks.turn()
        self._maintenance.turn(facts.pod)
        parts.checkpoints.implausible.turn(facts.pod)
        acted = (*detected, *parts.pruner.findings())
        acted = acted if parts.gang is None else parts.gang.judged(acted)
        parts.recovery.consider(facts, acted, parts.checkpoints.two_writers.beside)
        self._store_jobs.turn(facts.pod)
        self._leave_if_locked_out(facts.store)
        if parts.recovery.asks_whose:
            parts.checkpoints.rescans.wake()
        if parts.checkpoints.roots.repaired():
            parts.recovery.read_again()

        findings = self._findings.turn(parts.observation.now(), detected)
        if self._notifying is not None:
            self._notifying.turn(findings, facts.pod)
        self._remember()
        headline = self.status.headline()
        if headline != self._headline:  # the line that ``systemctl status`` shows
            self._headline = headline
            parts.foundation.systemd.status(headline)

    def _leave_if_locked_out(self, store: StoreFacts | None) -> None:
        """Exit where the store refuses this pod permanently and no training runs here: waiting only costs money."""
        error = None if store is None else store.locked_out
        if error is None or self._parts.exit.first is not None or not self._parts.recovery.waits_for_store:
            return
        text = (
            f"cannot start training: {error}. Without the store podwatch cannot know whether another pod trains this"
            " run, so podwatch exits. To start training from the beginning anyway: `podwatch run --fresh`"
        )
        self._parts.bus.say(EventName.DAEMON_STOPPING, text, Severity.CRITICAL)
        wrong = isinstance(error, ConfigurationError)
        self._parts.exit.leave(ExitCode.CONFIGURATION if wrong else ExitCode.PERMISSION)

    def _remember(self, *, last: bool = False) -> None:
        """Record what the next podwatch needs; at once what it must have if the engine, or this podwatch, dies now: a
        detector that is ready, and the log of a new start. It finds a finish line that is printed while none runs."""
        state, read = self._parts.detection.state, self._parts.sensors.progress.remembered
        known = (state.armed, state.learned.seen, read.get("start_id"))
        if not last and known == self._remembered and self._parts.detection.turns % REMEMBER_TURNS:
            return
        self._remembered = known
        self._parts.run.journal.post(Journal.learn, LEARNED, state.learned.to_json())
        if read:  # else nothing was read yet: what an earlier podwatch read stays known
            self._parts.run.journal.post(Journal.learn, READ_SO_FAR, read)
        self._parts.bus.save()

    async def _rescan(self) -> None:
        """Find the checkpoints again and again, and let them be uploaded and pruned."""
        parts = self._parts
        while True:
            await parts.checkpoints.rescans.rescan()
            if parts.backup is not None:
                parts.backup.notify()
            parts.pruner.start_if_due()
            await parts.checkpoints.rescans.until_due()

    def _on_event(self, event: Event) -> None:
        if event.name in (EventName.INCIDENT_OPENED, EventName.INCIDENT_CLOSED, EventName.GAVE_UP):
            self._parts.foundation.tasks.spawn(self.status.read_incidents(), "incident")
        if self._artifacts is not None and self._commands.begun.is_set() and event.name in TELLING:
            self._artifacts.soon()
        if self._notifying is not None:
            self._notifying.event(event, self.status.account)

    # -- start

    async def start(self, start: StartOptions) -> None:
        loop, foundation = asyncio.get_running_loop(), self._parts.foundation
        await self._endpoints.open()
        await self._first_look()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, foundation.exit.leave, 0)
        loop.add_signal_handler(signal.SIGHUP, self._reload.on_signal)
        await self._begin(start)
        await foundation.disk.call(self._keep_last_good)
        settle()
        foundation.systemd.ready(self.status.headline())

    async def _first_look(self) -> None:
        parts, clock = self._parts, self._parts.run.clock
        if parts.settings.mode == "act":
            await parts.checkpoints.removals.call(parts.checkpoints.remover.sweep_trash)
        await parts.sensors.start()
        await parts.foundation.disk.call(parts.checkpoints.rescans.watcher.start)
        await parts.checkpoints.rescans.rescan()
        end = clock.monotonic() + FIRST_LOOK_SECONDS
        while clock.monotonic() < end and parts.sensors.gpus.latest().state is SensorState.PENDING:
            await clock.sleep(0.05)

    async def _begin(self, start: StartOptions) -> None:
        parts, spawn = self._parts, self._parts.foundation.tasks.spawn
        self._store_jobs.ask()
        if parts.gang is not None:
            await parts.gang.start()
            spawn(parts.gang.run(), "nodes")
        if not await self._may_train():
            return
        await parts.recovery.begin(
            adopt_existing=start.adopt_existing,
            by_hand=os.environ.get(BY_HAND, ""),
            not_before_wall=self._ending.not_before_wall,
        )
        await self._start_again("--fresh", start.fresh, fresh=True)
        await self._start_again("--retry", start.retry)
        self._commands.begun.set()
        parts.bus.say(EventName.DAEMON_STARTED, self.status.opening(), version=__version__, pid=os.getpid())
        for warning in (*self._reload.loaded.warnings, *await self._exposed()):
            parts.bus.say(EventName.CONFIG_WARNING, warning, Severity.WARNING)
        if self._hooks is not None or self._evaluations is not None:
            from podwatch.app.hooks import report_missed

            await report_missed(parts)
        for commands in (self._hooks, self._evaluations):
            if commands is not None:
                commands.start()
        spawn(self._loop(), "sensing")
        spawn(self._rescan(), "guarding")
        spawn(self._ending.watch(), "end of the run")
        spawn(self._ending.follow(), "verdicts")
        await self._store_jobs.begin(self._jobs, parts.foundation.tasks)
        if self._notifying is not None:
            self._notifying.begin(self._jobs, parts.foundation.tasks, self.status, self._store_jobs)
        if self._artifacts is not None:
            self._jobs.every(parts.settings.sync.artefacts_every, "artefacts", self._artifacts.store)
            spawn(self._artifacts.when_held(), "files of the start")
        self._jobs.every(STATUS_FILE_SECONDS, "status file", self._endpoints.refresh)
        self._jobs.every(KEEP_SECONDS, "account", self.status.keep)
        self._jobs.every(GIVE_BACK_SECONDS, "memory", _give_back)
        self._jobs.start()

    async def _may_train(self) -> bool:
        """In job mode: ask the store whether this attempt can train. Raises Busy while an earlier one ends here."""
        if self._job is None:
            return True
        settings = self._parts.settings
        directory = settings.state_dir / settings.run_id / "supervisor"
        await self._parts.checkpoints.worker.call(refuse_during_earlier_attempt, directory, self._job)
        return not await self._ending.forbidden()

    async def _start_again(self, flag: str, given: str, *, fresh: bool = False) -> None:
        """Execute a flag of `run` as `podwatch start`, once: init passes it to each daemon. A running trainer is kept,
        which is reported; that, too, answers the request, or a later daemon would carry it out unexpectedly."""
        file = self._parts.run.file
        if not given or file.current.executed.get(flag) == given:
            return
        try:
            await self._parts.recovery.requests.start(fresh=fresh, executed={flag: given})
        except PodwatchError as error:
            text = f"cannot start training ({flag}): {error}"
            self._parts.bus.say(EventName.START_WARNING, text, Severity.WARNING)
            file.note(lambda run: replace(run, executed={**run.executed, flag: given}))
            file.record_soon()

    async def _exposed(self) -> tuple[str, ...]:
        """A warning where another user can move podwatch's directory away; reported once, not at each start."""
        worker, run = Worker("exposed"), self._parts.run  # a thread of its own: a hung file system blocks it
        try:
            text = await worker.call(run.workspace.exposed, timeout=FIRST_LOOK_SECONDS)
        except TimeoutError:
            return ()
        finally:
            worker.close()
        if text == await run.journal.run(Journal.learned, EXPOSED, ""):
            return ()
        await run.journal.run(Journal.learn, EXPOSED, text)
        return (text,) if text else ()

    def _keep_last_good(self) -> None:
        try:
            save_last_good(self._reload.loaded)
        except OSError as error:
            text = f"cannot save the last good copy of the configuration: {error}"
            self._parts.bus.say(EventName.CONFIG_REFUSED, text)

    # -- leave

    async def stop(self) -> None:
        """Stop everything in reverse order; each step has its own deadline, so that the shutdown never hangs."""
        parts, foundation, leaving = self._parts, self._parts.foundation, self._parts.exit
        foundation.systemd.stopping()
        parts.recovery.leave()
        self._jobs.stop()
        budget = await self._time_left()
        await self._ending.leaving()
        if leaving.preempted:  # init waits for the configured grace, and no longer
            foundation.systemd.extend_timeout(self._grace() + AFTER_GRACE_SECONDS)
        tasks_seconds = PREEMPTED_TASKS_SECONDS if leaving.preempted else TASKS_END_SECONDS
        await foundation.tasks.end(within=budget.seconds(tasks_seconds))
        await self._stop_parts(budget)
        if leaving.verdict is not None and self._job is not None:
            foundation.systemd.job_ended(int(leaving.verdict.code))
        await foundation.close(max(0.5, budget.seconds(STEP_SECONDS)))

    def _grace(self) -> float:
        """Seconds for a preemption: the engine's, in job mode; a little less, because init kills us when it is over."""
        recovery = self._reload.loaded.settings.recovery
        if self._job is None:
            return recovery.preempt_grace
        return max(recovery.preempt_grace / 2, end_grace(recovery, os.environ) - AFTER_GRACE_SECONDS)

    async def _time_left(self) -> Budget:
        """The time for the shutdown: ``_grace`` at a preemption (docs/pods.md), else unlimited."""
        grace, leaving = Budget(self._grace()), self._parts.exit
        if leaving.first == 0 and leaving.verdict is None:
            leaving.preempted = leaving.preempted or await why_preempted(os.environ.get(UNDER_INIT, ""))
        return grace if leaving.preempted else Budget()

    async def _stop_parts(self, budget: Budget) -> None:
        parts, state, preempted = self._parts, self._parts.recovery.state, self._parts.exit.preempted
        parts.bus.say(
            EventName.DAEMON_STOPPING,
            last_line(training=state.handle is not None, preempted=preempted, evaluating=bool(state.evaluation)),
            preempted=bool(preempted),
        )
        await briefly(parts.recovery.close(), budget.seconds(PREEMPTED_ACT_SECONDS if preempted else STEP_SECONDS))
        artifacts = asyncio.ensure_future(self._last_artefacts())
        hooks = asyncio.ensure_future(self._end_hooks(budget.before_reserve() if preempted else STEP_SECONDS))
        if preempted:
            last = Preemption(parts, self._store_jobs, preempted, job=self._job is not None)
            await last.run(budget, self._ending.record())
        elif parts.backup is not None:
            await briefly(self._store_jobs.say_leaving(), 3.0)
            await briefly(parts.backup.stop())
        if parts.gang is not None:
            await briefly(parts.gang.leave(), budget.seconds(STEP_SECONDS))
        await briefly(parts.checks.stop(), budget.seconds(STEP_SECONDS))
        await briefly(parts.pruner.stop(), budget.seconds(STEP_SECONDS))
        await artifacts
        await briefly(hooks, budget.seconds(STEP_SECONDS))
        if self._notifying is not None:
            await briefly(self._notifying.close(budget.seconds(CLOSE_SECONDS)), budget.seconds(STEP_SECONDS))
        disk = parts.foundation.disk
        for end in (
            self._endpoints.close,
            parts.sensors.stop,
            partial(disk.call, parts.checkpoints.rescans.watcher.stop),
            parts.training.launcher.close,
            *(() if self._recorder is None else (partial(disk.call, self._recorder.close),)),
        ):
            await briefly(end(), budget.seconds(STEP_SECONDS))
        self._remember(last=True)
        await briefly(self.status.keep(), budget.seconds(STEP_SECONDS))
        parts.bus.save()

    async def _last_artefacts(self) -> None:
        """Upload logs and bundles a last time, parallel to the last heartbeat; skipped at a preemption."""
        if self._artifacts is not None and self._commands.begun.is_set():
            await briefly(self._artifacts.stop(last=not self._parts.exit.preempted), LAST_SECONDS + 0.5)

    async def _end_hooks(self, seconds: float) -> None:
        if self._evaluations is not None:
            await self._evaluations.stop()
        if self._hooks is not None:
            await self._hooks.stop(seconds)


async def _give_back() -> None:
    give_back()
