"""Leaving ends, whatever hangs; what training saves at SIGTERM is stored; and a reload says what it could not take
over."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from podwatch.app.backup.backup import Backup
from podwatch.app.preemption import Budget, Preemption
from podwatch.app.rescans import Announced, Rescans
from podwatch.app.settings_in_force import policies_from
from podwatch.app.shutdown import briefly, end_tasks
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.records import CheckpointRecords
from podwatch.config.reload_limits import waits_for_restart
from podwatch.config.setting_names import known_keys
from podwatch.config.settings import Settings
from podwatch.domain.snapshot import Reading, SensorState, observed, unobserved
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock
from podwatch.system.procfs import boot_id
from tests.app.backup.backup_world import World, until
from tests.support.hurry import hurrying
from tests.support.warm import children


async def test_a_task_that_swallows_a_cancellation_is_ended_all_the_same() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks([task], within=5)
    assert (swallowed, task.cancelled()) == (3, True)


async def test_a_task_that_never_ends_is_left_behind_in_time() -> None:
    release = asyncio.Event()

    async def immortal() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(immortal())
    await asyncio.sleep(0)
    began = time.monotonic()
    await end_tasks([task], within=0.2)
    assert time.monotonic() - began < 20
    assert not task.done()
    release.set()
    await task


async def test_a_step_of_leaving_that_hangs_does_not_hold_the_next_one() -> None:
    began = time.monotonic()
    await briefly(asyncio.sleep(60), 0.05)
    assert time.monotonic() - began < 20


def test_a_hung_disk_does_not_hold_the_exit() -> None:
    """The daemon's file work runs in threads that the interpreter does not join."""
    code = """
import asyncio, time
from podwatch.app.shutdown import briefly
from podwatch.system.blocking_calls import Worker
async def main():
    await briefly(Worker("disk").call(time.sleep, 600), 0.05)
asyncio.run(main())
"""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert time.monotonic() - began < 20


class Saves:
    """A trainer that saves step 20 when it is told to end. ``seen``: podwatch can read its process tree."""

    def __init__(self, world: World, *, seen: bool = True, done: bool = True) -> None:
        self.world, self.seen, self.done, self.living = world, seen, done, True

    async def tree(self, *, sweep: bool = False) -> Reading[tuple[object, ...]]:
        if not self.seen:
            return unobserved(SensorState.BLIND, 0.0, "reading the process tree hangs")
        return observed(("trainer",) if self.living else (), 0.0)

    def told(self) -> None:
        root = self.world.save(20)
        if not self.done:
            (root / "DONE").unlink()
        self.living = False


@dataclass
class Preempted:
    """A pod that has stored step 10 and is told to leave. ``order``: what happened."""

    world: World
    backup: Backup
    worker: Worker = field(default_factory=lambda: Worker("looks"))
    order: list[str] = field(default_factory=list)

    async def leave(self, kind: str, budget: Budget, trainer: Saves, gang: object = None) -> None:
        world, clock, order = self.world, SystemClock(), self.order
        emit = world.run.events.append
        rescans = Rescans(world.catalogue, self.worker, clock, emit, Announced(), seconds=10.0)
        parts = SimpleNamespace(
            recovery=SimpleNamespace(handle=trainer), gang=gang, backup=self.backup, run=SimpleNamespace(clock=clock),
            checkpoints=SimpleNamespace(rescans=rescans),
        )  # fmt: skip

        class Watched(Preemption):
            async def beat(self) -> None:
                order.append("preempted")

            async def end_training(self) -> None:
                order.append("SIGTERM")
                trainer.told()

        leaving = Watched(cast(Any, parts), cast(Any, None), "why", job=kind == "job")
        await leaving.run(budget, asyncio.sleep(0))


@pytest.fixture
async def preempted(tmp_path: Path) -> AsyncIterator[Preempted]:
    world = World(tmp_path / "pod", f"file://{tmp_path}/store", upload_gap=3600.0)
    records = CheckpointRecords(boot_id=boot_id())
    world.catalogue = Catalogue(
        world.run.layout, SystemClock(), settle=60.0, settle_weak=60.0, records=records, held_back=world.held
    )
    world.save(10)
    with hurrying(), children():
        backup = await world.start()
        made = Preempted(world, backup)
        world.catalogue.rescan(writers_ended=True)
        world.catalogue.rescan(writers_ended=True)
        backup.notify()
        await until(lambda: backup.status().last_step == 10)
        yield made
        await world.stop()
    made.worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "job"])
