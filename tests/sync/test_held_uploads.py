"""Uploads of sets that the trainer removes meanwhile, with the whole upload room and real processes."""

import asyncio
import shutil
from functools import partial

import pytest

from podwatch.domain.finding import Severity
from podwatch.domain.run import IntentKind
from podwatch.sync.upload import uploader
from podwatch.sync.upload.uploader import OUTRUN
from tests.sync.conftest import Run, World, until
from tests.sync.test_keep_files_until_sent import ours

pytestmark = pytest.mark.slow

MB = 1_000_000


async def test_a_trainer_that_keeps_one_set_gets_every_set_stored_that_is_begun(b2: World, run: Run) -> None:
    """keep_last 1 and a slow line: the first set is lost, which is learned; those after it are sent to their end."""
    assert b2.server is not None
    first = b2.write_set(5, size=9 * MB)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=6, count=500)
    syncer = await run(b2)
    await until(lambda: syncer.status().uploaded_bytes > 0)
    b2.write_set(10, size=9 * MB)
    shutil.rmtree(first)  # as its retention does, right after the save
    b2.scan()
    await until(lambda: "upload-abandoned" in b2.names())
    b2.server.admin("clear")
    b2.server.fault("b2_upload_part", "slow", seconds=2, count=500)

    def held_and_sent(step: int) -> bool:
        held = any(f"uploading/{step}." in name for name in ours(b2))
        return held and syncer.status().uploading_step == step and syncer.status().uploaded_bytes > 0

    for step in (10, 15):
        await until(partial(held_and_sent, step))
        newer = b2.write_set(step + 5, size=9 * MB if step == 10 else MB)
        shutil.rmtree(newer.with_name(f"step_{step}"))
        b2.scan()
        await until(partial(lambda step: bool(syncer.status().last_step == step), step))
        assert b2.violations() == []
    await until(lambda: syncer.status().last_step == 20)
    await until(lambda: ours(b2) == [])
    assert b2.names().count("upload-abandoned") == 1
    assert b2.journal.open_intents(IntentKind.HOLD) == []


async def test_room_for_the_next_save_comes_first(b2: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only podwatch still has is let go when the disk gets short; two lost in a row are critical."""
    assert b2.server is not None
    monkeypatch.setattr(uploader, "HELD_LOOK", 0.05)
    free = [1 << 40]
    monkeypatch.setattr("podwatch.sync.upload.keep_files_until_sent.free_bytes", lambda _: free[0])
    b2.journal.learn(OUTRUN, True)
    b2.server.fault("b2_upload_part", "slow", seconds=5, count=500)  # each is let go long before
    b2.write_set(5, size=12 * MB)
    b2.scan()
    syncer = await run(b2)
    for step in (5, 10):
        await until(
            partial(
                lambda step: bool(syncer.status().uploading_step == step and any(f"/{step}." in n for n in ours(b2))),
                step,
            )
        )
        free[0] = 1 * MB  # short, but the trainer has it too: letting go would free nothing
        await asyncio.sleep(0.3)
        assert syncer.status().uploading_step == step
        b2.write_set(step + 5, size=12 * MB)
        shutil.rmtree(b2.output / "checkpoints" / f"step_{step}")
        await until(partial(lambda step: bool(b2.names().count("upload-abandoned") == step // 5), step))
        assert not any(f"/{step}." in name for name in ours(b2))
        free[0] = 1 << 40
        b2.scan()
        syncer.notify()
    assert [e.severity for e in b2.events if e.name == "upload-abandoned"][-1] is Severity.CRITICAL


async def test_a_held_set_that_is_written_into_is_void(b2: World, run: Run) -> None:
    """A link shares its file with the trainer's name: what is written into is another set."""
    assert b2.server is not None
    b2.journal.learn(OUTRUN, True)
    root = b2.write_set(5, size=9 * MB)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=6, count=500)
    syncer = await run(b2)
    await until(lambda: syncer.status().uploaded_bytes > 0)
    with (root / "model.bin").open("r+b") as file:
        file.write(b"other")
    shutil.rmtree(root)
    await until(lambda: "upload-abandoned" in b2.names())
    assert b2.pointer() is None
    await until(lambda: ours(b2) == [])
