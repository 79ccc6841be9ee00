"""Frees space on the pod: makes the plan of this moment and executes it in a worker, when it is due or on request."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.lineage import kept_branch
from podwatch.checkpoints.records import CheckpointRecords
from podwatch.config.settings import DiskSettings
from podwatch.disk.explain import no_room, other_disks, part_elsewhere
from podwatch.disk.leftovers import Measurements
from podwatch.disk.next_save import NextSave, predict
from podwatch.disk.plan import (
    ROOM_HYSTERESIS,
    YIELDING,
    DiskFacts,
    Protection,
    Removal,
    RemovalKind,
    RemovalPlan,
    Trigger,
    plan_removals,
)
from podwatch.disk.remove import Remover
from podwatch.domain.checkpoint import newest_complete, newest_whole
from podwatch.domain.errors import Busy, HostError
from podwatch.domain.facts import Facts
from podwatch.domain.finding import Finding
from podwatch.domain.snapshot import DiskSample
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock

RETRY_SECONDS = 30.0
"""The same failed removals are not retried sooner: nothing changes within seconds."""
DISK_ANSWER_SECONDS = 20.0
"""Twice the disk sensor's deadline. Nothing is planned for a disk that does not respond."""
_NO_PARTS = ("", "checkpoints", "output", "temp", "state")
_WHOLE = (RemovalKind.STORED, RemovalKind.SURPLUS, RemovalKind.UNSTORED)


@dataclass(frozen=True, slots=True)
class RemovalRules:
    """The settings of removal, as last reloaded. ``acts``: podwatch removes on its own; ``podwatch prune`` removes in
    any mode. ``steps_in_use``: see ``DiskFacts``. ``quota``: the disk's usage is the sum of the known files, so these
    are measured even without pressure."""

    policy: DiskSettings
    steps_in_use: int = 2
    acts: bool = True
    quota: bool = False


