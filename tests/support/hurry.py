"""Upload children give way to everything. Among the other tests of a busy machine they would not move at all."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from podwatch.system import procfs


def children(pid: int) -> list[int]:
    """Of every thread of it: a look at each process of the machine, ten times a second, costs much more."""
    try:
        lists = [task.joinpath("children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # a thread has just ended, or a kernel without these lists
        return [p for p in procfs.all_pids() if (stat := procfs.read_stat(p)) is not None and stat.parent_pid == pid]
    return [int(word) for words in lists for word in words.split()]


def hurry(pid: int) -> None:
    """Ordinary priority for the children of ``pid``, where we may give it."""
    for child in children(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{child}/autogroup").write_text("0")
            os.setpriority(os.PRIO_PROCESS, child, 0)


@contextlib.contextmanager
def hurrying() -> Iterator[None]:
    """For our own children, until the end of the block."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.1):
            hurry(os.getpid())

    thread = threading.Thread(target=work, name="hurry", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
