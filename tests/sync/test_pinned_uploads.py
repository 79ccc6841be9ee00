"""At the end of the run the pinned checkpoints are stored, too: the disk can be destroyed afterwards."""

import asyncio
import shutil
from collections.abc import Mapping

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue, HeldBack
from podwatch.policy.lineage import EarlierSave
from podwatch.policy.uploads import PINNED
from podwatch.sync.syncer import Syncer
from podwatch.system.clock import SystemClock
from tests.sync.conftest import Run, World, until
from tests.sync.test_interrupted_uploads import MB, part_calls, published, sent_parts

pytestmark = pytest.mark.slow


async def started(world: World, run: Run, pins: Mapping[int, str]) -> Syncer:
    world.pinned = dict(pins)
    syncer = await run(world)
    await syncer.sync_now()
    return syncer


async def test_a_pinned_checkpoint_is_stored_once_the_run_has_ended(world: World, run: Run) -> None:
    for step in (5, 7, 10):
        world.write_set(step)
    world.scan()
    syncer = await started(world, run, {5: "best evaluation: acc = 0.61"})
    assert {step for step, _ in syncer.status().stored} == {10}, "during training only the newest uses the uplink"
    assert (await syncer.unstored()).pending == (f"{PINNED}5",)
    syncer.run_ended()
    await until(lambda: {step for step, _ in syncer.status().stored} == {5, 10})
    left = await syncer.unstored()
    assert (left.pending, left.refused) == ((), ())
    pointer = world.pointer()
    assert pointer is not None
    assert (pointer.step, pointer.seq) == (10, 1), "the pointer names the newest"
    assert syncer.status().last_step == 10
    assert published(world) == [10], "hooks for `published` read latest.json"
    assert world.violations() == []


async def test_not_while_a_trainer_runs(local: World, run: Run) -> None:
    """An operator has started training again."""
    for step in (5, 10):
        local.write_set(step)
    local.scan()
    syncer = await started(local, run, {5: "pinned by the operator"})
    local.trains = True
    syncer.run_ended()
    await asyncio.sleep(0.3)
    local.trains = False
    syncer.notify()
    await asyncio.sleep(0.3)
    assert {step for step, _ in syncer.status().stored} == {10}


async def test_one_that_cannot_be_stored_is_named_with_the_reason(local: World, run: Run) -> None:
    held = HeldBack()
    local.catalogue = Catalogue(local.layout, SystemClock(), settle=0.0, settle_weak=0.0, held_back=held)
    for step in (3, 5, 10):
        local.write_set(step)
    local.scan()
    syncer = await started(local, run, {3: "pinned by the operator", 5: "pinned by the operator"})
    left = next(s for s in local.catalogue.sets if s.step == 3)
    held.leave((EarlierSave(3, left.save_id, left.changed_wall, "line-0"),))
    local.scan()
    shutil.rmtree(local.output / "checkpoints" / "step_5")  # after the scan: the upload finds it gone
    syncer.run_ended()
    await until(lambda: "upload-abandoned" in local.names())
    unstored = await syncer.unstored()
    assert unstored.pending == ()
    assert [text.partition(" (")[0] for text in unstored.refused] == [f"{PINNED}5", f"{PINNED}3"]
    assert "earlier branch" in unstored.refused[1]


async def test_an_interrupted_upload_of_a_pinned_one_continues(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, size=22 * MB)
    b2.write_set(10, size=MB)
    b2.scan()
    syncer = await started(b2, run, {5: "pinned by the operator"})
    b2.server.fault("b2_upload_part", "slow", seconds=60, skip=3, count=500)
    syncer.run_ended()
    await until(lambda: sent_parts(b2) == 3)
    await asyncio.wait_for(syncer.stop(), 60)
    b2.server.admin("clear")
    before = part_calls(b2)
    again = b2.syncer()
    await again.start()
    await asyncio.sleep(0.5)
    again.run_ended()
    await until(lambda: {step for step, _ in again.status().stored} == {5, 10})
    assert part_calls(b2) - before == 2, "only what was missing"
    await again.stop()
