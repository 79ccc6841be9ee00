"""The parts of one daemon in groups by subject, and how they are built: one function for each group. Starts nothing."""

import os
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from podwatch.app import held_back_findings
from podwatch.app.ask_and_record_attempts import JobVerdicts, make_verdicts
from podwatch.app.backup.backup import Backup
from podwatch.app.backup.connection import StoreConnection
from podwatch.app.backup.outbox import Outbox
from podwatch.app.backup.run_side import TAKE_OVER, RunSide, WandbIds, this_pod
from podwatch.app.event_bus import EventBus
from podwatch.app.held_back_findings import Implausible, TwoWriters
from podwatch.app.nodes import Gang, make_gang, own_place
from podwatch.app.observe import Observation
from podwatch.app.paths_and_run_lock import RunLock, RunPaths, workspace_of
from podwatch.app.replaced_directories import RootWatch
from podwatch.app.rescans import Announced, Rescans
from podwatch.app.sensing import Detection, Sensors, build_sensors, learned_before
from podwatch.app.settings_in_force import Configuration, learn_secrets, policies_from
from podwatch.app.shutdown import STEP_SECONDS, BackgroundTasks, Exit, briefly
from podwatch.app.state_check import StateCheck
from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.records import CheckpointRecords, RecordFiles
from podwatch.checkpoints.settle_time import capabilities_of
from podwatch.checkpoints.trainers import make_layout, process_names, restart_concerns
from podwatch.config.settings import Settings
from podwatch.disk.leftovers import Measurements
from podwatch.disk.next_save import median_gap
from podwatch.disk.prune import Pruner
from podwatch.disk.remove import Remover
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.run import MutationGuard
from podwatch.domain.run_state import RunState
from podwatch.domain.secrets import register, scrub
from podwatch.domain.status_document import Capabilities
from podwatch.journal import AsyncJournal
from podwatch.recording.format import Header
from podwatch.recording.recorder import Recorder
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.environment import TrainingEnvironment
from podwatch.recovery.failure import Failures
from podwatch.recovery.recovery import Recovery
from podwatch.recovery.run_file import LOAD_SECONDS, RunFile
from podwatch.recovery.state import RunFiles, RunStore, Tools, TrainerSensors
from podwatch.sensors.gpu import GpuReader
from podwatch.store.lease import Lease
from podwatch.store.lease_rules import LeaseTiming
from podwatch.store.objects.directory import is_on_file_system_of
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.files_clock import FilesClock
from podwatch.system.own_directories import Workspace
from podwatch.system.procfs import boot_id, boot_wall
from podwatch.system.sd_notify import make_notifier
from podwatch.trainer.find import sought_run
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.start_and_adopt import SupervisorJob, SupervisorLauncher, SupervisorOptions

if TYPE_CHECKING:
    from podwatch.store.restore.thread import RestoreThread

MORE_SECONDS = 5.0
"""As PID 1, init gives training 3 s beyond ``preempt_grace``, once the daemon has ended."""
QUARANTINE_SECONDS = 7 * 86400.0
"""Quarantined checkpoints are kept for a week, unless the disk needs the space and a verified successor exists."""


@dataclass(frozen=True, slots=True)
class StartOptions:
    """How `podwatch run` starts the daemon. ``take_over`` is the id of an operator's `--take-over`, and likewise the
    other flags; each id is executed once. ``same_disk_store`` allows a ``file://`` store on the checkpoints' own file
    system, for the demo only."""

    adopt_existing: str = ""
    take_over: str = ""
    fresh: str = ""
    retry: str = ""
    gpu_reader: GpuReader | None = None
    same_disk_store: bool = False


class Foundation:
    """What exists before the parts, and ends after them. ``disk`` is the thread for the daemon's own files. Construct
    it on the event loop."""

    def __init__(
        self, paths: RunPaths, clock: Clock, journal: AsyncJournal, bus: EventBus, lock: RunLock | None = None
    ) -> None:
        self.paths, self.clock, self.journal, self.bus, self.lock = paths, clock, journal, bus, lock
        self.exit = Exit()
        self.tasks = BackgroundTasks(bus, self.exit)
        self.disk = Worker("daemon")
        self.systemd = make_notifier(os.environ)

    async def close(self, seconds: float = STEP_SECONDS) -> None:
        await briefly(self.journal.close(), seconds)
        self.disk.close()
        self.systemd.close()


