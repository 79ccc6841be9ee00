"""Frees space on the pod: collects the input of the removal plan and executes the plan in a worker.
disk_findings.py reports missing space.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podwatch.checkpoints.trainers import Layout
from podwatch.config.settings import DiskSettings
from podwatch.config.units import format_size
from podwatch.domain.checkpoint import CheckpointSet, newest_complete, newest_whole
from podwatch.domain.errors import Busy, HostError
from podwatch.domain.facts import Facts
from podwatch.domain.finding import Finding
from podwatch.domain.snapshot import DiskSample
from podwatch.policy.disk_forecast import Forecast, NextSave
from podwatch.policy.lineage import kept_branch
from podwatch.policy.local_retention import (
    ROOM_HYSTERESIS,
    YIELDING,
    Protection,
    Removal,
    RemovalInput,
    RemovalKind,
    RemovalPlan,
    Trigger,
    plan_removal,
)
from podwatch.retention.disk_findings import no_room, other_disks
from podwatch.retention.list_trash_and_quarantine import SetAsideUsage
from podwatch.retention.remove_checkpoints import Remover
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock

# -- pruner ----------------------------------------------------------------------------------------------------------

HYSTERESIS_SECONDS = 30.0
"""The same failed removals are not retried sooner: nothing changes within seconds."""
DISK_ANSWER_SECONDS = 20.0
"""Twice the disk sensor's deadline. Nothing is planned for a disk that does not respond."""


@dataclass(frozen=True, slots=True)
class RemovalRules:
    """The settings of removal, as last reloaded. ``acts``: podwatch removes on its own; ``podwatch prune`` removes in
    any mode. ``react``: seconds from the end of a save to room for another. ``steps_in_use``: by-products of this many
    steps below the newest complete checkpoint stay. ``quota``: the disk's usage is the sum of the known files, so these
    are measured even without pressure. ``stages_in_temp``: the trainer writes a whole checkpoint into the temporary
    directory first."""

    policy: DiskSettings
    react: float = 0.0
    steps_in_use: int = 2
    acts: bool = True
    quota: bool = False
    stages_in_temp: bool = False


