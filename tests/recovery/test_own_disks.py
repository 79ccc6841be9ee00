"""Two nodes with a disk of their own each: a start uses only what the store has, and what no node can lose."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError, PodwatchError, RemoteError
from podwatch.domain.stored_checkpoint import StoredSave
from podwatch.journal import Journal
from podwatch.recovery import Phase
from podwatch.recovery.resume_point import ResumeChooser
from tests.support.recovery_world import Podwatch, Store, World


@dataclass
class Attempt:
    """What the nodes of one attempt know of each other."""

    prepare: list[tuple[int, str]] = field(default_factory=list)
    """The saves that rank 0 has ordered, in order."""
    done: int = 0
    """Orders that the other node has carried out."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    step: int | None = None
    files: str = ""
    refusals: list[str] = field(default_factory=list)


@dataclass
class Side:
    attempt: Attempt
    leads: bool
    own_disks: bool = True

    async def gather(self) -> None: ...

    async def prepare(self, step: int, save_id: str) -> None:
        self.attempt.prepare.append((step, save_id))

    async def prepared(self) -> None:
        while self.attempt.done < len(self.attempt.prepare):
            await asyncio.sleep(0.001)

    async def announce(self, step: int | None, files: str) -> None:
        assert self.attempt.done == len(self.attempt.prepare), "a node has not fetched its part"
        self.attempt.step, self.attempt.files = step, files
        self.attempt.ready.set()

    async def awaited(self, fetch: Callable[[int, str], Awaitable[None]]) -> tuple[int | None, str]:
        while not self.attempt.ready.is_set():
            if self.attempt.done < len(self.attempt.prepare):
                await fetch(*self.attempt.prepare[self.attempt.done])
                self.attempt.done += 1
            await asyncio.sleep(0.001)
        return self.attempt.step, self.attempt.files

    def cannot_start(self, why: str) -> None:
        self.attempt.refusals.append(why)


