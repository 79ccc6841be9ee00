"""The syncer end to end: real files, real child process, both stores."""

import asyncio
import contextlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from podwatch.daemon.own_findings import clock_findings
from podwatch.domain.errors import HostError, InternalError, PodwatchError, RemoteError
from podwatch.domain.finding import Severity
from podwatch.domain.lease import Heartbeat
from podwatch.domain.manifest import Manifest
from podwatch.domain.safe_links import check_links
from podwatch.stores.base import ObjectStore, store_time
from podwatch.sync.inventory import inventory
from podwatch.sync.publish_and_pointer import read_manifest
from podwatch.sync.upload.start_child import NICE, SetVoid
from podwatch.sync.upload.uploader import Sender
from tests.support.hurry import hurrying
from tests.sync.conftest import Run, World, until

pytestmark = pytest.mark.slow


async def test_the_newest_set_is_sent_and_published_once(world: World, run: Run) -> None:
    world.write_set(5)
    world.write_set(10)
    world.scan()
    syncer = await run(world)
    await until(lambda: syncer.status().last_step == 10)
    pointer = world.pointer()
    assert pointer is not None
    assert (pointer.step, pointer.generation, pointer.seq, pointer.lineage) == (10, 1, 1, "line-1")
    store = world.store()
    data = store.get_bytes(pointer.manifest_key, pointer.manifest_file_id)
    assert data is not None
    manifest = Manifest.from_bytes(data)
    assert [f.path for f in manifest.files] == [
        f"checkpoint/{n}" for n in ("DONE", "empty", "model.bin", "sub/optim.bin")
    ]
    assert [(s.path, s.target) for s in manifest.symlinks] == [("checkpoint/link", "sub/optim.bin")]
    assert next(f for f in manifest.files if f.path.endswith("model.bin")).mode == 0o640
    assert world.violations() == []
    assert syncer.status().ok is True
    assert syncer.status().uploading_step is None
    assert world.names() == ["upload-started", "published"]
    before = sorted(o.uploaded_wall for o in store.list("run/"))
    syncer.notify()
    syncer.sweep()
    await syncer.sync_now()  # already there: returns at once
    assert sorted(o.uploaded_wall for o in store.list("run/")) == before
    store.close()
    world.write_set(15)
    world.scan()
    syncer.notify()
    await until(lambda: syncer.status().last_step == 15)
    pointer = world.pointer()
    assert pointer is not None
    assert (pointer.step, pointer.seq) == (15, 2)


async def test_a_new_podwatch_sends_nothing_again_even_without_its_journal(world: World, run: Run) -> None:
    world.write_set(5)
    world.scan()
    first = await run(world)
    await first.sync_now()
    await first.stop()
    world.journal.close()
    (world.directory / "state" / "journal.sqlite").unlink()
    again = World(world.directory, world.store_url, world.endpoint, world.server)
    again.scan()
    syncer = await run(again)
    await until(lambda: {step for step, _ in syncer.status().stored} == {5})
    assert "upload-started" not in again.names()
    again.journal.close()


async def test_a_new_pod_shows_what_the_store_holds(world: World, run: Run) -> None:
    """And before it was read that it was not, instead of "nothing stored yet"."""
    for step in (5, 10):
        world.write_set(step)
        world.scan()
        first = await run(world)
        await first.sync_now()
        await first.stop()
    new = world.other("new-pod")
    syncer = new.syncer()
    assert (syncer.status().saves, syncer.status().last_step) == (None, None)
    await syncer.start()
    await until(lambda: syncer.status().saves is not None)
    await until(lambda: "state-rebuilt" in new.names())  # this journal knows one of the two from here on
    assert (syncer.status().saves, syncer.status().last_step) == (2, 10)
    await syncer.stop()
    again = new.syncer()
    await again.start()
    assert again.status().last_step == 10, "the journal knows it"
    await until(lambda: again.status().saves is not None)
    assert again.status().saves == 2, "what another pod has stored counts, too"
    new.write_set(15)
    new.scan()
    await again.sync_now()
    assert (again.status().saves, again.status().last_step) == (3, 15)
    await again.stop()
    new.journal.close()


