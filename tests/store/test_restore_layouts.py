"""Every trainer's checkpoint: whole in staging by the same rules as in its place, and the same save there."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from podwatch.checkpoints import checkpoint_identity
from podwatch.checkpoints.records import is_same_save
from podwatch.store.restore.inspect_staged import StagedDamaged
from tests.drivers.checkpoints import Layout, judge, open_layout, scan
from tests.store.restore_world import RestorePod, RestoreWorld, in_directory
from tests.support.golden import GOLDENS, Golden
from tests.support.layout_makers import lightning, run
from tests.support.layout_makers.core import MAKERS
from tests.support.stored_save import tree

pytestmark = pytest.mark.usefixtures("reader_of_the_file", "quick_children")


def store(world: RestoreWorld, layout: Layout, steps: Sequence[int]) -> None:
    """As an upload does: the parts that travel, of a directory that many steps share only this step's entries."""
    world.shelf.layout = layout.name
    for step in steps:
        parts = [p.part for p in scan(layout, step) if p.part.uploaded and p.present]
        names = {name for part in parts for name in part.names}
        world.shelf.save(step, {part.name: part.path for part in parts}, names=names)


def restored(world: RestoreWorld, layout: Layout, out: Path, make: object) -> None:
    """The newest step on a fresh pod."""
    step = max(layout.steps())
    pod = world.pod()
    pod.layout = make(pod.output)  # type: ignore[operator]
    report = pod.restorer().fetch(step)
    assert report.doubt == ""
    verdict = judge(pod.layout, step)
    assert verdict is not None
    assert verdict.whole, verdict.reason
    before = {p.part.name: tree(p.part.path) for p in scan(layout, step) if p.part.uploaded and not p.part.names}
    after = {p.part.name: tree(p.part.path) for p in scan(pod.layout, step) if p.part.uploaded and not p.part.names}
    assert after == before
    _recorded(pod, step)


def _recorded(pod: RestorePod, step: int) -> None:
    """Its record is that of the checkpoint in its place."""
    (record,) = pod.records.read()
    found, verdict = scan(pod.layout, step), judge(pod.layout, step)
    assert verdict is not None
    assert record.save_id == checkpoint_identity.save_id(found, verdict)
    assert is_same_save(record, checkpoint_identity.recorded(checkpoint_identity.own_files(found, verdict)))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: g.name)
def test_what_real_libraries_wrote(golden: Golden, tmp_path: Path) -> None:
    world = in_directory(tmp_path)
    layout = golden.copy(tmp_path / "first")
    store(world, layout, [max(golden.steps)])
    pod = world.pod()
    pod.layout = golden.make(pod.output)
    step = max(golden.steps)
    assert pod.restorer().fetch().step == step
    verdict = judge(pod.layout, step)
    assert verdict is not None
    assert verdict.whole, verdict.reason
    _recorded(pod, step)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_what_each_writer_leaves(name: str, tmp_path: Path) -> None:
    kind, maker = MAKERS[name]
    world, out = in_directory(tmp_path), tmp_path / "first"
    out.mkdir()
    run(maker(out, 10))
    layout = open_layout(kind, out)
    store(world, layout, [10])
    restored(world, layout, out, lambda place: open_layout(kind, place))


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_shard_that_was_stored_short(name: str, tmp_path: Path) -> None:
    """All hashes are right, and the largest file lacks its end: it is never put in place."""
    kind, maker = MAKERS[name]
    world, out = in_directory(tmp_path), tmp_path / "first"
    out.mkdir()
    run(maker(out, 10))
    layout = open_layout(kind, out)
    files = [p.part.path / f.path for p in scan(layout, 10) if p.part.required for f in p.files]
    largest = max((f for f in files if f.suffix != ".json"), key=lambda f: (f.stat().st_size, str(f)))
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    store(world, layout, [10])
    pod = world.pod()
    pod.layout = open_layout(kind, pod.output)
    with pytest.raises(StagedDamaged):
        pod.restorer().fetch_save((10, world.shelf.put[10].save_id))
    assert [p for p in pod.output.rglob("*") if p.is_file()] == []


def test_a_checkpoint_that_is_one_file_goes_beside_the_others(tmp_path: Path) -> None:
    """In a directory that many steps share: only its own entry is looked at, moved and recorded."""
    world, out = in_directory(tmp_path), tmp_path / "first"
    run(lightning.operations(out, 20))
    layout = open_layout("lightning", out)
    store(world, layout, [20])
    pod = world.pod()
    pod.layout = open_layout("lightning", pod.output)
    run(lightning.operations(pod.output, 5))
    place = pod.output / "checkpoints"
    (place / "notes.txt").write_text("mine")
    name = "epoch=0-step=20.ckpt"
    report = pod.restorer().fetch()
    assert report.parts == (str(place),)
    assert {p.name for p in place.iterdir()} == {"epoch=0-step=5.ckpt", name, "notes.txt"}
    assert tree(place)[name] == tree(out / "checkpoints")[name]
    _recorded(pod, 20)
    assert pod.restorer().fetch().downloaded_bytes == 0, "it is in place"
    (place / name).write_bytes(b"something else")
    assert pod.restorer().fetch().moved == (str(place / name),)
    assert tree(place)[name] == tree(out / "checkpoints")[name]
    assert (place / "notes.txt").read_text() == "mine"
    assert pod.restorer().fetch(to=tmp_path / "elsewhere").parts == (str(tmp_path / "elsewhere" / "checkpoint"),)
    assert [p.name for p in (tmp_path / "elsewhere" / "checkpoint").iterdir()] == [name]
