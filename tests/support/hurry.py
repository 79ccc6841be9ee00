"""Upload children give way to everything. Among the other tests of a busy machine they would not move at all."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import children


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