async def test_an_older_set_on_demand_does_not_move_the_pointer(local: World, run: Run) -> None:
    local.write_set(5)
    local.write_set(10)
    local.scan()
    syncer = await run(local)
    await syncer.sync_now()
    await syncer.sync_now(5)
    pointer = local.pointer()
    assert pointer is not None
    assert pointer.step == 10
    assert {s for s, _ in syncer.status().stored} == {5, 10}


async def test_sync_now_says_what_is_missing(local: World, run: Run) -> None:
    syncer = await run(local)
    with pytest.raises(PodwatchError, match="no complete checkpoint"):
        await syncer.sync_now()
    local.write_set(5, done=False)
    local.scan()
    with pytest.raises(PodwatchError, match="not complete"):
        await syncer.sync_now(5)


async def test_without_a_store_it_says_so(local: World, run: Run) -> None:
    local.store_url = ""
    local.__post_init__()
    syncer = await run(local)
    assert syncer.status().store_url == ""
    assert syncer.status().ok is None
    with pytest.raises(PodwatchError, match="NOT BACKED UP"):
        await syncer.sync_now()
    await syncer.beat(Heartbeat())
    await syncer.repoint(None)


async def test_wrong_key_is_degraded_and_heals(b2: World, run: Run) -> None:
    b2.write_set(5)
    b2.scan()
    b2.key = "wrong"
    syncer = await run(b2)
    await until(lambda: syncer.status().ok is False)
    assert "refuses the key" in syncer.status().error
    assert syncer.status().refused
    await until(lambda: syncer.status().next_attempt_wall is not None)
    assert [e.severity for e in b2.events if e.name == "sync-failed"] == [Severity.CRITICAL]
    with pytest.raises(RemoteError, match="refuses the key"):
        await syncer.sync_now()
    await asyncio.sleep(0.2)
    assert b2.names().count("sync-failed") == 1, "told once, not at every try"
    b2.key = "secret-never-to-be-seen"  # the person corrects the env file; credentials are read again
    await until(lambda: syncer.status().last_step == 5)
    assert (syncer.status().ok, syncer.status().refused, syncer.status().next_attempt_wall) == (True, False, None)
    assert "store-recovered" in b2.names()
    assert not any("secret-never" in str(e) for e in b2.events)


@pytest.mark.parametrize("ahead", [-20 * 60.0, 20 * 60.0, 40 * 24 * 3600.0])
async def test_a_wrong_clock_is_shown_and_stops_nothing(b2: World, run: Run, ahead: float) -> None:
    """B2's native API needs no clock, and a container cannot set one. What has an age has it by the store's clock."""
    assert b2.server is not None
    b2.server.admin("clock", ahead=ahead)
    b2.write_set(5)
    b2.scan()
    syncer = await run(b2)
    await until(lambda: syncer.status().last_step == 5)
    skew = syncer.status().clock_skew
    assert skew is not None
    assert skew == pytest.approx(-ahead, abs=60)
    (finding,) = clock_findings(skew, since=0.0)
    assert ("behind" if ahead > 0 else "ahead") in finding.summary
    assert clock_findings(None, since=0.0) == clock_findings(60.0, since=0.0) == ()
    store = b2.store()
    saves, _ = inventory(store, b2.keys)
    assert store_time(store, time.time()) - saves[0].uploaded_wall < 600
    unfinished = store.begin_large("run/podwatch/step_9/x/trainer/f", 12_000_000)
    await syncer.sweep_store()
    assert store.parts_there(unfinished) is not None, "begun just now by the store's clock"
    store.close()


async def test_no_bucket(b2: World, run: Run) -> None:
    b2.store_url = "b2://no-such-bucket"
    b2.__post_init__()
    b2.write_set(5)
    b2.scan()
    syncer = await run(b2)
    await until(lambda: syncer.status().ok is False)
    assert "not found" in syncer.status().error


