"""A small disk and the parts of the daemon that guard it, joined as the daemon joins them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

from podwatch.app.rescans import Announced, Rescans
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.config.settings import DiskSettings
from podwatch.disk.leftovers import Measurements
from podwatch.disk.plan import RemovalPlan
from podwatch.disk.prune import Pruner, RemovalRules
from podwatch.disk.remove import Remover
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.event import Event
from podwatch.domain.facts import Facts, StoreFacts
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import DiskSample, Snapshot, observed
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.journal.journal import Journal
from podwatch.sensors.disk import DiskSensor
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from tests.drivers.checkpoints import prime_rl_layout


class Uploads(Protocol):
    """What a store would have; see ``Guard.uploads``."""

    def stored(self) -> frozenset[tuple[int, str]]: ...
    def uploading(self) -> int | None: ...
    async def abandon(self, step: int) -> None: ...


class Guard:
    """Catalogue, guarding round, disk sensor, pruner and remover, as the daemon joins them."""

    def __init__(
        self,
        root: Path,
        state: Path,
        capacity: int | None,
        *,
        store: bool,
        variant: str,
        policy: DiskSettings | None = None,
        others: Callable[[], tuple[DiskSample, ...]] = tuple,
        checkpoint_dir: Path | None = None,
    ) -> None:
        out = self.out = root / "outputs"
        clock = SystemClock()
        self.workspace = Workspace(out, beside=() if checkpoint_dir is None else (checkpoint_dir,)).probe()
        self.uploads: Uploads | None = None
        self.others = others
        layout = prime_rl_layout(out, checkpoint_dir=checkpoint_dir, command=("--variant", variant))
        self.catalogue = Catalogue(layout, clock, settle=0.05, settle_weak=0.05)
        self.events: list[Event] = []
        self.measurements = Measurements(self.workspace, layout, keep_seconds=60.0)
        self.journal = Journal.open(state / "journal.sqlite")
        self.disk = DiskSensor(
            checkpoint_dir or out,
            clock,
            capacity,
            poll=0.04,
            known_bytes=lambda: sum(s.size_bytes for s in self.catalogue.sets) + self.measurements.found.bytes,
        )
        self.workers = (Worker("checkpoints"), Worker("removals"))
        self.store = store
        self.resume_sources: set[int] = set()
        self.held = ""
        self.pins: dict[int, str] = {}
        self.asked = 0.0
        self.before: RemovalPlan | None = None
        self.rescans = Rescans(self.catalogue, self.workers[0], clock, self.events.append, Announced(), seconds=0.04)
        self.pruner = Pruner(
            facts=self.facts,
            rules=RemovalRules(policy or DiskSettings(), quota=capacity is not None),
            layout=layout,
            records=self.catalogue.records,
            rescan=self.rescans.wake,
            abandon=self.abandon,
            refresh_disk=self.disk.wake,
            remover=Remover(self.workspace, clock, self.events.append),
            measurements=self.measurements,
            worker=self.workers[1],
            clock=clock,
        )

    async def guard(self) -> None:
        """The daemon's rescans and removals, until cancelled."""
        while True:
            await self.rescans.rescan()
            self.pruner.start_if_due()
            await self.rescans.until_due()

    def pod(self) -> Snapshot:
        return Snapshot(0.0, 0.0, disk=self.disk.latest(), disks=observed(self.others(), SystemClock().monotonic()))

    def facts(self) -> Facts:
        return Facts(
            self.pod(),
            RunState("demo"),
            checkpoints=self.catalogue.sets,
            unreadable=self.rescans.blind,
            store=self.in_store(),
            pins={**self.rescans.named, **self.pins},
            resume_sources=frozenset(self.resume_sources),
            keep_all=self.held,
        )

    def in_store(self) -> StoreFacts | None:
        """By default a store that keeps up, one save behind."""
        uploading = None
        if self.uploads is not None:
            stored, uploading = self.uploads.stored(), self.uploads.uploading()
        elif self.store:
            stored = frozenset((s.step, s.save_id) for s in [s for s in self.catalogue.sets if s.complete][:-1])
        else:
            return None
        newest = max((step for step, _ in stored), default=None)
        saves = tuple(StoredCheckpoint(step, name, here=name) for step, name in sorted(stored))
        return StoreFacts(checkpoints=saves, listed=True, last_step=newest, uploading_step=uploading)

    async def abandon(self, step: int) -> None:
        assert self.uploads is not None, "nothing is uploaded here"
        await self.uploads.abandon(step)

    def newest(self) -> CheckpointSet | None:
        return newest_complete(self.catalogue.sets)

    def settled(self, saved: int, since: float) -> bool:
        """The last save is known to be whole, and a plan made from a later look at the disk removes nothing."""
        newest, plan = newest_complete(self.catalogue.sets), self.pruner.last_plan
        known = saved <= 0 or (newest is not None and newest.step >= saved)
        if not known or self.disk.latest().at <= since:
            return False
        if self.asked != since:
            self.asked, self.before = since, plan  # the next plan sees what this pause sees
        return plan is not None and plan is not self.before and not plan.removals

    async def close(self) -> None:
        await self.pruner.stop()
        await self.disk.stop()
        for worker in self.workers:
            worker.close()
        self.journal.close()


@contextlib.asynccontextmanager
async def guarded(
    root: Path,
    state: Path,
    capacity: int | None,
    *,
    store: bool,
    variant: str,
    policy: DiskSettings | None = None,
    checkpoint_dir: Path | None = None,
) -> AsyncIterator[Guard]:
    guard = Guard(root, state, capacity, store=store, variant=variant, policy=policy, checkpoint_dir=checkpoint_dir)
    await guard.disk.start()
    round_ = asyncio.create_task(guard.guard())
    try:
        yield guard
    finally:
        round_.cancel()
        await asyncio.gather(round_, return_exceptions=True)
        await guard.close()
