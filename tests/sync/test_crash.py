"""kill -9 at every step of publishing and remote retention, and of the upload child; the pointer never lies."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podwatch.config.settings import SyncSettings
from podwatch.domain.lease import Pod
from podwatch.domain.manifest import Manifest
from podwatch.domain.run import IntentKind
from podwatch.journal.journal import Journal
from podwatch.journal.upload_records import BegunUpload, UploadedObject
from podwatch.policy.who_holds_the_run import Timing
from podwatch.stores.base import ObjectStore
from podwatch.sync.lease.protocol import LeaseProtocol, LeaseTerms, perform
from podwatch.sync.publish_and_pointer import Publisher
from podwatch.sync.store_removal import RemoteRetention
from podwatch.sync.upload import child_job as jobs
from podwatch.sync.upload.send_parts import Sending
from podwatch.system.clock import SystemClock
from podwatch.system.pinned_directories import PinnedTree
from tests.drivers.lease import Side
from tests.support.forking import in_child, kill
from tests.sync.conftest import AtWall, Held, Run, World, until

pytestmark = pytest.mark.slow

CLOCK = SystemClock()


def part_size(world: World) -> int:
    """A directory takes parts of any size, so that small files go through all of an upload in parts; B2 does not."""
    return 400 if world.server is None else 5_000_000


class Crash(BaseException):
    """Stands in for a kill where the process must live on to be looked at."""


class Fuse:
    """Counts steps; at the chosen one the process dies, before (even) or after (odd) the step's effect."""

    def __init__(self, at: int | None, die: Callable[[], None], look: Callable[[], None] = lambda: None) -> None:
        self.at, self.die, self.look, self.count = at, die, look, 0

    def wrap(self, target: Any, names: tuple[str, ...]) -> Any:
        fuse = self

        class Wrapped:
            def __getattr__(self, name: str) -> Any:
                value = getattr(target, name)
                return fuse.around(value) if name in names else value

        return Wrapped()

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.burn()
            result = call(*args, **kwargs)
            self.look()
            self.burn()
            return result

        return guarded

    def burn(self) -> None:
        if self.count == self.at:
            self.die()
        self.count += 1


STORE = ("create", "put_bytes", "put_small", "begin_large", "put_part", "finish_large", "cancel_large", "delete")
JOURNAL = (
    "open_intent", "settle", "note_published", "save_object", "save_begun", "save_part", "learn", "forget_save",
)  # fmt: skip


def hold(world: World, store: ObjectStore, journal: Journal) -> LeaseProtocol:
    """What comes first: the claim, which is killed at its writes like everything else."""
    me = Pod(world.writer_id, "machine", "boot", "place")
    claims = LeaseProtocol(
        LeaseTerms(me, Timing(patience=0.0, claim_wait=0.0)), world.keys, CLOCK, Side(world, journal),
        exclusive=store.exclusive,
    )  # fmt: skip
    while not claims.holding:
        perform(store, claims.look(), CLOCK)
    return claims


def once(world: World, step: int, fuse: Fuse) -> None:
    """What a podwatch does from its start on: recover, upload what is missing, publish, prune."""
    real = Journal.open(world.directory / "state" / "crash.sqlite")
    journal = fuse.wrap(real, JOURNAL)
    opened = world.store()
    store: ObjectStore = fuse.wrap(opened, STORE)
    try:
        claims = hold(world, store, journal)
        lease, clock = Held(claims, CLOCK), AtWall(float(step))
        publisher = Publisher(store, world.keys, journal, world, clock, lease)
        publisher.recover()
        world.scan()
        contents = world.catalogue.contents(step)
        files = jobs.all_files(contents, world.keys)
        done = real.objects(step, contents.set.save_id)
        save_id = contents.set.save_id
        todo = jobs.taken_up(jobs.missing(files, done), real.begun(step, save_id), part_size(world))
        expected = {f.remote: f for f in todo}
        uploads = {f.remote: f.upload for f in todo}

        def heard(kind: str, **said: Any) -> None:
            file = expected[said["remote"]]
            fields = {n: getattr(file, n) for n in ("key", "size", "mtime_ns", "inode", "device")}
            if kind == "begun":
                uploads[file.remote] = said["upload"]
                begun = BegunUpload(path=file.remote, upload=said["upload"], part_size=part_size(world), **fields)
                journal.save_begun(step, save_id, begun)
            elif kind == "part":
                journal.save_part(uploads[file.remote], said["number"], said["note"])
            else:
                obj = UploadedObject(
                    path=file.remote, part=file.part, mode=file.mode, file_id=said["file_id"],
                    parts_sha1=tuple(said["parts_sha1"]), **fields,
                )  # fmt: skip
                journal.save_object(step, save_id, obj)
                done[file.remote] = obj

        job = jobs.UploadJob(
            step=step, save_id=save_id, store="", writer_id=world.writer_id, part_size=part_size(world), connections=1,
            lock="", roots=jobs.roots(contents), files=todo, pins=PinnedTree((world.output,)).pins(),
        )  # fmt: skip
        Sending(job, store, heard, lambda _: None).run()
        if (step, contents.set.save_id) not in {(p.step, p.save_id) for p in real.published()}:
            publisher.publish(
                Manifest(
                    run_id="run",
                    lineage="line-1",
                    step=step,
                    save_id=contents.set.save_id,
                    layout="custom",
                    created_at="2026-01-01T00:00:00Z",
                    writer_id=world.writer_id,
                    part_size=part_size(world),
                    total_bytes=sum(f.size for f in files),
                    files=jobs.manifest_files(files, done),
                )
            )
        policy = SyncSettings(keep_last=1, keep_every=0)
        RemoteRetention(
            store,
            world.keys,
            journal,
            policy,
            AtWall(float(step) + 1),
            world.identity(),
            lease,
            {},
            grace_seconds=0.0,
        ).carry_out()
    finally:
        opened.close()
        real.close()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def check_final(world: World, step: int) -> None:
    assert world.violations() == []
    pointer = world.pointer()
    assert pointer is not None
    assert pointer.step == step
    journal = Journal.open(world.directory / "state" / "crash.sqlite")
    try:
        assert journal.open_intents(IntentKind.PUBLISH) == []
        assert journal.open_intents(IntentKind.REMOTE_DELETE) == []
        assert [(p.step, p.seq) for p in journal.published()] == [(step, pointer.seq)]
    finally:
        journal.close()
    store = world.store()
    saves = {o.key.split("/")[2] for o in store.list(f"{world.keys.root}/step_")}
    store.close()
    assert saves == {f"step_{step}"}, "older saves are gone wholly"


