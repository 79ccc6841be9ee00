"""Builds the components of one daemon and connects them. Starts nothing."""

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from podwatch.checkpoints.capabilities import Capabilities, probe
from podwatch.checkpoints.catalogue import Catalogue, RunMemory
from podwatch.checkpoints.expected_files import command_digest
from podwatch.checkpoints.layouts import Layout, make_layout, restart_concerns, trainer_logs
from podwatch.checkpoints.layouts.base import Concern
from podwatch.checkpoints.layouts.command_line import save_interval
from podwatch.checkpoints.reboot_check import RebootCheck, boot_wall
from podwatch.checkpoints.watcher import Watcher
from podwatch.config.settings import Settings
from podwatch.daemon.directory_watch import RootWatch
from podwatch.daemon.events import EventBus
from podwatch.daemon.implausible_steps import Implausible, believed_progress
from podwatch.daemon.known_secrets import credentials_for, learn_secrets
from podwatch.daemon.paths import RunPaths, workspace_of
from podwatch.daemon.policies import policies_from
from podwatch.daemon.run_directory import take_along
from podwatch.daemon.sensing_loop import Sensors
from podwatch.daemon.startup_checks import Records, StartupChecks
from podwatch.daemon.store_restore import StoreRestore
from podwatch.daemon.two_writers import TwoWriters
from podwatch.daemon.wandb_ids import WandbIds
from podwatch.detection.learned import Learned
from podwatch.detection.log_rules import SHIPPED
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError
from podwatch.domain.lease import Pod
from podwatch.domain.mutation_guard import Mutation, MutationGuard
from podwatch.domain.policy import Policies
from podwatch.domain.process import ProcessRole
from podwatch.domain.secrets import register, scrub, scrub_argv
from podwatch.domain.snapshot import Desired
from podwatch.journal import AsyncJournal, Journal
from podwatch.policy.other_trainers import Beside
from podwatch.recovery.controller import Recovery
from podwatch.recovery.state import RecordHolder, RunFiles, RunStore, Tools, TrainerSensors
from podwatch.retention.forecast import SAVES, Forecast
from podwatch.retention.remover import Remover
from podwatch.retention.trash import SetAsideUsage
from podwatch.sensors.disk import DiskSensor, DisksSensor
from podwatch.sensors.gpu import GpuReader, GpuSensor
from podwatch.sensors.host import HostSensor
from podwatch.sensors.inference import InferenceSensor
from podwatch.sensors.log_rules import LogRulesSensor, risky
from podwatch.sensors.log_tail import StepLines
from podwatch.sensors.nvml import NvmlReader
from podwatch.sensors.nvml_probe import WAIT, TrialLoad
from podwatch.sensors.processes import ProcessSensor
from podwatch.sensors.progress import POLL as PROGRESS_POLL
from podwatch.sensors.progress import PingInbox, ProgressSensor
from podwatch.sensors.progress_bars import StepReader
from podwatch.sensors.server_discovery import ServerFinder
from podwatch.sensors.training_metrics import TrainingSensor
from podwatch.sensors.xid import XidInbox
from podwatch.stores.open import open_store, same_filesystem
from podwatch.sync.restore.child_process import FetchProcess
from podwatch.sync.restore.restore import FetchPace, Restorer
from podwatch.sync.syncer import Syncer
from podwatch.sync.types import OwnSets, RunIdentity
from podwatch.sync.upload.job import keys_for
from podwatch.system.clock import Clock
from podwatch.system.procfs import boot_id, machine_id
from podwatch.system.workers import Worker
from podwatch.system.workspace import Workspace
from podwatch.trainer.discover import run_of
from podwatch.trainer.environment import build_environment
from podwatch.trainer.launcher import KeeperLauncher, KeeperOptions
from podwatch.trainer.roles import RolePatterns

QUARANTINE_SECONDS = 7 * 86400.0
"""Quarantined checkpoints are kept for a week, unless the disk needs the space and a verified successor exists."""
TAKEN_OVER = "sync.taken-over"
"""Journal key of the last executed `--take-over`."""
LEARNED = "learned"
"""Journal key of the learned baselines and durations."""
READ_SO_FAR = "logs.read"
"""Journal key of the read positions in the logs of the current start."""


