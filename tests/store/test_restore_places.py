"""Whose directories a restore writes to, and on which file systems: the trainer's user, links, mounts, full disks."""

import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError, RemoteError
from podwatch.recovery import quarantine
from podwatch.store.restore import restore as restoring
from podwatch.store.restore.staging import StagedPart, StagingArea
from podwatch.system.open_by_descriptor import RootReplaced
from podwatch.system.own_directories import Workspace
from tests.store.restore_world import RestorePod, RestoreWorld, in_directory
from tests.support.mounts import small_mount
from tests.support.other_users import E, T, exchanging
from tests.support.stored_save import tree, write_checkpoint

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


@pytest.fixture
def world(tmp_path: Path) -> RestoreWorld:
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    made = in_directory(tmp_path)
    made.shelf.save(10, {"checkpoint": write_checkpoint(made.source(10), 100_000)})
    return made


@pytest.fixture
def pod(world: RestoreWorld) -> RestorePod:
    """Whose trainer runs as user T; the store's directory is closed to that user."""
    (world.home / "store").chmod(0o700)
    found = world.pod()
    for path in (found.home, found.output):
        os.chown(path, T, T)
    return found


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A directory of root's in which nothing may change."""
    made = tmp_path / "victim"
    for name in ("user/staging", "checkpoint/sub", "staging"):
        (made / name).mkdir(parents=True)
    for name in ("model.bin", "checkpoint/model.bin", "checkpoint/sub/optim.bin"):
        (made / name).write_text("precious")
    before = tree(made)
    yield made
    assert tree(made) == before


def staging_of(pod: RestorePod, world: RestoreWorld) -> Path:
    """Where this save is built."""
    manifest = world.shelf.put[10]
    (stored,) = pod.restorer().saves()
    return pod.workspace.staging / f"restore-10-{manifest.save_id}-{stored.hash[-8:]}"


def test_everything_belongs_to_the_training(pod: RestorePod, world: RestoreWorld) -> None:
    pod.restorer().fetch()
    assert tree(pod.step(10)) == tree(world.source(10))
    owners = {p.lstat().st_uid for p in (pod.step(10), *pod.output.rglob("*"))}
    assert owners == {T}


def test_while_it_is_built_nobody_else_can_enter(
    pod: RestorePod, monkeypatch: pytest.MonkeyPatch, world: RestoreWorld
) -> None:
    seen: list[tuple[int, int]] = []
    real = StagingArea._place_part

    def put(self: StagingArea, part: StagedPart, step: int, lineage: str) -> None:
        for path in (part.staging, part.staging.parent):
            status = path.stat()
            seen.append((stat.S_IMODE(status.st_mode), status.st_uid))
        real(self, part, step, lineage)

    monkeypatch.setattr(StagingArea, "_place_part", put)
    pod.restorer().fetch()
    assert seen == [(0o700, T)] * 2
    assert stat.S_IMODE(pod.step(10).stat().st_mode) == 0o755, "in its place it is as the trainer makes one"


def test_special_bits_of_a_mode_are_dropped(world: RestoreWorld) -> None:
    files = tuple(replace(f, mode=0o777) for f in world.shelf.put[10].files)
    world.shelf.forge(10, files=files)
    pod = world.pod()
    pod.restorer().fetch()
    assert {p.lstat().st_mode & 0o7000 for p in pod.output.rglob("*") if p.is_file()} == {0}


def test_our_directory_exchanged_for_a_link(pod: RestorePod, victim: Path) -> None:
    pod.workspace.probe()
    (pod.home / ".podwatch").rename(pod.home / "moved")
    (pod.home / ".podwatch").symlink_to(victim)
    with pytest.raises(RootReplaced):
        pod.restorer().fetch()
    assert list(pod.output.iterdir()) == []


@pytest.mark.parametrize("owner", [T, E])
def test_our_directory_exchanged_for_one_of_another_user(pod: RestorePod, owner: int) -> None:
    pod.workspace.probe()
    (pod.home / ".podwatch").rename(pod.home / "moved")
    (pod.home / ".podwatch" / "out" / "user" / "staging").mkdir(parents=True)
    os.chown(pod.home / ".podwatch", owner, owner)
    with pytest.raises(RootReplaced):
        pod.restorer().fetch()
    assert list(pod.output.iterdir()) == []


def test_planted_in_staging(pod: RestorePod, world: RestoreWorld, victim: Path) -> None:
    """A link for the directory of the save; links and a hard link inside of what an earlier restore left."""
    pod.workspace.probe()
    planted = staging_of(pod, world)
    planted.symlink_to(victim)
    with pytest.raises(HostError):
        pod.restorer().fetch()
    planted.unlink()
    (planted / "checkpoint").mkdir(parents=True)
    (planted / "checkpoint" / "model.bin").symlink_to(victim / "model.bin")
    (planted / "checkpoint" / "sub").symlink_to(victim / "checkpoint" / "sub")
    os.link(victim / "checkpoint" / "model.bin", planted / "checkpoint" / "DONE")
    for path in (planted, planted / "checkpoint"):
        os.chown(path, T, T)
    planted.chmod(0o777)
    pod.restorer().fetch()
    assert tree(pod.step(10)) == tree(world.source(10))


