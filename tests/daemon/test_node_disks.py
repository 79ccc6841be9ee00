"""Two nodes with a disk of their own each, a real store and real uploads: what is published is whole, whichever node
has which part of it."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layouts import kind_of
from podwatch.checkpoints.layouts.base import Site
from podwatch.config.settings import NodesSettings
from podwatch.daemon import loop_wiring, node_disks
from podwatch.daemon.node_disks import OtherDisks, OwnDisk
from podwatch.daemon.nodes import Gang, GangFiles
from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs
from podwatch.domain.errors import HostError
from podwatch.domain.manifest import Manifest
from podwatch.domain.node_from_engine import Place
from podwatch.domain.run import EarlierSave, Lineage, RunRecord
from podwatch.journal.async_journal import AsyncJournal
from podwatch.policy.local_retention import Protection
from podwatch.policy.resume import awaited
from podwatch.retention.remove_checkpoints import Remover
from podwatch.sync.syncer import Syncer
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from tests.daemon.test_nodes import Node
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.checkpoints import dcp_files
from tests.support.hurry import hurrying
from tests.support.small_reserve import small_reserve  # noqa: F401 - a fixture
from tests.support.warm import children
from tests.sync.conftest import World, until

pytestmark = pytest.mark.slow

PART = "__1_0.distcp"
SETTLE_SECONDS = 0.5
"""How long a part of node 1 must be unchanged; the default of 5 s would be most of the time of every test here."""


class Pair:
    """Node 0 and node 1 of one attempt."""

    def __init__(self, root: Path, server: B2Server) -> None:
        self.first = World(root / "n0", f"b2://{BUCKET}", server.url, server)
        self.second = self.first.other("n1")
        for world in (self.first, self.second):
            world.layout = kind_of("dcp").make(Site(world.output))
            world.catalogue = Catalogue(world.layout, SystemClock(), settle=0.0, settle_weak=0.0)
        self.shared, self.clock = root / "shared", SystemClock()
        self.tasks: list[asyncio.Task[Any]] = []
        self.syncer: Syncer | None = None

    async def start(self) -> None:
        gangs = []
        for rank, world in enumerate((self.first, self.second)):
            nodes = NodesSettings(rank=rank, count=2, wait=20, silence=30, disks="local", directory=self.shared)
            checkpoints = world.settings.checkpoints.model_copy(update={"settle": SETTLE_SECONDS})
            world.settings = world.settings.model_copy(update={"nodes": nodes, "checkpoints": checkpoints})
            files = GangFiles(Workspace(self.shared / "run"), "run")
            gang = Gang(Place(rank, 2, "job:1"), files, nodes, self.clock, process=f"p{rank}", host="n", beat=0.05)
            gang.connect(Node())
            await gang.start()
            self.tasks.append(asyncio.create_task(gang.run()))
            gangs.append(gang)
        self.gangs = gangs
        self.syncer = self.first.syncer()
        self.others = OtherDisks(self.run(self.first), gangs[0], self.first.catalogue, self.syncer, self.look)
        self.first.catalogue.join(self.others)
        self.syncer.nodes = self.others
        await self.syncer.start()
        self.tasks.append(asyncio.create_task(self.others.run()))
        self.begin_own()
        await gangs[0].gather()

    def run(self, world: World) -> Any:
        return SimpleNamespace(
            config=SimpleNamespace(settings=world.settings),
            clock=self.clock,
            journal=AsyncJournal(world.journal),
            emit=world.events.append,
            layout=world.layout,
            workspace=Workspace(world.output).probe(),
            handle=object(),  # training runs
            acting=False,
        )

    def begin_own(self) -> None:
        world, run = self.second, self.run(self.second)
        remover = Remover(run.workspace, world.journal, self.clock, world.events.append)
        deletion: Any = SimpleNamespace(remover=remover, worker=Worker("removals"))
        self.own = OwnDisk(world.settings, run, self.gangs[1], deletion, lambda: None)
        self.own_task = asyncio.create_task(self.own.run())

    async def end_own(self) -> None:
        self.own_task.cancel()
        await self.own.close()

    def look(self) -> None:
        self.first.scan()
        assert self.syncer is not None
        self.syncer.notify()

    async def looks_until(self, condition: Any) -> None:
        def met() -> Any:
            self.look()
            return condition()

        await until(met)

    def save(self, step: int, size: int = 1_500_000) -> None:
        """As torch does: both ranks write their shards, then rank 0 the index."""
        files = dcp_files(size, ranks=2)
        for name in ("__1_0.distcp", "__0_0.distcp", ".metadata"):
            path = (self.second if name == PART else self.first).output / f"step_{step}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])

    def part(self, step: int) -> Path:
        return self.second.output / f"step_{step}" / PART

    def manifest(self) -> Manifest:
        pointer, store = self.first.pointer(), self.first.store()
        assert pointer is not None
        data = store.get_bytes(pointer.manifest_key, pointer.manifest_file_id)
        store.close()
        assert data is not None
        return Manifest.from_bytes(data)

    def stored(self, step: int) -> bool:
        return self.syncer is not None and self.syncer.status().last_step == step

    async def close(self) -> None:
        if self.syncer is not None:
            await self.syncer.stop()
        await self.own.close()
        for task in (*self.tasks, self.own_task):
            task.cancel()
        await asyncio.gather(*self.tasks, self.own_task, return_exceptions=True)
        self.first.journal.close()
        self.second.journal.close()


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(node_disks, "LOOK_SECONDS", 0.05)
    with B2Server(tmp_path / "b2") as server, hurrying(), children():
        for name, value in (("ENVIRONMENT", server.url), ("APPLICATION_KEY_ID", KEY_ID), ("APPLICATION_KEY", KEY)):
            monkeypatch.setenv(f"B2_{name}", value)
        made = Pair(tmp_path, server)
        await made.start()
        yield made
        await made.close()


async def test_both_parts_are_published_as_one(pair: Pair) -> None:
    pair.save(5)
    await pair.looks_until(lambda: pair.stored(5))
    manifest = pair.manifest()
    assert {(f.path.rpartition("/")[2], f.node) for f in manifest.files} == {
        (".metadata", 0), ("__0_0.distcp", 0), (PART, 1),
    }  # fmt: skip
    assert manifest.total_bytes > 3_000_000
    assert pair.first.violations() == []
    pair.save(10)
    await pair.looks_until(lambda: pair.stored(10))
    assert pair.first.violations() == []


async def test_nothing_is_published_while_a_part_is_missing(pair: Pair) -> None:
    """Node 1 does not answer any more, but its list is known."""
    pair.save(5)
    await pair.looks_until(lambda: pair.others.steps(5) and pair.others.steps(5)[0].files)
    await pair.looks_until(lambda: pair.others.steps(5)[0].settled)
    await pair.looks_until(lambda: pair.first.catalogue.sets[0].complete)
    await pair.end_own()
    await pair.looks_until(lambda: "upload-started" in pair.first.names())
    store = pair.first.store()
    await pair.looks_until(lambda: any(o.key.endswith("__0_0.distcp") for o in store.list("run/")))
    for _ in range(20):
        await asyncio.sleep(0.05)
        assert pair.first.pointer() is None
    assert not any(o.key.endswith("manifest.json") for o in store.list("run/"))
    store.close()
    pair.begin_own()  # its podwatch is back
    await pair.looks_until(lambda: pair.stored(5))
    assert pair.first.violations() == []


async def test_an_old_list_of_a_node_is_no_evidence(pair: Pair) -> None:
    """Node 1's list is from before this save, and its look does not return: its disk hangs, say."""
    await pair.looks_until(lambda: pair.others.looked() > 0)
    await pair.end_own()
    root = pair.first.output / "step_10"
    root.mkdir(parents=True)
    for name, data in dcp_files(1000, ranks=1).items():  # whole without node 1
        (root / name).write_bytes(data)
    for _ in range(20):
        pair.look()
        await asyncio.sleep(0.05)
        assert not any(s.complete for s in pair.first.catalogue.sets)
    pair.begin_own()
    await pair.looks_until(lambda: pair.stored(10))


