"""A right that a container lacks."""

import contextlib
import ctypes
from collections.abc import Iterator

CAP_SYS_NICE = 23


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
