"""Checkpoints that real libraries wrote, judged by the rules: found, whole, and complete only after the settle time."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.checkpoints import (
    LAYOUTS,
    Catalogue,
    Completeness,
    Layout,
    SaveEnd,
    file_problem,
    is_legacy_torch_file,
    judge,
    names_in_safetensors,
    one_reader,
    recognised,
    scan,
    values_in_torch_file,
)
from tests.drivers.checkpoints import catalogue_of as catalogue_over
from tests.support.checkpoints import ManualClock
from tests.support.golden import GOLDEN, GOLDENS, INDEX, Golden, files_of, settle_times

SETTLE, TRACKER, WEAK = 5.0, 15.0, 60.0
each = pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: g.name)


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    """One child reads for the whole test: starting one takes longer than most tests."""
    with one_reader():
        yield


def catalogue_of(layout: Layout, clock: ManualClock) -> Catalogue:
    return catalogue_over(layout, clock, settle=SETTLE, settle_tracker=TRACKER, settle_weak=WEAK)


def test_every_fixture_is_used_and_small() -> None:
    used = {g.source for g in GOLDENS} | {n for n, e in INDEX.items() if not e["layout"]}
    assert used == set(INDEX)
    assert {g.kind for g in GOLDENS} <= set(LAYOUTS)
    assert sum(p.lstat().st_size for p in GOLDEN.rglob("*") if p.is_file()) < 3_000_000


@each
def test_a_golden_set_is_whole(golden: Golden, tmp_path: Path) -> None:
    layout = golden.copy(tmp_path / "out")
    assert sorted(layout.steps()) == sorted((*golden.steps, *golden.others))
    tokens = set()
    for step in golden.steps:
        verdict = judge(layout, step)
        assert verdict is not None
        assert verdict.whole, verdict.reason
        assert not verdict.problems
        assert not verdict.leftovers
        assert tuple(sorted(p.part.name for p in scan(layout, step) if p.part.required)) == golden.parts
        assert verdict.world_size == golden.world_size
        assert bool(verdict.save_token) == golden.token
        assert (verdict.ends is not SaveEnd.NONE) == golden.marked
        tokens.add(verdict.save_token)
    assert not golden.token or len(tokens) == len(golden.steps), "each save has a token of its own"
    for step in golden.others:
        verdict = judge(layout, step)
        assert verdict is not None
        assert not verdict.whole
        assert verdict.reason


@each
def test_complete_only_after_the_settle_time(golden: Golden, tmp_path: Path) -> None:
    layout, clock = golden.copy(tmp_path / "out"), ManualClock()
    need = WEAK
    if golden.marked:
        first = judge(layout, golden.steps[-1])
        need = SETTLE if first is not None and first.ends is SaveEnd.COMMIT else TRACKER
    catalogue = catalogue_of(layout, clock)

    def complete() -> list[int]:
        return [s.step for s in catalogue.rescan() if s.completeness is Completeness.COMPLETE]

    assert complete() == []
    clock.advance(need - 2)
    assert complete() == []
    clock.advance(4)
    assert complete() == list(golden.steps)
    clock.advance(10_000)
    assert complete() == list(golden.steps)
    sets = {s.step: s for s in catalogue.sets}
    assert len({s.save_id for s in sets.values() if s.complete}) == len(golden.steps)
    for step in golden.steps:
        assert catalogue.verify(step) == ()
        contents = catalogue.contents(step)
        assert contents.set.complete
        assert {p.part.path / f.path for p in contents.parts if p.part.uploaded for f in p.files} >= set(
            files_of(layout, step)
        )
        assert contents.files


@each
def test_a_step_whose_directories_were_made_long_before_its_files_is_found(golden: Golden, tmp_path: Path) -> None:
    """A save that was killed leaves them empty, and the next one fills them: nothing changes in the directory above."""
    layout, clock = golden.copy(tmp_path / "out"), ManualClock()
    step = golden.steps[-1]
    files = {path: path.read_bytes() for path in files_of(layout, step)}
    roots = {Path(os.path.realpath(root)) for root in layout.watch_roots()}
    for path in files:
        if path.parent in roots:
            path.write_bytes(b"")
        else:
            path.unlink()
    for directory in (tmp_path, *(p for p in tmp_path.rglob("*") if p.is_dir())):
        os.utime(directory, (1_700_000_000, 1_700_000_000))
    settle_times(golden, tmp_path / "out")
    for path in filter(Path.exists, files):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    catalogue = catalogue_of(golden.make(tmp_path / "out"), clock)
    catalogue.rescan()
    clock.advance(10_000)
    catalogue.rescan()
    catalogue.rescan()
    for path, content in files.items():
        path.write_bytes(content)
    settle_times(golden, tmp_path / "out")
    catalogue.rescan()
    clock.advance(100)
    found = {s.step: s for s in catalogue.rescan()}
    assert step in found
    assert found[step].complete, found[step].reason


@each
def test_recognised_by_its_files_alone(golden: Golden, tmp_path: Path) -> None:
    layout = golden.copy(tmp_path / "out")
    found = recognised(layout.output_dir)
    certain = [r.layout for r in found if r.certain] or [r.layout for r in found]
    assert certain == [golden.kind], [f"{r.layout}: {r.why}" for r in found]


@each
def test_a_set_that_is_moved_and_put_back_has_its_save_id(golden: Golden, tmp_path: Path) -> None:
    """A restore with the recorded mtimes gives the same id; a copy without them another."""
    layout, clock = golden.copy(tmp_path / "out"), ManualClock()
    clock.advance(10_000)
    step = golden.steps[-1]

    def save_id(where: Path) -> str:
        catalogue = catalogue_of(golden.make(where), clock)
        catalogue.rescan()
        return next(s.save_id for s in catalogue.rescan() if s.step == step)

    first = save_id(tmp_path / "out")
    assert first
    shutil.copytree(tmp_path / "out", tmp_path / "again", symlinks=True)  # copy2 keeps mtimes
    assert save_id(tmp_path / "again") == first
    for path in files_of(layout, step):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    assert save_id(tmp_path / "out") not in ("", first)


# -- single files -----------------------------------------------------------------------------------------------------


def test_every_file_of_every_library_is_sound() -> None:
    checked = 0
    for path in sorted(GOLDEN.rglob("*")):
        assert not path.is_symlink(), "links are made by tests.support.golden"
        if path.is_file():
            assert file_problem(path) == "", path
            checked += 1
    assert checked > 250


@pytest.mark.parametrize("version", ["0.4.5", "0.7.0", "0.8.0"])
def test_safetensors_of_three_versions(version: str) -> None:
    names = names_in_safetensors(GOLDEN / f"safetensors-{version}" / f"{version}.safetensors")
    assert names == {"a", "b", "c", "scalar", "flags"}


@pytest.mark.parametrize("name", ["crc", "no-crc"])
def test_values_inside_a_torch_file(name: str) -> None:
    values = values_in_torch_file(GOLDEN / "torch-files" / f"{name}.pt")
    assert values is not None
    assert values["global_step"] == 7


def test_the_legacy_format_is_recognised() -> None:
    assert is_legacy_torch_file(GOLDEN / "torch-files" / "legacy.pt")
    assert not is_legacy_torch_file(GOLDEN / "torch-files" / "crc.pt")


def test_index_is_readable_and_names_its_writers() -> None:
    for name, entry in INDEX.items():
        assert entry["written_by"], name
        assert json.dumps(entry["versions"]) != "{}", name
        assert entry["order"], name
