"""The state that recovery shows to the rest of podwatch, and the interfaces through which it uses other parts."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from podwatch.checkpoints.layout import Layout
from podwatch.config.settings import Policies, Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.engine_and_attempt import Place
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import Severity
from podwatch.domain.lease import Decision, LeaseAction
from podwatch.domain.run import MutationGuard
from podwatch.domain.snapshot import GpuSample, Supervision
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.journal import AsyncJournal
from podwatch.recovery.actions import Phase as Phase
from podwatch.recovery.environment import TrainingEnvironment
from podwatch.recovery.run_file import RunFile
from podwatch.sensors.base import Sensor
from podwatch.sensors.inference import InferenceSensor
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.files import ReservedSpace
from podwatch.system.files_clock import FilesClock
from podwatch.system.own_directories import Workspace
from podwatch.trainer.start_and_adopt import SupervisorLauncher
from podwatch.trainer.trainer_handle import TrainerHandle

if TYPE_CHECKING:
    from podwatch.store.restore.thread import RestoreThread  # a daemon without a store does not need it

R = TypeVar("R")

LAST_WORD_SECONDS: Final = 30.0
"""Seconds that a cancelled operation waits for a file operation in progress."""


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """``since`` is monotonic, ``next_try_wall`` epoch seconds. ``step`` is the one last resumed from (None: fresh).

    ``attempts`` counts the failures of the current streak. ``protect_reasons`` are steps that retention must keep, with
    the reasons. ``hold_deletions``: no local deletion at all before the next complete save, because the last start
    could not be confirmed. ``unconfirmed``: the last start is not confirmed. ``acting``: something is being stopped or
    started right now (waiting does not count).
    """

    phase: Phase = Phase.IDLE
    since: float = 0.0
    step: int | None = None
    attempts: int = 0
    next_try_wall: float | None = None
    detail: str = ""
    handle: TrainerHandle | None = None
    start_id: str = ""
    supervision: Supervision = Supervision.NONE
    protect_reasons: tuple[tuple[int, str], ...] = ()
    unconfirmed: bool = False
    hold_deletions: bool = False
    acting: bool = False
    incident_id: int | None = None
    evaluation: str = ""
    """What training is stopped for, from the begin of that stop until training is started again."""
    adopted: bool = False
    """``handle`` was found under a supervisor, and may have ended."""
    changed_at: float = float("-inf")
    """Monotonic time at which the watched trainer was started, or the last one released; older readings are of the
    trainer before."""

    @property
    def protect(self) -> frozenset[int]:
        return frozenset(step for step, _ in self.protect_reasons)


class CatalogueReader(Protocol):
    """The part of ``checkpoints.known_checkpoints.Catalogue`` that recovery needs."""

    def rescan(self, *, writers_ended: bool = False, list_again: bool = False) -> tuple[CheckpointSet, ...]: ...

    @property
    def sets(self) -> tuple[CheckpointSet, ...]: ...

    @property
    def saving(self) -> bool: ...

    @property
    def out_of_reach(self) -> frozenset[int]: ...

    @property
    def unlisted(self) -> str: ...

    def verify(self, step: int) -> tuple[str, ...]: ...

    def record_starts(self) -> None: ...


class ProcessWatch(Protocol):
    """The sensor that follows the processes of one trainer."""

    def watch(self, handle: TrainerHandle | None) -> None: ...


class TrainerLogs(Protocol):
    """The reader of the run's logs."""

    def begin_start(self, wall: float, start_id: str = "") -> None:
        """Called before each start of the trainer, with its time (epoch seconds) and its id."""
        ...

    def last_lines(self, n: int = 30) -> Sequence[str]: ...

    def log_tails(self) -> Mapping[str, Sequence[str]]:
        """Return the end of every log of the run, by name. Blocks."""
        ...


class GangStart(Protocol):
    """The start of one of several nodes (docs/nodes.md). None of these returns once the attempt is over."""

    async def gather(self) -> None:
        """Rank 0: wait until all nodes are here, before anything is changed. Raises PodwatchError."""
        ...

    async def announce(self, step: int | None, files: str) -> None:
        """Rank 0: everything is prepared; let all nodes start from ``step``, whose files have this hash. Raises
        PodwatchError."""
        ...

    async def awaited(self) -> tuple[int | None, str]:
        """The others: wait for the step that rank 0 announces, and the hash of its files."""
        ...

    def cannot_start(self, why: str) -> None:
        """The others: report that this node cannot start from that step, so that all nodes end: rank 0 has started."""
        ...


