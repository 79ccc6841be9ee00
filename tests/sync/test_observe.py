"""Mode observe deletes nothing in the store."""

import time

import pytest

from podwatch.domain.run import IntentKind
from tests.sync.conftest import Run, World, until

DAY = 86400.0


async def published(world: World, run: Run, *steps: int) -> None:
    syncer = await run(world)
    for step in steps:
        world.write_set(step, size=1000)
        world.scan()
        syncer.notify()
        await until(lambda step=step: syncer.status().last_step == step)  # type: ignore[misc]
    await syncer.stop()


@pytest.mark.parametrize("mode", ["observe", "act"])
async def test_mode_observe_deletes_nothing_in_the_store(
    local: World, run: Run, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Old saves, replaced versions, saves without a manifest and unfinished uploads: all stay, also after a crash in
    the middle of a deletion."""
    local.settings = local.settings.model_copy(update={"sync": local.settings.sync.model_copy(update={"keep_last": 1})})
    await published(local, run, 1, 2, 3)
    store = local.store()
    store.put_bytes(local.keys.data(9, "gone", "p/a"), b"a")
    interrupted = next(p for p in local.journal.published() if p.step == 1)
    local.journal.open_intent(IntentKind.REMOTE_DELETE, {"step": "all", "save_id": "../.."})  # cannot be read
    local.journal.open_intent(IntentKind.REMOTE_DELETE, {"step": 1, "save_id": interrupted.save_id, "reason": "old"})
    old = [(p.step, p.save_id) for p in local.journal.published()][:2]
    monkeypatch.setattr("tests.sync.conftest.SystemClock.wall", lambda _self: time.time() + 2 * DAY)
    before = sorted(o.key for o in store.list(local.keys.root))
    local.observing = True
    syncer = await run(local)
    await until(lambda: syncer.standing.publish)
    local.observing = mode == "observe"  # a reload can change it
    await syncer.session.prune(local.journal.published()[-1])
    await syncer.sweep_store()
    left = {o.key for o in store.list(local.keys.root)}
    if mode == "observe":
        assert left >= {key for key in before if "/step_" in key}
        assert "remote-pruned" not in local.names()
    else:
        assert not [key for key in left if any(key.startswith(local.keys.save(*one)) for one in old)]
        assert not list(store.list(local.keys.step(9)))
        assert local.journal.open_intents(IntentKind.REMOTE_DELETE) == []
    assert local.violations() == []
