"""Uploads over a slow line: of checkpoints that the trainer removes meanwhile, and interrupted ones."""

import asyncio
import shutil
from functools import partial

import pytest

from podwatch.domain.finding import Severity
from tests.app.backup.backup_world import MB, World, until
from tests.support.b2server import B2Server

pytestmark = pytest.mark.slow
UPLOAD = "b2_upload_file"


def pieces(server: B2Server) -> int:
    return sum(".piece-" in version["name"] for version in server.versions())


async def test_a_trainer_that_keeps_one_checkpoint_gets_each_stored_that_is_begun(b2: World, server: B2Server) -> None:
    b2.save(5, 9 * MB)
    b2.scan()
    server.fault(UPLOAD, "slow", seconds=2, count=500)
    backup = await b2.start()
    for step in (5, 10, 15):
        await until(partial(lambda step: backup.status().uploading_step == step, step))
        assert any(name.startswith(f"{step}.") for name in b2.links())
        b2.save(step + 5, (9 if step < 15 else 1) * MB)
        b2.remove(step)
        b2.scan()
        await until(partial(lambda step: bool(backup.status().last_step == step), step))
        assert server.violations() == []
    await until(lambda: backup.status().last_step == 20)
    await until(lambda: b2.links() == b2.lists() == [])
    assert "upload-abandoned" not in b2.names()


async def test_room_for_the_next_save_comes_first(b2: World, server: B2Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only podwatch still has is released when the disk gets short; two lost in a row are critical."""
    short = [False]
    monkeypatch.setattr("podwatch.app.backup.outbox.Outbox._lacks_room", lambda *_: short[0])
    server.fault(UPLOAD, "slow", seconds=5, count=500)
    b2.save(5, 12 * MB)
    b2.scan()
    backup = await b2.start()
    for lost, step in enumerate((5, 10), 1):
        await until(partial(lambda step: backup.status().uploading_step == step and b2.links() != [], step))
        short[0] = True
        await asyncio.sleep(0.3)
        assert backup.status().uploading_step == step, "the trainer has it too: to release it would free nothing"
        b2.save(step + 5, 12 * MB)
        b2.remove(step)
        await until(partial(lambda lost: b2.names().count("upload-abandoned") == lost, lost))
        assert not any(name.startswith(f"{step}.") for name in b2.links())
        short[0] = False
        b2.scan()
    assert b2.inventory().pointers == ()
    assert server.violations() == []


async def test_two_that_the_trainer_changed_in_a_row_are_critical(b2: World, server: B2Server) -> None:
    """A link shares its file with the trainer's name: what is written into is another save."""
    server.fault(UPLOAD, "slow", seconds=3, count=500)
    backup = await b2.start()
    for lost, step in enumerate((5, 10), 1):
        root = b2.save(step, 9 * MB)
        b2.scan()
        await until(partial(lambda step: backup.status().uploading_step == step, step))
        with (root / "model.bin").open("r+b") as file:
            file.write(b"other")
        shutil.rmtree(root)
        await until(partial(lambda lost: b2.names().count("upload-abandoned") == lost, lost))
        b2.scan()
    assert [event.severity for event in b2.events("upload-abandoned")][-1] is Severity.CRITICAL
    assert b2.inventory().pointers == ()
    await until(lambda: b2.links() == [])


async def test_an_interrupted_upload_continues_with_what_is_missing(b2: World, server: B2Server) -> None:
    b2.save(5, 28 * MB)
    b2.scan()
    server.fault(UPLOAD, "slow", seconds=60, skip=5, count=500)  # the claim, the intent, and some pieces pass
    await b2.start()
    lists = b2.directory / "state" / "sent"
    noted = lambda: sum(path.read_text().count(".piece-") for path in lists.glob("*.sent"))  # noqa: E731
    await until(lambda: 2 <= pieces(server) == noted())  # one that was stored, but is not noted yet, is sent again
    await b2.stop()
    server.admin("clear")
    before = pieces(server)
    assert 2 <= before < 6
    backup = await b2.start()
    await until(lambda: backup.status().last_step == 5)
    assert pieces(server) == 6, "no piece is sent twice"
    assert len(b2.inventory().saves) == 1
    assert server.violations() == []


async def test_a_disk_that_must_be_freed_ends_the_upload(b2: World, server: B2Server) -> None:
    b2.save(5, 9 * MB)
    b2.scan()
    server.fault(UPLOAD, "slow", seconds=3, count=500)
    backup = await b2.start()
    await until(lambda: backup.status().uploading_step == 5)
    await backup.abandon(5)
    assert b2.links() == []
    assert backup.status().uploading_step is None
    await asyncio.sleep(0.3)
    assert b2.inventory().pointers == ()