class Pruner:
    """Call ``look`` after each rescan; at most one removal runs at a time."""

    def __init__(
        self,
        *,
        facts: Callable[[], Facts],
        rules: RemovalRules,
        layout: Layout,
        rescan: Callable[[], None],
        abandon: Callable[[int], Awaitable[None]],
        refresh_disks: Callable[[], None],
        forecast: Forecast,
        remover: Remover,
        aside: SetAsideUsage,
        worker: Worker,
        clock: Clock,
    ) -> None:
        """``facts``: of this moment, also from the worker's thread. ``rescan`` asks for a rescan soon,
        ``refresh_disks`` for readings of the disks that the next turn sees; ``abandon`` stops the upload of a step that
        must be removed."""
        self._facts, self.rules, self._layout, self._forecast = facts, rules, layout, forecast
        self._rescan, self._abandon, self._refresh_disks = rescan, abandon, refresh_disks
        self._remover, self._aside, self._worker, self._clock = remover, aside, worker, clock
        self._task: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._not_before = 0.0
        self._tried: tuple[Removal, ...] = ()
        self._removed_at = float("-inf")
        self.last_plan: RemovalPlan | None = None
        self._findings: tuple[Finding, ...] = ()

    @property
    def next_save_bytes(self) -> int | None:
        """Predicted bytes of one save, without margin."""
        return self.next_save().bytes or None

    def next_save(self) -> NextSave:
        facts, policy = self._facts(), self.rules.policy
        return self._forecast.next_save(self._clock.wall(), policy.lead, self.rules.react, facts.save_seconds)

    @property
    def waits_for(self) -> str:
        """Why podwatch removes nothing by itself now; empty if it does."""
        return self._facts().keep_all or ("" if self.rules.acts else "mode observe: only `podwatch prune` deletes")

    def plan(self) -> RemovalPlan:
        """The plan for now. Raises HostError while the disk or the checkpoints cannot be read."""
        return self._planned()[0]

    def _planned(self) -> tuple[RemovalPlan, DiskSample]:
        """The plan and its file system: the checkpoints' own, or the first other one that needs space."""
        facts = self._facts()
        reading = facts.pod.disk
        if facts.unreadable or not reading.ok or reading.value is None:
            why = facts.unreadable or reading.detail or str(reading.state)
            raise HostError("cannot plan removals without reading the disk", where=why, fix="retry when it responds")
        main, policy = reading.value, self.rules.policy
        devices, next_save = _devices(facts), self.next_save()
        first = plan_removal(self._input(facts, main, _on(next_save, devices, main, main), devices, main), policy)
        if first.trigger is Trigger.NONE:
            for disk in _part_disks(facts, main):
                given = self._input(facts, disk, _on(next_save, devices, disk, main), devices, main)
                plan = plan_removal(given, policy)
                if plan.trigger is not Trigger.NONE:
                    return plan, disk
        return first, main

    def look(self) -> None:
        """Start a removal if one is due. Never blocks."""
        if self._task is not None and not self._task.done():
            return
        self._task = asyncio.create_task(self._turn(), name="prune")

    async def prune_now(self) -> RemovalPlan:
        """For `podwatch prune`: plan and execute now, without hysteresis; returns the executed plan. Raises Busy while
        deletions are blocked."""
        async with self._one_at_a_time:
            if reason := self._facts().keep_all:
                raise Busy(
                    "podwatch deletes nothing now",
                    where=reason,
                    fix="retry when `podwatch status` no longer shows this",
                )
            if not await self._sees_the_last_removal():
                raise Busy(
                    "podwatch has not read the disk since its last removal",
                    where=self._facts().pod.disk.detail,
                    fix="retry when the disk responds",
                )
            await self._refresh_aside()
            plan = self.plan()
            await self._carry_out(plan)
            return plan

    async def stop(self) -> None:
        """Wait up to 5 s for the removal in progress; an interrupted one only leaves files in trash."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=5.0)
            self._task.cancel()

    def findings(self) -> tuple[Finding, ...]:
        """Findings if the next save does not fit, or another disk is nearly full, with the numbers."""
        facts = self._facts()
        reading = facts.pod.disk
        others = other_disks(
            facts.pod.disks.value or (),
            self.next_save(),
            devices=_devices(facts),
            checkpoints_device=reading.value.device if reading.value is not None else 0,
            stages_in_temp=self.rules.stages_in_temp,
            margin=self.rules.policy.margin,
            at=reading.at,
        )
        return (*self._findings, *others)

    def _judge_room(self, plan: RemovalPlan, disk: DiskSample) -> None:
        """Update the finding. It stays until there is slightly more space than needed (hysteresis)."""
        policy, next_save, at = self.rules.policy, self.next_save(), self._facts().pod.disk.at
        found = no_room(plan, disk, next_save, policy, at)
        enough = next_save.room * (policy.margin + ROOM_HYSTERESIS)
        if not found and self._findings and disk.free_bytes + plan.freed_bytes < enough:
            return
        self._findings = found

    async def _turn(self) -> None:
        async with self._one_at_a_time:
            await self._look()

    async def _look(self) -> None:
        if not await self._sees_the_last_removal():
            return
        try:
            plan, disk = self._planned()
            if plan.trigger is not Trigger.NONE or self.rules.quota:
                await self._refresh_aside()
                plan, disk = self._planned()
        except HostError:
            return
        self.last_plan = plan
        self._judge_room(plan, disk)
        now = self._clock.monotonic()
        if plan.trigger is Trigger.NONE or not plan.removals or self.waits_for:
            return
        if plan.removals == self._tried and now < self._not_before:
            return
        self._tried, self._not_before = plan.removals, now + HYSTERESIS_SECONDS
        await self._carry_out(plan)

    async def _carry_out(self, plan: RemovalPlan) -> None:
        for removal in plan.removals:
            if removal.step is not None and protected(self._facts()).get(removal.step) is Protection.UPLOADING:
                await self._abandon(removal.step)
        began = self._clock.monotonic()
        try:
            report = await self._worker.call(self._remover.carry_out, plan, self._layout.step_paths, self._veto)
            self._forecast.removed(report.freed_bytes, self._clock.monotonic() - began)
        finally:
            self._rescan()
            if self.rules.quota:
                await self._refresh_aside()
            self._removed_at = self._clock.monotonic()

    def _veto(self, removal: Removal) -> str:
        """Why this removal must not happen now, else empty. Called in the worker's thread before each removal, because
        the state can change during a long plan. Reads frozen values only."""
        facts = self._facts()
        if facts.keep_all:
            return facts.keep_all
        protection = protected(facts).get(removal.step) if removal.step is not None else None
        if protection is not None and protection not in YIELDING:
            return f"protected: {protection}"
        if removal.step is not None and (pin := facts.pins.get(removal.step)):
            return f"pinned: {pin}"
        now = next((s for s in facts.checkpoints if s.step == removal.step), None)
        if now is not None and not now.complete and removal.kind in _WHOLE_SETS:
            return "it is being saved again"
        newest, held = newest_complete(facts.checkpoints), newest_whole(facts.checkpoints)
        whole = removal.step is not None and not removal.part and not removal.path
        keeps = {s.step for s in (newest, held) if s is not None}
        return "the newest complete checkpoint" if whole and removal.step in keeps else ""

    async def _sees_the_last_removal(self) -> bool:
        """Wait for a turn that read the disks after the last removal; False if none comes. A plan on older numbers
        would remove too much. The rescan after the removal has already run."""
        if _read_since(self._removed_at, self._facts()):
            return True
        end = self._clock.monotonic() + DISK_ANSWER_SECONDS
        self._refresh_disks()
        while not _read_since(self._removed_at, self._facts()):
            if self._clock.monotonic() > end:
                return False
            await self._clock.sleep(0.05)
        return True

    async def _refresh_aside(self) -> None:
        """Measure trash, quarantine and by-products in the worker, under pressure only. A complete checkpoint stays in
        quarantine until a verified one has a higher step."""
        await self._worker.call(self._aside.look, self._clock.wall(), _newest_safe(self._facts()))

    def _input(
        self, facts: Facts, disk: DiskSample, next_save: NextSave, devices: Mapping[str, int], main: DiskSample
    ) -> RemovalInput:
        """The input of the plan for the file system ``disk``; only files on it count."""
        found = self._aside.found
        here = disk is main
        return RemovalInput(
            sets=_sets_on(facts.checkpoints, devices, disk, main),
            disk=disk,
            next_save_bytes=next_save.room,
            has_store=facts.store is not None,
            stored=frozenset() if facts.store is None else facts.store.stored,
            pins=facts.pins,
            protected=protected(facts),
            quarantine=tuple(e for e in found.quarantine if (e.device in (0, disk.device) if disk.device else here)),
            spares=found.spares if here else (),
            trash_bytes=found.trash_bytes if here else 0,
            trash_path=str(self._aside.trash),
            first_seen_wall=facts.run.first_seen_wall,
            next_save_files=next_save.inodes,
            soon=next_save.soon,
            due_in=next_save.due_in,
            usual_bytes=next_save.usual_room,
            usual_files=next_save.usual_inodes,
            steps_in_use=self.rules.steps_in_use,
        )


_WHOLE_SETS = (RemovalKind.STORED_SET, RemovalKind.UNSTORED_SET)
_NOT_PARTS = ("", "checkpoints", "output", "temp", "state")


def protected(facts: Facts) -> Mapping[int, Protection]:
    """Steps that are in use now: resumed from, uploading, read by a command, or of an earlier branch."""
    found = dict.fromkeys(facts.resume_sources, Protection.RESUME_SOURCE)
    if facts.store is not None and facts.store.uploading_step is not None:
        found.setdefault(facts.store.uploading_step, Protection.UPLOADING)
    for step in facts.reading:
        found.setdefault(step, Protection.READING)
    if (kept := kept_branch(facts.checkpoints, facts.run, facts.store)) is not None:
        for one in facts.checkpoints:
            if one.earlier:
                found.setdefault(one.step, Protection.EARLIER_BRANCH)
        found[kept] = Protection.EARLIER_NEWEST
    return found


def _newest_safe(facts: Facts) -> int:
    """The newest safe step of the current lineage: earlier quarantined checkpoints can expire; -1 without one. The
    pointer's step counts, not the highest one: a higher step of an earlier lineage proves nothing."""
    if facts.store is not None:
        return -1 if facts.store.last_step is None else facts.store.last_step
    newest = newest_complete(facts.checkpoints)
    return -1 if newest is None else newest.step


