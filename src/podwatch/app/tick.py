"""The work of each turn of the sensing loop, the findings of all sources, and a reload."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podwatch.app.backup_findings import (
    backup_findings,
    branch_findings,
    kept_of,
    store_refused_finding,
    store_withheld_finding,
    upload_findings,
)
from podwatch.app.components import LEARNED, READ_SO_FAR, Components
from podwatch.app.corrected_snapshot import of_a_run_that_ends, of_this_trainer, present
from podwatch.app.host_and_endpoints import Host
from podwatch.app.loop_wiring import DaemonLoops, removal_rules
from podwatch.app.lost_saves import Kept, safekeeping
from podwatch.app.notifications import Notifying, OpenFindings
from podwatch.app.observe import as_of_now
from podwatch.app.own_findings import (
    concern_findings,
    config_findings,
    freeze_findings,
    linked_findings,
    saved_after_all,
    supervisor_findings,
)
from podwatch.app.pause import Maintenance
from podwatch.app.settings_in_force import learn_secrets, policies_from
from podwatch.app.status_view import StatusSource, watched_of
from podwatch.app.store_jobs import StoreJobs
from podwatch.checkpoints.shapes import PATTERN
from podwatch.checkpoints.trainers import restart_concerns
from podwatch.config.loading import LoadedSettings, load_settings
from podwatch.config.reload_limits import refused_by_reload, waits_for_restart
from podwatch.detection.merge import fold
from podwatch.domain.errors import ConfigurationError, ExitCode
from podwatch.domain.event import Emit, EventName
from podwatch.domain.facts import Facts, StoreFacts
from podwatch.domain.finding import Finding, Severity
from podwatch.domain.snapshot import Desired
from podwatch.journal import Journal
from podwatch.recording.recorder import Recorder
from podwatch.report.steps_at_risk import steps_at_risk
from podwatch.system.blocking_calls import Worker

if TYPE_CHECKING:
    from podwatch.hooks.evaluation import Evaluations
    from podwatch.hooks.hook_runner import Hooks

REMEMBER_TURNS = 30
"""Turns between two writes of the learned state to the journal: a minute at the default poll."""

READ_TURNS = 5
"""10 s at the default poll. After a crash the next podwatch reads the lines since then again, which is harmless."""

LoadAgain = Callable[[], LoadedSettings]
"""Loads the settings at a reload; None: the same file, with the environment."""


@dataclass(frozen=True, slots=True)
class Reporters:
    """What reports to the operator's own channels and commands; None where it is not configured."""

    notifying: Notifying | None = None
    hooks: "Hooks | None" = None
    evaluations: "Evaluations | None" = None

    def findings(self, at: float) -> tuple[Finding, ...]:
        told = self.notifying.findings() if self.notifying is not None else ()
        commands = [source for source in (self.hooks, self.evaluations) if source is not None]
        return (*told, *(finding for source in commands for finding in source.findings(at)))


