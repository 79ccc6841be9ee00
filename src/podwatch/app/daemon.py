"""The lifecycle of the daemon: start, run, stop.

Order matters at start: the run lock first (one podwatch per run), the first sensor readings before READY, recovery
last, because it can stop and start training. At the end everything stops except training.
"""

import asyncio
import os
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from podwatch import __version__
from podwatch.app import status_view
from podwatch.app.backup.post_mortem import LAST_SECONDS, TELLING, make_post_mortem
from podwatch.app.checkpoint_loop import ANNOUNCED, Announced
from podwatch.app.commands import Commands
from podwatch.app.components import LEARNED as LEARNED
from podwatch.app.components import READ_SO_FAR, Choices, Components
from podwatch.app.end_of_run import EndOfRun, FinalSync, end_grace, refuse_beside_earlier_attempt, supervisor_job
from podwatch.app.end_pod import PodEnder
from podwatch.app.entry import silent_seconds
from podwatch.app.host_and_endpoints import STEP_SECONDS, Endpoints, Host, open_host
from podwatch.app.keep_run_cost import LOOK_SECONDS, Accountant
from podwatch.app.loop_wiring import DaemonLoops, make_loops, make_recorder
from podwatch.app.notifications import DIGEST_LOOK_SECONDS, FAREWELL_SECONDS, Notifying, make_notifying
from podwatch.app.page_history import History
from podwatch.app.paths_and_run_lock import RunLock
from podwatch.app.pause import Maintenance
from podwatch.app.preemption_grace import Budget
from podwatch.app.shutdown import LastWords, beside, briefly, say_goodbye, say_goodbye_of_job, told_by
from podwatch.app.state_check import take_ground
from podwatch.app.status_view import Books, Remembered, StatusSource
from podwatch.app.store_jobs import Jobs, StoreJobs
from podwatch.app.tick import Findings, LoadAgain, Reload, Reporters, Tick
from podwatch.app.variables_of_own_processes import BY_HAND, UNDER_INIT
from podwatch.app.wiring import build
from podwatch.config.last_good import save_last_good
from podwatch.config.loading import LoadedSettings
from podwatch.detection.learned import Learned
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.journal import Journal
from podwatch.recording.recorder import Recorder
from podwatch.report import logging as log
from podwatch.report.run_cost import Account, Price
from podwatch.sensors.gpu import GpuReader
from podwatch.system.blocking_calls import Worker
from podwatch.system.child import give_back, settle
from podwatch.system.clock import Clock, SystemClock
from podwatch.system.sd_notify import make_notifier
from podwatch.trainer.start_and_adopt import SupervisorJob

if TYPE_CHECKING:
    from podwatch.app.backup.post_mortem import PostMortem
    from podwatch.hooks.evaluation import Evaluations
    from podwatch.hooks.hook_runner import Hooks

FIRST_LOOK_SECONDS = 10.0
"""READY waits at most this long for the first GPU reading; a GPU sensor without an answer does not block the start."""
STATUS_FILE_SECONDS = 60.0
EXPOSED = "paths.exposed"
"""Journal key: the last reported warning that another user can move podwatch's directory away."""
GIVE_BACK_SECONDS = 30.0
"""Interval of returning freed memory to the system; takes less than a millisecond when there is none."""
TASKS_END_SECONDS = 5.0
"""A loop that waits for a hung disk is abandoned after this: its thread is a daemon thread."""
LAST_WORDS_SECONDS = 2.0
"""Time that the shutdown takes after the last preemption step."""
PREEMPTED_TASKS_SECONDS, PREEMPTED_ACT_SECONDS = 0.3, 0.4
"""Deadlines for the loops and for recovery's operation in progress at a preemption: the next podwatch completes it."""


@dataclass(frozen=True, slots=True)
class Start:
    """How `podwatch run` starts the daemon. ``take_over`` is the id of an operator's `--take-over`, and likewise the
    other flags; each id is executed once."""

    adopt_existing: str = ""
    gpu_reader: GpuReader | None = None
    same_disk_store: bool = False
    take_over: str = ""
    fresh: str = ""
    retry: str = ""


