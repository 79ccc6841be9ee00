"""Making room on the pod: gathers what the pure plan needs, and has it carried out off the loop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from podwatch.checkpoints.catalogue import Catalogue
from podwatch.domain.errors import HostError
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.policy import DiskPolicy
from podwatch.domain.snapshot import DiskSample
from podwatch.judgement.retention import (
    Protection,
    QuarantineEntry,
    RemovalInput,
    RemovalPlan,
    Trigger,
    plan_removal,
    predict_next_save,
)
from podwatch.retention.remover import Remover
from podwatch.retention.trash import quarantine_entries, tree_bytes
from podwatch.sensors.disk import DiskSensor
from podwatch.system.clock import Clock
from podwatch.system.threads import Worker
from podwatch.system.workspace import Workspace

HYSTERESIS_SECONDS = 30.0
"""A plan that could not free enough is not tried again sooner: nothing changes within seconds."""


QUARANTINE_SECONDS = 7 * 86400.0
"""What was set aside is kept for a week, unless the disk needs the room and a verified successor exists."""


class Pruner:
    """``look`` is called after each rescan; at most one removal runs at a time."""

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        remover: Remover,
        workspace: Workspace,
        disk: DiskSensor,
        worker: Worker,
        clock: Clock,
        policy: Callable[[], DiskPolicy],
        act: Callable[[], bool],
        blind: Callable[[], str],
        stored: Callable[[], frozenset[tuple[int, str]] | None],
        pins: Callable[[], Mapping[int, str]],
        protected: Callable[[], Mapping[int, Protection]],
        hold: Callable[[], str],
        first_seen_wall: Callable[[], float],
        abandon_upload: Callable[[int], Awaitable[None]],
        rescan: Callable[[], None],
    ) -> None:
        self._catalogue, self._remover, self._workspace = catalogue, remover, workspace
        self._disk, self._worker, self._clock = disk, worker, clock
        self._policy, self._act, self._blind = policy, act, blind
        self._stored, self._pins, self._protected, self._hold = stored, pins, protected, hold
        self._first_seen_wall, self._abandon_upload = first_seen_wall, abandon_upload
        self._rescan = rescan
        self._task: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._aside: tuple[tuple[QuarantineEntry, ...], int] = ((), 0)
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
        self._task = asyncio.create_task(self._look(), name="prune")

    async def prune_now(self) -> RemovalPlan:
        """For a person: plan and carry out, whatever the pause; returns the plan that was carried out."""
        if self._task is not None:
            await asyncio.wait([self._task])
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
            f"the next save needs {needed / 1e9:.1f} GB, {reading.value.free_bytes / 1e9:.1f} GB are free, "
            f"and nothing more may go ({plan.shortfall_bytes / 1e9:.1f} GB short)"
        )
        suggestion = "make room by hand, or let checkpoints reach the store; podwatch prune --dry-run explains each set"
        return (Finding(FindingKind.DISK_NO_ROOM, Severity.CRITICAL, summary, reading.at, suggestion),)

    async def _look(self) -> None:
        await self._refresh_aside()
        try:
            plan = self.plan()
        except HostError:
            return
        self.last_plan = plan
        now = self._clock.monotonic()
        if plan.trigger is Trigger.NONE:
            self._not_before = 0.0
            return
        if now < self._not_before or not plan.removals or not self._act() or self._hold():
            return
        if plan.shortfall_bytes > 0:
            self._not_before = now + HYSTERESIS_SECONDS
        await self._carry_out(plan)

    async def _carry_out(self, plan: RemovalPlan) -> None:
        for removal in plan.removals:
            if removal.step is not None and self._protected().get(removal.step) is Protection.UPLOADING:
                await self._abandon_upload(removal.step)
        await self._worker.call(self._remover.carry_out, plan, self._paths_of)
        self._disk.refresh()
        self._rescan()

    def _paths_of(self, step: int) -> tuple[Path, ...]:
        """Every path of a step's set, required parts first: once the first is renamed, the rest is not complete."""
        parts = next((s.parts for s in self._catalogue.sets if s.step == step), ())
        return tuple(Path(p.path) for p in sorted(parts, key=lambda p: not p.required))

    async def _refresh_aside(self) -> None:
        """What lies in trash and quarantine. A good set set aside stays until a verified one is beyond it."""
        stored = self._stored()
        verified = [step for step, _ in stored] if stored else [s.step for s in self._catalogue.sets if s.complete]
        newest = max(verified, default=-1)
        self._aside = await self._worker.call(self._look_aside, newest)

    def _look_aside(self, newest: int) -> tuple[tuple[QuarantineEntry, ...], int]:
        entries = quarantine_entries(
            self._workspace,
            now_wall=self._clock.wall(),
            keep_seconds=QUARANTINE_SECONDS,
            needed=lambda step: step > newest,
        )
        return entries, tree_bytes(self._workspace.trash)

    def _input(self, disk: DiskSample) -> RemovalInput:
        stored = self._stored()
        quarantine, trash_bytes = self._aside
        return RemovalInput(
            sets=self._catalogue.sets,
            disk=disk,
            next_save_bytes=self.next_save_bytes or 0,
            has_store=stored is not None,
            stored=stored or frozenset(),
            pins=self._pins(),
            protected=self._protected(),
            quarantine=quarantine,
            trash_bytes=trash_bytes,
            trash_path=str(self._workspace.trash),
            first_seen_wall=self._first_seen_wall(),
        )


def plan_document(plan: RemovalPlan) -> dict[str, Any]:
    """What ``podwatch prune`` shows: one entry for each set or path, with the reason."""
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
        message = (
            f"{plan.freed_bytes / 1e9:.2f} GB of {plan.target_bytes / 1e9:.2f} GB would come free ({plan.trigger})"
        )
        if plan.shortfall_bytes:
            message += f"; {plan.shortfall_bytes / 1e9:.2f} GB short"
    return {
        "entries": entries,
        "trigger": str(plan.trigger),
        "target_bytes": plan.target_bytes,
        "freed_bytes": plan.freed_bytes,
        "shortfall_bytes": plan.shortfall_bytes,
        "critical": plan.critical,
        "message": message,
    }
