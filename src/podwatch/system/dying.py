"""A child that never outlives the process it works for."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """A session of our own, and SIGKILL for us when ``parent`` (the thread of it that started us) ends. 0: whoever."""
    with contextlib.suppress(OSError):
        os.setsid()
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """SIGKILL for us when ``parent`` (the thread of it that started us) ends, without a session of our own."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)  # it died before we asked to be told