async def test_what_training_saves_at_sigterm_is_stored_within_the_grace(preempted: Preempted, kind: str) -> None:
    """Without the settle time and the upload gap: nothing writes any more, and nothing comes after it."""
    await preempted.leave(kind, Budget(60), Saves(preempted.world))
    assert preempted.world.newest() == 20
    assert preempted.world.stored() == {10, 20}
    assert preempted.order == (["preempted", "SIGTERM"] if kind == "plain" else ["SIGTERM", "preempted"])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("plain", "blind"), ("job", "nodes"), ("job", "cut off")])
async def test_a_save_that_can_still_change_or_was_cut_off_is_not_stored(
    preempted: Preempted, kind: str, how: str
) -> None:
    """Where podwatch cannot see whether all of its writers have ended, the settle time holds."""
    trainer = Saves(preempted.world, seen=how != "blind", done=how != "cut off")
    began = time.monotonic()
    budget = Budget(60 if how == "cut off" else 0.6)
    await preempted.leave(kind, budget, trainer, gang=object() if how == "nodes" else None)
    assert preempted.world.newest() == 10
    assert time.monotonic() - began < 30


async def test_a_verdict_is_recorded_although_training_takes_all_of_the_grace_to_end() -> None:
    budget, recorded = Budget(0.6), asyncio.Event()

    class Slow(Preemption):
        async def end_training(self) -> None: ...

        async def training_ended(self) -> None:
            await asyncio.sleep(60)

    async def record() -> None:
        await asyncio.sleep(0.2)
        recorded.set()

    leaving = Slow(cast(Any, SimpleNamespace(backup=None)), cast(Any, None), "why", job=True)
    await leaving.run(budget, record())
    assert recorded.is_set()
    began = time.monotonic()
    await leaving.run(Budget(0.1), asyncio.sleep(60))
    assert time.monotonic() - began < 20


def made(**changes: object) -> Settings:
    return Settings.model_validate({"run_id": "r", "trainer": {"output_dir": "/out"}, **changes})


def test_a_reload_names_what_waits_for_the_next_start() -> None:
    live = made(
        mode="observe", gpu={"hold": 5}, hang={"floor": 1500}, recovery={"budget_time": 60}, disk={"prune_to": "50%"}
    )
    assert waits_for_restart(made(), live) == ()
    later = made(gpu={"trainer": [1], "hold": 5}, sync={"connections": 4}, recovery={"end_grace": 9, "budget_time": 60})
    assert waits_for_restart(made(), later) == ("gpu.trainer", "sync.connections", "recovery.end_grace")


def test_a_reload_does_not_name_what_it_applies() -> None:
    rule = {"name": "oops", "pattern": "oops"}
    now = made(log_rules=[rule], training={"kl_above": 1})
    assert waits_for_restart(made(), now) == ()
    hook = {"name": "a", "on": ["checkpoint"], "command": ["true"]}
    later = made(log_rules=[rule], hooks=[hook], training={"metrics_file": "m.jsonl"})
    assert waits_for_restart(made(), later) == ("hooks", "training.metrics_file")


PARTLY = {
    "gpu.inference", "gpu.trainer",
    "sync.keep_last", "sync.keep_every", "nodes.rank", "nodes.count", "training.metrics_file",
    "inference.urls", "disk.capacity",
}  # fmt: skip
"""Of the sections by which podwatch judges, what a sensor or the syncer reads when it starts."""


def test_what_a_reload_gives_to_the_detectors_does_not_wait() -> None:
    old, followed = made(), []
    for key in known_keys():
        section, _, name = key.partition(".")
        if key in PARTLY or not name or "." in name or key == "trainer.layout":
            continue
        before = policies_from(old, max_steps=None)
        for other in (True, 0.123, 7, 77, "yes", "exit", "stop"):
            new = old.model_copy(update={section: getattr(old, section).model_copy(update={name: other})})
            try:
                changed = policies_from(new, max_steps=None) != before
            except (TypeError, AttributeError, ValueError):
                continue  # a value of another type than this setting has
            if changed:
                followed.append(key)
                assert not waits_for_restart(old, new), (key, other)
    assert {"inference.sleep", "training.stop", "hang.floor", "disk.on_full"} <= set(followed)