@pytest.mark.slow
async def test_a_node_that_has_lost_its_part(pair: Pair) -> None:
    """Its disk is new: this checkpoint lacks what the last one had of it, although the index does not name it."""
    pair.save(5)
    await pair.looks_until(lambda: pair.stored(5))
    root = pair.first.output / "step_10"
    root.mkdir(parents=True)
    for name, data in dcp_files(1000, ranks=1).items():
        (root / name).write_bytes(data)
    await pair.looks_until(lambda: any("has no counterpart" in s.reason for s in pair.first.catalogue.sets))
    assert pair.stored(5)


@pytest.mark.slow
async def test_a_part_that_changes_during_the_upload_voids_it(pair: Pair) -> None:
    """Node 1 writes its part again with the same size: the store never names a mixture."""
    pair.save(5)
    await pair.looks_until(lambda: pair.others.steps(5) and pair.others.steps(5)[0].files)
    await pair.looks_until(lambda: pair.others.steps(5)[0].settled)
    await pair.looks_until(lambda: pair.first.catalogue.sets[0].complete)
    await pair.end_own()
    await pair.looks_until(lambda: "upload-started" in pair.first.names())
    pair.part(5).write_bytes(os.urandom(pair.part(5).stat().st_size))
    pair.begin_own()
    await pair.looks_until(lambda: "upload-abandoned" in pair.first.names())
    assert pair.first.pointer() is None
    pair.save(10)
    await pair.looks_until(lambda: pair.stored(10))
    assert pair.first.violations() == []


