"""Checkpoints or parts of them on file systems of their own: a rename into podwatch's trash fails there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import podwatch.disk.remove as remover_module
from podwatch.disk.leftovers import trash_entries
from podwatch.disk.plan import Removal, RemovalKind, RemovalPlan
from podwatch.disk.remove import Remover
from podwatch.domain.event import Event
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from tests.support.mounts import small_mount

MIB = 1 << 20


class Pod:
    """``out`` on one file system, ``ckpt`` (prime-rl's ckpt.output_dir) on a second, ``out/weights`` on a third."""

    def __init__(self, tmp: Path) -> None:
        self.out, self.ckpt = tmp / "out", tmp / "volume" / "run"
        self.ckpt.mkdir(parents=True)
        self.workspace = Workspace(self.out, beside=(self.ckpt,)).probe()
        self.events: list[Event] = []
        self.remover = self.fresh()

    def fresh(self) -> Remover:
        return Remover(self.workspace, SystemClock(), self.events.append)

    def paths(self, step: int) -> tuple[Path, ...]:
        name = f"step_{step}"
        return (self.ckpt / "checkpoints" / name, self.out / "checkpoints" / name, self.out / "weights" / name)

    def save(self, step: int) -> None:
        for path in self.paths(step):
            path.mkdir(parents=True)
            (path / "data.bin").write_bytes(b"x" * MIB)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with small_mount(tmp_path / "volume", 16 * MIB) as one, small_mount(tmp_path / "out" / "weights", 16 * MIB) as two:
        if not (one and two):
            pytest.skip("mounting a tmpfs is not allowed here")
        yield Pod(tmp_path)


def plan(step: int) -> RemovalPlan:
    return RemovalPlan((Removal(RemovalKind.STORED, 3 * MIB, "test", step),))


def test_a_set_goes_from_all_its_file_systems(pod: Pod) -> None:
    pod.save(5)
    pod.save(10)
    report = pod.remover.carry_out(plan(5), pod.paths)
    assert report.problems == ()
    assert report.freed_bytes >= 3 * MIB
    assert [p.exists() for p in (*pod.paths(5), *pod.paths(10))] == [False] * 3 + [True] * 3
    names = {p.name for p in (pod.out / "checkpoints").iterdir()} | {p.name for p in (pod.ckpt).iterdir()}
    assert names == {"step_10", "checkpoints"}, "nothing of ours where trainers look for steps"


def test_a_crash_after_the_renames_is_swept_on_every_file_system(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.save(5)
    monkeypatch.setattr(remover_module.Remover, "_empty_trash", lambda self, problems: 0)
    pod.remover.carry_out(plan(5), pod.paths)
    monkeypatch.undo()
    assert [p.exists() for p in pod.paths(5)] == [False] * 3
    held = [pod.ckpt.parent / ".podwatch" / "run" / "user" / "trash", pod.out / "weights" / ".podwatch" / "trash"]
    assert all(trash_entries(pod.workspace.tree, t) for t in held)
    assert pod.fresh().sweep_trash().freed_bytes >= 3 * MIB
    assert [trash_entries(pod.workspace.tree, t) for t in held] == [(), ()]


def test_the_trash_of_a_volume_is_made_before_it_is_full(pod: Pod) -> None:
    """mkdir fails on a full disk where rename works ."""
    pod.remover.sweep_trash()
    assert (pod.ckpt.parent / ".podwatch" / "run" / "user" / "trash").is_dir()
    pod.fresh().sweep_trash()
    assert sorted(p.name for p in pod.ckpt.iterdir()) == []