class Run:
    """The run as every part knows it: its configuration, directories and recorded state."""

    def __init__(
        self, foundation: Foundation, config: Configuration, layout: Layout, workspace: Workspace, file: RunFile
    ) -> None:
        self.paths, self.clock, self.journal = foundation.paths, foundation.clock, foundation.journal
        self.emit = foundation.bus
        self.config, self.layout, self.workspace, self.file = config, layout, workspace, file
        self.record_files = RecordFiles(self.paths.records, workspace.records_copy, workspace.tree)
        self.records = CheckpointRecords(self.record_files, boot_id=boot_id(), boot_wall=boot_wall())
        self.files_clock = FilesClock(workspace, layout.watch_roots()[0], foundation.clock)
        self.guard = MutationGuard()


class Reader(Protocol):
    @property
    def reading(self) -> frozenset[int]:
        """The steps that it reads now."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints on this disk, and what marks those that cannot be used."""

    catalogue: Catalogue
    capabilities: Capabilities
    roots: RootWatch
    implausible: Implausible
    measurements: Measurements
    worker: Worker
    remover: Remover
    removals: Worker
    """The thread of removals."""
    two_writers: TwoWriters
    rescans: Rescans
    readers: list[Reader] = field(default_factory=list)
    """What reads checkpoints besides training and uploads: hooks and evaluations."""


@dataclass(frozen=True, slots=True)
class Training:
    """What starts the trainer. ``environment`` is that of a start."""

    launcher: SupervisorLauncher
    environment: TrainingEnvironment


@dataclass(frozen=True, slots=True)
class Store:
    """``backup`` is None without a store. ``refused``: why the configured one is not used, else empty. ``elsewhere``:
    node 0 of this run uploads for all of its nodes, and this is another one."""

    backup: Backup | None
    restore: "RestoreThread | None"
    refused: str
    wandb: WandbIds
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Components:
    """All parts of one daemon that watch and act."""

    foundation: Foundation
    run: Run
    checkpoints: Checkpoints
    sensors: Sensors
    training: Training
    store: Store
    recovery: Recovery
    checks: StateCheck
    detection: Detection
    observation: Observation
    pruner: Pruner
    gang: Gang | None = None
    """None for a run on one node."""
    verdicts: JobVerdicts | None = None
    """In job mode with a store."""

    @property
    def settings(self) -> Settings:
        """Those in force: a reload replaces them."""
        return self.run.config.settings

    @property
    def backup(self) -> Backup | None:
        return self.store.backup

    @property
    def bus(self) -> EventBus:
        return self.foundation.bus

    @property
    def exit(self) -> Exit:
        return self.foundation.exit


def build(
    settings: Settings, foundation: Foundation, start: StartOptions, job: SupervisorJob | None = None
) -> Components:
    """Build all parts. ``job`` is set in job mode. Blocks: reads the journal, probes the disk."""
    learn_secrets(settings)
    held = held_back_findings.recalled_spans(foundation.journal.sync.learned(held_back_findings.TWO_WRITERS_KEY))
    run, missing = _run(settings, foundation, held)
    place = own_place(settings)
    launcher = _launcher(settings, run, several_nodes=place is not None, job=job)
    checkpoint_settings = settings.checkpoints
    catalogue = Catalogue(
        run.layout,
        run.clock,
        settle=checkpoint_settings.settle,
        settle_weak=checkpoint_settings.settle_weak,
        settle_tracker=checkpoint_settings.settle_tracker,
        records=run.records,
        held_back=held,
        tree=run.workspace.tree,
    )
    measurements = Measurements(run.workspace, run.layout, keep_seconds=QUARANTINE_SECONDS)
    sensors = build_sensors(settings, run, catalogue, measurements, Path(launcher.log_path()), start.gpu_reader)
    checkpoints = _checkpoints(settings, run, held, catalogue, measurements, sensors)
    checks = StateCheck(
        run.file,
        run.journal.sync,
        run.workspace,
        run.clock,
        lock=foundation.lock,
        emit=run.emit,
        exits=foundation.exit,
        missing=missing,
    )
    run.guard.add(checks.blocked_reason)
    run.guard.add(lambda _mutation: checkpoints.roots.blocked_reason())
    store = _store(settings, run, checkpoints, sensors, foundation.exit, start, stands_by=job is not None)
    register(run.file.current.ping_token)
    training = Training(launcher, TrainingEnvironment(run.file.current.ping_token))
    context = RecoveryContext(
        Tools(
            settings=settings,
            policies=run.config.policies,
            clock=run.clock,
            journal=run.journal,
            emit=run.emit,
            launcher=launcher,
            run=RunFiles(run.layout, catalogue, run.workspace, run.file, run.files_clock),
            sensors=TrainerSensors(sensors.gpus, sensors.trainer, sensors.progress, sensors.inference),
            environment=training.environment,
            store=RunStore(store.restore, store.backup),
            place=place,
            guard=run.guard,
            reserve=checks.reserve,
        )
    )
    failures = Failures(context)
    verdicts = None
    if job is not None:
        verdicts = make_verdicts(run, sensors.gpus, store.backup, context, retry=bool(start.retry))
    gang = None if place is None else make_gang(place, failures, store.backup, verdicts)
    if gang is not None and not gang.leads:
        run.guard.add(gang.blocked_reason)
    recovery = Recovery(context, failures, gang)
    learned = learned_before(run).for_run(
        f"{settings.run_id} {run.layout.name}", f"{list(settings.gpu.inference)} {list(settings.gpu.trainer)}"
    )
    detection = Detection(run, sensors, poll=settings.gpu.poll, learned=learned)
    observation = Observation(run, checkpoints, sensors, detection, recovery, store.backup)
    pruner = _pruner(run, checkpoints, sensors, observation, store.backup)
    return Components(
        foundation,
        run,
        checkpoints,
        sensors,
        training,
        store,
        recovery,
        checks,
        detection,
        observation,
        pruner,
        gang,
        verdicts,
    )


