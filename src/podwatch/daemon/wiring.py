"""Builds the components of one daemon and connects them, one function for each subject. Starts nothing."""

import os
import re
import secrets
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from podwatch.checkpoints.catalogue import Catalogue, HeldBack, RunMemory
from podwatch.checkpoints.expected_files import command_digest
from podwatch.checkpoints.layouts import Layout, make_layout, process_names, restart_concerns, trainer_logs
from podwatch.checkpoints.layouts.command_line import save_interval
from podwatch.checkpoints.reboot_check import RebootCheck, boot_wall
from podwatch.checkpoints.settle_time import Capabilities, probe
from podwatch.checkpoints.watcher import Watcher
from podwatch.config.settings import Settings
from podwatch.daemon import held_back_findings
from podwatch.daemon.checkpoint_loop import Rescans, RootWatch
from podwatch.daemon.configuration import Configuration, TrainingEnvironment, learn_secrets, policies_from
from podwatch.daemon.gang import Gang, NodeHere, make_gang
from podwatch.daemon.held_back_findings import Implausible, TwoWriters, believed_progress
from podwatch.daemon.notifications import Events
from podwatch.daemon.paths import RunLock, RunPaths, workspace_of
from podwatch.daemon.run_directory import take_along
from podwatch.daemon.sensing_loop import Sensors
from podwatch.daemon.startup_checks import Exits, Records, StartupChecks
from podwatch.daemon.store import (
    Identity,
    Refusals,
    StoreRestore,
    SyncedRun,
    WandbIds,
    attempt_ended,
    first_time,
    make_restorer,
    no_backup,
    this_pod,
)
from podwatch.detection.learned import Learned
from podwatch.detection.log_rules import shipped
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError
from podwatch.domain.process import ProcessRole
from podwatch.domain.run import MutationGuard
from podwatch.domain.secrets import register
from podwatch.domain.snapshot import Desired
from podwatch.journal import AsyncJournal, Journal
from podwatch.policy.disk_forecast import SAVES, Forecast
from podwatch.policy.other_trainers import Beside
from podwatch.recovery.controller import Recovery
from podwatch.recovery.state import RecordHolder, RunFiles, RunStore, Tools, TrainerSensors
from podwatch.retention.removal import Remover
from podwatch.retention.trash import SetAsideUsage
from podwatch.sensors.disk import DiskSensor, DisksSensor
from podwatch.sensors.gpu import WAIT, GpuReader, GpuSensor, TrialLoad
from podwatch.sensors.host import HostSensor
from podwatch.sensors.inference import InferenceSensor
from podwatch.sensors.log_rules import LogRulesSensor, risky
from podwatch.sensors.log_tail import Sources, StepLines
from podwatch.sensors.nvml import NvmlReader
from podwatch.sensors.processes import ProcessSensor
from podwatch.sensors.progress import POLL as PROGRESS_POLL
from podwatch.sensors.progress import PingInbox, ProgressSensor, StepReader
from podwatch.sensors.server_discovery import ServerFinder
from podwatch.sensors.training_metrics import MetricReader, TrainingSensor
from podwatch.sensors.xid import XidInbox
from podwatch.sync.lease.protocol import LeaseTerms
from podwatch.sync.store_session import timing_of
from podwatch.sync.syncer import Syncer
from podwatch.sync.types import OwnSets
from podwatch.system.clock import Clock
from podwatch.system.procfs import boot_id
from podwatch.system.workers import Worker
from podwatch.system.workspace import Workspace
from podwatch.trainer.base import TrainerHandle
from podwatch.trainer.discover import run_of
from podwatch.trainer.launcher import KeeperJob, KeeperLauncher, KeeperOptions
from podwatch.trainer.roles import RolePatterns, Roles

QUARANTINE_SECONDS = 7 * 86400.0
"""Quarantined checkpoints are kept for a week, unless the disk needs the space and a verified successor exists."""
LEARNED = "learned"
"""Journal key of the learned baselines and durations."""
READ_SO_FAR = "logs.read"
"""Journal key of the read positions in the logs of the current start."""


