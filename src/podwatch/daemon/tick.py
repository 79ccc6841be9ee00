"""Daemon: the work of each turn of the sensing loop, of events, and of a reload."""

from podwatch.checkpoints.layouts import restart_concerns
from podwatch.checkpoints.layouts.base import PATTERN, counts_saves
from podwatch.config.loading import changes_needing_restart
from podwatch.daemon import status_view
from podwatch.daemon.artifacts import TELLING
from podwatch.daemon.backup_findings import (
    backup_findings,
    concern_findings,
    config_findings,
    freeze_findings,
    keeper_findings,
    kept_of,
    linked_findings,
    saved_after_all,
    store_refused_finding,
    store_withheld_finding,
    upload_findings,
)
from podwatch.daemon.configuration import policies_from, waits_for_restart
from podwatch.daemon.core import Core
from podwatch.daemon.earlier_branches import branch_findings
from podwatch.daemon.environment import learn_secrets
from podwatch.daemon.status_view import steps_at_risk
from podwatch.daemon.wiring import LEARNED
from podwatch.detection.corrected_snapshot import of_a_run_that_ends, of_this_trainer, present
from podwatch.detection.one_failure import fold
from podwatch.domain.errors import ConfigurationError, PodwatchError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Finding, Severity
from podwatch.domain.snapshot import Desired, Snapshot
from podwatch.journal import Journal
from podwatch.policy.backup import Kept, safekeeping
from podwatch.sync.types import SyncStatus

REMEMBER_TURNS = 30
"""Turns between two writes of the learned state to the journal: a minute at the default poll."""


