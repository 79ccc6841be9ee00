"""Work in a forked process, to be killed at a point of its own."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable


def fork(work: Callable[[], None]) -> int:
    """The child's pid; it exits with 0, or with 1 and a traceback."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def in_child(work: Callable[[], None]) -> int:
    """The same, waited for; the exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])


def kill(pid: int) -> None:
    """SIGKILL, unless it has just ended by itself: a process that somebody else waits for may be gone at any time."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
