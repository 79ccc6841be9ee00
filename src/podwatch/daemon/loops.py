"""Builds the daemon's three loops: sensing (seconds), checkpoint rescans, pruning (under pressure)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.scan import linked_steps
from podwatch.daemon.checkpoint_loop import Announced, CheckpointLoop
from podwatch.daemon.earlier_branches import kept_branch
from podwatch.daemon.sensing_loop import SensingLoop
from podwatch.daemon.wiring import READ_SO_FAR, Components
from podwatch.detection.engine import initial
from podwatch.detection.learned import Learned
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.finding import Finding
from podwatch.domain.mutation_guard import Mutation
from podwatch.domain.policy import DiskPolicy
from podwatch.domain.snapshot import CheckpointMark, Snapshot
from podwatch.journal import Journal
from podwatch.policy.disk_forecast import next_save_in, steps_per_save
from podwatch.policy.retention import Protection
from podwatch.retention.pruner import Disks, Pruner
from podwatch.sync.upload.priority import Outlook

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
    loop: CheckpointLoop
    pinned: Callable[[], Mapping[int, str]]

    @property
    def sets(self) -> tuple[CheckpointSet, ...]:
        return self.parts.catalogue.sets

    @property
    def blind(self) -> str:
        return self.loop.blind or self.parts.catalogue.problem

    @property
    def pins(self) -> Mapping[int, str]:
        return {**self.loop.named, **self.pinned()}

    def paths(self, step: int) -> Sequence[Path]:
        return self.parts.layout.step_paths(step)

    def rescan(self) -> None:
        self.loop.wake()


@dataclass(frozen=True, slots=True)
class _Store:
    """What the store has of this run, for the pruner."""

    parts: Components

    @property
    def stored(self) -> frozenset[tuple[int, str]] | None:
        syncer = self.parts.syncer
        return None if syncer is None else syncer.state.stored

    @property
    def verified(self) -> int:
        """The newest safe step of the current lineage: earlier quarantined checkpoints can expire. The pointer's step
        counts, not the highest one: a higher step of an earlier lineage proves nothing."""
        if self.parts.syncer is not None:
            last = self.parts.syncer.state.last_step
            return -1 if last is None else last
        newest = newest_complete(self.parts.catalogue.sets)
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
        if blocked := self.parts.guard.blocked_reason(Mutation.DELETE):
            return blocked
        state = self.parts.recovery.state
        if state.hold_deletions:
            return "the last resume could not be confirmed: nothing is deleted before the next save"
        return "training is being stopped or started" if state.acting else ""

    @property
    def protected(self) -> Mapping[int, Protection]:
        """Steps that are in use now: resumed from, uploading, or of an earlier branch."""
        parts = self.parts
        found = dict.fromkeys(parts.recovery.state.protect, Protection.RESUME_SOURCE)
        if parts.syncer is not None:
            for step in parts.syncer.protect:
                found.setdefault(step, Protection.UPLOADING)
        if (kept := kept_branch(parts)) is not None:
            for one in parts.catalogue.sets:
                if one.earlier:
                    found.setdefault(one.step, Protection.EARLIER_BRANCH)
            found[kept] = Protection.EARLIER_NEWEST
        return found

    @property
    def first_seen_wall(self) -> float:
        record = self.parts.record.current
        return record.first_seen_wall if record is not None else 0.0


@dataclass(frozen=True, slots=True)
class _Rules:
    """The settings of removal as last reloaded, for the pruner."""

    parts: Components

    @property
    def policy(self) -> DiskPolicy:
        return self.parts.policies.disk

    @property
    def acts(self) -> bool:
        return self.parts.settings.mode == "act"

    @property
    def quota(self) -> bool:
        return self.parts.settings.disk.capacity is not None

    @property
    def stages_in_temp(self) -> bool:
        return self.parts.layout.name in STAGES_IN_TEMP


def about_run(parts: Components) -> tuple[str, str]:
    """The keys of the learned baselines: the run with its layout, and its GPUs."""
    gpu = parts.settings.gpu
    return f"{parts.settings.run_id} {parts.layout.name}", f"{list(gpu.inference)} {list(gpu.trainer)}"


def make_loops(
    parts: Components,
    *,
    learned: Learned,
    pins: Callable[[], Mapping[int, str]],
    on_turn: Callable[[Snapshot, tuple[Finding, ...]], None],
    announced: Announced | None = None,
) -> DaemonLoops:
    """Build the loops; starts nothing."""

    def checkpoint() -> CheckpointMark:
        newest = newest_complete(parts.catalogue.sets)
        return CheckpointMark() if newest is None else CheckpointMark(newest.step, newest.changed_wall)

    def look_first() -> None:
        parts.roots.look()
        parts.two_writers.look()

    guarding = CheckpointLoop(
        catalogue=parts.catalogue,
        worker=parts.files,
        clock=parts.clock,
        rescan=parts.settings.checkpoints.rescan,
        emit=parts.emit,
        uploads=parts.syncer,
        make_room=lambda: pruner.look(),  # noqa: PLW0108 - pruner is made below
        refresh_watches=parts.watcher.refresh,
        named=lambda: {**linked_steps(parts.layout), **parts.layout.pinned()},
        look_first=look_first,
        announced=announced,
    )
    pruner = Pruner(
        checkpoints=_Checkpoints(parts, guarding, pins),
        store=_Store(parts),
        trainer=_Trainer(parts),
        rules=_Rules(parts),
        disks=Disks(parts.disk, parts.disks),
        forecast=parts.forecast,
        remover=parts.remover,
        aside=parts.aside,
        worker=parts.removals,
        clock=parts.clock,
    )
    read_so_far: dict[str, object] = {}

    def turn(snapshot: Snapshot, findings: tuple[Finding, ...]) -> None:
        """Write the log read positions to the journal: at once with a new start, else every ``READ_TURNS`` turns. The
        next podwatch finds a finish line that is printed while none runs, and reads no line twice."""
        nonlocal read_so_far
        now = parts.progress.remembered
        if now.get("start_id") != read_so_far.get("start_id") or sensing.turns % READ_TURNS == 0:
            if now != read_so_far:
                parts.journal.post(Journal.learn, READ_SO_FAR, now)
            read_so_far = now
        on_turn(snapshot, findings)

    sensing = SensingLoop(
        senses=parts.senses,
        clock=parts.clock,
        poll=parts.settings.gpu.poll,
        policies=parts.policies,
        state=initial(parts.policies, learned.for_run(*about_run(parts))),
        saving=lambda: parts.catalogue.saving,
        desired=lambda: parts.recovery.judged,
        on_turn=turn,
        emit=parts.emit,
        checkpoint=checkpoint,
    )
    if parts.syncer is not None:
        parts.syncer.prospects = lambda: _prospects(parts, sensing.snapshot, pruner)
    parts.processes.tell_engine_end(sensing.hurry)
    parts.forecast.save_seconds = lambda: sensing.state.learned.median_save_seconds
    return DaemonLoops(sensing, guarding, pruner)


def _prospects(parts: Components, snapshot: Snapshot, pruner: Pruner) -> Outlook:
    """The inputs of the upload priority: the next save, the steps that are not in the store, the disk."""
    saves = parts.forecast.saves
    due_in, gap = next_save_in(saves, parts.clock.wall())
    plan, newest = pruner.last_plan, snapshot.newest_step
    stored = parts.syncer.state.last_step if parts.syncer is not None else None
    at_risk = None
    if newest is not None and newest.step is not None and stored is not None and snapshot.steps_between_saves:
        at_risk = max(0, newest.step - stored)
    return Outlook(
        next_save_in=due_in,
        save_seconds=gap,
        steps_at_risk=at_risk,
        steps_per_save=steps_per_save(saves),
        disk_waits=plan is not None and (plan.critical or bool(plan.waiting)),
    )
