"""The findings of all sources: one for each failure, each reported once when it appears and once when it clears."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from podwatch.app.backup_findings import (
    backup_findings,
    branch_findings,
    saves_of_run,
    store_refused_finding,
    upload_findings,
)
from podwatch.app.lost_saves import SavesOfRun, safekeeping
from podwatch.app.own_findings import (
    concern_findings,
    config_findings,
    freeze_findings,
    linked_findings,
    saved_after_all,
    supervisor_findings,
)
from podwatch.app.pause import Maintenance
from podwatch.checkpoints.shapes import PATTERN
from podwatch.detection.merge import fold
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.facts import Facts, StoreFacts
from podwatch.domain.finding import DEATHS, Finding, FindingKind, Severity
from podwatch.domain.snapshot import Desired
from podwatch.report.steps_at_risk import steps_at_risk

if TYPE_CHECKING:
    from podwatch.app.build import Components
    from podwatch.app.notifications import Notifying
    from podwatch.hooks.evaluation import Evaluations
    from podwatch.hooks.hook_runner import Hooks


class Findings:
    """``reporters`` report to the operator's own channels and commands. ``silent``: seconds without a response of the
    previous daemon when init restarted it."""

    def __init__(
        self,
        parts: "Components",
        maintenance: Maintenance,
        reporters: "Sequence[Notifying | Hooks | Evaluations]",
        silent: float,
    ) -> None:
        self._parts, self._maintenance, self._reporters = parts, maintenance, reporters
        self._open = OpenFindings(parts.bus)
        self._silent, self._started = silent, parts.run.clock.monotonic()

    def turn(self, facts: Facts, detected: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """Those of this turn, after what is new and what is over was reported."""
        everything = self._everything(facts, detected)
        self._open.update(everything, facts.pod.wall)
        return everything

    def now(self) -> tuple[Finding, ...]:
        """The findings of the last turn, updated with what recovery has done since: otherwise the status would show a
        death beside the trainer that recovery started after it."""
        detection = self._parts.detection
        if detection.turns == 0:
            return self._open.findings
        found, (facts, changed) = detection.findings, self._parts.observation.corrected()
        if changed:
            found = of_this_trainer(found)
        if facts.run.desired is not Desired.RUNNING and detection.snapshot.desired is Desired.RUNNING:
            found = of_a_run_that_ends(found)
        return self._open.as_of_now(self._everything(facts, found))

    def _everything(self, facts: Facts, detected: tuple[Finding, ...]) -> tuple[Finding, ...]:
        parts, at = self._parts, facts.pod.at
        found = (
            *detected,
            *parts.recovery.findings(),
            *parts.checks.findings(),
            *parts.pruner.findings(),
            *self._maintenance.findings(),
            *parts.checkpoints.roots.findings(),
            *self._of_store(facts),
            *self._of_configuration(facts),
            *parts.checkpoints.two_writers.findings(facts.checkpoints, at),
            *parts.checkpoints.implausible.findings(facts.checkpoints, at),
            *branch_findings(facts.checkpoints, facts.run, facts.store, at, facts.pod.wall),
            *linked_findings(parts.checkpoints.catalogue.linked, since=self._started),
            *freeze_findings(self._silent, now=at, wall=facts.pod.wall, since=self._started),
            *supervisor_findings(facts.pod.trainer),
            *(() if parts.gang is None else parts.gang.findings()),
        )
        reported = (finding for reporter in self._reporters for finding in reporter.findings(at))
        return fold((*safekeeping(found, self._saves(facts), at=at), *reported), parts.recovery.context.healing())

    def _saves(self, facts: Facts) -> SavesOfRun:
        parts, sets, known = self._parts, facts.checkpoints, facts.store or StoreFacts()
        step, counted = parts.recovery.state.step, parts.run.layout.counts_saves
        at_risk = steps_at_risk(facts.pod, sets, step, known.last_step, unread=known.unread, saves_counted=counted)
        return saves_of_run(facts.store, sets, at_risk)

    def _of_configuration(self, facts: Facts) -> tuple[Finding, ...]:
        """Those about the file, and the reasons why a restart would fail."""
        config, handle = self._parts.run.config, self._parts.recovery.handle
        concerns = tuple(c for c in config.concerns if c.subject != PATTERN or not facts.checkpoints)
        concerns = saved_after_all(concerns, facts.checkpoints, None if handle is None else handle.started_wall)
        since = self._started
        return (*config_findings(config.problem, since=since), *concern_findings(concerns, since=since))

    def _of_store(self, facts: Facts) -> tuple[Finding, ...]:
        store, settings, since = self._parts.store, self._parts.settings, self._started
        if store.elsewhere:
            return ()
        if store.refused:
            return store_refused_finding(store.refused, since=since)
        pod, lag = facts.pod, settings.sync.max_lag
        backup = backup_findings(facts.store, facts.checkpoints, now=pod.at, wall=pod.wall, max_lag=lag, since=since)
        return (*backup, *upload_findings(facts.store, now=pod.at))


def of_a_run_that_ends(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """``findings`` without deaths and log rules: the run was stopped or finished since, so its end is expected."""
    return tuple(f for f in of_this_trainer(findings) if f.kind is not FindingKind.LOG_RULE)


def of_this_trainer(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """``findings`` without deaths: they belong to a trainer that is no longer watched."""
    return tuple(f for f in findings if f.kind not in DEATHS)


# -- open findings ---------------------------------------------------------------------------------------------------


class OpenFindings:
    """Keeps the open findings of all sources and emits an event when one appears, changes its severity, or clears."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._open: dict[str, Finding] = {}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Worst first, then oldest."""
        return _sorted(self._open.values())

    def as_of_now(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """``findings``, collected between two turns, sorted, with the times of their raising. Emits nothing."""
        return _sorted({f.key: self._since_raised(f) for f in findings}.values())

    def update(self, findings: tuple[Finding, ...], wall: float) -> None:
        """Set the findings of all sources for this turn. An open finding keeps the time at which it was raised, which a
        pure source does not know."""
        now = {f.key: self._since_raised(f) for f in findings}
        for key, finding in now.items():
            before = self._open.get(key)
            if before is None or (before.severity, before.confirmed) != (finding.severity, finding.confirmed):
                message = finding.summary + (f"; {finding.suggestion}" if finding.suggestion else "")
                self._emit(Event(EventName.FINDING_RAISED, wall, message, finding.severity, _fields(finding)))
        for key, finding in self._open.items():
            if key not in now:
                text = f"resolved: {finding.summary}"
                self._emit(Event(EventName.FINDING_CLEARED, wall, text, fields=_fields(finding)))
        self._open = now

    def _since_raised(self, finding: Finding) -> Finding:
        before = self._open.get(finding.key)
        return finding if before is None else replace(finding, since=min(before.since, finding.since))


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    order = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
    return tuple(sorted(findings, key=lambda f: (order[f.severity], f.since, f.key)))


def _fields(finding: Finding) -> dict[str, str | int | float | bool | None]:
    return {"finding": str(finding.kind), "subject": finding.subject, "confirmed": finding.confirmed}
