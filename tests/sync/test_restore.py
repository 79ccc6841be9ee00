"""Restore: everything verified, nothing trusted, a kill survived, nothing written over."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.errors import HostError, IntegrityError, RemoteError
from podwatch.domain.manifest import ManifestFile, ManifestSymlink, sha1_hex
from podwatch.domain.safe_links import check_links
from podwatch.recovery import quarantine
from podwatch.stores.base import TOTAL
from podwatch.system.own_directories import Workspace
from tests.support.mounts import small_mount
from tests.support.stored_set import put_set
from tests.sync.conftest import Run, World

pytestmark = pytest.mark.slow


def tree(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            status = path.stat()
            found[name] = (path.read_bytes(), status.st_mtime_ns, status.st_mode & 0o777)
    return found


async def publish(world: World, run: Run, *steps: int, size: int = 6_000_000) -> None:
    for step in steps:
        world.write_set(step, size=size)
        world.scan()
        store = world.store()
        put_set(store, world.keys, world.catalogue, step, layout="custom", seq=step)
        store.close()
    world.journals.clear()


def fresh(world: World, name: str = "pod2") -> World:
    return world.other(name, writer_id="writer-2")


async def test_another_pod_gets_the_same_files_and_sends_nothing_again(world: World, run: Run) -> None:
    await publish(world, run, 5, 10)
    pod = fresh(world)
    newest = pod.restorer().newest()
    assert newest is not None
    assert newest.step == 10
    assert pod.restorer().newest(exclude=frozenset({10})) is not None
    older = pod.restorer().newest(step=5)
    assert older is not None
    assert older.step == 5
    assert pod.restorer().newest(step=1) is None, "not step 10, whose name begins like it"
    seen: list[tuple[int, int]] = []
    report = pod.restorer().fetch(progress=lambda done, total: seen.append((done, total)))
    assert (report.step, report.total_bytes, report.downloaded_bytes) == (10, 6_001_001, 6_001_001)
    assert seen[-1] == (6_001_001, 6_001_001)
    assert report.train_command == ("python", "train.py")
    there, here = world.output / "checkpoints" / "step_10", pod.output / "checkpoints" / "step_10"
    assert tree(here) == tree(there)
    assert not list(Path(pod.output.parent).rglob("restore-*")), "staging is gone"
    pod.scan()
    assert pod.catalogue.sets[0].save_id == newest.save_id, "mtimes are restored, so the id is equal"
    syncer = await run(pod)
    await syncer.sync_now()
    assert "upload-started" not in pod.names()
    assert (10, newest.save_id) in syncer.status().stored
    await syncer.stop()
    pod.journal.close()


async def test_what_its_process_calls_is_counted_as_it_is_billed(b2: World, run: Run) -> None:
    assert b2.server is not None
    await publish(b2, run, 5)
    restorer = fresh(b2).restorer()
    before, billed = TOTAL.snapshot(), b2.server.classes()
    restorer.fetch()
    now, after = b2.server.classes(), TOTAL.snapshot()
    assert {k: after[k] - before[k] for k in "ABC"} == {k: now.get(k, 0) - billed.get(k, 0) for k in "ABC"}
    assert after["B"] - before["B"] >= 4


async def test_a_step_by_number_and_to_a_directory(local: World, run: Run) -> None:
    await publish(local, run, 5, 10, size=1000)
    pod = fresh(local)
    report = pod.restorer().fetch(5, to=pod.directory / "look")
    assert report.parts == (str(pod.directory / "look" / "checkpoint"),)
    assert tree(pod.directory / "look" / "checkpoint") == tree(local.output / "checkpoints" / "step_5")
    assert pod.journal.published() == []
    with pytest.raises(RemoteError, match="no whole checkpoint of step 7 is in the store"):
        pod.restorer().fetch(7)
    pod.journal.close()


def test_an_empty_store(local: World) -> None:
    assert local.restorer().newest() is None
    with pytest.raises(RemoteError, match="no whole checkpoint"):
        local.restorer().fetch()


async def test_damaged_falls_back_to_the_older(world: World, run: Run) -> None:
    await publish(world, run, 5, 10)
    damage(world, 10, "model.bin", at=5_500_000)
    pod = fresh(world)
    report = pod.restorer().fetch()
    assert report.step == 5
    assert "step 10" in report.refused[0]
    assert "does not match its recorded hash" in report.refused[0]
    assert not (pod.output / "checkpoints" / "step_10").exists()
    with pytest.raises(RemoteError, match="does not match"):
        pod.restorer().fetch(10)
    pod.journal.close()


async def test_of_two_manifests_of_one_second_the_higher_step_is_newer(local: World, run: Run) -> None:
    """S3 lists whole seconds."""
    await publish(local, run, 8, 9, 10, 11, size=1000)
    tags = list(Path(local.store_url.removeprefix("file://")).rglob("info/**/manifest.json.json"))
    assert len(tags) == 4
    for path in tags:
        tag = json.loads(path.read_bytes())
        path.write_text(json.dumps(tag | {"versions": [v | {"wall": 1.7e9} for v in tag["versions"]]}))
    drop(local, 11, "model.bin")
    drop(local, 10, "model.bin")
    pod = fresh(local)
    assert pod.restorer().fetch().step == 9
    pod.journal.close()


async def test_lost_falls_back_and_newer_is_taken(world: World, run: Run) -> None:
    await publish(world, run, 5, 10, size=1000)
    drop(world, 10, "model.bin")
    pod = fresh(world)
    assert pod.restorer().fetch().step == 5
    await publish(world, run, 15, size=1000)
    assert pod.restorer().fetch().step == 15
    pod.journal.close()


async def test_what_is_there_is_kept_or_set_aside_never_written_over(local: World, run: Run) -> None:
    await publish(local, run, 10, size=1000)
    again = local.restorer().fetch()
    assert (again.downloaded_bytes, again.set_aside) == (0, ())
    pod = fresh(local)
    pod.write_set(10, size=50)
    other = tree(pod.output / "checkpoints" / "step_10")
    report = pod.restorer().fetch()
    assert report.set_aside == (str(pod.output / "checkpoints" / "step_10"),)
    kept = list((pod.output.parent / ".podwatch" / "out" / "user" / "quarantine").glob("1/*-step_10"))
    assert [tree(k) for k in kept] == [other]
    (entry,) = quarantine.listing(Workspace(pod.output))
    assert entry.index is not None
    moved = [source for source, _ in entry.index.moves]
    assert (entry.id, entry.index.steps, moved) == (1, {10: "complete"}, list(report.set_aside))
    assert tree(pod.output / "checkpoints" / "step_10") == tree(local.output / "checkpoints" / "step_10")
    pod.journal.close()


async def test_no_room(local: World, run: Run, tmp_path: Path) -> None:
    await publish(local, run, 10, size=6_000_000)
    with small_mount(tmp_path / "small", 5_000_000) as mounted:
        if not mounted:
            pytest.skip("mounting needs root")
        pod = fresh(local)
        with pytest.raises(HostError, match="not enough disk space to restore: 6 MB needed, 5 MB free"):
            pod.restorer().fetch(to=tmp_path / "small" / "there")
        assert not list((tmp_path / "small").rglob("*.bin"))
        pod.journal.close()


async def test_a_file_where_a_directory_must_be(local: World, run: Run) -> None:
    await publish(local, run, 10, size=1000)
    pod = fresh(local)
    (pod.output / "checkpoints").write_text("a file where a directory must be")
    with pytest.raises(HostError, match="cannot write"):
        pod.restorer().fetch()
    pod.journal.close()


# -- hostile stores ---------------------------------------------------------------------------------------------------


def rewrite(world: World, change: Any, *, point: Any = lambda p: p) -> None:
    """Write a manifest as an attacker with the bucket's key would, and point at it."""
    store = world.store()
    pointer = world.pointer()
    assert pointer is not None
    data = store.get_bytes(pointer.manifest_key, pointer.manifest_file_id)
    assert data is not None
    document = json.loads(data)
    change(document)
    data = json.dumps(document).encode()
    stored = store.put_bytes(pointer.manifest_key, data)
    lied = replace(pointer, manifest_file_id=stored.file_id, manifest_sha1=sha1_hex(data), manifest_size=len(data))
    store.put_bytes(world.keys.latest, point(lied).to_bytes())
    store.close()