def _devices(facts: Facts) -> Mapping[str, int]:
    """Part -> device number of its file system, as far as known."""
    return {d.role: d.device for d in facts.pod.disks.value or () if d.role not in _NOT_PARTS}


def _read_since(mark: float, facts: Facts) -> bool:
    """Whether every file system that stores parts was read at or after ``mark``."""
    others = facts.pod.disks
    apart = any(disk.role not in _NOT_PARTS for disk in others.value or ())
    return facts.pod.disk.at >= mark and (others.at >= mark or not apart)


def _part_disks(facts: Facts, main: DiskSample) -> list[DiskSample]:
    """One sample for each other file system that stores parts."""
    others = (d for d in facts.pod.disks.value or () if d.role not in _NOT_PARTS and d.device != main.device)
    found = {d.device: d for d in others}
    return list(found.values()) if main.device else []


def _lies_on(part: str, devices: Mapping[str, int], disk: DiskSample, main: DiskSample) -> bool:
    return not disk.device or devices.get(part, main.device) == disk.device


def _sets_on(
    sets: Sequence[CheckpointSet], devices: Mapping[str, int], disk: DiskSample, main: DiskSample
) -> Sequence[CheckpointSet]:
    """The checkpoints with their sizes on one file system."""
    if all(device == main.device for device in devices.values()):
        return sets
    found = []
    for one in sets:
        parts = [replace(p, size_bytes=p.size_bytes if _lies_on(p.name, devices, disk, main) else 0) for p in one.parts]
        size = sum(p.size_bytes for p in parts)
        found.append(replace(one, parts=tuple(parts), size_bytes=size, file_count=one.file_count if size else 0))
    return found


