# ruff: noqa: PTH208
"""Atomic writes, renames that never overwrite, removal that never leaves its root."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from podwatch.system import files
from podwatch.system.pinned_directories import PinnedTree


def test_atomic_write_replaces_whole_and_sets_the_mode(tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    target.write_text("old")
    old_umask = os.umask(0o077)
    try:
        files.atomic_write(target, "new", mode=0o644)
    finally:
        os.umask(old_umask)
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["record.json"]


def test_atomic_write_default_mode_is_private(tmp_path: Path) -> None:
    files.atomic_write(tmp_path / "secret", b"x")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_atomic_write_that_fails_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "record"
    target.mkdir()  # a rename over a directory fails at the last moment
    with pytest.raises(OSError, match=r"directory|Is a"):
        files.atomic_write(target, "new")
    assert os.listdir(tmp_path) == ["record"]


def test_read_small(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    assert files.read_small(path, 100) == b"x" * 100
    with pytest.raises(OSError) as caught:
        files.read_small(path, 99)
    assert caught.value.errno == errno.EFBIG
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError) as caught:
        files.read_small(tmp_path / "fifo", 99)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("native", [True, False])
def test_rename_at(tmp_path: Path, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:

        class OldLibc:
            pass

        monkeypatch.setattr(files, "_libc", OldLibc())
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    fd = os.open(tmp_path, files.DIRECTORY_FLAGS)
    try:
        with pytest.raises(FileExistsError):
            files.rename_at(fd, "a", fd, "b")
        assert (tmp_path / "a").exists()
        files.rename_at(fd, "a", fd, "c")
        assert sorted(os.listdir(tmp_path)) == ["b", "c"]
        with pytest.raises(FileNotFoundError):
            files.rename_at(fd, "missing", fd, "d")
    finally:
        os.close(fd)


def test_can_rename_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tree = PinnedTree([tmp_path])
    assert tree.can_rename(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        tree.can_rename(tmp_path / "a", tmp_path / "missing")
    assert os.listdir(tmp_path / "a") == []
    assert os.listdir(tmp_path / "b") == []
    tree.close()


def test_can_rename_across_filesystems_is_false(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second filesystem here")
    tree = PinnedTree([tmp_path, other])
    assert not tree.can_rename(tmp_path, other)
    assert not [name for name in os.listdir(other) if name.startswith(".podwatch-probe")]
    tree.close()


@pytest.mark.parametrize("bad", ["", "/", "/etc", "a//b", "a/", "../x", "a/../b", "./a", "a\0b", "."])
def test_split_relative_refuses(bad: str) -> None:
    with pytest.raises(ValueError, match="plain relative"):
        files.split_relative(bad)


def test_open_below_does_not_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "d" / "f").write_text("fine")
    (root / "link").symlink_to(outside)
    (root / "d" / "filelink").symlink_to(outside / "secret")
    fd = os.open(root, files.DIRECTORY_FLAGS)
    try:
        opened = files.open_below(fd, "d/f")
        assert os.read(opened, 10) == b"fine"
        os.close(opened)
        for hostile in ("link/secret", "d/filelink"):
            with pytest.raises(OSError) as caught:
                files.open_below(fd, hostile)
            assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)
        made = files.open_dir_below(fd, "x/y", create=True)
        os.close(made)
        assert (root / "x" / "y").is_dir()
    finally:
        os.close(fd)


def test_remove_tree_stays_inside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("p")
    root = tmp_path / "root"
    (root / "step_1" / "sub").mkdir(parents=True)
    (root / "step_1" / "sub" / "f").write_bytes(b"x" * 8192)
    (root / "step_1" / "away").symlink_to(outside)
    (root / "step_1" / "sub" / "file").symlink_to(outside / "precious")
    (root / "step_2").mkdir()
    ticks: list[int] = []
    done = PinnedTree([root]).remove_tree(root / "step_1", tick=lambda d: ticks.append(d.files))
    assert done.problems == []
    assert (done.files, done.directories) == (3, 2)
    assert done.bytes >= 8192
    assert len(ticks) == 5
    assert os.listdir(root) == ["step_2"]
    assert (outside / "precious").read_text() == "p"


def test_remove_tree_through_a_linked_parent_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "step_1").mkdir(parents=True)
    root = tmp_path / "root"
    root.mkdir()
    (root / "checkpoints").symlink_to(outside)
    with pytest.raises(OSError):
        PinnedTree([root]).remove_tree(root / "checkpoints" / "step_1")
    assert (outside / "step_1").exists()
    done = PinnedTree([root]).remove_tree(root / "checkpoints")  # the link itself may go, its target stays
    assert done.files == 1
    assert (outside / "step_1").exists()


def test_remove_tree_of_nothing_and_stopping_midway(tmp_path: Path) -> None:
    assert PinnedTree([tmp_path]).remove_tree(tmp_path / "gone" / "deeper").problems == []
    (tmp_path / "t").mkdir()
    for n in range(5):
        (tmp_path / "t" / str(n)).write_text("")

    class StopError(Exception):
        pass

    def tick(done: files.Removed) -> None:
        if done.files == 2:
            raise StopError

    with pytest.raises(StopError):
        PinnedTree([tmp_path]).remove_tree(tmp_path / "t", tick=tick)
    assert len(os.listdir(tmp_path / "t")) == 3


def test_remove_tree_counts_hardlinked_files_as_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "f").write_bytes(b"x" * 8192)
    (tmp_path / "kept").hardlink_to(tmp_path / "t" / "f")
    assert PinnedTree([tmp_path]).remove_tree(tmp_path / "t").bytes == 0
    assert (tmp_path / "kept").stat().st_size == 8192


def test_a_tree_of_any_depth_is_removed() -> None:
    tmp_path = Path(tempfile.mkdtemp(dir="/dev/shm"))  # quick
    (tmp_path / "deep").mkdir()
    below = os.open(tmp_path / "deep", os.O_RDONLY)
    for _ in range(600):
        os.mkdir("d", dir_fd=below)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=below))
        above, below = below, os.open("d", os.O_RDONLY, dir_fd=below)
        os.close(above)
    os.close(below)
    top, done = os.open(tmp_path, os.O_RDONLY), files.Removed()
    try:
        files.remove_entry(top, "deep", "deep", os.fstat(top).st_dev, done, lambda _: None)
    finally:
        os.close(top)
    assert (done.files, done.directories, done.problems) == (600, 601, [])
    tmp_path.rmdir()


MOUNTED = """
import os, subprocess, sys
from podwatch.system.files import Removed, remove_entry
root = sys.argv[1]
subprocess.run(["mount", "--bind", f"{root}/other", f"{root}/trash/step_5/weights"], check=True)
trash, done = os.open(f"{root}/trash", os.O_RDONLY), Removed()
remove_entry(trash, "step_5", "step_5", os.fstat(trash).st_dev, done, lambda _: None)
print(done.problems)
"""


def test_a_removal_does_not_enter_a_bind_mount_of_the_same_filesystem(tmp_path: Path) -> None:
    for name in ("trash/step_5/weights", "trash/step_5/optim", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "other/theirs").write_text("x")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", MOUNTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no right to mount")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['step_5/weights: Device or resource busy']\n"
    assert (tmp_path / "other/theirs").read_text() == "x"
    assert not (tmp_path / "trash/step_5/optim").exists()