class Findings:
    """The findings of all sources. ``silent``: seconds without a response of the previous daemon when init restarted
    it."""

    def __init__(
        self,
        parts: Components,
        loops: DaemonLoops,
        emit: Emit,
        maintenance: Maintenance,
        reporters: Reporters,
        silent: float,
    ) -> None:
        self._parts, self._loops, self._maintenance, self._reporters = parts, loops, maintenance, reporters
        self._open = OpenFindings(emit)
        self._silent, self._started = silent, parts.run.clock.monotonic()

    def turn(self, facts: Facts, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """Those of this turn, after what is new and what is over was reported. ``findings``: those of the sensing
        loop."""
        everything = self._everything(facts, findings)
        self._open.update(everything, facts.pod.wall)
        return everything

    def _everything(self, facts: Facts, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings of all sources, one for each failure. ``findings``: those of the sensing loop."""
        parts = self._parts
        ours = (
            *parts.checks.findings(),
            *self._loops.pruner.findings(),
            *self._maintenance.findings(),
            *parts.checkpoints.roots.findings(),
            *self._own(facts),
        )
        at = facts.pod.at
        telling = self._reporters.findings(at)
        kept = safekeeping((*findings, *parts.recovery.findings(), *ours), self._kept(facts), at=at)
        return fold((*kept, *telling), parts.recovery.context.healing())

    def now(self) -> tuple[Finding, ...]:
        """The findings of the last turn, updated with what recovery has done since: otherwise the status would show a
        death beside the trainer that recovery started after it."""
        clock = self._parts.run.clock
        sensing, recovery = self._loops.sensing, self._parts.recovery
        if sensing.turns == 0:
            return self._open.findings
        found, snapshot, watched = sensing.findings, sensing.snapshot, watched_of(recovery.state)
        as_of, changed = present(snapshot, watched, now=clock.monotonic(), wall=clock.wall())
        if changed:
            found = of_this_trainer(found)
        if recovery.desired is not Desired.RUNNING and snapshot.desired is Desired.RUNNING:
            found = of_a_run_that_ends(found)
        return self._open.as_of_now(self._everything(as_of_now(self._parts, as_of, sensing.state.learned), found))

    def _kept(self, facts: Facts) -> Kept:
        parts, snapshot, sync, sets = self._parts, facts.pod, facts.store, facts.checkpoints
        step, counted = parts.recovery.state.step, parts.run.layout.counts_saves
        known = sync or StoreFacts()
        at_risk = steps_at_risk(snapshot, sets, step, known.last_step, unread=known.unread, saves_counted=counted)
        return kept_of(sync, sets, at_risk)

    def _own(self, facts: Facts) -> tuple[Finding, ...]:
        parts, snapshot, sync, sets, run = self._parts, facts.pod, facts.store, facts.checkpoints, facts.run
        config = config_findings(parts.run.config.problem, since=self._started)
        concerns = tuple(c for c in parts.run.config.concerns if c.subject != PATTERN or not sets)
        handle = parts.recovery.handle
        concerns = saved_after_all(concerns, sets, None if handle is None else handle.started_wall)
        config = (*config, *concern_findings(concerns, since=self._started))
        config = (*config, *parts.training.two_writers.findings(sets, snapshot.at))
        config = (*config, *parts.checkpoints.implausible.findings(sets, snapshot.at))
        config = (*config, *branch_findings(sets, run, sync, snapshot.at, snapshot.wall))
        config += linked_findings(parts.checkpoints.catalogue.linked, since=self._started)
        config += freeze_findings(self._silent, now=snapshot.at, wall=snapshot.wall, since=self._started)
        config += supervisor_findings(snapshot.trainer)
        if parts.gang is not None:
            config += parts.gang.findings()
        if parts.store.elsewhere:
            return config
        if parts.settings.sync.store and parts.backup is None and not parts.store.refused:
            return (*store_withheld_finding(since=self._started), *config)
        if parts.store.refused:
            return (*store_refused_finding(parts.store.refused, since=self._started), *config)
        backup = backup_findings(
            sync,
            sets,
            now=snapshot.at,
            wall=snapshot.wall,
            max_lag=parts.settings.sync.max_lag,
            since=self._started,
        )
        uploads = upload_findings(sync, now=snapshot.at)
        return (*backup, *uploads, *config)


class Tick:
    """The work of each turn of the sensing loop."""

    def __init__(
        self,
        parts: Components,
        loops: DaemonLoops,
        host: Host,
        findings: Findings,
        status: StatusSource,
        store_jobs: StoreJobs,
        maintenance: Maintenance,
        notifying: Notifying | None,
        recorder: Recorder | None,
    ) -> None:
        self._parts, self._loops, self._host, self._findings, self._status = parts, loops, host, findings, status
        self._store_jobs, self._maintenance = store_jobs, maintenance
        self._notifying, self._recorder = notifying, recorder
        self._known: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._told = ""
        self._read_so_far: dict[str, object] = {}

    def turn(self, facts: Facts, findings: tuple[Finding, ...]) -> None:
        parts, sensing, snapshot = self._parts, self._loops.sensing, facts.pod
        self._remember_read_positions()
        self._host.systemd.watchdog()
        parts.checks.turn()
        if self._recorder is not None:
            self._recorder.turn(snapshot)
        self._maintenance.turn(snapshot)
        parts.checkpoints.implausible.turn(snapshot)
        acted = (*findings, *self._loops.pruner.findings())
        acted = acted if parts.gang is None else parts.gang.judged(acted)
        parts.recovery.consider(snapshot, acted, parts.training.two_writers.beside)
        self._store_jobs.turn(snapshot)
        self._leave_if_locked_out(facts.store)
        if parts.recovery.asks_whose:
            parts.checkpoints.rescans.wake()
        if parts.checkpoints.roots.repaired():
            parts.recovery.read_again()
        everything = self._findings.turn(as_of_now(parts, snapshot, sensing.state.learned), findings)
        if self._notifying is not None:
            self._notifying.turn(everything, snapshot)
        known = (sensing.state.armed, sensing.state.learned.seen)
        if sensing.turns % REMEMBER_TURNS == 0 or known != self._known:
            # Written at once for the next podwatch: the engine can die while none runs.
            self._known = known
            parts.run.journal.post(Journal.learn, LEARNED, sensing.state.learned.to_json())
            self._host.bus.save()
        self._tell_systemd()

    def _leave_if_locked_out(self, store: StoreFacts | None) -> None:
        """Exit where the store refuses this pod permanently and no training runs here: waiting only costs money."""
        error = None if store is None else store.locked_out
        leaves = self._host.exit.first is not None
        if error is None or leaves or not self._parts.recovery.waits_for_store:
            return
        text = (
            f"cannot start training: {error}. Without the store podwatch cannot know whether another pod trains this"
            " run, so podwatch exits. To start training from the beginning anyway: `podwatch run --fresh`"
        )
        self._host.bus.say(EventName.DAEMON_STOPPING, text, Severity.CRITICAL)
        wrong = isinstance(error, ConfigurationError)
        self._host.exit.leave(ExitCode.CONFIGURATION if wrong else ExitCode.PERMISSION)

    def _remember_read_positions(self) -> None:
        """Record how far the logs are read, at once with a new start. The next podwatch finds a finish line that is
        printed while none runs, and reads no line twice."""
        now, before = self._parts.sensing.progress.remembered, self._read_so_far
        if now.get("start_id") != before.get("start_id") or self._loops.sensing.turns % READ_TURNS == 0:
            if now != before:
                self._parts.run.journal.post(Journal.learn, READ_SO_FAR, now)
            self._read_so_far = now

    def _tell_systemd(self) -> None:
        """Update the line that ``systemctl status`` shows, if it changed."""
        headline = self._status.headline()
        if headline != self._told:
            self._told = headline
            self._host.systemd.status(headline)


class Reload:
    """A reload of the configuration. ``load_again`` reads it; ``loaded`` is the one in force."""

    def __init__(
        self,
        parts: Components,
        loops: DaemonLoops,
        host: Host,
        loaded: LoadedSettings,
        load_again: LoadAgain | None,
        status: StatusSource,
        recorder: Recorder | None,
    ) -> None:
        self._parts, self._loops, self._host, self._status, self._recorder = parts, loops, host, status, recorder
        self.loaded = loaded
        self._load_again = load_again

    def on_signal(self) -> None:
        self._host.tasks.spawn(self.now(), "reload")

    async def now(self) -> str:
        """Reload the configuration file; returns the result as text. Changes that need a restart are refused."""
        self._host.systemd.reloading()
        try:
            return await self._now()
        finally:  # in any case: without READY systemd allows no further reload
            self._host.systemd.ready(self._status.headline())

    def _read(self) -> LoadedSettings:
        return self._load_again() if self._load_again else load_settings(self.loaded.path, environ=os.environ)

    async def _now(self) -> str:
        config = self._parts.run.config
        reading = Worker("configuration")
        try:
            new = await reading.call(self._read)
            learn_secrets(new.settings)
            if blocked := refused_by_reload(self.loaded.settings, new.settings):
                raise ConfigurationError(
                    f"{', '.join(blocked)} cannot change while podwatch runs",
                    where=str(new.path),
                    fix="restart podwatch; training continues",
                )
        except Exception as error:  # whatever a file contains must not end the guard
            config.problem, text = str(error), f"configuration not reloaded, the old one stays in force: {error}"
            self._host.bus.say(EventName.CONFIG_REFUSED, text, Severity.WARNING)
        else:
            later = waits_for_restart(self.loaded.settings, new.settings)
            text = "configuration reloaded; new thresholds and policies are in force"
            if later:
                text += f". These take effect at the next start of podwatch: {', '.join(later)}"
            self.loaded, config.problem = new, ""
            parts = self._parts
            config.settings = new.settings
            config.policies = policies_from(
                new.settings,
                max_steps=parts.run.config.policies.max_steps,
                save_interval=parts.run.config.policies.save_interval_steps,
            )
            self._loops.sensing.policies = parts.run.config.policies
            self._loops.pruner.rules = removal_rules(parts)
            parts.sensing.logs.configure(parts.run.config.policies.log_rules)
            if self._recorder is not None:
                self._recorder.cut()
            parts.recovery.reconfigure(parts.settings, parts.run.config.policies)
            self._host.tasks.spawn(self._look_at_restart(), "restart concerns")
            self._host.bus.say(EventName.CONFIG_RELOADED, text)
        finally:
            reading.close()
        return text

    async def _look_at_restart(self) -> None:
        """Update the reasons why a restart would fail with the current settings."""
        parts = self._parts
        parts.run.config.concerns = await self._host.disk.call(restart_concerns, parts.settings, parts.run.layout)