def test_kill_at_every_step(world: World) -> None:
    root = world.write_set(1, size=1000, tiny=True)
    assert in_child(lambda: once(world, 1, Fuse(None, kill_self))) == 0
    crashes = 0
    for at in itertools.count():
        step = at + 2
        root.rename(root.with_name(f"step_{step}"))
        root = world.write_set(step, size=1000, tiny=True)
        code = in_child(lambda step=step, at=at: once(world, step, Fuse(at, kill_self)))  # type: ignore[misc]
        assert world.violations() == [], f"after a kill at {at}"
        if code == 0:
            break
        assert code == -signal.SIGKILL
        crashes += 1
        assert in_child(lambda step=step: once(world, step, Fuse(None, kill_self))) == 0  # type: ignore[misc]
        check_final(world, step)
    assert crashes > 25


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_several_crashes_in_a_row(tmp_path_factory: pytest.TempPathFactory, plan: list[int]) -> None:
    """Crashes during recovery too, with the promise checked after every single write."""
    directory = tmp_path_factory.mktemp("crash")
    world = World(directory / "pod", f"file://{directory}/store")
    try:
        world.write_set(1, size=100)
        world.write_set(2, size=100)

        def die() -> None:
            raise Crash

        def look() -> None:
            assert world.violations() == []

        once(world, 1, Fuse(None, die, look))
        for at in plan:
            try:
                once(world, 2, Fuse(at, die, look))
            except Crash:
                pass
        once(world, 2, Fuse(None, die, look))
        check_final(world, 2)
    finally:
        world.journal.close()


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_killed_child_sends_only_what_is_missing(b2: World, run: Run, after: int) -> None:
    assert b2.server is not None
    b2.write_set(5, size=11_000_000)
    b2.scan()
    b2.server.fault("b2_finish_large_file", "slow", seconds=1.5)
    syncer = await run(b2)

    def stored() -> int:
        return len(b2.journal.objects(5, b2.catalogue.sets[0].save_id))

    await until(lambda: syncer._sender.running is not None and syncer._sender.running.pid and stored() >= after)
    before = b2.journal.objects(5, b2.catalogue.sets[0].save_id)
    kill(syncer._sender.running.pid)
    await until(lambda: syncer.status().last_step == 5)
    assert b2.violations() == []
    for path, obj in before.items():
        versions = [v for v in b2.server.versions(path) if v["action"] == "upload"]
        assert [v["file_id"] for v in versions] == [obj.file_id], "already sent: not again"


async def test_stopped_daemon_leaves_no_child_and_goes_on(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, size=11_000_000)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=30, skip=2)  # the last part: the small files go meanwhile
    first = await run(b2)
    await until(lambda: len(b2.journal.objects(5, b2.catalogue.sets[0].save_id)) == 3)
    assert first.status().uploading_step == 5
    await asyncio.wait_for(first.stop(), 25)
    assert b2.pointer() is None
    assert "upload-abandoned" not in b2.names()
    assert len(b2.journal.objects(5, b2.catalogue.sets[0].save_id)) == 3, "what was sent is remembered"
    b2.events.clear()
    b2.server.admin("clear")
    b2.journal = Journal.open(b2.directory / "state" / "journal.sqlite")
    second = await run(b2)
    await until(lambda: second.status().last_step == 5)
    assert b2.violations() == []


def test_a_lying_journal_cannot_make_the_pointer_lie(world: World) -> None:
    """The journal says an object is there; the store knows better."""
    world.write_set(1, size=1000)
    once(world, 1, Fuse(None, kill_self))
    world.write_set(2, size=1000)
    world.scan()
    contents = world.catalogue.contents(2)
    files = jobs.all_files(contents, world.keys)
    journal = Journal.open(world.directory / "state" / "crash.sqlite")
    for file in files:
        names = ("part", "size", "mtime_ns", "mode", "inode", "device", "key")
        fields = {n: getattr(file, n) for n in names}
        obj = UploadedObject(path=file.remote, file_id="4_zgone" if world.server else "", parts_sha1=(), **fields)
        journal.save_object(2, contents.set.save_id, replace(obj, parts_sha1=("0" * 40,) if file.size else ()))
    journal.close()
    with pytest.raises(Exception, match=r"missing or differ|another number of hashes"):
        once(world, 2, Fuse(None, kill_self))
    pointer = world.pointer()
    assert pointer is not None
    assert pointer.step == 1
    assert world.violations() == []
