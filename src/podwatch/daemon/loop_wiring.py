"""Builds the daemon's loops (sensing every few seconds, rescans, pruning under pressure) and the recorder."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.scan import linked_steps
from podwatch.config.settings import DiskSettings
from podwatch.daemon.backup_findings import kept_branch
from podwatch.daemon.checkpoint_loop import Announced, CheckpointLoop
from podwatch.daemon.components import READ_SO_FAR, Components
from podwatch.daemon.sensing_loop import SensingLoop
from podwatch.detection.learned import Learned
from podwatch.detection.run_detectors import initial
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Finding, Severity
from podwatch.domain.run import Mutation
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import CheckpointMark, Desired, Snapshot
from podwatch.journal import Journal
from podwatch.policy.disk_forecast import save_gap
from podwatch.policy.local_retention import Protection
from podwatch.recording.format import Header
from podwatch.recording.recorder import Recorder
from podwatch.retention.room_for_next_save import Disks, Pruner

READ_TURNS = 5
"""10 s at the default poll. After a crash the next podwatch reads the lines since then again, which is harmless."""
STAGES_IN_TEMP = ("lightning", "nemo")
"""Lightning writes a whole checkpoint into the temporary directory first ."""


@dataclass(slots=True)
class DaemonLoops:
    sensing: SensingLoop
    guarding: CheckpointLoop
    pruner: Pruner


@dataclass(frozen=True, slots=True)
class _Checkpoints:
    """The checkpoints on this pod, for the pruner."""

    parts: Components

    @property
    def sets(self) -> tuple[CheckpointSet, ...]:
        return self.parts.checkpoints.catalogue.sets

    @property
    def blind(self) -> str:
        return self.parts.checkpoints.rescans.blind or self.parts.checkpoints.catalogue.problem

    @property
    def pins(self) -> Mapping[int, str]:
        return {**self.parts.checkpoints.rescans.named, **self.parts.run.file.current.pins}

    def paths(self, step: int) -> Sequence[Path]:
        return self.parts.run.layout.step_paths(step)

    def rescan(self) -> None:
        self.parts.checkpoints.rescans.wake()


@dataclass(frozen=True, slots=True)
class _Store:
    """What the store has of this run, for the pruner."""

    parts: Components

    @property
    def stored(self) -> frozenset[tuple[int, str]] | None:
        syncer = self.parts.syncer
        return None if syncer is None else syncer.status().stored

    @property
    def verified(self) -> int:
        """The newest safe step of the current lineage: earlier quarantined checkpoints can expire. The pointer's step
        counts, not the highest one: a higher step of an earlier lineage proves nothing."""
        if self.parts.syncer is not None:
            last = self.parts.syncer.status().last_step
            return -1 if last is None else last
        newest = newest_complete(self.parts.checkpoints.catalogue.sets)
        return -1 if newest is None else newest.step

    async def abandon(self, step: int) -> None:
        if self.parts.syncer is not None:
            await self.parts.syncer.abandon(step)


@dataclass(frozen=True, slots=True)
class _Trainer:
    """What must not be deleted because of the trainer, for the pruner."""

    parts: Components

    @property
    def held(self) -> str:
        if blocked := self.parts.run.guard.blocked_reason(Mutation.DELETE):
            return blocked
        state = self.parts.recovery.state
        if state.hold_deletions:
            return "the last resume could not be confirmed: nothing is deleted before the next save"
        return "training is being stopped or started" if state.acting else ""

    @property
    def protected(self) -> Mapping[int, Protection]:
        """Steps that are in use now: resumed from, uploading, read by a command, or of an earlier branch."""
        parts = self.parts
        found = dict.fromkeys(parts.recovery.state.protect, Protection.RESUME_SOURCE)
        if parts.syncer is not None:
            for step in parts.syncer.protect:
                found.setdefault(step, Protection.UPLOADING)
        for reader in parts.checkpoints.readers:
            for step in reader.reading:
                found.setdefault(step, Protection.READING)
        sets = parts.checkpoints.catalogue.sets
        status = None if parts.syncer is None else parts.syncer.status()
        if (kept := kept_branch(sets, parts.run.file.current, status)) is not None:
            for one in sets:
                if one.earlier:
                    found.setdefault(one.step, Protection.EARLIER_BRANCH)
            found[kept] = Protection.EARLIER_NEWEST
        return found

    @property
    def first_seen_wall(self) -> float:
        return self.parts.run.file.current.first_seen_wall


@dataclass(frozen=True, slots=True)
class _Rules:
    """The settings of removal as last reloaded, for the pruner."""

    parts: Components

    @property
    def policy(self) -> DiskSettings:
        return self.parts.settings.disk

    @property
    def react(self) -> float:
        return self.parts.settings.checkpoints.react

    @property
    def steps_in_use(self) -> int:
        return self.parts.run.config.policies.steps_in_use

    @property
    def acts(self) -> bool:
        return self.parts.settings.mode == "act"

    @property
    def quota(self) -> bool:
        return self.parts.settings.disk.capacity is not None

    @property
    def stages_in_temp(self) -> bool:
        return self.parts.run.layout.name in STAGES_IN_TEMP


class RunDirectories:
    """Implements the checkpoint loop's Surroundings."""

    def __init__(self, parts: Components) -> None:
        self._roots, self._writers = parts.checkpoints.roots, parts.training.two_writers
        self._watcher, self._layout = parts.checkpoints.watcher, parts.run.layout

    def before(self) -> None:
        self._roots.look()
        self._writers.look()

    def after(self) -> Mapping[int, str]:
        self._watcher.refresh()
        return {**linked_steps(self._layout), **self._layout.pinned()}