@dataclass(slots=True)
class Components:
    """All components that the lifecycle starts, stops and queries."""

    settings: Settings
    policies: Policies
    paths: RunPaths
    clock: Clock
    journal: AsyncJournal
    emit: EventBus
    workspace: Workspace
    roots: RootWatch
    layout: Layout
    concerns: tuple[Concern, ...]
    """Reasons why a restart would fail, as far as they are known before the first one."""
    catalogue: Catalogue
    capabilities: Capabilities
    watcher: Watcher
    senses: Sensors
    gpus: GpuSensor
    disk: DiskSensor
    disks: DisksSensor
    forecast: Forecast
    processes: ProcessSensor
    progress: ProgressSensor
    log_rules: LogRulesSensor
    inbox: PingInbox
    launcher: KeeperLauncher
    record: RecordHolder
    recovery: Recovery
    syncer: Syncer | None
    wandb_ids: WandbIds
    two_writers: TwoWriters
    implausible: Implausible
    store_refused: str
    remover: Remover
    aside: SetAsideUsage
    files: Worker
    removals: Worker
    token: str
    guard: MutationGuard
    footing: StartupChecks


def build(
    settings: Settings,
    paths: RunPaths,
    clock: Clock,
    journal: AsyncJournal,
    emit: EventBus,
    *,
    wake: Callable[[], None],
    current: Callable[[], Settings],
    heartbeat_base: Callable[[], str],
    gpu_reader: GpuReader | None = None,
    same_disk_store: bool = False,
    take_over: str = "",
    held_elsewhere: Callable[[str], None] = lambda why: None,
    locked_out: Callable[[PodwatchError], None] = lambda error: None,
    warn: Callable[[str], None] = lambda text: None,
    footing: Callable[..., StartupChecks] = StartupChecks,
) -> Components:
    """Build all components. Blocks: probes the disk.

    ``wake`` is called from a thread when checkpoint files change, ``warn`` when the kernel cannot report such changes
    (a rescan finds them later). ``current`` gives the settings as last reloaded. ``heartbeat_base`` is the base URL of
    progress pings. ``take_over`` is the id of an operator's `--take-over`; ``held_elsewhere`` is called when another
    pod holds the run. ``footing`` builds the Footing. ``same_disk_store`` allows a ``file://`` store on the
    checkpoints' own file system, for the demo only.
    """
    learn_secrets(settings)
    trainer = settings.trainer
    layout = make_layout(settings)
    policies = policies_from(
        settings,
        max_steps=_target(layout, trainer.command),
        save_interval=save_interval(layout.name, trainer.command, trainer.cwd or trainer.output_dir.parent),
    )
    take_along(settings.run_id, layout.name, trainer.output_dir, warn)
    workspace, missing = _workspace(workspace_of(settings))
    roots = RootWatch(workspace, clock)
    checkpoints = settings.checkpoints
    aside = SetAsideUsage(workspace, layout.spare_paths, keep_seconds=QUARANTINE_SECONDS)
    two_writers = TwoWriters(
        trainer.output_dir,
        user=trainer.user,
        command=trainer.command,
        roots=layout.watch_roots,
        clock=clock,
        journal=journal.sync,
        handle=lambda: recovery.handle,
        tree=lambda: processes.latest(),  # noqa: PLW0108 - made below
    )
    implausible = Implausible(two_writers.held, journal, lambda: policies.detection.max_steps)
    catalogue = Catalogue(
        layout,
        clock,
        settle=checkpoints.settle,
        settle_weak=checkpoints.settle_weak,
        settle_tracker=checkpoints.settle_tracker,
        leases=checkpoints.leases,
        learned=RunMemory(
            journal.sync,
            whose=command_digest(trainer.command),
            boots=RebootCheck(journal.sync, boot_id(), boot_wall()),
            stored=lambda: frozenset((p.step, p.save_id) for p in journal.sync.published()),
        ),
        held_back=two_writers.held,
        tree=workspace.tree,
    )
    launcher = KeeperLauncher(
        settings.run_id,
        trainer.output_dir,
        settings.state_dir,
        clock,
        run=lambda: run_of(current()),
        options=KeeperOptions(grace=trainer.stop_grace),
    )
    inbox = PingInbox(clock)
    poll = settings.gpu.poll
    xids = XidInbox(clock)
    trial = TrialLoad(wait=min(WAIT, 0.6 * settings.gpu.deadline))
    reader = gpu_reader or NvmlReader(xids, trial)
    gpus = GpuSensor(reader, clock, poll=poll, deadline=settings.gpu.deadline)
    disk = DiskSensor(
        trainer.checkpoint_dir or trainer.output_dir,
        clock,
        settings.disk.capacity,
        poll=max(poll, min(5.0, checkpoints.rescan)),
        known_bytes=lambda: sum(s.size_bytes for s in catalogue.sets) + aside.found.bytes,
    )
    disks = DisksSensor(lambda: _places(settings, catalogue), clock)
    forecast = Forecast(journal.sync.learned(SAVES), keep=lambda known: journal.post(Journal.learn, SAVES, known))
    log_rules = LogRulesSensor(clock, policies.log_rules, trusted=SHIPPED, scrub=scrub)
    lines, step_line = StepLines(trainer_logs(settings)), _step_line(settings)
    health = settings.training
    training = TrainingSensor(
        clock, trainer.output_dir, metrics_file=health.metrics_file, metrics_url=health.metrics_url
    )
    progress = ProgressSensor(
        clock,
        lambda: believed_progress(layout.progress(), catalogue.sets),
        output_dir=trainer.output_dir,
        inbox=inbox,
        log_globs=trainer.logs or layout.log_globs(),
        extra_logs=(Path(launcher.log_path()),),
        finish_lines=layout.finish_lines,
        poll=max(poll, min(2 * poll, PROGRESS_POLL)),
        taps=(log_rules, training),
        steps=lambda: StepReader(lines, target=policies.detection.max_steps, custom=step_line),
    )
    progress.recall(journal.sync.learned(READ_SO_FAR))
    processes = ProcessSensor(
        clock,
        poll=poll,
        finish_line=lambda: progress.finish_line_seen,
        finished_roles=lambda: progress.finished_roles,
        read_logs=progress.look_again,
        roles=_roles(settings),
    )
    inference = settings.inference
    before = _learned(journal.sync)
    servers = InferenceSensor(
        inference.urls,
        clock,
        timeout=inference.timeout,
        poll=inference.poll,
        liveness=inference.liveness == "auto",
        finder=ServerFinder(
            clock,
            processes.latest,
            processes.sockets,
            timeout=inference.timeout,
            known=(before.start_id, before.servers),
        )
        if inference.discover
        else None,
    )
    senses = Sensors(
        gpus=gpus,
        trainer=processes,
        disk=disk,
        inference=servers,
        progress=progress,
        host=HostSensor(clock, tree=lambda: getattr(processes.latest().value, "descendants", ()), xids=xids),
        logs=log_rules,
        training=training,
        disks=disks,
    )
    record = RecordHolder(workspace, lambda current: two_writers.held.leave(current.earlier))
    token = _remembered(journal.sync, "heartbeat.token")
    register(token)
    writer_id = _remembered(journal.sync, "writer_id")
    wandb_ids = WandbIds(layout)

    def identity() -> RunIdentity:
        current = record.current
        return RunIdentity(
            run_id=settings.run_id,
            lineage=current.lineage.id if current is not None else "",
            parent_step=current.lineage.parent_step if current is not None else None,
            has_parent=current is not None and current.lineage.parent != "",
            writer_id=writer_id,
            host=socket.gethostname(),
            train_command=scrub_argv(trainer.command),
            wandb=wandb_ids.now(current.wandb if current is not None else {}),
            layout=layout.name,
            config_digest=_digest(current.last_start.config_digests) if current and current.last_start else "",
        )

    def owns(found: CheckpointSet) -> bool:
        return recovery.owns(found)

    guard = MutationGuard()
    stand = footing(
        journal.sync,
        clock,
        Records(settings.state_dir / settings.run_id / "keeper", workspace),
        store=bool(settings.sync.store),
        emit=emit,
        acting=lambda: recovery.state.acting,
        trained=lambda: recovery.seen_here,
    )
    stand.missing = missing
    guard.add(stand.blocked_reason)
    guard.add(lambda _mutation: roots.blocked_reason())
    refused = _refuse_store(settings, same_disk_store)
    syncer, door = None, None
    # Without its database this pod does not know its own id in the store, and would look like another pod.
    if settings.sync.store and not refused and not stand.unknown:
        syncer = Syncer(
            settings=settings,
            identity=identity,
            catalogue=OwnSets(catalogue, owns),
            journal=journal,
            clock=clock,
            credentials=lambda: credentials_for(current()),
            emit=emit,
            workspace=workspace,
            me=_pod(writer_id, trainer.output_dir),
            take_over=_first_time(journal.sync, take_over),
            training=lambda: recovery.handle is not None,
            trained=lambda: record.current is not None and record.current.last_start is not None,
            refused=held_elsewhere,
            locked_out=locked_out,
            finished=lambda: recovery.desired is Desired.FINISHED,
            withheld=lambda: guard.blocked_reason(Mutation.PUBLISH),
        )
        door = StoreRestore(
            make_restorer(settings, layout, workspace, journal.sync, writer_id),
            Worker("restore"),
            have_local=lambda: newest_complete(catalogue.sets) is not None,
        )

    recovery: Recovery = Recovery(
        Tools(
            settings=settings,
            policies=policies,
            clock=clock,
            journal=journal,
            emit=emit,
            launcher=launcher,
            run=RunFiles(layout, catalogue, workspace, record),
            sensors=TrainerSensors(gpus, processes, progress),
            pod=ThisPod(current, heartbeat_base, token, servers, before.servers, two_writers),
            store=RunStore(door, syncer),
            guard=guard,
        )
    )
    return Components(
        settings=settings,
        policies=policies,
        paths=paths,
        clock=clock,
        journal=journal,
        emit=emit,
        workspace=workspace,
        roots=roots,
        layout=layout,
        concerns=restart_concerns(settings, layout),
        catalogue=catalogue,
        capabilities=probe(workspace.outside, workspace.tree),
        watcher=Watcher(catalogue.watch_dirs, wake, warn=warn),
        senses=senses,
        gpus=gpus,
        disk=disk,
        disks=disks,
        forecast=forecast,
        processes=processes,
        progress=progress,
        log_rules=log_rules,
        inbox=inbox,
        launcher=launcher,
        record=record,
        recovery=recovery,
        syncer=syncer,
        wandb_ids=wandb_ids,
        two_writers=two_writers,
        implausible=implausible,
        store_refused=refused,
        remover=Remover(workspace, journal.sync, clock, emit, guard),
        aside=aside,
        files=Worker("checkpoints"),
        removals=Worker("removals"),
        token=token,
        guard=guard,
        footing=stand,
    )


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


