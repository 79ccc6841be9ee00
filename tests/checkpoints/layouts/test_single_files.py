"""Checkpoints that are single files in a directory shared by many: catalogue, upload, restore, quarantine, removal."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of, make_layout
from podwatch.config.settings import Settings
from podwatch.disk.plan import Removal, RemovalKind, RemovalPlan
from podwatch.disk.remove import Remover
from podwatch.domain.checkpoint import Completeness
from podwatch.domain.event import Event
from podwatch.recovery import quarantine
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from tests.support.checkpoints import ManualClock
from tests.support.layout_makers import deepspeed, lightning, run


@dataclass
class Pod:
    """A run of Lightning's on one pod."""

    output: Path
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output.mkdir()
        trainer = {"layout": "lightning", "output_dir": self.output}
        self.layout = make_layout(Settings.model_validate({"run_id": "run", "trainer": trainer}))
        self.clock = ManualClock()
        self.catalogue = Catalogue(self.layout, self.clock, settle=5.0, settle_weak=60.0)
        self.place = self.output / "checkpoints"

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
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path / "out")


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
    layout = layout_of(all_trainers()["deepspeed"], Site(tmp_path))
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