@pytest.mark.slow
async def test_a_node_that_restarts_sends_nothing_again(pair: Pair) -> None:
    pair.save(5)
    await pair.looks_until(lambda: pair.stored(5))
    sent = [e for e in pair.second.events if str(e.name) == "upload-started"]
    store = pair.first.store()
    before = sorted((o.key, o.file_id) for o in store.list("run/podwatch/step_"))
    store.close()
    await pair.end_own()
    pair.begin_own()
    pair.syncer.retry(5, "x")  # type: ignore[union-attr]
    for _ in range(20):
        pair.look()
        await asyncio.sleep(0.05)
    store = pair.first.store()
    assert sorted((o.key, o.file_id) for o in store.list("run/podwatch/step_")) == before
    store.close()
    assert [e for e in pair.second.events if str(e.name) == "upload-started"] == sent


@pytest.mark.slow
async def test_an_object_that_the_store_lost_is_sent_again(pair: Pair) -> None:
    """Node 0 asks for it by name; the journal of node 1 says that it is there."""
    pair.save(5)
    await pair.looks_until(lambda: pair.stored(5))
    ((path, first),) = [(f.path, f.file_id) for f in pair.manifest().files if f.node == 1]
    pair.others.order(pair.first.catalogue.contents(5), [path], [])
    (known,) = await pair.others.sent(lambda _count: None)
    assert known.file_id == first
    pair.others.order(pair.first.catalogue.contents(5), [path], [path])
    (again,) = await pair.others.sent(lambda _count: None)
    assert again.file_id != first
    assert (again.path, again.size) == (path, pair.part(5).stat().st_size)


@pytest.mark.slow
async def test_what_node_0_deletes_goes_from_node_1_too(pair: Pair) -> None:
    for step in (5, 10):
        pair.save(step)
        await pair.looks_until(lambda s=step: pair.stored(s))
    shutil.rmtree(pair.first.output / "step_5")
    await pair.looks_until(lambda: not pair.part(5).exists())
    assert pair.part(10).exists()
    shutil.rmtree(pair.first.output)  # an unmounted disk, or a new one
    for _ in range(20):
        pair.look()
        await asyncio.sleep(0.05)
    assert pair.part(10).exists()


@pytest.mark.slow
@pytest.mark.parametrize("reshards", [True, False])
async def test_a_restore_brings_each_node_what_it_needs(pair: Pair, reshards: bool) -> None:
    """A trainer that can load with another number of ranks reads all files on each node; others read their own."""
    pair.save(5)
    await pair.looks_until(lambda: pair.stored(5))
    pair.second.layout.reshards = reshards  # type: ignore[misc]
    kept = pair.part(5).read_bytes()
    restorer = pair.second.restorer()
    restorer._node = 1
    report = await asyncio.to_thread(restorer.fetch, 5)
    names = {p.name for p in (pair.second.output / "step_5").rglob("*") if p.is_file()}
    assert names == ({PART, "__0_0.distcp", ".metadata"} if reshards else {PART})
    assert pair.part(5).read_bytes() == kept
    rest = sum(f.size for f in pair.manifest().files if f.node == 0)
    assert report.downloaded_bytes == (rest if reshards else 0), "what is there is not fetched again"


