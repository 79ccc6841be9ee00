"""Builds the daemon's three loops: sensing (seconds), checkpoint rescans, pruning (under pressure)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from podwatch.checkpoints.pinned_links import linked_steps
from podwatch.daemon.checkpoint_loop import Announced, CheckpointLoop
from podwatch.daemon.earlier_branches import kept_branch
from podwatch.daemon.sensing_loop import SensingLoop
from podwatch.daemon.wiring import READ_SO_FAR, Components
from podwatch.detection.engine import initial
from podwatch.detection.learned import Learned
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.finding import Finding
from podwatch.domain.mutation_guard import Mutation
from podwatch.domain.snapshot import CheckpointMark, Snapshot
from podwatch.journal import Journal
from podwatch.policy.disk_forecast import next_save_in, steps_per_save
from podwatch.policy.retention import Protection
from podwatch.retention.pruner import Pruner
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

    def protected() -> Mapping[int, Protection]:
        """Steps that are in use now: resumed from, uploading, or of an earlier branch."""
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

    def hold() -> str:
        if blocked := parts.guard.blocked_reason(Mutation.DELETE):
            return blocked
        state = parts.recovery.state
        if state.hold_deletions:
            return "the last resume could not be confirmed: nothing is deleted before the next save"
        return "training is being stopped or started" if state.acting else ""

    async def abandon(step: int) -> None:
        if parts.syncer is not None:
            await parts.syncer.abandon(step)

    def stored() -> frozenset[tuple[int, str]] | None:
        return parts.syncer.state.stored if parts.syncer is not None else None

    def verified() -> int:
        """The newest safe step of the current lineage: earlier quarantined checkpoints can expire. The pointer's step
        counts, not the highest one: a higher step of an earlier lineage proves nothing."""
        if parts.syncer is not None:
            last = parts.syncer.state.last_step
            return -1 if last is None else last
        newest = newest_complete(parts.catalogue.sets)
        return -1 if newest is None else newest.step

    def checkpoint() -> CheckpointMark:
        newest = newest_complete(parts.catalogue.sets)
        return CheckpointMark() if newest is None else CheckpointMark(newest.step, newest.changed_wall)

    pruner = Pruner(
        catalogue=parts.catalogue,
        remover=parts.remover,
        aside=parts.aside,
        step_paths=parts.layout.step_paths,
        workspace=parts.workspace,
        disk=parts.disk,
        worker=parts.removals,
        clock=parts.clock,
        policy=lambda: parts.policies.disk,
        act=lambda: parts.settings.mode == "act",
        blind=lambda: guarding.blind or parts.catalogue.problem,
        quota=lambda: parts.settings.disk.capacity is not None,
        stored=stored,
        verified=verified,
        pins=lambda: {**guarding.named, **pins()},
        protected=protected,
        hold=hold,
        first_seen_wall=lambda: parts.record.current.first_seen_wall if parts.record.current else 0.0,
        abandon_upload=abandon,
        rescan=lambda: guarding.wake(),  # noqa: PLW0108 - guarding is made below
        forecast=parts.forecast,
        others=lambda: parts.disks.latest().value or (),
        stages_in_temp=parts.layout.name in STAGES_IN_TEMP,
    )

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
        make_room=pruner.look,
        refresh_watches=parts.watcher.refresh,
        named=lambda: {**linked_steps(parts.layout), **parts.layout.pinned()},
        look_first=look_first,
        announced=announced,
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
