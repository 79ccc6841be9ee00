"""``sync.upload_gap``: between the starts of two uploads, whatever happens to podwatch meanwhile."""

import asyncio
import time
from pathlib import Path

import pytest

from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.sync.store_session import StoreSession
from podwatch.sync.syncer import BEGUN
from tests.sync.conftest import Run, World, until

pytestmark = pytest.mark.slow

GAP = 1000.0


@pytest.fixture
def pod(tmp_path: Path) -> World:
    world = World(tmp_path / "pod", f"file://{tmp_path}/store")
    world.settings = world.settings.model_copy(
        update={"sync": world.settings.sync.model_copy(update={"upload_gap": GAP})}
    )
    return world


async def test_the_gap_outlives_podwatch(pod: World, run: Run) -> None:
    pod.write_set(5, tiny=True)
    pod.scan()
    first = await run(pod)
    await until(lambda: first.status().last_step == 5)
    await first.stop()
    pod.write_set(10, tiny=True)
    pod.scan()
    second = await run(pod)
    await until(lambda: second.status().ok)
    await asyncio.sleep(0.3)
    assert second.status().uploading_step is None
    assert second.status().last_step == 5
    began = pod.journal.learned(BEGUN)
    await second.stop()
    pod.journal.learn(BEGUN, [began[0] - GAP, *began[1:]])  # as if so much time had passed
    third = await run(pod)
    await until(lambda: third.status().last_step == 10)


async def test_an_upload_that_was_interrupted_goes_on_at_once(pod: World, run: Run) -> None:
    pod.write_set(5, tiny=True)
    pod.scan()
    chosen = pod.catalogue.sets[0]
    pod.journal.learn(BEGUN, [time.time() - 1, chosen.step, chosen.save_id])
    syncer = await run(pod)
    await until(lambda: syncer.status().last_step == 5)


async def test_a_person_does_not_wait_for_it(pod: World, run: Run) -> None:
    pod.write_set(5, tiny=True)
    pod.scan()
    syncer = await run(pod)
    await until(lambda: syncer.status().last_step == 5)
    pod.write_set(10, tiny=True)
    pod.scan()
    await asyncio.wait_for(syncer.sync_now(), 60)
    assert syncer.status().last_step == 10


@pytest.mark.slow
async def test_the_last_checkpoint_of_a_run_does_not_wait_for_it(pod: World, run: Run) -> None:
    pod.write_set(5, tiny=True)
    pod.scan()
    syncer = await run(pod)
    await until(lambda: syncer.status().last_step == 5)
    pod.trains = True
    pod.write_set(10, tiny=True)
    pod.scan()
    syncer.run_ended()  # and started again: the gap holds
    await asyncio.sleep(0.1)
    assert syncer.status().last_step == 5
    pod.trains = False
    syncer.run_ended()
    await until(lambda: syncer.status().last_step == 10)


async def test_what_is_asked_for_while_another_set_is_finished_is_not_answered_by_that(
    pod: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, prune = asyncio.Event(), StoreSession.prune

    async def slowly(self: StoreSession, saved: PublishedSave) -> None:
        await finish.wait()
        await prune(self, saved)

    monkeypatch.setattr(StoreSession, "prune", slowly)
    pod.write_set(5, tiny=True)
    pod.scan()
    syncer = await run(pod)
    await until(lambda: syncer.status().last_step == 5)
    pod.write_set(10, tiny=True)
    pod.scan()
    asked = asyncio.ensure_future(syncer.sync_now())
    await asyncio.sleep(0)
    finish.set()
    await asyncio.wait_for(asked, 60)
    assert syncer.status().last_step == 10