def make_restorer(
    settings: Settings, layout: Layout, workspace: Workspace, journal: Journal, writer_id: str
) -> Restorer:
    """The Restorer of this run; also used by ``podwatch restore`` without a daemon."""
    return Restorer(
        lambda: open_store(
            settings.sync.store,
            credentials_for(settings),
            writer_id=writer_id,
            connections=settings.sync.connections,
        ),
        keys_for(settings.sync.store, settings.run_id),
        layout,
        workspace,
        journal,
        store_url=settings.sync.store,
        writer_id=writer_id,
        fetcher=FetchProcess(lambda: credentials_for(settings)),
        pace=FetchPace(settings.sync.connections, settings.sync.connections_max, float(settings.sync.max_rate or 0)),
        user=settings.trainer.user,
    )


def _refuse_store(settings: Settings, same_disk_store: bool) -> str:
    """Why the store is refused, else empty: a directory on the checkpoints' own filesystem is no backup."""
    url, output = settings.sync.store, settings.trainer.output_dir
    if not url.startswith("file://") or same_disk_store:
        return ""
    if not same_filesystem(url, output):
        return ""
    return f"{url} is on the same filesystem as {output}: it must be on another volume, or a b2:// bucket"


def _pod(writer_id: str, output_dir: Path) -> Pod:
    path = os.path.realpath(output_dir)
    try:
        found = Path(path).stat()
        path += f"\0{found.st_dev}:{found.st_ino}"  # two containers of one host can have the same path on two mounts
    except OSError:
        pass  # does not exist yet: the path alone
    place = hashlib.sha256(path.encode()).hexdigest()[:16]
    return Pod(writer_id, machine_id(), boot_id(), place, socket.gethostname())