async def serve(
    loaded: LoadedSettings,
    start: Start | None = None,
    *,
    clock: Clock | None = None,
    load_again: LoadAgain | None = None,
) -> int:
    """Run the daemon until it is stopped; returns the exit code. Raises PodwatchError if it cannot start."""
    settings, start = loaded.settings, start or Start()
    logs = log.configure(settings.log.format, settings.log.level)
    lock: RunLock | None = None
    try:
        ground = await take_ground(settings)
        lock = ground[1]
        silent = silent_seconds(os.environ)
        host = await open_host(settings, clock or SystemClock(), ground, make_notifier(os.environ))
        try:
            daemon = await build_daemon(host, loaded, load_again, start, silent)
        except BaseException:
            host.systemd.stopping()
            await host.tasks.end(within=TASKS_END_SECONDS)
            await host.close()
            raise
        try:
            await daemon.start(start)
            await host.exit.wait()
        finally:
            await daemon.stop()
        return host.exit.code
    finally:
        if lock is not None:
            lock.release()
        logs.close()


async def build_daemon(
    host: Host, loaded: LoadedSettings, load_again: LoadAgain | None, start: Start, silent: float
) -> "Daemon":
    """The daemon with all that its parts remember of an earlier podwatch; starts nothing."""
    journal, paths = host.journal, host.foundation.paths
    job = supervisor_job(loaded.settings.recovery, os.environ)
    choices = Choices(start.gpu_reader, start.same_disk_store, start.take_over, job, bool(start.retry))
    parts = await host.disk.call(build, loaded.settings, host.foundation, choices)
    parts.run.config.problem = loaded.refused
    await host.disk.call(host.lock.take_beside, parts.run.workspace)  # Busy: another podwatch guards output_dir
    await parts.checks.look()
    memory = Remembered(journal)
    await memory.load()
    accountant = Accountant(journal, host.clock, host.bus, counted=not parts.run.layout.counts_saves)
    await accountant.load()
    kept = await journal.run(Journal.learned, LEARNED, {})
    learned = Learned.kept(kept) or Learned()
    announced = Announced(
        await journal.run(Journal.learned, ANNOUNCED), lambda known: journal.post(Journal.learn, ANNOUNCED, known)
    )
    loops = make_loops(parts, learned=learned, announced=announced)
    maintenance = Maintenance(parts.run.file, host.clock, host.bus, parts.recovery)
    for text in (journal.sync.rebuilt, *parts.run.file.news):
        if text:
            host.bus.say(EventName.STATE_REBUILT, text, Severity.WARNING)
    notifying = await make_notifying(
        parts.settings,
        host.clock,
        journal,
        host.disk,
        lambda text: host.bus.say(EventName.CONFIG_WARNING, text, Severity.WARNING),
        paths.journal.parent,
    )
    hooks = None
    if loaded.settings.hooks:
        from podwatch.app.hooks import make_hooks

        hooks = await make_hooks(parts, host, loaded.path)
    evaluations = None
    if loaded.settings.evaluation.command:
        from podwatch.app.evaluation import make_evaluations

        evaluations = await make_evaluations(parts, host, loops, loaded.path)
    findings = Findings(parts, loops, host.bus, maintenance, Reporters(notifying, hooks, evaluations), silent)
    history = History(paths.history, host.disk, host.bus)
    books = Books(accountant, history)
    best = str if evaluations is None else evaluations.best_text
    status = StatusSource(parts, loops, host.bus, findings, memory, maintenance, loaded.path, host.exit, books, best)
    recorder = make_recorder(parts, loops.sensing)
    reload = Reload(parts, loops, host, loaded, load_again, status, recorder)
    store_jobs = StoreJobs(parts, status)
    tick = Tick(parts, loops, host, findings, status, store_jobs, maintenance, notifying, recorder)
    commands = Commands(parts, loops, host, status, maintenance, reload, evaluations)
    artifacts = make_post_mortem(parts, reload)
    final = FinalSync(parts, loops, host, artifacts)
    pod = PodEnder(parts.run.config, parts.recovery, host.exit, os.environ)
    ending = EndOfRun(parts, host, final, parts.verdicts, pod, store_jobs, evaluations, hooks)
    outlets = Outlets(notifying, recorder, artifacts, ending, job, hooks, evaluations)
    return Daemon(host, parts, loops, status, memory, reload, store_jobs, commands, tick, outlets)


