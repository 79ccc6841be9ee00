"""The lease of the run as the daemon keeps it: what is reported, when training must not start, a store that refuses."""

from dataclasses import replace
from typing import Any

from podwatch.domain.errors import ExitCode
from podwatch.domain.lease import Heartbeat, HolderState, LeaseAction
from podwatch.store.objects.errors import StoreOutage, StoreRefused
from tests.app.backup.backup_world import World, until
from tests.support.b2server import B2Server
from tests.support.starts import branched


async def test_the_last_holder_trains_without_the_store_and_others_wait(local: World, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreOutage("away", where="store")

    first = await local.start()
    await until(lambda: first.lease.holds)
    await local.stop()
    monkeypatch.setattr("podwatch.app.backup.connection.open_objects", fail)
    again = await local.start()
    await until(lambda: again.lease.error)
    assert again.lease.decision.act is LeaseAction.ASK
    assert again.lease.decision.why_not == "", "this pod held the run last"
    other = local.other("writer-2")
    backup = await other.start()
    await until(lambda: backup.lease.error)
    assert "training waits" in backup.lease.decision.why_not
    assert backup.status().locked_out is None, "an outage ends"
    await other.stop()


async def test_a_refusal_that_lasts_locks_a_new_pod_out_and_an_answer_lets_it_in(
    local: World, monkeypatch: Any
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreRefused("key", "unknown key", where="store", fix="x")

    monkeypatch.setattr("podwatch.app.backup.connection.open_objects", fail)
    local.timing = replace(local.timing, refusal=0.2)
    backup = await local.start()
    await until(lambda: backup.status().locked_out is not None)
    monkeypatch.undo()
    await until(lambda: backup.lease.holds)
    assert backup.status().locked_out is None


async def test_while_another_pod_lives_this_one_neither_sends_nor_writes_the_heartbeat(local: World) -> None:
    first = await local.start()
    await until(lambda: first.lease.holds)
    await first.beat(Heartbeat(), HolderState.RUNNING)
    other = local.other("writer-2")
    other.save(5)
    other.scan()
    second = await other.start()
    await until(lambda: second.lease.decision.act is LeaseAction.WATCH)
    before = (local.objects()["heartbeat.json"]).read_bytes()
    await second.beat(Heartbeat(), HolderState.RUNNING)
    assert local.objects()["heartbeat.json"].read_bytes() == before
    assert not second.lease.may_upload
    assert not [name for name in local.objects() if name.startswith("step_")]
    await until(lambda: "run-held-elsewhere" in other.names())
    await first.beat(Heartbeat(), HolderState.RELEASED)
    await local.stop()
    await until(lambda: other.newest() == 5)
    await until(lambda: "run-claimed" in other.names())
    await other.stop()


async def test_a_pod_that_takes_over_knows_what_the_other_one_published_meanwhile(local: World) -> None:
    """Its own listing is from before: the pointer would go back to a save that is older than the one it continues."""
    first, other = await local.start(), local.other("writer-2")
    await until(lambda: first.lease.holds)

    async def publish(step: int) -> None:
        await first.beat(Heartbeat(), HolderState.RUNNING)
        local.save(step)
        local.scan()
        await until(lambda: local.newest() == step)

    await publish(100)
    second = await other.start()
    await until(lambda: second.status().listed)
    await publish(200)
    await publish(300)
    await first.beat(Heartbeat(), HolderState.RELEASED)
    await local.stop()
    await until(lambda: second.lease.holds)
    other.edit(starts=branched(other.run.current.starts, "line-2", 200, wall=1.0))
    other.scan()
    await until(lambda: other.newest() == 200)
    await other.stop()


async def test_a_pod_that_does_not_stand_by_leaves_at_once(local: World) -> None:
    first = await local.start()
    await until(lambda: first.lease.holds)
    other = local.other("writer-2")
    other.stands_by = False
    second = await other.start()
    for _ in range(400):
        await first.beat(Heartbeat(), HolderState.RUNNING)
        if other.run.exits:
            break
        await other.clock.sleep(0.05)
    assert other.run.exits == [ExitCode.TRY_AGAIN]
    assert second.why_not_ours()
    await other.stop()


async def test_what_lost_the_run_is_said_once_and_stops_what_is_sent(local: World) -> None:
    first = await local.start()
    await until(lambda: first.lease.holds)
    await first.beat(Heartbeat(), HolderState.RUNNING)
    (local.objects()["heartbeat.json"].parent / "claims" / "2-aa").write_bytes(b"{}")
    local.clock.later += 300.0
    await first.beat(Heartbeat(), HolderState.RUNNING)
    await first.beat(Heartbeat(), HolderState.RUNNING)
    assert first.status().superseded
    assert local.names().count("superseded") == 1
    await until(lambda: not first.lease.holds)
    local.save(5)
    local.scan()
    await local.clock.sleep(0.05)
    assert not [name for name in local.objects() if name.startswith("step_")]


async def test_once_a_day_what_is_rewritten_keeps_one_version(b2: World, server: B2Server) -> None:
    """B2 keeps each: a heartbeat a minute, a verdict per attempt, ``latest.json`` per save."""
    backup = await b2.start()
    for step in (5, 10):
        b2.save(step)
        b2.scan()
        await backup.sync_now()
        await backup.beat(Heartbeat(), HolderState.RUNNING)
    store = b2.store()
    for text in (b"{}", b'{"run_id": "run"}'):
        store.put(b2.backup_keys.verdict, text)
    rewritten = ("heartbeat.json", "latest.json", "verdict.json")
    assert all(len(server.versions(name)) == 2 for name in rewritten)
    before = server.calls().get("b2_list_file_versions", 0)
    await backup.sweep_store()
    assert all(len(server.versions(name)) == 1 for name in rewritten)
    assert store.read(b2.backup_keys.verdict) == b'{"run_id": "run"}'
    assert b2.stored() == {5, 10}
    assert server.calls()["b2_list_file_versions"] - before <= 4, "these are paid for"
    assert backup.lease.holds
    store.close()


async def test_what_the_life_before_knew_is_read_from_its_heartbeat(local: World) -> None:
    """What the run has cost, and when its last digest was."""
    first = await local.start()
    await until(lambda: first.lease.holds)
    assert first.lease.earlier_beat is None
    await first.beat(Heartbeat(last_digest_at="2026-01-01T00:00:00Z"), HolderState.RELEASED)
    assert first.lease.earlier_beat is None, "its own says nothing new"
    await local.stop()
    other = local.other("writer-2")
    second = await other.start()
    await until(lambda: second.lease.holds)
    await second.beat(Heartbeat(), HolderState.RUNNING)
    assert second.lease.earlier_beat is not None
    assert second.lease.earlier_beat.said.writer_id == local.name
    await other.stop()
