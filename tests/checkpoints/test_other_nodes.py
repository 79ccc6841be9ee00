"""Checkpoints that are spread over the disks of several nodes: node 0 finds them complete from the files of all nodes,
and never from less."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.checkpoints import other_nodes
from podwatch.checkpoints.formats import sandbox
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layouts import PrimeRLLayout, kind_of
from podwatch.checkpoints.layouts.base import Layout, PartFiles, Site
from podwatch.checkpoints.other_nodes import CHECK_SECONDS, NodeLister
from podwatch.domain.checkpoint import CheckpointSet, Completeness, FileEntry
from podwatch.domain.node_files import NodeList, NodeStep, digest_of, list_document, parse_list
from podwatch.policy.resume import awaited
from tests.support.checkpoints import (
    ManualClock,
    dcp_operations,
    finish,
    safetensors_bytes,
    take,
    torch_zip_bytes,
)
from tests.support.examples import examples

SETTLE, WEAK = 5.0, 60.0


def dcp_layout(output: Path) -> Layout:
    return kind_of("dcp").make(Site(output))


@dataclass
class Others:
    """What node 0 has read of the other nodes' lists: only what travels in a document."""

    lists: list[NodeList] = field(default_factory=list)
    missing: str = ""
    looks: int = 0

    def mark(self) -> int:
        return self.looks

    def looked(self) -> int:
        return self.looks

    def unknown(self) -> str:
        return self.missing

    def steps(self, step: int) -> Sequence[NodeStep]:
        return [one.of(step) for one in self.lists]


class Nodes:
    """Node 0 with its catalogue, and node 1, each with a disk of its own."""

    def __init__(self, root: Path) -> None:
        self.clock = ManualClock()
        self.disks = (root / "n0", root / "n1")
        for disk in self.disks:
            disk.mkdir(parents=True, exist_ok=True)
        self.others = Others()
        self.catalogue = Catalogue(dcp_layout(self.disks[0]), self.clock, settle=SETTLE, settle_weak=WEAK)
        self.catalogue.join(self.others)
        self.lister = NodeLister(dcp_layout(self.disks[1]), (self.disks[1],), self.clock, SETTLE, WEAK)

    def spread(self, whole: Path) -> None:
        """Put the files as ranks with a disk of their own would have saved them."""
        for path in sorted(whole.rglob("*")):
            if path.is_file():
                disk = self.disks[1 if path.name.startswith("__1_") else 0]
                target = disk / path.relative_to(whole)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)

    def hear(self) -> None:
        listed = NodeList(1, "node 1", self.lister.look())
        heard = parse_list(list_document(listed, "run"), "run")
        assert heard is not None
        self.others.lists = [heard]
        self.others.looks += 1

    def poll(self, seconds: float = 0.0) -> dict[int, CheckpointSet]:
        self.clock.advance(seconds)
        self.hear()
        return {s.step: s for s in self.catalogue.rescan()}

    def settled(self, turns: int = 6) -> dict[int, CheckpointSet]:
        for _ in range(turns):
            found = self.poll(SETTLE + 1)
        return found


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def save(tmp_path: Path, step: int = 8, count: int | None = None) -> Path:
    whole = tmp_path / f"whole-{step}-{count}"
    operations = dcp_operations(whole / f"step_{step}", ranks=2)
    finish(operations) if count is None else take(operations, count)
    return whole


def test_the_files_of_both_nodes_are_one_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    nodes.spread(save(tmp_path))
    assert not nodes.poll()[8].complete
    found = nodes.settled()[8]
    assert found.complete
    contents = nodes.catalogue.contents(8)
    assert {(f.path, f.node) for f in contents.files} == {
        (".metadata", None),
        ("__0_0.distcp", None),
        ("__1_0.distcp", 1),
    }
    assert contents.world_size == 2
    own = sum(path.stat().st_size for path in nodes.disks[0].rglob("*") if path.is_file())
    assert found.size_bytes == own, "the disk's space is judged by what is on this disk"
    assert nodes.catalogue.inspect(8).problems == ()
    assert nodes.catalogue.verify(8) == ()