def _first_time(journal: Journal, word: str) -> bool:
    """Whether this id is new: a daemon that init restarts must not take the run over again."""
    if not word or journal.learned(TAKEN_OVER) == word:
        return False
    journal.learn(TAKEN_OVER, word)
    return True


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


class ThisPod:
    """What recovery asks about this pod; see ``recovery.state.Pod``. ``known``: the inference servers that an earlier
    podwatch found."""

    def __init__(
        self,
        current: Callable[[], Settings],
        heartbeat_base: Callable[[], str],
        token: str,
        servers: InferenceSensor,
        known: tuple[str, ...],
        writers: TwoWriters,
    ) -> None:
        self._current, self._heartbeat_base, self._token = current, heartbeat_base, token
        self._servers, self._known, self._writers = servers, known, writers

    @property
    def beside(self) -> Beside:
        return self._writers.beside

    def environment(self) -> dict[str, str]:
        trainer = self._current().trainer
        built = build_environment(os.environ, trainer.env, trainer.env_file, user=trainer.user)
        base = self._heartbeat_base()
        if base:
            built["PODWATCH_HEARTBEAT_URL"] = f"{base}/heartbeat/{self._token}/trainer"
            built["PODWATCH_HEARTBEAT_ORCHESTRATOR_URL"] = f"{base}/heartbeat/{self._token}/orchestrator"
        return built

    def ports(self) -> tuple[int, ...]:
        return _ports(self._servers.urls or self._known)


def _ports(urls: tuple[str, ...]) -> tuple[int, ...]:
    """Ports on this machine that must be free before a start."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        if parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port:
            found.append(parts.port)
    return tuple(found)


def _digest(digests: Mapping[str, str] | tuple[tuple[str, str], ...]) -> str:
    items = sorted(digests.items() if isinstance(digests, Mapping) else digests)
    return ";".join(f"{Path(name).name}={value[:16]}" for name, value in items)
