"""Builds the frozen DaemonView, from which status, HTTP and metrics are made, and the daemon's own texts."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch import __version__
from podwatch.app.backup_findings import cannot_be_used
from podwatch.app.event_bus import EventBus
from podwatch.app.findings import Findings
from podwatch.app.keep_run_cost import Accountant
from podwatch.app.lost_saves import not_stored, pin_not_stored
from podwatch.app.page_history import History
from podwatch.app.pause import Maintenance, described
from podwatch.config.settings import Policies
from podwatch.detection.operator_ends import trainer_role_ended_at
from podwatch.detection.progress import target_reached
from podwatch.detection.rules import DetectionState, second_signals
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import Event, EventName, Incident
from podwatch.domain.facts import StoreFacts
from podwatch.domain.lease import Heartbeat, HolderState
from podwatch.domain.run import Pause
from podwatch.domain.snapshot import Desired, Snapshot
from podwatch.domain.status_document import RecoveryView
from podwatch.domain.times import rfc3339
from podwatch.job.exit_code import Outcome
from podwatch.journal import Journal
from podwatch.recording.last_day import Moment
from podwatch.recovery.state import Phase, RecoveryState
from podwatch.report.daemon_view import Counters, DaemonView
from podwatch.report.json_documents import account_totals
from podwatch.report.run_cost import Account, Price
from podwatch.report.status import build_status
from podwatch.report.steps_at_risk import steps_at_risk

if TYPE_CHECKING:
    from podwatch.app.build import Components
    from podwatch.hooks.evaluation import Evaluations

_PHASES = frozenset(map(str, Phase))
_ACTIVE = (Phase.LOOKING, Phase.STARTING, Phase.CONFIRMING, Phase.STOPPING)


def recovery_view(state: RecoveryState, waits_for: str = "") -> RecoveryView:
    """``waits_for``: what the end of a finished run waits for."""
    return RecoveryView(
        phase=str(state.phase),
        active=state.acting or state.phase in _ACTIVE,
        waiting=state.phase is Phase.BACKOFF or bool(waits_for),
        blocked=state.phase is Phase.BLOCKED,
        gave_up=state.phase is Phase.GAVE_UP,
        evaluating=bool(state.evaluation),
        detail=waits_for or state.detail,
        resumed_step=state.step,
        confirmed=None if state.phase is Phase.CONFIRMING else not state.unconfirmed,
        attempts=state.attempts,
        next_try_at=state.next_try_wall,
    )


def trainer_ended_at(snapshot: Snapshot, state: DetectionState, policies: Policies) -> float | None:
    """When the trainer process ended while its launcher still runs (monotonic); None if it did not, or if the run is
    expected to end."""
    trainer = snapshot.trainer.value
    if trainer is None or not snapshot.trainer.ok or not trainer.alive or trainer.finish_line:
        return None
    if snapshot.desired is not Desired.RUNNING or target_reached(state.start.progress, policies):
        return None
    return trainer_role_ended_at(state.start)


INCIDENTS_SHOWN = 5


class StatusSource:
    """The state of the daemon as of now, for status, HTTP and metrics; see ``api.http_endpoints.Source``."""

    def __init__(
        self,
        parts: "Components",
        findings: Findings,
        maintenance: Maintenance,
        accountant: Accountant,
        evaluations: "Evaluations | None",
        path: Path | None,
    ) -> None:
        self._parts, self._findings, self._maintenance = parts, findings, maintenance
        self._accountant, self._evaluations, self._path = accountant, evaluations, path
        self._history = History(parts.run.paths.history, parts.foundation.disk, parts.bus)
        self._incidents: tuple[Incident, ...] = ()
        self.started = parts.run.clock.monotonic()

    async def read_incidents(self) -> None:
        """Read again what the journal has of the last incidents; call it after each change."""
        self._incidents = tuple(await self._parts.run.journal.run(Journal.incidents, INCIDENTS_SHOWN))

    async def keep(self) -> None:
        """Add this moment to the run's account and to the page's history."""
        view = self.view()
        self._accountant.count(view)
        await self._history.record(view)

    def account(self, *, target: int | None = None, step: int | None = None) -> Account:
        """The run's time and money until now. ``step``: the newest."""
        cost, learned = self._parts.settings.cost, self._parts.detection.state.learned
        price = Price(cost.per_hour, cost.currency)
        return self._accountant.account(price, learned.median_step_seconds, target=target, step=step)

    def view(self) -> DaemonView:
        """The snapshot of the last turn, corrected by what recovery has done since."""
        parts, detection, settings = self._parts, self._parts.detection, self._parts.settings
        policies = parts.run.config.policies
        alive, _ = detection.alive()
        now, wall = parts.run.clock.monotonic(), parts.run.clock.wall()
        state = parts.recovery.state
        facts, _ = parts.observation.corrected()
        snapshot, newest = facts.pod, facts.pod.newest_step
        recovery = recovery_view(state, parts.exit.waits_for)
        sync = facts.store or StoreFacts()
        if parts.store.elsewhere:
            sync = StoreFacts(store_url=settings.sync.store)
        elif parts.store.refused:
            sync = StoreFacts(refused=True, error=parts.store.refused)
        return DaemonView(
            version=__version__,
            run_id=settings.run_id,
            facts=facts,
            now=now,
            now_wall=wall,
            started_wall=wall - (now - self.started),
            pid=os.getpid(),
            mode=settings.mode,
            opening=parts.recovery.opening,
            watchdog_ok=alive,
            sensors=snapshot.readings,
            findings=self._findings.now(),
            recovery=recovery,
            sync=sync,
            learned=detection.state.learned,
            counters=counters_of(parts.bus, detection.turns),
            incident=next(iter(self._incidents), None),
            incidents=self._incidents,
            next_save_bytes=parts.pruner.next_save_bytes,
            prune_above=policies.disk.prune_above,
            steps_at_risk=steps_at_risk(
                snapshot,
                facts.checkpoints,
                recovery.resumed_step,
                sync.last_step,
                unread=sync.unread,
                saves_counted=parts.run.layout.counts_saves,
            ),
            target_step=policies.max_steps,
            trainer_changed_at=state.changed_at,
            trainer_ended_at=trainer_ended_at(snapshot, detection.state, policies),
            armed=detection.state.armed,
            second_signals=second_signals(detection.state),
            inference_gpus=settings.gpu.inference,
            trainer_gpus=settings.gpu.trainer,
            http_url=parts.training.environment.heartbeat_url,
            control_path=str(parts.run.paths.control_socket),
            config_path=str(self._path or ""),
            output_dir=str(settings.trainer.output_dir),
            state_dir=str(parts.run.paths.state),
            log_path=parts.training.launcher.log_path(),
            last_log_line="".join(self.log_lines()[-1:]),
            layout=parts.run.layout.name,
            layout_because=parts.run.layout.chosen_because,
            capabilities=parts.checkpoints.capabilities,
            end=parts.exit.verdict,
            nodes=() if parts.gang is None else parts.gang.view(),
            node_count=1 if parts.gang is None else parts.gang.place.count,
            best_result="" if self._evaluations is None else self._evaluations.best_text(),
            account=self.account(target=policies.max_steps, step=None if newest is None else newest.step),
        )

    def headline(self) -> str:
        """The line in ``systemctl status``."""
        return headline(self._parts.recovery.state.phase, self._parts.detection.snapshot, self._maintenance.pause)

    def opening(self) -> str:
        """The first line."""
        return opening(self._parts, self._maintenance.pause)

    async def events(self, after_id: int, limit: int) -> list[Event]:
        return await self._parts.run.journal.run(Journal.events, after_id=after_id, limit=limit)

    def log_lines(self) -> Sequence[str]:
        try:
            return self._parts.sensors.progress.last_lines()
        except RuntimeError:  # its thread found a new log at this moment
            return ()

    async def history(self) -> Sequence[Moment]:
        return await self._history.last_day(self._parts.run.clock.wall())

    def ping(self, role: str) -> None:
        self._parts.sensors.progress.inbox.ping(role)

    def live(self) -> tuple[bool, str]:
        return self._parts.detection.alive()

    def ready(self) -> tuple[bool, list[str]]:
        return readiness(self._parts, self._parts.detection.snapshot)


