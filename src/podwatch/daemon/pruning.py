"""Making room on the pod: gathers what the pure plan needs, and has it carried out off the loop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podwatch.checkpoints.catalogue import Catalogue
from podwatch.config.units import format_size
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.errors import Busy, HostError
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.policy import DiskPolicy
from podwatch.domain.snapshot import DiskSample
from podwatch.judgement.retention import (
    Protection,
    Removal,
    RemovalInput,
    RemovalPlan,
    Trigger,
    plan_removal,
    predict_next_save,
)
from podwatch.retention.aside import Aside
from podwatch.retention.remover import Remover
from podwatch.sensors.disk import DiskSensor
from podwatch.system.clock import Clock
from podwatch.system.threads import Worker
from podwatch.system.workspace import Workspace

HYSTERESIS_SECONDS = 30.0
"""The very same removals are not tried again sooner: they failed, and nothing changes within seconds."""
DISK_ANSWER_SECONDS = 20.0
"""Twice the disk sensor's deadline. A disk that does not answer is not planned for."""


class Pruner:
    """``look`` is called after each rescan; at most one removal runs at a time.

    ``step_paths`` gives all directories of one step, the one that decides completeness first. ``quota``: the disk's
    figures are made up from what is known to lie there, so all of it must be measured even while there is room.
    """

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        remover: Remover,
        aside: Aside,
        workspace: Workspace,
        step_paths: Callable[[int], Sequence[Path]],
        disk: DiskSensor,
        worker: Worker,
        clock: Clock,
        policy: Callable[[], DiskPolicy],
        act: Callable[[], bool],
        blind: Callable[[], str],
        quota: Callable[[], bool],
        stored: Callable[[], frozenset[tuple[int, str]] | None],
        verified: Callable[[], int],
        pins: Callable[[], Mapping[int, str]],
        protected: Callable[[], Mapping[int, Protection]],
        hold: Callable[[], str],
        first_seen_wall: Callable[[], float],
        abandon_upload: Callable[[int], Awaitable[None]],
        rescan: Callable[[], None],
    ) -> None:
        self._catalogue, self._remover, self._workspace = catalogue, remover, workspace
        self._aside, self._step_paths, self._quota = aside, step_paths, quota
        self._disk, self._worker, self._clock = disk, worker, clock
        self._policy, self._act, self._blind = policy, act, blind
        self._stored, self._verified, self._pins = stored, verified, pins
        self._protected, self._hold = protected, hold
        self._first_seen_wall, self._abandon_upload = first_seen_wall, abandon_upload
        self._rescan = rescan
        self._task: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._not_before = 0.0
        self._tried: tuple[Removal, ...] = ()
        self._removed = False
        self.last_plan: RemovalPlan | None = None

    @property
    def next_save_bytes(self) -> int | None:
        return predict_next_save(self._catalogue.sets) or None

    def plan(self) -> RemovalPlan:
        """The plan for this moment. Raises HostError while disk or checkpoints cannot be seen."""
        reading = self._disk.latest()
        if self._blind() or not reading.ok or reading.value is None:
            why = self._blind() or reading.detail or str(reading.state)
            raise HostError("no plan without sight of the disk", where=why, fix="try again when it answers")
        return plan_removal(self._input(reading.value), self._policy())

    def look(self) -> None:
        """Start a removal if one is due. Never blocks."""
        if self._task is not None and not self._task.done():
            return
        self._task = asyncio.create_task(self._turn(), name="prune")

    async def prune_now(self) -> RemovalPlan:
        """For a person: plan and carry out, whatever the pause; returns the plan that was carried out. Raises Busy
        while nothing may be deleted."""
        async with self._one_at_a_time:
            if reason := self._hold():
                raise Busy("nothing may be deleted now", where=reason, fix="try again when training goes on")
            await self._sees_the_last_removal()
            await self._refresh_aside()
            plan = self.plan()
            await self._carry_out(plan)
            return plan

    async def stop(self) -> None:
        """Wait for the removal under way, a moment; a crash here would only leave trash."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=5.0)
            self._task.cancel()

    def findings(self) -> tuple[Finding, ...]:
        """The disk will be full before anything more may go (DESIGN section 6): with the numbers."""
        plan, reading = self.last_plan, self._disk.latest()
        if plan is None or reading.value is None or plan.shortfall_bytes <= 0 or plan.trigger is not Trigger.ROOM:
            return ()
        needed = self.next_save_bytes or 0
        summary = (
            f"the next save needs {format_size(needed)}, {format_size(reading.value.free_bytes)} are free, "
            f"and nothing more may go ({format_size(plan.shortfall_bytes)} short)"
        )
        suggestion = "make room by hand, or let checkpoints reach the store; podwatch prune --dry-run explains each set"
        return (Finding(FindingKind.DISK_NO_ROOM, Severity.CRITICAL, summary, reading.at, suggestion),)

    async def _turn(self) -> None:
        async with self._one_at_a_time:
            await self._look()

    async def _look(self) -> None:
        if not await self._sees_the_last_removal():
            return
        try:
            plan = self.plan()
            if plan.trigger is not Trigger.NONE or self._quota():
                await self._refresh_aside()
                plan = self.plan()
        except HostError:
            return
        self.last_plan = plan
        now = self._clock.monotonic()
        if plan.trigger is Trigger.NONE or not plan.removals or not self._act() or self._hold():
            return
        if plan.removals == self._tried and now < self._not_before:
            return
        self._tried, self._not_before = plan.removals, now + HYSTERESIS_SECONDS
        await self._carry_out(plan)

    async def _carry_out(self, plan: RemovalPlan) -> None:
        for removal in plan.removals:
            if removal.step is not None and self._protected().get(removal.step) is Protection.UPLOADING:
                await self._abandon_upload(removal.step)
        try:
            await self._worker.call(self._remover.carry_out, plan, self._step_paths, self._veto)
        finally:
            self._removed = True
            self._rescan()

    def _veto(self, removal: Removal) -> str:
        """Asked from the worker's thread just before each removal: a long plan must not outlive what it was made from.
        Reads frozen values only."""
        if reason := self._hold():
            return reason
        protection = self._protected().get(removal.step) if removal.step is not None else None
        if protection is not None and protection is not Protection.UPLOADING:
            return f"protected: {protection}"
        newest = newest_complete(self._catalogue.sets)
        whole = removal.step is not None and not removal.part and not removal.path
        return "the newest complete checkpoint" if whole and newest and newest.step == removal.step else ""

    async def _sees_the_last_removal(self) -> bool:
        """Planning on figures from before a removal would remove twice. This runs after the rescan that followed it;
        the disk must answer once more."""
        if not self._removed:
            return True
        if self._quota():
            await self._refresh_aside()
        mark = self._clock.monotonic()
        self._disk.refresh()
        while self._disk.latest().at < mark:
            if self._clock.monotonic() - mark > DISK_ANSWER_SECONDS:
                return False
            await self._clock.sleep(0.05)
        self._removed = False
        return True

    async def _refresh_aside(self) -> None:
        """What lies in trash, in quarantine and as by-products. Sizes are walked for in the worker, and only under
        pressure. A good set set aside stays until a verified one is beyond it."""
        await self._worker.call(self._aside.look, self._clock.wall(), self._verified())

    def _input(self, disk: DiskSample) -> RemovalInput:
        stored = self._stored()
        found = self._aside.found
        return RemovalInput(
            sets=self._catalogue.sets,
            disk=disk,
            next_save_bytes=self.next_save_bytes or 0,
            has_store=stored is not None,
            stored=stored or frozenset(),
            pins=self._pins(),
            protected=self._protected(),
            quarantine=found.quarantine,
            spares=found.spares,
            trash_bytes=found.trash_bytes,
            trash_path=str(self._workspace.trash),
            first_seen_wall=self._first_seen_wall(),
        )


def plan_document(plan: RemovalPlan, *, done: bool = False) -> dict[str, Any]:
    """What ``podwatch prune`` shows: one entry for each set or path, with the reason. ``done``: it was carried out."""
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
    entries += [{"action": "keep", "step": k.step, "reason": k.reason, "size_bytes": None} for k in plan.kept]
    if plan.trigger is Trigger.NONE:
        message = "there is room: nothing needs to go"
    else:
        verb = "freed" if done else "would come free"
        message = f"{format_size(plan.freed_bytes)} of {format_size(plan.target_bytes)} {verb} ({plan.trigger})"
        if plan.shortfall_bytes:
            message += f"; {format_size(plan.shortfall_bytes)} short"
    return {
        "entries": entries,
        "trigger": str(plan.trigger),
        "target_bytes": plan.target_bytes,
        "freed_bytes": plan.freed_bytes,
        "shortfall_bytes": plan.shortfall_bytes,
        "critical": plan.critical,
        "message": message,
    }
