"""The backup as a whole, over a real disk and store: what is stored, when, and what the store alone remembers."""

import asyncio
import errno
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.app.backup.outbox import Outbox, OutgoingSave, outgoing_files
from podwatch.app.backup.upload_queue import BEGUN
from podwatch.checkpoints.second_writer import Span
from podwatch.domain.errors import HostError
from podwatch.journal.journal import Journal
from podwatch.store.publish import LeaseLost
from podwatch.store.uploads import PINNED
from podwatch.system.procfs import boot_id
from tests.app.backup.backup_world import MB, World, until
from tests.support.starts import branched, guarded


async def test_the_newest_is_stored_and_what_was_kept_for_it_is_gone(local: World) -> None:
    local.save(5)
    local.save(10)
    local.scan()
    backup = await local.start()
    await until(lambda: "published" in local.names())
    assert (local.stored(), local.newest()) == ({10}, 10)
    await until(lambda: local.links() == local.lists() == [])
    await until(lambda: backup.status().last_step == 10)
    assert local.run.current.stored, "without the store's answer no start may begin from nothing from now on"


async def test_the_originals_are_sent_where_no_link_is_possible(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr("podwatch.app.backup.outbox.os.link", refuse)
    root = local.save(5)
    local.scan()
    await local.start()
    await until(lambda: "published" in local.names())
    (path,) = (path for name, path in local.objects().items() if name.endswith("/model.bin"))
    assert path.read_bytes() == (root / "model.bin").read_bytes()


async def test_nothing_is_sent_while_publishing_is_withheld(local: World) -> None:
    """A state directory that cannot be written, a root that was replaced."""
    local.run.blocked = "the disk is full"
    local.save(5)
    local.scan()
    backup = await local.start()
    await until(lambda: backup.lease.holds)
    with pytest.raises(HostError, match="the disk is full"):
        await backup.sync_now()
    assert not any("step_" in name for name in local.objects())
    local.run.blocked = ""
    await backup.sync_now()
    assert local.newest() == 5


async def test_a_checkpoint_that_is_held_back_while_it_is_sent_is_not_published(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second trainer is seen only now, and wrote from a moment before the save was complete."""
    backup = await local.start()
    await until(lambda: backup.lease.holds)
    real = backup._uploads.send

    async def send(*given: Any, **more: Any) -> Any:
        sent = await real(*given, **more)
        local.held.update((Span(0.0, None, "pid 7"),))
        local.scan()
        return sent

    monkeypatch.setattr(backup._uploads, "send", send)
    local.save(5)
    local.scan()
    await until(lambda: "upload-abandoned" in local.names())
    monkeypatch.undo()
    assert not any(name.endswith("manifest.json") for name in local.objects())
    assert ["second trainer" in why for why in backup._queue.void.values()] == [True], "status says why"
    local.held.update(())
    local.save(10)
    local.scan()
    await until(lambda: local.newest() == 10)


async def test_a_checkpoint_that_changes_before_its_manifest_is_void(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent whole, and then written into: the store would have a mixture."""
    root = local.save(5)
    local.scan()
    backup = local.backup()
    real = backup._uploads.send

    async def send(*given: Any, **more: Any) -> Any:
        sent = await real(*given, **more)
        with (root / "model.bin").open("r+b") as file:
            file.write(b"other")
        return sent

    monkeypatch.setattr(backup._uploads, "send", send)
    await backup.start()
    await until(lambda: "upload-abandoned" in local.names())
    assert local.inventory().pointers == ()
    assert not any("manifest.json" in name for name in local.objects())
    await until(lambda: local.links() == [])


async def test_a_request_is_answered_by_its_own_checkpoint(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one is being sent when the operator asks: its end is not the answer."""
    local.save(5)
    local.scan()
    backup = local.backup()
    real, asked = backup._uploads.send, asyncio.Event()

    async def send(*given: Any, **more: Any) -> Any:
        sent = await real(*given, **more)
        await asyncio.wait_for(asked.wait(), 60)
        return sent

    monkeypatch.setattr(backup._uploads, "send", send)
    await backup.start()
    await until(lambda: any(name.endswith("/model.bin") for name in local.objects()))
    local.save(10)
    local.scan()
    request = asyncio.create_task(backup.sync_now())
    await asyncio.sleep(0.1)
    asked.set()
    await request
    assert local.stored() >= {10}
    assert local.newest() == 10


async def test_what_waited_for_an_upload_is_skipped_for_the_newest(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.save(5)
    local.scan()
    backup = local.backup()
    real, saved = backup._uploads.send, asyncio.Event()

    async def send(*given: Any, **more: Any) -> Any:
        sent = await real(*given, **more)
        await asyncio.wait_for(saved.wait(), 60)
        return sent

    monkeypatch.setattr(backup._uploads, "send", send)
    await backup.start()
    await until(lambda: any(name.endswith("/model.bin") for name in local.objects()))
    for step in (10, 15):
        local.save(step)
        local.scan()
    local.remove(10)
    local.scan()
    saved.set()
    await until(lambda: "upload-skipped" in local.names())
    local.scan()
    (event,) = local.events("upload-skipped")
    assert (event.fields["step"], event.fields["newer_step"]) == (10, 15)
    assert local.stored() == {5, 15}
    assert (backup.status().skipped, backup.status().upload_seconds is not None) == (1, True)


async def test_an_older_checkpoint_that_is_requested_is_stored_and_not_published(local: World) -> None:
    local.save(5)
    local.save(10)
    local.scan()
    backup = await local.start()
    await until(lambda: backup.status().last_step == 10)
    await backup.sync_now(5)
    assert (local.stored(), local.newest()) == ({5, 10}, 10)
    assert [event.fields["step"] for event in local.events("stored")] == [5]
    assert [event.fields["step"] for event in local.events("published")] == [10]
    assert "final-sync" not in local.names(), "the run has not ended"


@pytest.fixture
async def gap(tmp_path: Path) -> AsyncIterator[World]:
    """An hour between two uploads; step 5 is stored, and step 10 waits."""
    world = World(tmp_path / "pod", f"file://{tmp_path}/store", upload_gap="1h")
    world.save(5)
    world.scan()
    backup = await world.start()
    await until(lambda: backup.status().last_step == 5)
    world.save(10)
    world.scan()
    yield world
    await world.stop()


async def test_the_gap_between_uploads_outlives_podwatch(gap: World) -> None:
    await gap.stop()
    second = await gap.start()
    await until(lambda: second.lease.holds and second.status().ok)
    await asyncio.sleep(0.5)
    assert gap.stored() == {5}
    await gap.stop()
    gap.clock.later += 3600.0
    third = await gap.start()
    await until(lambda: third.status().last_step == 10)


async def test_an_interrupted_upload_does_not_wait_for_the_gap(gap: World) -> None:
    await gap.stop()
    found = next(one for one in gap.catalogue.sets if one.step == 10)
    journal = Journal.open(gap.journal_path)
    journal.learn(BEGUN, [gap.clock.wall() - 1, found.step, found.save_id])
    journal.close()
    backup = await gap.start()
    await until(lambda: backup.status().last_step == 10)


async def test_an_operator_does_not_wait_for_the_gap(gap: World) -> None:
    await asyncio.wait_for(gap.backups[0].sync_now(), 60)
    assert gap.newest() == 10


async def test_the_last_checkpoint_of_a_run_does_not_wait_for_the_gap(gap: World) -> None:
    backup = gap.backups[0]
    gap.run.trainer = object()
    backup.run_ended()  # a trainer runs again
    await asyncio.sleep(0.3)
    assert gap.stored() == {5}
    gap.run.trainer = None
    backup.run_ended()
    await until(lambda: backup.status().last_step == 10)


# -- the store is the only record


@pytest.mark.parametrize("lost", ["journal", "state"])
async def test_a_lost_state_directory_sends_nothing_again(local: World, lost: str) -> None:
    """No database decides what is stored: the listing does."""
    local.save(5)
    local.scan()
    await (await local.start()).sync_now()
    await local.stop()
    before = {name: path.stat().st_mtime_ns for name, path in local.objects().items() if "step_" in name}
    if lost == "journal":
        local.journal_path.write_bytes(b"no database" * 1000)
    else:
        shutil.rmtree(local.directory / "state")
    again = World(local.directory, local.url, name="writer-1" if lost == "journal" else "writer-2")
    again.scan()
    backup = await again.start()
    await until(lambda: backup.status().last_step == 5 and backup.lease.holds)
    assert (await backup.unstored()).pending == ()
    again.save(10)
    again.scan()
    await backup.sync_now()
    after = {name: path.stat().st_mtime_ns for name, path in again.objects().items() if "step_5/" in name}
    assert after == before
    assert (again.stored(), again.newest()) == ({5, 10}, 10)
    await again.stop()


async def test_another_store_gets_everything_again(local: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    local.save(5)
    local.scan()
    await (await local.start()).sync_now()
    await local.stop()
    moved = World(local.directory, f"file://{tmp_path_factory.mktemp('other')}")
    moved.scan()
    backup = await moved.start()
    await until(lambda: backup.status().listed)
    await backup.sync_now()
    assert moved.newest() == 5
    await moved.stop()


async def test_a_copied_bucket_is_the_store_that_it_was_copied_from(local: World) -> None:
    """Names and bytes are all that counts: no id, mark or time of the first store."""
    local.save(5)
    local.scan()
    await (await local.start()).sync_now()
    await local.stop()
    source = local.directory.parent / "store" / "run"
    target = local.directory.parent / "copy" / "team" / "ppo" / "run"
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    shutil.rmtree(source)
    copied = World(local.directory, f"file://{local.directory.parent}/copy/team/ppo")
    copied.scan()
    backup = await copied.start()
    await until(lambda: backup.status().last_step == 5 and backup.lease.holds)
    assert (await backup.unstored()).pending == ()
    await backup.sync_now()
    assert "upload-started" not in copied.names()
    assert len(copied.inventory().saves) == 1
    await copied.stop()


async def test_a_save_whose_object_the_store_lost_is_sent_again(local: World) -> None:
    local.save(5)
    local.scan()
    await (await local.start()).sync_now()
    await local.stop()
    next(path for name, path in local.objects().items() if name.endswith("/model.bin")).unlink()
    backup = await local.start()
    await backup.sync_now()
    assert local.newest() == 5
    assert [save.problem == "" for save in local.inventory().saves].count(True) == 1


async def test_a_pointer_that_a_crash_left_out_is_written(local: World) -> None:
    """Killed between the manifest and the pointer."""
    local.save(5)
    local.scan()
    await (await local.start()).sync_now()
    await local.stop()
    for name, path in local.objects().items():
        if name.startswith("pointers/"):
            path.unlink()
    assert local.newest() is None
    await local.start()
    await until(lambda: local.newest() == 5)
    assert len(local.inventory().saves) == 1


# -- branches


async def test_after_a_step_back_the_pointer_goes_back_before_anything_new_is_stored(local: World) -> None:
    for step in (5, 10):
        local.save(step)
        local.scan()
        backup = local.backups[0] if local.backups else await local.start()
        await backup.sync_now()
    local.edit(starts=branched(guarded("line-1"), "line-2", 5, wall=time.time()))
    backup.notify()
    await until(lambda: local.newest() == 5)
    assert local.stored() == {5, 10}, "the old branch's newest stays"


async def test_after_a_fresh_start_no_save_is_the_newest(local: World) -> None:
    local.save(5)
    local.scan()
    backup = await local.start()
    await backup.sync_now()
    local.edit(starts=branched(guarded("line-1"), "line-2", None, wall=time.time()))
    local.scan()
    await until(lambda: local.inventory().pointers[0].pointer.step is None)  # type: ignore[union-attr]
    assert (local.newest(), local.stored()) == (None, {5})


async def test_where_the_store_lacks_the_step_back_the_pointer_stays(local: World) -> None:
    local.save(10)
    local.scan()
    backup = await local.start()
    await backup.sync_now()
    local.edit(starts=branched(guarded("line-1"), "line-2", 5, wall=time.time()))
    backup.notify()
    await asyncio.sleep(0.5)
    assert (local.newest(), len(local.inventory().pointers)) == (10, 1), "what it has is better than nothing"


# -- pinned checkpoints at the end of the run


async def _with_pins(local: World) -> Any:
    for step in (5, 7, 10):
        local.save(step)
    local.scan()
    local.edit(pins={5: "best evaluation"})
    backup = await local.start()
    await backup.sync_now()
    await until(lambda: local.links() == [])
    return backup


async def test_a_pinned_checkpoint_is_stored_once_the_run_has_ended(local: World) -> None:
    backup = await _with_pins(local)
    assert local.stored() == {10}, "during training only the newest uses the uplink"
    assert (await backup.unstored()).pending == (f"{PINNED}5",)
    backup.run_ended()
    await until(lambda: local.stored() == {5, 10})
    await until(lambda: backup.status().checkpoints and len(backup.status().checkpoints) == 2)
    left = await backup.unstored()
    assert (left.pending, left.refused) == ((), ())
    assert (local.newest(), len(local.inventory().pointers)) == (10, 1), "the pointer names the newest"
    assert [event.fields["step"] for event in local.events("published")] == [10]


async def test_not_while_a_trainer_runs(local: World) -> None:
    """An operator has started training again."""
    backup = await _with_pins(local)
    local.run.trainer = object()
    backup.run_ended()
    await asyncio.sleep(0.5)
    local.run.trainer = None
    backup.notify()
    await asyncio.sleep(0.5)
    assert local.stored() == {10}


async def test_a_pinned_one_that_cannot_be_stored_is_named_with_the_reason(local: World) -> None:
    backup = await _with_pins(local)
    local.edit(pins={5: "x", 7: "x"})
    left = next(s for s in local.catalogue.sets if s.step == 5)
    local.edit(starts=branched(guarded("line-1"), "line-1", None, wall=left.changed_wall + 1e-6))
    local.scan()
    local.remove(7)
    backup.run_ended()
    await until(lambda: "upload-abandoned" in local.names())
    unstored = await backup.unstored()
    assert unstored.pending == ()
    assert [text.partition(" (")[0] for text in unstored.refused] == [f"{PINNED}7", f"{PINNED}5"]


# -- what an earlier podwatch had begun


def _begun(local: World, step: int, boot: str) -> OutgoingSave:
    """As it was recorded and linked before podwatch was killed."""
    contents = local.catalogue.contents(step)
    roots = {p.part.name: str(p.part.path) for p in contents.parts}
    save = OutgoingSave(
        "run", step, contents.set.save_id, "stored1", "custom", int(5 * MB), outgoing_files(contents.files), roots,
        lineage="line-1", boot_id=boot,
    )  # fmt: skip
    return Outbox(local.directory / "state" / "sent", local.workspace, 1.1).take(save, contents)


@pytest.mark.parametrize(("boot", "sent"), [("this", True), ("an earlier one", False)])
async def test_what_only_links_have_is_sent_only_in_the_boot_that_inspected_it(
    local: World, boot: str, sent: bool
) -> None:
    """A power cut can have taken bytes of it that were never written to the disk."""
    local.save(5)
    local.scan()
    _begun(local, 5, boot_id() if boot == "this" else boot)
    local.remove(5)
    local.scan()
    backup = await local.start()
    await until(lambda: backup.lease.holds and backup.status().listed)
    await asyncio.sleep(0.5 if not sent else 0)
    if sent:
        await until(lambda: local.newest() == 5)
    assert local.stored() == ({5} if sent else set())
    local.save(10)
    local.scan()
    await backup.sync_now()
    await until(lambda: local.links() == [])
    assert local.newest() == 10
    assert (5 in [event.fields["step"] for event in local.events("upload-started")]) is sent


async def test_links_of_an_earlier_boot_are_sent_once_the_checkpoint_is_found_complete(local: World) -> None:
    local.save(5)
    local.scan()
    _begun(local, 5, "an earlier one")
    await local.start()
    await until(lambda: local.newest() == 5)


@pytest.mark.parametrize(("hours", "piece", "again"), [(1, 5 * MB, True), (13, 5 * MB, False), (1, 9 * MB, False)])
async def test_an_intent_that_is_old_or_cuts_otherwise_is_not_continued(
    local: World, hours: float, piece: int, again: bool
) -> None:
    """A sweep can be removing the old one; of the other one the pieces would not fit."""
    local.save(5)
    local.scan()
    begun = _begun(local, 5, boot_id())
    store, name = local.store(), f"{local.backup_keys.save(5, 'stored1')}intent.json"
    intent = begun.intent(local.name, 1, 1.7e9)
    assert not any(file.inode or file.device for file in intent.files), "they say nothing to another pod"
    store.put(name, replace(intent, piece_size=int(piece)).to_bytes())
    local.age(hours * 3600)
    store.put(local.backup_keys.control, b"{}")  # whose time is the store's present one
    await local.start()
    await until(lambda: local.newest() == 5)
    (saved,) = local.inventory().saves
    assert (saved.save_id == "stored1") is again


async def test_an_upload_of_another_run_on_this_disk_is_left_alone(local: World) -> None:
    local.save(5)
    local.scan()
    begun = _begun(local, 5, boot_id())
    record = local.directory / "state" / "sent" / f"{begun.name}.json"
    record.write_bytes(replace(begun, run_id="other").to_bytes())
    local.remove(5)
    local.scan()
    backup = await local.start()
    await until(lambda: backup.lease.holds and backup.status().listed)
    await asyncio.sleep(0.3)
    assert local.stored() == set()
    assert "upload-started" not in local.names()


# -- another pod


async def test_a_pod_that_lost_the_run_publishes_nothing_more(local: World) -> None:
    local.save(5)
    local.scan()
    backup = await local.start()
    await backup.sync_now()
    (local.objects()["pointers/" + local.inventory().pointers[0].key.rpartition("/")[2]]).stat()
    claims = local.directory.parent / "store" / "run" / "podwatch" / "claims"
    (claims / "2-aa").write_bytes(b"{}")
    local.clock.boottime = lambda: type(local.clock).boottime(local.clock) + 60.0  # type: ignore[method-assign]
    local.save(10)
    local.scan()
    with pytest.raises(LeaseLost):
        await backup.sync_now()
    assert (local.newest(), local.stored()) == (5, {5})
    assert not backup.lease.may_upload
    assert "superseded" in local.names()