def test_it_is_the_same_save_as_on_one_disk(nodes: Nodes, tmp_path: Path) -> None:
    """After a restore each node has all files: the checkpoint is known as stored, and not sent again."""
    whole = save(tmp_path)
    nodes.spread(whole)
    spread = nodes.settled()[8]
    alone = Catalogue(dcp_layout(whole), nodes.clock, settle=SETTLE, settle_weak=WEAK)
    alone.rescan()
    nodes.clock.advance(100)
    (found,) = alone.rescan()
    assert found.save_id == spread.save_id != ""
    for disk in nodes.disks:
        shutil.copytree(whole, disk, dirs_exist_ok=True)
    assert nodes.settled()[8].save_id == spread.save_id


def test_a_save_stopped_after_any_operation_is_never_complete(tmp_path: Path) -> None:
    """Whichever files of whichever node are missing."""
    with sandbox.session():
        total = len(finish(dcp_operations(tmp_path / "trial" / "step_8", ranks=2)))
        for count in range(1, total):
            nodes = Nodes(tmp_path / str(count))
            nodes.spread(save(tmp_path, count=count))
            found = nodes.settled()
            assert not (8 in found and found[8].complete), f"stopped after {count} operations"


@pytest.mark.parametrize("state", ["not heard", "still written", "an old list"])
def test_what_is_not_known_of_another_node_is_no_evidence(nodes: Nodes, tmp_path: Path, state: str) -> None:
    """Neither complete nor incomplete, however old: an incomplete checkpoint can be deleted."""
    if state == "an old list":  # from before this save: node 1 has nothing
        nodes.hear()
    nodes.spread(save(tmp_path))
    if state != "an old list":
        nodes.hear()
    if state == "not heard":
        nodes.others.lists, nodes.others.missing = [], "node 1 has not listed its checkpoints yet"
    for _ in range(10):
        nodes.clock.advance(7 * 86400.0)
        (found,) = nodes.catalogue.rescan()
        assert found.completeness is Completeness.WRITING
        assert "node" in found.reason
        assert awaited([found]) == found, "a start waits for it, instead of using an older one"
    nodes.others.missing = ""
    assert nodes.settled()[8].complete


def test_a_file_that_is_damaged_on_another_node(tmp_path: Path) -> None:
    """Its own node checks it; node 0 cannot open it."""
    nodes = Nodes(tmp_path)
    nodes.spread(save(tmp_path))
    extra = nodes.disks[1] / "step_8" / "model.safetensors"
    extra.write_bytes(safetensors_bytes({"w": 4096})[:-100])
    found = nodes.settled()[8]
    assert not found.complete
    assert "model.safetensors" in found.reason
    extra.write_bytes(safetensors_bytes({"w": 4096}))
    assert nodes.settled(20)[8].complete, "and once it is whole"


def test_a_shard_of_another_size_on_another_node(nodes: Nodes, tmp_path: Path) -> None:
    nodes.spread(save(tmp_path))
    shard = nodes.disks[1] / "step_8" / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    index = nodes.disks[0] / "step_8" / ".metadata"
    os.utime(index)
    assert nodes.settled(80)[8].completeness is Completeness.DAMAGED


@pytest.mark.parametrize("number", range(3))
def test_a_record_that_was_never_written_on_another_node(nodes: Nodes, tmp_path: Path, number: int) -> None:
    """Name, size, time, beginning and end are right. Node 0 has the index; node 1 checks its shard without it."""
    nodes.spread(save(tmp_path))
    shard = nodes.disks[1] / "step_8" / "__1_0.distcp"
    whole, status = shard.read_bytes(), shard.stat()
    begins = [at for at in range(len(whole)) if whole.startswith(b"PK\x03\x04", at) and _is_record(whole, at)]
    begin = begins[number]
    end = [*begins, len(whole)][number + 1]
    shard.write_bytes(whole[: begin + (number == 0)] + bytes(end - begin - (number == 0)) + whole[end:])
    os.utime(shard, ns=(status.st_mtime_ns, status.st_mtime_ns))
    found = nodes.settled(80)[8]
    assert found.completeness is not Completeness.COMPLETE
    assert "__1_0.distcp" in found.reason
    shard.write_bytes(whole)
    assert nodes.settled(80)[8].complete, "and once it is whole"