def counters_of(emit: EventBus, turns: int) -> Counters:
    counts = emit.counts
    return Counters(
        turns=turns,
        restarts=counts[EventName.INCIDENT_OPENED],
        published=counts[EventName.PUBLISHED],
        uploaded_bytes=emit.uploaded_bytes,
        skipped=counts[EventName.UPLOAD_SKIPPED],
        abandoned=counts[EventName.UPLOAD_ABANDONED],
        pruned=counts[EventName.PRUNED],
        incidents={"all": counts[EventName.INCIDENT_OPENED]},
        events=dict(counts),
    )


_OUTCOMES = {Phase.FINISHED: Outcome.FINISHED, Phase.STOPPED: Outcome.STOPPED, Phase.GAVE_UP: Outcome.GAVE_UP}


def outcome(view: DaemonView, state: HolderState) -> str | None:
    """How the run has ended on this pod; None while it continues. A pod that another one superseded writes no
    heartbeat any more."""
    if view.end is not None:
        return str(view.end.outcome)
    ended = _OUTCOMES.get(Phase(view.recovery.phase)) if view.recovery.phase in _PHASES else None
    if ended is Outcome.STOPPED and view.facts.run.desired is not Desired.STOPPED:
        ended = None  # another pod trains the run, or control.json orders this one to wait
    if ended is None and state is HolderState.PREEMPTED:
        ended = Outcome.PREEMPTED
    return None if ended is None else str(ended)