def set_file(**changes: Any) -> Any:
    def change(document: dict[str, Any]) -> None:
        document["files"][0] |= changes

    return change


HOSTILE = {
    "dotdot": set_file(path="checkpoint/../../../etc/passwd"),
    "absolute": set_file(path="/etc/passwd"),
    "nul": set_file(path="checkpoint/a\0b"),
    "other part": set_file(path="elsewhere/x"),
    "impossible part": set_file(part="..", path="../x"),
    "unknown part": lambda d: [f.update(part="zz", path=f["path"].replace("checkpoint/", "zz/")) for f in d["files"]],
    "foreign key": set_file(key="run/step_5/mine.bin"),
    "negative size": set_file(size=-1),
    "bool size": set_file(size=True),
    "wrong total": lambda d: d.update(total_bytes=1),
    "huge part count": set_file(parts_sha1=["0" * 40] * 10),
    "other run": lambda d: d.update(run_id="other"),
    "other step": lambda d: d.update(step=99),
    "newer schema": lambda d: d.update(schema_version=99),
    "no files key": lambda d: d.pop("files"),
    "link out": lambda d: d.update(symlinks=[{"path": "checkpoint/l", "part": "checkpoint", "target": "../../x"}]),
    "link absolute": lambda d: d.update(symlinks=[{"path": "checkpoint/l", "part": "checkpoint", "target": "/etc"}]),
    "link as directory": lambda d: d.update(symlinks=[{"path": "checkpoint/sub", "part": "checkpoint", "target": "."}]),
    "not json": lambda d: d.clear(),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_manifest_is_refused(local: World, run: Run, name: str, tmp_path: Path) -> None:
    await publish(local, run, 10, size=1000)
    rewrite(local, HOSTILE[name])
    pod = fresh(local)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((RemoteError, HostError)) as caught:
        pod.restorer().fetch()
    assert "INTERNAL" not in str(caught.value)
    new = [p for p in sorted(tmp_path.rglob("*")) if p not in before]
    assert [p for p in new if p.is_file() and "state" not in p.parts] == []
    pod.journal.close()


async def test_setuid_bits_are_dropped(local: World, run: Run) -> None:
    await publish(local, run, 10, size=1000)
    rewrite(local, set_file(mode=0o6755))
    pod = fresh(local)
    pod.restorer().fetch()
    modes = {p.stat().st_mode & 0o7000 for p in (pod.output / "checkpoints").rglob("*") if p.is_file()}
    assert modes == {0}
    pod.journal.close()


async def test_staging_with_a_planted_symlink(local: World, run: Run, tmp_path: Path) -> None:
    await publish(local, run, 10, size=1000)
    pod = fresh(local)
    save = pod.restorer().newest()
    assert save is not None
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model.bin").write_text("precious")
    staging = pod.output.parent / ".podwatch" / "out" / "user" / "staging"
    planted = staging / f"restore-{save.step}-{save.save_id}-{save.ref.sha1[:8]}"
    planted.mkdir(parents=True)
    (planted / "checkpoint").symlink_to(outside)
    pod.restorer().fetch()
    assert (outside / "model.bin").read_text() == "precious"
    assert sorted(p.name for p in outside.iterdir()) == ["model.bin"]
    pod.journal.close()


AROUND = [ManifestFile(f"part/{p}", "part", 0, 0, 0o644, "k", "", ()) for p in ("dir/x", "dir/sub/y", "a")]


@pytest.mark.parametrize("target", ["x", "sub/y", "../a", "./b", "sub/../c"])
def test_links_inside_are_fine(target: str) -> None:
    check_links(AROUND, [ManifestSymlink("part/dir/link", "part", target)])


@pytest.mark.parametrize("target", ["", "/x", "../../x", "../../../x", "a/../../../b", "x\0y", "..\\x"])
def test_links_outside_are_refused(target: str) -> None:
    with pytest.raises(IntegrityError):
        check_links(AROUND, [ManifestSymlink("part/dir/link", "part", target)])


async def test_pointer_of_another_run_or_place(local: World, run: Run) -> None:
    await publish(local, run, 5, 10, size=1000)
    rewrite(local, lambda d: None, point=lambda p: replace(p, manifest_key="elsewhere/manifest.json"))
    pod = fresh(local)
    assert pod.restorer().fetch().step == 10, "found through its manifest"
    pod.journal.close()


# -- damage -----------------------------------------------------------------------------------------------------------


def data_object(world: World, step: int, name: str) -> Any:
    store = world.store()
    found = next(o for o in store.list(world.keys.step(step)) if o.key.endswith(name))
    store.close()
    return found


def damage(world: World, step: int, name: str, at: int) -> None:
    found = data_object(world, step, name)
    if world.server is not None:
        world.server.admin("damage", key=found.key, file_id=found.file_id, at=at)
        return
    path = Path(world.store_url.removeprefix("file://")) / found.key
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def drop(world: World, step: int, name: str) -> None:
    found = data_object(world, step, name)
    if world.server is not None:
        world.server.admin("drop", key=found.key, file_id=found.file_id)
    else:
        (Path(world.store_url.removeprefix("file://")) / found.key).unlink()


async def test_after_a_fresh_start_it_says_that_a_step_must_be_named(local: World, run: Run) -> None:
    """The store is full of whole checkpoints; the run has deliberately left them (`clean`)."""
    await publish(local, run, 5)
    rewrite(local, lambda _: None, point=lambda p: replace(p, step=None))
    with pytest.raises(RemoteError, match="started from the beginning") as caught:
        local.restorer().fetch()
    assert "--step N" in caught.value.fix
    assert "no whole checkpoint" not in str(caught.value)