def _is_record(data: bytes, at: int) -> bool:
    """Whether an archive begins here, not only one of its entries."""
    return at == 0 or data.startswith(b"PK\x05\x06", at - 22)


def test_a_part_that_its_node_finds_damaged_later(nodes: Nodes, tmp_path: Path) -> None:
    """Node 1 was started again after its power failed: name, size and time are those of before, the content is not."""
    nodes.spread(save(tmp_path))
    assert nodes.settled()[8].complete
    shard = nodes.disks[1] / "step_8" / "__1_0.distcp"
    status = shard.stat()
    shard.write_bytes(bytes(status.st_size))
    os.utime(shard, ns=(status.st_mtime_ns, status.st_mtime_ns))
    nodes.lister = NodeLister(dcp_layout(nodes.disks[1]), (nodes.disks[1],), nodes.clock, SETTLE, WEAK)
    nodes.hear()
    assert not nodes.others.lists[0].of(8).settled
    assert [s.complete for s in nodes.catalogue.rescan()] == [True], "it has not been checked again yet"
    assert not nodes.settled()[8].complete


def test_a_look_has_a_limit_for_its_checks(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that take long, on a slow disk, are spread over several looks; meanwhile it has not settled."""
    nodes.spread(save(tmp_path))
    for name in ("a.json", "b.json", "c.json"):
        (nodes.disks[1] / "step_8" / name).write_text("{")
    checked: list[str] = []

    def check(path: Path) -> str:
        checked.append(path.name)
        nodes.clock.advance(CHECK_SECONDS * 0.7)
        return f"{path.name} is damaged"

    monkeypatch.setattr(other_nodes, "check_file", check)
    nodes.lister.look()
    nodes.clock.advance(SETTLE + 1)
    assert [s.settled for s in nodes.lister.look()] == [False]
    assert checked == ["a.json", "b.json"]
    (one,) = nodes.lister.look()
    assert one.settled
    assert checked == ["a.json", "b.json", "c.json"], "each once"
    assert one.problems == ("a.json is damaged", "b.json is damaged", "c.json is damaged")


def test_two_nodes_with_different_files_of_one_name(nodes: Nodes, tmp_path: Path) -> None:
    """They are not one checkpoint: the store would hold one of them only."""
    nodes.spread(save(tmp_path))
    for disk in nodes.disks:
        (disk / "step_8" / "rng.txt").write_text(disk.name)
    os.utime(nodes.disks[1] / "step_8" / "rng.txt", (1, 1))
    found = nodes.settled()[8]
    assert not found.complete
    assert "rng.txt differs between node 0 and node 1" in found.reason


def test_a_complete_one_whose_other_part_is_gone_or_changed(nodes: Nodes, tmp_path: Path) -> None:
    """It is damaged or another save, and never again the one that was found complete."""
    nodes.spread(save(tmp_path))
    before = nodes.settled()[8]
    assert before.complete
    shard = nodes.disks[1] / "step_8" / "__1_0.distcp"
    kept = shard.read_bytes()
    shard.unlink()
    nodes.hear()
    assert not nodes.catalogue.contents(8).set.complete, "what is published asks this"
    assert not nodes.settled()[8].complete
    shard.write_bytes(kept)
    now = nodes.settled()[8]
    assert now.save_id != before.save_id


@settings(max_examples=examples(30))
@given(random=st.randoms(use_true_random=False))
def test_complete_only_while_every_file_is_there(tmp_path_factory: pytest.TempPathFactory, random: Random) -> None:
    """Any sequence of deletions and returns of files on both nodes."""
    root = tmp_path_factory.mktemp("spread")
    nodes = Nodes(root)
    nodes.spread(save(root))
    files = {p: (p.read_bytes(), p.stat().st_mtime_ns) for d in nodes.disks for p in d.rglob("*") if p.is_file()}
    for _ in range(6):
        path = random.choice(sorted(files))
        if path.exists():
            path.unlink()
        else:
            path.write_bytes(files[path][0])
            os.utime(path, ns=(files[path][1],) * 2)
        whole = all(p.exists() for p in files)
        found = nodes.settled()
        assert (8 in found and found[8].complete) == whole


# -- the other node's own disk ----------------------------------------------------------------------------------------


def test_a_node_lists_what_has_settled(nodes: Nodes, tmp_path: Path) -> None:
    nodes.spread(save(tmp_path))
    assert [s.settled for s in nodes.lister.look()] == [False]
    nodes.clock.advance(SETTLE + 1)
    (one,) = nodes.lister.look()
    assert one.settled
    assert [(f.path, f.problem) for f in one.files] == [("__1_0.distcp", "")]
    (nodes.disks[1] / "step_8" / "__1_0.distcp").write_bytes(b"")
    assert [s.settled for s in nodes.lister.look()] == [False], "it is written again"


def test_a_file_that_may_still_be_filled_settles_later(nodes: Nodes) -> None:
    """Ranges of it were never written: a writer can have allocated it before, or it is a sparse copy."""
    data = torch_zip_bytes({}, (bytes(1 << 20),))
    shard = nodes.disks[1] / "step_8" / "__1_0.distcp"
    shard.parent.mkdir()
    with shard.open("wb") as file:
        file.write(data[: 1 << 18])
        file.seek(3 << 18)
        file.write(data[3 << 18 :])
    assert shard.read_bytes() == data
    nodes.lister.look()
    nodes.clock.advance(SETTLE + 1)
    assert [s.settled for s in nodes.lister.look()] == [False]
    nodes.clock.advance(WEAK)
    assert [(s.settled, s.files[0].problem) for s in nodes.lister.look()] == [(True, "")]


def test_node_0_alone_finds_a_checkpoint_complete(tmp_path: Path) -> None:
    """On another node, a layout would judge half a checkpoint."""
    nodes = Nodes(tmp_path)
    nodes.spread(save(tmp_path))
    verdicts: dict[int, str] = {}

    def complete(step: int, found: Sequence[PartFiles]) -> bool:
        return verdicts.get(step) == digest_of([f for p in found for f in p.files])

    own = Catalogue(dcp_layout(nodes.disks[1]), nodes.clock, settle=SETTLE, settle_weak=WEAK)
    own.leave_to_node_0(complete)
    for _ in range(5):
        nodes.clock.advance(86400.0)
        (found,) = own.rescan()
        assert (found.completeness, found.unclear) == (Completeness.WRITING, False)
    nodes.settled()
    verdicts[8] = nodes.others.lists[0].of(8).digest
    own.rescan()
    nodes.clock.advance(SETTLE + 1)
    (found,) = own.rescan()
    assert found.complete
    (nodes.disks[1] / "step_8" / "more.bin").write_bytes(b"of another save")
    for _ in range(3):
        nodes.clock.advance(SETTLE + 1)
        (found,) = own.rescan()
    assert not found.complete, "the verdict was about other files"


def test_prime_rl_on_one_node_is_judged_as_before(tmp_path: Path) -> None:
    """Node 0 holds everything, and the other nodes nothing."""
    from tests.support.checkpoints import write_prime_rl_step

    write_prime_rl_step(tmp_path, 5, ranks=2)
    clock = ManualClock()
    catalogue = Catalogue(PrimeRLLayout(tmp_path), clock, settle=SETTLE, settle_weak=WEAK)
    others = Others([NodeList(1, "node 1")])
    catalogue.join(others)
    for _ in range(4):
        clock.advance(WEAK + 1)
        others.looks += 1
        found = catalogue.rescan()
    assert [s.complete for s in found] == [True]


def test_a_node_entry_is_never_opened_here(nodes: Nodes, tmp_path: Path) -> None:
    """A name that another node lists can name anything on this disk."""
    nodes.spread(save(tmp_path))
    nodes.settled()
    entry = FileEntry("../../secret", "checkpoint", 1, 1, node=1)
    listed = NodeList(1, "node 1", (NodeStep(8, (entry,), settled=True),))
    heard = parse_list(list_document(listed, "run"), "run")
    assert heard is not None
    assert heard.of(8) == NodeStep(8, ()), "its step never settles"
