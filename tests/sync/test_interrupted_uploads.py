"""What was begun is finished: after a restart of podwatch, an outage, and where the trainer removes it meanwhile.

Real child processes and the B2 server; each interruption comes while a part is on its way.
"""

import asyncio
import contextlib
import shutil
import sqlite3

import pytest

from podwatch.journal.journal import Journal
from podwatch.sync.upload.keep_files_until_sent import Holder
from podwatch.system.own_directories import Workspace
from tests.sync.conftest import Run, World, until
from tests.sync.test_keep_files_until_sent import ours

pytestmark = pytest.mark.slow

MB = 1_000_000


def sent_parts(world: World) -> int:
    return sum(len(begun.parts) for begun in world.journal.begun().values())


async def interrupted(world: World, run: Run, *, size: int = 22 * MB, parts: int = 3) -> None:
    """Step 5 is on its way, ``parts`` of its parts (5 MB) are in the store, and podwatch has ended."""
    assert world.server is not None
    world.write_set(5, size=size)
    world.scan()
    world.server.fault("b2_upload_part", "slow", seconds=60, skip=parts, count=500)
    first = await run(world)
    await until(lambda: sent_parts(world) == parts)
    await asyncio.wait_for(first.stop(), 60)
    world.server.admin("clear")
    world.journal = Journal.open(world.directory / "state" / "journal.sqlite")
    world.events.clear()


def published(world: World) -> list[int]:
    return [int(e.fields["step"]) for e in world.events if e.name == "published"]


def part_calls(world: World) -> int:
    assert world.server is not None
    return world.server.calls().get("b2_upload_part", 0)


async def test_the_interrupted_one_is_published_before_the_newest(b2: World, run: Run) -> None:
    await interrupted(b2, run)
    b2.write_set(10, size=22 * MB)
    b2.scan()
    before = part_calls(b2)
    syncer = await run(b2)
    await until(lambda: published(b2) == [5, 10])
    assert part_calls(b2) - before == 2 + 5, "only what was missing of step 5"
    assert b2.pointer() is not None
    assert syncer.status().last_step == 10
    assert b2.violations() == []
    assert ours(b2) == []


async def test_who_asks_for_the_newest_gets_it_after_the_interrupted_one(b2: World, run: Run) -> None:
    await interrupted(b2, run)
    b2.write_set(10, size=22 * MB)
    b2.scan()
    syncer = await run(b2)
    await asyncio.wait_for(syncer.sync_now(), 60)
    assert published(b2) == [5, 10]


async def test_what_is_longer_than_the_newest_is_given_up_and_cancelled(b2: World, run: Run) -> None:
    assert b2.server is not None
    await interrupted(b2, run, parts=1)
    assert any(v["action"] == "start" for v in b2.server.versions())
    b2.write_set(10, size=6 * MB)
    b2.scan()
    await run(b2)
    await until(lambda: published(b2) == [10])
    assert [v for v in b2.server.versions() if v["action"] == "start"] == [], "unfinished parts cost"
    assert b2.journal.unfinished() == []
    assert [e.fields["step"] for e in b2.events if e.name == "upload-abandoned"] == [5]


async def test_what_the_trainer_has_removed_is_given_up_and_cancelled(b2: World, run: Run) -> None:
    assert b2.server is not None
    await interrupted(b2, run)
    shutil.rmtree(b2.output / "checkpoints" / "step_5")
    b2.write_set(10, size=6 * MB)
    b2.scan()
    await run(b2)
    await until(lambda: published(b2) == [10])
    assert [v for v in b2.server.versions() if v["action"] == "start"] == []


async def test_it_is_held_while_it_is_finished(b2: World, run: Run) -> None:
    """A trainer that keeps one set removes it in the middle, and podwatch is restarted once more."""
    assert b2.server is not None
    await interrupted(b2, run)
    b2.write_set(10, size=22 * MB)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=60, skip=1, count=500)
    second = await run(b2)
    await until(lambda: sent_parts(b2) == 4)
    assert any("uploading/5." in name for name in ours(b2))
    shutil.rmtree(b2.output / "checkpoints" / "step_5")
    await asyncio.wait_for(second.stop(), 60)
    b2.server.admin("clear")
    b2.journal = Journal.open(b2.directory / "state" / "journal.sqlite")
    b2.scan()
    before = part_calls(b2)
    await run(b2)
    await until(lambda: published(b2) == [5, 10])
    assert part_calls(b2) - before == 1 + 5
    assert b2.violations() == []
    await until(lambda: ours(b2) == [])


async def test_a_kill_after_the_pointer_leaves_no_links(b2: World, run: Run) -> None:
    """The pointer was written, the journal not yet: the next podwatch finds the publication and releases the links."""
    await interrupted(b2, run)
    second = await run(b2)
    await until(lambda: published(b2) == [5])
    await asyncio.wait_for(second.stop(), 60)
    database = b2.directory / "state" / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(database)) as journal, journal:
        journal.execute("DELETE FROM published")
        journal.execute("UPDATE intents SET state = 'open' WHERE kind = 'publish'")
    b2.journal = Journal.open(database)
    b2.scan()
    holder = Holder(Workspace(b2.output), b2.journal, 0.0)
    assert holder.hold(b2.catalogue.contents(5), b2.identity().lineage) is not None
    third = await run(b2)
    await until(lambda: third.status().last_step == 5)
    await until(lambda: ours(b2) == [] and b2.journal.open_intents() == [])
    assert published(b2) == [5], "not once more"


async def test_an_outage_does_not_let_go_of_it(b2: World, run: Run) -> None:
    """The store fails in the middle for longer than one try, the trainer removes the set meanwhile."""
    assert b2.server is not None
    await interrupted(b2, run)
    b2.server.fault("b2_upload_part", "status", status=503, code="service_unavailable", count=10_000)
    await run(b2)
    await until(lambda: any("uploading/5." in name for name in ours(b2)))
    await until(lambda: "sync-failed" in b2.names())
    b2.write_set(10, size=22 * MB)
    shutil.rmtree(b2.output / "checkpoints" / "step_5")
    b2.scan()
    b2.server.admin("clear")
    await until(lambda: 10 in published(b2))
    assert published(b2) == [5, 10]
    assert b2.violations() == []


@pytest.mark.parametrize("times", [4])
async def test_restarts_in_a_row_lead_to_a_publication(b2: World, run: Run, times: int) -> None:
    """Each podwatch lives for one part, and a new save waits at each start."""
    assert b2.server is not None
    await interrupted(b2, run, parts=1)
    for number in range(1, times):
        b2.write_set(5 + 5 * number, size=22 * MB)
        b2.scan()
        b2.server.fault("b2_upload_part", "slow", seconds=60, skip=1, count=500)
        syncer = await run(b2)
        await until(lambda number=number: sent_parts(b2) == number + 1 or published(b2))  # type: ignore[misc]
        await asyncio.wait_for(syncer.stop(), 60)
        b2.server.admin("clear")
        b2.journal = Journal.open(b2.directory / "state" / "journal.sqlite")
    b2.scan()
    await run(b2)
    await until(lambda: bool(published(b2)))
    assert published(b2)[0] == 5
    assert b2.violations() == []
