"""A restore by root leaves root's files alone, whatever T, who owns output_dir and its parent, plants or exchanges."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from podwatch.sync.restore.child_job import Fetched, FetchJob
from podwatch.sync.restore.fetch import Fetching

from podwatch.domain.errors import HostError
from podwatch.domain.manifest import Manifest
from podwatch.system.pinned_directories import HIDDEN, USER, PinnedTree, RootReplaced
from podwatch.system.rights import rights_of
from tests.support.other_users import E, T, as_root, enterable, exchanging, own, owners
from tests.support.stored_set import put_set
from tests.sync.conftest import World
from tests.sync.test_restore import tree as content

pytestmark = pytest.mark.slow

PART = "checkpoint"


class Pod:
    """T's home with an empty output_dir, podwatch's staging beside it, a victim of root's, and a save in a store."""

    def __init__(self, world: World, tmp_path: Path) -> None:
        enterable(tmp_path)
        self.world, self.source = world, world.write_set(10, size=2_000_000)
        world.scan()
        store = world.store()
        self.manifest: Manifest = put_set(store, world.keys, world.catalogue, 10, layout="custom", seq=1)
        store.close()
        self.home = tmp_path / "home"
        self.out = self.home / "out"
        self.out.mkdir(parents=True)
        own(self.home, T)
        self.tree = PinnedTree([self.out], owner=T)
        self.staging = self.home / HIDDEN / "out" / USER / "staging"
        self.tree.make(self.staging)
        self.victim = tmp_path / "victim"
        (self.victim / "staging" / "restore" / PART / "sub").mkdir(parents=True)
        (self.victim / "staging" / "restore" / PART / "model.bin").write_text("root's")
        (self.victim / "out").symlink_to(".")

    def job(self, **changes: object) -> FetchJob:
        options: dict[str, object] = {
            "staging": {PART: str(self.staging / "restore")},
            "targets": {PART: str(self.out / "checkpoints" / "step_10")},
            "pins": self.tree.pins(),
            "rights": rights_of(T, T),
        }
        return FetchJob(
            step=10,
            store=self.world.store_url,
            writer_id="w",
            part_size=self.manifest.part_size,
            files=self.manifest.files,
            symlinks=self.manifest.symlinks,
            **(options | changes),  # type: ignore[arg-type]
        )

    def fetch(self, job: FetchJob, progress: Callable[[int, int], None] = lambda _here, _came: None) -> Fetched:
        return Fetching(job, self.world.store(), progress).run()

    def untouched(self) -> bool:
        root_only = all(uid == os.geteuid() for uid in owners(self.victim).values())
        return root_only and (self.victim / "staging" / "restore" / PART / "model.bin").read_text() == "root's"


@pytest.fixture
def pod(local: World, tmp_path: Path) -> Pod:
    return Pod(local, tmp_path)


@as_root
def test_everything_belongs_to_the_training(pod: Pod) -> None:
    pod.fetch(pod.job())
    staged = pod.staging / "restore"
    assert staged.stat().st_uid == T
    assert stat.S_IMODE(staged.stat().st_mode) == 0o700
    assert set(owners(staged / PART).values()) == {T}
    assert content(staged / PART) == content(pod.source)


@as_root
def test_while_it_is_built_up_nobody_else_can_enter(pod: Pod) -> None:
    """E asks with every report of progress, and finds a closed door; so E can neither flip nor plant anything."""
    asked = (
        "import os, sys; os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
        "try: os.listdir(sys.argv[2])\nexcept PermissionError: sys.exit(7)"
    )
    answers = []

    def progress(_here: int, _came: int) -> None:
        if len(answers) < 3:
            command = [sys.executable, "-I", "-S", "-c", asked, str(E), str(pod.staging / "restore")]
            answers.append(subprocess.run(command, check=False).returncode)

    pod.fetch(pod.job(), progress)
    assert answers
    assert set(answers) == {7}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@as_root
def test_our_directory_exchanged_for_a_link_to_roots(pod: Pod, when: str) -> None:
    hidden = pod.home / HIDDEN
    job = pod.job()

    one = threading.Lock()  # the connections report in threads of their own

    def flip(_here: int = 0, _came: int = 0) -> None:
        with one:
            if not hidden.is_symlink():
                hidden.rename(pod.home / "moved")
                hidden.symlink_to(pod.victim)

    if when == "before":
        flip()
        with pytest.raises(RootReplaced):
            pod.fetch(job)
    else:
        pod.fetch(job, flip)
        assert content(pod.home / "moved" / "out" / USER / "staging" / "restore" / PART) == content(pod.source)
    assert pod.untouched()