async def test_outage_in_the_middle_then_recovery(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, size=30_000_000)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=0.2, count=50)
    syncer = await run(b2)
    await until(lambda: any(e["ep"] == "b2_upload_part" for e in b2.server.events()))  # type: ignore[union-attr]
    b2.server.stop()
    task = asyncio.create_task(asyncio.to_thread(b2.server.start))
    await task
    await until(lambda: syncer.status().last_step == 5, 40)
    assert b2.violations() == []


async def test_key_that_may_not_delete_is_fine_and_said_so(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.server.add_key(
        "nodel", "k", bucket="test-bucket", prefix="run/", capabilities=["listFiles", "readFiles", "writeFiles"]
    )
    b2.key_id, b2.key = "nodel", "k"
    b2.write_set(5)
    b2.scan()
    syncer = await run(b2)
    await syncer.sync_now()
    await syncer.beat(Heartbeat(step=1))
    await syncer.beat(Heartbeat(step=2))
    assert syncer.status().ok is True


async def test_heartbeat_keeps_one_version(world: World, run: Run) -> None:
    syncer = await run(world)
    await asyncio.wait_for(syncer.until_speaking(True), 60)
    for number in range(3):
        await syncer.beat(Heartbeat(step=number))
    store = world.store()
    data = store.get_bytes(world.keys.heartbeat)
    store.close()
    assert data is not None
    assert b'"step": 2' in data
    if world.server is not None:
        assert len(world.server.versions("heartbeat.json")) == 1


async def test_a_beat_does_not_wait_for_the_repair_of_the_pointer(world: World, run: Run) -> None:
    """A standby takes over where the heartbeat stands still for five minutes; a verification may take longer."""
    world.write_set(5, tiny=True)
    world.scan()
    syncer = await run(world)
    await syncer.sync_now()
    old = world.pointer()
    world.write_set(10, tiny=True)
    world.scan()
    await syncer.sync_now()
    assert old is not None
    store = world.store()
    store.put_bytes(world.keys.latest, old.to_bytes())
    busy = threading.Event()
    waiting = asyncio.ensure_future(syncer.session.worker.call(busy.wait))
    try:
        for number in range(7):  # the pointer is read at the first and the sixth
            await asyncio.wait_for(syncer.beat(Heartbeat(step=number)), 60)
        assert b'"step": 6' in (store.get_bytes(world.keys.heartbeat) or b"")
    finally:
        busy.set()
        await waiting
    await until(lambda: "pointer-repaired" in world.names(), 10)
    repaired = world.pointer()
    assert repaired is not None
    assert (repaired.step, repaired.seq) == (10, 3)
    assert world.names().count("pointer-repaired") == 1
    store.close()


async def test_podwatch_leaves_while_a_repair_waits(local: World, run: Run) -> None:
    local.write_set(5, tiny=True)
    local.scan()
    syncer = await run(local)
    await syncer.sync_now()
    busy = threading.Event()
    waiting = asyncio.ensure_future(syncer.session.worker.call(busy.wait))
    await asyncio.wait_for(syncer.beat(Heartbeat()), 60)
    try:
        await asyncio.wait_for(syncer.stop(), 60)
    finally:
        busy.set()
        waiting.cancel()


async def test_a_failed_beat_leaves_the_store_of_a_publication_open(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, tiny=True)
    b2.scan()
    syncer = await run(b2)
    await syncer.sync_now()
    used = syncer.session.store
    assert used is not None
    b2.server.fault("b2_upload_file", "status", status=403, code="transaction_cap_exceeded", count=100)
    await syncer.beat(Heartbeat())
    assert syncer.status().ok is False
    assert b2.names().count("sync-failed") == 1
    assert syncer.session.store is used
    b2.server.admin("clear")
    await syncer.beat(Heartbeat())
    assert syncer.status().ok is True
    assert b2.names().count("store-recovered") == 1


async def test_whatever_fails_inside_the_question_who_holds_the_run_is_told_and_asked_again(
    local: World, run: Run
) -> None:
    syncer = local.syncer()
    assert syncer.session.lease is not None
    holding, really, seen = syncer.session.lease, syncer.session.lease._open, []

    def broken_twice() -> ObjectStore:
        seen.append(holding.error)
        if len(seen) < 3:
            raise KeyError("a mistake of ours")
        return really()

    holding._open = broken_twice
    try:
        await syncer.start()
        await until(lambda: syncer.standing.publish, 10)
    finally:
        await syncer.stop()
    assert isinstance(seen[1], InternalError)
    assert "a mistake of ours" in str(seen[1])
    assert holding.error is None


async def test_a_set_written_to_during_upload_is_void(b2: World, run: Run) -> None:
    assert b2.server is not None
    root = b2.write_set(5, size=20_000_000)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=3.0, count=50)
    syncer = await run(b2)
    await until(lambda: any(e["ep"] == "fault" for e in b2.server.events()))  # type: ignore[union-attr]
    with (root / "model.bin").open("r+b") as file:
        file.write(b"changed")
    (root / "DONE").touch()  # written last: a file that is clearly newer makes the checkpoint incomplete
    await until(lambda: "upload-abandoned" in b2.names())
    assert b2.pointer() is None
    b2.server.admin("clear")
    b2.scan()
    syncer.notify()
    await until(lambda: syncer.status().last_step == 5)
    assert b2.violations() == []