def _run(settings: Settings, foundation: Foundation, held: HeldBack) -> tuple[Run, str]:
    """The run, and why its workspace cannot be written, else empty: podwatch then guards, but starts nothing."""
    layout, command = make_layout(settings), settings.trainer.command
    try:
        target = layout.target_step(command)
    except (PodwatchError, OSError):
        target = None
    policies = policies_from(settings, max_steps=target, save_interval=layout.save_interval(command))
    workspace, missing = workspace_of(settings), ""
    try:
        workspace = workspace.probe()
    except HostError as error:
        missing = str(error)
    config = Configuration(settings, policies, restart_concerns(settings, layout))
    file = RunFile(foundation.paths.state, workspace, settings.run_id, foundation.clock, held.follow)
    file.load_within(LOAD_SECONDS)
    file.note(_with_names)
    return Run(foundation, config, layout, workspace, file), missing


def _with_names(run: RunState) -> RunState:
    """With the random names of this run on this pod, made once; the next edit records them."""
    return replace(
        run, writer_id=run.writer_id or secrets.token_hex(16), ping_token=run.ping_token or secrets.token_hex(16)
    )


def _launcher(settings: Settings, run: Run, *, several_nodes: bool, job: SupervisorJob | None) -> SupervisorLauncher:
    def start_ids() -> tuple[str, ...]:
        last = run.file.current.last_start
        return () if last is None else (last.start_id,)

    return SupervisorLauncher(
        settings.run_id,
        settings.trainer.output_dir,
        settings.state_dir,
        run.clock,
        roles=Roles(process_names(settings)),
        run=lambda: sought_run(run.config.settings, start_ids()),
        # At a preemption the supervisor, too, leaves training the whole grace for its last save, and what init adds to
        # it.
        options=SupervisorOptions(
            beside=run.workspace.outside,
            several_nodes=several_nodes,
            grace=max(settings.trainer.stop_grace, settings.recovery.preempt_grace + MORE_SECONDS),
            job=job,
        ),
    )


def _checkpoints(
    settings: Settings,
    run: Run,
    held: HeldBack,
    catalogue: Catalogue,
    measurements: Measurements,
    sensors: Sensors,
) -> Checkpoints:
    roots, worker = RootWatch(run.workspace, run.clock), Worker("checkpoints")
    two_writers = TwoWriters(
        settings,
        run.layout,
        held,
        roles=Roles(process_names(settings)),
        clock=run.clock,
        journal=run.journal.sync,
        processes=sensors.trainer,
    )
    rescans = Rescans(
        catalogue,
        worker,
        run.clock,
        run.emit,
        Announced(run.journal),
        seconds=settings.checkpoints.rescan,
        checks=(roots, two_writers),
        warn=run.emit.warn,
    )
    return Checkpoints(
        catalogue=catalogue,
        capabilities=capabilities_of(run.workspace.outside),
        roots=roots,
        implausible=Implausible(held),
        measurements=measurements,
        worker=worker,
        remover=Remover(run.workspace, run.clock, run.emit, run.guard),
        removals=Worker("removals"),
        two_writers=two_writers,
        rescans=rescans,
    )


