"""Directories and locks that another user has put in our place, or that are open to others. Real users (root only)."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.app.paths_and_run_lock import run_paths
from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.store.restore.staging import _lock
from podwatch.system.files import FileLock
from podwatch.system.pinned_directories import PinnedTree
from tests.support import strangers
from tests.support.strangers import needs_root


@pytest.fixture
def public() -> Iterator[Path]:
    with strangers.public_directory() as directory:
        yield directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("before", [None, 0o777, 0o755, 0o2775, 0o700])
def test_state_is_for_us_alone_and_runtime_is_readable(tmp_path: Path, before: int | None) -> None:
    environ = {"PODWATCH_RUNTIME_DIR": str(tmp_path / "runtime")}
    if before is not None:
        for name in ("state", "runtime"):
            (tmp_path / name / "run").mkdir(parents=True)
            (tmp_path / name / "run").chmod(before)
    paths = run_paths(tmp_path / "state", "run", environ)
    assert mode(paths.state) & 0o777 == 0o700
    assert mode(paths.runtime) & 0o022 == 0
    if before not in (0o700,):
        assert mode(paths.runtime) & 0o777 == 0o755


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_what_is_made_on_the_way_is_not_open_to_others_either(tmp_path: Path, umask: int) -> None:
    """Who can write to a parent can put another directory in the place of ours."""
    before = os.umask(umask)
    try:
        run_paths(tmp_path / "a" / "state", "run", {"PODWATCH_RUNTIME_DIR": str(tmp_path / "b" / "runtime")})
    finally:
        os.umask(before)
    for made in ("a", "a/state", "b", "b/runtime", "b/runtime/run"):
        assert mode(tmp_path / made) == 0o755


@needs_root
def test_another_users_directories_are_not_used(public: Path) -> None:
    public.chmod(0o1777)
    assert strangers.as_stranger(lambda: (public / "state" / "run").mkdir(0o777, parents=True)) == 0
    with pytest.raises(PermissionDenied, match=f"belongs to uid {strangers.UID}"):
        run_paths(public / "state", "run", {})
    with pytest.raises(HostError, match=f"uid {strangers.UID}"):
        run_paths(public / "ours", "run", {"PODWATCH_RUNTIME_DIR": str(public / "state")})


def test_a_lock_is_closed_to_others_even_if_it_was_open(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    path.chmod(0o666)
    with FileLock(path):
        assert mode(path) == 0o600


@needs_root
def test_a_lock_that_another_user_made_is_refused_and_unread(public: Path) -> None:
    path = public / "lock"
    path.write_text('{"pid": 1, "command": "forged"}')
    os.chown(path, strangers.UID, strangers.UID)
    with pytest.raises(PermissionDenied, match=f"uid {strangers.UID}") as caught:
        FileLock(path).acquire(what="the run")
    assert "forged" not in str(caught.value)
    assert "forged" in path.read_text()


@needs_root
def test_root_may_lock_the_state_of_another_user(public: Path) -> None:
    """`sudo podwatch clean` for the run of a user: the directory and the lock are that user's."""
    (public / "state").mkdir()
    os.chown(public / "state", strangers.UID, strangers.UID)
    assert strangers.as_stranger(lambda: FileLock(public / "state" / "lock").acquire()) == 0
    with FileLock(public / "state" / "lock") as lock:
        assert lock.held


@pytest.mark.parametrize("kind", ["fifo", "socket", "link", "directory"])
def test_a_lock_that_is_no_file_is_an_error_at_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path, target = tmp_path / "lock", tmp_path / "precious"
    target.write_text("precious")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind("lock")
    elif kind == "link":
        path.symlink_to(target)
    else:
        path.mkdir()
    with pytest.raises(PermissionDenied, match="the run"):
        FileLock(path).acquire(what="the run")
    assert target.read_text() == "precious"


@needs_root
def test_another_user_cannot_hold_up_a_restore(public: Path) -> None:
    """Whoever can read a directory can lock it."""
    staging = public / "staging"
    staging.mkdir(mode=0o755)
    descriptor = _lock(PinnedTree([public]), staging)
    assert descriptor is not None
    os.close(descriptor)

    def lock() -> None:
        with pytest.raises(PermissionError):
            os.open(staging, os.O_RDONLY | os.O_DIRECTORY)

    assert strangers.as_stranger(lock) == 0