class LeaseView(Protocol):
    """The lease of the run in the store."""

    @property
    def decision(self) -> Decision:
        """Whether this pod may train."""
        ...

    def status(self) -> StoreFacts:
        """With what the store has."""
        ...


@dataclass(frozen=True, slots=True)
class TrainerSensors:
    gpus: Sensor[tuple[GpuSample, ...]]
    processes: ProcessWatch
    logs: TrainerLogs
    servers: InferenceSensor


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The run on this pod's disk."""

    layout: Layout
    catalogue: CatalogueReader
    workspace: Workspace
    file: RunFile
    files_clock: FilesClock


@dataclass(frozen=True, slots=True)
class RunStore:
    """The run in the store; both are None without one."""

    restore: "RestoreThread | None" = None
    lease: LeaseView | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """What recovery works with. Its modules share one object, so that a reload replaces it in one place."""

    settings: Settings
    policies: Policies
    clock: Clock
    journal: AsyncJournal
    emit: Emit
    launcher: SupervisorLauncher
    run: RunFiles
    sensors: TrainerSensors
    environment: TrainingEnvironment
    store: RunStore
    place: Place | None = None
    """This node's, of several; None for a run on one node."""
    guard: MutationGuard = field(default_factory=MutationGuard)
    reserve: ReservedSpace | None = None
    """Freed before a start, which needs it on a full disk."""
    jitter: Random = field(default_factory=Random)
    files: Worker = field(default_factory=lambda: Worker("recovery"))
    evidence: Worker = field(default_factory=lambda: Worker("evidence"))

    @property
    def follows(self) -> bool:
        """Whether another node chooses the step and prepares."""
        return self.place is not None and not self.place.leads

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def catalogue(self) -> CatalogueReader:
        return self.run.catalogue

    @property
    def workspace(self) -> Workspace:
        return self.run.workspace

    @property
    def run_file(self) -> RunFile:
        return self.run.file

    @property
    def gpus(self) -> Sensor[tuple[GpuSample, ...]]:
        return self.sensors.gpus

    @property
    def standing(self) -> Decision:
        """The lease decision: whether this pod may train. Without a store every pod may."""
        return Decision(LeaseAction.HOLD, publish=True) if self.store.lease is None else self.store.lease.decision

    @property
    def store_error(self) -> str:
        """Why the store does not answer; empty if it does."""
        return "" if self.store.lease is None else self.store.lease.status().error

    @property
    def stored(self) -> tuple[StoredCheckpoint, ...]:
        """What the store has of this run, as far as it was listed."""
        return () if self.store.lease is None else self.store.lease.status().checkpoints

    def track(self, handle: TrainerHandle | None) -> None:
        self.sensors.processes.watch(handle)

    def begin_start(self, at: float, start_id: str) -> None:
        """Tell the log reader about a start of the trainer at monotonic time ``at``."""
        self.sensors.logs.begin_start(self.clock.wall() - (self.clock.monotonic() - at), start_id)

    def say(
        self,
        name: EventName,
        message: str,
        severity: Severity = Severity.INFO,
        **fields: str | int | float | bool | None,
    ) -> None:
        self.emit(Event(name, self.clock.wall(), message, severity, fields))

    async def blocking(self, fn: Callable[..., R], *args: Any) -> R:
        """Run ``fn`` in the worker thread. A cancelled caller still waits for its end, so that no rename continues
        during the next operation."""
        task = asyncio.ensure_future(self.files.call(fn, *args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task], timeout=LAST_WORD_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()  # retrieved: otherwise asyncio logs it
            raise

    @property
    def incidents_dir(self) -> Path:
        return self.settings.state_dir / self.settings.run_id / "incidents"


def newest_step(sets: Sequence[CheckpointSet]) -> int | None:
    return max((s.step for s in sets if s.complete and s.of_line), default=None)