def _pruner(
    run: Run, checkpoints: Checkpoints, sensors: Sensors, observation: Observation, backup: Backup | None
) -> Pruner:
    async def nothing_uploads(_step: int) -> None:
        """Without a store."""

    return Pruner(
        facts=observation.now,
        rules=run.config.removal_rules,
        layout=run.layout,
        records=run.records,
        rescan=checkpoints.rescans.wake,
        abandon=nothing_uploads if backup is None else backup.abandon,
        refresh_disk=sensors.disk.wake,
        remover=checkpoints.remover,
        measurements=checkpoints.measurements,
        worker=checkpoints.removals,
        clock=run.clock,
    )


# -- the store -------------------------------------------------------------------------------------------------------


def _store(
    settings: Settings, run: Run, checkpoints: Checkpoints, sensors: Sensors, leaving: Exit, start: StartOptions, *,
    stands_by: bool,
) -> Store:  # fmt: skip
    """``stands_by``: while another pod holds the run this one waits."""
    wandb = WandbIds(run.layout)
    refused = "" if start.same_disk_store else _why_no_backup(settings)
    if settings.nodes.rank:
        return Store(None, None, "", wandb, elsewhere=True)
    if not settings.sync.store or refused:
        return Store(None, None, refused, wandb)
    record, sync = run.file.current, settings.sync
    take_over = start.take_over if record.executed.get(TAKE_OVER) != start.take_over else ""
    pod = this_pod(record.writer_id, settings.trainer.output_dir, os.environ)
    side = RunSide(settings, run, sensors.trainer, leaving, wandb, checkpoints.rescans, pod=pod, take_over=take_over)
    connection = StoreConnection(settings, run.clock, run.emit)
    timing = LeaseTiming(sync.holder_patience, sync.claim_wait, heartbeat=sync.heartbeat, refusal=sync.refusal_wait)
    lease = Lease(pod, connection.keys, run.clock, side, timing, take_over=bool(take_over), stands_by=stands_by)
    outbox = Outbox(run.paths.state / "sent", run.workspace, settings.disk.margin)
    catalogue = checkpoints.catalogue
    backup = Backup(
        settings,
        side,
        catalogue,
        run.journal,
        run.clock,
        connection,
        lease,
        outbox,
        save_gap=lambda: median_gap(catalogue.records.all),
    )
    return Store(backup, make_restore(settings, run, backup, "restore"), refused, wandb)


def _why_no_backup(settings: Settings) -> str:
    """Why the store is refused, else empty: a directory on the checkpoints' own filesystem is no backup."""
    url, output = settings.sync.store, settings.trainer.output_dir
    if not url.startswith("file:") or not is_on_file_system_of(url, output):
        return ""
    return f"{url} is on the same filesystem as {output}: it must be on another volume, or a bucket"


def make_restore(settings: Settings, run: Run, backup: Backup, name: str) -> "RestoreThread":
    """A thread for restores of this run, which reads the key at each use. What it fetches stays in the store."""
    from podwatch.store.keys import RunKeys
    from podwatch.store.objects.access import access_for
    from podwatch.store.objects.open import parse_url
    from podwatch.store.restore.restore import Restorer, StoreOfRun
    from podwatch.store.restore.thread import RestoreThread

    url = settings.sync.store
    keys = RunKeys(settings.run_id, parse_url(url).prefix)
    store = StoreOfRun(url, keys, lambda: access_for(run.config.settings), settings.sync.connections)
    restore = RestoreThread(Restorer(store, run.layout, run.workspace, run.record_files), name)
    backup.restores.append(restore)
    return restore


# -- recording -------------------------------------------------------------------------------------------------------


def make_recorder(parts: Components) -> Recorder | None:
    """The recorder for `podwatch replay`; None if [record] is off. Its thread reads frozen values only."""
    settings, run, detection = parts.settings, parts.run, parts.detection
    if not settings.record.enabled:
        return None

    def header() -> Header:
        return Header(
            run_id=settings.run_id,
            layout=run.layout.name,
            poll=parts.settings.gpu.poll,
            policies=run.config.policies,
            learned=detection.state.learned,
        )

    def report(problem: str | None) -> None:
        text = problem or "recording for `podwatch replay` works again"
        severity = Severity.INFO if problem is None else Severity.WARNING
        run.emit.say_from_thread(EventName.RECORDING_CHANGED, text, severity)

    return Recorder(run.paths.recording, header, max_size=settings.record.max_size, mask=scrub, complain=report)
