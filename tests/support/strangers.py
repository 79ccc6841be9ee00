"""Another user of the pod, without rights: a process of a uid that owns nothing else here. Needs root."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.forking import fork

needs_root = pytest.mark.root
UID = 1_000_000 + os.getpid()
"""A number without an account, of this test process alone."""


def become(uid: int = UID) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def as_stranger(work: Callable[[], None], uid: int = UID) -> int:
    """Do it as another user; the exit code (0, or 1 with a traceback on stderr)."""

    def child() -> None:
        become(uid)
        work()

    return os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1])


@contextlib.contextmanager
def staying(work: Callable[[], object], uid: int = UID) -> Iterator[int]:
    """The pid of another user's process that has done ``work`` and lives until the end of the block."""
    ready_r, ready_w = os.pipe()

    def child() -> None:
        os.close(ready_r)
        become(uid)
        kept = work()
        os.write(ready_w, b"x")
        while kept is not os:
            signal.pause()

    pid = fork(child)
    os.close(ready_w)
    try:
        assert os.read(ready_r, 1) == b"x"
        yield pid
    finally:
        os.close(ready_r)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """One that every user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="podwatch-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