async def test_deleted_sets_are_abandoned_quietly_then_loudly(b2: World, run: Run) -> None:
    assert b2.server is not None
    no_room = b2.settings.disk.model_copy(update={"margin": 1e12})  # to hold what the trainer removes
    b2.settings = b2.settings.model_copy(update={"disk": no_room})
    first = b2.write_set(5, size=9_000_000)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=6, count=500)
    syncer = await run(b2)
    await until(lambda: syncer.status().uploading_step == 5)
    b2.write_set(10, size=9_000_000)
    b2.scan()
    shutil.rmtree(first)
    await until(lambda: "upload-abandoned" in b2.names())
    assert [e.severity for e in b2.events if e.name == "upload-abandoned"] == [Severity.INFO]
    await until(lambda: syncer.status().uploading_step == 10)
    b2.write_set(15)
    shutil.rmtree(b2.output / "checkpoints" / "step_10")
    b2.scan()
    await until(lambda: b2.names().count("upload-abandoned") == 2)
    abandoned = [e for e in b2.events if e.name == "upload-abandoned"]
    assert abandoned[-1].severity is Severity.CRITICAL
    b2.server.admin("clear")
    await until(lambda: syncer.status().last_step == 15)
    assert syncer.status().abandoned_in_a_row == 0
    assert b2.violations() == []


async def test_abandon_stops_the_upload(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, size=12_000_000)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=60, count=50)
    syncer = await run(b2)
    waiting = asyncio.ensure_future(syncer.sync_now())
    await until(lambda: syncer.status().uploading_step == 5)
    await until(lambda: syncer._sender.running is not None and syncer._sender.running.pid)
    await asyncio.wait_for(syncer.abandon(5), 30)
    assert syncer.status().uploading_step is None
    with pytest.raises(PodwatchError):
        await waiting
    assert b2.pointer() is None


async def test_a_pointer_that_the_new_line_has_moved_is_not_set_back(world: World, run: Run) -> None:
    syncer = await run(world)
    for step in (5, 10):
        world.write_set(step)
        world.scan()
        await syncer.sync_now()
    world.lineage, world.parent_step, world.has_parent = "line-2", 5, True
    world.write_set(7)
    world.scan()
    await syncer.sync_now(7)  # before the pointer followed to where the line begins
    await syncer.repoint(5)
    pointer = world.pointer()
    assert pointer is not None
    assert (pointer.step, pointer.seq, pointer.lineage) == (7, 3, "line-2")
    assert world.violations() == []


async def test_stepping_back_moves_the_pointer_at_once(world: World, run: Run) -> None:
    syncer = await run(world)
    for step in (5, 10):
        world.write_set(step)
        world.scan()
        await syncer.sync_now()
    world.lineage = "line-2"
    await syncer.repoint(5)
    pointer = world.pointer()
    assert pointer is not None
    assert (pointer.step, pointer.seq, pointer.lineage) == (5, 3, "line-2")
    await syncer.repoint(99)  # never stored: nothing happens
    await syncer.repoint(None)
    pointer = world.pointer()
    assert pointer is not None
    assert (pointer.step, pointer.seq) == (None, 4)
    assert world.violations() == []