@pytest.mark.parametrize("owner", [T, E])
@as_root
def test_our_directory_exchanged_for_one_of_another_user(pod: Pod, owner: int) -> None:
    hidden, job = pod.home / HIDDEN, pod.job()
    hidden.rename(pod.home / "moved")
    pod.staging.mkdir(parents=True)
    own(hidden, owner)
    with pytest.raises(RootReplaced):
        pod.fetch(job)
    with pytest.raises(RootReplaced, match="replaced"):
        pod.job()
    assert not (pod.staging / "restore").exists()


@as_root
def test_a_staging_directory_that_was_planted(pod: Pod) -> None:
    (pod.staging / "restore").symlink_to(pod.victim / "staging" / "restore")
    with pytest.raises(OSError):
        pod.fetch(pod.job())
    (pod.staging / "restore").unlink()
    (pod.staging / "restore").mkdir()
    own(pod.staging / "restore", E)
    with pytest.raises(PermissionError):
        pod.fetch(pod.job())
    assert pod.untouched()


@as_root
def test_what_an_earlier_restore_left_open_is_closed_first(pod: Pod) -> None:
    left = pod.staging / "restore" / PART
    left.mkdir(parents=True)
    (left / "model.bin").symlink_to(pod.victim / "staging" / "restore" / PART / "model.bin")
    (left / "sub").symlink_to(pod.victim / "staging" / "restore" / PART / "sub")
    os.link(pod.victim / "staging" / "restore" / PART / "model.bin", left / "DONE")
    for directory in (pod.staging / "restore", left):
        os.chown(directory, T, T)
    (pod.staging / "restore").chmod(0o777)
    pod.fetch(pod.job())
    assert content(left) == content(pod.source)
    assert pod.untouched()


@pytest.mark.parametrize("segment", ["checkpoints", "checkpoints/step_10", "checkpoints/step_10/model.bin"])
def test_what_lies_in_place_is_never_read_through_a_link(pod: Pod, segment: str) -> None:
    """The same set, whole, behind a link: it does not count as in place, and no piece is taken from it."""
    elsewhere = pod.source.parents[1] / segment
    place = pod.out / segment
    if segment.endswith("bin"):
        pod.out.joinpath("checkpoints").mkdir()
        own_copy = pod.out / "checkpoints" / "step_10"
        subprocess.run(["cp", "-a", str(pod.source), str(own_copy)], check=True)
        place.unlink()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(elsewhere)
    done = pod.fetch(pod.job())
    assert done.staged == (PART,)
    assert done.downloaded >= 2_000_000


@as_root
def test_a_directory_of_an_operator(pod: Pod, tmp_path: Path) -> None:
    """``--to DIR``: DIR is the operator's choice. Our staging in it is its owner's; a link below it is not followed."""
    to = tmp_path / "to"
    to.mkdir()
    own(to, T)
    (to / ".podwatch-staging").mkdir()
    own(to / ".podwatch-staging", T)
    staging = {PART: str(to / ".podwatch-staging" / "restore")}
    (to / PART).symlink_to(pod.source)
    job = pod.job(pins=PinnedTree((to,)).pins(), staging=staging, targets={PART: str(to / PART)})
    assert pod.fetch(job).downloaded == pod.manifest.total_bytes, "nothing is taken through the link"
    own(to / ".podwatch-staging", E)
    with pytest.raises(PermissionError):
        pod.fetch(job)
    (tmp_path / "link").symlink_to(to)
    os.chown(tmp_path / "link", T, T, follow_symlinks=False)
    with pytest.raises(RootReplaced, match="symbolic link"):
        PinnedTree((tmp_path / "link",)).pins()


@as_root
def test_nothing_outside_of_the_pins_is_touched(pod: Pod, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="outside"):
        pod.fetch(pod.job(staging={PART: str(tmp_path / "victim" / "restore")}))


@as_root
def test_a_race_for_the_staging_directory(pod: Pod) -> None:
    """T exchanges our directory and a link to one of root's, in a loop in C, while restores run one after another."""
    link = pod.home / "link"
    link.symlink_to(pod.victim)
    os.chown(link, T, T, follow_symlinks=False)
    jobs = [pod.job(staging={PART: str(pod.staging / f"restore-{n}")}) for n in range(150)]
    whole = 0
    with exchanging(T, pod.home / HIDDEN, link):
        for job in jobs:
            try:
                pod.fetch(job)
                whole += 1
            except (HostError, OSError):
                continue
    assert whole < len(jobs), "the exchange was seen at least once"
    assert pod.untouched()
    assert sorted(p.name for p in (pod.victim / "staging").iterdir()) == ["restore"]