@dataclass(frozen=True, slots=True)
class Outlets:
    """What a daemon has only if it is configured; and the end of the run."""

    notifying: Notifying | None
    recorder: Recorder | None
    artifacts: "PostMortem | None"
    ending: EndOfRun
    job: SupervisorJob | None
    hooks: "Hooks | None" = None
    evaluations: "Evaluations | None" = None


class Daemon:
    """Start, run, stop."""

    def __init__(
        self,
        host: Host,
        parts: Components,
        loops: DaemonLoops,
        status: StatusSource,
        memory: Remembered,
        reload: Reload,
        store_jobs: StoreJobs,
        commands: Commands,
        tick: Tick,
        outlets: Outlets,
    ) -> None:
        self._host, self._parts, self._loops, self._status, self._memory = host, parts, loops, status, memory
        self._reload, self._store_jobs, self._commands, self._tick = reload, store_jobs, commands, tick
        self._notifying, self._recorder = outlets.notifying, outlets.recorder
        self._artifacts, self._ending, self._in_job = outlets.artifacts, outlets.ending, outlets.job
        self._hooks, self._evaluations = outlets.hooks, outlets.evaluations
        self._endpoints = Endpoints(parts, status, commands.table(), host.bus, str(reload.loaded.path or ""))
        self._jobs = Jobs()
        host.bus.listeners.append(self._on_event)
        if self._hooks is not None:
            host.bus.listeners.append(self._hooks.event)
        if self._evaluations is not None:
            host.bus.listeners.append(self._evaluations.event)

    @property
    def loaded(self) -> LoadedSettings:
        """The configuration in force."""
        return self._reload.loaded

    # -- start

    async def start(self, start: Start) -> None:
        loop = asyncio.get_running_loop()
        await self._endpoints.open()
        await self._first_look()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._host.exit.leave, 0)
        loop.add_signal_handler(signal.SIGHUP, self._reload.on_signal)
        await self._begin(start)
        await self._host.disk.call(self._keep_last_good)
        settle()
        self._host.systemd.ready(self._status.headline())

    async def _first_look(self) -> None:
        parts = self._parts
        if parts.settings.mode == "act":
            await parts.deletion.worker.call(parts.deletion.remover.sweep_trash)
        await parts.sensing.start()
        await self._host.disk.call(parts.checkpoints.watcher.start)
        await self._loops.guarding.look()
        end = self._host.clock.monotonic() + FIRST_LOOK_SECONDS
        while self._host.clock.monotonic() < end and str(parts.sensing.gpus.latest().state) == "pending":
            await self._host.clock.sleep(0.05)

    async def _begin(self, start: Start) -> None:
        parts = self._parts
        self._store_jobs.ask()
        if parts.gang is not None:
            await parts.gang.start()
            self._host.tasks.spawn(parts.gang.run(), "nodes")
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
        self._host.bus.say(EventName.DAEMON_STARTED, self._status.opening(), version=__version__, pid=os.getpid())
        for warning in (*self.loaded.warnings, *await self._exposed()):
            self._host.bus.say(EventName.CONFIG_WARNING, warning, Severity.WARNING)
        await self._begin_hooks()
        self._host.tasks.spawn(self._loops.sensing.run(self._tick.turn), "sensing")
        self._host.tasks.spawn(self._loops.guarding.run(), "guarding")
        self._host.tasks.spawn(self._ending.watch(), "end of the run")
        self._host.tasks.spawn(self._ending.follow(), "verdicts")
        await self._store_jobs.begin(self._jobs, self._host.tasks)
        if self._notifying is not None and self._notifying.wandb is not None:
            self._jobs.every(parts.settings.wandb.every, "wandb", self._push_metrics)
        if self._notifying is not None and self._notifying.digest_every > 0:
            self._host.tasks.spawn(self._send_digest(), "first look at the digest")
            self._jobs.every(DIGEST_LOOK_SECONDS, "digest", self._send_digest)
        if self._notifying is not None and self._notifying.dead_man is not None:
            self._host.tasks.spawn(self._call_dead_man(), "first call of the dead-man's switch")
            self._jobs.every(parts.settings.notify.heartbeat_every, "dead-man's switch", self._call_dead_man)
        if self._artifacts is not None:
            self._jobs.every(parts.settings.sync.artefacts_every, "artefacts", self._artifacts.store)
            self._host.tasks.spawn(self._artifacts.when_held(), "files of the start")
        self._jobs.every(STATUS_FILE_SECONDS, "status file", self._endpoints.refresh)
        self._jobs.every(LOOK_SECONDS, "account", self._look_at_account)
        self._jobs.every(GIVE_BACK_SECONDS, "memory", _give_back)
        self._jobs.start()

    async def _begin_hooks(self) -> None:
        if self._hooks is None and self._evaluations is None:
            return
        from podwatch.app.hooks import report_missed

        await report_missed(self._parts, self._host)
        if self._hooks is not None:
            self._hooks.start()
        if self._evaluations is not None:
            self._evaluations.start()

    async def _may_train(self) -> bool:
        """In job mode: ask the store whether this attempt can train. Raises Busy while an earlier one ends here."""
        if self._in_job is None:
            return True
        settings = self._parts.settings
        directory = settings.state_dir / settings.run_id / "supervisor"
        await self._parts.checkpoints.worker.call(refuse_beside_earlier_attempt, directory, self._in_job)
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
            self._host.bus.say(EventName.START_WARNING, text, Severity.WARNING)
            file.note(lambda run: replace(run, executed={**run.executed, flag: given}))
            file.record_soon()

    async def _exposed(self) -> tuple[str, ...]:
        """A warning where another user can move podwatch's directory away; reported once, not at each start."""
        worker = Worker("exposed")  # a thread of its own: a hung file system blocks it
        try:
            text = await worker.call(self._parts.run.workspace.exposed, timeout=FIRST_LOOK_SECONDS)
        except TimeoutError:
            return ()
        finally:
            worker.close()
        if text == await self._parts.run.journal.run(Journal.learned, EXPOSED, ""):
            return ()
        await self._parts.run.journal.run(Journal.learn, EXPOSED, text)
        return (text,) if text else ()

    # -- run

    def _on_event(self, event: Event) -> None:
        if event.name in (EventName.INCIDENT_OPENED, EventName.INCIDENT_CLOSED, EventName.GAVE_UP):
            self._host.tasks.spawn(self._memory.read_incident(), "incident")
        if self._artifacts is not None and self._commands.begun.is_set() and event.name in TELLING:
            self._artifacts.soon()
        if self._notifying is not None:
            self._notifying.event(event, self._account)

    def _account(self) -> Account:
        """The run's time and money until now."""
        cost, learned = self._parts.settings.cost, self._loops.sensing.state.learned
        price = Price(cost.per_hour, cost.currency)
        return self._status.books.accountant.account(price, learned.median_step_seconds)

    async def _look_at_account(self) -> None:
        view = self._status.view()
        self._status.books.accountant.look(view)
        await self._status.books.history.look(view)

    async def _call_dead_man(self) -> None:
        if self._notifying is not None:
            await self._notifying.call_dead_man(self._status.view())

    async def _send_digest(self) -> None:
        if self._notifying is not None:
            await self._notifying.digest(self._status.view(), self._store_jobs)

    async def _push_metrics(self) -> None:
        if self._notifying is not None:
            await self._notifying.push(self._status.view())

    # -- leave

    async def stop(self) -> None:
        """Stop everything in reverse order; each step has its own deadline, so that the shutdown never hangs."""
        host, leaving = self._host, self._host.exit
        host.systemd.stopping()
        self._parts.recovery.leave()
        self._jobs.stop()
        budget = await self._time_left()
        await self._ending.leaving()
        if leaving.preempted:  # init waits for the configured grace, and no longer
            host.systemd.extend_timeout(self._grace() + LAST_WORDS_SECONDS)
        await host.tasks.end(within=budget.seconds(PREEMPTED_TASKS_SECONDS if leaving.preempted else TASKS_END_SECONDS))
        await self._let_go(budget)
        if leaving.verdict is not None and self._in_job is not None:
            host.systemd.job_ended(int(leaving.verdict.code))
        await host.close(max(0.5, budget.seconds(STEP_SECONDS)))

    def _grace(self) -> float:
        """Seconds for a preemption: the engine's, in job mode; a little less, because init kills us when it is over."""
        recovery = self.loaded.settings.recovery
        if self._in_job is None:
            return recovery.preempt_grace
        return max(recovery.preempt_grace / 2, end_grace(recovery, os.environ) - LAST_WORDS_SECONDS)

    async def _time_left(self) -> Budget:
        """The time for the shutdown: ``_grace`` at a preemption (docs/maintenance.md), else unlimited."""
        grace = Budget(self._grace())
        leaving = self._host.exit
        if leaving.first == 0 and leaving.verdict is None:
            leaving.preempted = leaving.preempted or await told_by(os.environ.get(UNDER_INIT, ""))
        return grace if leaving.preempted else Budget()

    async def _let_go(self, budget: Budget) -> None:
        parts, state, usual = self._parts, self._parts.recovery.state, STEP_SECONDS
        preempted = self._host.exit.preempted
        self._host.bus.say(
            EventName.DAEMON_STOPPING,
            status_view.farewell(
                training=state.handle is not None, preempted=preempted, evaluating=bool(state.evaluation)
            ),
            preempted=bool(preempted),
        )
        await briefly(parts.recovery.close(), budget.seconds(PREEMPTED_ACT_SECONDS if preempted else usual))
        said = asyncio.ensure_future(self._last_artefacts())
        hooks_end = asyncio.ensure_future(self._end_hooks(budget.before_reserve() if preempted else usual))
        if preempted:
            words = LastWords(parts, self._loops, self._store_jobs, preempted)
            goodbye = say_goodbye if self._in_job is None else say_goodbye_of_job
            await beside(goodbye(budget, words), self._ending.record(), budget)
        elif parts.backup is not None:
            await briefly(self._store_jobs.say_leaving(), 3.0)
            await briefly(parts.backup.stop())
        if parts.gang is not None:
            await briefly(parts.gang.leave(), budget.seconds(usual))
        await briefly(parts.checks.stop(), budget.seconds(usual))
        await briefly(self._loops.pruner.stop(), budget.seconds(usual))
        await said
        await briefly(hooks_end, budget.seconds(usual))
        if self._notifying is not None:
            await briefly(self._notifying.farewell(budget.seconds(FAREWELL_SECONDS)), budget.seconds(usual))
        await briefly(self._endpoints.close(), budget.seconds(usual))
        await briefly(parts.sensing.stop(), budget.seconds(usual))
        await briefly(self._host.disk.call(parts.checkpoints.watcher.stop), budget.seconds(usual))
        await briefly(parts.training.launcher.close(), budget.seconds(usual))
        if self._recorder is not None:
            await briefly(self._host.disk.call(self._recorder.close), budget.seconds(usual))
        parts.run.journal.post(Journal.learn, LEARNED, self._loops.sensing.state.learned.to_json())
        parts.run.journal.post(Journal.learn, READ_SO_FAR, parts.sensing.progress.remembered)
        await self._look_at_account()
        self._host.bus.save()

    async def _last_artefacts(self) -> None:
        """Upload logs and bundles a last time, parallel to the last heartbeat; skipped at a preemption."""
        if self._artifacts is not None and self._commands.begun.is_set():
            await briefly(self._artifacts.stop(last=not self._host.exit.preempted), LAST_SECONDS + 0.5)

    async def _end_hooks(self, seconds: float) -> None:
        if self._evaluations is not None:
            await self._evaluations.stop()
        if self._hooks is not None:
            await self._hooks.stop(seconds)

    def _keep_last_good(self) -> None:
        try:
            save_last_good(self.loaded)
        except OSError as error:
            self._host.bus.say(
                EventName.CONFIG_REFUSED, f"cannot save the last good copy of the configuration: {error}"
            )


async def _give_back() -> None:
    give_back()