async def test_remote_retention(world: World, run: Run) -> None:
    world.keep_last = 1
    world.__post_init__()
    stranger = world.store()
    stranger.put_bytes("run/step_5/mine.bin", b"the user's own backup")
    syncer = await run(world)
    now = [0.0]
    syncer._clock.wall = lambda: now[0]  # type: ignore[method-assign]
    for step in (5, 10, 15):
        now[0] += 7 * 3600
        world.write_set(step, size=1000)
        world.scan()
        await syncer.sync_now()
    assert {s for s, _ in syncer.status().stored} == {10, 15}, "5 was superseded 7 h ago, 10 only now"
    await until(lambda: syncer.status().saves == 2)
    left = [o.key for o in stranger.list("run/podwatch/")]
    assert not any("step_5/" in k for k in left)
    assert any("step_10/" in k for k in left)
    assert stranger.get_bytes("run/step_5/mine.bin") is not None
    assert "remote-pruned" in world.names()
    assert world.violations() == []
    stranger.close()


async def test_a_store_that_opens_but_takes_no_upload_stays_in_trouble(b2: World, run: Run) -> None:
    """Seen with a full store: it "worked again" at each attempt, so that the status was ok in between, and attempts
    came every few seconds."""
    assert b2.server is not None
    b2.write_set(5, size=1000, tiny=True)
    b2.scan()
    syncer = await run(b2)
    await syncer.sync_now()
    b2.server.fault("b2_upload_file", "status", status=403, code="storage_cap_exceeded", count=10_000)
    b2.write_set(10, size=1000, tiny=True)
    b2.scan()
    syncer.notify()
    await until(lambda: syncer.status().ok is False)
    await until(lambda: syncer.session.failures > 1)
    assert b2.names().count("store-recovered") == 0
    assert b2.names().count("sync-failed") == 1
    assert syncer.status().ok is False
    b2.server.admin("clear")
    await until(lambda: syncer.status().last_step == 10)
    assert (syncer.status().ok, b2.names().count("store-recovered")) == (True, 1)


async def test_a_checkpoint_that_is_gone_ends_the_trouble_of_its_upload(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, size=1000, tiny=True)
    b2.scan()
    syncer = await run(b2)
    await syncer.sync_now()
    b2.server.fault("b2_upload_file", "status", status=403, code="storage_cap_exceeded", count=10_000)
    target = b2.write_set(10, size=1000, tiny=True)
    b2.scan()
    syncer.notify()
    await until(lambda: syncer.status().ok is False)
    shutil.rmtree(target)
    b2.scan()
    syncer.notify()
    await until(lambda: syncer.status().ok is True)


async def test_an_object_lost_in_the_store_is_sent_again(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5)
    b2.scan()
    b2.server.fault("b2_get_file_info", "status", status=403, code="transaction_cap_exceeded", count=10_000)
    syncer = await run(b2)
    await until(lambda: syncer.status().ok is False)
    victim = b2.server.versions("sub/optim.bin")[-1]
    b2.server.admin("drop", file_id=victim["file_id"])
    b2.server.admin("clear")
    await until(lambda: syncer.status().last_step == 5, 60)
    uploads = [e["name"] for e in b2.server.events() if e["ep"] in ("b2_upload_file", "b2_finish_large_file")]
    assert sum(n.endswith("optim.bin") for n in uploads) == 2
    assert sum(n.endswith("model.bin") for n in uploads) == 1
    assert b2.violations() == []


async def test_the_first_upload_does_not_give_way_and_is_not_nice(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, size=12_000_000)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=5, count=50)
    syncer = await run(b2)
    await until(lambda: any(e["ep"] == "fault" for e in b2.server.events()), 200)  # type: ignore[union-attr]
    running = syncer._sender.running
    assert running is not None
    assert running.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, running.pid) == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("last", ["a preemption", "the final sync"])