@pytest.mark.slow
async def test_a_shard_that_lost_its_bytes_is_never_published(pair: Pair) -> None:
    """Its size and time are right: after a power failure, say. Node 0 cannot open it."""
    await pair.end_own()
    pair.save(5)
    part = pair.part(5)
    status = part.stat()
    os.truncate(part, 0)
    os.truncate(part, status.st_size)
    os.utime(part, ns=(status.st_mtime_ns, status.st_mtime_ns))
    pair.begin_own()
    await pair.looks_until(lambda: any("was never written" in s.reason for s in pair.first.catalogue.sets))
    assert pair.first.pointer() is None
    pair.save(10)
    await pair.looks_until(lambda: pair.stored(10))
    assert pair.first.violations() == []


@pytest.mark.slow
async def test_nothing_is_deleted_while_training_starts(pair: Pair) -> None:
    """A start may need an older step, which node 1 has fetched before node 0."""
    for step in (5, 10):
        pair.save(step)
        await pair.looks_until(lambda s=step: pair.stored(s))
    pair.others._run.acting = True  # type: ignore[misc]
    shutil.rmtree(pair.first.output / "step_5")
    for _ in range(40):
        pair.look()
        await asyncio.sleep(0.05)
    assert pair.part(5).exists()
    pair.others._run.acting = False  # type: ignore[misc]
    await pair.looks_until(lambda: not pair.part(5).exists())


@pytest.mark.slow
async def test_a_name_that_no_store_can_hold_blocks_its_own_step_only(pair: Pair) -> None:
    pair.save(5)
    (pair.part(5).parent / "note\\1.txt").write_text("x")
    pair.save(10)
    await pair.looks_until(lambda: pair.stored(10))
    assert not any(s.complete for s in pair.first.catalogue.sets if s.step == 5)


@pytest.mark.slow
@pytest.mark.parametrize("error", [HostError("input/output error"), ValueError("a bug")])
async def test_an_error_that_stays_voids_the_checkpoint(pair: Pair, error: Exception) -> None:
    """It would be the same again: an older checkpoint is better than waiting for this one."""

    async def fails(*_: object, **__: object) -> None:
        raise error

    pair.own._sender._sender.send = fails  # type: ignore[method-assign]
    pair.save(5)
    await pair.looks_until(lambda: "upload-abandoned" in pair.first.names())
    assert pair.first.pointer() is None


async def test_a_verdict_of_node_0_is_about_the_files_that_it_has_judged(pair: Pair) -> None:
    """Node 1 writes its part again, and node 0 has read the new list, but has not judged it yet."""
    pair.save(5)
    await pair.looks_until(lambda: pair.stored(5))
    await until(lambda: pair.own.stored == {5})
    before = pair.others.steps(5)[0].digest
    pair.others._changed = lambda: None  # type: ignore[method-assign]
    pair.part(5).write_bytes(os.urandom(1000))
    await until(lambda: pair.others.steps(5)[0].digest != before)
    mark = pair.others.mark()
    await until(lambda: pair.others.looked() > mark)
    assert pair.first.catalogue.sets[0].complete, "it was not judged again"
    assert pair.own._orders.complete[5] == {1: before}
    assert pair.own.stored == set()


