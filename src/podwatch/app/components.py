"""The components of one daemon, in groups by subject, and what they are built from. ``wiring`` builds them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from podwatch.app.ask_and_record_attempts import JobVerdicts
from podwatch.app.backup.run_side import WandbIds
from podwatch.app.checkpoint_loop import Rescans
from podwatch.app.held_back_findings import Implausible, TwoWriters
from podwatch.app.nodes import Gang
from podwatch.app.notifications import Events
from podwatch.app.paths_and_run_lock import RunLock, RunPaths
from podwatch.app.replaced_directories import RootWatch
from podwatch.app.sensing_loop import Sensors
from podwatch.app.settings_in_force import Configuration
from podwatch.app.state_check import Exits, StateCheck
from podwatch.checkpoints.file_events import Watcher
from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.records import CheckpointRecords, RecordFiles
from podwatch.config.settings import Settings
from podwatch.disk.leftovers import Measurements
from podwatch.disk.remove import Remover
from podwatch.domain.run import MutationGuard
from podwatch.domain.status_document import Capabilities
from podwatch.journal import AsyncJournal
from podwatch.recovery.environment import TrainingEnvironment
from podwatch.recovery.recovery import Recovery
from podwatch.recovery.run_file import RunFile
from podwatch.sensors.gpu import GpuReader
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.files_clock import FilesClock
from podwatch.system.own_directories import Workspace
from podwatch.system.procfs import boot_id, boot_wall
from podwatch.trainer.start_and_adopt import SupervisorJob, SupervisorLauncher

if TYPE_CHECKING:
    from podwatch.app.backup.backup import Backup
    from podwatch.store.restore.thread import RestoreThread

LEARNED = "learned"
"""Journal key of the learned baselines and durations."""
READ_SO_FAR = "logs.read"
"""Journal key of the read positions in the logs of the current start."""


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


@dataclass(frozen=True, slots=True)
class Choices:
    """How this daemon is started. ``take_over`` is the id of an operator's `--take-over`. ``same_disk_store`` allows a
    ``file://`` store on the checkpoints' own file system, for the demo only. ``job`` is set in job mode.
    ``retry``: an operator passed `--retry`."""

    gpu_reader: GpuReader | None = None
    same_disk_store: bool = False
    take_over: str = ""
    job: SupervisorJob | None = None
    retry: bool = False


class Run:
    """The run as every component knows it: its configuration, directories and recorded state."""

    def __init__(
        self, foundation: Foundation, config: Configuration, layout: Layout, workspace: Workspace, file: RunFile
    ) -> None:
        self.paths, self.clock, self.journal = foundation.paths, foundation.clock, foundation.journal
        self.emit = foundation.emit
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
    watcher: Watcher
    rescans: Rescans
    held: HeldBack
    implausible: Implausible
    measurements: Measurements
    worker: Worker
    readers: list[Reader] = field(default_factory=list)
    """What reads checkpoints besides training and uploads: hooks and evaluations."""


@dataclass(frozen=True, slots=True)
class Training:
    """The trainer, and what its starts use. ``environment`` is that of a start."""

    launcher: SupervisorLauncher
    environment: TrainingEnvironment
    two_writers: TwoWriters


@dataclass(frozen=True, slots=True)
class Store:
    """``backup`` is None without a store. ``refused``: why the configured one is not used, else empty. ``elsewhere``:
    node 0 of this run uploads for all of its nodes, and this is another one."""

    backup: "Backup | None"
    restore: "RestoreThread | None"
    refused: str
    wandb: WandbIds
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Deletion:
    remover: Remover
    worker: Worker


@dataclass(frozen=True, slots=True)
class Components:
    """All components that the lifecycle starts, stops and queries."""

    run: Run
    checkpoints: Checkpoints
    sensing: Sensors
    training: Training
    recovery: Recovery
    store: Store
    deletion: Deletion
    checks: StateCheck
    gang: Gang | None = None
    """None for a run on one node."""
    verdicts: JobVerdicts | None = None
    """In job mode with a store."""

    @property
    def settings(self) -> Settings:
        """Those in force: a reload replaces them."""
        return self.run.config.settings

    @property
    def backup(self) -> "Backup | None":
        return self.store.backup