async def test_the_last_upload_is_not_nice(b2: World, run: Run, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    assert b2.server is not None
    b2.write_set(5)
    b2.scan()
    syncer = await run(b2)
    await until(lambda: syncer.status().last_step == 5, 200)
    urgent = []
    send = syncer._sender.upload

    async def upload(*args: object, **named: object) -> None:
        urgent.append(named["urgent"])
        await send(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(syncer._sender, "upload", upload)
    b2.write_set(10)
    b2.scan()
    if last == "a preemption":
        await syncer.sync_now()
    else:
        monkeypatch.setattr(syncer._run, "trainer_alive", lambda: False, raising=False)
        syncer.run_ended()
    await until(lambda: syncer.status().last_step == 10, 200)
    assert urgent == [True]


async def test_the_child_ends_with_its_parent_and_is_nice(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5)
    b2.scan()
    syncer = await run(b2)
    await until(lambda: syncer.status().last_step == 5, 200)
    b2.server.fault("b2_upload_part", "slow", seconds=5, count=50)
    b2.write_set(10, size=12_000_000)
    b2.scan()
    syncer.notify()

    def nice() -> int:
        """The PID of what sends, once it has done the last that it does before it loads anything."""
        running = syncer._sender.running
        with contextlib.suppress(ProcessLookupError):
            if running is not None and running.pid and os.getpriority(os.PRIO_PROCESS, running.pid) == NICE:
                return int(running.pid)
        return 0

    await until(nice, 200)
    pid = syncer._sender.running.pid  # type: ignore[union-attr]
    assert os.getsid(pid) == pid
    with hurrying():  # it has shown that it is nice: on a busy machine it would not come to send anything
        await until(lambda: any(e["ep"] == "fault" for e in b2.server.events()), 200)  # type: ignore[union-attr]
        seen = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"podwatch.sync.upload.child_main" in seen
        assert b"secret-never" not in seen
        await syncer.stop()
    await until(lambda: not Path(f"/proc/{pid}").exists())


def test_set_void_is_a_podwatch_error() -> None:
    assert str(SetVoid("x", where="y")) == "x (y)"


async def test_a_link_that_no_restore_would_take_is_left_out(local: World, run: Run) -> None:
    """Published with it, the whole set would be refused by every restore."""
    root = local.write_set(5, size=1000)
    (root / "odd").symlink_to("sub\\optim.bin")
    local.scan()
    syncer = await run(local)
    await until(lambda: syncer.status().last_step == 5)
    pointer = local.pointer()
    assert pointer is not None
    manifest = read_manifest(local.store(), local.keys, pointer)
    assert [link.path for link in manifest.symlinks] == ["checkpoint/link"]
    check_links(manifest.files, manifest.symlinks)


@pytest.mark.root
@pytest.mark.parametrize("when", ["before", "while it is sent"])
async def test_nothing_is_published_from_directories_that_were_replaced(
    local: World, run: Run, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """And no store is blamed; it continues after the repair, and sends nothing twice."""
    hidden = local.directory / ".podwatch"

    def replace() -> None:
        if hidden.exists():
            hidden.rename(local.directory / "kept")
        hidden.mkdir()
        os.chown(hidden, 61_018, 61_018)

    hidden.mkdir()
    if when == "before":
        replace()
    real = Sender.upload

    async def upload(self: Sender, *args: Any, **options: Any) -> None:
        await real(self, *args, **options)
        if not (local.directory / "kept").exists():
            replace()

    if when != "before":
        monkeypatch.setattr(Sender, "upload", upload)
    local.write_set(5)
    local.scan()
    syncer = await run(local)
    with pytest.raises(HostError, match="podwatch's own directory"):
        await syncer.sync_now()
    assert local.pointer() is None
    assert syncer.status().ok is not False
    hidden.rmdir()
    if (local.directory / "kept").exists():
        (local.directory / "kept").rename(hidden)
        monkeypatch.undo()
    await syncer.sync_now()
    assert syncer.status().last_step == 5
    assert local.names().count("sync-failed") == 0