class Turning(Core):
    """The middle layer of Daemon: everything between start and stop."""

    def reload(self) -> str:
        """Reload the configuration file; returns the result as text. Changes that need a restart are refused."""
        self._notifier.reloading()
        try:
            return self._reload()
        finally:  # in any case: without READY systemd allows no further reload
            self._notifier.ready(self._headline())

    def _reload(self) -> str:
        try:
            new = self._load_again()
            learn_secrets(new.settings)
            if blocked := changes_needing_restart(self.loaded.settings, new.settings):
                raise ConfigurationError(
                    f"{', '.join(blocked)} cannot change while podwatch runs",
                    where=str(new.path),
                    fix="restart podwatch; training continues",
                )
        except PodwatchError as error:
            self._config_problem, text = str(error), f"configuration not reloaded, the old one stays in force: {error}"
            self._say(EventName.CONFIG_REFUSED, text, Severity.WARNING)
        else:
            later = waits_for_restart(self.loaded.settings, new.settings)
            text = "configuration reloaded; new thresholds and policies are in force"
            if later:
                text += f". These take effect at the next start of podwatch: {', '.join(later)}"
            self.loaded, self._config_problem = new, ""
            parts = self.parts
            parts.run.config.settings = new.settings
            parts.run.config.policies = policies_from(
                new.settings,
                max_steps=parts.run.config.policies.detection.max_steps,
                save_interval=parts.run.config.policies.resources.save_interval_steps,
            )
            self.rounds.sensing.policies = parts.run.config.policies
            parts.sensing.log_rules.configure(parts.run.config.policies.log_rules)
            if self._recorder is not None:
                self._recorder.cut()
            parts.recovery.reconfigure(parts.settings, parts.run.config.policies)
            self._spawn(self._look_at_restart(), "restart concerns")
            self._say(EventName.CONFIG_RELOADED, text)
        return text

    async def _look_at_restart(self) -> None:
        """Update the reasons why a restart would fail with the current settings."""
        parts = self.parts
        parts.run.config.concerns = await self._disk.call(restart_concerns, parts.settings, parts.run.layout)

    def _on_turn(self, snapshot: Snapshot, findings: tuple[Finding, ...]) -> None:
        parts, sensing = self.parts, self.rounds.sensing
        self._notifier.watchdog()
        parts.checks.turn()
        if self._recorder is not None:
            self._recorder.turn(snapshot)
        self.pausing.turn(snapshot)
        parts.checkpoints.implausible.turn(
            snapshot,
            parts.checkpoints.catalogue.sets,
            step_seconds=sensing.state.learned.median_step_seconds,
            record=parts.training.record.current,
            fetched=parts.recovery.context.fetched,
        )
        parts.recovery.consider(snapshot, (*findings, *self.rounds.pruner.findings()))
        self.backing.turn(snapshot)
        if parts.recovery.asks_whose:
            parts.checkpoints.rescans.wake()
        if parts.checkpoints.roots.repaired():
            parts.recovery.read_again()
        everything = self._everything(snapshot, findings)
        self.bulletin.update(everything, snapshot.wall)
        if self._notifying is not None:
            self._notifying.turn(everything, snapshot)
        if parts.recovery.context.exit_code is not None:
            self.leave(parts.recovery.context.exit_code)
        known = (sensing.state.armed, sensing.state.learned.seen)
        if sensing.turns % REMEMBER_TURNS == 0 or known != self._known:
            # Written at once for the next podwatch: the engine can die while none runs.
            self._known = known
            parts.run.journal.post(Journal.learn, LEARNED, sensing.state.learned.to_dict())
            self._bus().save()
        self._tell_systemd()

    def _everything(self, snapshot: Snapshot, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings of all sources, one for each failure. ``findings``: those of the sensing loop."""
        parts = self.parts
        ours = (
            *parts.checks.findings(),
            *self.rounds.pruner.findings(),
            *self.pausing.findings(),
            *parts.checkpoints.roots.findings(),
            *self._own(snapshot),
        )
        telling = self._notifying.findings() if self._notifying is not None else ()
        kept = safekeeping((*findings, *parts.recovery.findings(), *ours), self._kept(snapshot), at=snapshot.at)
        return fold((*kept, *telling), parts.recovery.context.healing())

    def _findings_now(self) -> tuple[Finding, ...]:
        """The findings of the last turn, updated with what recovery has done since: otherwise the status would show a
        death beside the trainer that recovery started after it."""
        sensing, recovery = self.rounds.sensing, self.parts.recovery
        if sensing.turns == 0:
            return self.bulletin.findings
        found, snapshot, watched = sensing.findings, sensing.snapshot, status_view.watched_of(recovery.state)
        now, changed = present(snapshot, watched, now=self._clock.monotonic(), wall=self._clock.wall())
        if changed:
            found = of_this_trainer(found)
        if recovery.desired is not Desired.RUNNING and snapshot.desired is Desired.RUNNING:
            found = of_a_run_that_ends(found)
        return self.bulletin.as_of_now(self._everything(now, found))

    def _kept(self, snapshot: Snapshot) -> Kept:
        parts = self.parts
        sync, sets = (
            parts.syncer.status() if parts.syncer is not None else None,
            parts.checkpoints.catalogue.sets,
        )
        step, counted = parts.recovery.state.step, counts_saves(parts.run.layout)
        at_risk = steps_at_risk(snapshot, sets, step, sync or SyncStatus(), saves_counted=counted)
        return kept_of(sync, sets, parts.recovery.context.owns, at_risk)

    def _own(self, snapshot: Snapshot) -> tuple[Finding, ...]:
        parts = self.parts
        config = config_findings(self._config_problem, since=self._started)
        concerns = tuple(
            c for c in parts.run.config.concerns if c.subject != PATTERN or not parts.checkpoints.catalogue.sets
        )
        handle = parts.recovery.handle
        concerns = saved_after_all(
            concerns, parts.checkpoints.catalogue.sets, None if handle is None else handle.started_wall
        )
        config = (*config, *concern_findings(concerns, since=self._started))
        config = (*config, *parts.training.two_writers.findings(parts.checkpoints.catalogue.sets, snapshot.at))
        config = (*config, *parts.checkpoints.implausible.findings(parts.checkpoints.catalogue.sets, snapshot.at))
        config = (*config, *branch_findings(parts, snapshot.at, snapshot.wall))
        config += linked_findings(parts.checkpoints.catalogue.linked, since=self._started)
        config += freeze_findings(self._silent, now=snapshot.at, wall=snapshot.wall, since=self._started)
        config += keeper_findings(snapshot.trainer)
        if parts.settings.sync.store and parts.syncer is None and not parts.store.refused:
            return (*store_withheld_finding(since=self._started), *config)
        if parts.store.refused:
            return (*store_refused_finding(parts.store.refused, since=self._started), *config)
        backup = backup_findings(
            parts.syncer.status() if parts.syncer is not None else None,
            parts.checkpoints.catalogue.sets,
            now=snapshot.at,
            wall=snapshot.wall,
            max_lag=parts.settings.sync.max_lag,
            since=self._started,
        )
        uploads = upload_findings(parts.syncer.status() if parts.syncer is not None else None, now=snapshot.at)
        return (*backup, *uploads, *config)

    def _on_event(self, event: Event) -> None:
        if event.name in (EventName.INCIDENT_OPENED, EventName.INCIDENT_CLOSED, EventName.GAVE_UP):
            self._spawn(self._refresh_incident(), "incident")
        if self._artefacts is not None and event.name in TELLING:
            self._artefacts.soon()

    async def _refresh_incident(self) -> None:
        self._incident = next(iter(await self.parts.run.journal.run(Journal.incidents, 1)), None)

    async def _push_metrics(self) -> None:
        if self._notifying is not None:
            await self._notifying.push(self.view())
