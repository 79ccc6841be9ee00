"""What recovery shows to the rest of podwatch, and the doors through which it reaches others."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from podwatch.checkpoints.layouts.base import Layout
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.mutation import MutationGuard
from podwatch.domain.policy import Policies
from podwatch.domain.run import RunRecord
from podwatch.domain.snapshot import GpuSample, Supervision
from podwatch.journal import AsyncJournal, load_run_record, save_run_record
from podwatch.judgement.choose import RemoteSave
from podwatch.judgement.claims import Act, Decision
from podwatch.judgement.two_writers import ALONE, Beside
from podwatch.sensors.base import Sensor
from podwatch.system.clock import Clock
from podwatch.system.threads import Worker
from podwatch.system.workspace import Workspace
from podwatch.trainer.base import Launcher, TrainerHandle

R = TypeVar("R")

LAST_WORD_SECONDS: Final = 30.0
"""How long a cancelled act waits for a file operation that has begun."""


class Phase(StrEnum):
    """Stable: shown in ``status``."""

    IDLE = "idle"
    LOOKING = "looking"
    STARTING = "starting"
    CONFIRMING = "confirming"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDING = "ending"
    """A stop was asked for after the next save: training goes on until that is complete."""
    BLOCKED = "blocked"
    """Wants to start and may not yet: GPU memory or a port is still held, or a person has to decide."""
    BACKOFF = "backoff"
    GAVE_UP = "gave-up"
    STOPPED = "stopped"
    FINISHED = "finished"
    ATTACHED = "attached"
    """Watches a trainer that someone else started."""
    PAUSED = "paused"
    """Maintenance: an act waits at a safe point until `podwatch unpause`."""
    OBSERVING = "observing"
    """Mode observe, and no trainer is known."""


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """``since`` is monotonic, ``next_try_wall`` epoch seconds. ``step`` is the one last resumed from (None: fresh).

    ``attempts`` counts the failures of the present streak. ``protect`` are steps that retention must keep, with the
    reasons. ``hold_deletions``: no local deletion at all before the next complete save, because the last start could
    not be confirmed. ``unconfirmed`` says the same of the start itself. ``acting``: something is being stopped or
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
    adopted: bool = False
    """``handle`` was found under a keeper, and may have ended."""
    changed_at: float = float("-inf")
    """When the trainer that is watched was started, or the last one was let go of (monotonic): older readings are of
    the one before."""

    @property
    def protect(self) -> frozenset[int]:
        return frozenset(step for step, _ in self.protect_reasons)


class CatalogueDoor(Protocol):
    """What recovery needs of checkpoints.catalogue.Catalogue."""

    def rescan(self, *, writers_ended: bool = False) -> tuple[CheckpointSet, ...]: ...

    @property
    def sets(self) -> tuple[CheckpointSet, ...]: ...

    @property
    def saving(self) -> bool: ...

    @property
    def out_of_reach(self) -> frozenset[int]: ...

    def verify(self, step: int) -> tuple[str, ...]: ...


class RestoreDoor(Protocol):
    """The store, as far as a start needs it. Both raise RemoteError."""

    async def newest(self, exclude: frozenset[int]) -> RemoteSave | None: ...

    async def fetch(self, step: int | None, progress: Callable[[int, int], None] | None = None) -> int:
        """Bring the set of ``step`` (None: the newest) to its place; returns its step. Verified and whole."""
        ...


class RecordHolder:
    """The run record in memory and on disk. ``load`` and ``save`` block: call them in a worker thread."""

    def __init__(self, workspace: Workspace, changed: Callable[[RunRecord], None] = lambda record: None) -> None:
        """``changed`` is called with each record that was read or written, in the thread that did."""
        self._workspace, self._changed = workspace, changed
        self.current: RunRecord | None = None
        self.problem = ""
        """Why it could not be read or written when podwatch began."""

    @property
    def path(self) -> Path:
        return self._workspace.record

    def load(self) -> RunRecord | None:
        self.current = load_run_record(self._workspace)
        if self.current is not None:
            self._changed(self.current)
        return self.current

    def save(self, record: RunRecord) -> None:
        save_run_record(self._workspace, record)
        self.current = record
        self._changed(record)


@dataclass(frozen=True, slots=True)
class Tools:
    """Everything recovery works with; one object so that its modules share it."""

    settings: Settings
    policies: Policies
    clock: Clock
    launcher: Launcher
    layout: Layout
    catalogue: CatalogueDoor
    workspace: Workspace
    journal: AsyncJournal
    gpus: Sensor[tuple[GpuSample, ...]]
    record: RecordHolder
    restore: RestoreDoor | None
    emit: Callable[[Event], None]
    track: Callable[[TrainerHandle | None], None]
    begin_start: Callable[[float, str], None]
    """A start of the trainer: when (monotonic), and its id."""
    last_lines: Callable[[int], list[str]]
    environment: Callable[[], dict[str, str]]
    log_tails: Callable[[], Mapping[str, Sequence[str]]] = field(default=dict)
    """The end of every log of the run, by name. Blocks."""
    ports: Callable[[], tuple[int, ...]] = tuple
    standing: Callable[[], Decision] = field(default=lambda: Decision(Act.HOLD))
    """Whether this pod may train, as far as the pods of this run agree."""
    jitter: Callable[[], float] = field(default=lambda: 0.5)
    beside: Callable[[], Beside] = field(default=lambda: ALONE)
    """Processes beside ours that may write into output_dir."""
    guard: MutationGuard = field(default_factory=MutationGuard)
    files: Worker = field(default_factory=lambda: Worker("recovery"))
    evidence: Worker = field(default_factory=lambda: Worker("evidence"))

    def say(
        self,
        name: EventName,
        message: str,
        severity: Severity = Severity.INFO,
        **fields: str | int | float | bool | None,
    ) -> None:
        self.emit(Event(name, self.clock.wall(), message, severity, fields))

    async def blocking(self, fn: Callable[..., R], *args: Any) -> R:
        """In the worker thread. A cancelled caller still waits for the end: no rename goes on behind the back of
        whoever acts next."""
        task = asyncio.ensure_future(self.files.call(fn, *args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task], timeout=LAST_WORD_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()  # seen: nobody else will ask
            raise

    @property
    def incidents_dir(self) -> Path:
        return self.settings.state_dir / self.settings.run_id / "incidents"


def newest_step(sets: Sequence[CheckpointSet]) -> int | None:
    return max((s.step for s in sets if s.complete and s.of_line), default=None)


def text_map(value: object) -> dict[int, str]:
    """A JSON object with step numbers as keys, as the journal gives it back."""
    if not isinstance(value, Mapping):
        return {}
    return {int(k): str(v) for k, v in value.items() if str(k).lstrip("-").isdigit()}
