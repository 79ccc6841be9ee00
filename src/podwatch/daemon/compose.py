"""Builds the parts of one daemon and joins them. No part is started here."""

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from podwatch.checkpoints.catalogue import Catalogue
from podwatch.checkpoints.layouts import Layout, make_layout
from podwatch.checkpoints.watcher import Watcher
from podwatch.config.settings import Settings
from podwatch.daemon.emitting import Emitter
from podwatch.daemon.fetching import StoreDoor
from podwatch.daemon.paths import RunPaths
from podwatch.daemon.policies import policies_from
from podwatch.daemon.sensing import Senses
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.errors import PodwatchError
from podwatch.domain.policy import Policies
from podwatch.journal import AsyncJournal, Journal
from podwatch.recovery.recovery import Recovery
from podwatch.recovery.state import RecordHolder
from podwatch.retention.aside import Aside
from podwatch.retention.remover import Remover
from podwatch.sensors.disk import DiskSensor
from podwatch.sensors.gpu import GpuReader, GpuSensor
from podwatch.sensors.inference import InferenceSensor
from podwatch.sensors.nvml import NvmlReader
from podwatch.sensors.pings import PingInbox
from podwatch.sensors.processes import ProcessSensor
from podwatch.sensors.progress import ProgressSensor
from podwatch.stores.credentials import Credentials, credentials_from_environment
from podwatch.stores.open import open_store, same_filesystem
from podwatch.sync.doors import RunIdentity
from podwatch.sync.job import keys_for
from podwatch.sync.restore import Restorer
from podwatch.sync.syncer import Syncer
from podwatch.system.clock import Clock
from podwatch.system.threads import Worker
from podwatch.system.workspace import Workspace
from podwatch.telling.logging import redactor
from podwatch.trainer.environment import build_environment
from podwatch.trainer.launcher import KeeperLauncher, KeeperOptions

QUARANTINE_SECONDS = 7 * 86400.0
"""What was set aside is kept for a week, unless the disk needs the room and a verified successor exists."""


@dataclass(slots=True)
class Parts:
    """Everything the lifecycle starts, stops and asks."""

    settings: Settings
    policies: Policies
    paths: RunPaths
    clock: Clock
    journal: AsyncJournal
    emit: Emitter
    workspace: Workspace
    layout: Layout
    catalogue: Catalogue
    watcher: Watcher
    senses: Senses
    gpus: GpuSensor
    disk: DiskSensor
    processes: ProcessSensor
    progress: ProgressSensor
    inbox: PingInbox
    launcher: KeeperLauncher
    record: RecordHolder
    recovery: Recovery
    syncer: Syncer | None
    store_refused: str
    remover: Remover
    aside: Aside
    files: Worker
    removals: Worker
    token: str


