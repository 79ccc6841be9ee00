"""What the backup deletes from the store, and when it deletes nothing: modes, pins, other pods, crashes."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from podwatch.store.keys import RunKeys
from tests.app.backup.backup_world import World, until
from tests.support.starts import branched, guarded

KEYS = RunKeys("run")


async def stored(world: World, *steps: int) -> Any:
    """Each stored two days after the one before."""
    backup = world.backups[0] if world.backups else await world.start()
    for step in steps:
        world.pass_days(2)
        world.save(step)
        world.scan()
        await backup.sync_now()
        await until(lambda: world.links() == [])
    return backup


@pytest.fixture
async def old(tmp_path: Path) -> Any:
    world = World(tmp_path / "pod", f"file://{tmp_path}/store", keep_last=1)
    yield world
    await world.stop()


def unfinished(world: World, step: int) -> Path:
    """An upload that another pod began."""
    source = next(path for name, path in world.objects().items() if name.endswith("/intent.json"))
    folder = source.parents[2] / f"step_{step}" / "gone"
    folder.mkdir(parents=True)
    name = source.parent.name
    data = source.read_text().replace(name, "gone").replace(f'"step": {_step(source)}', f'"step": {step}')
    data = data.replace(f'"step":{_step(source)}', f'"step":{step}')
    (folder / "intent.json").write_text(data)
    return folder


def _step(intent: Path) -> str:
    return intent.parents[1].name.removeprefix("step_")


async def test_what_the_store_would_not_keep_is_surplus_and_is_not_sent(tmp_path: Path) -> None:
    """Checkpoints that uploads have skipped or retention has removed: the disk plan deletes them as if stored."""
    world = World(tmp_path / "pod", f"file://{tmp_path}/store", keep_last=2)
    try:
        for step in (1, 2, 3):  # nobody uploads yet
            world.save(step)
        world.scan()
        backup = await world.start()
        await until(lambda: world.stored() == {3})
        assert backup.status().surplus == frozenset(), "the store would keep one more"
        world.edit(pins={1: "why"})
        await stored(world, 4, 5)
        found = {one.step: one.save_id for one in backup.sets}
        await until(lambda: world.stored() == {4, 5})
        await until(lambda: backup.status().surplus == {(2, found[2]), (3, found[3])})  # 3 was stored, and removed
        world.edit(pins={})
        assert backup.status().surplus == {(n, found[n]) for n in (1, 2, 3)}
        assert backup.status().uploading_step is None
        assert world.stored() == {4, 5}
        world.edit(starts=branched(guarded("line-1"), "line-2", 2, wall=time.time()))
        assert backup.status().surplus == frozenset(), "newer saves of a line that was left replace nothing"
    finally:
        await world.stop()


async def test_the_newest_on_this_pod_is_never_surplus(tmp_path: Path) -> None:
    """The store has newer ones of the same line, but training may have begun again: what it saves is sent."""
    world = World(tmp_path / "pod", f"file://{tmp_path}/store", keep_last=1)
    try:
        await stored(world, 10, 20)
        world.remove(20)
        world.remove(10)
        world.save(5)
        world.scan()
        backup = world.backups[0]
        await until(lambda: 5 in world.stored())
        assert backup.status().surplus == frozenset()
        assert world.newest() == 20
    finally:
        await world.stop()


async def test_a_publication_removes_what_retention_does_not_keep(old: World) -> None:
    """A save stays for six hours after another replaced it, so the one before the newest stays, too."""
    backup = await stored(old, 1, 2, 3, 4)
    await until(lambda: old.stored() == {3, 4})
    assert {event.fields["step"] for event in old.events("remote-pruned")} == {1, 2}
    assert [one.step for one in backup.status().checkpoints] == [3, 4]


async def test_saves_of_the_pod_before_are_removed_as_its_own(old: World) -> None:
    await stored(old, 1, 2)
    await old.stop()
    new = World(old.directory.parent / "writer-2", old.url, name="writer-2", keep_last=1)
    new.clock = old.clock
    try:
        backup = await new.start()
        await until(lambda: backup.lease.holds)
        assert new.stored() == {1, 2}, "nothing of them before this pod has stored a save"
        await stored(new, 3)
        await until(lambda: new.stored() == {2, 3})
        await stored(new, 4)
        await until(lambda: new.stored() == {3, 4})
    finally:
        await new.stop()


@pytest.mark.parametrize("mode", ["observe", "act"])
async def test_mode_observe_deletes_nothing_in_the_store(old: World, mode: str) -> None:
    """Old saves, unfinished uploads, temporary objects: all stay. A reload can change the mode."""
    old.run.mode = "observe"
    backup = await stored(old, 1, 2, 3)
    folder = unfinished(old, 9)
    root = Path(old.url.removeprefix("file://")) / KEYS.root
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp" / "clock-1").write_text("x")
    old.pass_days(2)
    (root / "verdict.json").write_text("{}")  # it shows the store's present time
    before = set(old.objects())
    old.run.mode = mode
    await old.retention.prune(())
    await backup.sweep_store()
    if mode == "observe":
        assert set(old.objects()) >= before
        assert "remote-pruned" not in old.names()
        assert not old.retention.tidied
    else:
        assert old.stored() == {3}
        assert not folder.exists()
        assert not (root / "tmp" / "clock-1").exists()


async def test_nothing_is_deleted_while_writing_is_withheld(old: World) -> None:
    old.run.mode = "observe"
    await stored(old, 1, 2, 3)
    old.run.mode, old.run.blocked = "act", "the state directory is not writable"
    assert not await old.retention.prune(())
    assert old.stored() == {1, 2, 3}


async def test_pinned_saves_stay_and_the_pin_is_kept_beside_them(old: World) -> None:
    await stored(old, 1)
    old.edit(pins={1: "best evaluation"})
    await stored(old, 2, 3, 4)
    assert old.stored() == {1, 3, 4}
    assert any(name.startswith("step_1/") and name.endswith("/pinned") for name in old.objects())
    old.edit(pins={})
    await stored(old, 5)
    await until(lambda: not any(name.endswith("/pinned") for name in old.objects()))
    await stored(old, 6)
    await until(lambda: old.stored() == {5, 6})


async def test_the_next_pod_takes_the_pins_over(old: World) -> None:
    await stored(old, 1)
    old.edit(pins={1: "best evaluation"})
    await stored(old, 2)
    await until(lambda: any(name.endswith("/pinned") for name in old.objects()))
    await old.stop()
    claims = Path(old.url.removeprefix("file://")) / KEYS.root / "claims"
    for path in claims.iterdir():
        path.unlink()
    (claims.parent / "heartbeat.json").unlink(missing_ok=True)
    other = old.other("writer-2")
    backup = await other.start()
    await until(lambda: backup.lease.holds and other.run.current.pins)
    assert set(other.run.current.pins) == {1}
    await asyncio.sleep(0.2)
    assert any(name.endswith("/pinned") for name in old.objects()), "and removes none of them"
    await other.stop()


async def test_what_this_pod_uses_stays(old: World) -> None:
    backup = await stored(old, 1, 2, 3)
    old.run.current = old.run.current.__class__("run", starts=old.run.current.starts, writer_id=old.name, wanted=2)
    old.pass_days(2)
    await stored(old, 4, 5)
    assert old.stored() >= {2, 5}
    assert backup.status().last_step == 5


async def test_what_another_pod_began_stays_for_a_day(old: World) -> None:
    await stored(old, 1)
    folder = unfinished(old, 9)
    await stored(old, 2)
    await until(lambda: not folder.exists())
    folder = unfinished(old, 9)
    await old.retention.prune(())
    assert folder.exists()


async def test_a_pod_that_lost_the_run_deletes_nothing(old: World) -> None:
    old.run.mode = "observe"
    await stored(old, 1, 2, 3)
    old.run.mode = "act"
    claims = Path(old.url.removeprefix("file://")) / KEYS.root / "claims"
    (claims / "2-aa").write_bytes(b"{}")
    old.pass_days(2)
    (claims.parent / "verdict.json").write_text("{}")
    assert not await old.retention.prune(())
    assert old.stored() == {1, 2, 3}


async def test_a_store_that_refuses_to_delete_is_a_warning(old: World, monkeypatch: pytest.MonkeyPatch) -> None:
    old.run.mode = "observe"
    backup = await stored(old, 1, 2, 3)
    old.retention.tidied = True  # the backup itself removes nothing meanwhile
    old.run.mode = "act"

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr("podwatch.store.objects.directory.os.unlink", refuse)
    await old.retention.prune(())
    monkeypatch.undo()
    (warning,) = backup.status().warnings
    assert "old checkpoints" in warning
    assert old.stored() == {1, 2, 3}
    await old.retention.prune(())
    assert backup.status().warnings == ()
    assert old.stored() == {2, 3}


async def test_when_the_free_calls_of_a_day_are_used_up_old_saves_stay(old: World) -> None:
    old.run.mode = "observe"
    backup = await stored(old, 1, 2, 3)
    old.run.mode = "act"
    backup.connection.budget.limit = 1  # none is left at any time of the day, whose end asks for nothing in reserve
    assert not await old.retention.prune(())
    assert backup.status().warnings
    assert old.stored() == {1, 2, 3}
    old.save(4)
    old.scan()
    await backup.sync_now()
    assert old.newest() == 4, "a publication never waits"


async def test_what_a_killed_podwatch_left_to_remove_goes_at_the_next_start(old: World) -> None:
    old.run.mode = "observe"
    await stored(old, 1, 2, 3)
    await old.stop()
    old.pass_days(2)
    old.run.mode = "act"
    (Path(old.url.removeprefix("file://")) / KEYS.root / "latest.json").touch()
    await old.start()
    await until(lambda: old.stored() == {3})