async def test_what_a_node_does_not_look_at_any_more_is_not_known(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk hangs, say. What was complete is neither used nor removed until it looks again, and no upload is given
    up."""
    monkeypatch.setattr(node_disks, "MARK_SECONDS", 0.1)
    pair.save(5)
    await pair.looks_until(lambda: pair.stored(5))
    (known,) = pair.first.catalogue.sets
    assert known.complete
    await pair.end_own()
    monkeypatch.setattr(node_disks, "STALE_SECONDS", 1.0)
    await pair.looks_until(lambda: not pair.first.catalogue.sets[0].complete)
    (found,) = pair.first.catalogue.sets
    assert found.completeness is Completeness.WRITING
    assert "node 1 has not looked at its disk" in found.reason
    assert awaited([found]) == found, "a start waits for it"
    pair.begin_own()
    await pair.looks_until(lambda: pair.first.catalogue.sets[0].complete)
    assert pair.first.catalogue.sets[0].save_id == known.save_id
    assert "upload-abandoned" not in pair.first.names()


async def test_a_node_knows_which_of_its_parts_are_in_the_store(pair: Pair) -> None:
    """By the files that it has, not by the number of the step: its pruner deletes no last copy."""
    for step in (5, 10):
        pair.save(step)
        await pair.looks_until(lambda s=step: pair.stored(s))
    await until(lambda: pair.own.stored == {5, 10})
    assert pair.own.newest_stored == 10
    await until(lambda: [step for step, _ in pair.second.journal.unfinished()] == [10])  # its journal does not grow
    second = pair.second.catalogue
    second.leave_to_node_0(pair.own.found_complete)
    parts: Any = SimpleNamespace(own_disk=pair.own, syncer=None, checkpoints=SimpleNamespace(catalogue=second))
    view = loop_wiring._Store(parts)

    def stored() -> set[int]:
        second.rescan()
        complete = {(s.step, s.save_id) for s in second.sets if s.complete}
        return {step for step, _ in complete & (view.stored or set())}

    await pair.looks_until(lambda: stored() == {5, 10})
    pair.part(5).write_bytes(os.urandom(1000))
    await pair.looks_until(lambda: stored() == {10})
    assert view.verified == 10
    assert pair.own.uploading == set()


@pytest.mark.parametrize("why", ["given up by node 0", "left by an earlier attempt", "its disk needs the space"])
async def test_parts_of_an_upload_that_is_given_up_are_cancelled(pair: Pair, why: str) -> None:
    """Node 1 has parts of a large file in the store. They cost until they are cancelled; a sweep does so after a
    day."""
    server = pair.first.server
    assert server is not None

    def begun() -> list[str]:
        return [v["name"] for v in server.versions() if v["action"] == "start" and v["name"].endswith(PART)]

    pair.save(5, size=18_000_000)
    server.fault("b2_upload_part", "slow", seconds=60, skip=6, count=500)
    await pair.looks_until(lambda: begun() and any(b.parts for b in pair.second.journal.begun().values()))
    assert pair.own.uploading == {5}
    if why == "left by an earlier attempt":
        await pair.end_own()
        pair.others.order = lambda *_: None  # type: ignore[method-assign]
        shutil.rmtree(pair.part(5).parent)
        server.admin("clear")
        pair.begin_own()
    elif why == "given up by node 0":
        pair.part(5).write_bytes(os.urandom(1000))
    else:
        await pair.own.abandon(5)
    server.admin("clear")
    await pair.looks_until(lambda: "upload-abandoned" in pair.first.names())
    await until(lambda: begun() == [])
    await until(lambda: not pair.second.journal.begun())
    assert pair.first.pointer() is None
    assert pair.first.violations() == []
    await until(lambda: pair.own.uploading == set())


@pytest.mark.parametrize(("newest", "kept"), [(-1, True), (40, True), (48, False)])
def test_a_node_keeps_an_earlier_branch_until_the_new_one_is_in_the_store(newest: int, kept: bool) -> None:
    """As node 0 does; that a checkpoint of the new branch is complete is not enough."""
    line = Lineage("l2", "l1", 40)

    def found(step: int, held: HeldAs | None) -> CheckpointSet:
        return CheckpointSet(step, "dcp", Completeness.COMPLETE, (), 1, 1, 1.0, f"s{step}", held_as=held)

    sets = (found(48, None), found(56, HeldAs.EARLIER_BRANCH))
    parts: Any = SimpleNamespace(
        own_disk=SimpleNamespace(uploading=frozenset({48}), newest_stored=newest),
        syncer=None,
        recovery=SimpleNamespace(state=SimpleNamespace(protect=())),
        checkpoints=SimpleNamespace(readers=[], catalogue=SimpleNamespace(sets=sets)),
        training=SimpleNamespace(
            record=SimpleNamespace(current=RunRecord("run", line, earlier=(EarlierSave(56, "s56", 1.0, "l1"),)))
        ),
    )
    protected = loop_wiring._Trainer(parts).protected
    assert protected[48] is Protection.UPLOADING
    assert (protected.get(56) is Protection.EARLIER_NEWEST) == kept
