"""A pod with an empty state directory takes over the saves of the pod before it: retention judges them too."""

import time

import pytest

from podwatch.domain.lease import HandedOverSaves, Heartbeat, HolderState, pins_of
from podwatch.domain.run import IntentKind
from podwatch.sync.syncer import Syncer
from tests.sync.conftest import Run, World, until

pytestmark = pytest.mark.slow

DAY = 86400.0
BEST = {2: "the best"}


async def save(world: World, syncer: Syncer, *steps: int) -> None:
    for step in steps:
        world.write_set(step, size=1000)
        world.scan()
        syncer.notify()
        await until(lambda step=step: syncer.status().last_step == step)  # type: ignore[misc]
        await until(syncer.session.idle.is_set)


async def beat(world: World, syncer: Syncer, state: HolderState = HolderState.RUNNING) -> None:
    """As the daemon does."""
    session, lease = syncer.session, syncer.session.lease
    assert lease is not None
    for step, reason in lease.foreign_pins.items():
        world.pinned[step] = reason
    if lease.foreign_pins:
        lease.took_over_pins()
    session.take_over_saves()
    known = session.known_saves()
    saves = None if known is None else HandedOverSaves.of(known)
    await syncer.beat(Heartbeat(pins=pins_of(world.pins()), saves=saves), state)


def steps(world: World) -> set[int]:
    store = world.store()
    found = {int(o.key.split("step_")[1].split("/")[0]) for o in store.list(f"{world.keys.root}/step_")}
    store.close()
    return found


async def left_behind(world: World, run: Run, monkeypatch: pytest.MonkeyPatch, **second: object) -> World:
    """The next pod, two days after the first one stored steps 1 to 5 and left."""
    syncer = await run(world)
    await save(world, syncer, 1, 2, 3, 4, 5)
    world.pinned[2] = BEST[2]
    await beat(world, syncer, HolderState.RELEASED)
    await syncer.stop()
    assert steps(world) == {1, 2, 3, 4, 5}
    monkeypatch.setattr("podwatch.system.clock.SystemClock.wall", lambda _self: time.time() + 2 * DAY)
    return world.other("pod2", writer_id="writer-2", keep_last=1, **second)


async def test_saves_of_the_pod_before_are_deleted_as_its_own(
    local: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = await left_behind(local, run, monkeypatch)
    fetched = next(p.save_id for p in local.journal.published() if p.step == 3)
    second.journal.open_intent(IntentKind.RESTORE, {"step": 3, "save_id": fetched, "staging": []})
    syncer = await run(second)
    await until(lambda: syncer.standing.publish)
    await save(second, syncer, 6)
    assert syncer.session.lease is not None
    assert syncer.session.lease.foreign_pins == BEST
    assert syncer.session.earlier == ()
    assert steps(local) == {1, 2, 3, 4, 5, 6}, "nothing is judged before the pins are taken over"
    await beat(second, syncer)
    assert [s.step for s in syncer.session.earlier] == [1, 2, 3, 4, 5]
    await save(second, syncer, 7)
    await until(lambda: steps(local) == {2, 3, 4, 5, 6, 7})  # 5 has replaced 4, for all that this pod saw, just now
    monkeypatch.setattr("podwatch.system.clock.SystemClock.wall", lambda _self: time.time() + 4 * DAY)
    await save(second, syncer, 8)
    await until(lambda: steps(local) == {2, 3, 7, 8})  # pinned, being fetched, replaced just now
    await until(lambda: [s.step for s in syncer.session.earlier] == [2, 3])
    assert second.violations() == []
    assert [e.fields["step"] for e in second.events if e.name == "remote-pruned"] == [1, 4, 5, 6]
    await beat(second, syncer)
    await syncer.stop()

    again = await run(second)
    await until(lambda: again.standing.publish)
    assert [s.step for s in again.session.earlier] == [2, 3], "a restart of podwatch knows them"
    again.session.take_over_saves()
    assert [s.step for s in again.session.earlier] == [2, 3]
    await beat(second, again, HolderState.RELEASED)
    await again.stop()

    third = local.other("pod3", writer_id="writer-3")
    last = await run(third)
    await until(lambda: last.standing.publish)
    await beat(third, last)
    assert [s.step for s in last.session.earlier] == [2, 3, 7, 8]
    assert third.pins() == BEST
    await last.stop()
    third.journal.close()
    second.journal.close()


async def test_nothing_of_them_is_deleted_before_this_pod_has_stored_a_save(
    local: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = await left_behind(local, run, monkeypatch)
    syncer = await run(second)
    await until(lambda: syncer.standing.publish)
    await syncer.session.ready()  # it finds what the pointer names
    await beat(second, syncer)
    assert len(syncer.session.earlier) == 5
    await syncer.session.prune(second.journal.published()[-1])
    assert steps(local) == {1, 2, 3, 4, 5}
    await syncer.stop()
    second.journal.close()


@pytest.mark.parametrize("why", ["observe", "no list", "unlisted"])
async def test_saves_stay_that_retention_must_not_judge(
    local: World, run: Run, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    second = await left_behind(local, run, monkeypatch, observing=why == "observe")
    store = local.store()
    data = store.get_bytes(local.keys.heartbeat)
    assert data is not None
    if why == "no list":
        store.put_bytes(local.keys.heartbeat, data.replace(b'"saves"', b'"others"'))
    if why == "unlisted":
        store.put_bytes(local.keys.heartbeat, data.replace(b'"seq": 5', b'"seq": 50'))
    syncer = await run(second)
    await until(lambda: syncer.standing.publish)
    await beat(second, syncer)
    await save(second, syncer, 6, 7)
    assert steps(local) == {1, 2, 3, 4, 5, 6, 7}
    await syncer.stop()
    second.journal.close()


async def test_a_pod_that_comes_back_believes_what_the_pod_meanwhile_lists(
    local: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own records are from before; where the list is missing, it hands over no order that can be wrong."""
    second = await left_behind(local, run, monkeypatch)
    syncer = await run(second)
    await until(lambda: syncer.standing.publish)
    await beat(second, syncer)
    await save(second, syncer, 6)
    await beat(second, syncer, HolderState.RELEASED)
    await syncer.stop()
    back = await run(local)
    await until(lambda: back.standing.publish)
    await back.session.ready()
    await beat(local, back)
    listed = [s.step for s in back.session.earlier]
    assert listed[-2:] == [5, 6]
    known = back.session.known_saves()
    assert known is not None
    assert (known.generation, known.seq, known.saves[-1].step) == (3, 6, 6)
    await save(local, back, 7)
    await beat(local, back, HolderState.RELEASED)
    await back.stop()

    store = local.store()
    data = store.get_bytes(local.keys.heartbeat)
    assert data is not None
    store.put_bytes(local.keys.heartbeat, data.replace(b'"saves"', b'"others"'))
    again = await run(second)
    await until(lambda: again.standing.publish)
    await again.session.ready()
    await beat(second, again)
    assert again.session.earlier == ()
    known = again.session.known_saves()
    assert known is not None
    assert [s.step for s in known.saves] == [7]
    await again.stop()
    second.journal.close()