def credentials_for(settings: Settings) -> Credentials | None:
    """The store's key, read anew at each call, and registered so that no log line can show it."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    found = credentials_from_environment(os.environ, settings.trainer.env_file, Path(directory) if directory else None)
    if found is not None:
        redactor.register(found.key, found.key_id)
    return found


def build(
    settings: Settings,
    paths: RunPaths,
    clock: Clock,
    journal: AsyncJournal,
    emit: Emitter,
    *,
    wake: Callable[[], None],
    current: Callable[[], Settings],
    heartbeat_base: Callable[[], str],
    gpu_reader: GpuReader | None = None,
    same_disk_store: bool = False,
) -> Parts:
    """``wake`` is called from a thread when checkpoint files changed; ``current`` gives the settings as last reloaded;
    ``heartbeat_base`` is the URL pings go to.

    ``same_disk_store`` allows a ``file://`` store beside the checkpoints: for the demo only. Blocks: probes the disk.
    """
    trainer = settings.trainer
    layout = make_layout(settings)
    policies = policies_from(settings, max_steps=_target(layout, trainer.command))
    workspace = Workspace(trainer.output_dir).probe()
    checkpoints = settings.checkpoints
    aside = Aside(workspace, layout.spare_paths, keep_seconds=QUARANTINE_SECONDS)
    catalogue = Catalogue(layout, clock, settle=checkpoints.settle, settle_weak=checkpoints.settle_weak)
    launcher = KeeperLauncher(
        settings.run_id,
        trainer.output_dir,
        settings.state_dir,
        clock,
        gpus=frozenset(settings.gpu.inference) | frozenset(settings.gpu.trainer),
        options=KeeperOptions(grace=trainer.stop_grace),
    )
    inbox = PingInbox(clock)
    poll = settings.gpu.poll
    gpus = GpuSensor(gpu_reader or NvmlReader(), clock, poll=poll, deadline=settings.gpu.deadline)
    disk = DiskSensor(
        trainer.checkpoint_dir or trainer.output_dir,
        clock,
        settings.disk.capacity,
        poll=max(poll, min(5.0, checkpoints.rescan)),
        known_bytes=lambda: sum(s.size_bytes for s in catalogue.sets) + aside.found.bytes,
    )
    progress = ProgressSensor(
        clock,
        layout.progress,
        output_dir=trainer.output_dir,
        inbox=inbox,
        log_globs=trainer.logs or layout.log_globs(),
        extra_logs=(Path(launcher.log_path()),),
        finish_lines=layout.finish_lines,
        poll=poll,
    )
    processes = ProcessSensor(
        clock,
        poll=poll,
        finish_line=lambda: progress.finish_line_seen,
        finished_roles=lambda: progress.finished_roles,
    )
    inference = settings.inference
    senses = Senses(
        gpus=gpus,
        trainer=processes,
        disk=disk,
        inference=InferenceSensor(inference.urls, clock, timeout=inference.timeout, poll=inference.poll),
        progress=progress,
    )
    record = RecordHolder(workspace.record)
    token = _remembered(journal.sync, "heartbeat.token")
    writer_id = _remembered(journal.sync, "writer_id")

    def identity() -> RunIdentity:
        current = record.current
        return RunIdentity(
            run_id=settings.run_id,
            lineage=current.lineage.id if current is not None else "",
            writer_id=writer_id,
            host=socket.gethostname(),
            train_command=trainer.command,
            wandb=dict(current.wandb) if current is not None else {},
            layout=layout.name,
            config_digest=_digest(current.last_start.config_digests) if current and current.last_start else "",
        )

    refused = _refuse_store(settings, same_disk_store)
    syncer, door = None, None
    if settings.sync.store and not refused:
        syncer = Syncer(
            settings=settings,
            identity=identity,
            catalogue=catalogue,
            journal=journal,
            clock=clock,
            credentials=lambda: credentials_for(current()),
            emit=emit,
        )
        door = StoreDoor(
            make_restorer(settings, layout, workspace, journal.sync, writer_id),
            Worker("restore"),
            have_local=lambda: newest_complete(catalogue.sets) is not None,
        )

    def environment() -> dict[str, str]:
        trainer = current().trainer
        built = build_environment(os.environ, trainer.env, trainer.env_file, user=trainer.user)
        base = heartbeat_base()
        if base:
            built["PODWATCH_HEARTBEAT_URL"] = f"{base}/heartbeat/{token}/trainer"
            built["PODWATCH_HEARTBEAT_ORCHESTRATOR_URL"] = f"{base}/heartbeat/{token}/orchestrator"
        return built

    recovery = Recovery(
        settings=settings,
        policies=policies,
        clock=clock,
        launcher=launcher,
        layout=layout,
        catalogue=catalogue,
        workspace=workspace,
        journal=journal,
        gpus=gpus,
        run_record=record,
        restore=door,
        emit=emit,
        track=processes.watch,
        begin_start=lambda at: progress.begin_start(clock.wall() - (clock.monotonic() - at)),
        last_lines=lambda n: list(progress.last_lines(n)),
        environment=environment,
        ports=_ports(inference.urls),
    )
    roots = tuple(dict.fromkeys(p for p in (trainer.output_dir, trainer.checkpoint_dir) if p is not None))
    return Parts(
        settings=settings,
        policies=policies,
        paths=paths,
        clock=clock,
        journal=journal,
        emit=emit,
        workspace=workspace,
        layout=layout,
        catalogue=catalogue,
        watcher=Watcher(catalogue.watch_dirs, wake),
        senses=senses,
        gpus=gpus,
        disk=disk,
        processes=processes,
        progress=progress,
        inbox=inbox,
        launcher=launcher,
        record=record,
        recovery=recovery,
        syncer=syncer,
        store_refused=refused,
        remover=Remover(workspace, roots, journal.sync, clock, emit),
        aside=aside,
        files=Worker("checkpoints"),
        removals=Worker("removals"),
        token=token,
    )


def make_restorer(
    settings: Settings, layout: Layout, workspace: Workspace, journal: Journal, writer_id: str
) -> Restorer:
    """Also used by ``podwatch restore`` on a pod without a daemon."""
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
    )


def _refuse_store(settings: Settings, same_disk_store: bool) -> str:
    """A directory on the checkpoints' own filesystem is no backup, and fills the disk it should relieve."""
    url, output = settings.sync.store, settings.trainer.output_dir
    if not url.startswith("file://") or same_disk_store:
        return ""
    if not same_filesystem(url, output):
        return ""
    return f"{url} lies on the same filesystem as {output}: name another volume, or a b2:// bucket"


def _remembered(journal: Journal, key: str) -> str:
    """A random identifier of this run on this pod, made once."""
    value = journal.learned(key)
    if not isinstance(value, str) or not value:
        value = secrets.token_hex(16)
        journal.learn(key, value)
    return value


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


def _digest(digests: Mapping[str, str] | tuple[tuple[str, str], ...]) -> str:
    items = sorted(digests.items() if isinstance(digests, Mapping) else digests)
    return ";".join(f"{Path(name).name}={value[:16]}" for name, value in items)
