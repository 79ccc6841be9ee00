"""Sizes of what lies beside the checkpoints: measured once, in bounded turns, without following anything out."""

from pathlib import Path

import pytest

from podwatch.disk import leftovers
from podwatch.disk.leftovers import Measurements
from podwatch.domain.checkpoint import CheckpointSet, Completeness, PartState
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree
from tests.drivers.checkpoints import prime_rl_layout
from tests.support.checkpoints import write_prime_rl_step, write_rollouts
from tests.support.fixed_paths import FixedPaths

BLOCK = 4096


def tree(path: Path, files: int, size: int = BLOCK) -> Path:
    (path / "deep").mkdir(parents=True)
    for n in range(files):
        (path / "deep" / f"{n}.bin").write_bytes(b"x" * size)
    return path


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    original = PinnedTree.measure

    def counting(self: PinnedTree, path: Path, entries: int = 1 << 62) -> tuple[int, int]:
        if path.name != "trash":
            seen.append(str(path))
        return original(self, path, entries)

    monkeypatch.setattr(PinnedTree, "measure", counting)
    return seen


def make(tmp_path: Path, *paths: tuple[int, Path]) -> Measurements:
    workspace = Workspace(tmp_path / "outputs")
    for directory in (workspace.trash, workspace.quarantine):
        directory.mkdir(parents=True, exist_ok=True)
    return Measurements(workspace, FixedPaths(paths), keep_seconds=60.0)


def test_an_old_directory_is_walked_once_and_a_recent_one_each_time(tmp_path: Path, walks: list[str]) -> None:
    old, new = tree(tmp_path / "outputs" / "step_1", 3), tree(tmp_path / "outputs" / "step_9", 1)
    aside = make(tmp_path, (1, old), (9, new))
    first = aside.measure(0.0, verified=5)
    assert [(s.step, s.path) for s in first.by_products] == [(1, str(old)), (9, str(new))]
    assert first.by_products[0].bytes >= 3 * BLOCK
    assert first.bytes == sum(s.bytes for s in first.by_products) + first.trash_bytes
    (new / "deep" / "more.bin").write_bytes(b"x" * 8 * BLOCK)
    second = aside.measure(0.0, verified=5)
    assert second.by_products[1].bytes >= first.by_products[1].bytes + 8 * BLOCK
    assert walks == [str(old), str(new), str(new)]
    tree(old / "again", 2)  # the directory itself changed
    assert aside.measure(0.0, verified=5).by_products[0].bytes > first.by_products[0].bytes


def test_a_look_is_bounded_and_goes_on_at_the_next(
    tmp_path: Path, walks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "MOST_ENTRIES", 10)
    paths = [(n, tree(tmp_path / "outputs" / f"step_{n}", 7)) for n in range(4)]
    aside = make(tmp_path, *paths)
    seen = [[s.step for s in aside.measure(0.0, verified=9).by_products] for _ in range(3)]
    assert seen == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert len(walks) == 4
    huge = make(tmp_path, (1, tree(tmp_path / "outputs" / "huge", 50)))
    (entry,) = huge.measure(0.0, verified=9).by_products
    assert 9 * BLOCK <= entry.bytes < 50 * BLOCK, "a lower bound, and the look ends"


def test_what_is_linked_in_is_not_counted(tmp_path: Path) -> None:
    outside = tree(tmp_path / "outside", 50)
    inside = tree(tmp_path / "outputs" / "step_1", 1)
    (inside / "link").symlink_to(outside)
    (tmp_path / "outputs" / "step_2").symlink_to(outside)
    aside = make(tmp_path, (1, inside), (2, tmp_path / "outputs" / "step_2"), (3, tmp_path / "outputs" / "gone"))
    (entry,) = aside.measure(0.0, verified=9).by_products
    assert entry.bytes < 20 * BLOCK


@pytest.mark.parametrize("variant", ["A", "B"])
def test_prime_rl_names_what_belongs_to_no_checkpoint(tmp_path: Path, variant: str) -> None:
    out = tmp_path / "outputs"
    for step in (4, 8):
        write_prime_rl_step(out, step, variant)
    for step in (3, 4, 5, 9):
        write_rollouts(out, step, variant)
    layout = prime_rl_layout(out)
    workspace = Workspace(out)
    workspace.trash.mkdir(parents=True)
    found = Measurements(workspace, layout, keep_seconds=60.0).measure(0.0, verified=8)
    assert {s.step for s in found.by_products} == {3, 5, 9}
    assert all(Path(s.path).name == f"step_{s.step}" and "rollouts" in s.path for s in found.by_products)


def test_what_has_a_name_outside_its_checkpoint_is_linked(tmp_path: Path) -> None:
    """Two names within one checkpoint are no reason to count: both go."""
    export, step = tree(tmp_path / "outputs" / "export", 1), tree(tmp_path / "outputs" / "step_1", 2, 5000)
    (export / "model").hardlink_to(step / "deep" / "0.bin")
    other = tree(tmp_path / "outputs" / "optimizer_1", 1, 7000)
    (step / "same").hardlink_to(other / "deep" / "0.bin")
    workspace = Workspace(tmp_path / "outputs")
    shared = tree(tmp_path / "outputs" / "shared", 1)
    (tmp_path / "outputs" / "name").hardlink_to(shared / "deep" / "0.bin")
    gone = tmp_path / "outputs" / "gone"
    checkpoints = [made_of(1, step, other, shared), made_of(2, gone, shared), made_of(3, export)]
    found = Measurements(workspace, FixedPaths(), keep_seconds=60.0).measure(0.0, 9, checkpoints)
    assert found.linked == {1: 5000, 2: 0, 3: 5000}


def made_of(step: int, *paths: Path) -> CheckpointSet:
    parts = tuple(PartState(path.name, str(path), True, True, 1) for path in paths)
    return CheckpointSet(step, "x", Completeness.COMPLETE, parts, 1, 1, 0.0)