class Backup:
    """The uploads of all nodes: ``error`` is raised, or the checkpoint is in the store then."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.error: PodwatchError | None = None
        self.asked: list[int] = []

    async def sync_now(self, step: int | None = None) -> None:
        assert step is not None
        self.asked.append(step)
        if self.error is not None:
            raise self.error
        self.store.saves.append(StoredSave(step, f"s{step}", "line1", step))


class Nodes:
    def __init__(self, root: Path) -> None:
        self.first, self.second = World(root / "n0"), World(root / "n1")
        for world in (self.first, self.second):
            world.output.mkdir(parents=True)
            (world.root / "state").mkdir()
        self.attempt = Attempt()
        self.stores = (Store(self.first), Store(self.second))
        self.backup = Backup(self.stores[0])
        self.leader = Podwatch(
            self.first, gang=Side(self.attempt, leads=True), restore=self.stores[0], backup=self.backup
        )
        self.other = Podwatch(self.second, gang=Side(self.attempt, leads=False), restore=self.stores[1])

    def store_has(self, *steps: int) -> None:
        self.stores[0].saves = [StoredSave(step, f"s{step}", "line1", step) for step in steps]

    async def begin(self) -> None:
        await self.leader.recovery.begin(adopt_existing=True)
        await self.other.recovery.begin(adopt_existing=True)

    async def started(self) -> tuple[list[int | None], list[int | None]]:
        await self.leader.until(Phase.CONFIRMING)
        await self.other.until(Phase.CONFIRMING)
        return [plan.step for plan in self.first.plans], [plan.step for plan in self.second.plans]

    async def close(self) -> None:
        for podwatch in (self.leader, self.other):
            await podwatch.leave()
        for world in (self.first, self.second):
            world.close()


@pytest.fixture
async def nodes(quick_dir: Path) -> AsyncIterator[Nodes]:
    made = Nodes(quick_dir)
    yield made
    await made.close()


def steps_on(world: World) -> set[str]:
    return {path.name for path in (world.output / "checkpoints").glob("step_*")}


async def test_the_newest_complete_one_is_uploaded_before_anything_starts(nodes: Nodes) -> None:
    nodes.first.save(48)
    nodes.second.save(48)
    nodes.store_has(40)
    await nodes.begin()
    assert await nodes.started() == ([48], [48])
    assert nodes.backup.asked == [48]
    assert [store.fetched for store in nodes.stores] == [[48], [48]], "each node fetches what it lacks"
    assert [store.fetched_saves for store in nodes.stores] == [["s48"], ["s48"]], "and the very same save"


async def test_what_is_in_the_store_is_not_uploaded_again(nodes: Nodes) -> None:
    nodes.first.save(40)
    nodes.store_has(40)
    save_id = nodes.leader.catalogue.rescan()[-1].save_id
    known = replace(nodes.first.published(40, "line1", seq=1), save_id=save_id)
    await nodes.leader.journal.run(Journal.note_published, known)
    await nodes.begin()
    assert await nodes.started() == ([40], [40])
    assert nodes.backup.asked == []


async def test_while_the_store_does_not_answer_nothing_starts(nodes: Nodes) -> None:
    """Neither from half a checkpoint, nor from an older one, nor fresh."""
    nodes.first.save(48)
    nodes.store_has(40)
    nodes.backup.error = RemoteError("the store does not answer")
    await nodes.begin()
    await nodes.leader.until_phase(Phase.BLOCKED)
    assert "step 48 is complete on the disks of the nodes, but not in the store" in nodes.leader.recovery.state.detail
    assert not nodes.first.plans
    assert not nodes.second.plans
    assert nodes.attempt.prepare == []
    nodes.backup.error = None
    assert await nodes.started() == ([48], [48])


async def test_a_part_that_a_node_has_lost(nodes: Nodes) -> None:
    """Then the newest checkpoint in the store is the best that there is."""
    nodes.first.save(48)
    nodes.store_has(40)
    nodes.backup.error = HostError("this node does not have the checkpoint any more")
    await nodes.begin()
    assert await nodes.started() == ([40], [40])
    assert "step_48" not in steps_on(nodes.first), "ahead of the start, so it is in quarantine"


async def test_every_node_moves_what_is_ahead_to_quarantine(nodes: Nodes) -> None:
    nodes.second.save(48)
    nodes.second.save(56)
    nodes.store_has(40)
    await nodes.begin()
    assert await nodes.started() == ([40], [40])
    assert steps_on(nodes.second) == {"step_40"}
    assert {b"a.bin of 48", b"a.bin of 56"} <= nodes.second.contents(), "in quarantine"


async def test_a_fresh_start_needs_no_store(nodes: Nodes) -> None:
    await nodes.begin()
    assert await nodes.started() == ([None], [None])
    assert nodes.attempt.prepare == []


async def test_a_node_that_cannot_fetch_ends_the_attempt(nodes: Nodes) -> None:
    nodes.store_has(40)
    nodes.stores[1].fetch_error = HostError("the disk is full")
    await nodes.begin()
    async with asyncio.timeout(60):
        while not nodes.attempt.refusals:
            await asyncio.sleep(0.002)
    assert "the disk is full" in nodes.attempt.refusals[0]
    assert not nodes.first.plans, "rank 0 waits for it, and ends all"


async def test_back_to_an_older_step_in_the_store(nodes: Nodes) -> None:
    """`podwatch start --step 40`, and a step back below 48: the nodes and the store have newer ones."""
    nodes.first.save(48)
    nodes.store_has(32, 40, 48)
    await nodes.begin()
    assert await nodes.started() == ([48], [48])
    chooser = ResumeChooser(nodes.leader.recovery.context)
    nodes.backup.asked.clear()
    for asked in ({"wanted": 40}, {"below": 48}):
        choice = await chooser.choose(**asked, wait=False)  # type: ignore[arg-type]
        assert (choice.step, choice.source, choice.save_id) == (40, "store", "s40")
    assert nodes.backup.asked == [], "a dry run uploads nothing"