def heartbeat(view: DaemonView, own: Sequence[CheckpointSet], state: HolderState = HolderState.RUNNING) -> Heartbeat:
    """The heartbeat in the store, as far as it does not depend on the claim. ``own``: the run's own checkpoints."""
    newest, waiting = view.facts.pod.newest_step, not_stored(own, view.sync.stored, view.sync.last_published_wall)
    median, ended = view.learned.median_step_seconds, outcome(view, state)
    if waiting is None and ended == Outcome.FINISHED and view.sync.store_url:  # a controller destroys the machine then
        waiting = pin_not_stored(own, view.sync.stored, view.facts.pins)
    try:
        status = build_status(view)
    except Exception:  # without a heartbeat another pod would take the run
        status = {"overall": "", "reasons": []}
    return Heartbeat(
        phase=view.recovery.phase,
        step=newest.step if newest is not None else None,
        step_wall=view.wall_of(newest.at) if newest is not None else None,
        progress_at=(rfc3339(view.wall_of(newest.at)) if newest is not None else None) or "",
        target=view.target_step,
        rate=None if not median else round(3600 / median, 3),
        outcome=ended or "",
        end=None if view.end is None else view.end.document,
        desired=str(view.facts.run.desired),
        overall=status["overall"],
        reason=str(status["reasons"][0]["summary"]) if status["reasons"] else "",
        started_wall=view.started_wall,
        written_wall=view.now_wall,
        last_stored_step=view.sync.last_step,
        unstored_step=waiting.step if waiting is not None else None,
        unstored_since_wall=waiting.since_wall if waiting is not None else None,
        podwatch_version=view.version,
        best_result=view.best_result or "",
        account=account_totals(view.account),
    )


# -- texts of the daemon ---------------------------------------------------------------------------------------------
# First line, last line, systemd status, and why it is not ready.

LAST_LINE_IDLE = "podwatch exits; no training is running"
LAST_LINE_EVALUATING = (
    "podwatch exits and ends the evaluation that training is stopped for; the next podwatch starts training again"
)


def opening(parts: "Components", pause: Pause | None = None) -> str:
    """The first line: the state of training, and whether checkpoints are backed up."""
    layout = parts.run.layout
    known = f" (layout {layout.name}: {layout.chosen_because})" if layout.chosen_because else ""
    where = f"syncing to {parts.settings.sync.store}" if parts.backup is not None else "NOT BACKED UP"
    if parts.gang is not None:
        where = f"{where}; {parts.gang.place}" if parts.gang.leads else f"{parts.gang.place}: node 0 uploads for all"
    paused = "" if pause is None else f"; {described(pause)}"
    return (
        f"podwatch {__version__} guards run {parts.settings.run_id}{known}: {parts.recovery.opening}; {where}{paused}"
    )


def last_line(*, training: bool, preempted: str, evaluating: bool = False) -> str:
    """The last line. ``training``: a trainer runs; ``preempted``: why podwatch ends it too, else empty. ``evaluating``:
    training is stopped for an evaluation."""
    if not training and evaluating and not preempted:
        return LAST_LINE_EVALUATING
    if not training:
        return f"podwatch exits: {preempted}; no training is running" if preempted else LAST_LINE_IDLE
    if preempted:
        return f"podwatch exits: {preempted}; podwatch requests training to end"
    return (
        "podwatch exits; training continues UNGUARDED. Start podwatch again to guard it;"
        " to stop training, start podwatch again and run `podwatch stop-training`"
    )


def headline(phase: str, snapshot: Snapshot, pause: Pause | None = None) -> str:
    """The line in ``systemctl status``."""
    newest = snapshot.newest_step
    text = f"{phase}, step {newest.step}" if newest is not None else str(phase)
    return text if pause is None else f"{described(pause)}; {text}"


def readiness(parts: "Components", snapshot: Snapshot) -> tuple[bool, list[str]]:
    """Whether sensors and store are usable, and the reasons if they are not."""
    reasons = [
        f"the {name} sensor is {reading.state}" + (f": {reading.detail}" if reading.detail else "")
        for name, reading in snapshot.readings.items()
        if reading.state in ("blind", "denied", "pending")
    ]
    if parts.backup is not None and (sync := parts.backup.status()).ok is False:
        reasons.append(cannot_be_used(sync.error))
    return not reasons, reasons
