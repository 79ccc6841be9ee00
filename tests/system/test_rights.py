"""A user's rights on files, for one thread: what the kernel allows, and that nothing else of the process changes."""

import ctypes
import os
import signal
import threading
from pathlib import Path

import pytest

from podwatch.system.rights import Rights, own_rights, rights_of
from tests.support.other_users import enterable

pytestmark = pytest.mark.root
T = rights_of(54_321)


def test_what_is_made_belongs_to_the_user_and_what_is_roots_is_closed(tmp_path: Path) -> None:
    enterable(tmp_path)
    (tmp_path / "closed").mkdir(0o700)
    (tmp_path / "for-a-group").touch(0o640)
    (tmp_path / "users").mkdir()
    os.chown(tmp_path / "users", T.uid, T.gid)
    with T.applied():
        (tmp_path / "users" / "file").touch()
        for refused in (tmp_path / "closed", tmp_path / "for-a-group"):
            with pytest.raises(PermissionError):
                os.open(refused, os.O_RDONLY)
        with own_rights().applied():
            list((tmp_path / "closed").iterdir())
        with pytest.raises(PermissionError):
            list((tmp_path / "closed").iterdir())
    list((tmp_path / "closed").iterdir())
    assert (tmp_path / "users" / "file").stat().st_uid == T.uid


def test_a_group_of_the_user_counts_and_one_of_ours_does_not(tmp_path: Path) -> None:
    enterable(tmp_path)
    for name, group in (("theirs", 54_999), ("ours", os.getgroups()[0] if os.getgroups() else 0)):
        (tmp_path / name).touch(0o640)
        os.chown(tmp_path / name, 0, group)
    with Rights(T.uid, T.gid, (54_999,)).applied():
        os.close(os.open(tmp_path / "theirs", os.O_RDONLY))
        with pytest.raises(PermissionError):
            os.open(tmp_path / "ours", os.O_RDONLY)


def test_only_this_thread_and_those_that_it_starts(tmp_path: Path) -> None:
    enterable(tmp_path)
    (tmp_path / "closed").touch(0o600)
    earlier, begin = [], threading.Event()

    def opens() -> bool:
        try:
            os.close(os.open(tmp_path / "closed", os.O_RDONLY))
        except PermissionError:
            return False
        return True

    def wait_and_open() -> None:
        begin.wait()
        earlier.append(opens())

    before = threading.Thread(target=wait_and_open)
    before.start()
    started: list[bool] = []
    with T.applied():
        begin.set()
        before.join()
        after = threading.Thread(target=lambda: started.append(opens()))
        after.start()
        after.join()
    assert (earlier, started) == ([True], [False])
    assert set(os.getgroups()) == set(own_rights().groups)


def test_it_still_dies_with_its_parent_and_can_be_looked_at() -> None:
    libc = ctypes.CDLL(None)
    now = ctypes.c_int()
    libc.prctl(1, signal.SIGUSR1)
    try:
        with T.applied():
            libc.prctl(2, ctypes.byref(now))
            inside = now.value
        libc.prctl(2, ctypes.byref(now))
        assert (inside, now.value, libc.prctl(3)) == (signal.SIGUSR1, signal.SIGUSR1, 1)
    finally:
        libc.prctl(1, 0)