# -- what is built ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Foundation:
    """What exists before the components: the run's places, time and records."""

    paths: RunPaths
    clock: Clock
    journal: AsyncJournal
    emit: Events
    exits: Exits
    rescans: Rescans
    lock: RunLock | None = None
    opening: Worker | None = None
    """The thread in which the journal was opened."""


@dataclass(frozen=True, slots=True)
class Choices:
    """How this daemon is started. ``take_over`` is the id of an operator's `--take-over`. ``same_disk_store`` allows a
    ``file://`` store on the checkpoints' own file system, for the demo only. ``job`` is set in job mode."""

    gpu_reader: GpuReader | None = None
    same_disk_store: bool = False
    take_over: str = ""
    job: KeeperJob | None = None


class Run:
    """The run as every component knows it: its configuration, directories, and (once it is built) recovery's view of
    the training. Parts that recovery is built from ask here, and are answered as before any training until then."""

    def __init__(self, foundation: Foundation, config: Configuration, layout: Layout, workspace: Workspace) -> None:
        self.paths, self.clock, self.journal = foundation.paths, foundation.clock, foundation.journal
        self.emit = foundation.emit
        self.config, self.layout, self.workspace = config, layout, workspace
        self.guard = MutationGuard()
        self._recovery: Recovery | None = None

    def connect(self, recovery: Recovery) -> None:
        self._recovery = recovery

    @property
    def handle(self) -> TrainerHandle | None:
        return self._recovery.handle if self._recovery is not None else None

    @property
    def acting(self) -> bool:
        """Whether a stop or start of training is in progress."""
        return self._recovery is not None and self._recovery.state.acting

    @property
    def trained(self) -> bool:
        """Whether a trainer of this run was seen on this pod."""
        return self._recovery is not None and self._recovery.context.seen_here

    @property
    def finished(self) -> bool:
        return self._recovery is not None and self._recovery.desired is Desired.FINISHED

    @property
    def waits_for_store(self) -> bool:
        return self._recovery is not None and self._recovery.checks.waits_for_store

    def owns(self, found: CheckpointSet) -> bool:
        return self._recovery is not None and self._recovery.context.owns(found)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints on this disk, and what marks those that cannot be used."""

    catalogue: Catalogue
    capabilities: Capabilities
    roots: RootWatch
    watcher: Watcher
    rescans: Rescans
    held: HeldBack
    implausible: Implausible
    aside: SetAsideUsage
    worker: Worker
    readers: list["Reader"] = field(default_factory=list)
    """What reads checkpoints besides training and uploads: hooks and evaluations."""


class Reader(Protocol):
    @property
    def reading(self) -> frozenset[int]:
        """The steps that it reads now."""
        ...


@dataclass(frozen=True, slots=True)
class Sensing:
    """The sensors, those by name that others ask too."""

    sensors: Sensors
    gpus: GpuSensor
    disk: DiskSensor
    disks: DisksSensor
    processes: ProcessSensor
    progress: ProgressSensor
    log_rules: LogRulesSensor
    inbox: PingInbox
    servers: "Servers"


@dataclass(frozen=True, slots=True)
class Training:
    """The trainer, and what its starts use. ``environment`` is that of a start."""

    launcher: KeeperLauncher
    record: RecordHolder
    environment: TrainingEnvironment
    two_writers: TwoWriters


@dataclass(frozen=True, slots=True)
class Store:
    """``syncer`` is None without a store. ``refused``: why the configured one is not used, else empty. ``elsewhere``:
    node 0 of this run uploads for all of its nodes, and this is another one."""

    syncer: Syncer | None
    restore: StoreRestore | None
    refused: str
    wandb: WandbIds
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Deletion:
    remover: Remover
    forecast: Forecast
    worker: Worker


@dataclass(frozen=True, slots=True)
class Components:
    """All components that the lifecycle starts, stops and queries."""

    run: Run
    checkpoints: Checkpoints
    sensing: Sensing
    training: Training
    recovery: Recovery
    store: Store
    deletion: Deletion
    checks: StartupChecks
    gang: Gang | None = None
    """None for a run on one node."""

    @property
    def settings(self) -> Settings:
        """Those in force: a reload replaces them."""
        return self.run.config.settings

    @property
    def syncer(self) -> Syncer | None:
        return self.store.syncer


def build(settings: Settings, foundation: Foundation, choices: Choices) -> Components:
    """Build all components. Blocks: probes the disk."""
    learn_secrets(settings)
    run, missing = _run(settings, foundation)
    checkpoints = _checkpoints(settings, run, foundation.rescans)
    launcher = KeeperLauncher(
        settings.run_id,
        settings.trainer.output_dir,
        settings.state_dir,
        run.clock,
        roles=Roles(process_names(settings)),
        run=lambda: run_of(run.config.settings),
        options=KeeperOptions(grace=settings.trainer.stop_grace, job=choices.job),
    )
    sensing = _sensing(settings, run, checkpoints, Path(launcher.log_path()), choices.gpu_reader)
    training = _training(settings, run, checkpoints, sensing, launcher)
    checks = _checks(settings, run, foundation)
    checks.missing = missing
    run.guard.add(checks.blocked_reason)
    run.guard.add(lambda _mutation: checkpoints.roots.blocked_reason())
    store = _store(settings, run, checkpoints.catalogue, training.record, foundation.exits, choices, checks.unknown)
    gang = make_gang(settings, run.workspace, run.clock)
    if gang is not None and not gang.leads:
        run.guard.add(gang.blocked_reason)
    recovery = _recovery(settings, run, checkpoints, sensing, training, store, gang)
    run.connect(recovery)
    if gang is not None:
        gang.connect(NodeHere(recovery, store.syncer))
    return Components(run, checkpoints, sensing, training, recovery, store, _deletion(run), checks, gang)


def _run(settings: Settings, foundation: Foundation) -> tuple[Run, str]:
    """The run, and why its workspace cannot be written, else empty."""
    trainer = settings.trainer
    layout = make_layout(settings)
    policies = policies_from(
        settings,
        max_steps=_target(layout, trainer.command),
        save_interval=save_interval(layout.name, trainer.command, trainer.cwd or trainer.output_dir.parent),
    )
    take_along(settings.run_id, layout.name, trainer.output_dir, foundation.emit.warn)
    workspace, missing = _workspace(workspace_of(settings))
    config = Configuration(settings, policies, restart_concerns(settings, layout))
    return Run(foundation, config, layout, workspace), missing


def _checkpoints(settings: Settings, run: Run, rescans: Rescans) -> Checkpoints:
    journal, layout, workspace = run.journal.sync, run.layout, run.workspace
    held = held_back_findings.recalled_spans(journal.learned(held_back_findings.TWO_WRITERS_KEY))
    checkpoints = settings.checkpoints
    catalogue = Catalogue(
        layout,
        run.clock,
        settle=checkpoints.settle,
        settle_weak=checkpoints.settle_weak,
        settle_tracker=checkpoints.settle_tracker,
        leases=checkpoints.leases,
        learned=RunMemory(
            journal,
            whose=command_digest(settings.trainer.command),
            boots=RebootCheck(journal, boot_id(), boot_wall()),
            stored=lambda: frozenset((p.step, p.save_id) for p in journal.published()),
        ),
        held_back=held,
        tree=workspace.tree,
    )
    return Checkpoints(
        catalogue=catalogue,
        capabilities=probe(workspace.outside, workspace.tree),
        roots=RootWatch(workspace, run.clock),
        watcher=Watcher(catalogue.watch_dirs, rescans.wake_from_thread, warn=run.emit.warn),
        rescans=rescans,
        held=held,
        implausible=Implausible(held, run.journal, run.config.policies.detection.max_steps),
        aside=SetAsideUsage(workspace, layout.spare_paths, keep_seconds=QUARANTINE_SECONDS),
        worker=Worker("checkpoints"),
    )


# -- sensors ---------------------------------------------------------------------------------------------------------


class Servers:
    """The addresses of the inference servers: as discovered now, else as known of an earlier podwatch."""

    def __init__(self, sensor: InferenceSensor, known: tuple[str, ...]) -> None:
        self._sensor, self._known = sensor, known

    def ports(self) -> tuple[int, ...]:
        """Ports on this machine that must be free before a start."""
        return _ports(self._sensor.urls or self._known)


def _sensing(
    settings: Settings, run: Run, checkpoints: Checkpoints, log_path: Path, gpu_reader: GpuReader | None
) -> Sensing:
    clock, poll, gpu = run.clock, settings.gpu.poll, settings.gpu
    catalogue, aside = checkpoints.catalogue, checkpoints.aside
    xids = XidInbox(clock)
    trial = TrialLoad(wait=min(WAIT, 0.6 * gpu.deadline))
    gpus = GpuSensor(gpu_reader or NvmlReader(xids, trial), clock, poll=poll, deadline=gpu.deadline)
    disk = DiskSensor(
        settings.trainer.checkpoint_dir or settings.trainer.output_dir,
        clock,
        settings.disk.capacity,
        poll=max(poll, min(5.0, settings.checkpoints.rescan)),
        known_bytes=lambda: sum(s.size_bytes for s in catalogue.sets) + aside.found.bytes,
    )
    disks = DisksSensor(partial(_places, settings, catalogue), clock)
    log_rules = LogRulesSensor(clock, run.config.policies.log_rules, trusted=shipped(trainer_logs(settings)))
    health = settings.training
    metrics = TrainingSensor(
        clock,
        settings.trainer.output_dir,
        MetricReader(trainer_logs(settings)),
        metrics_file=health.metrics_file,
        metrics_url=health.metrics_url,
    )
    inbox = PingInbox(clock)
    progress = _progress(settings, run, catalogue, inbox, log_path, (log_rules, metrics))
    processes = ProcessSensor(clock, poll=poll, logs=progress, roles=_roles(settings))
    servers, addresses = _inference(settings, run, processes)
    return Sensing(
        sensors=Sensors(
            gpus=gpus,
            trainer=processes,
            disk=disk,
            inference=servers,
            progress=progress,
            host=HostSensor(clock, trainer=processes, xids=xids),
            logs=log_rules,
            training=metrics,
            disks=disks,
        ),
        gpus=gpus,
        disk=disk,
        disks=disks,
        processes=processes,
        progress=progress,
        log_rules=log_rules,
        inbox=inbox,
        servers=addresses,
    )


def _progress(
    settings: Settings,
    run: Run,
    catalogue: Catalogue,
    inbox: PingInbox,
    log_path: Path,
    taps: tuple[LogRulesSensor, TrainingSensor],
) -> ProgressSensor:
    trainer, layout, poll = settings.trainer, run.layout, settings.gpu.poll
    target, custom = run.config.policies.detection.max_steps, _step_line(settings)
    lines = StepLines(trainer_logs(settings))
    progress = ProgressSensor(
        run.clock,
        lambda: believed_progress(layout.progress(), catalogue.sets),
        logs=Sources(trainer.output_dir, trainer.logs or layout.log_globs(), (log_path,)),
        inbox=inbox,
        finish_lines=layout.finish_lines,
        poll=max(poll, min(2 * poll, PROGRESS_POLL)),
        taps=taps,
        steps=lambda: StepReader(lines, target=target, custom=custom),
    )
    progress.recall(run.journal.sync.learned(READ_SO_FAR))
    return progress


def _inference(settings: Settings, run: Run, processes: ProcessSensor) -> tuple[InferenceSensor, Servers]:
    inference, before = settings.inference, _learned(run.journal.sync)
    finder = None
    if inference.discover:
        known = (before.start_id, before.servers)
        finder = ServerFinder(run.clock, processes, timeout=inference.timeout, known=known)
    sensor = InferenceSensor(
        inference.urls,
        run.clock,
        timeout=inference.timeout,
        poll=inference.poll,
        liveness=inference.liveness == "auto",
        finder=finder,
    )
    return sensor, Servers(sensor, before.servers)


# -- state, store, recovery, deletion --------------------------------------------------------------------------------


def _checks(settings: Settings, run: Run, foundation: Foundation) -> StartupChecks:
    return StartupChecks(
        run.journal.sync,
        run.clock,
        Records(settings.state_dir / settings.run_id / "keeper", run.workspace),
        lock=foundation.lock,
        store=bool(settings.sync.store),
        emit=run.emit,
        exits=foundation.exits,
        run=run,
        worker=foundation.opening,
    )


def _store(
    settings: Settings,
    run: Run,
    catalogue: Catalogue,
    record: RecordHolder,
    exits: Exits,
    choices: Choices,
    unknown: bool,
) -> Store:
    """``unknown``: the database could not be read. Without it this pod does not know its own id in the store, and would
    look like another pod."""
    journal = run.journal.sync
    identity = Identity(settings, run.layout, _remembered(journal, "writer_id"), record, WandbIds(run.layout))
    refused = no_backup(settings, choices.same_disk_store)
    if settings.nodes.rank:
        return Store(None, None, "", identity.wandb, elsewhere=True)
    if not settings.sync.store or refused or unknown:
        return Store(None, None, refused, identity.wandb)
    take_over = first_time(journal, choices.take_over)
    syncer = _syncer(settings, run, catalogue, identity, exits, take_over=take_over)
    restorer = make_restorer(settings, run.layout, run.workspace, journal, identity.writer_id)
    return Store(syncer, StoreRestore(restorer, Worker("restore"), catalogue), refused, identity.wandb)


def _syncer(
    settings: Settings, run: Run, catalogue: Catalogue, identity: Identity, exits: Exits, *, take_over: bool
) -> Syncer:
    me = this_pod(identity.writer_id, settings.trainer.output_dir, os.environ)
    return Syncer(
        settings,
        SyncedRun(identity, run, Refusals(run.emit, exits, run, run.clock)),
        OwnSets(catalogue, run.owns),
        run.journal,
        run.clock,
        run.emit,
        terms=LeaseTerms(me, timing_of(settings.sync), take_over, attempt_ended),
        workspace=run.workspace,
    )


def _training(
    settings: Settings, run: Run, checkpoints: Checkpoints, sensing: Sensing, launcher: KeeperLauncher
) -> Training:
    token = _remembered(run.journal.sync, "heartbeat.token")
    register(token)
    return Training(
        launcher=launcher,
        record=RecordHolder(run.workspace, lambda current: checkpoints.held.leave(current.earlier)),
        environment=TrainingEnvironment(run.config, token),
        two_writers=TwoWriters(
            settings.trainer,
            checkpoints.held,
            roles=Roles(process_names(settings)),
            layout=run.layout,
            clock=run.clock,
            journal=run.journal.sync,
            run=run,
            tree=sensing.processes,
        ),
    )


def _recovery(
    settings: Settings,
    run: Run,
    checkpoints: Checkpoints,
    sensing: Sensing,
    training: Training,
    store: Store,
    gang: Gang | None,
) -> Recovery:
    return Recovery(
        Tools(
            settings=settings,
            policies=run.config.policies,
            clock=run.clock,
            journal=run.journal,
            emit=run.emit,
            launcher=training.launcher,
            run=RunFiles(run.layout, checkpoints.catalogue, run.workspace, training.record),
            sensors=TrainerSensors(sensing.gpus, sensing.processes, sensing.progress),
            pod=ThisPod(training, sensing.servers),
            store=RunStore(store.restore, store.syncer),
            gang=gang,
            guard=run.guard,
        )
    )


class ThisPod:
    """What recovery asks about this pod; see ``recovery.state.Pod``."""

    def __init__(self, training: Training, servers: Servers) -> None:
        self._training, self._servers = training, servers

    @property
    def beside(self) -> Beside:
        return self._training.two_writers.beside

    def environment(self) -> dict[str, str]:
        return self._training.environment.build()

    def ports(self) -> tuple[int, ...]:
        return self._servers.ports()


def _deletion(run: Run) -> Deletion:
    journal = run.journal
    return Deletion(
        remover=Remover(run.workspace, journal.sync, run.clock, run.emit, run.guard),
        forecast=Forecast(journal.sync.learned(SAVES), keep=lambda known: journal.post(Journal.learn, SAVES, known)),
        worker=Worker("removals"),
    )


# -- parts of the configuration --------------------------------------------------------------------------------------


def _workspace(found: Workspace) -> tuple[Workspace, str]:
    """The probed workspace, or the unprobed one with the reason: podwatch guards, but starts nothing."""
    try:
        return found.probe(), ""
    except HostError as error:
        return found, str(error)


def _places(settings: Settings, catalogue: Catalogue) -> dict[str, Path]:
    """Role -> path of what a run and podwatch write besides the checkpoints. Parts come from the newest checkpoint."""
    environment = {**os.environ, **settings.trainer.env}
    newest = newest_complete(catalogue.sets)
    return {
        "output": settings.trainer.output_dir,
        "temp": Path(environment.get("TMPDIR") or "/tmp"),
        "state": settings.state_dir,
        **({p.name: Path(p.path) for p in newest.parts} if newest is not None else {}),
    }


def _remembered(journal: Journal, key: str) -> str:
    """A random identifier of this run on this pod, created once."""
    value = journal.learned(key)
    if not isinstance(value, str) or not value:
        value = secrets.token_hex(16)
        journal.learn(key, value)
    return value


def _learned(journal: Journal) -> Learned:
    """The baselines and durations that an earlier podwatch learned."""
    kept = journal.learned(LEARNED, {})
    return Learned.from_dict(kept) if isinstance(kept, dict) else Learned()


def _step_line(settings: Settings) -> re.Pattern[str] | None:
    """The operator's pattern of a step line. Raises ConfigurationError for one that can take exponential time: it is
    matched against every line, on the event loop."""
    custom = settings.checkpoints.custom
    if custom is None or not custom.step_line or settings.trainer.layout not in ("custom", "auto"):
        return None
    if risky(custom.step_line):
        raise ConfigurationError(
            "the pattern can take exponential time on a line that almost matches",
            where="checkpoints.custom.step_line",
            fix=r"remove nested repetitions such as (a+)+; for example ^step (\d+) done",
        )
    return re.compile(custom.step_line)


def _roles(settings: Settings) -> RolePatterns:
    """The operator's patterns of process roles. Raises ConfigurationError as ``_step_line``."""
    custom = settings.checkpoints.custom
    if custom is None or settings.trainer.layout not in ("custom", "auto"):
        return RolePatterns({})
    patterns = {
        ProcessRole.TRAINER: custom.trainer_processes,
        ProcessRole.ORCHESTRATOR: custom.orchestrator_processes,
        ProcessRole.INFERENCE: custom.inference_processes,
        ProcessRole.ENGINE: custom.engine_processes,
    }
    for role, few in patterns.items():
        if slow := next(filter(risky, few), None):
            raise ConfigurationError(
                f"the pattern {slow!r} can take exponential time on a command line that almost matches",
                where=f"checkpoints.custom.{role}_processes",
                fix=r"remove nested repetitions such as (a+)+; for example python .*train\.py",
            )
    return RolePatterns(patterns)


def _target(layout: Layout, command: tuple[str, ...]) -> int | None:
    try:
        return layout.target_step(command)
    except (PodwatchError, OSError):
        return None


def _ports(urls: tuple[str, ...]) -> tuple[int, ...]:
    """Ports on this machine that must be free before a start."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        if parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port:
            found.append(parts.port)
    return tuple(found)
