"""Checkpoints that are single files in a directory shared by many: catalogue, upload, restore, quarantine, removal."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layout import Site
from podwatch.checkpoints.trainers import KINDS, make_layout
from podwatch.disk.plan import Removal, RemovalKind, RemovalPlan
from podwatch.disk.remove import Remover
from podwatch.domain.checkpoint import Completeness
from podwatch.recovery import quarantine
from podwatch.sync.interfaces import RunIdentity
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from tests.support.checkpoints import ManualClock
from tests.support.layout_makers import deepspeed, lightning, run
from tests.sync.conftest import World


class Pod(World):
    """A run of Lightning's on one pod."""

    def __post_init__(self) -> None:
        super().__post_init__()
        trainer = self.settings.trainer.model_copy(update={"layout": "lightning"})
        self.settings = self.settings.model_copy(update={"trainer": trainer})
        self.layout = make_layout(self.settings)
        self.clock = ManualClock()
        self.catalogue = Catalogue(self.layout, self.clock, settle=5.0, settle_weak=60.0)
        self.place = self.output / "checkpoints"

    def identity(self) -> RunIdentity:
        return replace(super().identity(), layout="lightning")

    def file(self, step: int) -> Path:
        return self.place / f"epoch=0-step={step}.ckpt"

    def save(self, *steps: int) -> None:
        for step in steps:
            run(lightning.operations(self.output, step))

    def settle(self) -> None:
        for _ in range(3):
            self.clock.advance(6.0)
            self.catalogue.rescan()

    def complete(self) -> dict[int, Completeness]:
        return {s.step: s.completeness for s in self.catalogue.sets}


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path / "pod", f"file://{tmp_path}/store")
    yield made
    made.journal.close()


def test_the_catalogue_follows_each_file(pod: Pod) -> None:
    pod.save(10)
    pod.settle()
    pod.save(20)
    pod.catalogue.rescan()
    assert pod.complete() == {10: Completeness.COMPLETE, 20: Completeness.WRITING}
    pod.settle()
    assert pod.complete() == {10: Completeness.COMPLETE, 20: Completeness.COMPLETE}
    contents = pod.catalogue.contents(10)
    assert [(f.part, f.path) for f in contents.files] == [("checkpoint", "epoch=0-step=10.ckpt")]
    assert pod.catalogue.verify(20) == ()
    old = pod.catalogue.contents(20).set.save_id
    pod.file(20).write_bytes(lightning.content(20, best="another"))
    os.utime(pod.file(20), (1_900_000_000, 1_900_000_000))
    pod.catalogue.rescan()
    assert pod.complete()[10] is Completeness.COMPLETE
    assert pod.complete()[20] is not Completeness.COMPLETE
    pod.settle()
    assert pod.catalogue.contents(20).set.save_id not in ("", old)
    pod.file(10).unlink()
    pod.catalogue.rescan()
    assert set(pod.complete()) == {20}


def test_a_growing_file_is_being_written(pod: Pod) -> None:
    pod.save(10)
    pod.settle()
    operations = lightning.operations(pod.output, 20)
    run(operations, len(operations) - 1)
    pod.settle()
    assert pod.complete()[20] is not Completeness.COMPLETE
    operations[-1]()
    pod.settle()
    assert pod.complete()[20] is Completeness.COMPLETE


def test_a_growing_file_that_hides_its_step(pod: Pod) -> None:
    """Nothing is listed while nothing changes, and a growing file does not change its directory."""
    operations = lightning.file(pod.place / "best.ckpt", 20)
    run(operations, len(operations) - 1)
    pod.settle()
    assert pod.complete() == {}
    operations[-1]()
    pod.settle()
    assert pod.complete() == {20: Completeness.COMPLETE}


