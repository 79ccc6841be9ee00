"""A machine whose cores are all busy."""

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

LOOP = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True:\n    pass"
CAP_SYS_NICE = 23


@contextlib.contextmanager
def busy_cores(per_core: int = 2) -> Iterator[list[int]]:
    """Loops at ordinary priority on every core that we may use; yields their pids."""
    cores = sorted(os.sched_getaffinity(0))
    loops = [
        subprocess.Popen([sys.executable, "-S", "-c", LOOP, str(core)], stdout=subprocess.PIPE)
        for core in cores * per_core
    ]
    try:
        for loop in loops:
            assert loop.stdout is not None
            loop.stdout.readline()
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


@contextlib.contextmanager
def without_nice_right() -> Iterator[None]:
    """This thread may not lower a nice value meanwhile, as in a container; what it starts lacks nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    before = data[0]
    data[0] = before & ~(1 << CAP_SYS_NICE)
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = before
        assert libc.capset(header, data) == 0
