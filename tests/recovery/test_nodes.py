"""A node that follows starts only from the very checkpoint that node 0 announces."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from podwatch.recovery import Phase
from podwatch.recovery.start import files_of
from tests.support.recovery_nodes import Attempt, Side, leave_all, two_worlds
from tests.support.recovery_world import FlatLayout, Podwatch, World


class Nodes:
    """Two nodes with a directory each, which show the same once ``see_the_same`` was called."""

    def __init__(self, root: Path) -> None:
        self.first, self.second = two_worlds(root)
        self.attempt = Attempt()
        self.leader = Podwatch(self.first, gang=Side(self.attempt, leads=True))
        self.other = Podwatch(self.second, gang=Side(self.attempt, leads=False))

    def see_the_same(self) -> None:
        shutil.rmtree(self.second.output)
        shutil.copytree(self.first.output, self.second.output)


@pytest.fixture
async def nodes(quick_dir: Path) -> AsyncIterator[Nodes]:
    made = Nodes(quick_dir)
    yield made
    await leave_all(made.leader, made.other)


async def begun(nodes: Nodes) -> None:
    await nodes.leader.recovery.begin()
    await nodes.leader.until(Phase.CONFIRMING)
    await nodes.other.recovery.begin()


@pytest.mark.parametrize("seen", ["nothing", "a file is missing", "another size", "one more file"])
async def test_a_node_that_sees_another_checkpoint_than_node_0_does_not_start(nodes: Nodes, seen: str) -> None:
    """Each has its own disk, or the file system shows an old state. It reports that, and starts once it sees the
    same, unless all nodes end before."""
    nodes.first.save(40)
    if seen != "nothing":
        nodes.second.save(40)
    place = nodes.second.output / "checkpoints" / "step_40"
    if seen == "a file is missing":
        (place / "a.bin").unlink()
    elif seen == "another size":
        (place / "a.bin").write_bytes(b"half")
    elif seen == "one more file":
        (place / "c.bin").write_bytes(b"of this node")
    await begun(nodes)
    await nodes.other.until_phase(Phase.BLOCKED)
    what = "which this node does not see" if seen == "nothing" else "of which this node sees other files"
    assert f"node 0 starts from step 40, {what}" in nodes.other.recovery.state.detail
    assert "must be the same directories on all nodes" in nodes.other.recovery.state.detail
    assert not nodes.second.plans
    assert nodes.attempt.refusals[0] == nodes.other.recovery.state.detail
    nodes.see_the_same()
    await nodes.other.until(Phase.CONFIRMING)
    assert [plan.step for plan in nodes.second.plans] == [40]


@pytest.mark.parametrize("step", [None, 40])
async def test_a_node_that_sees_the_same_checkpoint_starts_from_it(nodes: Nodes, step: int | None) -> None:
    if step is not None:
        nodes.first.save(step)
        nodes.see_the_same()
    await begun(nodes)
    await nodes.other.until(Phase.CONFIRMING)
    assert [plan.step for plan in nodes.second.plans] == [plan.step for plan in nodes.first.plans] == [step]
    assert bool(nodes.attempt.files) is (step is not None)


async def test_the_record_of_an_older_podwatch_names_no_files(nodes: Nodes) -> None:
    nodes.second.save(40)
    nodes.attempt.step = 40
    nodes.attempt.ready.set()
    await nodes.other.recovery.begin()
    await nodes.other.until(Phase.CONFIRMING)
    assert [plan.step for plan in nodes.second.plans] == [40]


def test_the_hash_of_a_checkpoint_follows_names_and_sizes_alone(tmp_path: Path) -> None:
    """Clients of one network file system round times differently."""
    world = World(tmp_path)
    layout, place = FlatLayout(world.output), world.output / "checkpoints" / "step_40"
    assert files_of(layout, 40) == "", "it is absent"
    world.save(40)
    before = files_of(layout, 40)
    (place / "done").touch()
    (world.output / "notes" / "step_40" / "n.txt").write_text("no resume needs it")
    assert files_of(layout, 40) == before != ""
    (place / "a.bin").rename(place / "A.bin")
    assert files_of(layout, 40) not in ("", before)
    (place / "A.bin").rename(place / "a.bin")
    assert files_of(layout, 40) == before
    (place / "link").symlink_to("a.bin")
    assert files_of(layout, 40) != before