class Pruner:
    """Call ``start_if_due`` after each rescan; at most one removal runs at a time."""

    def __init__(
        self,
        *,
        facts: Callable[[], Facts],
        rules: RemovalRules,
        layout: Layout,
        records: CheckpointRecords,
        rescan: Callable[[], None],
        abandon: Callable[[int], Awaitable[None]],
        refresh_disk: Callable[[], None],
        remover: Remover,
        measurements: Measurements,
        worker: Worker,
        clock: Clock,
    ) -> None:
        """``facts``: of this moment, also from the worker's thread. ``rescan`` asks for a rescan soon, ``refresh_disk``
        for a reading of the disk that the next turn sees; ``abandon`` stops the upload of a step that must be removed.
        """
        self._facts, self.rules, self._layout, self._records = facts, rules, layout, records
        self._rescan, self._abandon, self._refresh_disk = rescan, abandon, refresh_disk
        self._remover, self._measurements, self._worker, self._clock = remover, measurements, worker, clock
        self._task: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._not_before = 0.0
        self._tried: tuple[Removal, ...] = ()
        self._removed_at = float("-inf")
        self.last_plan: RemovalPlan | None = None
        self._findings: tuple[Finding, ...] = ()

    @property
    def next_save_bytes(self) -> int | None:
        """Predicted bytes of one save, without margin; None before the first."""
        return self._predict().bytes or None

    @property
    def waits_for(self) -> str:
        """Why podwatch removes nothing by itself now; empty if it does."""
        return self._facts().keep_all or ("" if self.rules.acts else "mode observe: only `podwatch prune` deletes")

    def plan(self) -> RemovalPlan:
        """The plan for now. Raises HostError while the disk or the checkpoints cannot be read."""
        return plan_removals(self._disk_facts(), self.rules.policy)

    def start_if_due(self) -> None:
        """Start a removal if one is due. Never blocks."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._prune_if_due(), name="prune")

    async def prune_now(self) -> RemovalPlan:
        """For `podwatch prune`: plan and execute now; returns the executed plan. Raises Busy while deletions are
        blocked."""
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
            await self._measure()
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
        facts, margin = self._facts(), self.rules.policy.margin
        reading, others = facts.pod.disk, facts.pod.disks.value or ()
        device = reading.value.device if reading.value is not None else 0
        found = other_disks(others, device=device, at=reading.at)
        parts = frozenset(part for record in self._records.all for part in record.parts)
        apart = (d for d in others if device and d.role not in _NO_PARTS and d.device not in (0, device))
        for disk in {d.device: d for d in apart}.values():
            there = {d.role for d in others if d.device == disk.device}
            found += part_elsewhere(disk, self._predict(parts - there), margin, reading.at)
        return (*self._findings, *found)

    # -- one removal ---------------------------------------------------------------------------------------------------

    async def _prune_if_due(self) -> None:
        async with self._one_at_a_time:
            if not await self._sees_the_last_removal():
                return
            try:
                plan = self.plan()
                if plan.trigger is not Trigger.NONE or self.rules.quota:
                    await self._measure()
                    plan = self.plan()
                self._judge_room(plan)
            except HostError:
                return
            self.last_plan = plan
            if not plan.removals or self.waits_for:
                return
            now = self._clock.monotonic()
            if plan.removals != self._tried or now >= self._not_before:
                self._tried, self._not_before = plan.removals, now + RETRY_SECONDS
                await self._carry_out(plan)

    def _judge_room(self, plan: RemovalPlan) -> None:
        """Update the finding. It stays until there is slightly more space than needed (hysteresis)."""
        policy, given = self.rules.policy, self._disk_facts()
        found = no_room(plan, given.disk, given.next_save, policy, self._facts().pod.disk.at)
        enough = given.next_save.bytes * (policy.margin + ROOM_HYSTERESIS)
        if found or not self._findings or given.disk.free_bytes + plan.freed_bytes >= enough:
            self._findings = found

    async def _carry_out(self, plan: RemovalPlan) -> None:
        for removal in plan.removals:
            if removal.step is not None and protected(self._facts()).get(removal.step) is Protection.UPLOADING:
                await self._abandon(removal.step)
        try:
            await self._worker.call(self._remover.carry_out, plan, self._layout.step_paths, self._veto)
        finally:
            self._rescan()
            if self.rules.quota:
                await self._measure()
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
        if now is not None and not now.complete and removal.kind in _WHOLE:
            return "it is being saved again"
        whole = removal.step is not None and not removal.path
        newest = {s.step for s in (newest_complete(facts.checkpoints), newest_whole(facts.checkpoints)) if s}
        return "the newest complete checkpoint" if whole and removal.step in newest else ""

    async def _sees_the_last_removal(self) -> bool:
        """Wait for a turn that read the disk after the last removal; False if none comes. A plan on older numbers
        would remove too much. The rescan after the removal has already run."""
        end = self._clock.monotonic() + DISK_ANSWER_SECONDS
        if self._facts().pod.disk.at < self._removed_at:
            self._refresh_disk()
        while self._facts().pod.disk.at < self._removed_at:
            if self._clock.monotonic() > end:
                return False
            await self._clock.sleep(0.05)
        return True

    async def _measure(self) -> None:
        """Measure what the plan needs besides the checkpoints' sizes in the worker, under pressure only. A complete
        checkpoint stays in quarantine until a verified one has a higher step."""
        facts = self._facts()
        about = self._clock.wall(), _newest_safe(facts), facts.checkpoints
        await self._worker.call(self._measurements.measure, *about)

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _predict(self, elsewhere: Collection[str] = ()) -> NextSave:
        return predict(self._records.all, self._clock.wall(), self._facts().save_seconds, elsewhere)

    def _disk_facts(self) -> DiskFacts:
        facts = self._facts()
        reading = facts.pod.disk
        if facts.unreadable or not reading.ok or reading.value is None:
            why = facts.unreadable or reading.detail or str(reading.state)
            raise HostError("cannot plan removals without reading the disk", where=why, fix="retry when it responds")
        elsewhere = _parts_elsewhere(facts, reading.value)
        return DiskFacts(
            checkpoints=facts.checkpoints,
            disk=reading.value,
            next_save=self._predict(elsewhere),
            stored=None if facts.store is None else facts.store.stored,
            surplus=() if facts.store is None else facts.store.surplus,
            pins=facts.pins,
            protected=protected(facts),
            leftovers=self._measurements.found.on(reading.value.device),
            first_seen_wall=facts.run.guarded_since,
            steps_in_use=self.rules.steps_in_use,
            elsewhere=elsewhere,
        )


def protected(facts: Facts) -> Mapping[int, Protection]:
    """Steps that are in use now: resumed from, uploading, read by a command, or of an earlier branch."""
    found = dict.fromkeys(facts.resume_sources, Protection.RESUME_SOURCE)
    if facts.store is not None and facts.store.uploading_step is not None:
        found.setdefault(facts.store.uploading_step, Protection.UPLOADING)
    for step in facts.reading:
        found.setdefault(step, Protection.READING)
    if (newest := kept_branch(facts.checkpoints, facts.run, facts.store)) is not None:
        for one in facts.checkpoints:
            if one.earlier:
                found.setdefault(one.step, Protection.EARLIER_BRANCH)
        found[newest] = Protection.EARLIER_NEWEST
    return found


def _newest_safe(facts: Facts) -> int:
    """The newest safe step of the current lineage: earlier quarantined checkpoints can expire; -1 without one. The
    pointer's step counts, not the highest one: a higher step of an earlier lineage proves nothing."""
    if facts.store is not None:
        return -1 if facts.store.last_step is None else facts.store.last_step
    newest = newest_complete(facts.checkpoints)
    return -1 if newest is None else newest.step


def _parts_elsewhere(facts: Facts, disk: DiskSample) -> frozenset[str]:
    """Parts of checkpoints that are on another file system than ``disk``, as far as known."""
    others = facts.pod.disks.value or ()
    return frozenset(
        d.role for d in others if disk.device and d.device not in (0, disk.device) and d.role not in _NO_PARTS
    )