def about_run(parts: Components) -> tuple[str, str]:
    """The keys of the learned baselines: the run with its layout, and its GPUs."""
    gpu = parts.settings.gpu
    return f"{parts.settings.run_id} {parts.run.layout.name}", f"{list(gpu.inference)} {list(gpu.trainer)}"


class _RunNow:
    """Implements the sensing loop's RunNow."""

    def __init__(self, parts: Components) -> None:
        self._catalogue, self._recovery = parts.checkpoints.catalogue, parts.recovery

    @property
    def saving(self) -> bool:
        return self._catalogue.saving

    @property
    def desired(self) -> Desired:
        return self._recovery.context.judged

    @property
    def checkpoint(self) -> CheckpointMark:
        newest = newest_complete(self._catalogue.sets)
        return CheckpointMark() if newest is None else CheckpointMark(newest.step, newest.changed_wall)


class _ReadPositions:
    """Writes the log read positions to the journal: at once with a new start, else every ``READ_TURNS`` turns. The next
    podwatch finds a finish line that is printed while none runs, and reads no line twice."""

    def __init__(self, parts: Components, sensing: SensingLoop) -> None:
        self._progress, self._journal, self._sensing = parts.sensing.progress, parts.run.journal, sensing
        self._read_so_far: dict[str, object] = {}

    def turn(self, snapshot: Snapshot, findings: tuple[Finding, ...]) -> None:
        now, before = self._progress.remembered, self._read_so_far
        if now.get("start_id") != before.get("start_id") or self._sensing.turns % READ_TURNS == 0:
            if now != before:
                self._journal.post(Journal.learn, READ_SO_FAR, now)
            self._read_so_far = now


def make_loops(parts: Components, *, learned: Learned, announced: Announced) -> DaemonLoops:
    """Build the loops; starts nothing."""
    pruner = _pruner(parts)
    guarding = CheckpointLoop(
        parts.checkpoints.catalogue,
        parts.checkpoints.worker,
        parts.run.clock,
        parts.checkpoints.rescans,
        parts.run.emit,
        RunDirectories(parts),
        uploads=parts.syncer,
        removals=pruner,
        announced=announced,
    )
    sensing = SensingLoop(
        parts.sensing.sensors,
        _RunNow(parts),
        clock=parts.run.clock,
        poll=parts.settings.gpu.poll,
        policies=parts.run.config.policies,
        state=initial(parts.run.config.policies, learned.for_run(*about_run(parts))),
        emit=parts.run.emit,
    )
    sensing.listeners.append(_ReadPositions(parts, sensing))
    if parts.syncer is not None:
        parts.syncer.save_seconds = lambda: save_gap(parts.deletion.forecast.saves)
        parts.syncer.pinned = lambda: _Checkpoints(parts).pins
    parts.sensing.processes.hurry_at_engine_end(sensing)
    parts.deletion.forecast.save_seconds = lambda: sensing.state.learned.median_save_seconds
    return DaemonLoops(sensing, guarding, pruner)


def _pruner(parts: Components) -> Pruner:
    return Pruner(
        checkpoints=_Checkpoints(parts),
        store=_Store(parts),
        trainer=_Trainer(parts),
        rules=_Rules(parts),
        disks=Disks(parts.sensing.disk, parts.sensing.disks),
        forecast=parts.deletion.forecast,
        remover=parts.deletion.remover,
        aside=parts.checkpoints.aside,
        worker=parts.deletion.worker,
        clock=parts.run.clock,
    )


# -- recording -------------------------------------------------------------------------------------------------------


def make_recorder(parts: Components, sensing: SensingLoop) -> Recorder | None:
    """The recorder for `podwatch replay`; None if [record] is off. Its thread reads the components and the state of the
    loop: frozen values only."""
    settings = parts.settings
    if not settings.record.enabled:
        return None
    loop = asyncio.get_running_loop()

    def header() -> Header:
        return Header(
            run_id=settings.run_id,
            layout=parts.run.layout.name,
            poll=parts.settings.gpu.poll,
            policies=parts.run.config.policies,
            learned=sensing.state.learned,
        )

    def tell(problem: str | None) -> None:
        text = problem or "recording for `podwatch replay` works again"
        severity = Severity.INFO if problem is None else Severity.WARNING
        event = Event(EventName.RECORDING_CHANGED, parts.run.clock.wall(), text, severity)
        loop.call_soon_threadsafe(parts.run.emit, event)

    return Recorder(parts.run.paths.recording, header, max_size=settings.record.max_size, mask=scrub, complain=tell)
