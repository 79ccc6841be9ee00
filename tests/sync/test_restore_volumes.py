"""Restoring where output_dir, or what is in it, lies on another filesystem: real mounts, found out by trying."""

import subprocess
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError, RemoteError
from podwatch.recovery import quarantine
from podwatch.system.own_directories import Workspace
from tests.support.mounts import small_mount
from tests.support.stored_set import put_set
from tests.sync.conftest import World
from tests.sync.test_restore import damage, fresh, tree

pytestmark = [pytest.mark.slow, pytest.mark.root]


def stored(world: World, *steps: int, size: int = 1000) -> None:
    for step in steps:
        world.write_set(step, size=size)
        world.scan()
        store = world.store()
        put_set(store, world.keys, world.catalogue, step, layout="custom", seq=step)
        store.close()


def restored(pod: World, source: World) -> None:
    """Whole, known as complete, and nothing of ours lies between the trainer's files."""
    assert tree(pod.output / "checkpoints" / "step_10") == tree(source.output / "checkpoints" / "step_10")
    pod.scan()
    assert [s.complete for s in pod.catalogue.sets] == [True]
    assert not list(pod.directory.rglob("restore-*"))
    assert not list(pod.directory.rglob("staging/*"))
    pod.journal.close()


@pytest.mark.parametrize("where", ["out", "out/checkpoints"])
def test_a_mount_of_its_own(local: World, where: str) -> None:
    stored(local, 10)
    pod = fresh(local)
    with small_mount(pod.directory / where, 4_000_000) as mounted:
        if not mounted:
            pytest.skip("cannot mount here")
        report = pod.restorer().fetch()
        assert (report.step, report.set_aside) == (10, ())
        again = pod.restorer().fetch()
        assert again.downloaded_bytes == 0
        (pod.output / "checkpoints" / "step_10" / "model.bin").write_bytes(b"another")
        old = tree(pod.output / "checkpoints" / "step_10")
        report = pod.restorer().fetch()
        assert report.set_aside == (str(pod.output / "checkpoints" / "step_10"),)
        assert report.downloaded_bytes == report.total_bytes, "nothing is taken from what differs"
        (entry,) = quarantine.listing(Workspace(pod.output))
        (aside,) = (path / "0-step_10" for path in entry.paths)
        assert tree(aside) == old
        assert aside.stat().st_dev == (pod.directory / where).stat().st_dev
        restored(pod, local)


def test_a_set_from_the_image_stays(local: World, tmp_path: Path) -> None:
    """output_dir came with the container's image: its directories cannot be renamed."""
    stored(local, 10)
    with small_mount(tmp_path / "layers", 8_000_000) as mounted:
        if not mounted:
            pytest.skip("cannot mount here")
        lower, upper, work, merged = (tmp_path / "layers" / n for n in ("lower", "upper", "work", "merged"))
        for directory in (lower, upper, work, merged):
            directory.mkdir()
        old = lower / "pod" / "out" / "checkpoints" / "step_10"
        (old / "sub").mkdir(parents=True)
        (old / "model.bin").write_bytes(b"from the image")
        (old / "sub" / "optim.bin").write_bytes(b"also")
        before = tree(old)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("no overlay here")
        try:
            pod = World(merged / "pod", local.store_url, writer_id="writer-2")
            with pytest.raises(HostError, match="directory of the container's image"):
                pod.restorer().fetch()
            assert tree(pod.output / "checkpoints" / "step_10") == before
            pod.journal.close()
        finally:
            subprocess.run(["umount", "-l", str(merged)], check=True)


def test_a_volume_that_is_too_small_or_read_only(local: World) -> None:
    stored(local, 10, size=6_000_000)
    pod = fresh(local)
    with small_mount(pod.output, 3_000_000) as mounted:
        if not mounted:
            pytest.skip("cannot mount here")
        with pytest.raises(HostError, match="not enough disk space to restore: 6 MB needed, 3 MB free"):
            pod.restorer().fetch()
        assert [p for p in pod.output.rglob("*") if p.is_file()] == []
        subprocess.run(["mount", "-o", "remount,ro", str(pod.output)], check=True)
        with pytest.raises(HostError, match="cannot move a directory there"):
            pod.restorer().fetch()
    pod.journal.close()


def test_what_is_damaged_or_left_over_takes_no_room(local: World) -> None:
    stored(local, 5, 10)
    damage(local, 10, "optim.bin", at=3)
    pod = fresh(local)
    left = Workspace(pod.output).staging / "restore-3-old-12345678" / "checkpoint"
    left.mkdir(parents=True)
    (left / "model.bin").write_bytes(b"x" * 1000)
    report = pod.restorer().fetch()
    assert (report.step, len(report.refused)) == (5, 1)
    assert list(Workspace(pod.output).staging.iterdir()) == []
    damage(local, 5, "optim.bin", at=3)
    elsewhere = pod.directory / "elsewhere"
    with pytest.raises(RemoteError, match="no whole checkpoint"):
        pod.restorer().fetch(to=elsewhere)
    assert list(elsewhere.iterdir()) == [], "nothing that looks like a checkpoint"
    pod.journal.close()