@pytest.mark.parametrize("segment", ["checkpoints", "checkpoints/step_10", "checkpoints/step_10/model.bin"])
def test_what_lies_in_place_is_never_read_through_a_link(world: RestoreWorld, segment: str, tmp_path: Path) -> None:
    """The same checkpoint, whole, behind a link does not count as in place; and nothing is written through it."""
    elsewhere = world.pod()
    elsewhere.restorer().fetch()
    before = tree(elsewhere.output)
    pod = world.pod()
    place = pod.output / segment
    if segment.endswith("bin"):
        pod.restorer().fetch()
        place.unlink()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(elsewhere.output / segment)
    if segment == "checkpoints":
        with pytest.raises(HostError):
            pod.restorer().fetch()
    else:
        report = pod.restorer().fetch()
        assert report.downloaded_bytes == report.total_bytes
        assert tree(pod.step(10)) == tree(world.source(10))
    assert tree(elsewhere.output) == before


def test_a_directory_of_an_operator(world: RestoreWorld, victim: Path) -> None:
    """``--to DIR``: its owner's rights count there, and no link below it is followed."""
    to = world.home / "to"
    to.mkdir()
    os.chown(to, T, T)
    (to / "checkpoint").symlink_to(victim / "checkpoint")
    pod = world.pod()
    pod.restorer().fetch(to=to)
    assert tree(to / "checkpoint") == tree(world.source(10))
    assert {p.lstat().st_uid for p in (to / "checkpoint").rglob("*")} == {T}
    (to / ".podwatch-staging").mkdir()
    os.chown(to / ".podwatch-staging", E, E)
    (to / "checkpoint" / "DONE").unlink()
    with pytest.raises(HostError):
        pod.restorer().fetch(to=to)


def test_a_race_for_our_directory(pod: RestorePod, world: RestoreWorld, victim: Path) -> None:
    """T exchanges it and a link to one of root's, in a loop in C, while restores run one after another."""
    pod.workspace.probe()
    link = pod.home / "link"
    link.symlink_to(victim)
    os.chown(link, T, T, follow_symlinks=False)
    failed = 0
    with exchanging(T, pod.home / ".podwatch", link):
        for _ in range(12):
            try:
                pod.restorer().fetch()
            except (HostError, RemoteError, OSError):
                failed += 1
    assert failed, "the exchange was seen at least once"


# -- file systems ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["out", "out/checkpoints"])
def test_a_mount_of_its_own(world: RestoreWorld, where: str) -> None:
    pod = world.pod()
    with small_mount(pod.home / where, 4_000_000) as mounted:
        if not mounted:
            pytest.skip("cannot mount here")
        report = pod.restorer().fetch()
        assert (report.step, report.moved) == (10, ())
        assert pod.restorer().fetch().downloaded_bytes == 0
        (pod.step(10) / "model.bin").write_bytes(b"another")
        old = tree(pod.step(10))
        assert pod.restorer().fetch().moved == (str(pod.step(10)),)
        (entry,) = quarantine.listing(Workspace(pod.output))
        (moved,) = (path / "0-step_10" for path in entry.paths)
        assert tree(moved) == old
        assert moved.stat().st_dev == (pod.home / where).stat().st_dev
        assert tree(pod.step(10)) == tree(world.source(10))
        assert not list(pod.home.rglob("restore-*"))


def test_a_checkpoint_from_the_image_stays(world: RestoreWorld, tmp_path: Path) -> None:
    """output_dir came with the container's image: its directories cannot be renamed."""
    with small_mount(tmp_path / "layers", 8_000_000) as mounted:
        if not mounted:
            pytest.skip("cannot mount here")
        lower, upper, work, merged = (tmp_path / "layers" / n for n in ("lower", "upper", "work", "merged"))
        for directory in (lower, upper, work, merged):
            directory.mkdir()
        old = lower / "pod" / "out" / "checkpoints" / "step_10"
        (old / "sub").mkdir(parents=True)
        (old / "model.bin").write_bytes(b"from the image")
        before = tree(old)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("no overlay here")
        try:
            pod = RestorePod(merged / "pod", world.store)
            with pytest.raises(HostError, match="directory of the container's image"):
                pod.restorer().fetch()
            assert tree(pod.step(10)) == before
        finally:
            subprocess.run(["umount", "-l", str(merged)], check=True)


def test_a_volume_that_is_too_small_or_read_only(world: RestoreWorld) -> None:
    world.shelf.save(20, {"checkpoint": write_checkpoint(world.source(20), 6_000_000)})
    pod = world.pod()
    with small_mount(pod.output, 3_000_000) as mounted:
        if not mounted:
            pytest.skip("cannot mount here")
        with pytest.raises(HostError, match="not enough disk space to restore"):
            pod.restorer().fetch()
        assert [p for p in pod.output.rglob("*") if p.is_file()] == []
        subprocess.run(["mount", "-o", "remount,ro", str(pod.output)], check=True)
        with pytest.raises(HostError, match="cannot move a directory there"):
            pod.restorer().fetch()


def test_a_file_where_a_directory_must_be(world: RestoreWorld) -> None:
    pod = world.pod()
    (pod.output / "checkpoints").write_text("a file where a directory must be")
    with pytest.raises(HostError, match="cannot write"):
        pod.restorer().fetch()


def test_nothing_is_written_outside_of_the_runs_directories(
    world: RestoreWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pod = world.pod()
    monkeypatch.setattr(restoring.Restorer, "_target", lambda *_: tmp_path / "elsewhere" / "checkpoint")
    with pytest.raises(HostError, match="outside"):
        pod.restorer().fetch()
    assert not (tmp_path / "elsewhere").exists()
