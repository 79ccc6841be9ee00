"""The lease of the run as the daemon keeps it: what is reported, when training must not start, a store that refuses."""

from dataclasses import replace
from typing import Any

from podwatch.domain.errors import ExitCode
from podwatch.domain.lease import Heartbeat, HolderState, LeaseAction
from podwatch.store.objects.errors import StoreOutage, StoreRefused
from tests.daemon.backup.backup_world import World, until


async def test_the_last_holder_trains_without_the_store_and_others_wait(local: World, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreOutage("away", where="store")

    first = await local.start()
    await until(lambda: first.holds)
    await local.stop()
    monkeypatch.setattr("podwatch.daemon.backup.connection.open_objects", fail)
    again = await local.start()
    await until(lambda: again.refused_lately)
    assert again.standing.act is LeaseAction.ASK
    assert again.standing.why_not == "", "this pod held the run last"
    other = local.other("writer-2")
    backup = await other.start()
    await until(lambda: backup.refused_lately)
    assert "training waits" in backup.standing.why_not
    assert backup.status().locked_out is None, "an outage ends"
    await other.stop()


async def test_a_refusal_that_lasts_locks_a_new_pod_out_and_an_answer_lets_it_in(
    local: World, monkeypatch: Any
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreRefused("key", "unknown key", where="store", fix="x")

    monkeypatch.setattr("podwatch.daemon.backup.connection.open_objects", fail)
    local.timing = replace(local.timing, refusal=0.2)
    backup = await local.start()
    await until(lambda: backup.status().locked_out is not None)
    monkeypatch.undo()
    await until(lambda: backup.holds)
    assert backup.status().locked_out is None


async def test_while_another_pod_lives_this_one_neither_sends_nor_writes_the_heartbeat(local: World) -> None:
    first = await local.start()
    await until(lambda: first.holds)
    await first.beat(Heartbeat(), HolderState.RUNNING)
    other = local.other("writer-2")
    other.save(5)
    other.scan()
    second = await other.start()
    await until(lambda: second.standing.act is LeaseAction.WATCH)
    before = (local.objects()["heartbeat.json"]).read_bytes()
    await second.beat(Heartbeat(), HolderState.RUNNING)
    assert local.objects()["heartbeat.json"].read_bytes() == before
    assert not second.may_upload
    assert not any(name.startswith("step_") for name in local.objects())
    await until(lambda: "run-held-elsewhere" in other.names())
    await first.beat(Heartbeat(), HolderState.RELEASED)
    await local.stop()
    await until(lambda: other.newest() == 5)
    await until(lambda: "run-claimed" in other.names())
    await other.stop()


async def test_a_pod_that_does_not_stand_by_leaves_at_once(local: World) -> None:
    first = await local.start()
    await until(lambda: first.holds)
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
    await until(lambda: first.holds)
    await first.beat(Heartbeat(), HolderState.RUNNING)
    (local.objects()["heartbeat.json"].parent / "claims" / "2-aa").write_bytes(b"{}")
    local.clock.later += 300.0
    await first.beat(Heartbeat(), HolderState.RUNNING)
    await first.beat(Heartbeat(), HolderState.RUNNING)
    assert first.status().superseded
    assert local.names().count("superseded") == 1
    local.save(5)
    local.scan()
    await local.clock.sleep(0.05)
    assert not any(name.startswith("step_") for name in local.objects())