def _on(next_save: NextSave, devices: Mapping[str, int], disk: DiskSample, main: DiskSample) -> NextSave:
    """The share of the next save that is written to one file system."""
    if all(device == main.device for device in devices.values()):
        return next_save
    here = [sizes for part, *sizes in next_save.parts if _lies_on(part, devices, disk, main)]
    size, usual = (
        min(sum(sizes[n] for sizes in here), most) for n, most in enumerate((next_save.bytes, next_save.usual_bytes))
    )
    return replace(next_save, bytes=size, files=0, usual_bytes=usual, usual_files=0)


def plan_document(plan: RemovalPlan, *, done: bool = False, waits_for: str = "") -> dict[str, Any]:
    """The answer to ``podwatch prune``: one entry for each checkpoint or path, with the reason. ``done``: executed.
    ``waits_for``: why podwatch does not execute it by itself."""
    entries: list[dict[str, Any]] = [
        {
            "action": "remove",
            "kind": str(r.kind),
            "step": r.step,
            "path": r.path,
            "part": r.part,
            "size_bytes": r.bytes,
            "reason": r.reason,
        }
        for r in plan.removals
    ]
    entries += [
        {"action": "keep", "step": k.step, "reason": k.reason, "size_bytes": k.bytes or None} for k in plan.kept
    ]
    if plan.trigger is Trigger.NONE:
        message = "there is enough space: nothing to remove"
    else:
        verb = "freed" if done else "would be freed"
        message = f"{format_size(plan.freed_bytes)} of {format_size(plan.target_bytes)} {verb} ({plan.trigger})"
        if plan.shortfall_bytes:
            message += f"; {format_size(plan.shortfall_bytes)} short"
            if plan.missing_for_biggest and not plan.critical:
                message += " for a save as big as the biggest of the last ones; one of the usual size fits"
        if plan.waiting:
            message += f"; {format_size(sum(r.bytes for r in plan.waiting))} more to be freed before the next save"
        if plan.removals and waits_for:
            message += f". podwatch deletes nothing by itself now: {waits_for}"
    return {
        "entries": entries,
        "trigger": str(plan.trigger),
        "target_bytes": plan.target_bytes,
        "freed_bytes": plan.freed_bytes,
        "shortfall_bytes": plan.shortfall_bytes,
        "critical": plan.critical,
        "waiting_steps": [r.step for r in plan.waiting],
        "missing_bytes": plan.missing_bytes,
        "missing_inodes": plan.missing_inodes,
        "message": message,
    }
