"""A child that never outlives the process it works for."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Start a new session, and get SIGKILL when ``parent`` (its thread that started us) ends. 0: any parent."""
    with contextlib.suppress(OSError):
        os.setsid()
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """Get SIGKILL when ``parent`` (its thread that started us) ends, without a new session."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)  # it died before the request