async def test_a_restore_puts_the_file_beside_the_others(pod: Pod, tmp_path: Path) -> None:
    pod.save(10, 20)
    pod.settle()
    syncer = pod.syncer()
    await syncer.start()
    await syncer.sync_now()
    await syncer.stop()
    other = Pod(tmp_path / "pod2", pod.store_url, writer_id="writer-2")
    other.save(5)
    (other.place / "notes.txt").write_text("mine")
    report = other.restorer().fetch()
    assert report.step == 20
    assert report.parts == (str(other.place),)
    assert other.file(20).read_bytes() == pod.file(20).read_bytes()
    assert other.file(20).stat().st_mtime_ns == pod.file(20).stat().st_mtime_ns
    assert {p.name for p in other.place.iterdir()} == {"epoch=0-step=5.ckpt", "epoch=0-step=20.ckpt", "notes.txt"}
    assert other.restorer().fetch().downloaded_bytes == 0, "it is in place"
    other.file(20).write_bytes(b"something else")
    again = other.restorer().fetch()
    assert again.set_aside == (str(other.file(20)),)
    assert other.file(20).read_bytes() == pod.file(20).read_bytes()
    assert other.file(5).exists()
    other.settle()
    assert other.complete() == {5: Completeness.COMPLETE, 20: Completeness.COMPLETE}
    other.journal.close()
    empty = Pod(tmp_path / "pod3", pod.store_url, writer_id="writer-3")
    empty.restorer().fetch()
    assert set(empty.layout.steps()) == {20}
    report = empty.restorer().fetch(to=tmp_path / "elsewhere")
    assert report.parts == (str(tmp_path / "elsewhere" / "checkpoint"),)
    assert (tmp_path / "elsewhere" / "checkpoint" / "epoch=0-step=20.ckpt").is_file()
    empty.journal.close()


def test_quarantine_and_back(pod: Pod) -> None:
    pod.save(10, 20, 30)
    workspace = Workspace(pod.output)
    quarantine.make_spare(workspace)
    ahead = pod.layout.ahead_of(10)
    data = quarantine.plan(ahead, step=10, steps={20: "complete", 30: "complete"}, lineage="l", wall=1.0, number=7)
    assert quarantine.carry_out(workspace, data) == 2
    assert set(pod.layout.steps()) == {10}
    quarantine.give_back(workspace, 7)
    assert set(pod.layout.steps()) == {10, 20, 30}


def test_removal_takes_the_file_and_nothing_else(pod: Pod) -> None:
    pod.save(10, 20)
    size = pod.file(10).stat().st_size
    workspace = Workspace(pod.output)
    for directory in (workspace.trash, workspace.quarantine):
        directory.mkdir(parents=True)
    remover = Remover(workspace, SystemClock(), pod.events.append)
    plan = RemovalPlan((Removal(RemovalKind.STORED, size, "in the store", 10),))
    report = remover.carry_out(plan, pod.layout.step_paths)
    assert report.problems == ()
    assert [r.step for r in report.done] == [10]
    assert report.freed_bytes > 0
    assert [p.name for p in pod.place.iterdir()] == ["epoch=0-step=20.ckpt"]


def test_the_catalogue_looks_again_when_latest_changes(tmp_path: Path) -> None:
    """Nothing inside the step changes any more when the tracker beside it is written, or is cut off by a kill."""
    clock = ManualClock()
    layout = KINDS["deepspeed"].make(Site(tmp_path))
    catalogue = Catalogue(layout, clock, settle=5.0, settle_weak=60.0)

    def settled(seconds: float) -> dict[int, Completeness]:
        for _ in range(3):
            clock.advance(seconds)
            catalogue.rescan()
        return {s.step: s.completeness for s in catalogue.sets}

    operations = deepspeed.operations(tmp_path, 10)
    run(operations[:-3])
    assert settled(10.0) == {10: Completeness.WRITING}
    run(operations[-3:])
    assert settled(30.0) == {10: Completeness.COMPLETE}
    operations = deepspeed.operations(tmp_path, 20)
    run(operations[:-2])
    assert (tmp_path / "latest").read_bytes() == b""
    assert settled(30.0)[10] is Completeness.COMPLETE
    assert settled(30.0)[20] is not Completeness.COMPLETE
    run(operations[-2:])
    assert settled(30.0) == {10: Completeness.COMPLETE, 20: Completeness.COMPLETE}
