"""While a claim of ours settles, data may leave; only the publication waits. Not while another pod is watched."""

import asyncio
import dataclasses

import pytest

from podwatch.domain.lease import Heartbeat, LeaseAction
from podwatch.policy.who_holds_the_run import Timing
from tests.sync.conftest import Run, World, until

pytestmark = pytest.mark.slow

MB = 1_000_000


def stored(world: World) -> int:
    return sum(len(world.journal.objects(step, save_id)) for step, save_id in world.journal.unfinished())


async def test_a_new_run_sends_at_once_and_publishes_when_the_claim_is_decided(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.timing = Timing(patience=0.6, claim_wait=10.0, poll=0.05)
    b2.write_set(5, size=11 * MB)
    b2.scan()
    syncer = await run(b2)
    await until(lambda: stored(b2) == 4)
    assert syncer.standing.act is LeaseAction.SETTLE
    assert b2.pointer() is None
    assert not b2.server.versions("manifest.json")
    before = b2.server.calls()["b2_upload_part"]
    await until(lambda: syncer.status().last_step == 5)
    assert b2.server.calls()["b2_upload_part"] == before, "nothing is sent twice"
    assert b2.names().count("upload-started") == 1
    assert b2.violations() == []


async def test_nothing_leaves_while_another_pod_is_watched(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5)
    b2.scan()
    first = await run(b2)
    await until(lambda: first.status().last_step == 5)
    await first.beat(Heartbeat())
    second = b2.other("second", writer_id="writer-2", timing=Timing(patience=1000.0, claim_wait=0.1, poll=0.05))
    second.write_set(10)
    second.scan()
    watching = await run(second)
    await until(lambda: watching.standing.act is LeaseAction.WATCH)
    await asyncio.sleep(0.5)
    assert "upload-started" not in second.names()
    assert not [v for v in b2.server.versions() if "/step_10/" in v["name"]]


async def test_a_claim_that_is_lost_stops_what_is_sent_ahead(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.timing = Timing(patience=0.6, claim_wait=1000.0, poll=0.05)
    b2.write_set(5, size=11 * MB)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=60, count=500)
    syncer = await run(b2)
    await until(
        lambda: (
            syncer.status().uploading_step == 5 and syncer._sender.running is not None and syncer._sender.running.pid
        )
    )
    assert syncer.session.lease is not None
    claims = syncer.session.lease._claims
    claims.decision = dataclasses.replace(claims.decision, act=LeaseAction.REFUSE, why_not="another pod was first")
    syncer.standing_changed()
    await until(lambda: syncer.status().uploading_step is None)
    assert b2.pointer() is None
    assert "upload-abandoned" not in b2.names()


@pytest.mark.parametrize("harm", ["written", "gone"])
async def test_a_set_that_changes_while_it_is_sent_ahead_is_abandoned(b2: World, run: Run, harm: str) -> None:
    assert b2.server is not None
    b2.timing = Timing(patience=0.6, claim_wait=1000.0, poll=0.05)
    root = b2.write_set(5, size=11 * MB)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=2, count=500)
    syncer = await run(b2)
    await until(lambda: syncer.status().uploaded_bytes > 0)
    if harm == "written":
        with (root / "model.bin").open("r+b") as file:
            file.write(b"other")
    else:
        (root / "model.bin").unlink()
    await until(lambda: "upload-abandoned" in b2.names())
    assert b2.pointer() is None


async def test_a_checkpoint_that_becomes_complete_meanwhile_is_sent_too(b2: World, run: Run) -> None:
    b2.timing = Timing(patience=0.6, claim_wait=1000.0, poll=0.05)
    b2.scan()
    syncer = await run(b2)
    await until(lambda: syncer.standing.act is LeaseAction.SETTLE)
    b2.write_set(5, size=11 * MB)
    b2.scan()
    syncer.notify()
    await until(lambda: stored(b2) == 4)
    assert b2.pointer() is None


async def test_after_an_abandoned_upload_the_next_checkpoint_is_published_once_the_claim_is_decided(
    b2: World, run: Run
) -> None:
    """The decision may come while the abandoned upload is being cleared away."""
    assert b2.server is not None
    b2.timing = Timing(patience=0.6, claim_wait=3.0, poll=0.05)
    root = b2.write_set(5, size=11 * MB)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=1, count=3)
    syncer = await run(b2)
    await until(lambda: syncer.status().uploaded_bytes > 0)
    with (root / "model.bin").open("r+b") as file:
        file.write(b"other")
    await until(lambda: "upload-abandoned" in b2.names())
    b2.write_set(10)
    b2.scan()
    syncer.notify()
    await until(lambda: syncer.status().last_step == 10)
    assert b2.violations() == []
